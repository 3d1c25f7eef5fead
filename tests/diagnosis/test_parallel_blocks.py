"""Layers whose attention and MLP read one norm, side by side, against TE's, which have a norm for each."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.reference import CoreAttention
from parity.suggest.suggestion import python

HIDDEN, FFN, HEADS = 64, 128, 4
ATTENTION, MLP = "self_attention.layernorm_qkv.", "layernorm_mlp."


class Parallel(nn.Module):
    """As GPT-J's; the sum is in one order or another, and the MLP may have a norm of its own, as GPT-NeoX's."""

    def __init__(self, stream_first: bool = True, own_norm: bool = False) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN)
        self.ln_2 = nn.LayerNorm(HIDDEN) if own_norm else None
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.fc_in, self.fc_out = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.stream_first = stream_first

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.branches(x)
        return x + attention + mlp if self.stream_first else attention + mlp + x

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.ln_1(x)
        projected = (projection(normed) for projection in (self.q_proj, self.k_proj, self.v_proj))
        heads = (x.unflatten(-1, (HEADS, -1)) for x in projected)
        attention = self.out_proj(CoreAttention(causal=True)(*heads))
        hidden = self.fc_in(normed if self.ln_2 is None else self.ln_2(x))
        return attention, self.fc_out(F.gelu(hidden, approximate="tanh"))


class InPlace(Parallel):
    """As Falcon's: one branch is added to the other in place, and both through a dropout of 0."""

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.branches(x)
        mlp += attention
        return x + F.dropout(mlp, 0.0, self.training)


def weights(own_norm: bool):
    entries = {}
    for kind in ("weight", "bias"):
        norms = f"{ATTENTION}layer_norm_{kind}", f"{MLP}layer_norm_{kind}"
        entries |= dict(zip((f"ln_1.{kind}", f"ln_2.{kind}"), norms, strict=True)) if own_norm else {}
        entries |= {} if own_norm else {f"ln_1.{kind}": parity.copies(*norms)}
        entries |= {f"{name[0]}_proj.{kind}": f"{ATTENTION}{name}_{kind}" for name in ("query", "key", "value")}
        entries[f"out_proj.{kind}"] = f"self_attention.proj.{kind}"
        entries |= {f"fc_in.{kind}": f"{MLP}fc1_{kind}", f"fc_out.{kind}": f"{MLP}fc2_{kind}"}
    return entries


def case(with_weights=True, parallel=True, **reference):
    def factory(te, **_):
        return parity.Pair(
            reference=Parallel(**reference),
            candidate=te.TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                parallel_attention_mlp=parallel,
            ),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights=weights(reference.get("own_norm", False)) if with_weights else {},
        )

    return parity.Case("parallel", factory, sizes=(dict(batch=2, seq=24),))


REFERENCES = [{}, dict(stream_first=False), dict(own_norm=True), dict(stream_first=False, own_norm=True)]


@pytest.mark.parametrize("reference", REFERENCES)
def test_right_ports_pass_on_every_seed(reference):
    results = parity.compare(case(**reference), ["bf16", "fp8_current"], seeds=range(6))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("reference", REFERENCES)
def test_blocks_that_follow_each_other_are_found(reference):
    (result,) = parity.compare(case(parallel=False, **reference), ["bf16"])
    assert [finding.title for finding in result.findings] == ["parallel-block"]


@pytest.mark.parametrize("kind", [Parallel, InPlace])
@pytest.mark.parametrize("own_norm", [False, True])
def test_so_are_those_of_several_layers_whatever_the_order_of_their_sums(kind, own_norm):
    def factory(te, **_):
        right = case(own_norm=own_norm).factory(te)
        options = dict(own_norm=own_norm) if kind is InPlace else dict(own_norm=own_norm, stream_first=False)
        layers = [case(parallel=False).factory(te).candidate for _ in range(2)]
        return parity.Pair(
            nn.Sequential(*(kind(**options) for _ in layers)),
            nn.Sequential(*layers),
            inputs=right.inputs,
            weights={a: b for i in range(2) for a, b in parity.under(right.weights, f"{i}.").items()},
        )

    (result,) = parity.compare(parity.Case("parallel", factory, sizes=(dict(batch=2, seq=24),)), ["bf16"])
    assert [finding.title for finding in result.findings] == ["parallel-block"]


def test_the_map_that_fills_both_norms_is_suggested():
    suggestion = parity.suggest_map(case(with_weights=False))
    assert suggestion.error <= suggestion.limit
    assert f'"ln_1.weight": parity.copies("{ATTENTION}layer_norm_weight", "{MLP}layer_norm_weight")' in python(
        suggestion.weights
    )
    assert f'"ln_1.bias": parity.copies("{ATTENTION}layer_norm_bias", "{MLP}layer_norm_bias")' in python(
        suggestion.weights
    )
