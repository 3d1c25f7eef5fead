"""Weight maps: which parameters of the reference hold which of TE's, in which layout; written, and carried out."""

from parity.weights.notation import (
    WeightMap,
    constant,
    copies,
    experts,
    interleaved_qkv,
    rearrange,
    reorder,
    rope_halves,
    separated_qkv,
    shift,
    stack,
    transpose,
    under,
)
from parity.weights.terms import Side, WeightMapError
from parity.weights.transfer import fill, gradients_to_reference, parameter_shapes, to_candidate, to_reference

__all__ = [
    "Side",
    "WeightMap",
    "WeightMapError",
    "constant",
    "copies",
    "experts",
    "fill",
    "gradients_to_reference",
    "interleaved_qkv",
    "parameter_shapes",
    "rearrange",
    "reorder",
    "rope_halves",
    "separated_qkv",
    "shift",
    "stack",
    "to_candidate",
    "to_reference",
    "transpose",
    "under",
]
