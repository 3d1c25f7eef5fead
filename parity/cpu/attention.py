"""Which fused attention the emulated GPU offers: none, so TE takes its unfused path of GEMMs and a softmax kernel."""

from __future__ import annotations

from typing import Any

from parity.cpu.enums import NVTE_Fused_Attn_Backend

__all__ = ["get_fused_attn_backend"]

_REASON = "the CPU kernels have no fused attention"


def get_fused_attn_backend(
    *configuration: Any,
) -> NVTE_Fused_Attn_Backend | tuple[NVTE_Fused_Attn_Backend, str]:
    """No backend for any configuration.

    TE 2.20 passes one object and takes the reason as well; up to 2.19 it passes each property and takes the backend alone
    (``attention/dot_product_attention/utils.py``).
    """
    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    return (none, _REASON) if len(configuration) == 1 else none
