"""What TE caches for a whole process is no part of a comparison: verdicts do not depend on what ran before."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import te
from parity.te import state

HEADS, HEAD_DIM, SEQUENCE = 4, 32, 24


def slopes(times: float) -> Tensor:
    return times * torch.tensor([2.0 ** (-8 / HEADS * (i + 1)) for i in range(HEADS)])


class Alibi(nn.Module):
    """Causal attention that subtracts something of each key's distance; ``[batch, sequence, heads, dim]`` each."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1], device=q.device)
        distance = (places[None, :] - places[:, None]).to(q.dtype)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM)
        scores = scores + slopes(self.times).to(q)[:, None, None] * distance
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(distance > 0, -torch.inf).softmax(-1), v).flatten(2)


def verdict(reference_times: float, given: float | None) -> str:
    """Of a port that gives TE these slopes, or leaves TE its own."""

    def factory(te, **_):
        more = {} if given is None else dict(alibi_slopes=slopes(given))
        return parity.Pair(
            Alibi(reference_times),
            te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal"),
            lambda rng, batch: tuple(rng.normal(batch, SEQUENCE, HEADS, HEAD_DIM) for _ in range(3)),
            call_candidate=lambda module, *x: module(*x, core_attention_bias_type="alibi", **more),
        )

    (result,) = parity.compare(parity.Case("alibi", factory, sizes=(dict(batch=2),)), ["fp32"])
    return result.status


def test_slopes_that_a_port_forgets_do_not_come_from_the_port_before() -> None:
    assert verdict(0.25, given=0.25) == "passed"
    assert verdict(0.25, given=None) == "failed"
    assert verdict(1.0, given=None) == "passed"


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in state._CACHES.items() for name in names] + [state._ALIBI],
)
def test_a_cache_holds_nothing_of_before_inside_and_the_same_again_after(module: str, name: str) -> None:
    te.kernels("cpu")
    importlib.import_module(module)
    cache = state._held(module, name)
    if cache is None:
        pytest.skip("this version of TE has no such cache")
    before = cache.copy()
    with state._holding(cache, {"_alibi_slopes": 1} if isinstance(cache, dict) else [1]):
        content = cache.copy()
        with state.fresh_caches():
            assert not any(cache.values() if isinstance(cache, dict) else cache)
        assert cache == content
    assert cache == before


def test_how_an_earlier_port_was_checkpointed_is_forgotten() -> None:
    te.kernels("cpu")
    from transformer_engine.pytorch import distributed

    with state.fresh_caches():
        distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = False
        with state.fresh_caches():
            assert distributed.use_reentrant_activation_recompute()
        assert not distributed.use_reentrant_activation_recompute()
