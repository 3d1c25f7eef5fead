"""What models of transformers write otherwise: norms, factors and tables that layers are given."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.reference import rotate_halves

HIDDEN, HEADS, ROWS = 64, 4, 32


class LayerNorm(nn.Module):
    """Cohere's: the mean is subtracted once for the variance, and again from what is scaled; no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt(variance + 1e-5))


class Layer(nn.Module):
    """Attention that is given its mask and its angles, for the whole batch, by the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = LayerNorm(), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.qkv.weight.data *= 2

    def forward(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key = (rotate(part, angles).transpose(1, 2) for part in (query, key))
        scores = query @ key.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS) + mask
        return x + self.out((scores.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2).flatten(2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (table[:, :, None].repeat(1, 1, 1, 2) for table in (angles.cos(), angles.sin()))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Model(nn.Module):
    """Embeddings times a number that a buffer holds, and those of positions; one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.layer = nn.Embedding(ROWS, HIDDEN), nn.Embedding(16, HIDDEN), Layer()
        self.positions.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(math.sqrt(HIDDEN)))

    def forward(self, ids: Tensor) -> Tensor:
        batch, seq = ids.shape
        places = torch.arange(seq, device=ids.device)
        x = self.tokens(ids) * self.scale.to(self.tokens.weight.dtype) + self.positions(places)
        mask = torch.full((seq, seq), -1e9, dtype=x.dtype, device=x.device).triu(1).expand(batch, 1, seq, seq)
        frequencies = 10_000.0 ** -(torch.arange(8, dtype=x.dtype, device=x.device) / 8)
        return self.layer(x, mask, (places[:, None] * frequencies).expand(batch, seq, 8))


class TEModel(nn.Module):
    def __init__(self, te, wrong) -> None:
        super().__init__()
        self.wrong = wrong
        self.tokens, self.positions = nn.Embedding(ROWS, HIDDEN), nn.Embedding(16, HIDDEN)
        self.positions.requires_grad_(False)
        norm = "RMSNorm" if wrong == "norm" else "LayerNorm"
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, normalization=norm)
        qkv_format = "sbhd" if wrong == "sequence first" else "bshd"
        self.core = te.DotProductAttention(HEADS, 16, qkv_format=qkv_format, attention_dropout=0.0)
        self.out = te.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x if self.wrong == "factor" else x * math.sqrt(HIDDEN)
        x = x if self.wrong == "positions" else x + self.positions.weight[: ids.shape[1]]
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        first = self.wrong == "sequence first"
        query, key = (self.rotated(part.transpose(0, 1) if first else part) for part in (query, key))
        query, key = (part.transpose(0, 1) if first else part for part in (query, key))
        parts = (part.to(x.dtype).contiguous() for part in (query, key, value))
        return x + self.out(self.core(*parts, attn_mask_type="causal"))

    def rotated(self, x: Tensor) -> Tensor:
        frequencies = 10_000.0 ** -(torch.arange(8, dtype=torch.float32, device=x.device) / 8)
        return rotate_halves(x, torch.arange(x.shape[1], device=x.device)[:, None] * frequencies)


def findings(wrong="", precision="bf16"):
    def factory(te, **_):
        weights = {f"{table}.weight": f"{table}.weight" for table in ("tokens", "positions")}
        weights |= {f"layer.{n}.{k}": f"{n}.{k}" for n in ("qkv", "out") for k in ("weight", "bias")}
        weights["layer.norm.weight"] = "qkv.layer_norm_weight"
        if wrong != "norm":
            weights[parity.constant(0.0, HIDDEN)] = "qkv.layer_norm_bias"
        return parity.Pair(
            Model(), TEModel(te, wrong), lambda rng, batch, seq: rng.integers(batch, seq, high=ROWS), weights
        )

    (result,) = parity.compare(parity.Case("written_out", factory, sizes=(dict(batch=4, seq=16),)), [precision])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_right_ports_pass(precision):
    assert findings(precision=precision) == "passed"


def test_rms_norm_for_a_layer_norm_that_subtracts_its_mean_twice_is_told():
    assert [title for title, _ in findings("norm")] == ["norm-kind"]


def test_attention_within_the_batch_is_told_though_layers_are_given_masks_and_angles():
    assert [title for title, _ in findings("sequence first")] == ["sequence-first"]


def test_a_factor_that_a_buffer_holds_is_told():
    ((title, message),) = findings("factor")
    assert title == "factor"
    assert "multiply by 8, as the reference does; the factor is 1" in message


def test_an_embedding_that_is_not_added_is_told():
    ((title, message),) = findings("positions")
    assert title == "branch-missing"
    assert "add the result of the 1st 'embedding' of positions" in message
