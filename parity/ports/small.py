"""Make a model's configuration small enough to compare on a laptop, with every kind of layer that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity.ports.form import Config

# The sizes of a small model. Widths are multiples of 32, which every format of TE takes; no two are equal by chance.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 160,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "sliding_window": 8,
    "local_attention": 16,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "image_size": 32,
    "patch_size": 8,
    "first_k_dense_replace": 1,
    "max_window_layers": 1,
    "encoder_layers": 2,
    "word_embed_proj_dim": 128,
    "ffn_dim": 192,
    "hidden_dim": 192,
    "n_inner": 192,
    "rotary_dim": 16,
    "encoder_ffn_dim": 192,
    "ffn_hidden_size": 192,
    "max_source_positions": 32,
    "num_mel_bins": 16,
}
_BY_LAYER = (
    "layer_types",
    "no_rope_layers",
    "mlp_layer_types",
    "layers_block_type",
)  # lists with an entry for each layer
_DERIVED = ("head_dim", "qk_head_dim", "num_key_value_heads", "num_experts_per_tok", "num_hidden_layers")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
_HEAD_DIM = 32


def shrink(config: Config) -> dict[str, Any]:
    """Return what to set in the configuration, by its own names, so that a model of it is small."""
    held = config.to_dict()
    names = {known: config.attribute_map.get(known, known) for known in (*_SIZES, *_DERIVED)}
    found = {
        names[known]: size
        for known, size in _SIZES.items()
        if isinstance(held.get(names[known]), int) and held[names[known]]
    }
    heads = config.num_attention_heads
    for name in ("num_key_value_heads", "num_kv_heads"):
        if groups := held.get(name):
            found[name] = 4 if groups == heads else 1 if groups == 1 else 2
    if held.get("head_dim") and "qk_rope_head_dim" not in held:
        # A head as wide as hidden / heads would hide who confuses the two.
        found["head_dim"] = _HEAD_DIM if held["head_dim"] * heads == config.hidden_size else 2 * _HEAD_DIM
    if "qk_rope_head_dim" in held:
        found["head_dim"] = found["qk_rope_head_dim"]
    if held.get("num_experts_per_tok"):
        found["num_experts_per_tok"] = min(held["num_experts_per_tok"], 2)
    found |= _shorten_factors(held, found.get("head_dim", found["hidden_size"] // 4 if "hidden_size" in found else 0))
    found |= _shorten_lists(held, names["num_hidden_layers"])
    vocabulary = found.get(names["vocab_size"], 0)
    for name in _TOKENS:
        if isinstance(held.get(name), int) and held[name] >= vocabulary:
            found[name] = vocabulary - 1
    return found


def _shorten_factors(held: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the rotation's parameters with as many factors of frequencies, if it has some, as a head has pairs."""
    parameters = held.get("rope_parameters") or {}
    lists = {name: value for name, value in parameters.items() if isinstance(value, list)}
    count = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2 if lists else 0
    cut = {name: value[:: max(1, len(value) // count)][:count] for name, value in lists.items()}
    return {"rope_parameters": {**parameters, **cut}} if lists else {}


def _shorten_lists(held: Mapping[str, Any], layers: str) -> dict[str, Any]:
    """Return so many layers, at least two, that each kind of layer is among them, and their lists."""
    lists = {name: held[name] for name in _BY_LAYER if isinstance(held.get(name), list) and held[name]}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=False)))
    if len(kinds) < 2:
        kinds = kinds * 2
    count = max(2, len(kinds))
    return {layers: count} | {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}


def without_dropout(config: Config) -> dict[str, Any]:
    """Return the configuration's rates of dropout, each 0: no two draws of a mask can be compared."""
    held = config.to_dict()
    is_rate = ("dropout", "pdrop", "drop_rate", "drop_path", "layerdrop", "jitter_noise")
    return {name: 0.0 for name, value in held.items() if any(part in name for part in is_rate) and value}
