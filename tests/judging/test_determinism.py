"""Whether a candidate gives the same bytes twice, and where it first does not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes import ENVIRONMENT, result
from torch import Tensor, nn

import parity
from parity import te
from parity.case.case import Case
from parity.comparison import compare
from parity.cpu import cuda
from parity.cpu.cuda import emulated
from parity.report import markdown
from parity.report.markdown import digest
from parity.report.record import Record
from parity.result import Determinism, Result, from_json, to_json
from parity.trace.kernels import Trace, first_difference

_count = itertools.count(1)


class _Drifts(torch.autograd.Function):
    """Adds to the forward or the backward pass what was never added before, as if sums ran in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: float, in_backward: float) -> Tensor:
        ctx.in_backward = in_backward
        return x + in_forward * next(_count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient + ctx.in_backward * next(_count), None, None


class Drifting(nn.Module):
    def __init__(self, in_forward: float = 0.0, in_backward: float = 0.0) -> None:
        super().__init__()
        self.by = in_forward, in_backward

    def forward(self, x: Tensor) -> Tensor:
        return _Drifts.apply(x, *self.by)  # type: ignore[no-any-return]


class Chain(nn.Sequential):
    """The candidate: two linear layers of TE with something between."""

    def __init__(self, te_module: ModuleType, between: nn.Module) -> None:
        super().__init__()
        self.first = te_module.Linear(32, 32, bias=False)
        self.between = between
        self.last = te_module.Linear(32, 32, bias=False)


def compared(between: nn.Module, precision: str = "fp32") -> Result:
    def build(te_module: ModuleType) -> parity.Pair:
        reference = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        return parity.Pair(
            reference=reference,
            candidate=Chain(te_module, between),
            inputs=lambda rng: rng.normal(16, 32),
            weights={"0.weight": "first.weight", "1.weight": "last.weight"},
        )

    [found] = compare(Case("chain", build, sizes=({},), probe=False), [precision], backend="cpu", determinism=True)
    return found


def determinism_of(between: nn.Module, precision: str = "fp32") -> Determinism:
    found = compared(between, precision).determinism
    assert found is not None
    return found


@pytest.fixture
def blackwell() -> Iterator[None]:
    te.kernels("cpu")
    with emulated(cuda.BLACKWELL):
        yield


def test_the_cpu_kernels_give_the_same_bytes_twice() -> None:
    assert determinism_of(nn.Identity(), "fp8_current") == Determinism()
    assert Determinism().summary == "the same bytes when it is built and run again"


def test_a_candidate_runs_once_unless_asked_for_more() -> None:
    def build(te_module: ModuleType) -> parity.Pair:
        weights = {"weight": "weight", "bias": "bias"}
        return parity.Pair(nn.Linear(16, 16), te_module.Linear(16, 16), lambda rng: rng.normal(16, 16), weights)

    [found] = compare(Case("linear", build, sizes=({},)), ["fp32"], backend="cpu")
    assert found.determinism is None


def test_a_forward_pass_that_differs_is_found_in_its_module() -> None:
    found = determinism_of(Drifting(in_forward=1e-6))
    assert {"output", "d 1.weight"} <= set(found.differing)
    assert found.first == "the forward pass of between (Drifting), in none of TransformerEngine's kernels"


def test_a_backward_pass_that_differs_is_found_in_its_module() -> None:
    found = determinism_of(Drifting(in_backward=1e-6))
    assert set(found.differing) == {"d input", "d 0.weight"}
    assert found.first == "the backward pass of between (Drifting), in none of TransformerEngine's kernels"


def test_a_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    te.kernels("cpu")
    import transformer_engine_torch as extension

    right = extension.generic_gemm

    def drifting(*args: Any, **kwargs: Any) -> Any:
        output, *others = right(*args, **kwargs)
        return [output + 1e-6 * next(_count), *others]

    monkeypatch.setattr(extension, "generic_gemm", drifting)
    found = determinism_of(nn.Identity())
    assert found.first == "the kernel generic_gemm in the forward pass of first (Linear)"


def test_the_kernels_are_as_before_after_a_trace() -> None:
    te.kernels("cpu")
    import transformer_engine_torch as extension

    before = dict(vars(extension))
    with Trace().of_kernels():
        assert vars(extension) != before
    assert vars(extension) == before


def test_random_numbers_that_a_recipe_draws_are_told_apart_from_kernels(blackwell: None) -> None:
    """NVFP4 rounds gradients stochastically, in the backward pass alone."""
    found = determinism_of(nn.Identity(), "nvfp4")
    assert found.differing == ()
    assert set(found.drawn) == {"d input", "d 0.weight", "d 1.weight"}


def test_the_callers_random_numbers_stay_what_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compared(nn.Identity())
    assert torch.equal(torch.rand(3), expected)


def test_a_pass_that_takes_other_steps_differs_there() -> None:
    traces = Trace(), Trace()
    for trace, module in zip(traces, (nn.ReLU(), nn.Tanh()), strict=True):
        trace.watch(module)
        module(torch.ones(2))
    here, there = (f"output in the forward pass of the module ({name})" for name in ("ReLU", "Tanh"))
    assert first_difference(*traces) == f"{here}, where the second time {there} was computed"


def test_attention_that_differs_comes_with_what_te_allows() -> None:
    found = Determinism(("d input",), "the kernel fused_attn_bwd in the backward pass of core (FusedAttention)")
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in found.summary
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" not in Determinism(("d input",), "the kernel gemm").summary


def test_it_goes_into_the_record_and_back() -> None:
    repeated = result(determinism=Determinism(("output",), "the kernel k", ("d x",)))
    assert from_json(json.loads(json.dumps(to_json(repeated)))) == repeated


def test_the_report_counts_what_is_the_same_and_names_what_is_not() -> None:
    same = [result(case, determinism=Determinism()) for case in ("a", "b")]
    other = result("c", determinism=Determinism(("output",), "the kernel k"))
    text = markdown.draw(digest(Record(ENVIRONMENT, (*same, other))), "run")
    assert "- the same bytes when it is built and run again: 2 items" in text
    assert "- other bytes the second time in output; first in the kernel k: `c[bf16-2x64]`" in text
    assert "## Determinism" not in markdown.draw(digest(Record(ENVIRONMENT, (result(),))), "run")
