"""The original transformer's layer, whose norms come after its sums, ported with norms before its branches."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import parity

HIDDEN, FFN, TOKENS, LAYERS = 48, 112, 40, 2


class Block(nn.Module):
    def __init__(self, linear: Any, norm: Any, before: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.mix, self.up, self.down = linear(HIDDEN, HIDDEN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.mix(self.norm1(x))
            return x + self.down(self.up(self.norm2(x)).relu())
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.down(self.up(x).relu()))


class OfBranches(Block):
    """OLMo 2's: each branch's result is normed; a port may have the norm ``before`` it, or after the ``sum``."""

    def __init__(self, linear: Any, norm: Any, where: str) -> None:
        super().__init__(linear, norm, before=where == "before")
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where != "branch":
            return super().forward(x)
        x = x + self.norm1(self.mix(x))
        return x + self.norm2(self.down(self.up(x).relu()))


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    ("where", "told"),
    [("branch", ""), ("before", "each norm is before its branch"), ("sum", "each norm is after the sum")],
)
def test_norms_of_branches_that_come_before_them_or_after_sums_are_told(norm, where, told):
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = nn.Sequential(*(OfBranches(nn.Linear, getattr(nn, norm), "branch") for _ in range(LAYERS)))
        port = nn.Sequential(*(OfBranches(te.Linear, getattr(te, norm), where) for _ in range(LAYERS)))
        inputs = lambda rng, tokens: rng.normal(tokens, HIDDEN)  # noqa: E731
        return parity.Pair(plain, port, inputs, weights={name: name for name, _ in plain.named_parameters()})

    (result,) = parity.compare(parity.Case("branches", factory, sizes=(dict(tokens=TOKENS),)), ["bf16"])
    assert [finding.title for finding in result.findings] == (["post-norm"] if told else [])
    assert all(told in finding.message for finding in result.findings)


def found(before: bool, norm: str, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = nn.Sequential(*(Block(nn.Linear, getattr(nn, norm), before=False) for _ in range(LAYERS)))
        port = nn.Sequential(*(Block(te.Linear, getattr(te, norm), before=before) for _ in range(LAYERS)))
        inputs = lambda rng, tokens: rng.normal(tokens, HIDDEN)  # noqa: E731
        return parity.Pair(plain, port, inputs, weights={name: name for name, _ in plain.named_parameters()})

    (result,) = parity.compare(parity.Case("blocks", factory, sizes=(dict(tokens=TOKENS),)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_norms_before_the_branches_are_told(precision):
    (finding,) = found(True, "LayerNorm", precision).findings
    assert finding.title == "post-norm"
    assert "it is before the branch" in finding.message


def test_norms_after_the_sums_pass():
    assert found(False, "LayerNorm", "bf16").passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pytorchs_encoder_layer_ported_to_tes_layer_without_moving_its_norms_is_told(precision):
    heads = 3

    def factory(te: Any) -> parity.Pair:
        plain = nn.TransformerEncoderLayer(HIDDEN, heads, FFN, dropout=0.0, batch_first=True)  # norm_first=False
        port = te.TransformerLayer(
            *(HIDDEN, FFN, heads),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="no_mask",
            activation="relu",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
        )
        attention, mlp = "self_attention.", "layernorm_mlp."
        weights = {f"self_attn.in_proj_{kind}": f"{attention}layernorm_qkv.{kind}" for kind in ("weight", "bias")} | {
            f"{left}.{kind}": f"{right}{kind}"
            for kind in ("weight", "bias")
            for left, right in {
                "self_attn.out_proj": f"{attention}proj.",
                "norm1": f"{attention}layernorm_qkv.layer_norm_",
                "norm2": f"{mlp}layer_norm_",
                "linear1": f"{mlp}fc1_",
                "linear2": f"{mlp}fc2_",
            }.items()
        }
        return parity.Pair(plain, port, lambda rng: rng.normal(2, TOKENS, HIDDEN), weights)

    (result,) = parity.compare(parity.Case("encoder", factory, sizes=({},)), [precision])
    (finding,) = result.findings
    assert finding.title == "post-norm"
    assert "put each norm after the sum" in finding.message
