"""The attention that the plain modules are timed with computes what the references do."""

from __future__ import annotations

import pytest
import torch

from parity.lab.throughput.workload import with_fused_attention
from parity.reference import CoreAttention, LlamaLayer

PADDING = torch.arange(24)[None] >= torch.tensor([[24], [17]])


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 5), (False, 5)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("key_is_padding", [None, PADDING], ids=["no padding", "padding"])
def test_it_is_the_reference_s_attention(
    causal: bool, window: int | None, groups: int, key_is_padding: torch.Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 24, n, 8, generator=generator).double() for n in (4, groups, groups))
    written_out = CoreAttention(causal, window)(query, key, value, key_is_padding)
    fused = with_fused_attention(CoreAttention(causal, window))(query, key, value, key_is_padding)
    sees_a_key = written_out.isfinite()  # a window may show a query padding alone
    assert torch.allclose(fused[sees_a_key], written_out[sees_a_key], rtol=0, atol=1e-12)


def test_every_part_of_a_module_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LlamaLayer(32, 64, 4, 2).double()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    written_out = layer(x)
    monkeypatch.setattr(CoreAttention, "forward", None)
    assert torch.allclose(with_fused_attention(layer)(x), written_out, rtol=0, atol=1e-12)
