"""FLOPs of the plain modules in ``parity.reference``, read off the modules and the shapes that they are given."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor, nn

from parity import flops, reference
from parity.flops import Flops

Components = dict[str, Flops]


@functools.singledispatch
def components(module: nn.Module, *inputs: Tensor, skips_hidden: bool = False) -> Components:
    """FLOPs of a module by component; submodules' components are prefixed with their names.

    Args:
        module: one of ``parity.reference``'s, ``nn.Linear``, ``nn.LayerNorm`` or ``nn.RMSNorm``.
        inputs: as the module takes them; only their shapes are read.
        skips_hidden: whether attention leaves out pairs that a causal mask or a window hides, as fused kernels do; the
            plain modules compute all. Padding is counted either way.

    Raises:
        TypeError: for another module.
    """
    raise TypeError(f"FLOPs of {type(module).__name__} are not known; register it with parity.module_flops.components")


@components.register(nn.Linear)
def _linear(module: nn.Linear, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"linear": flops.linear(_tokens(x), module.in_features, module.out_features)}


@components.register(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"norm": flops.layer_norm(_tokens(x), x.shape[-1])}


@components.register(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"norm": flops.rms_norm(_tokens(x), x.shape[-1])}


@components.register(reference.NormLinear)
def _norm_linear(module: reference.NormLinear, x: Tensor, skips_hidden: bool = False) -> Components:
    return components(module.norm, x) | components(module.linear, x)


@components.register(reference.MLP)
@components.register(reference.GatedMLP)
def _mlp(module: reference.MLP | reference.GatedMLP, x: Tensor, skips_hidden: bool = False) -> Components:
    gated = isinstance(module, reference.GatedMLP)
    hidden, ffn = module.up_proj.in_features, module.up_proj.out_features
    return components(module.norm, x) | flops.mlp(_tokens(x), hidden, ffn, gated)


@components.register(reference.CoreAttention)
def _core_attention(
    module: reference.CoreAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_is_padding: Tensor | None = None,
    skips_hidden: bool = False,
) -> Components:
    batch, queries, heads, head_dim = query.shape
    causal, window = (module.causal, module.window) if skips_hidden else (False, None)
    pairs = flops.visible_pairs(queries, key.shape[1], causal, window)
    return flops.core_attention(batch, heads, pairs, head_dim)


@components.register(reference.Attention)
def _attention(module: reference.Attention, x: Tensor, skips_hidden: bool = False) -> Components:
    heads, groups = (proj.out_features // module.head_dim for proj in (module.q_proj, module.k_proj))
    batch, seq, hidden = x.shape
    sizes = flops.LayerSizes(batch, seq, hidden, heads, groups, module.head_dim, ffn=0)
    pairs = flops.visible_pairs(seq, seq, causal=skips_hidden)
    return (
        flops.query_key_value(sizes)
        | flops.core_attention(batch, heads, pairs, module.head_dim)
        | {"output": flops.output_projection(sizes)}
    )


@components.register(reference.GPTLayer)
@components.register(reference.LlamaLayer)
def _layer(module: reference.GPTLayer | reference.LlamaLayer, x: Tensor, skips_hidden: bool = False) -> Components:
    parts = {
        "attention_norm": components(module.attention_norm, x),
        "attention": components(module.attention, x, skips_hidden=skips_hidden),
        "mlp": components(module.mlp, x),
    }
    return _prefixed(parts)


def _prefixed(parts: Mapping[str, Components]) -> Components:
    return {f"{part}.{name}": each for part, found in parts.items() for name, each in found.items()}


def _tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
