"""Mistakes that belong to several places of a layer at once, in layers that normalise queries and keys."""

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import reference
from parity.reference import rotate_halves, rotate_interleaved

HIDDEN, FFN, HEADS, SEQ = 64, 128, 4, 32
HEAD_DIM = HIDDEN // HEADS
FREQUENCIES = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)


class Layer(nn.Module):
    """Llama's, with norms of queries and keys before the rotation, as Qwen3 has it, or after, as Llama 4."""

    def __init__(self, norm_first: bool = True, interleaved: bool = False) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.rotate = rotate_interleaved if interleaved else rotate_halves
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM, eps=1e-6) for _ in range(2))
        self.attention = reference.CoreAttention(causal=True)
        self.mlp = reference.SwiGLUMLP(HIDDEN, FFN, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (HEADS, HEAD_DIM))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (self._placed(y, norm) for y, norm in ((query, self.q_norm), (key, self.k_norm)))
        x = x + self.o_proj(self.attention(query, key, value))
        return x + self.mlp(x)

    def _placed(self, x: Tensor, norm: nn.Module) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * FREQUENCIES.to(x.dtype)
        return self.rotate(norm(x), angles) if self.norm_first else norm(self.rotate(x, angles))


class Layers(nn.Sequential):
    """Two layers."""

    def __init__(self, **arguments: bool) -> None:
        super().__init__(Layer(**arguments), Layer(**arguments))


WEIGHTS = {
    "norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "q_norm.weight": "self_attention.q_norm.weight",
    "k_norm.weight": "self_attention.k_norm.weight",
    "o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


def weights(exchanged=()):
    """The map of both layers, in which two entries of each have each other's TE parameter."""

    def left(side, layer):
        return parity.stack(*(f"{layer}.{name}" for name in side)) if isinstance(side, tuple) else f"{layer}.{side}"

    other = dict(zip(exchanged, exchanged[::-1], strict=True))
    return {left(side, layer): f"{layer}.{WEIGHTS[other.get(side, side)]}" for layer in (0, 1) for side in WEIGHTS}


def found(*, layer=None, exchanged=(), rope=None, call=None, cast=False, precision="fp32", seq=SEQ, **te_arguments):
    """Titles of the findings on TE's layers with these arguments, against the reference with those.

    ``cast`` makes the rotary embedding a submodule of the port, so that a cast of the port rounds its frequencies.
    """

    def factory(te, **_):
        arguments = dict(
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            layernorm_epsilon=1e-6,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            qk_norm_type="RMSNorm",
            qk_norm_eps=1e-6,
            qk_norm_before_rope=True,
        )
        embedding = te.RotaryPositionEmbedding(HEAD_DIM, **(rope or {}))
        layers = nn.ModuleList(te.TransformerLayer(HIDDEN, FFN, HEADS, **(arguments | te_arguments)) for _ in range(2))
        if cast:
            layers[0].rope = embedding

        def called(layers, x):
            for one in layers:
                x = one(x, rotary_pos_emb=embedding(x.shape[1]), **(call or {}))
            return x

        return parity.Pair(
            reference=Layers(**(layer or {})),
            candidate=layers,
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights=weights(exchanged),
            call_candidate=called,
        )

    (result,) = parity.compare(parity.Case("layers", factory, sizes=(dict(batch=2, seq=seq),)), [precision])
    return [finding.title for finding in result.findings] if result.status == "failed" else [result.status]


def test_right_ports_pass():
    assert found() == ["passed"]
    assert found(layer=dict(norm_first=False), qk_norm_before_rope=False) == ["passed"]


@pytest.mark.parametrize("norm_first", [True, False])
def test_norms_on_the_wrong_side_of_the_rotation_are_found(norm_first):
    assert found(layer=dict(norm_first=norm_first), qk_norm_before_rope=not norm_first) == ["norm-order"]


def test_an_eps_of_queries_and_keys_alone_is_found_far_from_known_ones():
    assert found(qk_norm_eps=1e-3) == ["norm-eps"]


def test_an_eps_of_all_norms_but_those_of_queries_and_keys_is_found():
    assert found(layernorm_epsilon=1e-3) == ["norm-eps"]


def test_gammas_that_were_shifted_in_all_layers_are_found():
    assert found(zero_centered_gamma=True) == ["gamma-shift"]


@pytest.mark.parametrize(
    "exchanged",
    [("k_proj.weight", "v_proj.weight"), ("norm.weight", "mlp.norm.weight"), ("q_norm.weight", "k_norm.weight")],
)
def test_parameters_that_were_exchanged_in_all_layers_are_found(exchanged):
    assert found(exchanged=exchanged) == ["parameters-exchanged"]


def test_blocks_side_by_side_in_all_layers_are_found():
    assert found(parallel_attention_mlp=True) == ["parallel-block"]


@pytest.mark.parametrize("size", [4, 11])
def test_a_window_that_the_reference_does_not_have_is_found(size):
    assert found(call=dict(window_size=(size, 0))) == ["window"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wrong", ["layer", "embedding", "both"])
def test_an_interleaving_that_layer_or_embedding_does_not_share_is_found(interleaved, wrong):
    rotary_pos_interleaved = interleaved ^ (wrong in ("layer", "both"))
    rope = dict(interleaved=interleaved ^ (wrong in ("embedding", "both")))
    arguments = dict(layer=dict(interleaved=interleaved), rotary_pos_interleaved=rotary_pos_interleaved, rope=rope)
    assert found(**arguments) == ["rope-layout"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rotary_frequencies_that_are_cast_with_the_model_are_found(precision):
    assert found(precision=precision, seq=160) == ["passed"]
    assert found(precision=precision, seq=160, cast=True) == ["rope-precision"]
