"""Read the form of a model from its configuration, from its modules, built without memory, and from their names."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parity.ports import pages
from parity.ports.form import Attention, Config, Ends, Experts, Form, Mlp, Norm, Placement, Positions
from parity.ports.small import shrink
from parity.shown import few_of, one_line
from parity.user_error import UserError


def load_config(source: str) -> Config:
    """Return a model's configuration.

    Args:
        source: a ``config.json``, a folder that has one, or the type of a model, such as ``qwen3``, which stands for
            its default configuration.

    Raises:
        UserError: if it is neither, or transformers cannot read it.
    """
    transformers = _import_transformers()
    if Path(source).exists():
        try:
            found = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        except Exception as error:  # whatever the model's own code raises
            raise UserError(f"transformers cannot read the configuration in {source}: {one_line(error)}") from None
    elif source in transformers.CONFIG_MAPPING:
        found = transformers.CONFIG_MAPPING[source]()
    else:
        raise UserError(
            f"{source!r} is neither a config.json, a folder that has one, nor the type of a model that transformers "
            f"{transformers.__version__} knows, such as llama or qwen3"
        )
    return found.get_text_config()


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("reading a model's configuration needs transformers: pip install transformers") from error


# Kinds of layers that carry a state, as transformers names them; lightning attention and Mamba are linear attention.
_CARRYING = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


def build(config: Config) -> nn.Module:
    """Return the model of a configuration: a decoder with its head, an encoder without one, the encoder of both.

    Raises:
        UserError: if transformers cannot build it, or its layers are of a kind of which no port can be written.
    """
    transformers = _import_transformers()
    classes = type(config)
    is_half = config.model_type in pages.ENCODERS
    if getattr(config, "is_encoder_decoder", False) and not is_half:
        raise UserError(
            f"a model of {classes.__name__} has an encoder and a decoder, of which no port can be written yet"
        )
    carrying = sorted(_CARRYING.intersection(getattr(config, "layer_types", None) or ()))
    if carrying:
        raise UserError(
            f"a model of {classes.__name__} has layers of {few_of(carrying)}, which carry a state from token to token: "
            "no port of these can be written yet. TE 2.20 has linear attention by the delta rule alone, by kernels of "
            "cuDNN's Python frontend"
        )
    is_encoder = classes in transformers.AutoModelForMaskedLM._model_mapping
    kind = transformers.AutoModel
    if classes in transformers.AutoModelForCausalLM._model_mapping and not is_encoder and not is_half:
        kind = transformers.AutoModelForCausalLM
    if classes not in kind._model_mapping:
        raise UserError(f"transformers has no model for {classes.__name__}")
    try:
        model: Any = kind.from_config(config, dtype=torch.float32)  # in which the reference is built
    except Exception as error:  # whatever the model's own code raises
        raise UserError(
            f"transformers cannot build a model of this {type(config).__name__}: {one_line(error)}"
        ) from None
    found: nn.Module = model.get_encoder() if is_half else model
    return found


# What a parameter of a layer is for, by the names that transformers' models have. The first pattern that fits counts.


_ROLES = {
    "latent_query_down": r"q_a_proj",
    "latent_query_norm": r"q_a_layernorm",
    "latent_query": r"q_b_proj",
    "latent_down": r"kv_a_proj_with_mqa",
    "latent_norm": r"kv_a_layernorm",
    "latent_up": r"kv_b_proj",
    "query_norm": r"(q_norm|q_layernorm|query_norm|query_layernorm)",
    "key_norm": r"(k_norm|k_layernorm|key_norm|key_layernorm)",
    "sinks": r"sinks",
    "shared_gate": r"shared_experts?\.gate_proj",
    "shared_up": r"shared_experts?\.up_proj",
    "shared_down": r"shared_experts?\.down_proj",
    "shared_weight": r"shared_expert_gate",
    "experts_in": r"experts\.gate_up_proj",
    "experts_out": r"experts\.down_proj",
    "experts_in_bias": r"experts\.gate_up_proj_bias",
    "experts_out_bias": r"experts\.down_proj_bias",
    "router": r"(mlp|feed_forward|block_sparse_moe|moe)\.(gate|router)",
    "qkv": r"(qkv_proj|query_key_value|c_attn|Wqkv|qkv|in_proj)",
    "query": r"(q_proj|query|q_lin|wq|q_linear)",
    "key": r"(k_proj|key|k_lin|wk|k_linear)",
    "value": r"(v_proj|value|v_lin|wv|v_linear)",
    "attention_scale": r"(layer_scale1\.lambda1|lambda_1)",
    "mlp_scale": r"(layer_scale2\.lambda1|lambda_2)",
    "activation": r"act(_fn)?",
    "out": r"(o_proj|attn\.out_proj|attention\.out_proj|(attn|attention)\.(dense|c_proj|Wo|wo|proj|out)"
    r"|attention\.output\.dense|out_lin)",
    "gate_up": r"(gate_up_proj|Wi|up_gate_proj)",
    "gate": r"(gate_proj|w1)",
    "up": r"(up_proj|w3|fc1|c_fc|dense_h_to_4h|intermediate\.dense|lin1|fc_in)",
    "down": r"(down_proj|w2|fc2|c_proj|dense_4h_to_h|output\.dense|lin2|fc_out|Wo)",
    "norm_after_attention": r"(attention\.output\.LayerNorm|sa_layer_norm|post_self_attn_layernorm)",
    "norm_before_attention": r"(input_layernorm|ln_1|attn_norm|layernorm_before|attention\.LayerNorm"
    r"|self_attn_layer_norm|operator_norm|attention_norm|attention_layernorm|ln_attn|norm1|layer_norm1|pre_attention_layernorm|pre_self_attn_layernorm)",
    "norm_before_mlp": r"(pre_feedforward_layernorm|pre_mlp_layernorm|ln_2|mlp_norm|layernorm_after|ffn_norm"
    r"|final_layer_norm|feedforward_layernorm|ln_mlp|norm2|layer_norm2)",
    "norm_after_mlp": r"(post_feedforward_layernorm|post_mlp_layernorm|output\.LayerNorm|output_layer_norm)",
    "norm_between": r"(post_attention_layernorm|LayerNorm)",
}


def _find_role(stem: str) -> str:
    """Return what a layer's parameter is for; an empty text if its name tells nothing."""
    for role, pattern in _ROLES.items():
        before = (
            r"(.*\.)?" if role.startswith("norm_") else r"(.*[._])?"
        )  # "post_attention_norm" is no "attention_norm"
        if re.fullmatch(before + pattern, stem):
            return role
    return ""


class Structure:
    """A model's modules by their roles.

    Attributes:
        config: the model's configuration.
        model: the model, without memory.
        stack: the name of the list of its layers.
        names: for each role, the names of parameters in a layer, by their last parts: ``weight`` and ``bias``.
        unknown: names of a layer's parameters without a role.
        norms: the norms of a layer, by their roles.
        sparse: the numbers of layers that have experts.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        with torch.device("meta"):
            self.model: Any = build(config)
        self.stack = self._find_stack()
        self.layers: nn.ModuleList = dict(self.model.named_modules())[self.stack]
        self.names: dict[str, dict[str, str]] = {}
        self.unknown: list[str] = []
        self.norms: dict[str, nn.Module] = {}
        self.sparse: list[int] = []
        for number, layer in enumerate(self.layers):
            for name, _ in layer.named_parameters():
                self._note_role(name)
            for name, module in layer.named_modules():  # a norm may have no parameters
                if _find_role(name).startswith("norm_") and not isinstance(module, nn.Identity):
                    self.names.setdefault(_find_role(name), {})
                    self.norms.setdefault(_find_role(name), module)
            if any(_find_role(name) == "experts_in" for name, _ in layer.named_parameters()):
                self.sparse.append(number)
        if "norm_between" in self.names:  # what is called "post attention" precedes the MLP in most models
            follows = "norm_before_mlp" in self.names or "norm_before_attention" not in self.names
            role = "norm_after_attention" if follows else "norm_before_mlp"
            self.names[role], self.norms[role] = self.names.pop("norm_between"), self.norms.pop("norm_between")

    def _find_stack(self) -> str:
        """Return the name of the list of modules that holds most of the parameters."""
        lists = {name: one for name, one in self.model.named_modules() if isinstance(one, nn.ModuleList) and len(one)}
        if not lists:
            raise UserError(f"{type(self.model).__name__} has no nn.ModuleList of layers, so no port can be written")
        sizes = {name: sum(p.numel() for p in one.parameters()) for name, one in lists.items()}
        return max(sizes, key=sizes.__getitem__)

    def _note_role(self, name: str) -> None:
        role = _find_role(name)
        stem, _, kind = name.rpartition(".")
        if not role:
            role = _find_role(stem)
        else:
            stem, kind = name, "weight"
        if not role and name not in self.unknown:
            self.unknown.append(name)
        self.names.setdefault(role, {})[kind] = name

    def has(self, role: str, kind: str = "weight") -> bool:
        """Return whether a layer has such a parameter."""
        return kind in self.names.get(role, {})

    def module(self, role: str) -> nn.Module:
        """Return the module of a role, of the first layer that has it."""
        stem = self.names[role]["weight"].rpartition(".")[0]
        return next(dict(layer.named_modules())[stem] for layer in self.layers if _has_module(layer, stem))

    def parameter(self, role: str) -> torch.Tensor:
        """Return the parameter of a role, of the first layer that has it, without values."""
        name = self.names[role]["weight"]
        return next(held[name] for layer in self.layers if name in (held := dict(layer.named_parameters())))

    def attention(self) -> nn.Module:
        """Return the module of the first layer that projects to queries."""
        role = next((role for role in ("query", "qkv", "latent_down") if self.has(role)), "")
        if not role or not self.has("out"):
            raise UserError(
                f"no attention was recognised in a layer of {type(self.model).__name__}, whose parameters are "
                f"{few_of([name for name, _ in self.layers[0].named_parameters()])}"
            )
        parent = self.names[role]["weight"].rpartition(".")[0].rpartition(".")[0]
        return dict(self.layers[0].named_modules())[parent]

    def path_siblings(self) -> list[str]:
        """Return the names of the modules with parameters that precede the layers."""
        found: list[str] = []
        parts = self.stack.split(".")
        for depth, part in enumerate(parts):
            parent = ".".join(parts[:depth])
            for name, module in self.model.get_submodule(parent).named_children():
                if name == part:
                    break
                if any(True for _ in module.parameters()):
                    found.append(f"{parent}.{name}" if parent else name)
        return found

    def outer_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are not in a layer and have parameters of their own or, such as a norm, no parts."""
        for name, module in self.model.named_modules():
            is_leaf = not any(True for _ in module.children())
            if not f"{name}.".startswith(f"{self.stack}.") and (is_leaf or any(True for _ in module.parameters(False))):
                yield name, module


def _has_module(layer: nn.Module, name: str) -> bool:
    return any(known == name for known, _ in layer.named_modules())


# Python expressions for numbers that the configuration has.


def find_attribute(config: Config, *names: str) -> Any:
    """Return the first of these attributes that the configuration has and that is set; None if none is."""
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def expression_of(config: Config, *names: str) -> str:
    """Return the first of these attributes that is set, as the port reads it; an empty text if none is."""
    return next((f"config.{name}" for name in names if getattr(config, name, None) is not None), "")


def _read_norm(config: Config, module: Any) -> Norm:
    """Return what a norm does, measured by calling it: its class may have any name, and its weight two meanings."""
    norm = module.to_empty(device="cpu")
    weight = getattr(norm, "weight", None)
    shape = (config.hidden_size,) if weight is None else weight.shape
    x = torch.linspace(0.5e-3, 1.5e-3, shape[-1]).expand(shape)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
        zero_centered = weight is not None and bool(norm(x).any())
        if weight is not None and not zero_centered:
            weight.fill_(1.0)
        x, y = x.double(), norm(x).double()
    centers = bool(y.mean().abs() < 1e-3 * y.abs().max())
    x = x - x.mean() if centers else x
    measured = float(f"{float((x * y).sum() / y.square().sum()) ** 2 - float(x.square().mean()):.2g}")
    eps = find_attribute(module, "variance_epsilon", "eps") or measured
    named = next((name for name in config.to_dict() if "eps" in name and getattr(config, name) == eps), "")
    return Norm(
        "LayerNorm" if centers else "RMSNorm",
        f"config.{named}" if named else repr(eps),
        zero_centered,
        bias=getattr(norm, "bias", None) is not None,
    )


def _divide_width(config: Config) -> int:
    """Return how many channels a head has if the configuration does not say it."""
    return int(config.hidden_size // config.num_attention_heads)


def _width_of_heads(config: Config) -> str:
    return expression_of(config, "head_dim") or "config.hidden_size // config.num_attention_heads"


def _read_attention(structure: Structure) -> Attention:
    config, module = structure.config, structure.attention()
    found = Attention(
        "config.num_attention_heads",
        expression_of(config, "num_key_value_heads") or "config.num_attention_heads",
        _width_of_heads(config),
        causal=bool(getattr(module, "is_causal", structure.model.get_output_embeddings() is not None)),
        softcap=expression_of(config, "attn_logit_softcapping"),
        sinks=structure.has("sinks"),
        alibi="1.0" if _find_function(structure.model, "build_alibi_tensor") and getattr(config, "alibi", True) else "",
    )
    roles = ("query", "key", "value", "out")
    found.biases = frozenset(role for role in roles if structure.has(role, "bias"))
    if structure.has("qkv", "bias"):
        found.biases |= {"query", "key", "value"}
    if structure.has("query_norm"):
        found.norm = _read_norm(config, structure.module("query_norm"))
        gains = structure.parameter("query_norm")
        found.norm_is_wide = gains.numel() != (find_attribute(config, "head_dim") or _divide_width(config))
        if gains.dim() > 1:
            structure.unknown.append("gains of queries and keys that differ by head")
    scale = next(
        (value for key in ("scaling", "scale") if isinstance(value := getattr(module, key, None), float)), None
    )
    if scale is not None:
        found.scale = _explain_scale(config, scale)
    if find_attribute(config, "sliding_window") and getattr(config, "use_sliding_window", True):
        # Of a decoder, it counts the token itself; of an encoder, the tokens to each side.
        found.window = "config.sliding_window - 1" if found.causal else "config.sliding_window"
        if find_attribute(config, "layer_types"):
            found.windowed = 'config.layer_types[layer] == "sliding_attention"'
    return found


def _explain_scale(config: Config, scale: float) -> str:
    """Return what the configuration says of the scale of scores; an empty text for 1 / sqrt(head_dim)."""
    held = {name: value for name, value in config.to_dict().items() if isinstance(value, (int, float)) and value}
    for name, value in held.items():
        if "scalar" in name and math.isclose(value**-0.5, scale):
            return f"config.{name} ** -0.5"
        if "multiplier" in name and "attention" in name and math.isclose(value, scale):
            return f"config.{name}"
    if scale == 1.0:
        return "1.0"
    width, as_text = find_attribute(config, "head_dim"), _width_of_heads(config)
    if "qk_nope_head_dim" in held:
        as_text = "config.qk_nope_head_dim + config.qk_rope_head_dim"
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
    plain = (width or _divide_width(config)) ** -0.5
    return "" if math.isclose(scale, plain) else f"{scale / plain!r} * ({as_text}) ** -0.5"


def _read_positions(structure: Structure) -> Positions | None:
    """Return how queries and keys are rotated, if the configuration says that they are."""
    config = structure.config
    parameters = find_attribute(config, "rope_parameters")
    if getattr(config, "alibi", False):
        return None
    if not isinstance(parameters, Mapping):
        width = expression_of(config, "rotary_dim")  # GPT-J's
        if getattr(config, "position_embedding_type", "") == "rotary":  # ESM-2's
            width = _width_of_heads(config)
        return Positions({"": "default"}, width, _pairs_neighbours(structure.model)) if width else None
    by_kind = {key: value for key, value in parameters.items() if isinstance(value, Mapping)} or {"": parameters}
    kinds = {kind: str(value.get("rope_type", "default")) for kind, value in by_kind.items()}
    part = next(iter(by_kind.values())).get("partial_rotary_factor", 1.0)
    width = _width_of_heads(config)
    if part != 1.0:
        factor = 'config.rope_parameters["partial_rotary_factor"]'
        width = f"int(({width}) * {factor})" if "//" in width else f"int({width} * {factor})"
    scaling = next(
        (module.attention_scaling for module in structure.model.modules() if hasattr(module, "attention_scaling")), 1.0
    )
    used = _describe_rotating(structure)
    return Positions(kinds, width, _pairs_neighbours(structure.model), used, bool(scaling != 1.0))


def _describe_rotating(structure: Structure) -> str:
    """Return which layers rotate, measured on a small model; an empty text if all do, or it cannot be measured."""
    config = type(structure.config)(**{**structure.config.to_dict(), **shrink(structure.config)})
    try:
        rotating = _find_rotating(structure, config)
    except Exception:  # whatever the model's own code raises
        return ""
    kinds = find_attribute(config, "layer_types") or []
    by_kind = dict(zip(kinds, rotating, strict=False))
    if all(rotating) or not any(rotating):
        return ""
    if [by_kind.get(kind) for kind in kinds] == rotating:
        return f"config.layer_types[layer] in {[kind for kind, rotates in by_kind.items() if rotates]}".replace(
            "'", '"'
        )
    return "config.no_rope_layers[layer]" if list(map(bool, config.no_rope_layers)) == rotating else ""


def _find_rotating(structure: Structure, config: Config) -> list[bool]:
    """Return of each layer of a small model whether its attention depends on the angles."""
    model = build(config).eval()
    name = structure.names["out"]["weight"].rpartition(".")[0].rpartition(".")[0]
    x = torch.linspace(-1, 1, 3 * config.hidden_size).view(1, 3, -1)
    width = 2 * next(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    angles = [torch.linspace(0, 1 + turn, 3 * width).view(1, 3, width) for turn in range(2)]
    found = []
    for layer in model.get_submodule(structure.stack).children():
        attention = layer.get_submodule(name)
        with torch.no_grad():
            both = [attention(x, position_embeddings=(one.cos(), one.sin()), attention_mask=None)[0] for one in angles]
        found.append(not torch.equal(*both))
    return found


def _pairs_neighbours(model: nn.Module) -> bool:
    """Return whether the model's own function rotates each channel with the next one."""
    rotate = _find_function(model, "rotate_half") or _find_function(model, "rotate_every_two")
    return rotate is not None and rotate(torch.arange(4.0).view(1, 1, 1, 4)).flatten().tolist() == [-1, 0, -3, 2]


def _find_function(model: nn.Module, name: str) -> Any:
    """Return a function of the file that the model's class is in; None if there is none."""
    return getattr(sys.modules[type(model).__module__], name, None)


def _read_mlp(structure: Structure) -> Mlp:
    config = structure.config
    activation = find_attribute(config, "hidden_act", "hidden_activation", "activation_function", "activation")
    names = "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "ffn_hidden_size"
    width = expression_of(config, *names)
    if not width and getattr(config, "mlp_ratio", None):
        width = "int(config.hidden_size * config.mlp_ratio)"
    all_sparse = len(structure.sparse) == len(structure.layers)
    return Mlp(
        "" if all_sparse else width or "4 * config.hidden_size",
        str(activation or "gelu"),
        gated=structure.has("gate") or structure.has("gate_up"),
        bias=any(structure.has(role, "bias") for role in ("up", "gate_up", "down")),
        learned="activation" in structure.names,
    )


def _read_experts(structure: Structure) -> Experts | None:
    if not structure.sparse:
        return None
    config = structure.config
    found = Experts(
        expression_of(config, "num_local_experts", "n_routed_experts", "num_experts"),
        expression_of(config, "num_experts_per_tok", "moe_k"),
        expression_of(config, "moe_intermediate_size", "intermediate_size"),
        renormalised=bool(getattr(config, "norm_topk_prob", True)),
        bias=structure.has("router", "bias"),
    )
    if structure.has("shared_up"):
        number = find_attribute(config, "n_shared_experts") or 1
        found.shared = f"{found.width} * config.n_shared_experts" if number != 1 else found.width
        found.shared = expression_of(config, "shared_expert_intermediate_size") or found.shared
        found.shared_gate = structure.has("shared_weight")
    if len(structure.sparse) < len(structure.layers):
        first = expression_of(config, "first_k_dense_replace")
        found.sparse = f"layer >= {first}" if first else f"layer in {tuple(structure.sparse)}"
    return found


def _read_placement(structure: Structure) -> Placement:
    names = structure.names
    before, after = "norm_before_attention" in names, "norm_after_attention" in names
    shares_norm = before and "norm_before_mlp" not in names and not after
    factor = find_attribute(structure.config, "residual_multiplier")
    return Placement(
        before,
        after,
        of_sum=after and not before and structure.has("norm_after_attention", "bias"),
        one_norm=shares_norm,
        parallel=shares_norm,
        factor="config.residual_multiplier" if factor not in (None, 1.0) else "",
        scaled=structure.has("attention_scale"),
        first_is_bare=any(
            isinstance(module, nn.Identity) and _find_role(name) == "norm_before_attention"
            for name, module in structure.layers[0].named_modules()
        ),
    )


def _read_ends(structure: Structure) -> Ends:
    config, model = structure.config, structure.model
    names = {module: name for name, module in model.named_modules()}
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    outer = dict(structure.outer_modules())
    found = Ends(softcap=expression_of(config, "final_logit_softcapping"))
    before = structure.path_siblings()
    found.final_norm = next((name for name in outer if _is_final_norm(name)), "")
    learned = [name for name, one in outer.items() if isinstance(one, nn.Embedding) and one is not tokens]
    if head is not None and isinstance(tokens, nn.Embedding):
        found.tokens, found.padded = names[tokens], tokens.padding_idx is not None
        found.head, found.tied = names[head], head.weight is tokens.weight
        found.head_bias = head.bias is not None
        found.learned = learned[0] if learned else ""
        found.embedding_norm = next((name for name in before if "norm" in name and not _is_final_norm(name)), "")
        if learned:
            found.first = outer[learned[0]].num_embeddings - config.max_position_embeddings
    else:
        own = before[0] if len(before) == 1 else ""
        found.own = own, type(model.get_submodule(own)).__module__, type(model.get_submodule(own)).__name__
        known = (*before, found.final_norm, structure.stack)
        children = model.named_children()
        found.unused = [
            name
            for name, child in children
            if any(True for _ in child.parameters()) and not any(f"{one}.".startswith(f"{name}.") for one in known)
        ]
    if getattr(tokens, "scalar_embed_scale", None) == config.hidden_size**0.5:
        found.factor = "config.hidden_size**0.5"
    if find_attribute(config, "embedding_multiplier") not in (None, 1.0):
        found.factor = "config.embedding_multiplier"
    if find_attribute(config, "logits_scaling") not in (None, 1.0):
        found.scale = "1 / config.logits_scaling"
    if find_attribute(config, "logit_scale") not in (None, 1.0):
        found.scale = "config.logit_scale"
    return found


def _is_final_norm(name: str) -> bool:
    """Return whether a module outside the layers is the norm after them, and not one of embeddings."""
    return bool(re.search(r"norm|ln_f", name, re.IGNORECASE)) and not re.search("embed|before", name)


def read(structure: Structure) -> Form:
    """Return the form of a model, as far as names and modules tell it; the rest is among its gaps.

    Raises:
        UserError: if transformers cannot build the model, or it has no list of layers.
    """
    config = structure.config
    if not structure.norms:
        raise UserError(
            f"no norm was recognised in a layer of {type(structure.model).__name__}: {few_of(structure.unknown)}"
        )
    norm = _read_norm(config, next(iter(structure.norms.values())))
    return Form(
        config.model_type,
        (type(config).__name__, type(structure.model).__name__),
        type(structure.model).__module__,
        norm,
        _read_attention(structure),
        _read_mlp(structure),
        _read_positions(structure),
        _read_experts(structure),
        _read_placement(structure),
        _read_ends(structure),
        layers=structure.stack,
        qkv_by_head=structure.has("qkv") and "query_key_value" in structure.names["qkv"]["weight"],
        transposed=type(structure.module("down")).__name__ == "Conv1D" if structure.has("down") else False,
        unknown=[f"what no role fits, and is left out: {few_of(structure.unknown)}"] if structure.unknown else [],
    )
