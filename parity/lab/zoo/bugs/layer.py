"""Layers and models wired otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

from torch import Tensor, nn

from parity.case.case import Pair
from parity.lab.zoo.hosts.linear import LowRankLinear
from parity.lab.zoo.hosts.model import TEModel
from parity.lab.zoo.planting import Bug, Plant, both, constructed_with, edited, with_output

LAYERS = ("gpt_layer", "llama_layer")


def _first_norm_last(pair: Pair, te: ModuleType) -> Pair:
    """Return the map for ``output_layernorm=True``, which has the norm in front of attention behind the layer."""
    names = {
        right: f"layernorm.{right.rpartition('_')[2]}"
        if "layernorm_qkv.layer_norm" in right
        else right.replace("layernorm_qkv", "qkv")
        for right in pair.weights.values()
        if isinstance(right, str)
    }
    return dataclasses.replace(pair, weights={left: names[str(right)] for left, right in pair.weights.items()})


def _on_model(edit_model: object) -> Plant:
    def edit(module: nn.Module) -> None:
        model = next(part for part in module.modules() if isinstance(part, TEModel))
        edit_model(model)  # type: ignore[operator]

    return edited(edit)


def _untie(model: TEModel) -> None:
    model.tie = Tensor.detach


def _without_final_norm(model: TEModel) -> None:
    model.final_norm = lambda x: x


def _without_residual(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return output - x


def _scaled(scale: Callable[[float], float]) -> Plant:
    def edit(module: nn.Module) -> None:
        assert isinstance(module, LowRankLinear)
        module.scale = scale(module.scale)

    return edited(edit)


BUGS = (
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
        with_output(_without_residual),
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
        _scaled(lambda scale: 1.0),
        "factor",
    ),
    Bug(
        "low-rank-scale-by-root-of-rank",
        "LoRA's alpha is divided by the root of its rank, as rank-stabilised LoRA does.",
        ("low_rank_linear",),
        _scaled(lambda scale: scale * 4.0),
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
        _on_model(_without_final_norm),
        "norm-missing",
    ),
    Bug(
        "embeddings-not-tied",
        "The output projection is a copy of the embeddings: the same output, but it adds nothing to their gradient.",
        ("tied_model", "model_with_loss"),
        _on_model(_untie),
        "embeddings-not-tied",
    ),
)
