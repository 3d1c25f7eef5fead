"""Products of all experts' tokens and weights by one expert after the other, as a reference may have them in one call.

``torch.nn.functional.grouped_mm``, which transformers takes for mixtures by default, has no kernel for FP64, and what
it rounds could not be told from outside. A product for each expert has both.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# PyTorch 2.10 has the public name, older ones have the other; some have none.
_GROUPED = tuple(
    function
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)


def experts_one_by_one() -> TorchFunctionMode:
    """Within the context, grouped products of tokens ``[rows, in]`` with weights ``[experts, in, out]`` run singly.

    Others stay as they are: batches of matrices, and a gradient that a reference computes itself.
    """
    return _OneByOne()


class _OneByOne(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GROUPED and _is_of_tokens(*args, **kwargs):
            return _one_by_one(*args, **kwargs)
        return func(*args, **kwargs)


def _is_of_tokens(tokens: Tensor, weights: Tensor, *, offs: Tensor | None = None, **others: Any) -> bool:
    return tokens.dim() == 2 and weights.dim() == 3 and offs is not None and all(x is None for x in others.values())


def _one_by_one(tokens: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Rows after the last expert's, which PyTorch leaves undefined, are 0."""
    ends = [0, *offs.tolist()]
    rows = [
        tokens[first:last] @ weight for weight, (first, last) in zip(weights, itertools.pairwise(ends), strict=True)
    ]
    return torch.cat([*rows, tokens.new_zeros(len(tokens) - ends[-1], weights.shape[-1])])
