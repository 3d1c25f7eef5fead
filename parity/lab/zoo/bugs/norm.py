"""Norms with another epsilon, another kind, or another place of rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.lab.zoo.planting import Bug, Call, called, constructed_with, with_inputs, with_output


def _centred(x: Tensor) -> tuple[Tensor]:
    return (x - x.mean(-1, keepdim=True),)


def _scaled_by_bf16_statistics(module: Any, x: Tensor, output: Tensor) -> Tensor:
    """Return what the norm returns if its reciprocal root mean square was rounded to BF16."""
    rms = x.detach().float().square().mean(-1, keepdim=True).add(module.eps).sqrt()
    rounded = rms.reciprocal().bfloat16().float()
    return (output.float() * (rounded * rms)).to(output.dtype)


def _rounding_before_weight(call: Call) -> Call:
    """Hugging Face's ``LlamaRMSNorm``: normalise in FP32, round to the input's dtype, then multiply by the weight."""

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


BUGS = (
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
        with_inputs(_centred),
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
