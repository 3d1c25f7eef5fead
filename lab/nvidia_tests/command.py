"""Collect NVIDIA's tests, run all of them or a sample, and write the report."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.nvidia_tests import checkout, measure
from lab.nvidia_tests.measure import Collected, Limits, Outcome
from parity.measuring.record import Campaign
from parity.report.environment import made_by
from parity.report.numbers import markdown_table


def run(
    place: str | None,
    folder: Path,
    to: Path,
    gpus: Sequence[str],
    sample: int | None,
    seed: int,
    workers: int,
    limits: Limits,
    only: str,
    on_gpu: Mapping[str, Path],
    report_only: bool = False,
) -> str:
    """Run the tests, write the report, and return its table of passed and failed tests.

    Args:
        place: a checkout of TransformerEngine.
        folder: where outcomes are kept, so that a run that was killed can resume.
        to: the report.
        gpus: the GPUs to emulate.
        sample: how many tests to run, not counting skipped ones; None for all.
        seed: the seed of the sample.
        workers: how many processes to use.
        limits: the limits of a test.
        only: a regular expression; only files whose names match it are run.
        on_gpu: for each emulated GPU, a file with the output of ``pytest -v`` on a real one of its kind.
        report_only: whether to report what has been run, without running anything more.
    """
    root = checkout.find(place)
    specification = importlib.util.find_spec("transformer_engine")
    assert specification is not None
    assert specification.origin is not None
    known = checkout.jobs(root, Path(specification.origin).parent)
    jobs = [job for job in known if re.search(only, job.name)]
    version = checkout.version(root)

    def complete(name: str, result: Any, work: Sequence[Any], make: Callable[..., Any]) -> list[Any]:
        """Return all results, and keep each in the folder, from which those that exist are read."""
        campaign: Campaign[Any, Any] = Campaign(
            folder / f"{name}.jsonl", result, lambda job: {"checkout": version, **dataclasses.asdict(job)}
        )
        if report_only:
            return list(campaign.finished(work).values())
        make_one = functools.partial(make, root, folder.resolve() / "running")
        return list(campaign.complete(work, make_one, name, workers).values())

    collected = complete("collected", Collected, measure.files_of(jobs, gpus), measure.collect)
    left_out = deselected(collected, rules()["deselected"])
    portions = measure.drawn(collected, left_out, sample, seed, limits)
    results = complete("outcomes", list[Outcome], portions, measure.run)
    outcomes = [one for each in results for one in each]
    missing = len(portions) - len(results)
    real = {gpu: outcomes_on_gpu(file.read_text(encoding="utf-8")) for gpu, file in on_gpu.items()}
    text = draw(version, collected, left_out, outcomes, checkout.unnamed(root, known), limits, sample, missing, real)
    to.write_text(text, encoding="utf-8")
    return text.split("\n\n")[2]


# The report: the outcomes of NVIDIA's tests by file, by cause of failure, and by reason for not running.


_COLUMNS = ("passed", "failed", "skipped", "beyond")
_UNEXPLAINED = "not explained"
_NO_REAL = (
    "## On a real GPU\n\nThis run was given no outcomes of a real GPU (`--on-gpu`), so it says nothing about one. "
    "[What an H100 said](h100/README.md) of some of these tests is told there."
)
_DRAWN = (
    "{} tests were drawn: one from each file, and more in proportion to its number of tests. If TE's tests skip a "
    "test, the file's next one is run instead. "
)


def rules() -> dict[str, list[dict[str, str]]]:
    """Return which tests no CPU can run and why (``deselected``), and why others fail (``causes``)."""
    found: dict[str, list[dict[str, str]]] = json.loads(Path(__file__).with_name("rules.json").read_text("utf-8"))
    return found


def deselected(collected: Sequence[Collected], table: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """Return why no CPU can run a test, by job and test. A row with ``unless`` applies if that package is missing."""
    holding = [row for row in table if "unless" not in row or importlib.util.find_spec(row["unless"]) is None]
    found = {}
    for each in collected:
        for test in each.tests or (each.job.name,):
            why = next((row["why"] for row in holding if re.search(row["tests"], f"{each.job.name} {test}")), None)
            if why is not None:
                found[each.job.name, test] = why
    return found


def cause_of(outcome: Outcome, table: Sequence[Mapping[str, str]]) -> str:
    """Return the cause in the first row whose patterns match the test and its message, with the row's source."""
    for row in table:
        if re.search(row["tests"], f"{outcome.gpu} {outcome.job} {outcome.test}") and re.search(
            row.get("said", ""), outcome.why
        ):
            return f"{row['cause']} ({row['source']})"
    return _UNEXPLAINED


def outcomes_on_gpu(text: str) -> dict[str, str]:
    """Return the outcomes, by test, that ``pytest -v`` printed on a real GPU."""
    return {
        test: outcome.lower() for test, outcome in re.findall(r"^(\S+\.py::.+) (PASSED|FAILED|SKIPPED)\b", text, re.M)
    }


def draw(
    version: str,
    collected: Sequence[Collected],
    left_out: Mapping[tuple[str, str], str],
    outcomes: Sequence[Outcome],
    unnamed: Sequence[str],
    limits: Limits,
    sample: int | None,
    missing: int = 0,
    real: Mapping[str, Mapping[str, str]] = {},
) -> str:
    """Return the report, markdown.

    Args:
        version: the checkout's version.
        collected: the tests of all files.
        left_out: by job and test, why no CPU can run it.
        outcomes: the outcomes of the tests that were run.
        unnamed: files that none of NVIDIA's scripts runs.
        limits: the limits of a test.
        sample: how many tests were drawn; None for all.
        missing: how many processes, each with tests of one file, have not been run.
        real: for each emulated GPU, the outcomes of tests on a real one of its kind.
    """
    causes = rules()["causes"]
    unread = [
        each.unread for each in collected if each.unread is not None and (each.job.name, each.job.name) not in left_out
    ]
    every = [*outcomes, *unread]
    failed = [one for one in every if one.outcome == "failed"]
    caused = [
        (
            one,
            f"it fails on a real {one.gpu.capitalize()} as well"
            if _on_real(one, real) == "failed"
            else cause_of(one, causes),
        )
        for one in failed
    ]
    both = Counter((one.gpu, one.outcome, _on_real(one, real)) for one in every if _on_real(one, real))
    wrong_there = Counter(
        (gpu, test.partition("[")[0]) for gpu, tests in real.items() for test, said in tests.items() if said == "failed"
    )
    explained = Counter((one.gpu, cause) for one, cause in caused)
    left = Counter((each.gpu, why) for each in collected for why in _left_out(each, left_out))
    skipped = Counter((one.gpu, one.why) for one in every if one.outcome == "skipped")
    smaller = sorted({part for one in outcomes for part in one.smaller.split("; ") if part})
    each_failure = [
        [one.gpu, one.test, cause if cause != _UNEXPLAINED else f"{_UNEXPLAINED}: {one.why}"] for one, cause in caused
    ]
    sections = [
        "# NVIDIA's own tests on the CPU kernels",
        f"NVIDIA's tests of commit {version} with TransformerEngine "
        f"{metadata.version('transformer_engine')} and torch {metadata.version('torch')}, on emulated GPUs. "
        f"{_DRAWN.format(sample) if sample else ''}*Runnable* tests are those that passed or failed. The share of "
        "all tests weights each file by its number of tests. PyTorch's own products of FP32 tensors were rounded to "
        "TF32, as in NVIDIA's container; its norms, layer norms, attention, losses and FP8 products added as a GPU's "
        "do. "
        f"A test had {limits.seconds:g} s of processor time and {limits.gibibytes:g} GiB. Together "
        f"they took {sum(one.seconds for one in every) / 60:.0f} minutes of processor time, and what imports and "
        "collects them comes on top; the load of the machine's "
        f"{os.cpu_count()} processors was {os.getloadavg()[2]:.1f} at the end."
        + f" {missing} of the processes that run tests of a file are still to come."
        * bool(missing),
        markdown_table(*_overall(collected, left_out, every), left=1),
        *_section("By file", _by(every, collected), ("GPU", "file", "tests", "run", *_COLUMNS), 2),
        *_section("Failures by cause", _counted(explained), ("GPU", "cause", "tests"), 2),
        *_section("Each failure", each_failure, ("GPU", "test", "cause"), 3),
        *_section(
            "Failed after other tests, and passed by itself",
            [[one.gpu, one.test, one.after_others] for one in every if one.after_others],
            ("GPU", "test", "what it said after the others"),
            3,
        ),
        *(
            (
                *_section("Run on a real GPU as well", _counted(both), ("GPU", "emulated", "real", "tests"), 3),
                *_section("Failures on a real GPU", _counted(wrong_there), ("GPU", "tests of", "failed there"), 2),
            )
            if real
            else (_NO_REAL,)
        ),
        *_section("Skipped by TE's tests", _counted(skipped), ("GPU", "reason", "tests"), 2),
        *_section("Deselected: what no CPU can run", _counted(left), ("GPU", "reason", "tests"), 2),
        *_section(
            "Beyond the limits",
            [[one.gpu, one.test, one.why] for one in every if one.outcome == "beyond"],
            ("GPU", "test", "limit"),
            3,
        ),
        *_section("Smaller than NVIDIA's", [[part] for part in smaller], ("sizes",), 1),
        *_section("Files that no script of NVIDIA's runs", [[file] for file in unnamed], ("file",), 1),
    ]
    return "\n\n".join([*sections, made_by("make nvidia-tests")]) + "\n"


def _on_real(one: Outcome, real: Mapping[str, Mapping[str, str]]) -> str:
    is_usual = one.job == one.test.partition("::")[0]  # rather than a variant in which NVIDIA runs the file
    return real.get(one.gpu, {}).get(one.test, "") if is_usual else ""


def _left_out(each: Collected, left_out: Mapping[tuple[str, str], str]) -> list[str]:
    tests = each.tests or (each.job.name,)
    return [left_out[each.job.name, test] for test in tests if (each.job.name, test) in left_out]


def _overall(
    collected: Sequence[Collected], left_out: Mapping[tuple[str, str], str], every: Sequence[Outcome]
) -> tuple[list[list[object]], Sequence[str]]:
    rows: list[list[object]] = []
    for gpu in dict.fromkeys(each.gpu for each in collected):
        tests = left = 0
        counts, estimated = Counter[str](), Counter[str]()
        for each in collected:
            if each.gpu == gpu:
                here = Counter(one.outcome for one in every if (one.gpu, one.job) == (gpu, each.job.name))
                beside = len(_left_out(each, left_out))
                tests, left = tests + len(each.tests), left + beside
                counts += here
                for name in here:
                    estimated[name] += (len(each.tests) - beside) * here[name] / here.total()  # type: ignore[assignment]
        shares = [_share(counts), _share(estimated)]
        rows.append([gpu, tests, left, counts.total(), *(counts[name] for name in _COLUMNS), *shares])
    return rows, ("GPU", "tests", "deselected", "run", *_COLUMNS, "passed of runnable", "of all, estimated")


def _share(counts: Counter[str]) -> str:
    runnable = counts["passed"] + counts["failed"]
    return f"{100 * counts['passed'] / runnable:.1f} %" if runnable else "–"


def _by(every: Sequence[Outcome], collected: Sequence[Collected]) -> list[list[object]]:
    rows: list[list[object]] = []
    for each in collected:
        here = Counter(one.outcome for one in every if (one.gpu, one.job) == (each.gpu, each.job.name))
        if here:
            rows.append([each.gpu, each.job.name, len(each.tests), here.total(), *(here[name] for name in _COLUMNS)])
    return rows


def _counted(counts: Counter[Any]) -> list[list[object]]:
    return [[*key, count] for key, count in sorted(counts.items(), key=lambda each: (each[0][0], -each[1], each[0]))]


def _section(title: str, rows: Sequence[Sequence[object]], headers: Sequence[str], left: int) -> list[str]:
    return [f"## {title}", markdown_table(rows, headers, left=left) if rows else "None."]
