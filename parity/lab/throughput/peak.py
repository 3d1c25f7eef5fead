"""The device's measured peak: how fast large square matrix products run in each format."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parity.lab.flops import linear
from parity.lab.throughput.clock import Clock, Mark
from parity.lab.throughput.record import Peak, Spread
from parity.user_error import one_line

SIZES = {"cuda": (4096, 8192), "cpu": (256, 1024)}
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_REPEATS = {"cuda": 10, "cpu": 3}


def measure(format: str, device: torch.device, clock: Clock[Mark]) -> Peak:
    """Return the best median over the device's sizes; a format that cannot be multiplied here comes with the reason.

    FP8 is E4M3 with a scale a tensor, by ``torch._scaled_mm`` with fast accumulation.
    """
    if format == "tf32" and device.type != "cuda":
        return Peak(format, float("nan"), why_none="a CPU has no TF32")
    best = Peak(format, 0.0)
    for size in SIZES[device.type]:
        try:
            with allow_tf32(format == "tf32"):
                seconds = _seconds(_product(format, size, device), _REPEATS[device.type], clock)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return Peak(format, float("nan"), why_none=one_line(error))
        best = max(best, Peak(format, linear(size, size, size).forward / seconds, size), key=lambda peak: peak.flops)
    return best


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Within the context, whether PyTorch may compute FP32 products in TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(format: str, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Random operands: a product of zeros draws less power and so runs faster."""
    a, b = (torch.randn(size, size, device=device).to(_DTYPES[format]) for _ in range(2))
    if format != "fp8":
        return lambda: a @ b
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda"
    )


def _seconds(product: Callable[[], Tensor], repeats: int, clock: Clock[Mark]) -> float:
    product()
    marks = [clock.mark()]
    for _ in range(repeats):
        product()
        marks.append(clock.mark())
    clock.finish()
    return Spread.of([clock.seconds(start, end) for start, end in itertools.pairwise(marks)]).median
