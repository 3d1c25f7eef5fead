"""PyTorch's and TransformerEngine's own attention, each backend by name, on the inputs of a study."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from parity.lab.studies import te_modules
from parity.lab.studies.flash_stability.inputs import Inputs
from parity.lab.studies.te_modules import Backend
from parity.te import Kernels
from parity.user_error import UserError

_TORCH = {
    "torch math": SDPBackend.MATH,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
}
_TE: dict[str, Backend] = {"te unfused": "unfused", "te fused": "fused", "te flash": "flash"}
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
    query, key, value = (x.to(kernels.device, dtype)[None] for x in (inputs.query, inputs.key, inputs.value))
    try:
        if backend in _TE:
            return te_modules.attend(kernels, _TE[backend], query, key, value, causal=causal)[0]
        with sdpa_kernel(_TORCH[backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return scaled_dot_product_attention(query[None], key[None], value[None], is_causal=causal)[0, 0]
    except (RuntimeError, UserError) as error:
        raise BackendRefused(str(error).strip().splitlines()[0]) from error
