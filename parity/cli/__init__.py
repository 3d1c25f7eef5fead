"""The command line, with one function for each command. Heavy imports are postponed until they are needed."""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from parity import shown
from parity.cli import shared
from parity.cli.shared import add_command
from parity.machine import devices
from parity.user_error import UserError

MISTAKE = 2
OWN_PROCESS = "own process"  # the context's object if this process runs nothing but the command
CORES = devices.cores()

app = typer.Typer(
    help="Tell whether a port from PyTorch to TransformerEngine is right, and if not, what is wrong.",
    epilog="\b\nExamples:\n"
    "  parity run my_pairs.py            compare your pairs, and write reports/parity.md\n"
    "  parity suggest-map my_pairs.py    propose a weight map for a pair that has none\n"
    "  parity run --help                 what a command does; each has examples\n"
    "  parity --install-completion       complete commands, precisions and pairs in your shell",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
Paths = Annotated[
    list[str] | None,
    typer.Argument(
        help="Files or folders of pairs, or pytest ids; without any, the default suite.",
        autocompletion=shared.pairs,
    ),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "--precisions",
        "-p",
        help="fp32,bf16, or repeat for several; without any, all.",
        autocompletion=shared.precisions,
    ),
]
Target = Annotated[
    str, typer.Argument(help="FILE::PAIR, or FILE if it declares one pair.", autocompletion=shared.pairs)
]
OnePrecision = Annotated[str, typer.Option("-p", "--precision", help="The precision to run in.")]
SizeText = Annotated[str, typer.Option(help="Arguments of the pair: layers=3; or a size's number.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and inputs.")]
BackendName = Annotated[str, typer.Option(envvar="PARITY_BACKEND", help="auto, gpu or cpu.")]
ReportFile = Annotated[Path, typer.Option("-o", "--out", help="The report; its record is beside it.")]
Processes = Annotated[int, typer.Option("-n", min=1, help="Processes, with one thread each.")]


@add_command(
    app,
    "parity run",
    "parity run my_pairs.py -p bf16,fp8_current --seeds 20",
    'parity run my_pairs.py::mlp -k "bf16 and not 2x64" -n 4',
)
def run(
    context: typer.Context,
    paths: Paths = None,
    precision: Precisions = None,
    backend: Annotated[str | None, typer.Option(envvar="PARITY_BACKEND", help="auto, gpu or cpu.")] = None,
    seeds: Annotated[str | None, typer.Option(help="20 means seeds 0 to 19; 0,3,7 lists them; 0 means seed 0.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, flash, fused, unfused, or all in turn.")] = None,
    sizes: Annotated[str | None, typer.Option(help="small, large: large sizes as well, or auto: on a GPU.")] = None,
    determinism: Annotated[bool, typer.Option("--determinism", help="Run candidates again, compare bytes.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Judge what passes stage by stage as well.")] = False,
    workers: Annotated[str | None, typer.Option("-n", help="Processes, or auto for as many as fit [auto].")] = None,
    timeout: Annotated[
        str | None, typer.Option(help="Seconds for an item, or to collect a file; 0 for none [600].")
    ] = None,
    diagnosis: Annotated[str | None, typer.Option(help="yes, no, or seconds for a failure's cause [30].")] = None,
    calibration: Annotated[Path | None, typer.Option(help="A table of limits that parity calibrate made.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder of the report [reports].")] = None,
    name: Annotated[str | None, typer.Option(help="The report's name [parity].")] = None,
    keyword: Annotated[str | None, typer.Option("-k", help="Only items that match, as pytest's -k.")] = None,
    last_failed: Annotated[bool, typer.Option("--lf", help="Only what failed last; all if nothing did.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that did not end.")] = False,
    steps: Annotated[str | None, typer.Option(help="Train every pair for so many steps, 0 for none.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Train pairs that declare no steps, for 3.")] = False,
    decoding: Annotated[bool, typer.Option("--decoding", help="Let candidates decode, too, with TE's cache.")] = False,
    engine: Annotated[str | None, typer.Option(help="local, ray (a Ray cluster), or an installed one [local].")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; local starts one here.")] = None,
    save_as: Annotated[str | None, typer.Option(help="Keep the record as a baseline of this name.")] = None,
    against: Annotated[str | None, typer.Option(help="A baseline or a record: tell what changed since.")] = None,
    keep_runs: Annotated[str | None, typer.Option(help="How many earlier runs are kept [20].")] = None,
    ci: Annotated[str | None, typer.Option(help="junit, summary, annotations; all or none [all].")] = None,
    strict: Annotated[bool | None, typer.Option(help="Skips, and comparisons that prove nothing, fail.")] = None,
    unwritten: Annotated[bool, typer.Option(help="Run candidates again, their memory full of NaN.")] = True,
    probe_weights: Annotated[
        bool, typer.Option("--probe-weights", help="Compare fresh models with others, too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON, all else to stderr.")] = False,
) -> None:
    """Compare pairs and write a report. The exit code is 1 if one fails, or has regressed since a baseline."""
    from parity.cli import suite
    from parity.plugin.options import parse_sizes

    arguments = suite.as_plugins(
        precision,
        backend,
        seeds,
        attention,
        determinism,
        stages,
        timeout,
        diagnosis,
        calibration,
        report,
        name,
        resume,
        steps,
    )
    arguments += [] if sizes is None else [f"--parity-sizes={parse_sizes(sizes)}"]
    arguments += suite.engine(engine, address) + suite.kept(save_as, against, keep_runs, ci)
    files = suite.files(paths)
    workers = workers or suite.workers_of_project(files)
    arguments += suite.workers(workers) + (["-k", keyword] if keyword else []) + ["--lf"] * last_failed
    arguments += [] if unwritten else ["--parity-unwritten=no"]
    asked = {"probe-weights": probe_weights, "training": training, "decoding": decoding}
    arguments += [f"--parity-{option}=yes" for option, is_asked in asked.items() if is_asked]
    arguments += [] if strict is None else [f"--parity-strict={'yes' if strict else 'no'}"]
    is_own = context.obj == OWN_PROCESS
    with suite.verdicts_on_stdout(json) as further:
        arguments += further
        code = suite.run_in_this_process(files, arguments, workers) if is_own else suite.run(files, arguments)
    raise typer.Exit(code)


@add_command(
    app,
    "parity list",
    "parity list my_pairs.py",
    name="list",
)
def list_cases(paths: Paths = None) -> None:
    """Show the cases, without loading TransformerEngine."""
    from parity.cli import suite

    print(suite.table(suite.cases(paths)))


@add_command(
    app,
    "parity trace my_pairs.py::llama",
    "parity trace my_pairs.py::llama -p fp8_current --gradients",
)
def trace(
    target: Target,
    precision: OnePrecision = "bf16",
    size: SizeText = "0",
    seed: Seed = 0,
    backend: BackendName = "auto",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="List the stages of the backward pass that are right as well.")
    ] = False,
) -> None:
    """Show the error that each stage of a pair adds, beside the expected one, whether the pair passes or not.

    The exit code is 1 if a stage has a larger error than rounding explains.
    """
    from parity.cli import stages
    from parity.plugin.options import parse_precision

    found = stages.trace(target, size, seed, parse_precision(precision), backend, gradients)
    raise typer.Exit(0 if found else 1)


@add_command(
    app,
    "parity coverage my_pairs.py::gemma",
    "parity coverage my_pairs.py::gemma -p fp8_current --size layers=1,hidden=256 --strict",
)
def coverage(
    target: Target,
    precision: OnePrecision = "bf16",
    size: SizeText = "0",
    seed: Seed = 0,
    backend: BackendName = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if one passes that the pair does not accept by its title.")
    ] = False,
    probe_weights: Annotated[bool, typer.Option("--probe-weights", help="With probing weights as well.")] = False,
) -> None:
    """Show which known mistakes a comparison of a pair would have passed, since nothing in it makes them matter."""
    from parity.cli import missed
    from parity.plugin.options import parse_precision

    accepted = missed.print_missed(target, size, seed, parse_precision(precision), backend, probe_weights)
    raise typer.Exit(1 if strict and not accepted else 0)


@add_command(
    app,
    "parity invariance my_pairs.py::llama",
    "parity invariance my_pairs.py::llama -p bf16,fp8_current --size layers=2,hidden=256",
)
def invariance(
    target: Target,
    precision: Precisions = None,
    size: SizeText = "0",
    seed: Seed = 0,
    backend: BackendName = "auto",
) -> None:
    """Show whether results depend on how tokens were batched, padded, packed, cut, decoded or recomputed, and why.

    The exit code is 1 if they do, and neither the recipe, nor what kernels may do, nor the reference explains it.
    """
    from parity.cli import axes
    from parity.plugin.options import parse_precisions

    chosen = parse_precisions(",".join(precision or ()))
    raise typer.Exit(0 if axes.print_axes(target, size, seed, chosen, backend) else 1)


@add_command(
    app,
    "parity card my_pairs.py::llama -p bf16,fp8_current",
    "parity card llama.card.yaml --check",
)
def card(
    target: Annotated[str, typer.Argument(help="FILE::PAIR, FILE if it declares one, or a card to check.")],
    precision: Precisions = None,
    seeds: Annotated[str, typer.Option(help="3 means seeds 0 to 2; 0,3,7 lists them.")] = "3",
    output: Annotated[Path | None, typer.Option("-o", "--out", help="The card [PAIR.card.yaml].")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare again what a card says: what has changed?")] = False,
    coverage: Annotated[bool, typer.Option(help="Tell which known mistakes would have passed.")] = True,
    backend: BackendName = "auto",
) -> None:
    """Write down what comparisons of a pair prove, as YAML and as a page, to be committed beside the model.

    The exit code is 1 if something fails or, with --check, if something is worse than the card says.
    """
    from parity.cli import cards
    from parity.plugin.options import parse_precisions, parse_seeds
    from parity.settings import PRECISION_NAMES

    if check:
        if precision or output:
            raise UserError("--check compares what the card says; leave out -p and -o")
        raise typer.Exit(0 if cards.check(Path(target), backend) else 1)
    chosen = parse_precisions(",".join(precision or ()), "-p") or PRECISION_NAMES
    raise typer.Exit(0 if cards.write(target, chosen, parse_seeds(seeds, "--seeds"), backend, output, coverage) else 1)


@add_command(
    app,
    "parity minimize my_pairs.py::llama -p fp8_current -o smaller.py",
    'parity minimize "my_pairs.py::llama[bf16-2x1024x512]"',
    name="minimize",
)
def minimize(
    target: Target,
    precision: OnePrecision = "bf16",
    size: Annotated[str, typer.Option(help="Arguments of the pair: layers=3; or a size's number [all in turn].")] = "",
    seed: Seed = 0,
    backend: BackendName = "auto",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file to write [standard output].")] = None,
) -> None:
    """Find the smallest case that fails as a pair does, and print it as one file to paste into an issue.

    Interrupted, it prints the smallest case so far. The exit code is 1 if that does not fail in a new process, too.
    """
    from parity.cli import smallest
    from parity.plugin.options import parse_precision

    fails = smallest.print_smallest(target, size, seed, parse_precision(precision), backend, out)
    raise typer.Exit(0 if fails else 1)


@add_command(
    app,
    "parity recipes my_pairs.py::llama",
    "parity recipes my_pairs.py::llama -p fp8_current,my_recipes.py::mine --report reports/recipes",
    name="recipes",
)
def advise_on_recipes(
    target: Target,
    precision: Precisions = None,
    size: SizeText = "0",
    seeds: Annotated[str, typer.Option(help="3 means seeds 0 to 2; 0,3,7 lists them.")] = "3",
    keep: Annotated[
        int | None, typer.Option(min=1, help="Layers to keep unquantized [half of the error, at most a quarter].")
    ] = None,
    by: Annotated[
        str, typer.Option(help="Rank layers by outputs or gradients [gradients if there is only a loss].")
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Folder for a page, a plot and JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    backend: BackendName = "auto",
) -> None:
    """Show what each recipe costs in a pair, and which layers to keep in BF16, as the model of rounding computes it."""
    from parity.cli import recipes
    from parity.plugin.options import parse_precisions, parse_seeds

    chosen = parse_precisions(",".join(precision or ()))
    print(recipes.advise(target, chosen, size, parse_seeds(seeds), keep, by, report, as_json, backend))


@add_command(
    app,
    "parity judge dump --reference my_pairs.py::llama",
    "parity judge dump --reference my_pairs.py::llama --size 1 --step 100 -p fp8_current",
)
def judge(
    folder: Annotated[Path, typer.Argument(help="A folder that parity.recording has written, or TE's DumpTensors.")],
    reference: Annotated[
        str,
        typer.Option(
            help="FILE::PAIR: what the recorded model should compute. DumpTensors' folders need none.",
            autocompletion=shared.pairs,
        ),
    ] = "",
    precision: Annotated[str, typer.Option("-p", "--precision", help="If it is not as recorded.")] = "",
    size: Annotated[
        str, typer.Option(help="The recorded model's arguments of the pair: small=False; or a size's number.")
    ] = "0",
    step: Annotated[int | None, typer.Option(help="Judge only this step.")] = None,
    rank: Annotated[int | None, typer.Option(help="Judge only this rank.")] = None,
    diagnosis: Annotated[float, typer.Option(help="Seconds for the search for a cause, 0 for no limit.")] = 0.0,
    backend: BackendName = "auto",
) -> None:
    """Judge recorded passes, stage by stage, without running the model. The exit code is 1 if anything is wrong."""
    from parity.cli import recordings

    is_right = recordings.judge(folder, reference, precision, size, step, rank, diagnosis, backend)
    raise typer.Exit(0 if is_right else 1)


@add_command(
    app,
    "parity bisect dump_before dump_after",
    "parity bisect dump_before dump_after --reference my_pairs.py::llama",
)
def bisect(
    first: Annotated[
        Path,
        typer.Argument(help="A folder that parity.recording has written, TE's DumpTensors or SGLang's dumper."),
    ],
    second: Annotated[Path, typer.Argument(help="Another one, of the same step in another environment.")],
    reference: Annotated[
        str, typer.Option(help="FILE::PAIR: tells which of the two is right.", autocompletion=shared.pairs)
    ] = "",
    size: Annotated[
        str, typer.Option(help="The recorded model's arguments of the pair: small=False; or a size's number.")
    ] = "0",
    backend: BackendName = "auto",
) -> None:
    """Show the first value in which two recordings differ. The exit code is 1 if one is wrong there."""
    from parity.cli import recordings

    raise typer.Exit(0 if recordings.bisect(first, second, reference, size, backend) else 1)


@add_command(
    app,
    "parity environment",
    "parity environment dump_before dump_after",
    "parity environment > here.json; parity environment there.json here.json",
)
def environment(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Recordings, or files that this command has written: none, one or two.")
    ] = None,
) -> None:
    """Show what numbers depend on here, or in what two environments differ. The exit code is 1 if they do."""
    from parity.cli import recordings

    raise typer.Exit(0 if recordings.environment(paths or []) else 1)


@add_command(
    app,
    "parity port path/to/model > my_port.py",
    "parity port qwen3 --no-run > my_port.py",
)
def port(
    source: Annotated[str, typer.Argument(help="A model's folder, its config.json, or a type such as qwen3.")],
    run: Annotated[bool, typer.Option(help="Compare the port with the model, in a small size.")] = True,
    diagnosis: Annotated[float, typer.Option(help="Seconds for the search for a cause, 0 for no limit.")] = 30.0,
) -> None:
    """Write a port of a Hugging Face model to TE, and run it. The exit code is 1 if it is not right yet."""
    from parity.cli import ports

    raise typer.Exit(0 if ports.port(source, run, diagnosis) else 1)


@add_command(
    app,
    "parity suggest-map my_pairs.py::mlp",
    "parity suggest-map my_pairs.py::mlp --afresh --max-runs 1000",
    "parity suggest-map my_pairs.py::mlp --ranks tp=2",
    name="suggest-map",
)
def suggest_map(
    target: Target,
    size: Annotated[int, typer.Option(help="Which of the pair's sizes, from 0.")] = 0,
    seed: Seed = 0,
    backend: BackendName = "auto",
    afresh: Annotated[bool, typer.Option("--afresh", help="Ignore the entries that the pair has.")] = False,
    max_runs: Annotated[int, typer.Option(help="Run at most so many alternatives.", min=1)] = 300,
    ranks: Annotated[list[str] | None, typer.Option(help="tp=2,dp=2: how ranks divide weights; repeatable.")] = None,
) -> None:
    """Propose a weight map for a pair, or complete it. The exit code is 1 if something is left open."""
    from parity.cli import reports

    raise typer.Exit(0 if reports.suggest(target, size, seed, backend, not afresh, max_runs, ranks or ()) else 1)


@add_command(
    app,
    "parity convert my_pairs.py::llama model.safetensors te.safetensors",
    "parity convert my_pairs.py::llama path/to/llama te --shard-size 5GB",
    "parity convert my_pairs.py::llama te.safetensors back.safetensors --to reference --dtype bf16",
)
def convert(
    target: Annotated[str, typer.Argument(help="FILE::PAIR, or FILE if it declares one pair.")],
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="*.safetensors, *.index.json, a file of torch.save, or a folder.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="*.safetensors, or a new folder.")],
    to: Annotated[str, typer.Option(help="te, or reference for the way back.")] = "te",
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16; by default as the source has it.")] = "",
    size: Annotated[
        str,
        typer.Option(help="The pair's arguments for this checkpoint: hidden=4096,heads=32; or a size's number."),
    ] = "",
    prefix: Annotated[
        list[str] | None,
        typer.Option(help='What keys of the reference\'s checkpoint begin with: "model.", "model.layers.3.=layer."'),
    ] = None,
    te_prefix: Annotated[list[str] | None, typer.Option(help="The same for TE's checkpoint.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help='Keys to leave out: "*.inv_freq"; repeatable.')] = None,
    within: Annotated[str, typer.Option(help="The entry that holds the model, if not all of SRC does: model.")] = "",
    shard_size: Annotated[
        str, typer.Option(help="Write a folder of files of at most this size, with their index: 5GB, 500MiB.")
    ] = "",
    form: Annotated[
        str, typer.Option("--format", help="safetensors, or dcp for a new folder of torch.distributed.checkpoint.")
    ] = "safetensors",
    checksums: Annotated[
        bool, typer.Option("--checksums/--no-checksums", help="Compute SHA-256 of all files, and check SRC by its own.")
    ] = True,
    backend: BackendName = "auto",
) -> None:
    """Convert a checkpoint to TE's layout by a pair's weight map, or back; nothing is written unless all of it fits."""
    from parity.cli import conversion

    print(
        conversion.convert(
            *(target, source, destination, to, dtype, size),
            *(prefix or (), te_prefix or (), ignore or ()),
            *(within, shard_size, form),
            checksums,
            backend,
        )
    )


@add_command(
    app,
    "parity prove path/to/llama te --port my_pairs.py::llama --size layers=32,hidden=4096",
    "parity prove path/to/llama --port my_pairs.py::llama -p fp8_current --text page.txt",
)
def prove(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The reference's checkpoint, as for parity convert.")],
    converted: Annotated[
        Path | None, typer.Argument(metavar="[DST]", help="TE's; by default SRC is converted by the pair's map.")
    ] = None,
    port: Annotated[
        str, typer.Option("--port", help="FILE::PAIR, or FILE if it declares one pair.", autocompletion=shared.pairs)
    ] = ...,  # type: ignore[assignment]
    precision: Annotated[
        str, typer.Option("-p", "--precision", help="bf16, ...", autocompletion=shared.precisions)
    ] = "bf16",
    size: Annotated[str, typer.Option(help="The pair's arguments for this checkpoint: layers=32,hidden=4096.")] = "",
    ids: Annotated[Path | None, typer.Option(help="Token ids: *.pt, *.json, or a text with a row per line.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text, for the tokenizer in SRC.")] = None,
    prefix: Annotated[list[str] | None, typer.Option(help="As for parity convert.")] = None,
    te_prefix: Annotated[list[str] | None, typer.Option(help="As for parity convert.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="As for parity convert.")] = None,
    within: Annotated[str, typer.Option(help="The entry of SRC that holds the model, if not all of it does.")] = "",
    diagnosis: Annotated[float, typer.Option(min=0.0, help="Seconds for the first cause, 0 for no limit.")] = 30.0,
    backend: BackendName = "auto",
) -> None:
    """Prove a port on a checkpoint's own weights, one layer in memory at a time. The exit code is 1 if one is wrong."""
    from parity.cli import proof

    named = prefix or (), te_prefix or (), ignore or (), within
    is_right = proof.prove_checkpoint(source, converted, port, precision, size, ids, text, *named, diagnosis, backend)
    raise typer.Exit(0 if is_right else 1)


@add_command(
    app,
    "parity report reports/parity.jsonl",
    "parity report 7 --against good",
)
def report(
    file: Annotated[str, typer.Argument(help="The JSON lines that a run wrote, an earlier run's number, a baseline.")],
    output: Annotated[Path | None, typer.Option("-o", "--out", help="Where to draw it [beside the file].")] = None,
    against: Annotated[str | None, typer.Option(help="An older run or a baseline: draw what changed since.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON instead.")] = False,
) -> None:
    """Draw the report of a run again, or what changed.

    The exit code is 1 if an item fails, or, with --against, if one newly fails or has regressed.
    """
    from parity.cli import reports
    from parity.report.earlier import find

    found = find(file, Path(), "FILE")
    if json:
        if against is not None or output is not None:
            raise UserError("--json prints the verdicts of one run; leave out -o and --against")
        raise typer.Exit(0 if reports.print_verdicts(found) else 1)
    older = None if against is None else find(against, Path(), "--against")
    passed = reports.draw(found, output) if older is None else reports.compare(found, older, output)
    raise typer.Exit(0 if passed else 1)


@add_command(
    app,
    "parity guide",
    "parity guide > SKILL.md",
)
def guide() -> None:
    """Print how to port to TransformerEngine with te-parity: one page for newcomers, and a skill for coding agents."""
    print((resources.files("parity") / "SKILL.md").read_text(encoding="utf-8"), end="")


@add_command(
    app,
    "parity explain PAR201",
    "parity explain norm-eps",
)
def explain(name: Annotated[str, typer.Argument(help="A finding's code or title.")]) -> None:
    """Print what a finding means, how a port usually comes by it, and how to repair it."""
    from parity.cli import findings

    print(findings.explain(name))


@add_command(
    app,
    "parity doctor",
    "PARITY_EMULATED_GPU=blackwell parity run -p mxfp8",
)
def doctor() -> None:
    """Show what this machine can run.

    It lists the precisions that this GPU, an Ada, a Hopper and a Blackwell have, and what the others need.
    """
    from parity.cli import machine

    print(machine.diagnose())


@add_command(
    app,
    "parity train my_pairs.py::mlp",
    "parity train my_pairs.py::mlp --steps 100 -p bf16 --seeds 4",
    "parity train my_pairs.py --band 0 -o reports/mine.md",
)
def train(
    paths: Annotated[
        list[str],
        typer.Argument(help="Files of pairs, or pytest ids: my_pairs.py::mlp.", autocompletion=shared.pairs),
    ],
    steps: Annotated[int, typer.Option(help="How many steps.")] = 20,
    precision: Precisions = None,
    backend: BackendName = "auto",
    seeds: Annotated[str, typer.Option(help="4 means seeds 0 to 3; 0,3,7 lists them.")] = "1",
    out: ReportFile = Path("reports/training.md"),
    band: Annotated[int, typer.Option(help="How many random trainings make up a curve's band; 0: no band.")] = 6,
) -> None:
    """Train pairs step by step and draw their losses. The exit code is 1 if a step is wrong."""
    from parity.cli import suite
    from parity.plugin.options import check_file, parse_backend, parse_precisions, parse_seeds

    check_file(out, "--out")
    chosen = parse_precisions(",".join(precision or ()))
    passed = suite.train(paths, steps, chosen, parse_seeds(seeds), parse_backend(backend), out, band)
    raise typer.Exit(0 if passed else 1)


@add_command(
    app,
    "parity exec train.py",
    "torchrun --nproc-per-node 2 -m parity exec train.py",
    "parity exec -m pytest my_tests",
    name="exec",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def execute(
    script: Annotated[Path, typer.Argument(help="A Python script that imports TransformerEngine.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
) -> None:
    """Run your TransformerEngine script on a CPU. The device cuda then means the CPU."""
    if not is_module and not script.is_file():
        raise UserError(f"there is no script {script}")
    from parity import te
    from te_on_cpu import EmulationError
    from te_on_cpu.loading.script import run_program

    reported = (UserError, EmulationError, BrokenPipeError)  # by main, as for every command
    with te.on_cpu():
        code = run_program(str(script), arguments or (), is_module, raised=reported)
    if code:
        raise typer.Exit(code)


@add_command(
    app,
    "parity calibrate",
    "parity calibrate my_right_pairs.py --seeds 8 --report reports/fit.md",
    "parity run --calibration parity-calibration.json",
)
def calibrate(
    paths: Paths = None,
    precision: Precisions = None,
    backend: BackendName = "auto",
    seeds: Annotated[str, typer.Option(help="4 means seeds 0 to 3; 0,3,7 lists them.")] = "4",
    draws: Annotated[int, typer.Option(min=0, help="Random kernels per case, precision and seed.")] = 2,
    workers: Processes = CORES,
    output: Annotated[Path, typer.Option("-o", "--out", help="The table.")] = Path("parity-calibration.json"),
    report: Annotated[Path | None, typer.Option(help="Markdown that shows the fit.")] = None,
    accept_wider: Annotated[
        bool, typer.Option("--accept-wider", help="Also write limits far outside the packaged ones.")
    ] = False,
) -> None:
    """Measure the limits on this machine. The pairs must be known to be right."""
    from parity.case.recipes import spell_precision
    from parity.cli import suite
    from parity.measuring import calibration
    from parity.plugin.options import check_file, parse_backend, parse_precisions, parse_seeds
    from parity.settings import PRECISION_NAMES

    check_file(output, "-o")
    if report is not None:
        check_file(report, "--report")
    chosen = tuple(map(spell_precision, parse_precisions(",".join(precision or ())) or PRECISION_NAMES))
    settings = calibration.Settings(suite.right_ports(paths), chosen, parse_seeds(seeds), draws, parse_backend(backend))
    calibration.make_table(settings, workers, output, report, accept_wider)
    print(f"table: {output}")


@add_command(
    app,
    "parity false-alarms",
    "parity false-alarms -p bf16 --seeds 100-149 -n 8",
)
def false_alarms(
    paths: Paths = None,
    precision: Precisions = None,
    backend: BackendName = "auto",
    seeds: Annotated[str, typer.Option(help="100-149, or as for parity run; a size is drawn for each.")] = "100-103",
    own: Annotated[int, typer.Option(min=0, help="Use the cases' own sizes, too, at so many of the seeds.")] = 1,
    workers: Processes = CORES,
    out: ReportFile = Path("reports/false_alarms.md"),
) -> None:
    """Count how often right ports are rejected.

    They are compared on seeds, sizes and models that no limit was fitted to.
    """
    from parity import te
    from parity.case.recipes import spell_precision
    from parity.cli import suite
    from parity.measuring import false_alarms as count
    from parity.measuring.right_ports import DRAWN_MODELS
    from parity.plugin.options import check_file, parse_backend, parse_precisions, parse_seeds
    from parity.settings import PRECISION_NAMES

    check_file(out, "--out")
    chosen = tuple(map(spell_precision, parse_precisions(",".join(precision or ())) or PRECISION_NAMES))
    ports = (*suite.right_ports(paths), *(() if paths else (DRAWN_MODELS,)))
    plan = count.Plan(ports, chosen, parse_seeds(seeds), own, parse_backend(backend))
    outcomes = count.run(plan, out.with_suffix(".jsonl"), workers)
    if not outcomes:
        raise UserError("nothing was compared: no precision of these cases runs on this machine")
    count.write_report(outcomes, te.kernels(plan.backend).backend, out)
    print(f"report: {out}")


@add_command(
    app,
    "parity kernels",
    "parity kernels -k rmsnorm --minutes 2",
    "parity kernels --reference cpu",
)
def kernels(
    keyword: Annotated[str, typer.Option("-k", help="Only kernels whose name and variant contain this text.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    report: Annotated[Path, typer.Option(help="The table.")] = Path("reports/kernel-table.md"),
    reference: Annotated[str, typer.Option(help="gpu, or cpu to try the command without one.")] = "gpu",
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Minutes after which what was compared is drawn.")
    ] = None,
) -> None:
    """Compare CPU kernels with compiled ones, on a GPU."""
    from parity.measuring.kernel_table import table
    from parity.plugin.options import check_file

    check_file(report, "--report")
    if reference not in ("gpu", "cpu"):
        raise UserError(f"--reference is {reference!r}, but must be gpu or cpu")
    table.make_table(keyword, seed, report, "gpu" if reference == "gpu" else "cpu", minutes)
    print(f"report: {report}")


@add_command(
    app,
    "parity throughput",
    "parity throughput -k mlp,linear --precision bf16,fp8_current",
    "parity throughput my_pairs.py --minutes 5 -o reports/mine",
)
def throughput(
    paths: Paths = None,
    precisions: Precisions = None,
    backend: BackendName = "auto",
    sizes: Annotated[
        str, typer.Option(help="Sizes of the built-in cases: large, declared, or auto for large on a GPU.")
    ] = "auto",
    keyword: Annotated[
        str, typer.Option("-k", help="Only workloads whose name contains one of these: mlp,linear")
    ] = "",
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed passes [30 on a GPU, 5 on a CPU].")] = None,
    compiled: Annotated[
        str, typer.Option(help="Precisions in which the plain module is also compiled; all, or none.")
    ] = "all",
    minutes: Annotated[float | None, typer.Option(min=0, help="Minutes after which nothing more is begun.")] = None,
    output: Annotated[Path, typer.Option("-o", "--out", help="Folder of the report.")] = Path("reports/throughput"),
) -> None:
    """Measure time, memory and error of ports.

    Plain modules and TransformerEngine's are measured in each precision.
    """
    from parity.cli import machine, suite

    chosen, cases = ",".join(precisions or ()), suite.cases(paths) if paths else None
    print(f"report: {machine.run(cases, chosen, backend, sizes, keyword, repeats, compiled, minutes, output)}")


@add_command(
    app,
    "parity gpu-report",
    "parity gpu-report reports/gpu --minutes 20",
    "parity gpu-report --only suite,kernels --quick",
    name="gpu-report",
)
def gpu_report(
    folder: Annotated[Path, typer.Argument(help="Folder for the report.")] = Path("reports/gpu"),
    minutes: Annotated[float, typer.Option(min=0.1, help="For all steps.")] = 7.5,
    quick: Annotated[bool, typer.Option("--quick", help="Run a small part of each step.")] = False,
    backend: BackendName = "auto",
    only: Annotated[str, typer.Option(help="Only these steps: suite,kernels")] = "",
) -> None:
    """Run every check that a GPU machine allows.

    It leaves one folder with an index; the exit code is 1 if a check fails.
    """
    from parity.measuring.gpu_report import command
    from parity.plugin.options import parse_backend

    raise typer.Exit(0 if command.run(folder, minutes, quick, parse_backend(backend), listed(only)) else 1)


def listed(text: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main(own_process: bool = True, commands: typer.Typer = app) -> None:
    """Run the console script.

    Args:
        own_process: whether this process runs nothing but the command, which may then continue in a fork.
        commands: its commands.
    """
    if "_PARITY_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "1000"  # a shell takes each line for a completion, so no description may be wrapped
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character of a report or a name
    try:
        try:
            commands(obj=OWN_PROCESS if own_process else None)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except UserError as error:
        print(f"parity: {shown.text(str(error))}", file=sys.stderr)
        sys.exit(MISTAKE)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _print_no_more()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _print_no_more()
        print(f"parity: {error.strerror}: {error.filename or 'the output ends here'}", file=sys.stderr)
        sys.exit(MISTAKE)


def _print_no_more() -> None:
    """Discard the rest of standard output, which Python would otherwise try to flush again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
