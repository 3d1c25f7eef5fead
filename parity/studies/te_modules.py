"""TE's modules at any size, alone or many in a row, each with its reference: what studies measure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import Case, Pair
from parity.cases import attention, layer, linear, mlp, norm
from parity.declaring.validate import CheckedSize
from parity.rounding.freedom import Freedom
from parity.weights.sides import renamed

HEAD_DIM = 64
# What TE's modules do where a kernel may choose: attention is fused, a layer's residual sums are stored.
AS_TE = Freedom(stores_scores=False, stores_sums=True, stores_pointwise=False)
EXPERTS = 4


@dataclass(frozen=True)
class Shape:
    """How large a module is.

    Attributes:
        hidden: width of its input, a multiple of 128.
        seq: tokens; the batch is 1.
        depth: how many of it follow each other.
    """

    hidden: int
    seq: int
    depth: int = 1


@dataclass(frozen=True)
class Module:
    """A TE module with its reference.

    Attributes:
        title: the TE class, and what is chosen of it.
        case: that builds both.
        sizes: the case's sizes at a shape.
        stackable: whether several make sense in a row, each on the result of the one before.
    """

    title: str
    case: Case
    sizes: Callable[[Shape], dict[str, Any]]
    stackable: bool = False


@functools.lru_cache(maxsize=256)
def placed(name: str, shape: Shape) -> tuple[Case, CheckedSize]:
    """The case of a module at a shape, without probing inputs; always the same objects, which ``prepare`` remembers.

    Args:
        name: of ``MODULES``.
        shape: of depth 1 if the module is not stackable.
    """
    module = MODULES[name]
    sizes = {"batch": 1, "seq": shape.seq} | module.sizes(shape)
    case = replace(module.case, probe=False)
    if shape.depth > 1:
        case = _stacked(case, shape.depth)
    return case, CheckedSize(sizes, f"{shape.hidden}x{shape.seq}x{shape.depth}")


def _stacked(case: Case, depth: int) -> Case:
    def build(te: ModuleType, **sizes: Any) -> Pair:
        pairs = [case.factory(te, **sizes) for _ in range(depth)]
        return replace(
            pairs[0],
            reference=nn.ModuleList([pair.reference for pair in pairs]),
            candidate=nn.ModuleList([pair.candidate for pair in pairs]),
            weights={
                _inside(i, left): _inside(i, right) for i in range(depth) for left, right in pairs[i].weights.items()
            },
            call_reference=_one_after_the_other(pairs[0].call_reference),
            call_candidate=_one_after_the_other(pairs[0].call_candidate),
        )

    return replace(case, name=f"{case.name}_x{depth}", factory=build)


def _inside(index: int, side: Any) -> Any:
    return renamed(side, lambda name: f"{index}.{name}")


def _one_after_the_other(call: Callable[..., Any] | None) -> Callable[..., Tensor]:
    def run(modules: nn.ModuleList, x: Tensor) -> Tensor:
        for module in modules:
            x = call(module, x) if call else module(x)
        return x

    return run


class ExpertLinears(nn.Module):
    """A linear layer for each of several equal runs of tokens."""

    def __init__(self, experts: int, features: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(features, features, bias=False) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, features]`` to the same."""
        parts = zip(self.experts, x.chunk(len(self.experts)), strict=True)
        return torch.cat([expert(tokens) for expert, tokens in parts])


def _grouped_linear(te: ModuleType, features: int, **_: Any) -> Pair:
    return Pair(
        reference=ExpertLinears(EXPERTS, features),
        candidate=te.GroupedLinear(EXPERTS, features, features, bias=False),
        weights={f"experts.{i}.weight": f"weight{i}" for i in range(EXPERTS)},
        inputs=lambda rng, seq: rng.normal(EXPERTS * seq, features),
        call_candidate=lambda module, x: module(x, [x.shape[0] // EXPERTS] * EXPERTS),
    )


def _features(shape: Shape) -> dict[str, Any]:
    return dict(in_features=shape.hidden, out_features=shape.hidden)


def _width(shape: Shape) -> dict[str, Any]:
    return dict(hidden=shape.hidden)


def _plain_mlp(shape: Shape) -> dict[str, Any]:
    return dict(hidden=shape.hidden, ffn=4 * shape.hidden)


def _gated_mlp(shape: Shape) -> dict[str, Any]:
    return dict(hidden=shape.hidden, ffn=3 * shape.hidden)


def _core(shape: Shape) -> dict[str, Any]:
    heads = shape.hidden // HEAD_DIM
    return dict(heads=heads, groups=heads, head_dim=HEAD_DIM)


def _grouped_heads(shape: Shape) -> dict[str, Any]:
    heads = shape.hidden // HEAD_DIM
    return dict(hidden=shape.hidden, heads=heads, groups=heads // 2)


def _gpt(shape: Shape) -> dict[str, Any]:
    return _plain_mlp(shape) | dict(heads=shape.hidden // HEAD_DIM)


def _llama(shape: Shape) -> dict[str, Any]:
    return _gated_mlp(shape) | _grouped_heads(shape)


MODULES: Mapping[str, Module] = {
    "layernorm": Module("LayerNorm", norm.layernorm, _width),
    "rmsnorm": Module("RMSNorm", norm.rmsnorm, _width),
    "linear": Module("Linear", linear.linear, _features),
    "grouped_linear": Module(
        "GroupedLinear", Case("grouped_linear", _grouped_linear, sizes=()), lambda shape: dict(features=shape.hidden)
    ),
    "layernorm_linear": Module("LayerNormLinear", linear.layernorm_linear, _features, True),
    "layernorm_mlp_gelu": Module("LayerNormMLP, GELU", mlp.gelu, _plain_mlp, True),
    "layernorm_mlp_swiglu": Module("LayerNormMLP, RMSNorm, SwiGLU", mlp.swiglu, _gated_mlp, True),
    "dot_product_attention": Module("DotProductAttention, causal", attention.causal_mha, _core),
    "multihead_attention": Module("MultiheadAttention, causal, GQA, RoPE", attention.separate_qkv, _grouped_heads),
    "transformer_layer_gpt": Module("TransformerLayer, GPT", layer.gpt, _gpt, True),
    "transformer_layer_llama": Module("TransformerLayer, llama", layer.llama, _llama, True),
}
