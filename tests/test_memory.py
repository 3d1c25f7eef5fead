"""How much memory a comparison needs, as far as that can be known before; and what is given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from parity import te
from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize, check_case
from parity.comparison import compare_at
from parity.judge.limits import packaged
from parity.passes import memory
from parity.passes.prepare import prepare
from parity.te.precision import PRECISIONS

TE = ModuleType("transformer_engine.pytorch")


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


def estimate(reference: Callable[[int], nn.Module], batch: int, hidden: int) -> int | None:
    case = Case(
        "case",
        lambda te, batch, hidden: Pair(
            reference(hidden), nn.Identity(), inputs=lambda rng, batch, hidden: rng.normal(batch, hidden)
        ),
        sizes=(),
        path=Path("pairs.py"),
    )
    return memory.estimate(case, CheckedSize(dict(batch=batch, hidden=hidden), ""), TE)


def test_it_covers_weights_gradients_and_what_the_backward_pass_needs() -> None:
    weights, passed, between = 8 * 512**2, 2 * 64 * 512, 64 * 4 * 512
    assert (estimate(MLP, 64, 512) or 0) > 8 * (2 * weights + passed + 2 * between)


def test_it_grows_with_the_batch_alone_and_linearly() -> None:
    small, larger, largest = (estimate(MLP, batch, 32) or 0 for batch in (1000, 2000, 3000))
    assert small < larger
    assert largest - larger == larger - small


def test_a_size_that_no_machine_holds_is_estimated_without_memory() -> None:
    assert (estimate(MLP, 1, 2**20) or 0) > 2**46


def test_it_is_unknown_where_the_reference_reads_values() -> None:
    assert estimate(lambda hidden: ReadsValues(), 2, 2) is None


def test_nothing_of_a_comparison_is_kept_once_memory_is_released() -> None:
    kernels, precision = te.kernels("cpu"), PRECISIONS["bf16"]
    case = Case(
        "linear",
        lambda te, width: Pair(
            nn.Linear(width, width),
            te.Linear(width, width),
            inputs=lambda rng, width: rng.normal(4, width),
            weights={"weight": "weight", "bias": "bias"},
        ),
        sizes=(dict(width=32),),
    )
    (checked,) = check_case(case, kernels.te)
    assert compare_at(case, checked, precision, 0, kernels, packaged()).passed
    kept = weakref.ref(prepare(case, checked, precision.dtype, 0, kernels))
    assert kept() is not None
    memory.release()
    assert kept() is None


def test_releasing_memory_of_a_broken_context_hides_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    memory.release()
