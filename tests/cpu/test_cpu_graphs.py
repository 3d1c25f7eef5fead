"""CUDA graphs on the CPU kernels: a replay computes the same as TE without graphs, and a graph's limits show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from parity import te
from parity.te.state import fresh_caches, fresh_quantization
from te_on_cpu import cuda
from te_on_cpu.graphs import CaptureError, CUDAGraph, graph, is_current_stream_capturing

TE = te.kernels("cpu").te
BF16 = torch.bfloat16
WIDTH = 64
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
ON_BLACKWELL = ("MXFP8BlockScaling", "NVFP4BlockScaling")


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    with fresh_caches(), fresh_quantization():
        yield


def recipe_of(name: str | None) -> Any:
    from transformer_engine.common import recipe

    return None if name is None else getattr(recipe, name)()


def layer() -> nn.Module:
    return TE.TransformerLayer(WIDTH, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)


# In a graph, cuDNN's attention needs a multiple of 128 keys. Otherwise TE takes another kernel with other rounding.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: TE.Linear(WIDTH, 96, params_dtype=BF16), (32, WIDTH)),
    "LayerNormMLP": (lambda: TE.LayerNormMLP(WIDTH, 128, params_dtype=BF16), (32, WIDTH)),
    "ops.Sequential": (lambda: TE.ops.Sequential(TE.ops.Linear(WIDTH, WIDTH, dtype=BF16)), (32, WIDTH)),
    "TransformerLayer": (layer, (128, 2, WIDTH)),
}


def trained(name: str, recipe: str | None, is_graphed: bool, steps: int = 3) -> list[Tensor]:
    """Return outputs, gradients and weights of a few steps, each with its own batch."""
    make, shape = MODULES[name]
    with fresh_caches(), fresh_quantization():
        torch.manual_seed(0)
        module = make()
        if is_graphed:
            sample = torch.randn(*shape, dtype=BF16, requires_grad=True)
            module = TE.make_graphed_callables(module, (sample,), enabled=recipe is not None, recipe=recipe_of(recipe))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found = []
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(*shape, dtype=BF16).requires_grad_()
            with TE.autocast(enabled=True, recipe=recipe_of(recipe)) if recipe else nullcontext():
                y = module(x)
            y.float().square().mean().backward()
            found += [y.detach().clone(), x.grad.clone(), *(one.grad.clone() for one in module.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return found + [one.detach().clone() for one in module.parameters()]


def assert_same_bits(name: str, recipe: str | None) -> None:
    eager, graphed = trained(name, recipe, is_graphed=False), trained(name, recipe, is_graphed=True)
    assert [torch.equal(x, y) for x, y in zip(eager, graphed, strict=True)] == [True] * len(eager)
    assert all(x.isfinite().all() for x in eager)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_graphed_steps_are_those_without_a_graph_to_the_bit(name: str, recipe: str | None) -> None:
    if (name, recipe) == ("ops.Sequential", "Float8BlockScaling") and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's operations refuse block scaling before 2.18")
    assert_same_bits(name, recipe)


@pytest.mark.parametrize("recipe", ON_BLACKWELL)
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_graphed_steps_on_a_blackwell_are_those_without_a_graph_to_the_bit(
    blackwell: ModuleType, name: str, recipe: str
) -> None:
    assert_same_bits(name, recipe)


def captured(function: Callable[[], Any]) -> tuple[CUDAGraph, Any]:
    """Return a graph of a call, and what the call returned."""
    made = CUDAGraph()
    with graph(made):
        result = function()
    return made, result


# Operations that a capture refuses or accepts.

X = torch.tensor([1.0, 0.0, 3.0])
WAITING: dict[str, Callable[[], Any]] = {
    "item": lambda: (X * 2).sum().item(),
    "branch": lambda: 1 if X.sum() > 0 else 0,
    "float": lambda: float(X.max()),
    "tolist": lambda: (X * 2).tolist(),
    "numpy": lambda: (X * 2).numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: (X * 2).cpu(),
    "size by a mask": lambda: X[X > 0],
    "assignment by a mask": lambda: X.clone().index_put_((X > 0,), X[:2]),
    "nonzero": lambda: X.nonzero(),
    "masked_select": lambda: X.masked_select(X > 0),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X + 1),
    "repeat": lambda: X.repeat_interleave(X.long()),
    "synchronize": lambda: cuda.synchronize(),
    "event": lambda: cuda.Event().synchronize(),
    "stream": lambda: cuda.current_stream().synchronize(),
    "random state": lambda: cuda.get_rng_state(),
    "capture": lambda: CUDAGraph().capture_begin(),
}


@pytest.mark.parametrize("function", WAITING.values(), ids=WAITING)
def test_a_capture_refuses_what_a_stream_would_wait_for(function: Callable[[], Any]) -> None:
    made = CUDAGraph()
    with pytest.raises(CaptureError, match="operation not permitted when stream is capturing"), graph(made):
        function()
    assert not is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="not captured"):
        made.replay()


PERMITTED: dict[str, Callable[[], Any]] = {
    "a fill by a mask": lambda: X.clone().masked_fill_(X > 0, 0.0),
    "a fill by an index that is a mask": lambda: X.clone().index_put_((X > 0,), torch.tensor(2.0)),
    "a number of the host": lambda: X * torch.tensor(2.0).item(),
    "numbers of the host": lambda: X * torch.tensor([2.0]).tolist()[0],
    "repeats with a size": lambda: X.repeat_interleave(torch.tensor([1, 0, 1]), output_size=2),
    "torch.where": lambda: torch.where(X > 0, X, -X),
}


@pytest.mark.parametrize("function", PERMITTED.values(), ids=PERMITTED)
def test_a_capture_takes_what_no_stream_waits_for(function: Callable[[], Any]) -> None:
    expected = function()
    made, result = captured(function)
    result.zero_()
    made.replay()
    assert torch.equal(result, expected)


# The memory that a replay reads.


class Scaled(nn.Module):
    """A module that multiplies by factors kept in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0
        self.register_buffer("factor", torch.ones(()))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number * self.factor * self.weight


def number(module: Scaled) -> None:
    module.number = 2.0


def another_buffer(module: Scaled) -> None:
    module.factor = torch.tensor(2.0)


def same_buffer(module: Scaled) -> None:
    module.factor.fill_(2.0)


def another_weight(module: Scaled) -> None:
    module.weight.data = 2 * module.weight.data


@torch.no_grad()
def same_weight(module: Scaled) -> None:
    module.weight.mul_(2.0)


@pytest.mark.parametrize(
    ("change", "seen"),
    [(number, 1.0), (another_buffer, 1.0), (another_weight, 1.0), (same_buffer, 2.0), (same_weight, 2.0)],
)
def test_a_replay_sees_a_change_of_the_memory_that_was_captured_and_no_other(
    change: Callable[[Scaled], None], seen: float
) -> None:
    module = Scaled()
    graphed = TE.make_graphed_callables(module, (torch.ones(3, requires_grad=True),))
    change(module)
    assert graphed(torch.full((3,), 5.0, requires_grad=True)).tolist() == [5 * seen] * 3


def test_inputs_that_are_not_copied_into_the_graph_s_are_stale() -> None:
    x = torch.ones(3)
    made, y = captured(lambda: 2 * x)
    made.replay()
    assert y.tolist() == [2.0] * 3
    x.copy_(torch.full((3,), 7.0))
    assert y.tolist() == [2.0] * 3
    made.replay()
    assert y.tolist() == [14.0] * 3


def test_lists_of_tensors_that_are_changed_in_place_are_changed_in_a_replay():
    weight, gradient = torch.ones(3), torch.full((3,), 4.0)

    def clipped() -> None:
        norm = torch.stack(torch._foreach_norm([gradient])).sum()
        torch._foreach_mul_([gradient], 1 / norm)
        torch._foreach_add_([weight], [gradient], alpha=-1.0)

    made, _ = captured(clipped)
    assert weight.tolist() == [1.0] * 3
    gradient.fill_(2.0)
    made.replay()
    torch.testing.assert_close(gradient, torch.full((3,), 3**-0.5))
    torch.testing.assert_close(weight, torch.full((3,), 1 - 3**-0.5))


def test_a_capture_leaves_memory_and_random_numbers_as_they_were() -> None:
    sums, before = torch.zeros(3), torch.get_rng_state()
    made, mask = captured(lambda: (sums.add_(1.0), torch.rand(8))[1])
    assert sums.tolist() == [0.0] * 3
    assert torch.equal(torch.get_rng_state(), before)
    made.replay()
    first = mask.clone()
    made.replay()
    assert sums.tolist() == [2.0] * 3
    assert not torch.equal(first, mask)
