"""Groups a module's parameters into units: what one linear layer or norm holds, its weight and its bias."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from parity.weight_terms import Shape

WEIGHT, BIAS = "weight", "bias"

# ``q_proj.weight``, TE's ``query_weight``, and ``weight3`` of te.GroupedLinear's fourth expert.
_LEAF = re.compile(r"(?P<stem>.*?)_?(?P<kind>weight|bias|gamma|beta)(?P<expert>\d*)")
_KINDS = {"gamma": WEIGHT, "gain": WEIGHT, "scale": WEIGHT, "beta": BIAS, "offset": BIAS}
_EXPERT = re.compile(r"(?:^|\.)(?:local_)?experts?\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Unit:
    """The parameters of one linear layer, norm or embedding.

    Attributes:
        path: dotted, without ``weight`` or ``bias``: ``layers.0.self_attn.q_proj``, ``layernorm_qkv.query``.
        expert: its number among the experts of a mixture; None for what is no single expert's.
        parameters: full names by kind, ``weight`` or ``bias``.
        shapes: of those parameters, by kind.

    Units are equal if path and expert are.
    """

    path: str
    expert: int | None
    parameters: Mapping[str, str] = field(compare=False)
    shapes: Mapping[str, Shape] = field(compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """The path's parts in lower case, numbers left out."""
        return tuple(word.lower() for word in self.path.split(".") if word and not word.isdecimal())

    @property
    def scope(self) -> str:
        """The path of the module that this unit is a part of."""
        return self.path.rpartition(".")[0]

    @property
    def shape(self) -> Shape:
        """Of the weight, or of the only parameter."""
        return self.shapes[WEIGHT] if WEIGHT in self.shapes else next(iter(self.shapes.values()))

    def without(self, names: Container[str]) -> Unit:
        """The same unit, with those parameters left out."""
        kept = {kind: name for kind, name in self.parameters.items() if name not in names}
        return replace(self, parameters=kept, shapes={kind: self.shapes[kind] for kind in kept})


def units_of(shapes: Mapping[str, Shape]) -> list[Unit]:
    """The units of a module, in the order in which it declares their first parameters.

    Args:
        shapes: of its parameters, by name.
    """
    found: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in shapes:
        path, kind, expert = _parse(name)
        kinds = found.setdefault((path, expert), {})
        # A second "weight" of one path, such as a scale beside it, is a unit of its own.
        target = kinds if kind not in kinds else found.setdefault((name, expert), {})
        target[kind] = name
    return [
        Unit(path, expert, kinds, {kind: tuple(shapes[name]) for kind, name in kinds.items()})
        for (path, expert), kinds in found.items()
    ]


def _parse(name: str) -> tuple[str, str, int | None]:
    """Path, kind and expert of a parameter."""
    scope, _, leaf = name.rpartition(".")
    in_path = _EXPERT.search(scope)
    expert = int(in_path[1]) if in_path else None
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return (scope, _KINDS[leaf], expert) if leaf in _KINDS else (name, WEIGHT, expert)
    if match["expert"]:
        expert = int(match["expert"])
    path = ".".join(filter(None, (scope, match["stem"])))
    return path, _KINDS.get(match["kind"], match["kind"]), expert
