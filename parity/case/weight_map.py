"""Write weight maps: which parameters of the reference hold which of TE's, and in which layout."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar, get_args

import torch
from einops import EinopsError
from einops import rearrange as rearranged
from torch import Tensor

from parity.user_error import UserError

# Terms over parameter names: each packs its parts into one tensor and unpacks that tensor into its parts again.
#
# A term says in which layout a weight is stored. Packing and unpacking only move elements, with three exceptions:
# ``shift`` adds a number, ``constant`` stands for a parameter that the reference lacks, and ``copies`` for one that TE
# has several times. Further down are the functions that build terms, and those that read them.
#
# A term with parts has three methods: ``shape`` gives the packed shape for the shapes of its parts, or raises
# ``MisfitError``; ``pack`` makes one tensor of the parts; ``unpack`` is its inverse, given the shapes of the parts.


Shape = tuple[int, ...]


class WeightMapError(UserError):
    """Raised if a weight map does not fit its two modules; the message has one problem per line."""


class MisfitError(ValueError):
    """Raised if the shapes of a term's parts do not go together; the message says why."""


@dataclass(frozen=True, eq=False)
class Constant:
    """See ``constant``. Two are never equal, so that each can be a key of the same weight map."""

    function: ClassVar[str] = "constant"
    value: float
    shape: Shape


@dataclass(frozen=True)
class Stack:
    """See ``stack``."""

    function: ClassVar[str] = "stack"
    parts: tuple[Side, ...]
    dim: int = 0

    def shape(self, parts: Sequence[Shape]) -> Shape:
        rank = len(parts[0])
        if not -rank <= self.dim < rank:
            raise MisfitError(f"dim={self.dim} is out of range for {parts[0]}")
        dim = self.dim % rank
        if len({(len(part), part[:dim], part[dim + 1 :]) for part in parts}) > 1:
            raise MisfitError(f"the parts {_format_shapes(parts)} differ in more than dimension {dim}")
        return (*parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1 :])

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), self.dim)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return value.split([part[self.dim] for part in parts], self.dim)


@dataclass(frozen=True)
class Experts:
    """See ``experts``."""

    function: ClassVar[str] = "experts"
    parts: tuple[Side, ...]

    def shape(self, parts: Sequence[Shape]) -> Shape:
        if len(set(parts)) > 1:
            raise MisfitError(f"the experts {_format_shapes(parts)} differ in shape")
        return (len(parts), *parts[0])

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return value.unbind()


@dataclass(frozen=True)
class Transpose:
    """See ``transpose``."""

    function: ClassVar[str] = "transpose"
    parts: tuple[Side, ...]

    def shape(self, parts: Sequence[Shape]) -> Shape:
        (part,) = parts
        if len(part) < 2:
            raise MisfitError(f"{part} has fewer than two dimensions to exchange")
        return (*part[:-2], part[-1], part[-2])

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].transpose(-2, -1)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [value.transpose(-2, -1)]


@dataclass(frozen=True)
class Shift:
    """See ``shift``."""

    function: ClassVar[str] = "shift"
    parts: tuple[Side, ...]
    by: float

    def shape(self, parts: Sequence[Shape]) -> Shape:
        return parts[0]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] + self.by

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [value - self.by]


@dataclass(frozen=True)
class Reorder:
    """See ``reorder``."""

    function: ClassVar[str] = "reorder"
    parts: tuple[Side, ...]
    order: tuple[int, ...]
    dim: int = 0

    def shape(self, parts: Sequence[Shape]) -> Shape:
        (part,) = parts
        if not -len(part) <= self.dim < len(part):
            raise MisfitError(f"dim={self.dim} is out of range for {part}")
        if part[self.dim] % len(self.order):
            raise MisfitError(f"dimension {self.dim} of {part} has no {len(self.order)} equal blocks")
        return part

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return self._reorder_blocks(parts[0], self.order)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [self._reorder_blocks(value, [self.order.index(block) for block in range(len(self.order))])]

    def _reorder_blocks(self, value: Tensor, order: Sequence[int]) -> Tensor:
        blocks = value.split(value.shape[self.dim] // len(order), self.dim)
        return torch.cat([blocks[block] for block in order], self.dim)


@dataclass(frozen=True)
class InterleavedQKV:
    """See ``interleaved_qkv``."""

    function: ClassVar[str] = "interleaved_qkv"
    parts: tuple[Side, ...]
    groups: int
    head_dim: int

    def shape(self, parts: Sequence[Shape]) -> Shape:
        query, key, value = parts
        rows = self.groups * self.head_dim
        if not query or key != value or query[1:] != key[1:]:
            raise MisfitError(f"query {query}, key {key} and value {value} must agree in all but the query's rows")
        if key[0] != rows:
            raise MisfitError(f"key and value {key} must have groups * head_dim = {self.groups} * {self.head_dim} rows")
        if query[0] == 0 or query[0] % rows:
            raise MisfitError(f"query {query} must have a multiple of groups * head_dim = {rows} rows")
        return (query[0] + 2 * rows, *query[1:])

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return _interleave_qkv(parts, self.groups)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return _separate_qkv(value, self.groups, self.head_dim)


@dataclass(frozen=True)
class SeparatedQKV:
    """See ``separated_qkv``."""

    function: ClassVar[str] = "separated_qkv"
    parts: tuple[Side, ...]
    groups: int
    head_dim: int

    def shape(self, parts: Sequence[Shape]) -> Shape:
        (part,) = parts
        rows = self.groups * self.head_dim
        if not part or part[0] % rows or part[0] < 3 * rows:
            raise MisfitError(
                f"{part} must have groups * head_dim * n = {self.groups} * {self.head_dim} * n rows, n >= 3"
            )
        return part

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(_separate_qkv(parts[0], self.groups, self.head_dim))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        rows = self.groups * self.head_dim
        return [_interleave_qkv(value.split([len(value) - 2 * rows, rows, rows]), self.groups)]


@dataclass(frozen=True)
class RopeHalves:
    """See ``rope_halves``."""

    function: ClassVar[str] = "rope_halves"
    parts: tuple[Side, ...]
    head_dim: int
    rotary_dim: int

    def shape(self, parts: Sequence[Shape]) -> Shape:
        (part,) = parts
        if not part or part[0] % self.head_dim:
            raise MisfitError(f"{part} must have a multiple of head_dim = {self.head_dim} rows")
        return part

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return self._transpose_rotary_rows(parts[0], (self.rotary_dim // 2, 2))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [self._transpose_rotary_rows(value, (2, self.rotary_dim // 2))]

    def _transpose_rotary_rows(self, value: Tensor, rows: tuple[int, int]) -> Tensor:
        """Transpose each head's first ``rotary_dim`` rows, seen as a matrix of rows."""
        heads = value.unflatten(0, (-1, self.head_dim))
        rotated, kept = heads.split([self.rotary_dim, self.head_dim - self.rotary_dim], 1)
        rotated = rotated.unflatten(1, rows).transpose(1, 2).flatten(1, 2)
        return torch.cat([rotated, kept], 1).flatten(0, 1)


@dataclass(frozen=True)
class Rearrange:
    """See ``rearrange``."""

    function: ClassVar[str] = "rearrange"
    parts: tuple[Side, ...]
    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def shape(self, parts: Sequence[Shape]) -> Shape:
        (part,) = parts
        try:
            return tuple(self.pack([torch.empty(part, device="meta")]).shape)
        except EinopsError as error:
            raise MisfitError(str(error).splitlines()[-1].strip()) from None

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return rearranged(parts[0], self.pattern, **dict(self.sizes))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        before, after = self.pattern.split("->")
        axes = re.findall(r"[^\W\d]\w*", before)
        apart = f"{before} -> {' '.join(axes)} {'...' if '...' in before else ''}"
        lengths = rearranged(torch.empty(parts[0], device="meta"), apart, **dict(self.sizes)).shape
        return [rearranged(value, f"{after} -> {before}", **dict(zip(axes, lengths, strict=False)))]


@dataclass(frozen=True)
class Copies:
    """See ``copies``. Values are equal, so the first is taken; gradients add up, in FP64."""

    function: ClassVar[str] = "copies"
    parts: tuple[Side, ...]
    are_gradients: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        if len(set(parts)) > 1:
            raise MisfitError(f"the copies {_format_shapes(parts)} differ in shape")
        return parts[0]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(0, dtype=torch.float64) if self.are_gradients else parts[0]

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [value] * len(parts)


Compound = (
    Stack | Experts | Transpose | Shift | Reorder | InterleavedQKV | SeparatedQKV | RopeHalves | Rearrange | Copies
)
Term = Constant | Compound
Side = str | Term
SIDES = get_args(Side)


def _interleave_qkv(qkv: Sequence[Tensor], groups: int) -> Tensor:
    """Return ``[groups, heads / groups + 2, head_dim, ...]`` with its first three dimensions flattened."""
    grouped = [part.unflatten(0, (groups, -1)) for part in qkv]
    return torch.cat(grouped, 1).flatten(0, 1)


def _separate_qkv(fused: Tensor, groups: int, head_dim: int) -> list[Tensor]:
    grouped = fused.unflatten(0, (groups, -1))
    parts = grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], 1)
    return [part.flatten(0, 1) for part in parts]


def _format_shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))


# Reading a side of a weight map: its names, its shape, its packed tensor, how a user would write it.


_MOST_SHOWN = 16  # numbers of an order that are shown


def names(side: Side) -> Iterator[str]:
    """Yield the parameters that a side mentions, from left to right."""
    if isinstance(side, str):
        yield side
    elif not isinstance(side, Constant):
        for part in side.parts:
            yield from names(part)


def holds(side: Side, kind: type[Constant | Copies | Experts | Shift]) -> bool:
    """Return whether a term of this kind occurs in a side."""
    if isinstance(side, (str, Constant)):
        return isinstance(side, kind)
    return isinstance(side, kind) or any(holds(part, kind) for part in side.parts)


def shape_of(side: Side, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of the packed tensor.

    Raises:
        MisfitError: if the parts do not go together.
        KeyError: if a parameter is not in ``shapes``.
    """
    if isinstance(side, str):
        return tuple(shapes[side])
    if isinstance(side, Constant):
        return side.shape
    parts = [shape_of(part, shapes) for part in side.parts]
    try:
        return side.shape(parts)
    except MisfitError as misfit:
        raise MisfitError(f"{describe(side)}: {misfit}") from None


def pack(side: Side, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return one tensor from the parameters of a side; constants get the dtype and device of ``like``."""
    if isinstance(side, str):
        return tensors[side]
    if isinstance(side, Constant):
        return torch.full(side.shape, side.value, dtype=like.dtype, device=like.device)
    return side.pack([pack(part, tensors, like) for part in side.parts])


def unpack(side: Side, value: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the inverse of ``pack``: the parameters of a side, whose shapes are given, from the packed tensor."""
    if isinstance(side, str):
        return {side: value}
    if isinstance(side, Constant):
        return {}
    parts = side.unpack(value, [shape_of(part, shapes) for part in side.parts])
    return {
        name: tensor
        for part, tensor_of_part in zip(side.parts, parts, strict=True)
        for name, tensor in unpack(part, tensor_of_part, shapes).items()
    }


def linear_part(side: Side) -> Side:
    """Return how gradients transform: in the same layout, but shifts and constants add nothing, and copies add up."""
    if isinstance(side, str):
        return side
    if isinstance(side, Constant):
        return Constant(0.0, side.shape)
    if isinstance(side, Shift):
        return linear_part(side.parts[0])
    parts = tuple(map(linear_part, side.parts))
    return Copies(parts, are_gradients=True) if isinstance(side, Copies) else dataclasses.replace(side, parts=parts)


def renamed(side: Side, rename: Callable[[str], Side]) -> Side:
    """Return the same layout with other parameter names, or with terms in their places."""
    if isinstance(side, str):
        return rename(side)
    if isinstance(side, Constant):
        return dataclasses.replace(side)
    return dataclasses.replace(side, parts=tuple(renamed(part, rename) for part in side.parts))


def describe(side: object, module: str = "") -> str:
    """Return the expression that builds a side, as a user would write it.

    Args:
        side: a side of a weight map.
        module: a prefix for each function's name, such as ``parity.``, for text to be pasted; if it is
            empty, an order of many rows is shortened.
    """
    if isinstance(side, str):
        return f'"{side}"'
    if isinstance(side, Constant):
        return f"{module}constant({', '.join(map(repr, (side.value, *side.shape)))})"
    if not isinstance(side, Compound):
        return repr(side)
    parts = [*(describe(part, module) for part in side.parts), *_describe_options(side, in_full=bool(module))]
    return f"{module}{side.function}({', '.join(parts)})"


def _shorten_value(value: object) -> str:
    """Return an option's value; only the ends of an order of hundreds of rows."""
    if not isinstance(value, tuple) or len(value) <= _MOST_SHOWN:
        return repr(value)
    first, last = (", ".join(map(repr, some)) for some in (value[:3], value[-3:]))
    return f"({first}, ..., {last})"


def _describe_options(side: Compound, in_full: bool) -> list[str]:
    shown = repr if in_full else _shorten_value
    if isinstance(side, Rearrange):
        return [f'"{side.pattern}"', *(f"{axis}={length}" for axis, length in side.sizes)]
    return [
        f"{option.name}={shown(getattr(side, option.name))}"
        for option in dataclasses.fields(side)
        if option.name != "parts" and getattr(side, option.name) != option.default
    ]


# Weight maps: which parameters of the reference hold which of the TE module's, and in which layout.
#
# A map is ``{left: right, ...}``. Left sides name reference parameters, right sides TE parameters; each is a
# parameter's name or a term of names, and both sides of an entry pack to the same tensor::
#
#     {
#         "norm.weight": "layer_norm_weight",
#         stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
#         transpose("c_attn.weight"): stack("query_weight", "key_weight", "value_weight"),
#     }
#
# Terms nest. Written once, a map carries weights and gradients in both directions.


WeightMap = Mapping[Side, Side]


def stack(*terms: Side, dim: int = 0) -> Term:
    """Return the terms one after another along an existing dimension: gate over up, or Q over K over V.

    Args:
        terms: names or terms of equal shape except for ``dim``.
        dim: the dimension along which they follow each other.
    """
    return Stack(_require_sides("stack", *terms), _require_dimension("stack", dim))


def experts(*terms: Side) -> Term:
    """Return the terms, all of one shape, along a new first dimension, ``[experts, ...]``: one for each expert."""
    return Experts(_require_sides("experts", *terms))


def transpose(term: Side) -> Term:
    """Return the term with its last two dimensions exchanged, e.g. a Conv1D weight ``[in, out]`` as ``[out, in]``."""
    return Transpose(_require_sides("transpose", term))


def shift(term: Side, by: float) -> Term:
    """Return the term plus a number.

    With ``by=-1.0`` on the left, it is a norm's gain as TE's ``zero_centered_gamma`` stores it.

    In FP64, a shift by 1 and back is exact for values that were rounded to a narrower dtype, if their magnitude is 0 or
    between 2**-29 and 2**53 for FP32, 0 or from 2**-45 to 2**53 for BF16, and always for FP16. Below that, the last
    bits of the value are finer than the last bit of the sum. In the narrower dtype itself, the shift rounds.
    """
    return Shift(_require_sides("shift", term), _require_finite_number("shift", by))


def reorder(term: Side, order: tuple[int, ...], dim: int = 0) -> Term:
    """Return equal blocks of the term in another order: ``reorder("up_gate.weight", (1, 0))`` has gate over up.

    Args:
        order: block ``order[i]`` of the term becomes block ``i``.
        dim: the dimension that is cut into ``len(order)`` equal blocks.
    """
    if not isinstance(order, Sequence) or not order or set(order) != set(range(len(order))):
        raise WeightMapError(f"reorder() needs each number from 0 to n - 1 once, not {order!r}")
    return Reorder(_require_sides("reorder", term), tuple(order), _require_dimension("reorder", dim))


def interleaved_qkv(query: Side, key: Side, value: Side, *, groups: int, head_dim: int) -> Term:
    """Return Q, K and V as TE fuses them with ``qkv_weight_interleaved=True``, its default.

    The result, viewed as ``[groups, heads / groups + 2, head_dim, ...]``, holds each group's query heads, then its key,
    then its value (TE 2.20, ``MultiheadAttention.forward``). As many groups as heads are plain multi-head attention,
    one group is multi-query attention.

    Args:
        query: weight ``[heads * head_dim, in]`` or bias ``[heads * head_dim]``.
        key: weight or bias with ``groups * head_dim`` rows.
        value: weight or bias with ``groups * head_dim`` rows.
        groups: key-value heads, TE's ``num_gqa_groups``.
        head_dim: channels of one head.
    """
    _require_positive("interleaved_qkv", groups=groups, head_dim=head_dim)
    return InterleavedQKV(_require_sides("interleaved_qkv", query, key, value), groups, head_dim)


def separated_qkv(term: Side, *, groups: int, head_dim: int) -> Term:
    """Return all of Q, then K, then V, from a term laid out as by ``interleaved_qkv``, which shows the number of heads.

    E.g. GPT-2's fused weight in TE's: ``{transpose("c_attn.weight"): separated_qkv("qkv.weight", groups=12,
    head_dim=64)}``.
    """
    _require_positive("separated_qkv", groups=groups, head_dim=head_dim)
    return SeparatedQKV(_require_sides("separated_qkv", term), groups, head_dim)


def rope_halves(term: Side, *, head_dim: int, rotary_dim: int | None = None) -> Term:
    """Return rows of a query or key projection for the halves form of RoPE, from rows for the interleaved form.

    The interleaved form rotates rows ``2i`` and ``2i + 1`` of a head together (Meta's Llama, GPT-J; TE's
    ``interleaved=True``), the halves form rows ``i`` and ``i + rotary_dim / 2`` (Hugging Face's ``rotate_half``; TE's
    default).

    Args:
        term: weight ``[heads * head_dim, in]`` or bias ``[heads * head_dim]``.
        head_dim: channels of one head.
        rotary_dim: channels at a head's start that are rotated, the others stay; None means all.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    _require_positive("rope_halves", head_dim=head_dim, rotary_dim=rotary)
    if rotary % 2 or rotary > head_dim:
        raise WeightMapError(f"rope_halves() rotates pairs: rotary_dim={rotary} must be even and at most {head_dim}")
    return RopeHalves(_require_sides("rope_halves", term), head_dim, rotary)


def rearrange(term: Side, pattern: str, **sizes: int) -> Term:
    """Return the term with its elements in another order or another shape, written as for ``einops.rearrange``.

    To turn gate and up in alternate rows into gate over up: ``rearrange("gate_up.weight", "(ffn two) hidden -> (two
    ffn) hidden", two=2)``. To turn a convolution over patches into a linear layer: ``rearrange("conv.weight", "out c h
    w -> out (c h w)")``. To turn fused Q, K and V of each head into all of Q, then K, then V: ``rearrange("qkv.weight",
    "(h three d) i -> (three h d) i", h=16, three=3)``.

    Args:
        term: a parameter's name or a term.
        pattern: a pattern of einops, with the same axes on both sides of its arrow.
        sizes: the sizes of axes that do not follow from the shape.
    """
    if not isinstance(pattern, str) or pattern.count("->") != 1:
        raise WeightMapError(f'rearrange() needs a pattern "before -> after" as in einops, not {pattern!r}')
    _require_positive("rearrange", **sizes)
    return Rearrange(_require_sides("rearrange", term), pattern, tuple(sizes.items()))


def copies(*terms: Side) -> Term:
    """Return a term for TE parameters that all hold the same reference parameter; right sides only.

    A reference whose attention and MLP read one norm (GPT-J, Phi, Cohere) becomes a layer that has two: ``{"ln.weight":
    copies("self_attention.layernorm_qkv.layer_norm_weight", "layernorm_mlp.layer_norm_weight")}``. The reference's
    gradient is compared with the sum of theirs.
    """
    return Copies(_require_sides("copies", *terms))


def constant(value: float, *shape: int) -> Term:
    """Return a parameter that the reference lacks and TE has; left sides only.

    For example, ``{constant(0.0, hidden): "fc1_bias"}``. Its gradient has no counterpart in the reference and is
    dropped.
    """
    for length in shape:
        if not isinstance(length, Integral) or length < 0:
            raise WeightMapError(f"constant() needs its shape as whole numbers, one after the other, not {length!r}")
    return Constant(_require_finite_number("constant", value), shape)


def under(weights: WeightMap, reference: str, candidate: str | None = None) -> dict[Side, Side]:
    """Return the map of a module that is part of another: each name gets a prefix.

    A layer's map, written once, serves every layer: ``under(LAYER, "model.layers.{i}.", "layers.{i}.")``, where ``{i}``
    stands for each number that the reference's parameters have there.

    Args:
        weights: the map of the module on its own.
        reference: the prefix of its parameters' names in the reference, e.g. ``"model.layers.{i}."``.
        candidate: their prefix in the TE model; None for the same.
    """
    if not isinstance(weights, Mapping):
        raise WeightMapError(f"under() takes a map {{left: right}}, not {type(weights).__name__}")
    before = reference if candidate is None else candidate
    return {
        renamed(left, lambda name: reference + name): renamed(right, lambda name: before + name)
        for left, right in weights.items()
    }


def _require_sides(function: str, *terms: Side) -> tuple[Side, ...]:
    for term in terms:
        if not isinstance(term, SIDES):
            raise WeightMapError(f"{function}() takes parameters' names and terms, not {term!r}")
    if not terms:
        raise WeightMapError(f"{function}() needs at least one parameter's name or term")
    return terms


def _require_finite_number(function: str, value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise WeightMapError(f"{function}() needs a finite number, not {value!r}")
    return float(value)


def _require_dimension(function: str, dim: int) -> int:
    if not isinstance(dim, int):
        raise WeightMapError(f"{function}(): a dimension is a whole number, not {dim!r}")
    return dim


def _require_positive(function: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise WeightMapError(f"{function}() needs a positive whole number {name}, not {number!r}")
