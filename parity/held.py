"""The weights that a candidate holds already: which of them are what the map says, and which are not."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity.case import Pair
from parity.te_state.quantized_parameters import dequantized_tensor, is_quantized
from parity.weights import transfer
from parity.weights.sides import linear_part, names

# An error of quantization is partly chance: of a value between two that the format has, either may be held.
_QUANTIZATIONS = 1.5
_ROUNDED_TWICE = 1.01  # from FP32 to BF16, and from there to FP16
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Held:
    """The parameters that a candidate holds, by name.

    Attributes:
        alike: those that are what the map says, but for rounding; without quantized ones.
        unlike: those that are not.
    """

    alike: dict[str, Tensor] = field(default_factory=dict)
    unlike: dict[str, Tensor] = field(default_factory=dict)


def held_weights(pair: Pair) -> Held:
    """Compare the candidate's weights with what the map makes of the reference's.

    A port may hold in BF16 what its reference holds in FP32, or the reverse. Where one parameter of an entry of the map
    differs by more than such a rounding, that parameter is unlike, and none of its entry is alike.

    Args:
        pair: its reference in FP64, with the weights that it was given; its candidate as it was given.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in pair.candidate.named_parameters()}
    shapes = transfer.parameter_shapes(pair.candidate)
    expected = transfer.to_candidate(pair.weights, reference, shapes)
    # A loader may round a gain before it takes 1 from it.
    linear = {linear_part(left): right for left, right in pair.weights.items()}
    unshifted = transfer.to_candidate(linear, reference, shapes)
    precise = _holds(reference.values())
    held_in = {
        dtype: _holds(x for x in parameters.values() if x.dtype is dtype and not is_quantized(x))
        for dtype in {x.dtype for x in parameters.values()}
    }

    def fits(name: str) -> bool:
        held = parameters[name]
        if is_quantized(held):
            return _is_quantized_from(held, expected[name])
        dtype = max(precise, held_in[held.dtype], key=lambda dtype: torch.finfo(dtype).eps)
        return _is_rounded(held, expected[name], unshifted[name], dtype)

    alike: dict[str, Tensor] = {}
    unlike: dict[str, Tensor] = {}
    for right in pair.weights.values():
        of_entry = list(names(right))
        differing = [name for name in of_entry if not fits(name)]
        unlike.update((name, dequantized_tensor(parameters[name]).clone()) for name in differing)
        if not differing:
            alike.update((name, parameters[name]) for name in of_entry if not is_quantized(parameters[name]))
    return Held(alike, unlike)


def _holds(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of 16 bits that has all of their values; FP32 where neither has, or where all are constants."""
    some = [x for x in tensors if x.numel() and bool((x != x.flatten()[0]).any())]
    fitting = (dtype for dtype in _NARROW if some and all(torch.equal(x.to(dtype).to(x.dtype), x) for x in some))
    return next(fitting, torch.float32)


def _is_rounded(held: Tensor, expected: Tensor, unshifted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether no element is off by more than a rounding of it, and of what it was shifted from, if it was."""
    info = torch.finfo(dtype)
    before_shift = unshifted.abs() * (unshifted != expected)
    size = (expected.abs() + before_shift).clamp_min(info.tiny)
    return bool(((held.double() - expected).abs() <= _ROUNDED_TWICE * info.eps / 2 * size).all())


def _is_quantized_from(held: Tensor, expected: Tensor) -> bool:
    """Return whether what a quantized parameter holds is off by no more than its format costs."""
    filled = copy.deepcopy(held)
    with torch.no_grad():
        filled.copy_(expected.to(filled.dtype))
    off, costs = ((dequantized_tensor(x).double() - expected).norm() for x in (held, filled))
    return bool(off <= _QUANTIZATIONS * costs)
