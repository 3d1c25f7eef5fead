"""What a port has to know of a model: its parts, with Python expressions for what its configuration says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Expression = str  # of Python, as the port writes it: "config.rms_norm_eps"
Config = Any  # transformers.PreTrainedConfig
Entry = tuple[Expression, Expression]

# What transformers calls an activation, and TE's names of it in a plain and in a gated MLP. TE's "gelu" is the one by
# tanh; it has none by erf.
_ACTIVATIONS = {
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
    "gelu_pytorch_tanh": ("gelu", "geglu"),
    "gelu_new": ("gelu", "geglu"),
    "gelu_fast": ("gelu", "geglu"),
    "quick_gelu": ("qgelu", "qgeglu"),
    "relu": ("relu", "reglu"),
    "relu2": ("srelu", "sreglu"),
}


@dataclass
class Norm:
    """A norm.

    Attributes:
        kind: ``RMSNorm`` or ``LayerNorm``.
        eps: its eps.
        zero_centered: whether it multiplies with ``1 + weight``.
        bias: whether the model's has one; TE's LayerNorm always does.
    """

    kind: Literal["RMSNorm", "LayerNorm"]
    eps: Expression
    zero_centered: bool = False
    bias: bool = False


@dataclass
class Positions:
    """Rotary embeddings.

    Attributes:
        kinds: the rope type of each kind of layer, by the kind's name; ``""`` for all layers of a model.
        width: how many channels of a head are rotated.
        interleaved: whether neighbouring channels form a pair; else those that half the width is between.
        used: whether a layer rotates; empty if all do.
        factor: whether rotated queries and keys are multiplied with a number, too, as with YaRN.
    """

    kinds: dict[str, str]
    width: Expression
    interleaved: bool = False
    used: Expression = ""
    factor: bool = False


@dataclass
class Latent:
    """Multi-head latent attention; ``low_rank_queries`` says whether queries are projected down first, too."""

    low_rank_queries: bool


@dataclass
class Attention:
    """A layer's attention.

    Attributes:
        heads, groups, head_dim: numbers of query heads and of those of keys, and channels of a head.
        biases: which of ``query``, ``key``, ``value``, ``out`` have a bias.
        causal: whether a token sees only those before it.
        norm: what normalises queries and keys; None if nothing does.
        norm_is_wide: whether that norm spans all heads.
        scale: what scores are multiplied with; empty for 1 / sqrt(head_dim).
        softcap: the cap of scores; empty for none.
        window: how far a token sees to each side, itself not counted; empty if it sees all.
        windowed: whether a layer has the window; empty if all have it.
        sinks: whether each head has a learned score more in its softmax.
        latent: for multi-head latent attention; its norms are ``norm``.
        alibi: what the model's slopes of ALiBi are multiplied with; empty without ALiBi.
    """

    heads: Expression
    groups: Expression
    head_dim: Expression
    biases: frozenset[str] = frozenset()
    causal: bool = True
    norm: Norm | None = None
    norm_is_wide: bool = False
    scale: Expression = ""
    softcap: Expression = ""
    window: Expression = ""
    windowed: Expression = ""
    sinks: bool = False
    latent: Latent | None = None
    alibi: Expression = ""


@dataclass
class Experts:
    """A mixture of experts.

    Attributes:
        count, chosen, width: how many there are, how many a token goes to, and their inner width.
        score: how the router scores experts: ``softmax``, ``sigmoid``, ``softmax_of_chosen``, or ``sparsemixer`` for
            PhiMoE's function.
        renormalised: whether the weights of the chosen ones are made to add up to 1.
        groups: for a choice among the best groups only: how many groups, and how many are kept.
        correction: the router's buffer that is added to scores when experts are chosen; empty if there is none.
        factor: what the weights are multiplied with; empty for 1.
        bias: whether router and experts have biases.
        transposed: whether experts hold their weights ``[in, out]``.
        gating: ``chunked``, or ``interleaved`` if gate and up alternate.
        clamp: for gpt-oss's activation: alpha and limit.
        float: whether the router computes in FP32.
        masked: what stands for the scores of experts in other groups.
        tiny: what is added to the sum that weights are divided by; empty for nothing.
        shared: the inner width of experts that see every token; empty if there are none.
        shared_gate: whether what they return is weighted by a gate of its own.
        sparse: whether a layer has experts; empty if all do.
    """

    count: Expression
    chosen: Expression
    width: Expression
    score: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    renormalised: bool = True
    groups: tuple[Expression, Expression] | None = None
    correction: str = ""
    factor: Expression = ""
    bias: bool = False
    transposed: bool = False
    gating: Literal["chunked", "interleaved"] = "chunked"
    clamp: tuple[Expression, Expression] | None = None
    float: bool = False
    masked: Expression = "0.0"
    tiny: Expression = ""
    shared: Expression = ""
    shared_gate: bool = False
    sparse: Expression = ""


@dataclass
class Mlp:
    """A layer's MLP.

    Attributes:
        width: its inner width; empty if every layer has experts instead.
        activation: as transformers names it.
        gated: whether the activated half multiplies another one.
        bias: whether its layers have biases.
        learned: whether the activation has parameters.
    """

    width: Expression
    activation: str
    gated: bool
    bias: bool = False
    learned: bool = False


@dataclass
class Placement:
    """Where a layer has norms, and how its parts are added.

    Attributes:
        before, after: whether a norm precedes attention and MLP, and whether one follows each of them.
        of_sum: whether the norm that follows is of the sum with the residual, as in BERT.
        parallel: whether attention and MLP read the same input.
        one_norm: whether they then share a norm.
        factor: what each part is multiplied with before it is added; empty for 1.
        scaled: whether each part is multiplied with learned factors, one for each channel.
        first_is_bare: whether the first layer's attention has no norm before it.
    """

    before: bool = True
    after: bool = False
    of_sum: bool = False
    parallel: bool = False
    one_norm: bool = False
    factor: Expression = ""
    scaled: bool = False
    first_is_bare: bool = False


@dataclass
class Ends:
    """What is before and after the layers.

    Attributes:
        tokens: the name of the tokens' embedding; empty if ``own`` embeds.
        padded: whether it has a row for padding, which is not trained.
        factor: what multiplies embeddings; empty for 1.
        learned: the name of the embedding of positions that is added; empty for none.
        first: which of its rows is that of the first position.
        own: the module that embeds instead, which the port keeps as it is: name, module and class. Without a name, it
            is the model itself without its layers and the norm after them.
        embedding_norm: the name of the norm of embeddings; empty for none.
        final_norm: the name of the norm after the last layer; empty for none.
        head: the name of the head; empty for none.
        tied: whether the head's weight is the embedding's.
        head_bias: whether it has a bias.
        scale: what logits are multiplied with; empty for 1.
        softcap: their cap; empty for none.
        unused: modules of an encoder that the last hidden state does not depend on.
    """

    tokens: str = ""
    padded: bool = False
    factor: Expression = ""
    learned: str = ""
    first: int = 0
    own: tuple[str, str, str] | None = None
    embedding_norm: str = ""
    final_norm: str = ""
    head: str = ""
    tied: bool = False
    head_bias: bool = False
    scale: Expression = ""
    softcap: Expression = ""
    unused: list[str] = field(default_factory=list)


@dataclass
class Form:
    """All that a port has to know of a model.

    Attributes:
        kind: the model's type, as configurations name it: ``qwen3``.
        classes: the classes of transformers that it is imported as: configuration and model.
        home: the module of transformers that defines the model.
        norm, attention, positions, mlp, experts, placement, ends: its parts; positions are None without a rotation.
        layers: the name of the list of its layers.
        transposed: whether its linear layers hold their weights ``[in, out]``, as GPT-2's ``Conv1D``.
        qkv_by_head: whether a fused projection has query, key and value of each head together.
        weights: the weight map's entries of each layer, both sides as Python.
        dense, sparse: further ones, of layers without and with experts.
        outer: those of what is outside the layers.
        gaps: what TE cannot do, and what the port does instead.
        unknown: what was not understood of the model.
    """

    kind: str
    classes: tuple[str, str]
    home: str
    norm: Norm
    attention: Attention
    mlp: Mlp
    positions: Positions | None = None
    experts: Experts | None = None
    placement: Placement = field(default_factory=Placement)
    ends: Ends = field(default_factory=Ends)
    layers: str = "model.layers"
    transposed: bool = False
    qkv_by_head: bool = False
    weights: list[Entry] = field(default_factory=list)
    dense: list[Entry] = field(default_factory=list)
    sparse: list[Entry] = field(default_factory=list)
    outer: list[Entry] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def te_activation(self) -> str:
        """TE's name of the MLP's activation; empty if TE has none."""
        return _ACTIVATIONS.get(self.mlp.activation, ("", ""))[self.mlp.gated]

    @property
    def draws_experts(self) -> bool:
        """Whether the router draws experts in training, so that only an evaluation can be compared."""
        return self.experts is not None and self.experts.score == "sparsemixer"

    @property
    def has_fused_mlp(self) -> bool:
        """Whether TE has one module for the MLP and the norm before it."""
        return self.placement.before and bool(self.te_activation)
