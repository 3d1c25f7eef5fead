"""Softmax of attention scores, in the precisions and with the tricks that models have used.

A way stores the scores that a GEMM has summed up in FP32, then computes probabilities from them; autograd
differentiates it. In FP16 and BF16 an operation of PyTorch's rounds its result to the dtype; sums are added up in FP32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.te import Kernels
from parity.te.attention_backend import te_variables


@dataclass(frozen=True)
class Precision:
    """What scores are stored in, and divided by before.

    Attributes:
        dtype: of stored scores and of probabilities.
        alpha: divisor of PB-Relax.
        layer: divisor of layer scaling.
    """

    dtype: torch.dtype
    alpha: float = 32.0
    layer: float = 16.0


@dataclass(frozen=True)
class Way:
    """One way to compute softmax.

    Attributes:
        softmax: probabilities in the precision's dtype, from stored scores ``[heads, rows, keys]``.
        divisor: which of the precision's divisors the GEMM applies to the scores, if any.
        keeps_fp32: whether scores are never stored in the dtype.
    """

    softmax: Callable[[Tensor, Precision], Tensor]
    divisor: Literal["", "alpha", "layer"] = ""
    keeps_fp32: bool = False

    def stored(self, scores: Tensor, precision: Precision) -> Tensor:
        """FP32 scores as the GEMM stores them."""
        divisor = getattr(precision, self.divisor) if self.divisor else 1.0
        return (scores / divisor).to(torch.float32 if self.keeps_fp32 else precision.dtype)

    def __call__(self, scores: Tensor, precision: Precision) -> Tensor:
        """Probabilities in the precision's dtype, from FP32 scores ``[heads, rows, keys]``."""
        return self.softmax(self.stored(scores, precision), precision)


def plain(stored: Tensor, precision: Precision) -> Tensor:
    """``exp(x) / sum(exp(x))``, every operation in the dtype."""
    exponentials = stored.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def max_subtracted(stored: Tensor, precision: Precision) -> Tensor:
    """As ``plain``, with each row's maximum subtracted first."""
    return plain(stored - stored.detach().amax(-1, keepdim=True), precision)


def pb_relax(stored: Tensor, precision: Precision) -> Tensor:
    """``softmax((x - max(x)) alpha)`` of scores divided by alpha, with the maximum of a head's whole matrix.

    Source: M. Ding et al., "CogView", arXiv 2105.13290, section 2.4. Softmax is PyTorch's.
    """
    return torch.softmax((stored - stored.detach().amax((-2, -1), keepdim=True)) * precision.alpha, -1)


def pb_relax_by_rows(stored: Tensor, precision: Precision) -> Tensor:
    """As ``pb_relax`` with the maximum of each row, as Hugging Face's LayoutLMv3 has it."""
    return torch.softmax((stored - stored.detach().amax(-1, keepdim=True)) * precision.alpha, -1)


def pytorch(stored: Tensor, precision: Precision) -> Tensor:
    """``torch.softmax`` in the dtype of the scores."""
    return torch.softmax(stored, -1)


def fp32(stored: Tensor, precision: Precision) -> Tensor:
    """``torch.softmax(..., dtype=torch.float32)``, rounded afterwards; what autocast makes of softmax on a GPU."""
    return torch.softmax(stored, -1, dtype=torch.float32).to(precision.dtype)


def fp32_scaled(stored: Tensor, precision: Precision) -> Tensor:
    """As ``fp32``, of scores divided by the layer's number, which are multiplied with it in FP32.

    Source: "FP32 softmax with QKV scaling" in GLM-130B's training notes; Megatron-LM's query-key layer scaling.
    """
    return torch.softmax(stored.float() * precision.layer, -1).to(precision.dtype)


def of_te(kernels: Kernels, fused: bool) -> Way:
    """TE's softmax of its unfused attention, ``FusedScaleMaskSoftmax``.

    Args:
        kernels: that TE runs on; asking for them has imported TE.
        fused: its own kernel, for FP16 and BF16; if not, what ``NVTE_MASKED_SOFTMAX_FUSION=0`` makes of it.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import softmax

    with te_variables({"NVTE_MASKED_SOFTMAX_FUSION": str(int(fused))}):
        module = softmax.FusedScaleMaskSoftmax(_no_mask)

    def softmax_of_te(stored: Tensor, precision: Precision) -> Tensor:
        # Its kernel wants the product of batch and heads, and the queries, to be multiples of 4; rows are independent.
        four_heads = stored.view(1, 4, -1, stored.shape[-1])
        return module(four_heads, None, "no_mask").view_as(stored)

    return Way(softmax_of_te)


def _no_mask(scores: Tensor, mask: Tensor) -> Tensor:
    raise AssertionError("there is no mask to apply")


WAYS: dict[str, Way] = {
    "plain": Way(plain),
    "max subtracted": Way(max_subtracted),
    "PB-Relax": Way(pb_relax, divisor="alpha"),
    "PB-Relax by rows": Way(pb_relax_by_rows, divisor="alpha"),
    "torch.softmax": Way(pytorch),
    "FP32": Way(fp32),
    "FP32, layer scaling": Way(fp32_scaled, divisor="layer"),
    "FP32 scores": Way(fp32, keeps_fp32=True),
}
TE_WAYS = {"TE": True, "TE, not fused": False}


def ways(kernels: Kernels) -> dict[str, Way]:
    """Every way by its name; TE's on the given kernels."""
    return WAYS | {name: of_te(kernels, fused) for name, fused in TE_WAYS.items()}


# Bytes that PyTorch's kernels read and write, which on a GPU is the time of all that are not matrix products.
#
# Counted are the tensors that an operation takes and returns, each once; views move nothing. A fused operation counts
# as one, whatever it does inside.


@dataclass(frozen=True)
class Traffic:
    """What a function and its backward move.

    Attributes:
        forward: bytes.
        backward: bytes.
        saved: bytes that the forward keeps for the backward.
        operations: names of the forward's operations.
    """

    forward: int
    backward: int
    saved: int
    operations: tuple[str, ...]


def measure_traffic(function: Callable[[Tensor], Tensor], argument: Tensor) -> Traffic:
    """Call a function and differentiate it with respect to its argument."""
    leaf = argument.detach().clone().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != leaf.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _Counter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(leaf)
    gradient = torch.ones_like(result)
    with _Counter() as backward:
        torch.autograd.grad(result, leaf, gradient)
    return Traffic(forward.moved, backward.moved, sum(kept.values()), tuple(forward.operations))


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append(func.name().removeprefix("aten::"))
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
        return result
