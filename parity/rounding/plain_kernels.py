"""PyTorch's own kernels that a port calls too, since TransformerEngine has none for what they compute.

Convolutions, batch and group norms, pooling, embeddings. A port holds their operands in the precision's dtype and
stores their results in it. What happens inside is PyTorch's business: on a CPU some sum in that dtype (an embedding's
gradient), or keep statistics in it (a batch norm), so there they are run in it. CUDA's accumulate in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten

PLAIN_KERNELS = frozenset(
    {
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten.native_batch_norm.default,
        _aten.native_batch_norm_backward.default,
        _aten.cudnn_batch_norm.default,
        _aten.cudnn_batch_norm_backward.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten.avg_pool2d.default,
        _aten.avg_pool2d_backward.default,
        _aten._adaptive_avg_pool2d.default,
        _aten._adaptive_avg_pool2d_backward.default,
        _aten.upsample_bilinear2d.default,
        _aten.upsample_bilinear2d_backward.default,
        _aten.embedding_dense_backward.default,
    }
)


def as_in(dtype: torch.dtype, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a kernel of FP32 tensors returns where a port holds them in ``dtype``; FP32 again, and not yet stored."""
    on_cpu = all(x.device.type == "cpu" for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    if not on_cpu or dtype is torch.float32:
        return kernel(*args, **kwargs)

    def cast(tree: Any, to: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(to) if x.is_floating_point() else x, tree)

    given, named = cast((args, kwargs), dtype)
    try:
        return cast(kernel(*given, **named), torch.float32)
    except RuntimeError:  # none for the dtype: a port computes it in FP32
        return kernel(*args, **kwargs)
