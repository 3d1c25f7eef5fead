"""Plan a conversion: rename a checkpoint's keys, say which tensors are made of which, and what does not fit the map."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import Tensor, nn

from parity.case.map_check import Problem, lines, other_names
from parity.case.transfer import counterparts, parameter_shapes
from parity.case.weight_map import Constant, Copies, Shape, Shift, Side, WeightMap, describe, holds, names, pack, unpack
from parity.te.state import dequantized_tensor
from parity.user_error import UserError

# A checkpoint's keys as names of a module: prefixes, further names of tied parameters, patterns to ignore.


# What a module's state dict holds. TE's modules have a key ``_extra_state`` each, see below.


EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Layout:
    """Hold what a module's state dict holds, by name.

    Attributes:
        kind: ``reference`` or ``TE``.
        order: every key that has a tensor, in the module's order.
        parameters: shapes of the parameters, tied ones under their first name.
        tied: further names of tied parameters, with their first.
        buffers: the persistent buffers.
        states: keys of what TE's modules hold besides parameters and buffers.
    """

    kind: str
    order: tuple[str, ...]
    parameters: Mapping[str, Shape]
    tied: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    states: tuple[str, ...]

    def further(self, name: str) -> list[str]:
        """Return all names that a parameter has, the first one first."""
        return [name, *(other for other, first in self.tied.items() if first == name)]


def layout_of(kind: str, module: nn.Module) -> Layout:
    """Return what a module's state dict holds, whether the module has values or not."""
    held = module.state_dict(keep_vars=True)
    others = other_names(module)
    return Layout(
        kind,
        tuple(name for name, value in held.items() if isinstance(value, Tensor)),
        parameter_shapes(module),
        {name: first for name, first in others.tied.items() if name in held},
        {name: value for name, value in held.items() if name in others.buffers},
        tuple(name for name, value in held.items() if is_extra_state(name) and isinstance(value, Tensor)),
    )


def is_extra_state(key: str) -> bool:
    """Return whether a key is that of a module's extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE


# A checkpoint's keys may have other prefixes than the module's names, such as when the module is a part of a model.


@dataclass(frozen=True)
class Prefixes:
    """Exchange prefixes of a checkpoint's keys for those of the module's names, and the other way round.

    Attributes:
        pairs: pairs of both; the longest that fits counts, and a name that none fits stays as it is.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def inside(self, key: str) -> str:
        """Return a checkpoint's key as the module names it."""
        return _replace_prefix(key, self.pairs)

    def outside(self, name: str) -> str:
        """Return a module's name as the checkpoint has it."""
        return _replace_prefix(name, [(inner, outer) for outer, inner in self.pairs])


def prefixes(texts: str | Sequence[str], argument: str) -> Prefixes:
    """Read ``"model."``, which the module's names lack, or ``"model.layers.3.=layer."``.

    Raises:
        UserError: if a text has another form, or two of them have the same prefix on one side.
    """
    given = [texts] if isinstance(texts, str) else list(texts)
    for text in given:
        if not isinstance(text, str) or text.count("=") > 1 or text in ("", "="):
            raise UserError(
                f'{argument} must be a prefix of the checkpoint\'s keys, such as "model.", or such a prefix and its '
                f'replacement in the module\'s names, such as "model.layers.3.=layer.", not {text!r}'
            )
    pairs = tuple((outer, inner) for outer, _, inner in (text.partition("=") for text in given))
    for side in zip(*pairs, strict=True):
        twice = [text for text, count in Counter(side).items() if count > 1]
        if twice:
            raise UserError(f"{argument} has {twice[0]!r} twice on one side, so one name would become two")
    return Prefixes(pairs)


def _replace_prefix(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    fitting = [pair for pair in pairs if name.startswith(pair[0])]
    before, after = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
    return after + name[len(before) :]


_LOOKED_AT = 20  # names; each is compared with every key that ends like it


def suggested_prefix(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the prefix that turns the keys into most of the names, as ``prefixes`` reads it; None if there is none."""
    looked_at = names[:_LOOKED_AT]
    by_end: dict[str, list[str]] = {}
    for key in keys:
        by_end.setdefault(_get_last_part(key), []).append(key)
    found: Counter[tuple[str, str]] = Counter()
    for name in looked_at:
        found.update({_strip_common_end(key, name) for key in by_end.get(_get_last_part(name), ())})
    if not found:
        return None
    (outer, inner), count = max(found.items(), key=lambda entry: (entry[1], -len("".join(entry[0]))))
    if 2 * count < len(looked_at) or not (outer or inner):
        return None
    return f"{outer}={inner}" if inner else outer


def _get_last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _strip_common_end(key: str, name: str) -> tuple[str, str]:
    """Return what precedes the parts that both names end with."""
    ours, theirs = key.split("."), name.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)


@dataclass(frozen=True)
class Ignored:
    """Hold keys that may be left out, as shell patterns."""

    patterns: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.patterns)


def ignored(patterns: str | Sequence[str]) -> Ignored:
    """Return the patterns; a text is a single pattern.

    Raises:
        UserError: if a pattern is not a text.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) and pattern for pattern in given):
        raise UserError(f'ignore takes patterns of keys, such as "*.inv_freq", not {patterns!r}')
    return Ignored(given)


# Which tensors a conversion makes of which, in which dtype, and what does not fit the map.


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TO_IGNORE = 'leave it out by a pattern, ignore=["..."] or --ignore'
OF_ANOTHER_SIZE = "if the checkpoint has another size than the pair, give it: size=dict(layers=32), --size layers=32"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class ConversionError(UserError):
    """Raised if a checkpoint does not fit a pair's modules; the message has one problem per line."""


# What a plan is made of.


@dataclass(frozen=True)
class Made:
    """A tensor that a conversion makes.

    Attributes:
        key: its key in the new checkpoint.
        shape: its shape.
        dtype: its dtype.
    """

    key: str
    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return how many bytes its elements have."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Step:
    """Tensors that are made together.

    Attributes:
        made: the tensors.
        compute: returns them, by their keys.
    """

    made: tuple[Made, ...]
    compute: Callable[[], dict[str, Tensor]]


def remembering(steps: Sequence[Step]) -> Callable[[int], dict[str, Tensor]]:
    """Return a function that computes a step by its number, and remembers the last one, whose tensors it may give."""
    latest: dict[int, dict[str, Tensor]] = {}

    def compute(i: int) -> dict[str, Tensor]:
        if i not in latest:
            latest.clear()
            latest[i] = steps[i].compute()
        return latest[i]

    return compute


@dataclass
class Plan:
    """A conversion whose names, shapes and dtypes were checked.

    Attributes:
        order: the new checkpoint's keys in its module's order.
        steps: the steps that make them.
        left_out: keys of the old checkpoint that the new one has no place for, each with the reason.
        rounded: how far each tensor that the map does arithmetic with may be from the exact one, by its key; known when
            its step has been computed. On the way back, that is at least half the distance between neighbours of the
            largest number that TE held, unless the result's own largest number is no smaller.
        given: the old checkpoint's tensors, by the names that its module has for them.
        map_checksum: the SHA-256 of the weight map, in hexadecimal digits.
    """

    order: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    map_checksum: str = ""


@dataclass(frozen=True)
class Wanted:
    """Say how tensors are handed over.

    Attributes:
        dtype: the dtype of floating-point tensors; None for the one that they have.
        ignore: keys of the old checkpoint that may be left out.
        copy: whether no tensor may share its memory with the old checkpoint's.
    """

    dtype: torch.dtype | None = None
    ignore: Ignored = field(default_factory=Ignored)
    copy: bool = True


# The old checkpoint against the module that it should fit.


@dataclass(frozen=True)
class _Found:
    """Hold the keys of a checkpoint that have a place.

    Attributes:
        keys: the key of each parameter that was found, by the parameter's name.
        buffers: the same for buffers.
        again: further keys of tied parameters, with the one that was taken.
        carried: which of the old module's buffers each of the new one's is.
    """

    carried: Mapping[str, str]
    keys: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)


def plan(
    weights: WeightMap,
    old: Mapping[str, Tensor],
    source: Layout,
    target: Layout,
    old_prefixes: Prefixes,
    new_prefixes: Prefixes,
    wanted: Wanted,
) -> Plan:
    """Plan the conversion of a checkpoint, without reading its values.

    Args:
        weights: the map with its left sides for ``source``, whichever way that is.
        old: the checkpoint.
        source: what its module holds; buffers that ``target`` lacks have values.
        target: what the other module holds; buffers that ``source`` lacks have values.
        old_prefixes: prefixes of keys in ``old``.
        new_prefixes: prefixes of keys in the new checkpoint.
        wanted: how tensors are handed over.

    Raises:
        ConversionError: with every key that is missing, superfluous, or does not fit.
    """
    alike = counterparts(weights, target.buffers, source.buffers)
    # One that is called otherwise may be another quantity of the same shape.
    alike = {new: own for new, own in alike.items() if new.rpartition(".")[2] == own.rpartition(".")[2]}
    found, made = _Found(alike), Plan()
    without_place = list(_sorted_in(old, source, target, old_prefixes, wanted.ignore, found, made))
    problems = [
        *_report_missing(old, source, found, old_prefixes),
        *_report_misfits(old, source, found),
        *without_place,
    ]
    if problems:
        raise ConversionError("\n".join(lines(problems)))
    usual = _usual_dtype(old[key] for key in found.keys.values())
    tensors = _Tensors(old, found.keys, found.again, usual)
    for left, right in weights.items():
        made.steps.append(_Entry(left, right, tensors, target, new_prefixes, wanted, made).step())
    made.steps += _carry_over(old, target, found, new_prefixes, wanted.copy)
    made.order = tuple(map(new_prefixes.outside, target.order))
    entries = "\n".join(f"{describe(left, 'parity.')}: {describe(right, 'parity.')}" for left, right in weights.items())
    made.map_checksum = hashlib.sha256(entries.encode()).hexdigest()
    made.given = {name: old[key] for name, key in (found.keys | found.buffers).items()}
    return made


def _sorted_in(
    old: Mapping[str, Tensor],
    source: Layout,
    target: Layout,
    before: Prefixes,
    ignore: Ignored,
    found: _Found,
    made: Plan,
) -> Iterator[Problem]:
    """Find a place for each key, and yield a problem for each that has none."""
    numbered = {_mask_numbers(name) for name in source.parameters}
    for key, tensor in old.items():
        name = before.inside(key)
        if is_extra_state(name) and (name in source.states or source.kind == "TE" or not isinstance(tensor, Tensor)):
            made.left_out[key] = "extra state of modules, such as TE's FP8 scales"
            continue
        first = source.tied.get(name, name)
        if first in source.parameters:
            taken = found.keys.setdefault(first, key)
            if taken != key:
                if before.inside(taken) == name:
                    yield Problem(f'the checkpoint has both "{taken}" and "{key}" for the {source.kind}\'s "{name}"')
                found.again[key] = taken
        elif name in found.carried.values() and tensor.shape == source.buffers[name].shape:
            found.buffers[name] = key
        elif key in ignore:
            made.left_out[key] = "ignored"
        elif name in source.buffers and _are_the_same(tensor, source.buffers[name]):
            made.left_out[key] = "buffers that the pair's function makes anew"
        elif name in source.buffers:
            yield Problem(
                f'the checkpoint has the buffer "{key}" {tuple(tensor.shape)}, whose values are not those that '
                f"the pair's function makes; the {target.kind} has no buffer of this name and shape to take them",
                "give it one, under the same name or in the module whose parameters the map makes of those beside it, "
                f"or {_TO_IGNORE}",
            )
        else:
            yield Problem(
                f'the checkpoint has "{key}" {tuple(tensor.shape)}, which is no parameter of the {source.kind}',
                OF_ANOTHER_SIZE if _mask_numbers(name) in numbered else f"if it is not needed, {_TO_IGNORE}",
            )


def _mask_numbers(name: str) -> str:
    """Return the name without its numbers, which is the same in each layer: ``layers.#.norm.weight``."""
    return _NUMBER.sub("#", name)


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Return whether a buffer has the values of a new module's, in the dtype of the checkpoint."""
    if other.is_meta or one.shape != other.shape:
        return False
    return torch.equal(one, other.to(one.device, one.dtype))


def _report_missing(old: Mapping[str, Tensor], source: Layout, found: _Found, before: Prefixes) -> Iterator[Problem]:
    """Yield a problem for each parameter that the checkpoint lacks."""
    missing = [name for name in source.parameters if name not in found.keys]
    taken = {*found.keys.values(), *found.again, *found.buffers.values()}
    prefix = suggested_prefix((key for key in old if key not in taken), missing)
    argument = "te_prefix" if source.kind == "TE" else "prefix"
    option = f"--{argument.replace('_', '-')}"
    numbered = {_mask_numbers(before.inside(key)) for key in taken}
    if prefix:
        advice = f'is {argument}="{prefix}" ({option} "{prefix}") meant?'
    elif missing and all(_mask_numbers(name) in numbered for name in missing):
        advice = OF_ANOTHER_SIZE
    else:
        advice = "was the checkpoint saved from the whole module?"
    for name in missing:
        key = before.outside(name)
        called = f'"{key}"' if key == name else f'"{key}" for the {source.kind}\'s "{name}"'
        yield Problem(f"the checkpoint lacks {called} {tuple(source.parameters[name])}", advice)


def _report_misfits(old: Mapping[str, Tensor], source: Layout, found: _Found) -> Iterator[Problem]:
    """Yield a problem for each tensor that has another shape, or numbers that a map cannot move."""
    for name, key in found.keys.items():
        tensor, shape = old[key], source.parameters[name]
        if tuple(tensor.shape) != tuple(shape):
            yield Problem(
                f'"{key}" is {tuple(tensor.shape)} in the checkpoint, and the {source.kind} has {tuple(shape)}',
                "give the checkpoint's size if it is not the pair's: size=dict(width=4096), --size width=4096",
            )
        elif tensor.dtype not in FLOATING:
            yield Problem(
                f'"{key}" holds {tensor.dtype}, and the weight map moves FP64, FP32, BF16 and FP16',
                "if these are codes with scales, dequantize the checkpoint first",
            )
    for key, taken in found.again.items():
        if old[key].shape != old[taken].shape:
            yield Problem(f'"{key}" and "{taken}" are tied in the {source.kind}, but differ in shape')


def _usual_dtype(tensors: Iterator[Tensor]) -> torch.dtype:
    """Return the dtype that most elements have."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32


# One entry of the map.


@dataclass(frozen=True)
class _Tensors:
    """The old checkpoint's parameters.

    Attributes:
        old: the checkpoint.
        keys: the key of each parameter.
        again: further keys of tied parameters, with the one that is taken.
        usual: the dtype of most elements, which a constant gets.
    """

    old: Mapping[str, Tensor]
    keys: Mapping[str, str]
    again: Mapping[str, str]
    usual: torch.dtype

    def read(self, name: str) -> Tensor:
        """Return a parameter's values.

        Raises:
            ConversionError: if the checkpoint has other values under another name of the parameter.
        """
        taken = self.keys[name]
        for key in (key for key, other in self.again.items() if other == taken):
            if not torch.equal(self.old[key], self.old[taken]):
                raise ConversionError(
                    f'"{key}" and "{taken}" are one parameter of the module, but differ in the checkpoint; '
                    "build the pair's module without the tie"
                )
        return _read_plainly(self.old[taken])

    def dtype(self, side: Side) -> torch.dtype:
        """Return the narrowest dtype that holds all numbers of a side."""
        return reduce(torch.promote_types, [self.old[self.keys[name]].dtype for name in names(side)])


@dataclass(frozen=True)
class _Entry:
    """Move one entry of the map, from the old side to the new."""

    old_side: Side
    new_side: Side
    tensors: _Tensors
    target: Layout
    prefixes: Prefixes
    wanted: Wanted
    plan: Plan

    def step(self) -> Step:
        """Return the step that makes the entry's tensors."""
        return Step(
            tuple(
                Made(self.prefixes.outside(other), tuple(self.target.parameters[name]), self._target_dtype)
                for name in names(self.new_side)
                for other in self._list_target_names(name)
            ),
            self._compute_tensors,
        )

    def _list_target_names(self, name: str) -> list[str]:
        return [other for other in self.target.further(name) if other in self.target.order]

    @property
    def _source_dtype(self) -> torch.dtype:
        """Return the dtype of the numbers that are read."""
        return self.tensors.dtype(self.old_side) if any(names(self.old_side)) else self.tensors.usual

    @property
    def _target_dtype(self) -> torch.dtype:
        return self.wanted.dtype or self._source_dtype

    def _compute_tensors(self) -> dict[str, Tensor]:
        shifts = holds(self.old_side, Shift) or holds(self.new_side, Shift)
        # A shift rounds once, where its result is stored; in 16 bits it would round before that as well.
        among = torch.float64 if shifts else self._source_dtype
        given = {name: self.tensors.read(name).to(among) for name in names(self.old_side)}
        like = torch.empty(0, dtype=among)
        moved = unpack(self.new_side, pack(self.old_side, given, like), self.target.parameters)
        self._check_nothing_is_lost(given, moved, like)
        found: dict[str, Tensor] = {}
        lost = 0.0
        if shifts and self.target.kind == "reference":  # the number that TE held more of may have cost the last bits
            before, after = (
                max(_measure_distance(x, torch.zeros(())) for x in some.values()) for some in (given, moved)
            )
            lost = math.ldexp(torch.finfo(self._source_dtype).eps, math.frexp(before)[1] - 2) if before > after else 0.0
        for name, tensor in moved.items():
            written = [self.prefixes.outside(other) for other in self._list_target_names(name)]
            stored = self._cast_tensor(written[0], tensor)
            if shifts:
                self.plan.rounded.update(dict.fromkeys(written, max(lost, _measure_distance(stored, tensor))))
            found.update(dict.fromkeys(written, stored))
        return found

    def _cast_tensor(self, key: str, tensor: Tensor) -> Tensor:
        if not self.wanted.copy:
            stored = tensor.to(self._target_dtype).contiguous()
        else:
            stored = tensor.to(self._target_dtype, copy=True, memory_format=torch.contiguous_format)
        if self._target_dtype is not tensor.dtype and bool((stored.isinf() & ~tensor.isinf()).any()):
            raise ConversionError(
                f'"{key}" has numbers beyond the largest of {self._target_dtype}, up to '
                f"{tensor.abs().max().item():.3g}; take another dtype"
            )
        return stored

    def _check_nothing_is_lost(self, given: Mapping[str, Tensor], moved: Mapping[str, Tensor], like: Tensor) -> None:
        """Refuse to drop what the new side has no place for: copies that differ, and values other than the constant.

        Raises:
            ConversionError: with the names.
        """
        if not (holds(self.old_side, Copies) or holds(self.new_side, Constant)):
            return
        again = unpack(self.old_side, pack(self.new_side, moved, like), {n: tuple(x.shape) for n, x in given.items()})
        for name, tensor in given.items():
            key = self.tensors.keys[name]
            if key in self.wanted.ignore or _are_equal(tensor, again[name]):
                continue
            if holds(self.new_side, Constant):
                raise ConversionError(
                    f'"{key}" differs from the constant that the map gives for it, '
                    f"up to {_measure_distance(tensor, again[name]):.3g} away, so that the reference has no place for "
                    f"it; give the reference such a parameter, or {_TO_IGNORE}"
                )
            raise ConversionError(
                f'"{key}" is one parameter of the reference with another of TE, and the two have drifted apart, by up '
                f"to {_measure_distance(tensor, again[name]):.3g}; make them equal first, or {_TO_IGNORE} to take the "
                "first"
            )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, except for the last bits that a shift and its inverse lose in FP64."""
    eps = torch.finfo(torch.float64).eps if one.dtype is torch.float64 else 0.0
    return torch.allclose(one, other, rtol=eps, atol=eps, equal_nan=True)


def _measure_distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else math.nan


def _read_plainly(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its numbers: not quantized by TE, negated or conjugated when it is read."""
    return dequantized_tensor(tensor.detach()).resolve_conj().resolve_neg()


# What is carried over unchanged: buffers by name, and what TE's modules keep besides tensors.


def _carry_over(
    old: Mapping[str, Tensor], target: Layout, found: _Found, after: Prefixes, copy: bool
) -> Iterator[Step]:
    """Yield a step for each buffer and each extra state of the new checkpoint.

    TE's modules all have a key ``_extra_state``, and ``load_state_dict(strict=True)`` asks for it. Once a module has
    run with delayed scaling, it holds the pickled scales and amax histories. Before that it is an empty tensor, which
    TE reads as nothing (``TransformerEngineBaseModule.get_extra_state`` and ``set_extra_state`` in
    ``pytorch/module/base.py``, the operations' in ``pytorch/ops/op.py``, TE 2.14 to 2.20). The empty tensor is written
    here, so that scales begin anew, as in a new module.
    """
    for name, own in target.buffers.items():
        key = found.buffers.get(found.carried.get(name, ""))
        held = own if key is None else old[key]
        yield _as_is(after.outside(name), held, copy)
    for name in target.states:
        assert name.endswith(EXTRA_STATE)
        yield _as_is(after.outside(name), torch.empty(0, dtype=torch.uint8), copy=False)


def _as_is(key: str, tensor: Tensor, copy: bool) -> Step:
    def compute() -> dict[str, Tensor]:
        held = _read_plainly(tensor)
        return {key: held.clone(memory_format=torch.contiguous_format) if copy else held}

    return Step((Made(key, tuple(tensor.shape), tensor.dtype),), compute)
