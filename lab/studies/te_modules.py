"""TE's modules at any size, alone or stacked, each with its reference, and TE's attention on a chosen backend."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize
from parity.case.weight_map import renamed
from parity.cases import attention, layer, linear, mlp, norm
from parity.numerics.errors import relative_l2
from parity.numerics.freedom import Freedom
from parity.te import Kernels
from parity.te.attention_backend import te_variables
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.passes.all_passes import Tensors

# TE's attention on a chosen backend.


Backend = Literal["unfused", "fused", "flash"]


def attend(
    kernels: Kernels,
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int = 0,
    causal: bool = False,
) -> Tensor:
    """Attend with TE's ``DotProductAttention`` on one backend.

    Args:
        kernels: the kernels that TE runs on; tensors must be on their device.
        backend: unfused (GEMM, softmax, GEMM), fused (cuDNN's flash attention) or flash (the package flash-attn).
        query: ``[heads, queries, head_dim]``, FP16, BF16 or FP32.
        key: ``[heads, keys, head_dim]``.
        value: as key.
        layer: the layer's number, from 1, for query-key layer scaling, which the unfused backend applies in FP16. 0
            turns it off.
        causal: whether a query sees keys up to its own position only.

    Returns:
        ``[heads, queries, head_dim]``.

    Raises:
        UserError: if TE has no such backend for these sizes and this dtype on this GPU.
    """
    heads, _, head_dim = query.shape
    variables = {
        "NVTE_FLASH_ATTN": str(int(backend == "flash")),
        "NVTE_FUSED_ATTN": str(int(backend == "fused")),
        "NVTE_UNFUSED_ATTN": str(int(backend == "unfused")),
        "NVTE_APPLY_QK_LAYER_SCALING": str(int(layer > 0)),
    }
    with te_variables(variables), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TE warns when it corrects one of its own defaults
        _choose_backend_again()
        attention = kernels.te.DotProductAttention(
            heads,
            head_dim,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
            layer_number=layer or None,
        ).eval()
        try:
            output = attention(*(tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (query, key, value)))
        except ValueError as error:
            raise UserError(f"TE's {backend} attention, {query.dtype}, head_dim {head_dim}: {error}") from error
        finally:
            _choose_backend_again()
    return output.view(query.shape[1], heads, head_dim).transpose(0, 1)


def _choose_backend_again() -> None:
    """Make TE read the environment again, because it keeps its choice until an argument changes."""
    package = "transformer_engine.pytorch.attention.dot_product_attention"
    for name in (package, f"{package}.dot_product_attention"):
        choice = getattr(sys.modules.get(name), "_attention_backends", None)
        if choice is not None:
            choice["backend_selection_requires_update"] = True


# The modules that studies measure, at any size, alone or stacked, each with its reference.


HEAD_DIM = 64
# TE's behaviour where a kernel is free to choose: attention is fused, and a layer's residual sums are stored.
AS_TE = Freedom(stores_scores=False, stores_sums=True, stores_pointwise=False)
EXPERTS = 4


@dataclass(frozen=True)
class Shape:
    """The size of a module, or of a stack of equal modules.

    Attributes:
        hidden: width of its input, a multiple of 128.
        seq: number of tokens; the batch is 1.
        depth: number of modules in a row.
    """

    hidden: int
    seq: int
    depth: int = 1


@dataclass(frozen=True)
class Module:
    """A TE module with its reference.

    Attributes:
        title: the TE class and its options.
        case: the case that builds both.
        sizes: returns the case's sizes at a shape.
        stackable: whether several in a row make sense, each applied to the output of the one before.
    """

    title: str
    case: Case
    sizes: Callable[[Shape], dict[str, Any]]
    stackable: bool = False


@functools.lru_cache(maxsize=256)
def placed(name: str, shape: Shape) -> tuple[Case, CheckedSize]:
    """Return a module's case at a shape, without probing inputs.

    Repeated calls return the same objects, so that ``prepare`` finds its cached results.

    Args:
        name: a name in ``MODULES``.
        shape: must have depth 1 if the module is not stackable.
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
    """A separate linear layer for each of several equal chunks of tokens."""

    def __init__(self, experts: int, features: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(features, features, bias=False) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, features]`` to the same shape."""
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


# Errors are pooled over all tensors of a kind, so that a bias whose gradient is nearly 0 does not dominate a module.


def pooled_relative_l2(tensors: Tensors, golden: Tensors) -> dict[str, float]:
    """Return ``|error| / |golden|`` for each kind of tensor, pooled over all tensors of the kind."""
    errors = {key: tensors[key].double() - truth for key, truth in golden.items()}
    kinds = dict.fromkeys(kind for kind, _ in golden)
    return {kind: relative_l2(_norm(errors, kind), _norm(golden, kind)) for kind in kinds}


def _norm(tensors: Tensors, kind: str) -> float:
    return math.hypot(*(tensor.norm().item() for (of_kind, _), tensor in tensors.items() if of_kind == kind))
