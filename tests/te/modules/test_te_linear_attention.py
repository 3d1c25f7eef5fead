"""te.GatedDeltaNetAttention equals the gated delta rule of transformers and of a plain loop; wrong ports fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import parity
from te_on_cpu import versions

pytestmark = pytest.mark.skipif(versions.installed_version().release[:2] < (2, 20), reason="new in TE 2.20")

HEADS, FEATURES, TOKENS = 2, 64, 80  # 80 are more than a chunk
PRECISIONS = ("bf16", "fp16")
Call = Callable[..., Tensor]


def gates(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay's logarithm and the strength of updates, FP32, which models compute from projections."""
    return -softplus(a.float()), b.float().sigmoid()


class ByChunk(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        rule = qwen.torch_chunk_gated_delta_rule
        return rule(q, k, v, *gates(a, b), use_qk_l2norm_in_kernel=True)[0].flatten(2)


class ByToken(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g, beta = gates(a, b)
        unit_q, unit_k = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        state, outputs = unit_k.new_zeros(len(k), HEADS, FEATURES, FEATURES), []
        for t in range(q.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            update = (v[:, t] - (state * unit_k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
            state = state + unit_k[:, t, ..., None] * update[..., None, :]
            outputs.append((state * unit_q[:, t, ..., None]).sum(-2) * FEATURES**-0.5)
        return torch.stack(outputs, 1).flatten(2).to(q.dtype)


def call(module: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return module(q, k, v, *gates(a, b), use_qk_l2norm_in_kernel=True)


def declare(reference: nn.Module, call: Call = call, scale: float | None = None, **options: Any) -> parity.Case:
    def build(te: ModuleType, **_: Any) -> parity.Pair:
        wide = (2, TOKENS, HEADS, FEATURES)
        return parity.Pair(
            reference=reference,
            candidate=te.GatedDeltaNetAttention(HEADS, FEATURES, qkv_format="bshd", scale=scale),
            inputs=lambda rng: (*(rng.normal(wide) for _ in range(3)), rng.normal(wide[:-1]), rng.normal(wide[:-1])),
            call_candidate=call,
        )

    return parity.Case("gated_delta_net", build, sizes=({},), **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_port_of_transformers_gated_delta_rule_passes(precision: str) -> None:
    results = parity.compare(declare(ByChunk()), [precision], seeds=range(3), backend="cpu")
    assert [result.status for result in results] == ["passed"] * 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_port_of_a_loop_over_tokens_passes_on_usual_inputs(precision: str) -> None:
    results = parity.compare(declare(ByToken(), probe=False), [precision], seeds=range(3), backend="cpu")
    assert [result.status for result in results] == ["passed"] * 3


WRONG: dict[str, Call] = {
    "beta": lambda m, q, k, v, a, b: m(q, k, v, gates(a, b)[0], 1 + 0 * b.float(), use_qk_l2norm_in_kernel=True),
    "logits": lambda m, q, k, v, a, b: m(q, k, v, gates(a, b)[0], b.float(), use_qk_l2norm_in_kernel=True),
    "sign": lambda m, q, k, v, a, b: call(m, q, k, v, -a, b),
    "heads": lambda m, q, k, v, a, b: call(m, q, k, v.flip(2), a, b),
    "order": lambda m, q, k, v, a, b: call(m, k, q, v, a, b),
    "l2norm": lambda m, q, k, v, a, b: m(q / FEATURES**0.5, k / FEATURES**0.5, v, *gates(a, b)),
}


@pytest.mark.parametrize("mistake", [*WRONG, "scale"])
def test_a_wrong_port_fails(mistake: str) -> None:
    case = declare(ByChunk(), WRONG.get(mistake, call), scale=1.0 if mistake == "scale" else None)
    (result,) = parity.compare(case, ["bf16"], backend="cpu", diagnose=False)
    assert result.status == "failed"


def test_fp32_is_refused_in_tes_words() -> None:
    (result,) = parity.compare(declare(ByChunk()), ["fp32"], backend="cpu")
    assert result.status == "error"
    assert "no cuDNN frontend GDN engine supports float32 inputs" in result.reason
