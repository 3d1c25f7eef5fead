"""Plant bugs in the packaged hosts: by constructor, weight map or call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lab.corpus.port import Port
from parity.case.case import Case, Pair
from parity.case.weight_map import Side, WeightMap
from parity.measuring.hosts import HOSTS
from parity.measuring.hosts.host import reconstructed
from parity.reference import Attention

# Bugs.


Plant = Callable[[Pair, ModuleType], Pair]

# Groups of precisions, for bugs that only some of them can have.
STORED_IN_16_BITS = ("bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
QUANTIZED = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
ONE_SCALE_A_TENSOR = ("fp8_delayed", "fp8_current")


@dataclass(frozen=True)
class Bug:
    """A mistake that people make when they port a module.

    Attributes:
        name: its name, unique in the catalogue, e.g. ``gate-up-swapped``.
        summary: the mistake in one sentence.
        hosts: names of the pairs in ``parity.measuring.hosts`` in which it is planted; it changes the result of each.
        plant: called with a freshly built pair and ``transformer_engine.pytorch``; returns the pair with the mistake in
            its candidate's module, weight map or call. It may be called under ``meta_build.without_memory``.
        finding: the title of the finding that names the mistake.
        precisions: the precisions at which it has an effect; None for all.
    """

    name: str
    summary: str
    hosts: tuple[str, ...]
    plant: Plant
    finding: str
    precisions: tuple[str, ...] | None = None

    def ports(self) -> tuple[Port, ...]:
        """Return the port with the bug of each host."""
        told = dict(titles=(self.finding,), change=self, summary=self.summary, precisions=self.precisions, others=True)
        return tuple(
            Port(self.name, host, planted(self, HOSTS[host]), HOSTS[host], **told)  # type: ignore[arg-type]
            for host in self.hosts
        )


def planted(bug: Bug, host: Case) -> Case:
    """Return the host's case with the mistake in its candidate.

    The case keeps the host's name, since its reference and therefore its expected error are the host's.
    """
    return dataclasses.replace(host, factory=lambda te, **size: bug.plant(host.build(te, size), te))


# The ways to get a mistake into a candidate: by its constructor, its weight map, its call or its inner modules.


Call = Callable[..., Any]


def constructed_with(**changes: Any) -> Plant:
    """Construct the candidate with different keyword arguments."""
    return lambda pair, te: dataclasses.replace(pair, candidate=reconstructed(pair.candidate, **changes))


def mapped(change: Callable[[WeightMap], WeightMap]) -> Plant:
    """Change the weight map to ``change(weights)``."""
    return lambda pair, te: dataclasses.replace(pair, weights=change(pair.weights))


def called(wrap: Callable[[Call], Call]) -> Plant:
    """Call the candidate in a different way.

    Args:
        wrap: turns the right call, ``call(module, *inputs)``, into the mistaken one.
    """

    def plant(pair: Pair, te: ModuleType) -> Pair:
        right = pair.call_candidate or (lambda module, *inputs: module(*inputs))
        return dataclasses.replace(pair, call_candidate=wrap(right))

    return plant


def edited(edit: Callable[[nn.Module], None]) -> Plant:
    """Edit the candidate after it was constructed."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        edit(pair.candidate)
        return pair

    return plant


def with_attributes(**values: Any) -> Plant:
    """Set attributes on the candidate, each on the first of its modules that has it."""

    def edit(module: nn.Module) -> None:
        for name, value in values.items():
            setattr(next(part for part in module.modules() if hasattr(part, name)), name, value)

    return edited(edit)


def both(first: Plant, second: Plant) -> Plant:
    """Apply one plant after the other."""
    return lambda pair, te: second(first(pair, te), te)


def with_argument(name: str, change: Callable[[Tensor], Any]) -> Plant:
    """Change a keyword argument of the candidate's forward pass to ``change(argument)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, name: change(kwargs[name])}

    return _before_forward(hook)


def with_inputs(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Change the positional inputs of the candidate's forward pass to ``change(*inputs)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return change(*args), kwargs

    return _before_forward(hook)


def with_output(change: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Plant:
    """Change the output to ``change(module, input, output)``."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return change(module, args[0], output)

    def edit(module: nn.Module) -> None:
        module.register_forward_hook(hook)

    return edited(edit)


def parameter_filled(name: str, value: float) -> Plant:
    """Fill a parameter with a value before each forward pass, such as the one that its module was constructed with."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            module.get_parameter(name).fill_(value)

    return _before_forward(hook)


def _before_forward(hook: Callable[..., Any]) -> Plant:
    """Call ``hook(module, args, kwargs)`` before each forward pass of the candidate."""

    def edit(module: nn.Module) -> None:
        module.register_forward_pre_hook(hook, with_kwargs=True)

    return edited(edit)


# Mistakes in a weight map, in the reference's (left) side of its entries.


Change = Callable[[Side], Side]


def left_sides(change: Change) -> Plant:
    """Change each entry's left side to ``change(left)``."""
    return left_sides_of(lambda pair: change)


def left_sides_of(change_for: Callable[[Pair], Change]) -> Plant:
    """Change each entry's left side by a change that depends on the pair."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        change = change_for(pair)
        return dataclasses.replace(pair, weights={change(left): right for left, right in pair.weights.items()})

    return plant


def parameter(suffix: str, change: Change) -> Change:
    """Change the reference parameter whose name has this suffix, where it is an entry's whole left side."""
    return lambda left: change(left) if isinstance(left, str) and left.endswith(suffix) else left


def exchanged(first: str, second: str) -> Plant:
    """Swap the targets of the two parameters whose names have these suffixes."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        named = {suffix: left for left in pair.weights for suffix in (first, second) if str(left).endswith(suffix)}
        exchange = {named[first]: named[second], named[second]: named[first]}
        weights = {exchange.get(left, left): right for left, right in pair.weights.items()}
        return dataclasses.replace(pair, weights=weights)

    return plant


def attention_of(pair: Pair) -> Attention:
    """Return the reference's attention.

    Raises:
        StopIteration: if it has none.
    """
    return next(module for module in pair.reference.modules() if isinstance(module, Attention))


@dataclasses.dataclass(frozen=True)
class Heads:
    """Describe how an attention's channels are divided into heads."""

    heads: int
    groups: int
    head_dim: int


def heads_of(pair: Pair) -> Heads:
    """Return how the reference's attention divides its channels."""
    attention = attention_of(pair)
    query, key = attention.q_proj.out_features, attention.k_proj.out_features
    return Heads(query // attention.head_dim, key // attention.head_dim, attention.head_dim)
