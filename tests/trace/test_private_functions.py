"""Test that a comparison temporarily replaces two private functions of PyTorch, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils import checkpoint

import parity
from parity import te
from parity.trace.private_functions import (
    CHECKPOINT,
    CLIP,
    EMBEDDING,
    EXCHANGED,
    LAYER_NORM,
    PrivateFunction,
    exchanged,
)
from parity.user_error import UserError

RENAMED = replace(CLIP, name="_clip_grads_by_another_name_")
ANOTHER = "another stand-in's result"


@pytest.mark.parametrize("private", EXCHANGED, ids=lambda private: private.name)
def test_the_installed_pytorch_has_the_function_and_calls_it(private: PrivateFunction) -> None:
    """Fail if PyTorch has renamed the function, or does not call it any more."""
    assert private.find() is not None
    called: list[str] = []

    def stand_in(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append(private.name)
        return original(*args, **kwargs)

    with exchanged(private, stand_in):
        PUBLIC[private]()
    assert called == [private.name]


def clip() -> Tensor:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    nn.utils.clip_grad_norm_([parameter], 1.0)
    return parameter.grad


def run_again() -> None:
    x = torch.ones(4, requires_grad=True)
    checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum().backward()


PUBLIC: dict[PrivateFunction, Callable[[], object]] = {
    CLIP: clip,
    CHECKPOINT: run_again,
    LAYER_NORM: lambda: nn.LayerNorm(4)(torch.ones(2, 4)),
    EMBEDDING: lambda: nn.Embedding(4, 4)(torch.tensor([1])),
}


def test_a_name_that_pytorch_renamed_is_an_error_that_tells_what_it_was_for() -> None:
    told = r"_clip_grads_by_another_name_, .* follows torch\.nn\.utils\.clip_grad_norm_;"
    with pytest.raises(UserError, match=told), exchanged(RENAMED, lambda original: None):
        pass


def test_a_pytorch_from_before_the_function_has_nothing_to_exchange() -> None:
    with exchanged(replace(RENAMED, since=(99, 0)), lambda original: None):
        pass


def largest_norm_times(factor: float) -> Callable[..., Any]:
    def stand_in(original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any) -> Any:
        return original(parameters, factor * max_norm, *args)

    return stand_in


def test_inner_contexts_act_upon_outer_ones_and_an_exception_ends_them() -> None:
    before = clip_grad._clip_grads_with_norm_
    clipped = clip()
    with exchanged(CLIP, largest_norm_times(0.5)):
        with exchanged(CLIP, largest_norm_times(0.5)):
            torch.testing.assert_close(clip(), clipped / 4)
        with pytest.raises(AttributeError), exchanged(CLIP, largest_norm_times(0.5)):
            nn.utils.clip_grad_norm_([None], 1.0)
        torch.testing.assert_close(clip(), clipped / 2)
    assert clip_grad._clip_grads_with_norm_ is before
    assert torch.equal(clip(), clipped)


def test_another_thread_has_pytorchs_own_also_where_contexts_overlap() -> None:
    before = clip_grad._clip_grads_with_norm_
    clipped = clip()
    with ThreadPoolExecutor(1) as pool:
        first, second = exchanged(CLIP, largest_norm_times(0.5)), exchanged(CLIP, largest_norm_times(0.25))
        first.__enter__()
        assert torch.equal(pool.submit(clip).result(), clipped)
        pool.submit(second.__enter__).result()
        torch.testing.assert_close(clip(), clipped / 2)
        torch.testing.assert_close(pool.submit(clip).result(), clipped / 4)
        first.__exit__(None, None, None)
        assert torch.equal(clip(), clipped)
        pool.submit(second.__exit__, None, None, None).result()
    assert clip_grad._clip_grads_with_norm_ is before


def functions_of_pytorch() -> list[tuple[Any, str, object]]:
    """Return PyTorch's functions and the methods of ``Tensor`` and ``nn.Module``, each with its place and name."""
    kinds = FunctionType, BuiltinFunctionType, MethodDescriptorType
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    return [
        (place, name, value)
        for place in (*modules, Tensor, Tensor.__base__, nn.Module)
        for name, value in list(vars(place).items())
        if type(value) in kinds  # isinstance would ask a deprecated name, which warns
    ]


KNOWN = {(private.module, private.name) for private in EXCHANGED}


def exchanged_of(functions: list[tuple[Any, str, object]]) -> set[tuple[str, str]]:
    """Return the functions that have been replaced since."""
    return {(place.__name__, name) for place, name, value in functions if vars(place).get(name) is not value}


class Looking(nn.Linear):
    """A layer that notes PyTorch's functions that are replaced when it is built, when it runs and when a port runs."""

    found: set[tuple[str, str]]
    before: list[tuple[Any, str, object]]

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.look()

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return super().forward(x)

    @classmethod
    def look(cls) -> None:
        cls.found.update(exchanged_of(cls.before))


@pytest.fixture
def looking() -> Iterator[type[Looking]]:
    te.kernels("cpu")  # imports TransformerEngine, which replaces three methods of nn.Module
    Looking.found, Looking.before = set(), functions_of_pytorch()
    yield Looking
    Looking.found, Looking.before = set(), []


@pytest.mark.parametrize("right", [True, False])
def test_a_comparison_exchanges_these_and_no_other(looking: type[Looking], right: bool) -> None:
    """Look at a comparison that passes, and at one that fails, so that a cause is searched for."""

    @parity.pair("looking", sizes=[{"batch": 8}])
    def looking_pair(te: Any, **_: Any) -> parity.Pair:
        weights = {"weight": "weight", "bias": "bias"}

        def call(module: nn.Module, x: Tensor) -> Tensor:
            looking.look()
            return module(x) if right else 1.5 * module(x)

        return parity.Pair(
            looking(),
            te.Linear(64, 64),
            weights=weights,
            inputs=lambda rng, batch: rng.normal(batch, 64),
            call_candidate=call,
        )

    (result,) = parity.compare(looking_pair, ["bf16"], backend="cpu")
    assert result.passed is right, result
    assert looking.found == KNOWN
    assert not exchanged_of(looking.before)
