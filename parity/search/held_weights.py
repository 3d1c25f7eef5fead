"""Report which of a candidate's weights are not what the map says, and what they are instead."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity.case.transfer import parameter_shapes, to_reference
from parity.case.weight_map import names
from parity.mistakes.catalogue import readings_of_weights
from parity.mistakes.codes import CODES, finding
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import relative_l2
from parity.numerics.factors import uneven
from parity.passes.prepare import Prepared, calls_of
from parity.result import Finding
from parity.shown import few_of

_MOST_TOLD = 4  # parameters, and explanations
_SAME = 0.15  # the share of a tensor's norm that four bits lose; weights in another order differ by more than the norm
_FIRST = 256  # this many elements tell most pairs of parameters apart
_FEW = 8  # if there are at most this many entries, every two of them are tried in each other's place
_ROUNDED = 2.0**-7  # what 16 bits lose of a number
_NOTHING = 0.02  # of an error; the sorted numbers of two draws differ by more of what the unsorted ones do
_UNLIKE = 0.1  # unrelated weights rarely reach this cosine, even with few elements


def held_findings(prepared: Prepared) -> tuple[Finding, ...]:
    """Return a finding if the candidate holds other weights than the map says; empty if it does not."""
    unlike = prepared.unlike
    if not unlike:
        return ()
    which = few_of([_off(name, prepared) for name in unlike], _MOST_TOLD)
    try:
        readings = _readings(prepared)
    except Exception:  # the weights differ, whether or not that can be explained
        readings = []
    explained = {name for _, parameters in readings for name in parameters}
    rest = {
        name: right
        for left, right in prepared.weights.items()
        for name in names(right)
        if name in unlike and not (any(names(left)) and explained.issuperset(names(left)))
    }
    told = [_told(*reading) for reading in readings] + [_as_it_is(name, prepared) for name in rest]
    said = [f"{text}." for text in told[:_MOST_TOLD]]
    more = f" {len(told) - _MOST_TOLD} more are explained in the same way." if len(told) > _MOST_TOLD else ""
    return (
        finding(
            "weights-not-as-mapped",
            f"the candidate's weights differ from the reference's, converted by the map: {which}. "
            f"{' '.join(said)}{more} Load them as the map says, or correct the map; "
            "parity.Pair(..., fill=True) compares with the map's weights in their place",
        ),
    )


def _off(name: str, prepared: Prepared) -> str:
    """Return a parameter's name, and by how much it differs."""
    expected = prepared.candidate_weights[name]
    off = f"off by {_relative(prepared.unlike[name], expected):.2g} of its norm" if expected.any() else "0 is due"
    return f'"{name}" ({off})'


def _readings(prepared: Prepared) -> list[tuple[Hypothesis, set[str]]]:
    """Return other readings of the map's entries under which the weights are right, with the parameters they explain.

    The parameters are the reference's, and readings that explain most of them come first. A reading is tried on the
    candidate's weights, mapped back to the reference's layout.
    """
    reference = {name: parameter.detach() for name, parameter in prepared.reference.named_parameters()}
    held = {name: prepared.unlike.get(name, tensor).double() for name, tensor in prepared.candidate_weights.items()}
    back = to_reference(prepared.weights, held, parameter_shapes(prepared.reference))
    entries = {
        left: right for left, right in prepared.weights.items() if any(name in prepared.unlike for name in names(right))
    }
    found: list[tuple[Hypothesis, set[str]]] = []
    for hypothesis in readings_of_weights(prepared, calls_of(prepared).trace, entries):
        is_tried = hypothesis.title != "parameters-exchanged" or len(entries) <= _FEW
        read = hypothesis.read(back) if hypothesis.read and is_tried else {}
        if read and all(_explains(x, back[name], reference[name]) for name, x in read.items()):
            found.append((hypothesis, set(read)))
    chosen: list[tuple[Hypothesis, set[str]]] = []
    for hypothesis, parameters in sorted(found, key=lambda one: -len(one[1])):
        if all(parameters.isdisjoint(others) for _, others in chosen):
            chosen.append((hypothesis, parameters))
    return chosen


def _told(hypothesis: Hypothesis, parameters: set[str]) -> str:
    named = f"{CODES[hypothesis.title]} {hypothesis.title}"
    listed = few_of(sorted(parameters), _MOST_TOLD)
    return f"Its {listed} would be right if you {hypothesis.repair} ({named})"


def _explains(read: Tensor, held: Tensor, reference: Tensor) -> bool:
    """Return whether the candidate's weight is the reference's if it is read differently, but not as it is."""
    before, after = _relative(held, reference), _relative(read, reference)
    return after <= _SAME * min(before, 1.0)


def _as_it_is(name: str, prepared: Prepared) -> str:
    """Say what a parameter holds if no other reading of the map explains it."""
    held, expected = prepared.unlike[name].double(), prepared.candidate_weights[name].double()
    if held.numel() > 1 and bool((held == held.flatten()[0]).all()):
        constructed = ", as when it was constructed" if held.flatten()[0] in (0.0, 1.0) else ""
        return f'"{name}" holds {held.flatten()[0]:g} throughout{constructed}'
    off = held - expected
    for other, tensor in prepared.candidate_weights.items():
        if other != name and tensor.shape == held.shape and _are_same(held, tensor, _relative(held, expected)):
            return f'"{name}" holds what "{other}" should hold'
    cosine = torch.nn.functional.cosine_similarity(held.flatten(), expected.flatten(), 0).item()
    # A factor tells how weights differ from their mean, too: all weights of norms are nearly multiples of each other.
    varies = _SAME * _relative(expected.mean(), expected)
    several = uneven(held, expected)
    if several is not None and several.left < varies:
        return f'"{name}" is {several.told}'
    factor = math.copysign((held.norm() / expected.norm()).item(), cosine) if bool(expected.any()) else 0.0
    if several is None and abs(factor - 1) > _SAME and 1 - cosine**2 < varies**2:
        return f'"{name}" holds {factor:.3g} times what it should'
    own, right = (x.flatten().sort().values for x in (held, expected))
    is_rounding = bool(((own - right).abs() <= _ROUNDED * right.abs()).all())
    if is_rounding and (own - right).norm() < _NOTHING * off.norm():
        return f'"{name}" holds the right numbers in an order that no known layout has'
    rows = off.flatten(1).norm(dim=1) if held.dim() > 1 else off.abs()
    wrong = (rows > _SAME * (expected.norm() / len(rows) ** 0.5)).nonzero().flatten().tolist()
    if wrong and len(wrong) < len(rows):
        more = f"by more than {_SAME:.0%} of what a row usually holds"
        return f'"{name}" differs in {len(wrong)} of {len(rows)} rows, from {wrong[0]} to {wrong[-1]}, {more}'
    if abs(cosine) < _UNLIKE:
        return (
            f'"{name}" holds unrelated numbers, as if it had never been loaded (the cosine of the two is {cosine:.2g})'
        )
    return (
        f'"{name}" is neither a multiple of what it should be, nor the same in another order, as if it were of another '
        f"checkpoint, or computed in another way (the cosine of the two is {cosine:.4g})"
    )


def _are_same(one: Tensor, other: Tensor, off: float) -> bool:
    """Return whether two tensors of one shape hold the same, and far more so than is off by ``off``.

    If they do not, the first elements usually tell.
    """
    first = (x.flatten()[:_FIRST] for x in (one, other))
    return _relative(*first) <= 2 * _SAME and _relative(one, other) <= _SAME * min(off, 1.0)


def _relative(held: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of the expected tensor; infinite if only the latter is 0."""
    off = torch.linalg.vector_norm(held.double() - expected.double()).item()
    return relative_l2(off, torch.linalg.vector_norm(expected.double()).item())
