"""Count the FLOPs of a transformer by component, each formula with its source, and of the modules of ``reference``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from parity import reference

# The FLOPs of a transformer by component: forward, backward and recomputation, each formula with its source.
#
# An addition or a multiplication is one FLOP, so a product of ``[m, k]`` and ``[k, n]`` takes 2 m k n (D. Narayanan et
# al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv 2104.04473, appendix).
# Its backward is two such products, one for the gradient of each operand.
#
# Only matrix products and norms are counted. Like every source named here, this leaves out biases, activations,
# softmax, RoPE, dropout and residual additions, which grow with one dimension less than the products do.


# What the backward pass computes again: nothing; attention's scores and context ("selective" in V. Korthikanti et al.,
# "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 5); or whole layers.
Recomputation = Literal["none", "selective", "full"]
_SELECTIVE = ("scores", "context")


@dataclass(frozen=True)
class Flops:
    """FLOPs of one component in a training step.

    Attributes:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass, without recomputation.
        in_products: whether they are spent in matrix products, which is all that ``torch.utils.flop_counter`` counts.
    """

    forward: int
    backward: int
    in_products: bool = True


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a transformer layer and of its inputs.

    Attributes:
        batch: number of sequences.
        seq: tokens in a sequence.
        hidden: width of the residual stream.
        heads: number of query heads.
        groups: number of key and value heads; as many as heads without grouped-query attention (GQA).
        head_dim: width of a head.
        ffn: width inside the MLP, of the gate and of up each.
        gated: whether the MLP has a gate.
        rms: whether the norms are RMSNorm; LayerNorm if not.
        causal: whether attention leaves out what a causal mask hides. A kernel that computes all scores and masks them
            afterwards does not.
    """

    batch: int
    seq: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    gated: bool = False
    rms: bool = False
    causal: bool = False

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the whole batch."""
        return self.batch * self.seq


def linear(tokens: int, in_features: int, out_features: int) -> Flops:
    """Count a linear layer without bias: 2 forward, 4 backward (input and weight gradient), each times the sizes."""
    forward = 2 * tokens * in_features * out_features
    return Flops(forward, 2 * forward)


def visible_pairs(queries: int, keys: int, causal: bool = False, window: int | None = None) -> int:
    """Return how many pairs of a query and a key attention has to compute.

    Args:
        queries: how many one sequence has.
        keys: how many one sequence has.
        causal: whether query i only sees keys up to i, which leaves n (n + 1) / 2 of n by n pairs. Megatron-LM counts
            n^2 / 2 (``megatron/training/training.py``, ``num_floating_point_operations``).
        window: query i sees keys from i - window on; None for no window.
    """
    last = (min(i, keys - 1) if causal else keys - 1 for i in range(queries))
    first = (0 if window is None else max(0, i - window) for i in range(queries))
    return sum(max(0, end - start + 1) for start, end in zip(first, last, strict=True))


def query_key_value(sizes: LayerSizes) -> dict[str, Flops]:
    """Count the query, key and value projections: 6 B s h^2 forward without GQA (Narayanan et al., appendix).

    With GQA, keys and values shrink by groups / heads (Megatron-LM, ``num_floating_point_operations``).
    """
    key = linear(sizes.tokens, sizes.hidden, sizes.groups * sizes.head_dim)
    return {"query": linear(sizes.tokens, sizes.hidden, sizes.heads * sizes.head_dim), "key": key, "value": key}


def core_attention(batch: int, heads: int, pairs: int, head_dim: int) -> dict[str, Flops]:
    """Count ``Q K^T`` and ``P V``: 2 B s^2 h forward each if all pairs are computed (Narayanan et al., appendix).

    GQA changes nothing here, since each query head meets every key of its group. A flash kernel computes the scores
    again in its backward pass; that is recomputation and not counted here.

    Args:
        batch: number of sequences.
        heads: number of query heads.
        pairs: pairs of a query and a key in a sequence, see ``visible_pairs``.
        head_dim: width of a head.
    """
    forward = 2 * batch * heads * pairs * head_dim
    product = Flops(forward, 2 * forward)
    return {"scores": product, "context": product}


def output_projection(sizes: LayerSizes) -> Flops:
    """Count attention's last linear layer: 2 B s h^2 forward (Narayanan et al., appendix)."""
    return linear(sizes.tokens, sizes.heads * sizes.head_dim, sizes.hidden)


def mlp(tokens: int, hidden: int, ffn: int, gated: bool) -> dict[str, Flops]:
    """Count an MLP: 16 B s h^2 forward for up and down at ffn = 4 h (Narayanan et al., appendix), 8 more for a gate.

    So a layer's 24 B s h^2 become 32 when the gate is added at the same width (Megatron-DeepSpeed, pull request 283).
    At two thirds of the width, as N. Shazeer proposes ("GLU Variants Improve Transformer", arXiv 2002.05202), they
    remain 24.
    """
    up = linear(tokens, hidden, ffn)
    return ({"gate": up} if gated else {}) | {"up": up, "down": linear(tokens, ffn, hidden)}


def layer_norm(tokens: int, hidden: int) -> Flops:
    """Count a LayerNorm from its definition: 7 FLOPs forward and 13 backward for each element.

    Forward: sum for the mean, subtract it, square, sum, scale, times gamma, plus beta. Backward: 2 for the normalised
    input again, 1 for dbeta, 2 for dgamma, 1 for the gradient times gamma, 3 for its two sums, 4 for the input
    gradient. Operations that happen once per row are left out.
    """
    return Flops(7 * tokens * hidden, 13 * tokens * hidden, in_products=False)


def rms_norm(tokens: int, hidden: int) -> Flops:
    """Count an RMSNorm from its definition: 4 FLOPs forward and 9 backward for each element.

    Forward: square, sum, scale, times gamma. Backward: 1 for the normalised input again, 2 for dgamma, 1 for the
    gradient times gamma, 2 for its sum, 3 for the input gradient. Operations that happen once per row are left out.
    """
    return Flops(4 * tokens * hidden, 9 * tokens * hidden, in_products=False)


def logits(tokens: int, hidden: int, vocabulary: int) -> Flops:
    """Count the last linear layer: 2 B s h V forward, 6 B s h V in all (Narayanan et al., appendix)."""
    return linear(tokens, hidden, vocabulary)


def layer(sizes: LayerSizes) -> dict[str, Flops]:
    """Count a pre-norm layer: 24 B s h^2 + 4 B s^2 h forward for a GPT layer (Narayanan et al., appendix)."""
    norm = (rms_norm if sizes.rms else layer_norm)(sizes.tokens, sizes.hidden)
    pairs = visible_pairs(sizes.seq, sizes.seq, sizes.causal)
    return (
        {"attention norm": norm}
        | query_key_value(sizes)
        | core_attention(sizes.batch, sizes.heads, pairs, sizes.head_dim)
        | {"output": output_projection(sizes), "mlp norm": norm}
        | mlp(sizes.tokens, sizes.hidden, sizes.ffn, sizes.gated)
    )


def recomputed(components: Mapping[str, Flops], recomputation: Recomputation) -> int:
    """Return the FLOPs of a layer that the backward pass repeats.

    Args:
        components: the layer's components, as ``layer`` returns them.
        recomputation: what is repeated; "full" is another forward pass (Narayanan et al., section 3.5).
    """
    if recomputation == "none":
        return 0
    names = components if recomputation == "full" else _SELECTIVE
    return sum(components[name].forward for name in names)


def total(components: Iterable[Flops]) -> int:
    """Return the FLOPs of all components together, forward and backward."""
    return sum(component.forward + component.backward for component in components)


def in_products(components: Mapping[str, Flops]) -> dict[str, Flops]:
    """Return the components that consist of matrix products."""
    return {name: component for name, component in components.items() if component.in_products}


# The FLOPs of the plain modules in ``parity.reference``, read off the modules and the shapes of their inputs.


Components = dict[str, Flops]


@functools.singledispatch
def components(module: nn.Module, *inputs: Tensor, skips_hidden: bool = False) -> Components:
    """Return a module's FLOPs by component; the names of components begin with those of their submodules.

    Args:
        module: one of ``parity.reference``'s, ``nn.Linear``, ``nn.LayerNorm`` or ``nn.RMSNorm``.
        inputs: the module's inputs; only their shapes are read.
        skips_hidden: whether attention leaves out pairs that a causal mask or a window hides, as fused kernels do; the
            plain modules compute all pairs. Padding is counted either way.

    Raises:
        TypeError: if the module is none of these.
    """
    what = f"FLOPs of {type(module).__name__} are not known"
    raise TypeError(f"{what}; register it with parity.measuring.flops.components")


@components.register(nn.Linear)
def _count_linear(module: nn.Linear, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"linear": linear(_count_tokens(x), module.in_features, module.out_features)}


@components.register(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"norm": layer_norm(_count_tokens(x), x.shape[-1])}


@components.register(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm, x: Tensor, skips_hidden: bool = False) -> Components:
    return {"norm": rms_norm(_count_tokens(x), x.shape[-1])}


@components.register(reference.NormLinear)
def _norm_linear(module: reference.NormLinear, x: Tensor, skips_hidden: bool = False) -> Components:
    return components(module.norm, x) | components(module.linear, x)


@components.register(reference.MLP)
@components.register(reference.GatedMLP)
def _count_mlp(module: reference.MLP | reference.GatedMLP, x: Tensor, skips_hidden: bool = False) -> Components:
    gated = isinstance(module, reference.GatedMLP)
    hidden, ffn = module.up_proj.in_features, module.up_proj.out_features
    return components(module.norm, x) | mlp(_count_tokens(x), hidden, ffn, gated)


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
    pairs = visible_pairs(queries, key.shape[1], causal, window)
    return core_attention(batch, heads, pairs, head_dim)


@components.register(reference.Attention)
def _count_attention(module: reference.Attention, x: Tensor, skips_hidden: bool = False) -> Components:
    heads, groups = (proj.out_features // module.head_dim for proj in (module.q_proj, module.k_proj))
    batch, seq, hidden = x.shape
    sizes = LayerSizes(batch, seq, hidden, heads, groups, module.head_dim, ffn=0)
    pairs = visible_pairs(seq, seq, causal=skips_hidden)
    return (
        query_key_value(sizes)
        | core_attention(batch, heads, pairs, module.head_dim)
        | {"output": output_projection(sizes)}
    )


@components.register(reference.GPTLayer)
@components.register(reference.LlamaLayer)
def _count_layer(
    module: reference.GPTLayer | reference.LlamaLayer, x: Tensor, skips_hidden: bool = False
) -> Components:
    parts = {
        "attention_norm": components(module.attention_norm, x),
        "attention": components(module.attention, x, skips_hidden=skips_hidden),
        "mlp": components(module.mlp, x),
    }
    return {f"{part}.{name}": each for part, found in parts.items() for name, each in found.items()}


def _count_tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
