"""Steps of stochastic gradient descent on lists of tensors.

Follows ``csrc/extensions/multi_tensor/sgd.cpp`` of TransformerEngine 2.20.2 and ``common/multi_tensor/sgd.cu``. All
arithmetic is FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["multi_tensor_sgd"]

_FP16, _FP32 = torch.float16, torch.float32
_DTYPES = {3: [(_FP16, _FP16), (_FP32, _FP32)], 4: [(_FP16, _FP32), (_FP32, _FP32)]}


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Update weights and momenta in place.

    Args:
        noop_flag: not 0 leaves everything as it is.
        tensor_lists: gradients, weights, momenta and, if there is a fourth list, FP16 copies of the weights to write.
        wd: weight decay, added to the gradient before momentum or, if ``wd_after_momentum``, after it.
        first_run: the momenta start as the gradients.
        scale: times the gradients.

    Raises:
        RuntimeError: for dtypes that TE has no kernel for: gradients and weights both FP16 or both FP32, or, with FP16
            copies, weights FP32.
    """
    dtypes = (tensor_lists[0][0].dtype, tensor_lists[1][0].dtype)
    if dtypes not in _DTYPES.get(len(tensor_lists), []):
        raise RuntimeError(
            f"multi_tensor_sgd: TransformerEngine has no SGD kernel for {dtypes[0]} gradients of {dtypes[1]} weights "
            f"in {len(tensor_lists)} lists"
        )
    if noop_flag.item():
        return
    for grad, weight, buffer, *copies in zip(*tensor_lists, strict=True):
        update, value = grad.float() * scale, weight.float()
        if wd and not wd_after_momentum:
            update.add_(value, alpha=wd)
        if momentum:
            moved = update.clone() if first_run else buffer.float() * momentum + update * (1 - dampening)
            update = update + momentum * moved if nesterov else moved
            buffer.copy_(moved)
        if wd and wd_after_momentum:
            update = update + wd * value
        weight.copy_(value - lr * update)
        for copy in copies:
            copy.copy_(weight)
