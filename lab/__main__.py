"""The commands for te-parity's own developers, one function each: ``python -m lab``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from parity.cli import CORES, Precisions, Processes, ReportFile, listed, main
from parity.cli.shared import add_command
from parity.user_error import UserError

app = typer.Typer(
    help="Measure te-parity itself: what it detects and names, and what it costs.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


def _complete_studies(incomplete: str) -> list[tuple[str, str]]:
    """Return the studies whose names begin with this text, each with its topic."""
    from lab.studies.catalogue import STUDIES

    return [(name, what) for name, what in STUDIES.items() if name.startswith(incomplete)]


@add_command(
    app,
    "python -m lab study",
    "python -m lab study names --quick",
    "python -m lab study training_drift --set steps=20",
)
def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Studies to run; without any, list them.", autocompletion=_complete_studies),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Each of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: less than a minute each.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Compute again what other code computed.")] = False,
    options: Annotated[list[str] | None, typer.Option("--set", help="A study's option: steps=20; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the reports [reports/studies].")] = None,
) -> None:
    """Run numerical studies and write their reports. The same command goes on with one that was interrupted."""
    from lab.studies import command as studies
    from lab.studies.catalogue import STUDIES

    studies.run(list(STUDIES) if every else names or [], quick, again, options or [], output)


@add_command(
    app,
    "python -m lab zoo",
    'python -m lab zoo --bugs "norm*" --precision bf16',
    "python -m lab zoo --sizes small --seeds 3 -n 8",
)
def zoo(
    bugs: Annotated[
        str, typer.Option(help="Only bugs, hosts or groups of these names: shell patterns, with commas.")
    ] = "*",
    precisions: Precisions = None,
    sizes: Annotated[str, typer.Option(help="small, large or both, separated by a comma.")] = "",
    seeds: Annotated[
        str, typer.Option(help="3 for the seeds 0 to 2; 3,1 for 3 of the first size and 1 of the next.")
    ] = "1",
    workers: Processes = 1,
    out: ReportFile = Path("reports/zoo.md"),
) -> None:
    """Plant known bugs and write what is detected.

    The same command goes on with a run that was interrupted.
    """
    from lab.zoo import trial
    from parity.plugin.options import check_file

    check_file(out, "--out")
    if find_spec("matplotlib") is None:
        raise UserError("the zoo's plot needs matplotlib: pip install 'te-parity[studies]'")
    plan, left_out = trial.planned(bugs, listed(",".join(precisions or ())), listed(sizes), _counts(seeds))
    verdicts = trial.run(plan, out.with_suffix(".jsonl"), workers)
    from lab.zoo import report  # draws with matplotlib

    print(f"report: {report.write(verdicts, plan, left_out, out)}")


@add_command(
    app,
    "python -m lab kernel-freedoms",
    "python -m lab kernel-freedoms --seeds 3 -n 8",
)
def kernel_freedoms(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 1,
    workers: Processes = CORES,
    out: ReportFile = Path("reports/kernel_freedoms.md"),
) -> None:
    """Report how other right kernels may round.

    The report also shows what it costs to allow this, on the CPU kernels.
    """
    from lab.zoo import trial
    from parity.plugin.options import check_file

    check_file(out, "--out")
    print(f"report: {trial.run_on_choices(seeds, workers, out)}")


@add_command(
    app,
    "python -m lab noise default.jsonl truncated.jsonl --alike default.jsonl --alike real.jsonl",
)
def noise(
    others: Annotated[list[Path], typer.Argument(help="Records of the same right pairs under various kernels.")],
    alike: Annotated[list[Path], typer.Option(help="Records of kernels that round alike; repeatable.")],
    output: Annotated[Path, typer.Option("-o", "--out", help="The table.")] = Path("noise.json"),
) -> None:
    """Measure by how much right kernels of the same port differ, which --against takes for noise."""
    from parity.measuring import calibration

    print(f"{calibration.measure_noise(others, alike, output):,} growths\ntable: {output}")


@add_command(
    app,
    "TE_TESTS=~/TransformerEngine python -m lab nvidia-tests --sample 500",
    "python -m lab nvidia-tests --only attention/ --gpu blackwell",
    name="nvidia-tests",
)
def nvidia_tests(
    sample: Annotated[int, typer.Option(min=0, help="How many tests are drawn; 0 for all.")] = 500,
    gpu: Annotated[str, typer.Option(help="GPUs to emulate.")] = "hopper,blackwell",
    only: Annotated[str, typer.Option(help="Files whose names match this regular expression.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    workers: Processes = CORES,
    seconds: Annotated[
        float | None, typer.Option(help="Of processor time, for each test [30 in a sample, 120 if all are run].")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB, for each test.")] = 6.0,
    folder: Annotated[Path, typer.Option(help="Where outcomes are kept; a later run continues there.")] = Path(
        "build/nvidia-tests"
    ),
    on_gpu: Annotated[
        str, typer.Option(help="What pytest -v printed on a real GPU, to be told beside: hopper=FILE,...")
    ] = "",
    report: Annotated[Path, typer.Option(help="Markdown.")] = Path("reports/nvidia_tests.md"),
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report what has been run, and run nothing.")
    ] = False,
) -> None:
    """Run NVIDIA's own tests of TE on the CPU kernels."""
    from lab.nvidia_tests import checkout, command
    from lab.nvidia_tests.measure import Limits

    place = os.environ.get(checkout.VARIABLE)
    limits = Limits(seconds or (30.0 if sample else 120.0), memory)
    real = {name: Path(file) for name, _, file in (each.partition("=") for each in listed(on_gpu))}
    if not all(name in gpu.split(",") and file.is_file() for name, file in real.items()):
        raise UserError(f"--on-gpu is {on_gpu!r}, but must name files by emulated GPUs: hopper=FILE,blackwell=FILE")
    gpus = gpu.split(",")
    print(command.run(place, folder, report, gpus, sample or None, seed, workers, limits, only, real, report_only))
    print(f"report: {report}")


@add_command(
    app,
    "python -m lab same old.jsonl new.jsonl",
    "python -m lab same before/ after/",
)
def same(
    old: Annotated[Path, typer.Argument(help="A record (JSON lines), or a folder of records.")],
    new: Annotated[Path, typer.Argument(help="What another version of parity recorded for the same runs.")],
) -> None:
    """Tell whether two versions agree in numbers and words. The exit code is 1 if not."""
    from lab import same as ruler

    comparison = ruler.compare(old, new)
    print(ruler.draw(comparison))
    raise typer.Exit(1 if comparison.differences else 0)


def _counts(text: str) -> list[int]:
    if not all(count.isdecimal() for count in listed(text)):
        raise UserError(f"--seeds is {text!r}, but must be one or more counts, separated by commas")
    return [int(count) for count in listed(text)]


if __name__ == "__main__":
    main(commands=app)
