"""Terms over parameter names: each packs its parts into one tensor and unpacks that tensor into its parts again.

A term says in which layout a weight is stored. Packing and unpacking only move elements, but for ``shift``, which adds
a number, ``constant``, which stands for a parameter that the reference lacks, and ``copies``, for one that TE has
several times. ``parity.weights`` has the functions that build terms, ``parity.weights.sides`` those that read them.

A term with parts has three methods: ``shape`` gives the packed shape for the shapes of its parts, or raises
``MisfitError``; ``pack`` makes one tensor of the parts; ``unpack`` is its inverse, given the shapes of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from einops import EinopsError
from einops import rearrange as rearranged
from torch import Tensor

from parity.user_error import UserError

Shape = tuple[int, ...]


class WeightMapError(UserError):
    """A weight map that does not fit its two modules; the message has one problem a line."""


class MisfitError(ValueError):
    """The shapes of a term's parts do not go together; the message says why."""


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
            raise MisfitError(f"the parts {_listed(parts)} differ in more than dimension {dim}")
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
            raise MisfitError(f"the experts {_listed(parts)} differ in shape")
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
            raise MisfitError(f"{part} has no two dimensions to exchange")
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
        return self._blocks(parts[0], self.order)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [self._blocks(value, [self.order.index(block) for block in range(len(self.order))])]

    def _blocks(self, value: Tensor, order: Sequence[int]) -> Tensor:
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
        return _interleave(parts, self.groups)

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return _separate(value, self.groups, self.head_dim)


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
        return torch.cat(_separate(parts[0], self.groups, self.head_dim))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        rows = self.groups * self.head_dim
        return [_interleave(value.split([len(value) - 2 * rows, rows, rows]), self.groups)]


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
        return self._exchange(parts[0], (self.rotary_dim // 2, 2))

    def unpack(self, value: Tensor, parts: Sequence[Shape]) -> Sequence[Tensor]:
        return [self._exchange(value, (2, self.rotary_dim // 2))]

    def _exchange(self, value: Tensor, rows: tuple[int, int]) -> Tensor:
        """Each head's first ``rotary_dim`` rows, seen as a matrix of rows, transposed."""
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
    """See ``copies``. Values are equal, so that one tells all; gradients add up, in FP64."""

    function: ClassVar[str] = "copies"
    parts: tuple[Side, ...]
    are_gradients: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        if len(set(parts)) > 1:
            raise MisfitError(f"the copies {_listed(parts)} differ in shape")
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


def _interleave(qkv: Sequence[Tensor], groups: int) -> Tensor:
    """[groups, heads / groups + 2, head_dim, ...], its first three dimensions flattened."""
    grouped = [part.unflatten(0, (groups, -1)) for part in qkv]
    return torch.cat(grouped, 1).flatten(0, 1)


def _separate(fused: Tensor, groups: int, head_dim: int) -> list[Tensor]:
    grouped = fused.unflatten(0, (groups, -1))
    parts = grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], 1)
    return [part.flatten(0, 1) for part in parts]


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))
