"""A pair that calls its candidate on whole sequences decodes them as well: right ports pass, wrong caches fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity import te
from parity.case.case import Case
from parity.case.registry import load_case
from parity.case.validate import check_case
from parity.passes.decoded import decoded_case
from parity.reference import LlamaLayer
from parity.te.attention_backend import NotOffered

KERNELS = te.kernels("cpu")
TE = KERNELS.te
BATCH, SEQ, WIDTH, HEADS, HEAD_DIM, LAYERS, WORDS = 8, 12, 64, 4, 16, 2, 96


def turn(x: Tensor, start: Tensor | None = None) -> Tensor:
    """Rotate ``[batch, seq, heads, head_dim]`` by its positions, from ``start`` on."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = TE.RotaryPositionEmbedding(HEAD_DIM)(2 * SEQ)
    return apply_rotary_pos_emb(x.contiguous(), angles, tensor_format="bshd", start_positions=start)


class Attention(nn.Module):
    """Causal attention with rotary positions in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM)
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequencies).repeat(1, 2)[:, None]

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

        heads = (one.transpose(1, 2) for one in (rotated(query), rotated(key), value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Mistakes:
    """What a port does when it decodes: by default, what is right."""

    start: Callable[[Tensor], Tensor | None] = lambda cached: cached
    number: Callable[[int], int] = lambda layer: layer + 1
    gives_cache: bool = True


RIGHT = Mistakes()


class Ported(nn.Module):
    """The same on TE's modules, with a cache."""

    def __init__(self, layer: int, made: Mistakes) -> None:
        super().__init__()
        self.made = made
        self.qkv, self.out = TE.Linear(WIDTH, 3 * WIDTH), TE.Linear(WIDTH, WIDTH)
        options = dict(qkv_format="bshd", attention_dropout=0.0, layer_number=made.number(layer))
        self.core = TE.DotProductAttention(HEADS, HEAD_DIM, **options)

    def forward(self, x: Tensor, inference_params: Any = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        start, given = None, {}
        if inference_params is not None:
            start = self.made.start(inference_params.get_seqlens_pre_step())
            if self.core.layer_number not in inference_params.cache_manager.cache:
                inference_params.allocate_memory(self.core.layer_number)
            given = dict(attn_mask_type="padding_causal", inference_params=inference_params)
        return self.out(self.core(turn(query, start), turn(key, start), value, **given))


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class PortedModel(Model):
    gives_cache = True

    def forward(self, ids: Tensor, inference_params: Any = None) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, inference_params if self.gives_cache else None)
        return self.head(x)


def scored(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())}


NAMES = ("embedding.weight", "head.weight", "head.bias")
LAYER = {f"{part}.{kind}": f"{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")}


def model(made: Mistakes = RIGHT, **changes: Any) -> Case:
    """Return a language model, whose pair calls it on whole sequences for logits and a loss."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        candidate = PortedModel([Ported(layer, made) for layer in range(LAYERS)])
        candidate.gives_cache = made.gives_cache
        pair = parity.Pair(
            reference=Model([Attention() for _ in range(LAYERS)]),
            candidate=candidate,
            weights={**parity.under(LAYER, "layers.{i}."), **{name: name for name in NAMES}},
            inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=WORDS),
            call_reference=lambda model, ids: scored(model(ids), ids),
            call_candidate=lambda model, ids: scored(model(ids), ids),
        )
        return replace(pair, **changes)

    return Case("model", factory, sizes=[dict(batch=BATCH, seq=SEQ)])


def decoded(case: Case) -> Case:
    (checked,) = check_case(case, TE)
    return decoded_case(case, checked, KERNELS)


def test_a_mistake_with_the_cache_passes_in_one_pass():
    (result,) = parity.compare(model(Mistakes(start=lambda cached: None)), ["fp32"])
    assert result.passed, result.reason


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
def test_a_right_port_passes_with_what_its_pair_makes_of_the_logits(precision):
    (result,) = parity.compare(decoded(model()), [precision])
    assert result.passed, (result.reason, result.findings)
    assert {tensor.name for tensor in result.tensors} == {"output[logits]", "output[loss]"}
    assert {tensor.kind for tensor in result.tensors} == {"output", "probed output"}  # and no gradients


@pytest.mark.parametrize(
    ("made", "title"),
    [
        (Mistakes(start=lambda cached: None), "rope-position"),
        (Mistakes(start=lambda cached: (cached - 1).clamp(min=0)), "rope-position"),
        (Mistakes(number=lambda layer: 1), "cache-shared"),
        (Mistakes(gives_cache=False), "cache-step"),
    ],
    ids=["positions begin again", "positions one too small", "one cache for all layers", "no cache"],
)
def test_a_mistake_with_the_cache_is_found(made, title):
    (result,) = parity.compare(decoded(model(made)), ["fp32"])
    assert result.status == "failed"
    assert result.findings[0].title == title, result.findings


# A layer of TE's, which takes the cache itself, in each of its formats.


def layer(qkv_format: str, call: Callable[..., Tensor] | None = None, mask: str = "causal") -> Case:
    options = dict(num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False, layer_number=1)
    options |= dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=qkv_format)
    weights = {
        "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
        **{f"attention.{x}_proj.weight": f"self_attention.layernorm_qkv.{y}_weight" for x, y in PROJECTIONS.items()},
        "attention.o_proj.weight": "self_attention.proj.weight",
        "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
        parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
        "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
    }

    def factory(te: Any, **_: Any) -> parity.Pair:
        rope = te.RotaryPositionEmbedding(HEAD_DIM)(SEQ)
        is_first = qkv_format == "sbhd"
        return parity.Pair(
            reference=LlamaLayer(WIDTH, 192, HEADS, 2),
            candidate=te.TransformerLayer(WIDTH, 192, HEADS, self_attn_mask_type=mask, **options),
            weights=weights,
            inputs=lambda rng: rng.normal(*((SEQ, BATCH) if is_first else (BATCH, SEQ)), WIDTH),
            call_reference=lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1) if is_first else layer(x),
            call_candidate=call or (lambda layer, x: layer(x, self_attn_mask_type=mask, rotary_pos_emb=rope)),
        )

    return Case("layer", factory, sizes=[{}])


PROJECTIONS = {"q": "query", "k": "key", "v": "value"}


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_the_cache_and_the_dimensions_of_a_layer_are_read_from_it(qkv_format):
    (result,) = parity.compare(decoded(layer(qkv_format)), ["fp32"])
    assert result.passed, (result.reason, result.findings)


def test_attention_that_gets_queries_keys_and_values_in_one_tensor_decodes():
    case = load_case(Path(__file__).parents[2] / "cases" / "layer.py", "transformer_layer_gpt")
    (result,) = parity.compare(decoded(replace(case, sizes=case.sizes[:1])), ["fp32"])
    assert result.passed, (result.reason, result.findings)


def test_a_call_that_takes_the_cache_itself_decodes():
    def call(model: Any, ids: Tensor, inference_params: Any = None) -> Tensor:
        return PortedModel.forward(model, ids, inference_params)

    case = model(call_candidate=call, call_reference=lambda model, ids: model(ids))
    (result,) = parity.compare(decoded(case), ["fp32"])
    assert result.passed, (result.reason, result.findings)


class InAModel(nn.Module):
    """A layer in a model that has an argument for the cache, but does not change the mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, inference_params: Any = None) -> Tensor:
        return self.layer(x, inference_params=inference_params)


def test_a_mask_that_te_does_not_take_with_a_cache_is_an_error_with_advice():
    def factory(te: Any) -> parity.Pair:
        pair = layer("bshd", lambda model, x: model(x)).factory(te)
        weights = {left: f"layer.{right}" for left, right in pair.weights.items()}
        return replace(pair, candidate=InAModel(pair.candidate), weights=weights)

    (result,) = parity.compare(decoded(Case("in_a_model", factory, sizes=[{}])), ["fp32"])
    assert result.status == "error"
    assert 'with a cache, TE\'s attention needs attn_mask_type="padding_causal"' in result.reason


# What cannot be decoded is said, and is no failure.


def twice(model: Any, ids: Tensor) -> Tensor:
    return (model(ids) + model(ids)) / 2


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            Case(
                "mlp",
                lambda te: parity.Pair(
                    nn.Linear(16, 16),
                    te.Linear(16, 16),
                    lambda rng: rng.normal(16, 16),
                    dict(weight="weight", bias="bias"),
                ),
                sizes=[{}],
            ),
            "neither Linear.forward nor call_candidate has an argument inference_params",
        ),
        (model(call_candidate=parity.Decoding(HEADS, HEAD_DIM)), "it decodes already"),
        (model(call_candidate=lambda model, ids: model.head(model.embedding(ids))), "calls the candidate 0 times"),
        (model(call_candidate=twice), "calls the candidate 2 times in a pass, but has to call it once"),
        (layer("bshd", mask="no_mask"), "its attention has the mask 'no_mask'"),
        (
            layer("bshd", lambda layer, x: layer(x, attention_mask=None, encoder_output=x)),
            "each token: hidden_states, encoder_output",
        ),
        (
            model(inputs=lambda rng, batch, seq: rng.integers(seq, seq, high=WORDS)),
            r"ids begins with the dimensions \(12, 12\), which do not tell 12 sequences from 12 tokens",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_decoded_is_said(case, told):
    with pytest.raises(NotOffered, match=f"^not decoded, since .*{told}"):
        decoded(case)


def test_a_batch_that_fp8_does_not_multiply_is_skipped():
    case = replace(model(), sizes=[dict(batch=2, seq=SEQ)])
    (result,) = parity.compare(decoded(case), ["fp8_current"])
    assert result.status == "skipped"
    assert "a step has 2 tokens, one for each sequence: FP8 execution requires" in result.reason
