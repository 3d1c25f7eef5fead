"""What a unit computes, read from its name: the words of Hugging Face, Meta, Megatron and TE for the same thing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from parity.suggest.units import Unit, is_stack

Parts = tuple[str, ...]

QUERY, KEY, VALUE, GATE, UP = "query", "key", "value", "gate", "up"
EMBEDDING, HEAD = "embedding", "head"
QKV: Parts = (QUERY, KEY, VALUE)

# A fused unit has several parts. Words that mean different things in different places are decided below the tables.
_LINEAR: dict[Parts, str] = {
    QKV: "qkv qkv_proj query_key_value c_attn wqkv to_qkv in_proj attn_qkv linear_qkv layernorm_qkv",
    (KEY, VALUE): "kv kv_proj key_value wkv to_kv",
    (QUERY,): "q query q_proj query_proj wq to_q q_lin linear_q layernorm_query query_layer",
    (KEY,): "k key k_proj key_proj wk to_k k_lin linear_k",
    (VALUE,): "v value v_proj value_proj wv to_v v_lin linear_v",
    ("attention_out",): "o o_proj to_out attn_out out_lin",
    (GATE, UP): "gate_up_proj gate_up w13 w12",
    (GATE,): "gate_proj wi_0 w_gate",
    (UP,): "up_proj up wi wi_1 w_up fc1 linear_fc1 lin1 linear1 fc_in c_fc dense_h_to_4h w3",
    ("down",): "down_proj down w_down w2 fc2 linear_fc2 lin2 linear2 fc_out dense_4h_to_h",
    ("router",): "router",
    (EMBEDDING,): "wte embed_tokens word_embeddings tok_embeddings token_embedding",
    ("position_embedding",): "wpe embed_positions position_embeddings position_embedding",
    (HEAD,): "lm_head embed_out",
}
_NORM: dict[str, str] = {
    "query_norm": "q_norm query_norm q_layernorm",
    "key_norm": "k_norm key_norm k_layernorm",
    "attention_norm": "input_layernorm ln_1 ln1 norm1 norm_1 attention_norm attn_norm ln_attn self_attn_layer_norm "
    "layernorm_before pre_attention_layernorm",
    "mlp_norm": "post_attention_layernorm ln_2 ln2 norm2 norm_2 ffn_norm mlp_norm ln_mlp pre_feedforward_layernorm "
    "pre_mlp_layernorm layernorm_after",
    "cross_norm": "encoder_attn_layer_norm cross_attn_norm cross_attention_norm ln_cross_attn",
    "final_norm": "ln_f norm_f final_layernorm final_norm",
}
_PARTS_OF = {word: parts for parts, words in _LINEAR.items() for word in words.split()}
_NORM_OF = {word: part for part, words in _NORM.items() for word in words.split()}
_IS_NORM = re.compile(r".*norm.*|ln(_?\w)?")
_ATTENTION = ("attn", "attention")
_CROSS = ("cross", "inter_attention", "encoder_attn", "encdec")
_CROSS_OF_TE = ("query_layer", "layernorm_query", "key_value")
_MLP = ("mlp", "ffn", "feed_forward", "feedforward", "densereludense", "moe", "expert")
# Words for the last layer of attention or of an MLP, whichever they stand in.
_LAST_LAYER = {"c_proj", "wo", "proj", "dense", "out_proj", "linear_proj"}


def parts_by_unit(units: Sequence[Unit]) -> dict[Unit, Parts]:
    """The parts that each unit's name tells; no entry where it tells none.

    A unit of cross-attention has ``cross query`` and so on, also where it is one by what stands beside it. An MLP's
    first layer with twice the elements of its second holds gate and up.
    """
    siblings: dict[str, list[Unit]] = {}
    for unit in units:
        siblings.setdefault(unit.scope, []).append(unit)
    told = {unit: _parts(unit, siblings[unit.scope], units) for unit in units}
    told = {unit: _with_gate(unit, parts, told, siblings[unit.scope]) for unit, parts in told.items()}
    return _with_cross({unit: parts for unit, parts in told.items() if parts})


def is_norm(unit: Unit) -> bool:
    """Whether it is named as a norm is."""
    return bool(unit.words) and _IS_NORM.fullmatch(unit.words[-1]) is not None


def _parts(unit: Unit, siblings: Sequence[Unit], everything: Sequence[Unit]) -> Parts:
    if not unit.words:
        return ()
    *context, word = unit.words
    if is_norm(unit) and word not in _PARTS_OF:
        return (_norm(unit, context, word, siblings),)
    parts = _PARTS_OF.get(word) or _by_place(unit, context, word, siblings, everything)
    if any(part in QKV for part in parts) and _mentions(context, _CROSS):
        return tuple(f"cross {part}" for part in parts)
    return parts


def _norm(unit: Unit, context: Sequence[str], word: str, siblings: Sequence[Unit]) -> str:
    # Of three norms with a number, as in nn.TransformerDecoderLayer, the second is cross-attention's.
    if word[-1] in "23" and any(sibling.words and sibling.words[-1] == f"{word[:-1]}3" for sibling in siblings):
        return "cross_norm" if word[-1] == "2" else "mlp_norm"
    if word == "final_layer_norm":  # a layer's own in BART and OPT, the model's in Megatron
        return "mlp_norm" if re.search(r"\d", unit.scope) else "final_norm"
    if word in _NORM_OF:
        return _NORM_OF[word]
    if _mentions(context, _CROSS):
        return "cross_norm"
    layer = _PARTS_OF.get(context[-1], ()) if context else ()  # a norm in one module with a linear layer, as TE's are
    if set(layer) & set(QKV) or _mentions(context, _ATTENTION):
        return "attention_norm"
    if set(layer) & {GATE, UP} or _mentions(context, _MLP):
        return "mlp_norm"
    return "norm"


def _by_place(
    unit: Unit, context: Sequence[str], word: str, siblings: Sequence[Unit], everything: Sequence[Unit]
) -> Parts:
    """What a word means among its neighbours."""
    beside = {sibling.words[-1] for sibling in siblings if sibling.words}
    if word == "w1":
        return (GATE,) if "w3" in beside else (UP,)
    if word == "gate":
        chooses = any(f".{other.path}".startswith(f".{unit.scope}.expert".replace("..", ".")) for other in everything)
        return ("router",) if chooses or _has_a_row_for_each_expert(unit, everything) else (GATE,)
    if word == "dense" and "intermediate" in context:
        return (UP,)
    if word not in _LAST_LAYER:
        return ()
    if _mentions(context, _ATTENTION):
        return ("attention_out",)
    if _mentions(context, _MLP) or "output" in context:
        return ("down",)
    told = {part for name in beside for part in _PARTS_OF.get(name, ())}
    # TE's MultiheadAttention by itself has its projections in "qkv", beside "proj".
    if told & set(QKV) or any(other.scope.rpartition(".")[2] in _PARTS_OF for other in everything):
        return ("attention_out",)
    return ("down",) if told & {GATE, UP} else ()


def _has_a_row_for_each_expert(unit: Unit, everything: Sequence[Unit]) -> bool:
    """Whether its rows are as many as the experts below its scope, in one weight or with a number each."""
    below = [other for other in everything if f"{other.path}.".startswith(unit.scope)]
    counts = {other.shape[0] for other in below if is_stack(other)}
    counts |= {1 + max((other.expert for other in below if other.expert is not None), default=-1)}
    return unit.shape[0] in counts


def _with_gate(unit: Unit, parts: Parts, told: dict[Unit, Parts], siblings: Sequence[Unit]) -> Parts:
    """``(gate, up)`` for an MLP's first layer that holds both."""
    if parts != (UP,) or any(told[other] == (GATE,) and other.expert == unit.expert for other in siblings):
        return parts
    down = [other for other in siblings if told[other] == ("down",) and other.expert == unit.expert]
    if len(down) == 1 and math.prod(unit.shape) == 2 * math.prod(down[0].shape):
        return (GATE, UP)
    return parts


def _with_cross(told: dict[Unit, Parts]) -> dict[Unit, Parts]:
    """Attention beside another is cross-attention where TE's names say so, or where the other is said to be on itself.

    ``te.MultiheadAttention`` has a layer for queries and one for key and value in cross-attention alone;
    ``nn.TransformerDecoderLayer`` has ``multihead_attn`` beside ``self_attn``.
    """
    attention = [unit for unit, parts in told.items() if set(parts) & set(QKV)]
    on_itself = [unit for unit in attention if any(word.startswith("self_at") for word in unit.words)]
    cross = [unit for unit in attention if any(word in _CROSS_OF_TE for word in unit.words)]
    if on_itself:
        cross += [unit for unit in attention if unit not in on_itself]
    if all(unit in cross for unit in attention):
        return told
    return {unit: tuple(f"cross {part}" for part in parts) if unit in cross else parts for unit, parts in told.items()}


def _mentions(words: Sequence[str], any_of: Sequence[str]) -> bool:
    return any(part in word for word in words for part in any_of)
