"""Collect NVIDIA's tests, draw a sample of them or take all, run it, and write the report."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from parity.lab.nvidia_tests import checkout, report
from parity.lab.nvidia_tests.measure import Limits, Measure, chosen


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
) -> str:
    """Return the table of passed and failed tests; the report is in ``to``.

    Args:
        place: of a checkout of TransformerEngine.
        folder: where outcomes are kept, so that a run that was killed goes on.
        to: the report.
        gpus: emulated ones.
        sample: how many tests; None for all.
        seed: of the sample.
        workers: processes.
        limits: of a test.
        only: files whose names match this regular expression.
    """
    root = checkout.find(place)
    specification = importlib.util.find_spec("transformer_engine")
    assert specification is not None
    assert specification.origin is not None
    known = checkout.jobs(root, Path(specification.origin).parent)
    jobs = [job for job in known if re.search(only, job.name)]
    measure = Measure(root, folder.resolve(), limits)
    collected = measure.collected(jobs, gpus, workers)
    left_out = report.deselected(collected, report.rules()["deselected"])
    drawn = chosen(collected, left_out, sample, seed)
    measure.run(jobs, drawn, workers)
    kept = measure.outcomes()
    outcomes = [
        kept[gpu, job, test] for (gpu, job), tests in drawn.items() for test in tests if (gpu, job, test) in kept
    ]
    missing = sum(map(len, drawn.values())) - len(outcomes)
    text = report.draw(
        checkout.version(root), collected, left_out, outcomes, checkout.unnamed(root, known), limits, missing
    )
    to.write_text(text, encoding="utf-8")
    return text.split("\n\n")[2]
