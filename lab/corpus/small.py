"""Small modules that are written once and built twice, with PyTorch's layers and with TE's, and changes in the latter.

GATED = twins(Gated, normal((2, 24, 64)))
PORTS = (
    GATED.right(order=(0, 1), name="chunks in another order of writing"),
    GATED.wrong("activation", "it computes SiLU", act=F.silu),
)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lab.corpus.port import Port
from parity.case.case import Case, Pair, Rng

# A weight map, or a function from a parameter's name to the left side of its entry; None maps each to its own name.
Weights = Mapping[Any, Any] | Callable[[str], Any] | None


@dataclass(frozen=True)
class Host:
    """A module that can be built with other settings in its port than in its reference.

    Attributes:
        name: its name, unique in the corpus.
        reference: called with the settings; returns the plain module.
        port: called with ``transformer_engine.pytorch`` and the settings; returns the port.
        inputs: draws the inputs of both.
        settings: those of the reference, and of the port but for its mistake.
        weights: the weight map.
        options: the other arguments of ``parity.Pair``, such as ``call_candidate``, or a function of the port's
            settings that returns them.
        probe: the case's ``probe``.
        precisions: the precisions at which it runs; None for all.
    """

    name: str
    reference: Callable[..., nn.Module]
    port: Callable[..., nn.Module]
    inputs: Callable[[Rng], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = None
    options: Mapping[str, Any] | Callable[..., Mapping[str, Any]] = field(default_factory=dict)
    probe: Any = True
    precisions: tuple[str, ...] | None = None

    def case(self, weights: Weights = None, **changes: Any) -> Case:
        """Return the pair with these settings changed in its port, or with another weight map."""

        def factory(te: ModuleType) -> Pair:
            settings = {**self.settings, **changes}
            reference, candidate = self.reference(**self.settings), self.port(te, **settings)
            options = self.options(**settings) if callable(self.options) else self.options
            mapped = _map_weights(self.weights if weights is None else weights, reference)
            return Pair(reference, candidate, self.inputs, mapped, **options)

        return Case(self.name, factory, sizes=({},), probe=self.probe, precisions=self.precisions, path=Path(__file__))

    def wrong(
        self,
        titles: str | tuple[str, ...],
        phrase: str = "",
        *,
        name: str = "",
        others: bool = False,
        precisions: tuple[str, ...] | None = None,
        weights: Weights = None,
        **changes: Any,
    ) -> Port:
        """Return a port with a mistake.

        Args:
            titles: the title of the finding that names it, or several that do.
            phrase: words that the finding's message must contain, or with a full stop end with.
            name: its name in the corpus; made of the changed settings by default.
            others: whether other findings may follow.
            precisions: those at which the mistake shows; None for all.
            weights: the weight map that the port gets wrong, if that is the mistake; it needs a name.
            changes: the settings that the port gets wrong.
        """
        titles = (titles,) if isinstance(titles, str) else titles
        return self._vary(name, weights, changes, titles=titles, phrase=phrase, others=others, precisions=precisions)

    def right(
        self, *, name: str = "", precisions: tuple[str, ...] | None = None, weights: Weights = None, **changes: Any
    ) -> Port:
        """Return a right port, which these settings, or this weight map, only write in another way."""
        return self._vary(name, weights, changes, precisions=precisions)

    def _vary(self, name: str, weights: Weights, changes: Mapping[str, Any], **told: Any) -> Port:
        made = ", ".join(f"{key}={_describe_setting(value)}" for key, value in changes.items())
        return Port(
            name or made or "right", self.name, self.case(weights, **changes), self.case(), change=dict(changes), **told
        )


def _map_weights(weights: Weights, reference: nn.Module) -> Mapping[Any, Any]:
    if isinstance(weights, Mapping):
        return weights
    side = weights or str
    return {side(name): name for name, _ in reference.named_parameters()}


def _describe_setting(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def twins(module: Callable[..., nn.Module], inputs: Callable[[Rng], Any], name: str = "", **more: Any) -> Host:
    """Return the host of a module that takes the class of its linear layers, ``nn.Linear`` or ``te.Linear``, first.

    Args:
        module: called with that class and the settings.
        inputs: draws the inputs.
        name: the host's name; the module's by default, in lower case.
        more: other attributes of ``Host``.
    """
    name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", module.__name__).lower()
    return Host(
        name,
        lambda **settings: module(nn.Linear, **settings),
        lambda te, **settings: module(te.Linear, **settings),
        inputs,
        **more,
    )


def normal(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[Rng], Any]:
    """Return a function that draws one tensor of each shape from a normal distribution."""

    def inputs(rng: Rng) -> Any:
        drawn = tuple(scale * rng.normal(*shape) for shape in shapes)
        return drawn if len(drawn) > 1 else drawn[0]

    return inputs


# Parts that several pages build their modules of.


class Expert(nn.Module):
    """An MLP of two layers, 64 to 96 channels and back, without biases."""

    def __init__(self, linear: Any, act: Any) -> None:
        super().__init__()
        self.act, self.up, self.down = act, linear(64, 96, bias=False), linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[..., 64]``."""
        output: Tensor = self.down(self.act(self.up(x)))
        return output
