"""Parameters that no entry of a weight map mentions: what to say of each, and what is probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parity.weights.alike import Problem
from parity.weights.notation import WeightMap
from parity.weights.other_names import Parameters
from parity.weights.sides import describe, names
from parity.weights.terms import SIDES, Constant, Shape
from parity.weights.ties import UNTIED, fill_both, tied_elsewhere

_BIAS, _WEIGHT = "bias", "weight"


def unused_of_reference(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """What to say of the reference's parameters that the map leaves out."""
    used = {name for left in weights if isinstance(left, SIDES) for name in names(left)}
    for name, shape in reference.shapes.items():
        if name in used:
            continue
        text = f'reference parameter "{name}" {tuple(shape)} is used by no entry'
        if (other := tied_elsewhere(name, shape, candidate, reference)) is not None:
            yield Problem(f'{text}; TE ties its "{other}" to "{candidate.others.tied[other]}", {UNTIED}')
        elif (norm := _norm_of_bias(name, weights, reference, candidate)) is not None:
            yield Problem(f'{text}; TE\'s "{norm}" has no bias', 'is normalization="LayerNorm" meant?')
        else:
            yield Problem(text)


def unused_of_te(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """What to say of TE's parameters that the map does not fill."""
    used = {name for right in weights.values() if isinstance(right, SIDES) for name in names(right)}
    for name, shape in candidate.shapes.items():
        if name in used:
            continue
        text = f'TE parameter "{name}" {tuple(shape)} is filled by no entry'
        zeros = describe(Constant(0.0, tuple(shape)))
        if (other := tied_elsewhere(name, shape, reference, candidate)) is not None:
            first = reference.others.tied[other]
            ties = f'the reference ties "{other}" to "{first}", and TE has both apart'
            yield Problem(f"{text}; {ties}: {fill_both(weights, first, name)}")
        elif (norm := norm_without_bias(name, weights, reference, candidate)) is not None:
            yield Problem(
                f'{text}; the reference\'s norm "{norm}" has no bias and looks like an RMSNorm',
                'build the TE module with normalization="RMSNorm"; only if the reference has a LayerNorm without a '
                f"bias, map {zeros} to TE's",
            )
        else:
            advice = (
                f"where the reference has none, build the TE module without it or map {zeros} to it; where another "
                "parameter of TE holds the same, map to copies(...) of both"
            )
            yield Problem(text, advice if weights else "")


def norm_without_bias(bias: str, weights: WeightMap, reference: Parameters, candidate: Parameters) -> str | None:
    """The weight of the reference's norm that has no bias, as an RMSNorm, where TE's norm has this one.

    None where the parameter is no bias of a norm, or the reference's norm has one or is PyTorch's LayerNorm.
    """
    weight = _weight_beside(bias, candidate.shapes)
    if weight is None:
        return None
    lefts = [left for left, right in weights.items() if isinstance(right, SIDES) and weight in names(right)]
    for name in (name for left in lefts if isinstance(left, SIDES) for name in names(left)):
        if name in reference.shapes and name not in reference.others.layer_norms and not _has_bias(name, reference):
            return name
    return None


def _norm_of_bias(bias: str, weights: WeightMap, reference: Parameters, candidate: Parameters) -> str | None:
    """The weight of TE's norm that has no bias, where the reference's norm has this one."""
    weight = _weight_beside(bias, reference.shapes)
    if weight is None:
        return None
    rights = [right for left, right in weights.items() if isinstance(left, SIDES) and weight in names(left)]
    for name in (name for right in rights if isinstance(right, SIDES) for name in names(right)):
        if name in candidate.shapes and name.replace(_WEIGHT, _BIAS) not in candidate.shapes:
            return name
    return None


def _weight_beside(bias: str, shapes: Mapping[str, Shape]) -> str | None:
    """The norm's weight that has this bias: they have one shape, where a linear layer's weight is a matrix."""
    if not bias.endswith(_BIAS) or len(shapes[bias]) != 1:
        return None
    weight = bias.removesuffix(_BIAS) + _WEIGHT
    return weight if shapes.get(weight) == shapes[bias] else None


def _has_bias(weight: str, module: Parameters) -> bool:
    """Whether a parameter of its shape beside it may be its bias, whatever its name."""
    scope, shape = weight.rpartition(".")[0], module.shapes[weight]
    beside = [name for name in module.shapes if name != weight and name.rpartition(".")[0] == scope]
    return any(module.shapes[name] == shape and name.rpartition(".")[2][:1] in "bo" for name in beside)
