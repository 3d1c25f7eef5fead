"""Bugs in the norms, activations and wiring of layers and models, and in how tokens are sent to experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.planting import (
    Bug,
    Call,
    Plant,
    both,
    called,
    constructed_with,
    edited,
    with_attributes,
    with_inputs,
    with_output,
)
from parity.case.case import Pair
from parity.measuring.hosts.layer import TEMixture, route, weights_in
from parity.measuring.hosts.linear import LowRankLinear

# Norms with the wrong epsilon, of the wrong kind, or rounding in the wrong place.


def _scaled_by_bf16_statistics(module: Any, x: Tensor, output: Tensor) -> Tensor:
    """Return what the norm would return if its reciprocal root mean square were rounded to BF16."""
    rms = x.detach().float().square().mean(-1, keepdim=True).add(module.eps).sqrt()
    rounded = rms.reciprocal().bfloat16().float()
    return (output.float() * (rounded * rms)).to(output.dtype)


def _rounding_before_weight(call: Call) -> Call:
    """Normalise in FP32, round, then multiply by the weight, as Hugging Face's ``LlamaRMSNorm`` does."""

    def mistaken(module: Any, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps)
        return module.weight * normed.to(x.dtype)

    return mistaken


def _eps_bug(eps: float, right: str, hosts: tuple[str, ...]) -> Bug:
    return Bug(
        f"eps-{eps:g}-for-{right}",
        f"The norm's eps is {eps:g} where the reference has {right}.",
        hosts,
        constructed_with(eps=eps),
        "norm-eps",
    )


NORM_BUGS = (
    _eps_bug(1e-6, "1e-05", ("rmsnorm", "layernorm", "swiglu_mlp")),
    _eps_bug(1e-8, "1e-05", ("rmsnorm", "swiglu_mlp")),
    _eps_bug(1e-12, "1e-05", ("layernorm", "gelu_mlp")),
    _eps_bug(1e-5, "1e-06", ("rmsnorm_of_embeddings",)),
    _eps_bug(1e-12, "1e-06", ("rmsnorm_of_embeddings",)),
    Bug(
        "eps-1e-06-in-a-layer",
        "Both norms of a layer have eps 1e-6 where the reference has 1e-5.",
        ("llama_layer",),
        constructed_with(layernorm_epsilon=1e-6),
        "norm-eps",
    ),
    Bug(
        "layernorm-for-rmsnorm",
        "The norm subtracts the mean.",
        ("rmsnorm", "swiglu_mlp"),
        with_inputs(lambda x: (x - x.mean(-1, keepdim=True),)),
        "norm-kind",
    ),
    Bug(
        "norm-statistics-in-bf16",
        "The norm's statistics are rounded to BF16.",
        ("rmsnorm",),
        with_output(_scaled_by_bf16_statistics),
        "norm-statistics",
    ),
    Bug(
        "norm-rounds-before-weight",
        "The normed value is rounded before it is multiplied by the weight, where TE rounds once after.",
        ("rmsnorm",),
        called(_rounding_before_weight),
        "norm-rounding",
        precisions=("bf16", "fp16"),
    ),
)


# The wrong activation, or the right one with the wrong constants.


def _clamped(**params: float) -> Plant:
    """Construct with other constants than TE's default, which is gpt-oss's limit of 7 and alpha of 1.702."""
    return constructed_with(activation_params={"limit": 7.0, "alpha": 1.702, **params})


def _activation_bug(name: str, summary: str, host: str, plant: Plant) -> Bug:
    return Bug(name, summary, (host,), plant, "activation")


ACTIVATION_BUGS = (
    _activation_bug(
        "gelu-tanh-for-erf",
        "GELU is TE's tanh approximation where the reference has PyTorch's default.",
        "erf_gelu_mlp",
        with_attributes(activation=lambda x: F.gelu(x, approximate="tanh")),
    ),
    _activation_bug(
        "quick-gelu-for-erf",
        "GELU is the sigmoid approximation.",
        "erf_gelu_mlp",
        with_attributes(activation=lambda x: x * torch.sigmoid(1.702 * x)),
    ),
    _activation_bug(
        "quick-gelu-for-gelu", "activation='qgelu' for 'gelu'.", "gelu_mlp", constructed_with(activation="qgelu")
    ),
    _activation_bug("silu-for-gelu", "activation='silu' for 'gelu'.", "gelu_mlp", constructed_with(activation="silu")),
    _activation_bug("relu-for-gelu", "activation='relu' for 'gelu'.", "gelu_mlp", constructed_with(activation="relu")),
    _activation_bug(
        "geglu-for-swiglu", "activation='geglu' for 'swiglu'.", "swiglu_mlp", constructed_with(activation="geglu")
    ),
    _activation_bug(
        "sigmoid-for-silu-gate",
        "activation='glu' for 'swiglu': the gate itself is not multiplied in.",
        "swiglu_mlp",
        constructed_with(activation="glu"),
    ),
    _activation_bug(
        "swiglu-not-clamped",
        "activation='swiglu' for 'clamped_swiglu'.",
        "clamped_swiglu_mlp",
        constructed_with(activation="swiglu"),
    ),
    _activation_bug(
        "swiglu-limit-wrong", "The clamped SwiGLU's limit is 10 for 7.", "clamped_swiglu_mlp", _clamped(limit=10.0)
    ),
    _activation_bug(
        "swiglu-alpha-wrong", "The clamped SwiGLU's alpha is 1 for 1.702.", "clamped_swiglu_mlp", _clamped(alpha=1.0)
    ),
)


# Layers and models that are wired wrongly.


LAYERS = ("gpt_layer", "llama_layer")


def _first_norm_last(pair: Pair, te: ModuleType) -> Pair:
    """Rename weights for ``output_layernorm=True``, which moves the norm before attention to the end of the layer."""
    names = {
        right: f"layernorm.{right.rpartition('_')[2]}"
        if "layernorm_qkv.layer_norm" in right
        else right.replace("layernorm_qkv", "qkv")
        for right in pair.weights.values()
        if isinstance(right, str)
    }
    return dataclasses.replace(pair, weights={left: names[str(right)] for left, right in pair.weights.items()})


def _low_rank_scaled(scale: Callable[[float], float]) -> Plant:
    def edit(module: nn.Module) -> None:
        assert isinstance(module, LowRankLinear)
        module.scale = scale(module.scale)

    return edited(edit)


LAYER_BUGS = (
    Bug(
        "sequence-first-for-batch-first",
        "attn_input_format='sbhd', the default, for inputs that are batch first.",
        LAYERS,
        constructed_with(attn_input_format="sbhd"),
        "sequence-first",
    ),
    Bug(
        "sequence-first-for-batch-first-in-attention",
        "qkv_format='sbhd', the default, for inputs that are batch first.",
        ("attention",),
        constructed_with(qkv_format="sbhd"),
        "sequence-first",
    ),
    Bug(
        "dropout-left-on",
        "hidden_dropout=0.1, the default.",
        LAYERS,
        constructed_with(hidden_dropout=0.1),
        "dropout",
    ),
    Bug(
        "residual-from-the-norm",
        "apply_residual_connection_post_layernorm=True: the residual is the norm's output.",
        LAYERS,
        constructed_with(apply_residual_connection_post_layernorm=True),
        "residual-placement",
    ),
    Bug(
        "last-residual-missing",
        "The layer's input does not reach its output directly.",
        ("llama_layer",),
        with_output(lambda module, x, output: output - x),
        "residual-placement",
    ),
    Bug(
        "parallel-block",
        "parallel_attention_mlp=True: attention and MLP both read the layer's input.",
        LAYERS,
        constructed_with(parallel_attention_mlp=True),
        "parallel-block",
    ),
    Bug(
        "sequential-for-parallel-block",
        "parallel_attention_mlp was never passed: the MLP reads what attention made of the layer's input.",
        ("parallel_layer",),
        constructed_with(parallel_attention_mlp=False),
        "parallel-block",
    ),
    Bug(
        "low-rank-scale-missing",
        "LoRA's alpha over its rank was left out.",
        ("low_rank_linear",),
        _low_rank_scaled(lambda scale: 1.0),
        "factor",
    ),
    Bug(
        "low-rank-scale-by-root-of-rank",
        "LoRA's alpha is divided by the root of its rank, as rank-stabilised LoRA does.",
        ("low_rank_linear",),
        _low_rank_scaled(lambda scale: scale * 4.0),
        "factor",
    ),
    Bug(
        "post-norm",
        "output_layernorm=True: TE leaves out the norm in front of attention and norms the layer's output.",
        LAYERS,
        both(constructed_with(output_layernorm=True), _first_norm_last),
        "post-norm",
    ),
    Bug(
        "last-norm-missing",
        "The model's last norm is not called.",
        ("tied_model", "model_with_loss"),
        with_attributes(final_norm=lambda x: x),
        "norm-missing",
    ),
    Bug(
        "embeddings-not-tied",
        "The output projection is a copy of the embeddings: the same output, but it adds nothing to their gradient.",
        ("tied_model", "model_with_loss"),
        with_attributes(tie=Tensor.detach),
        "embeddings-not-tied",
    ),
)


# Mixtures of experts whose tokens are weighted or sent wrongly.


MIXTURE = ("mixture",)


def _not_divided(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = logits.softmax(dim=-1).topk(chosen, dim=-1)
    return shares, experts


def _sigmoids(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = logits.sigmoid().topk(chosen, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), experts


def _all_ones(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = route(logits, chosen)
    return torch.ones_like(shares), experts


def _experts_reversed(pair: Pair, te: ModuleType) -> Pair:
    assert isinstance(pair.candidate, TEMixture)
    return dataclasses.replace(pair, weights=weights_in(reversed(range(pair.candidate.experts))))


MIXTURE_BUGS = (
    Bug(
        "routing-weights-not-divided",
        "The chosen experts' weights are not divided by their sum.",
        MIXTURE,
        with_attributes(weights_of=_not_divided),
        "routing-weights",
    ),
    Bug(
        "routing-weights-by-sigmoid",
        "The router's scores are sigmoids, as in DeepSeek-V3, where the reference's are a softmax.",
        MIXTURE,
        with_attributes(weights_of=_sigmoids),
        "routing-weights",
    ),
    Bug(
        "routing-weights-missing",
        "The experts' results are summed as they are; the router gets no gradient.",
        MIXTURE,
        with_attributes(weights_of=_all_ones),
        "routing-weights",
    ),
    Bug(
        "one-expert-too-few",
        "Each token goes to its first expert alone.",
        MIXTURE,
        constructed_with(chosen=1),
        "top-k",
    ),
    Bug(
        "experts-reversed",
        "The experts' weights are in the reverse order of the router's rows.",
        MIXTURE,
        _experts_reversed,
        "experts-permuted",
    ),
)
