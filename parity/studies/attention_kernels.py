"""PyTorch's and TransformerEngine's own attention, each backend by name, on the inputs of a study."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from parity.studies.attention_inputs import Inputs
from parity.te import Kernels

_TORCH = {
    "torch math": SDPBackend.MATH,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
}
# The variable that allows each of TE's backends.
_TE = {"te unfused": "NVTE_UNFUSED_ATTN", "te fused": "NVTE_FUSED_ATTN", "te flash": "NVTE_FLASH_ATTN"}
BACKENDS = (*_TORCH, *_TE)


class BackendRefused(RuntimeError):
    """A backend does not run here; the message says why, as far as its library does."""


def attend(backend: str, inputs: Inputs, dtype: torch.dtype, causal: bool, kernels: Kernels) -> Tensor:
    """One head of attention.

    Args:
        backend: of ``BACKENDS``.
        dtype: of its inputs and output.

    Returns:
        ``[queries, features]`` on the kernels' device.

    Raises:
        BackendRefused: if there is no such backend for this device, dtype or size.
    """
    query, key, value = (x.to(kernels.device, dtype) for x in (inputs.query, inputs.key, inputs.value))
    try:
        if backend in _TORCH:
            with sdpa_kernel(_TORCH[backend]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                query, key, value = (x[None, None] for x in (query, key, value))
                return scaled_dot_product_attention(query, key, value, is_causal=causal)[0, 0]
        return _te(backend, query, key, value, causal, kernels)
    except (RuntimeError, ValueError) as error:
        raise BackendRefused(str(error).strip().splitlines()[0]) from error


def _te(backend: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, kernels: Kernels) -> Tensor:
    with _only(backend):
        core: Any = kernels.te.DotProductAttention(
            1,
            query.shape[-1],
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
        )
        output: Tensor = core(*(x[None, :, None] for x in (query, key, value)))
    return output.reshape(query.shape)


@contextmanager
def _only(backend: str) -> Iterator[None]:
    """Within the context TE may choose this backend alone."""
    before = {variable: os.environ.get(variable) for variable in _TE.values()}
    os.environ.update({variable: str(int(name == backend)) for name, variable in _TE.items()})
    _choose_again()
    try:
        yield
    finally:
        for variable, setting in before.items():
            if setting is None:
                del os.environ[variable]
            else:
                os.environ[variable] = setting
        _choose_again()


def _choose_again() -> None:
    """TE keeps its choice until an argument changes, and would not read the environment again."""
    from transformer_engine.pytorch.attention import dot_product_attention

    for module in (dot_product_attention, dot_product_attention.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
