"""Collect NVIDIA's tests, draw a sample of them or take all, run it, and write the report."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.lab.campaign import Campaign
from parity.lab.nvidia_tests import checkout, measure, report
from parity.lab.nvidia_tests.measure import Collected, Limits, Outcome


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
    """Return the table of passed and failed tests; the report is in ``to``.

    Args:
        place: of a checkout of TransformerEngine.
        folder: where outcomes are kept, so that a run that was killed goes on.
        to: the report.
        gpus: emulated ones.
        sample: how many tests that are not skipped; None for all.
        seed: of the sample.
        workers: processes.
        limits: of a test.
        only: files whose names match this regular expression.
        on_gpu: by emulated GPU, a file of what ``pytest -v`` printed on a real one of its kind.
        report_only: whether to run nothing more, and to report what has been run.
    """
    root = checkout.find(place)
    specification = importlib.util.find_spec("transformer_engine")
    assert specification is not None
    assert specification.origin is not None
    known = checkout.jobs(root, Path(specification.origin).parent)
    jobs = [job for job in known if re.search(only, job.name)]
    version = checkout.version(root)

    def complete(name: str, result: Any, work: Sequence[Any], make: Callable[..., Any]) -> list[Any]:
        """Return all results, of which the folder keeps those that are there."""
        campaign: Campaign[Any, Any] = Campaign(
            folder / f"{name}.jsonl", result, lambda job: {"checkout": version, **dataclasses.asdict(job)}
        )
        if report_only:
            return list(campaign.finished(work).values())
        make_one = functools.partial(make, root, folder.resolve() / "running")
        return list(campaign.complete(work, make_one, name, workers).values())

    collected = complete("collected", Collected, measure.files_of(jobs, gpus), measure.collect)
    left_out = report.deselected(collected, report.rules()["deselected"])
    portions = measure.drawn(collected, left_out, sample, seed, limits)
    results = complete("outcomes", list[Outcome], portions, measure.run)
    outcomes = [one for each in results for one in each]
    missing = len(portions) - len(results)
    real = {gpu: report.on_gpu(file.read_text(encoding="utf-8")) for gpu, file in on_gpu.items()}
    text = report.draw(
        version, collected, left_out, outcomes, checkout.unnamed(root, known), limits, sample, missing, real
    )
    to.write_text(text, encoding="utf-8")
    return text.split("\n\n")[2]
