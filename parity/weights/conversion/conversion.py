"""Convert a state dict by a pair's weight map: ``parity.convert``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from parity import te
from parity.case.case import Case, Pair, Size
from parity.case.map_check import check_map, other_names
from parity.case.transfer import parameter_shapes
from parity.case.validate import modules_without_memory, proposes_a_map, with_buffers_alone
from parity.case.weight_map import WeightMap
from parity.te import Backend
from parity.user_error import UserError
from parity.weights.conversion.plan import (
    FLOATING,
    ConversionError,
    Ignored,
    Layout,
    Plan,
    Wanted,
    ignored,
    is_extra_state,
    layout_of,
    plan,
    prefixes,
)
from parity.weights.conversion.saved import join, separate
from parity.weights.conversion.scaled import SCALES, dequantize

Direction = Literal["te", "reference"]


def convert(
    pair: Case | Pair,
    state_dict: Mapping[str, Tensor],
    to: Direction = "te",
    *,
    size: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    prefix: str | Sequence[str] = (),
    te_prefix: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    copy: bool = True,
    backend: Backend | Literal["auto"] = "auto",
) -> dict[str, Tensor]:
    """Convert a checkpoint from the reference's layout to TE's by the pair's weight map, or back.

    ``te_module.load_state_dict(converted)`` takes the result as it is, with ``strict=True``: it has the empty
    ``_extra_state`` that a new module of TE's has, and tied parameters under each of their names.

    The pair's modules are built without memory. Elements are moved, not computed with, so converting back restores each
    bit. Only a ``shift`` (a gain that TE stores minus 1) is computed, in FP64, and rounded once to the result's dtype.
    A gain ``g`` from 0.5 to 2 is exact there and back; others may be off by half a unit in the last place of ``g - 1``,
    and another half of one of their own.

    Args:
        pair: a function decorated with ``@parity.pair``, or a ``parity.Pair``.
        state_dict: the state dict of the reference (``to="te"``) or of the TE module (``to="reference"``), by name; in
            FP64, FP32, BF16 or FP16, on any device, in the shapes that the modules have at ``size``. TE's quantized
            tensors are read as the numbers that they stand for, and the reference's FP8 codes with scales beside them
            (``weight_scale_inv`` or ``weight_scale``) as BF16 numbers. If the reference is a model of transformers, its
            checkpoint may also have the names, and a weight for each expert, with which transformers saves it.
        to: which of the two modules the result is for.
        size: arguments of the pair's function with which its modules have the checkpoint's shapes; it need not be among
            the pair's sizes, and arguments that it leaves out are as in the first of these. None for the first of the
            pair's sizes that fits.
        dtype: the dtype of the result's floating-point parameters; None to keep theirs. Parameters that one TE
            parameter holds together get a dtype that holds each of them; a ``constant`` gets that of most elements.
        prefix: a prefix of keys in the reference's checkpoint that names in the reference lack, such as ``"model."``;
            with ``"model.layers.3.=layer."``, names begin with ``layer.`` instead. Several may be given: the longest
            that fits counts, and keys that none fits stay as they are.
        te_prefix: the same for TE's checkpoint and module.
        ignore: keys of ``state_dict`` that may be left out, as shell patterns: ``"*.inv_freq"``.
        copy: whether the result shares no memory with ``state_dict``. With False, tensors that the map only renames
            share it.
        backend: ``gpu``, ``cpu``, or ``auto`` for TE's real kernels if they can run; TE's modules are built, but not
            run.

    Returns:
        Tensors by their keys, in the order of the module's own ``state_dict()``, contiguous, on the device on which
        they were given. Persistent buffers that both sides have in the same shape, under the same name or the same last
        name in modules whose parameters the map puts together, are carried over. Buffers that only the new side has are
        as the pair's function makes them. Those that only the old side has are left out if they have the values that
        the pair's function gives them. What a user's own modules return from ``get_extra_state`` is not converted.

    Raises:
        ConversionError: a ``UserError``, if keys are missing or superfluous, or shapes or dtypes do not fit; if the
            reference has no place for what TE holds (a bias that no longer is what ``constant`` says, ``copies`` that
            have drifted apart), or tied parameters differ; if a number is beyond the dtype's largest.
        UserError: if an argument is not as above, or the pair cannot be built or its map does not fit.
        parity.te.BackendUnavailable: if the backend is not available on this machine.
    """
    if not isinstance(copy, bool):
        raise UserError(f"copy must be True or False, not {copy!r}")
    planned = planned_conversion(
        pair, state_dict, to, size, dtype, prefix, te_prefix, ignore, copy=copy, backend=backend
    )
    found = {key: tensor for step in planned.steps for key, tensor in step.compute().items()}
    return {key: found[key] for key in planned.order}


def planned_conversion(
    pair: Case | Pair,
    state_dict: Mapping[str, Tensor],
    to: Direction,
    size: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    prefix: str | Sequence[str],
    te_prefix: str | Sequence[str],
    ignore: str | Sequence[str],
    copy: bool,
    backend: Backend | Literal["auto"],
    saved: bool = False,
) -> Plan:
    """Plan what ``convert`` does, with its arguments; no value of ``state_dict`` is read.

    With ``saved``, the reference's tensors are made as Hugging Face's files have them: tied parameters only under their
    first names, and what transformers joins as it loads, such as experts, apart.

    Raises:
        UserError: as ``convert``, except for problems that only values show.
    """
    if to not in get_args(Direction):
        raise UserError(f'to is {to!r}, but must be "te" or "reference"')
    if dtype not in (None, *FLOATING):
        raise UserError(f"dtype is {dtype!r}, but must be torch.float64, float32, bfloat16 or float16")
    wanted = Wanted(dtype, ignored(ignore), copy)
    _check_tensors(state_dict, wanted.ignore)
    both = prefixes(prefix, "prefix"), prefixes(te_prefix, "te_prefix")
    misfits: list[str] = []
    scales: list[str] = []
    if to == "te":
        state_dict, scales = dequantize(state_dict, torch.bfloat16 if dtype is None else torch.float32)
    for sides in _build_sides(pair, size, backend):
        source, target = sides.layouts(to)
        is_saved = saved and to == "reference"
        if is_saved:
            target = dataclasses.replace(target, order=tuple(x for x in target.order if x not in target.tied))
        try:
            if to == "te":
                held = join(state_dict, sides.pair.reference, source, both[0])
                made = plan(sides.weights, held, source, target, both[0], both[1], wanted)
                made.left_out.update(dict.fromkeys(scales, SCALES))
                return made
            inverse = {right: left for left, right in sides.weights.items()}  # each is there once, as the map fits
            planned = plan(inverse, state_dict, source, target, both[1], both[0], wanted)
            return separate(planned, sides.pair.reference) if is_saved else planned
        except ConversionError as error:
            misfits.append(f"{sides.where}:\n{_indent_lines(str(error))}")
    # Report the size with the fewest problems, which is likely to be the one that was meant.
    raise ConversionError(min(misfits, key=lambda text: text.count("\n")))


def _check_tensors(state_dict: object, may_be_left_out: Ignored) -> None:
    """Check that this is a state dict, with readable numbers for all keys that may not be left out.

    Raises:
        UserError: if not.
    """
    if not isinstance(state_dict, Mapping):
        raise UserError(f"state_dict must be a mapping from names to tensors, not {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if isinstance(key, str) and is_extra_state(key):  # a user's module may keep anything there
            continue
        if not isinstance(key, str) or not isinstance(value, Tensor):
            nested = isinstance(value, Mapping)
            advice = f"; is the state dict of the module under [{key!r}]?" if nested else ""
            what = f"is a {type(value).__name__} and no tensor" if isinstance(key, str) else "has no name for a key"
            raise UserError(f"state_dict[{key!r}] {what}{advice}")
        missing = "" if key in may_be_left_out else _why_no_numbers(value)
        if missing:
            raise UserError(f"state_dict[{key!r}] {missing}")


def _why_no_numbers(tensor: Tensor) -> str:
    """Return why a tensor's numbers cannot be read as they are; an empty text if they can."""
    if is_lazy(tensor):
        return "has no shape yet: call the module once before its state is saved"
    if tensor.is_nested:
        return "is a nested tensor: pad it first"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}): convert it by to_dense() first"
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        return "has no values: it is on the meta device, or fake; load the checkpoint before it is converted"
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if is_plain and tensor.numel() and not tensor.untyped_storage().nbytes():
        return "has lost its memory, as parameters that FSDP holds in another place; take a full state dict"
    return ""


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# Both modules of a pair, without memory.


@dataclasses.dataclass(frozen=True)
class _Sides:
    """A pair at a size.

    Attributes:
        where: the pair and the size, for messages.
        pair: the pair, whose modules may be on the meta device.
        case, te, size: what the pair was built from; the case is None for a ``parity.Pair`` of modules.
    """

    where: str
    pair: Pair
    case: Case | None = None
    te: ModuleType | None = None
    size: Size = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> WeightMap:
        """The weight map."""
        return self.pair.weights

    def layouts(self, to: Direction) -> tuple[Layout, Layout]:
        """Return the layouts of the old and the new checkpoint's modules."""
        both = layout_of("reference", self.pair.reference), layout_of("TE", self.pair.candidate)
        unshared = both[0].buffers.keys() ^ both[1].buffers.keys()
        held = {**both[0].buffers, **both[1].buffers}
        if self.case is not None and any(held[name].is_meta for name in unshared):
            assert self.te is not None
            built = with_buffers_alone(self.case, self.te, self.size)
            of_both = layout_of("reference", built.reference), layout_of("TE", built.candidate)
            both = (
                dataclasses.replace(both[0], buffers=of_both[0].buffers),
                dataclasses.replace(both[1], buffers=of_both[1].buffers),
            )
        return both if to == "te" else (both[1], both[0])


def _build_sides(
    pair: Case | Pair, size: Mapping[str, Any] | None, backend: Backend | Literal["auto"]
) -> Iterator[_Sides]:
    """Yield the pair at each size that may be the checkpoint's."""
    if isinstance(pair, Pair):
        if size is not None:
            raise UserError("size is only for a pair whose function builds the modules; these modules exist already")
        yield _check_weight_map(_Sides("the pair's modules", pair))
        return
    if not isinstance(pair, Case):
        raise UserError(f"expected a parity.Pair or a function decorated with @parity.pair, not {type(pair).__name__}")
    modules = te.kernels(backend).te
    for one in pair.sizes if size is None else [{**pair.sizes[0], **size}]:
        at = f" at {', '.join(f'{key}={value!r}' for key, value in one.items())}" if one else ""
        built = modules_without_memory(pair, modules, one)
        yield _check_weight_map(_Sides(f"{pair}{at}", built, pair, modules, one))


def _check_weight_map(sides: _Sides) -> _Sides:
    pair = sides.pair
    try:
        check_map(
            pair.weights,
            parameter_shapes(pair.reference),
            parameter_shapes(pair.candidate),
            other_names(pair.reference),
            other_names(pair.candidate),
        )
    except UserError as error:
        advice = f"\n  {proposes_a_map(sides.case)}" if sides.case is not None else ""
        raise type(error)(f"{sides.where}: the weight map does not fit:\n{_indent_lines(str(error))}{advice}") from None
    return sides
