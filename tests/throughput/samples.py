"""Made-up measurements for the report and the record."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from parity.measuring.throughput.record import GpuState, Peak, Record, Row, Spread, Times
from parity.report.environment import Environment

sys.path.insert(0, str(Path(__file__).parents[1]))
import fakes

GPU: Environment = dataclasses.replace(fakes.ENVIRONMENT, backend="gpu", device="A GPU (compute capability 9.0)")
CPU: Environment = fakes.ENVIRONMENT
PEAKS = (Peak("bf16", 800e12, 8192), Peak("tf32", 400e12, 8192), Peak("fp8", float("nan"), why_none="no FP8 here"))
COOL = GpuState(1980.0, 2619.0, 41.0, 300.0)


def times(forward: float, backward: float, **fields: Any) -> Times:
    return Times(Spread(forward, 0.9 * forward, 1.1 * forward), Spread(backward, backward, backward), 5, **fields)


def row(implementation: str = "eager", precision: str = "bf16", **fields: Any) -> Row:
    """Return a row in which both passes of 3e12 FLOPs take 10 ms, which is 300 TFLOP/s."""
    complete = Row(
        workload="mlp",
        size="batch 1, seq 64",
        implementation=implementation,
        precision=precision,
        peak_format=precision,
        flops_forward=int(1e12),
        flops_backward=int(2e12),
        times=times(0.004, 0.006),
        memory=3 << 30,
        error=2.3e-3,
        before=COOL,
        after=COOL,
    )
    return dataclasses.replace(complete, **fields)


def record(*rows: Row, environment: Environment = GPU) -> Record:
    return Record(environment, PEAKS, rows)
