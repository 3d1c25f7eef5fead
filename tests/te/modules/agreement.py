"""Compare a TransformerEngine module on the CPU kernels with its plain twin, in outputs and all gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import parity
from parity.case.case import Case
from parity.result import Result
from te_on_cpu import versions

FP32_AND_BF16 = ("fp32", "bf16")
CAN_CHECKPOINT_CORE_ATTENTION = pytest.mark.skipif(
    versions.installed_version().release[:2] == (2, 19),
    reason="TE 2.19 hands fused attention its inputs twice, and then runs the projection's backward twice",
)


@functools.cache
def te_on_cpu() -> ModuleType:
    """Return ``transformer_engine.pytorch`` on the CPU kernels."""
    return parity.te.kernels("cpu").te


def assert_agree(build: Callable[[ModuleType], parity.Pair], precisions: Sequence[str] = FP32_AND_BF16) -> None:
    """Compare the pair at each precision, with noise on parameters whose elements are all equal.

    Both modules get the same weights through the pair's map. The golden values are the plain module's in FP64, and the
    tolerance is the plain module's own error under the precision's rounding model (``parity.numerics.errors``).
    """
    for result in results(build, precisions):
        assert result.passed, described(result)


def results(build: Callable[[ModuleType], parity.Pair], precisions: Sequence[str] = FP32_AND_BF16) -> list[Result]:
    """Return one result for each precision."""
    te_on_cpu()
    case = Case("modules", build, sizes=({},), path=Path(__file__))
    return parity.compare(case, precisions=precisions, backend="cpu")


def gradient(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient, and fail the test if it has none."""
    assert leaf.grad is not None
    return leaf.grad


def described(result: Result) -> str:
    """Return a description of a comparison's tensors that are out of tolerance."""
    failed = [f"{tensor.label} {tensor.shape}: margin {tensor.margin:.3g}" for tensor in result.tensors]
    return "\n".join([f"{result.precision}: {result.status} {result.reason}", *failed])


def sequence_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batch-first version of a call of a TE module that takes and returns ``[seq, batch, hidden]``."""

    def wrapped(module: Any, *tensors: Any) -> Any:
        returned = call(module, *(tensor.transpose(0, 1) for tensor in tensors))
        if isinstance(returned, tuple):
            return tuple(tensor.transpose(0, 1) if tensor.dim() == 3 else tensor for tensor in returned)
        return returned.transpose(0, 1)

    return wrapped
