"""Finds a case's mistakes before anything runs: built at each size without memory, its parts must fit together."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from parity.case import Case, Pair, Size, draw_inputs
from parity.declaring.declaration import are_same
from parity.declaring.meta_build import without_memory
from parity.declaring.modules import check_module
from parity.declaring.outside_te import has_te, of_te
from parity.inputs import Rng
from parity.te_state.attention_backend import BACKENDS, AttentionBackend, checked_choice, has_attention
from parity.user_error import INTERRUPTS, UserError
from parity.watching.raised import first_paragraph, users_frame, users_line
from parity.weights import transfer
from parity.weights.check import check_map
from parity.weights.other_names import other_names
from parity.weights.terms import WeightMapError


@dataclass(frozen=True, eq=False)
class CheckedSize:
    """A size at which a case fits together.

    Attributes:
        size: as the case declares it.
        label: the shape of the first input tensor, e.g. ``2x1024x512``, and where sizes of the case share it, the
            entries in which they differ, e.g. ``2x1024x512-ffn1536``; unique in the case.
        has_attention: whether TE picks an attention backend in the candidate.
        has_te: whether the candidate has a module of TE's.
        inputs: how many floating-point tensors the reference is given.
        trained: how many of the reference's parameters get gradients.
    """

    size: Size
    label: str
    has_attention: bool = False
    has_te: bool = True
    inputs: int = 0
    trained: int = 0


def check_case(case: Case, te: ModuleType) -> list[CheckedSize]:
    """Check a case at each of its sizes.

    Both modules are built without memory or values. Where the factory or ``inputs`` needs values, both are called again
    for real. Neither may keep tensors in a cache of its own across calls: without memory they are useless later.

    Args:
        case: the case.
        te: the module ``transformer_engine.pytorch``.

    Returns:
        The sizes, in the case's order.

    Raises:
        UserError: if the factory raises or returns no two modules, the weight map does not fit them, or ``inputs``
            raises or returns no tensor; names the case, its file and line, and the size.
    """
    checked = [_check_size(case, te, size) for size in case.sizes]
    labels = _labels([each.label for each in checked], case.sizes)
    return [dataclasses.replace(each, label=label) for each, label in zip(checked, labels, strict=True)]


def attention_of(case: Case, checked: CheckedSize, asked: str) -> Sequence[AttentionBackend | None]:
    """The attention backends to force, each in an item of its own; None lets TE choose.

    Args:
        case: may demand some, where the run leaves it open.
        checked: a candidate without attention is one item, whatever is asked for.
        asked: of the run, one of ``CHOICES``.

    Raises:
        UserError: if it is none of them.
    """
    checked_choice(asked)
    if not checked.has_attention:
        return (None,)
    if asked == "auto":
        return case.attention or (None,)
    return [backend for backend in BACKENDS if asked in (backend, "all")]


def _check_size(case: Case, te: ModuleType, size: Size) -> CheckedSize:
    """The size, with the shape of the first input tensor as label."""
    with located(case, size):
        pair, drawn = _build_without_memory(case, te, size)
        _check_plain(pair)
        try:
            check_map(
                pair.weights,
                transfer.parameter_shapes(pair.reference),
                transfer.parameter_shapes(pair.candidate),
                other_names(pair.reference),
                other_names(pair.candidate),
            )
        except WeightMapError as error:
            raise WeightMapError(f"{error}\n{_advice(case)}") from None
        tensors = list(_tensors(drawn))
        if not tensors:
            raise UserError(f"inputs returned no tensor but {_type_name(drawn)}")
    return CheckedSize(
        size,
        label="x".join(map(str, tensors[0].shape)) or "scalar",
        has_attention=has_attention(pair.candidate),
        has_te=has_te(pair.candidate),
        inputs=sum(tensor.is_floating_point() for tensor in tensors),
        trained=sum(parameter.requires_grad for parameter in pair.reference.parameters()),
    )


def _advice(case: Case) -> str:
    if case.path.suffix != ".py":
        return "parity.suggest_map(pair) proposes a map"
    return f"`parity suggest-map {case.path.name}::{case.name}` proposes a map"


@contextmanager
def located(case: Case, size: Size) -> Iterator[None]:
    """Within the context, a ``UserError`` names the case, its file and line, and the size."""
    try:
        yield
    except UserError as error:
        at_size = f", size ({', '.join(f'{key}={value!r}' for key, value in size.items())})" if size else ""
        where = f"{case.path}:{case.line}: pair {case.name!r}{at_size}" if case.line else "the pair"
        raise type(error)(f"{where}:{_indented(str(error))}") from error.__cause__


def _build_without_memory(case: Case, te: ModuleType, size: Size) -> tuple[Pair, Any]:
    """The pair and its inputs, without memory if they can be built so."""
    try:
        with without_memory():
            pair = case.build(te, size)
            _check_pair(pair)
            return pair, draw_inputs(pair, size, Rng(0))
    except (UserError, *INTERRUPTS):
        raise
    except BaseException:
        # Sound code can need values; whether it does, only the real call tells, and it tells the real cause.
        pass
    return build(case, te, size)


def build(case: Case, te: ModuleType, size: Size) -> tuple[Pair, Any]:
    """The pair at a size, and its inputs.

    Raises:
        UserError: if the factory or ``inputs`` raises, or the factory returns no pair of two modules.
    """
    with _as_user_error("the factory", case.path):
        pair = case.build(te, size)
    _check_pair(pair)
    with _as_user_error("inputs", case.path):
        return pair, draw_inputs(pair, size, Rng(0))


@contextmanager
def _as_user_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The user looks for the mistake in the file that declares the case, even if code further down raised.
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        place = f" in line {lines[-1]}" if lines else ""
        innermost = users_frame(error)
        deeper = innermost is not None and Path(innermost.filename).resolve() != path
        further = f"; at {users_line(error)}" if deeper else ""
        raise UserError(f"{what} raised {type(error).__name__}{place}: {first_paragraph(error)}{further}") from error


def _check_pair(pair: Any) -> None:
    if not isinstance(pair, Pair):
        raise UserError(f"the factory must return a parity.Pair, not {_type_name(pair)}")
    check_module("reference", pair.reference)
    check_module("candidate", pair.candidate)
    if pair.reference is pair.candidate:
        raise UserError("reference and candidate are the same module, which compares it with itself")
    for role, function in (
        ("inputs", pair.inputs),
        ("call_reference", pair.call_reference),
        ("call_candidate", pair.call_candidate),
    ):
        if not (callable(function) or (function is None and role != "inputs")):
            raise UserError(f"{role} must be a function, not {_type_name(function)}")
    if pair.fill not in (True, False, None):
        raise UserError(f"fill must be True, False or None, not {pair.fill!r}")


def _check_plain(pair: Pair) -> None:
    """A reference that computes with TE's kernels would be compared with these; they know no FP64, either."""
    for name, part in of_te(pair.reference).items():
        if list(part.parameters(recurse=False)) or has_attention(part):
            what = f"its {name}" if name else "it"
            advice = "" if has_te(pair.candidate) else "; are reference and candidate exchanged?"
            raise UserError(
                f"the reference must be plain PyTorch, which runs in FP64, but {what} is TransformerEngine's "
                f"{_type_name(part)}{advice}"
            )


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (tuple, list, Mapping)):
        for entry in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(entry)


def _labels(shapes: Sequence[str], sizes: Sequence[Size]) -> list[str]:
    """Each shape, made unique by the entries in which the sizes that share it differ."""
    sharing = [[other for j, other in enumerate(sizes) if shapes[j] == shape] for shape in shapes]
    labels = [
        "-".join([shape, *(_entry_label(key, size) for key in _differing(group) if key in size)])
        for shape, size, group in zip(shapes, sizes, sharing, strict=True)
    ]
    counts = Counter(labels)
    return [label if counts[label] == 1 else f"{label}-size{i}" for i, label in enumerate(labels)]


def _differing(sizes: Sequence[Size]) -> list[str]:
    """The keys, in order of appearance, whose values are not the same in all sizes."""
    keys = dict.fromkeys(key for size in sizes for key in size)
    return [key for key in keys if not all(key in size and are_same(size[key], sizes[0].get(key)) for size in sizes)]


def _entry_label(key: str, size: Size) -> str:
    return key + re.sub(r"[^A-Za-z0-9_.-]+", "_", str(size[key])).strip("_")


def _indented(text: str) -> str:
    """Several lines, as a weight map's problems are, each on its own below the first."""
    lines = text.splitlines()
    return f" {text}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
