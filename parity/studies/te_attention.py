"""TE's ``DotProductAttention`` on a backend of the caller's choice."""

from __future__ import annotations

import sys
import warnings
from typing import Literal

from torch import Tensor

from parity.te import Kernels
from parity.te_state.variables import te_variables
from parity.user_error import UserError

Backend = Literal["unfused", "fused", "flash"]


def attend(
    kernels: Kernels,
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int = 0,
    causal: bool = False,
) -> Tensor:
    """Attention of each query to all keys, or to those up to its own position.

    Args:
        kernels: that TE runs on; the tensors are on their device.
        backend: unfused (GEMM, softmax, GEMM), fused (cuDNN's flash attention) or flash (the package flash-attn).
        query: ``[heads, queries, head_dim]``, FP16, BF16 or FP32.
        key: ``[heads, keys, head_dim]``.
        value: as key.
        layer: the layer's number, from 1, for query-key layer scaling, which the unfused backend does in FP16; 0 for
            none.
        causal: whether a query sees keys up to its own position only.

    Returns:
        ``[heads, queries, head_dim]``.

    Raises:
        UserError: if TE has no such backend for these sizes and this dtype on this GPU.
    """
    heads, _, head_dim = query.shape
    variables = {
        "NVTE_FLASH_ATTN": str(int(backend == "flash")),
        "NVTE_FUSED_ATTN": str(int(backend == "fused")),
        "NVTE_UNFUSED_ATTN": str(int(backend == "unfused")),
        "NVTE_APPLY_QK_LAYER_SCALING": str(int(layer > 0)),
    }
    with te_variables(variables), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TE says so where it corrects a default of its own
        _choose_backend_again()
        attention = kernels.te.DotProductAttention(
            heads,
            head_dim,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
            layer_number=layer or None,
        ).eval()
        try:
            output = attention(*(tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (query, key, value)))
        except ValueError as error:
            raise UserError(f"TE's {backend} attention, {query.dtype}, head_dim {head_dim}: {error}") from error
        finally:
            _choose_backend_again()
    return output.view(query.shape[1], heads, head_dim).transpose(0, 1)


def _choose_backend_again() -> None:
    """TE keeps its choice until an argument changes, and would not read the environment again."""
    package = "transformer_engine.pytorch.attention.dot_product_attention"
    for name in (package, f"{package}.dot_product_attention"):
        choice = getattr(sys.modules.get(name), "_attention_backends", None)
        if choice is not None:
            choice["backend_selection_requires_update"] = True
