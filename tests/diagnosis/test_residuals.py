"""Residual streams: branches in another order or in parallel, gates and factors of terms, and sums with a norm."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from ports import compared, decoders, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

from lab.corpus.decoder import Options
from parity import reference

WIDTH = 64

# Branches in the wrong order or in parallel: a decoder's attentions, a mixer's MLPs.

SEQ = 32
Order = Literal["right", "exchanged", "beside"]


class Mixer(nn.Module):
    """Two branches, one of which mixes tokens and the other channels."""

    def __init__(self, linear: Any, order: Order) -> None:
        super().__init__()
        self.order = order
        self.of_tokens, self.of_channels = linear(SEQ, SEQ), linear(WIDTH, WIDTH)

    def tokens(self, x: Tensor) -> Tensor:
        return self.of_tokens(F.silu(x).mT).mT

    def channels(self, x: Tensor) -> Tensor:
        return self.of_channels(F.gelu(x, approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "beside":
            return x + self.tokens(x) + self.channels(x)
        if self.order == "exchanged":
            x = x + self.channels(x)
            return x + self.tokens(x)
        x = x + self.tokens(x)
        return x + self.channels(x)


TOLD = "the 1st 'linear' of 0.of_tokens before the branch that ends with the 1st 'linear' of 0.of_channels"


@in_turn(
    ("order", "title", "phrase"),
    [
        (
            "exchanged",
            "operation",
            f"compute the branch that ends with {TOLD}, as the reference does, and so for 1 more",
        ),
        ("beside", "parallel-block", "both are computed from one input"),
        ("right", "passed", ""),
    ],
)
def test_branches_in_the_other_order_or_side_by_side_are_told(order, title, phrase, precision):
    result = compared(
        lambda: nn.Sequential(*(Mixer(nn.Linear, "right") for _ in range(2))),
        lambda te: nn.Sequential(*(Mixer(te.Linear, order) for _ in range(2))),
        normal((2, SEQ, WIDTH)),
        precision,
    )
    tells(result, title, phrase)


# Branches scaled by a gate, the first factor, before they are added, as in Llama 3.2's cross-attention layers.


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Gated(nn.Module):
    """Two gated branches; ``mistake`` names the port's mistake."""

    def __init__(self, linear: Any, mistake: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(linear(WIDTH, 2 * WIDTH), nn.SiLU(), linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.gates = nn.ParameterList(nn.Parameter(torch.rand(1) + 0.4) for _ in self.branches)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        squashed = {"no tanh": lambda gate: gate, "sigmoid": torch.sigmoid}.get(self.mistake, torch.tanh)
        for i, (branch, gate) in enumerate(zip(self.branches, self.gates, strict=True)):
            y = branch(x)
            if self.mistake == "norm before the gate" and i == 0:
                y = rms_norm(y)
            y = squashed(gate) * y
            x = y if self.mistake == "no residual" and i == 1 else y + x
            if self.mistake == "norm after the sum" and i == 1:
                x = rms_norm(x)
        return x


@in_turn(
    ("mistake", "title", "phrase"),
    [
        ("", "passed", ""),
        ("no tanh", "operation", "the 1st 'tanh' of 0 and of 3 more like it"),
        ("sigmoid", "operation", "it is sigmoid"),
        ("norm before the gate", "norm-missing", "a RMSNorm comes before in 0 (sum 1)"),
        ("norm after the sum", "norm-missing", "a RMSNorm comes after it in 0 (sum 2)"),
        ("no residual", "residual-placement", "return the branch alone"),
    ],
)
def test_mistakes_around_a_gated_branch_are_told(mistake, title, phrase, precision):
    second = mistake if mistake in ("no tanh", "sigmoid") else ""
    result = compared(
        lambda: nn.Sequential(Gated(nn.Linear, ""), Gated(nn.Linear, "")),
        lambda te: nn.Sequential(Gated(te.Linear, mistake), Gated(te.Linear, second)),
        normal((2, 24, WIDTH)),
        precision,
    )
    tells(result, title, phrase)


# A factor of one term of a sum, which the port applies to the other term.


class Scaled(nn.Module):
    """CaiT's LayerScale: a gain on each branch."""

    def __init__(self, linear: Any, right: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(WIDTH) + 0.2) for _ in self.layers)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + gain * layer(x) if self.right else x * gain + layer(x)
        return x


class Highway(nn.Module):
    """Srivastava's highway gate between a layer's result and its input."""

    def __init__(self, linear: Any, right: bool) -> None:
        super().__init__()
        self.layer, self.gate, self.right = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        gate, y = self.gate(x).sigmoid(), self.layer(x).tanh()
        return gate * y + (1 - gate) * x if self.right else gate * x + (1 - gate) * y


@in_turn(
    ("module", "right", "title", "phrase"),
    [
        (Scaled, True, "passed", ""),
        (Highway, True, "passed", ""),
        (Scaled, False, "operation", "in the port, each has the other's factor"),
        (Highway, False, "operation", "in the port, each has the other's factor"),
    ],
)
def test_factors_of_the_other_terms_are_told(module, right, title, phrase, precision):
    result = compared(
        lambda: module(nn.Linear, True), lambda te: module(te.Linear, right), normal((2, 24, WIDTH)), precision
    )
    tells(result, title, phrase)


# Terms of a sum that a port multiplies by another number, or leaves out.


class Shared(nn.Module):
    """A routed MLP and a shared one, as in mixtures of experts; returns the sum or its mean square."""

    def __init__(self, linear: Any, shared: float = 1.0, routed: float = 1.0, loss: bool = False) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 96, bias=False), linear(96, WIDTH, bias=False)
        self.shared_up, self.shared_down = linear(WIDTH, 96, bias=False), linear(96, WIDTH, bias=False)
        self.shared, self.routed, self.loss = shared, routed, loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.silu(self.up(x)))
        y = y if self.routed == 1.0 else y * self.routed
        if self.shared:
            z = self.shared_down(F.silu(self.shared_up(x)))
            y = y + (z if self.shared == 1.0 else z * self.shared)
        return y.square().mean() if self.loss else y


@pytest.mark.parametrize(
    ("term", "number", "precision", "loss"),
    [
        ("shared", 0.5, "fp32", False),
        ("shared", 0.5, "bf16", True),
        ("routed", 2.5, "fp16", False),
        ("routed", 2.5, "fp8_current", True),
    ],
)
def test_a_term_that_is_scaled_is_told_with_the_number(term, number, precision, loss):
    result = twins(Shared, {term: number}, normal((64, WIDTH)), precision, right=dict(loss=loss))
    in_full = precision in ("fp32", "fp16") and not loss
    tells(result, "factor", f"the port multiplies it by {number}" if in_full else "")


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
def test_a_term_that_is_left_out_is_told_with_its_parameters(precision):
    result = twins(Shared, dict(shared=0.0), normal((64, WIDTH)), precision)
    tells(result, "branch-missing", "shared_down.weight, shared_up.weight")


class LowRank(nn.Module):
    """A linear layer with a scaled low-rank addition."""

    def __init__(self, linear, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(WIDTH, WIDTH), linear(WIDTH, 16), linear(16, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


@pytest.mark.parametrize(
    ("right", "scale", "title"),
    [
        (2.0, 2.0, "passed"),
        *((right, scale, "factor") for right, scale in ((2.0, 1.0), (2.0, 2.2), (0.22, 0.2))),
    ],
)
def test_another_factor_is_told_with_both(right, scale, title):
    result = twins(LowRank, dict(scale=scale), normal((2, 32, WIDTH)), right=dict(scale=right))
    tells_only(result, title, f"the port multiplies by {scale:g}")
    assert result.passed or f"multiply by {right:g}" in result.findings[0].message


class Multiplied(nn.Module):
    """Branches that are multiplied by one number before they are added to the stream, as in Granite."""

    def __init__(self, linear: Any, layers: int, residual: float) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(layers)), residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.residual
        return x


@pytest.mark.parametrize(
    ("layers", "right", "residual", "precision"),
    [
        (2, 0.25, 0.24, "fp8_current"),  # FP8's noise in the outputs hides so small a difference
        (4, 0.25, 0.235, "fp8_current"),
        (3, 0.4, 0.42, "fp8_current"),
        (4, 0.25, 0.26, "bf16"),
        (4, 0.25, 0.26, "fp32"),
    ],
)
def test_a_factor_near_the_references_is_told(layers, right, residual, precision):
    inputs = normal((512, WIDTH))
    result = twins(Multiplied, dict(residual=residual), inputs, precision, dict(layers=layers, residual=right))
    tells_only(
        result, "factor", f"multiply by {right:g}, as the reference does; in all, the port multiplies by {residual:g}"
    )


# Sums that use the normed input of a branch instead of the stream.


def test_attentions_sums_alone_that_take_the_norm_are_told_as_one_mistake():
    result = decoders(Options(layers=2, loss=False), "bf16", from_norm=True)
    tells_only(result, "residual-placement", "each layer's 1st sum")


class PostNormLayer(nn.Module):
    """A layer like BERT's, whose norms come after the sums."""

    def __init__(self):
        super().__init__()
        self.attention = reference.Attention(WIDTH, 4, 4, bias=True, rope=False)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return self.last_norm(x + self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


@pytest.mark.parametrize(("post_layernorm", "title"), [(True, "passed"), (False, "residual-placement")])
def test_a_residual_that_skips_the_norm_after_the_sum_is_told_in_a_layer_like_berts(post_layernorm, title):
    names = {f"attention.{name[0]}_proj.": f"self_attention.qkv.{name}_" for name in ("query", "key", "value")}
    names |= {"norm.": "layernorm_mlp.layer_norm_", "up.": "layernorm_mlp.fc1_", "down.": "layernorm_mlp.fc2_"}
    names |= {"attention.o_proj.": "self_attention.proj.", "last_norm.": "layernorm."}
    options = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", output_layernorm=True)
    options["apply_residual_connection_post_layernorm"] = post_layernorm
    result = compared(
        PostNormLayer,
        lambda te: te.TransformerLayer(WIDTH, 96, 4, **options),
        normal((2, SEQ, WIDTH)),
        "fp32",
        {left + kind: right + kind for left, right in names.items() for kind in ("weight", "bias")},
    )
    tells_only(result, title)
