"""The slopes of ALiBi that a port may have by default."""

from __future__ import annotations

import pytest
import torch

import parity
from parity.mistakes.masks import papers_slopes
from parity.te import state


@pytest.mark.parametrize("heads", [6, 8])
def test_the_papers_slopes_are_tes(heads):
    port = parity.te.kernels("cpu").te.DotProductAttention(heads, 16, qkv_format="bshd", attn_mask_type="causal")
    query, key, value = (torch.randn(1, 24, heads, 16) for _ in range(3))
    contexts = []
    for slopes in (None, papers_slopes(heads).float()):
        with state.fresh_caches():  # TE keeps slopes for the whole process
            contexts.append(port(query, key, value, core_attention_bias_type="alibi", alibi_slopes=slopes))
    torch.testing.assert_close(*contexts)
