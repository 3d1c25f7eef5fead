"""The ways in which a mistake gets into a candidate: its constructor, its weight map, its call, its inner modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import Pair
from parity.weights import WeightMap
from parity.zoo.bug import Plant
from parity.zoo.construction import reconstructed

Call = Callable[..., Any]


def constructed_with(**changes: Any) -> Plant:
    """The candidate is constructed with other keyword arguments."""
    return lambda pair, te: dataclasses.replace(pair, candidate=reconstructed(pair.candidate, **changes))


def mapped(change: Callable[[WeightMap], WeightMap]) -> Plant:
    """The weight map is another one."""
    return lambda pair, te: dataclasses.replace(pair, weights=change(pair.weights))


def called(wrap: Callable[[Call], Call]) -> Plant:
    """The candidate is called otherwise.

    Args:
        wrap: from the right call, ``call(module, *inputs)``, to the mistaken one.
    """

    def plant(pair: Pair, te: ModuleType) -> Pair:
        right = pair.call_candidate or (lambda module, *inputs: module(*inputs))
        return dataclasses.replace(pair, call_candidate=wrap(right))

    return plant


def edited(edit: Callable[[nn.Module], None]) -> Plant:
    """Something is set on the candidate after it was constructed."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        edit(pair.candidate)
        return pair

    return plant


def both(first: Plant, second: Plant) -> Plant:
    """One plant after the other."""
    return lambda pair, te: second(first(pair, te), te)


def with_argument(name: str, change: Callable[[Tensor], Any]) -> Plant:
    """A keyword argument of the candidate's forward pass is ``change(argument)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, name: change(kwargs[name])}

    return _before_forward(hook)


def with_inputs(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """The positional inputs of the candidate's forward pass are ``change(*inputs)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return change(*args), kwargs

    return _before_forward(hook)


def with_output(change: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Plant:
    """The output is ``change(module, input, output)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return change(module, args[0], output)

    def edit(module: nn.Module) -> None:
        module.register_forward_hook(hook)

    return edited(edit)


def parameter_filled(name: str, value: float) -> Plant:
    """A parameter keeps the value that its module was constructed with."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            module.get_parameter(name).fill_(value)

    return _before_forward(hook)


def _before_forward(hook: Callable[..., Any]) -> Plant:
    """Registers ``hook(module, args, kwargs)``."""

    def edit(module: nn.Module) -> None:
        module.register_forward_pre_hook(hook, with_kwargs=True)

    return edited(edit)
