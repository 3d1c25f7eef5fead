"""The error of all tensors of a kind taken together: a bias whose gradient is nearly 0 does not stand for a module."""

from __future__ import annotations

import math

from parity.errors import relative_l2
from parity.passes import Tensors


def pooled_relative_l2(tensors: Tensors, golden: Tensors) -> dict[str, float]:
    """``|error| / |golden|`` by kind of tensor, as if all tensors of a kind were one."""
    errors = {key: tensors[key].double() - truth for key, truth in golden.items()}
    kinds = dict.fromkeys(kind for kind, _ in golden)
    return {kind: relative_l2(_norm(errors, kind), _norm(golden, kind)) for kind in kinds}


def _norm(tensors: Tensors, kind: str) -> float:
    return math.hypot(*(tensor.norm().item() for (of_kind, _), tensor in tensors.items() if of_kind == kind))
