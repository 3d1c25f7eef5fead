"""A file for each reader, as parity writes it, with one of everything that a reader may find in it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from parity.judge import limits
from parity.judge.limits import Difference, OfPrecision
from parity.lab import record as lab_record
from parity.lab.throughput import record as throughput
from parity.plugin.options import Options
from parity.report import record
from parity.report.earlier import PARITY, Asked, code_of_parity
from parity.report.environment import Environment
from parity.report.record import Uncollected
from parity.result import Check, Determinism, Errors, Finding, Histogram, Picture, Profile, Result, Step, TensorResult

OPTIONS = Options(None, "cpu", (0, 1), Path(), "run")
_DIFFERENCE = Difference("output", "norm", 3.5, 1.7)
ENVIRONMENT = Environment(
    **{field.name: "x" for field in dataclasses.fields(Environment) if field.type == "str"},
    seeds=(0, 1),
    items=3,
    limits_compared=(OfPrecision("bf16", 24, 23, 0, _DIFFERENCE, _DIFFERENCE, 1, "accepted"),),
    asked=Asked(OPTIONS.as_asked, "00000000", {PARITY: code_of_parity(), "pairs.py": "00000000"}),
    threads=2,
)


def result(case: str, seed: int, margin: float = 0.4, **fields: object) -> Result:
    """Return a result with three tensors, which passed up to a margin of 1."""
    errors = Errors(3e-3, 1e-2, 1.7, 0.9999, 50.0, 1.0)
    checks = (Check("norm", 1.0, 1.8, "row"),)
    profiles = tuple(Profile(axis, 16, (1e-3, 2e-3), (1e-3, 1e-3), (0, 3)) for axis in (0, 1))
    picture = Picture(1e-3, profiles, Histogram(-1.0, 0.5, (60, 65), (125, 0), (3, 3)))
    tensor = TensorResult("output", "output", (2, 64), errors, errors, 4e-3, 2e-2, margin, checks, picture=picture)
    weights = (
        dataclasses.replace(tensor, name=f"layers.{i}.q_proj.weight", kind="weight gradient", margin=margin / 2)
        for i in range(2)
    )
    swapped = Finding("PAR101", "gate-up-swapped", "halves are exchanged", repair="pass x=1; it has x=2")
    complete = Result(
        case=case,
        precision="bf16",
        size={"batch": 2},
        size_label="2",
        seed=seed,
        backend="cpu",
        status="passed" if margin <= 1 else "failed",
        tensors=(tensor, *weights),
        findings=() if margin <= 1 else (swapped,),
        notes=("a note",),
        path="pairs.py",
        attention="FusedAttention",
        determinism=Determinism(("output",), "a kernel"),
    )
    return dataclasses.replace(complete, **fields)  # type: ignore[arg-type]


def run() -> bytes:
    """Return the record of a run with a pass, a failure, a skip, and a pair that was not collected."""
    results = [
        *(result("sound", seed) for seed in (0, 1)),
        *(result("fails", seed, margin=math.inf) for seed in (0, 1)),
        result("trains", 0, steps=(Step(1, 5.0, 5.0, 0.4), Step(2, 4.0, 4.1, 0.5))),
        result("skips", 0, status="skipped", reason="no FP8", tensors=()),
    ]
    lines = [record.environment_line(ENVIRONMENT), record.uncollected_line(Uncollected("pairs.py::x", "it misfits"))]
    return record.data("".join([*lines, *map(record.result_line, results)]))


def table(folder: Path) -> bytes:
    """Return a table of limits, a part of the packaged one."""
    packaged = limits.packaged()
    laws = dict(sorted(packaged.laws.items())[:8])
    file = folder / "table.json"
    limits.save(limits.Table(laws, {"bf16": {"accepted": "", "cases": ["mlp"]}}), file)
    return file.read_bytes()


def campaign(folder: Path) -> bytes:
    """Return the record of a campaign, as studies, the zoo and the count of false alarms keep one."""
    file = folder / "campaign.jsonl"
    for seed in range(3):
        lab_record.append(file, {"seed": seed, "of": "x"}, {"root": seed, "of": 0.5 * seed}, {"torch": "2", "a": "b"})
    return file.read_bytes()


def throughputs(folder: Path) -> bytes:
    """Return the record of ``parity throughput``."""
    file = folder / "throughput.jsonl"
    spread = throughput.Spread(1e-3, 0.9e-3, 1.1e-3)
    state = throughput.GpuState(1980.0, 2619.0, 41.0, 300.0)
    row = throughput.Row(
        workload="mlp",
        size="batch 1",
        implementation="eager",
        precision="bf16",
        peak_format="bf16",
        flops_forward=10,
        flops_backward=20,
        times=throughput.Times(spread, spread, 5),
        memory=3 << 30,
        error=2e-3,
        before=state,
        after=state,
    )
    for content in (ENVIRONMENT, throughput.Peak("bf16", 8e14, 8192), row):
        throughput.append(file, content)
    return file.read_bytes()


def kernels() -> bytes:
    """Return the record of ``parity kernels``."""
    named = {"family": "Norms", "kernel": "rmsnorm_fwd", "variant": "BF16", "shapes": "8x64", "result": "z"}
    figures = {"elements": 8, "different": 3, "max_ulps": 1, "relative": 0.02, "gpu_seconds": 1e-5, "why_none": None}
    lines = [{"environment": {}, "emulated_gpu": "x"}, {**named, **figures}, {**named, "why_none": "too old"}]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def pairs() -> bytes:
    """Return a file of pairs."""
    return b'import parity\n\n\n@parity.pair("x", sizes=[dict(n=2)])\ndef x(te, n): ...\n'
