"""Groups a module's parameters into units: what one linear layer or norm holds, its weight and its bias."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parity.weights.terms import Shape

WEIGHT, BIAS = "weight", "bias"

# ``q_proj.weight``, TE's ``query_weight``, and ``weight3`` of te.GroupedLinear's fourth expert.
_LEAF = re.compile(r"(?P<stem>.*?)_?(?P<kind>weight|bias|gamma|beta)(?P<expert>\d*)")
_KINDS = {"gamma": WEIGHT, "gain": WEIGHT, "scale": WEIGHT, "beta": BIAS, "offset": BIAS}
# Of ``nn.MultiheadAttention`` with ``kdim``.
_QUERY_WEIGHT, _BIAS_OF_ALL = "q_proj_weight", "in_proj_bias"
_EXPERT = re.compile(r"(?:^|\.)(?:local_)?experts?\.(\d+)(?=\.|$)")
_LAST_NUMBER = re.compile(r"(?P<before>(?:.*\.)?)(?P<number>\d+)(?P<after>(?:\.[^.]*\D[^.]*)*)")


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

    @property
    def has_bias_of_all(self) -> bool:
        """Whether it is a query whose bias is query's, key's and value's, see ``one_bias``."""
        weight, bias = self.parameters.get(WEIGHT, ""), self.parameters.get(BIAS, "")
        return weight.endswith(_QUERY_WEIGHT) and bias.endswith(_BIAS_OF_ALL)

    def without(self, names: Container[str]) -> Unit:
        """The same unit, with those parameters left out."""
        kept = {kind: name for kind, name in self.parameters.items() if name not in names}
        return replace(self, parameters=kept, shapes={kind: self.shapes[kind] for kind in kept})


def is_stack(unit: Unit) -> bool:
    """Whether its weight has three dimensions, as that of all experts ``[experts, out, in]``."""
    return unit.expert is None and len(unit.shapes.get(WEIGHT, ())) == 3


def units_of(shapes: Mapping[str, Shape]) -> list[Unit]:
    """The units of a module, in the order in which it declares their first parameters.

    Args:
        shapes: of its parameters, by name.
    """
    found: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in shapes:
        weight = _weight_of(name, shapes)
        path, kind, expert = _parse(name) if weight is None else (_parse(weight)[0], BIAS, _parse(weight)[2])
        kinds = found.setdefault((path, expert), {})
        # A second "weight" of one path, such as a scale beside it, is a unit of its own.
        target = kinds if kind not in kinds else found.setdefault((name, expert), {})
        target[kind] = name
    return [
        Unit(path, expert, kinds, {kind: tuple(shapes[name]) for kind, name in kinds.items()})
        for (path, expert), kinds in found.items()
    ]


def with_experts(units: Sequence[Unit], count: int) -> list[Unit]:
    """The units, numbered as experts where the last number in their path counts to as many as there are experts.

    For a mixture whose list of experts has another name; units stay as they are where one has an expert's number.
    """
    families: dict[tuple[str, str], list[int]] = defaultdict(list)
    found = [_LAST_NUMBER.fullmatch(unit.path) for unit in units]
    for match in filter(None, found):
        families[match["before"], match["after"]].append(int(match["number"]))
    if any(unit.expert is not None or (is_stack(unit) and unit.shape[0] == count) for unit in units):
        return list(units)
    return [
        replace(unit, expert=int(match["number"]))
        if match and sorted(families[match["before"], match["after"]]) == list(range(count))
        else unit
        for unit, match in zip(units, found, strict=True)
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


def _weight_of(name: str, shapes: Mapping[str, Shape]) -> str | None:
    """The weight that a bias named ``b1`` or ``b_in`` belongs to, ``w1`` or ``w_in`` beside it; ``g`` for a norm's.

    The bias of query, key and value belongs to the query, where each has a weight.
    """
    scope, dot, leaf = name.rpartition(".")
    if leaf == _BIAS_OF_ALL:
        query = f"{scope}{dot}{_QUERY_WEIGHT}"
        return query if query in shapes else None
    if leaf[:1] not in ("b", "B"):
        return None
    small = leaf[0] == "b"
    weight, gain = (f"{scope}{dot}{first if small else first.upper()}{leaf[1:]}" for first in "wg")
    if weight in shapes and len(shapes[name]) == len(shapes[weight]) - 1:
        return weight
    return gain if gain in shapes and len(shapes[name]) == 1 and shapes[gain] == shapes[name] else None
