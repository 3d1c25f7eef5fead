"""Group a module's parameters into units, a weight and its bias, and read from names what each computes."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from parity.case.weight_map import Shape, Side, rearrange, renamed, shape_of
from parity.trace.trace import grouped

# Group a module's parameters into units: what one linear layer or norm holds, its weight and its bias.


WEIGHT, BIAS = "weight", "bias"

# ``q_proj.weight``, TE's ``query_weight``, and ``weight3`` of te.GroupedLinear's fourth expert.
_LEAF = re.compile(r"(?P<stem>.*?)_?(?P<kind>weight|bias|gamma|beta)(?P<expert>\d*)")
_KINDS = {"gamma": WEIGHT, "gain": WEIGHT, "scale": WEIGHT, "beta": BIAS, "offset": BIAS}
# Names in ``nn.MultiheadAttention`` with ``kdim``.
_QUERY_WEIGHT, _BIAS_OF_ALL = "q_proj_weight", "in_proj_bias"
_EXPERT = re.compile(r"(?:^|\.)(?:local_)?experts?\.(\d+)(?=\.|$)")
_LAST_NUMBER = re.compile(r"(?P<before>(?:.*\.)?)(?P<number>\d+)(?P<after>(?:\.[^.]*\D[^.]*)*)")


@dataclass(frozen=True)
class Unit:
    """The parameters of one linear layer, norm or embedding.

    Attributes:
        path: dotted, without ``weight`` or ``bias``: ``layers.0.self_attn.q_proj``, ``layernorm_qkv.query``.
        expert: its number among the experts of a mixture; None if it does not belong to a single expert.
        parameters: full names by kind, ``weight`` or ``bias``.
        shapes: the shapes of those parameters, by kind.

    Units are equal if path and expert are.
    """

    path: str
    expert: int | None
    parameters: Mapping[str, str] = field(compare=False)
    shapes: Mapping[str, Shape] = field(compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """The path's parts in lower case, without numbers."""
        return tuple(word.lower() for word in self.path.split(".") if word and not word.isdecimal())

    @property
    def scope(self) -> str:
        """The path of the module that this unit is a part of."""
        return self.path.rpartition(".")[0]

    @property
    def shape(self) -> Shape:
        """The shape of the weight, or of the only parameter."""
        return self.shapes[WEIGHT] if WEIGHT in self.shapes else next(iter(self.shapes.values()))

    @property
    def has_bias_of_all(self) -> bool:
        """Return whether it is a query whose bias is that of query, key and value, see ``parity.suggest.layouts``."""
        weight, bias = self.parameters.get(WEIGHT, ""), self.parameters.get(BIAS, "")
        return weight.endswith(_QUERY_WEIGHT) and bias.endswith(_BIAS_OF_ALL)

    def without(self, names: Container[str]) -> Unit:
        """Return the same unit without those parameters."""
        kept = {kind: name for kind, name in self.parameters.items() if name not in names}
        return replace(self, parameters=kept, shapes={kind: self.shapes[kind] for kind in kept})


def is_stack(unit: Unit) -> bool:
    """Return whether its weight has three dimensions, like that of all experts ``[experts, out, in]``."""
    return unit.expert is None and len(unit.shapes.get(WEIGHT, ())) == 3


def units_of(shapes: Mapping[str, Shape]) -> list[Unit]:
    """Return the units of a module, in the order in which it declares their first parameters.

    Args:
        shapes: the shapes of its parameters, by name.
    """
    found: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in shapes:
        weight = _weight_of(name, shapes)
        path, kind, expert = _parse(name) if weight is None else (_parse(weight)[0], BIAS, _parse(weight)[2])
        kinds = found.setdefault((path, expert), {})
        # A second "weight" with the same path, such as a scale beside it, is a unit of its own.
        target = kinds if kind not in kinds else found.setdefault((name, expert), {})
        target[kind] = name
    return [
        Unit(path, expert, kinds, {kind: tuple(shapes[name]) for kind, name in kinds.items()})
        for (path, expert), kinds in found.items()
    ]


def with_experts(units: Sequence[Unit], count: int) -> list[Unit]:
    """Return the units, numbered as experts if the last number in their path counts up to the number of experts.

    For a mixture whose list of experts has another name; units stay as they are where one has an expert's number.
    """
    found = [_LAST_NUMBER.fullmatch(unit.path) for unit in units]
    families = grouped(filter(None, found), lambda match: (match["before"], match["after"]))
    numbers = {family: sorted(int(match["number"]) for match in some) for family, some in families.items()}
    if any(unit.expert is not None or (is_stack(unit) and unit.shape[0] == count) for unit in units):
        return list(units)
    return [
        replace(unit, expert=int(match["number"]))
        if match and numbers[match["before"], match["after"]] == list(range(count))
        else unit
        for unit, match in zip(units, found, strict=True)
    ]


def _parse(name: str) -> tuple[str, str, int | None]:
    """Return path, kind and expert of a parameter."""
    scope, _, leaf = name.rpartition(".")
    in_path = _EXPERT.search(scope)
    expert = int(in_path[1]) if in_path else None
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return (scope, _KINDS[leaf], expert) if leaf in _KINDS else (name, WEIGHT, expert)
    if match["expert"]:
        expert = int(match["expert"])
    path = ".".join(filter(None, (scope, match["stem"])))
    return path, _KINDS.get(match["kind"], match["kind"]), expert


def _weight_of(name: str, shapes: Mapping[str, Shape]) -> str | None:
    """Return the weight of a bias: ``w1`` or ``w_in`` beside ``b1`` or ``b_in``; ``g`` for a norm's.

    The bias of query, key and value belongs to the query, where each has a weight.
    """
    scope, dot, leaf = name.rpartition(".")
    if leaf == _BIAS_OF_ALL:
        query = f"{scope}{dot}{_QUERY_WEIGHT}"
        return query if query in shapes else None
    if leaf[:1] not in ("b", "B"):
        return None
    small = leaf[0] == "b"
    weight, gain = (f"{scope}{dot}{first if small else first.upper()}{leaf[1:]}" for first in "wg")
    if weight in shapes and len(shapes[name]) == len(shapes[weight]) - 1:
        return weight
    return gain if gain in shapes and len(shapes[name]) == 1 and shapes[gain] == shapes[name] else None


# What a unit computes, read from its name in the vocabulary of Hugging Face, Meta, Megatron and TE.


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
    """Return the parts that each unit's name tells; no entry if it tells none.

    A unit of cross-attention has ``cross query`` and so on, also where it is one by what stands beside it. An MLP's
    first layer with twice the elements of its second holds gate and up.
    """
    siblings = grouped(units, lambda unit: unit.scope)
    told = {unit: _parts(unit, siblings[unit.scope], units) for unit in units}
    told = {unit: _with_gate(unit, parts, told, siblings[unit.scope]) for unit, parts in told.items()}
    return _with_cross({unit: parts for unit, parts in told.items() if parts})


def is_norm(unit: Unit) -> bool:
    """Return whether it is named like a norm."""
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
    # Of three numbered norms, as in nn.TransformerDecoderLayer, the second is cross-attention's.
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
    """Return what a word means among its neighbours."""
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
    """Return whether it has as many rows as there are experts below its scope, in one weight or numbered."""
    below = [other for other in everything if f"{other.path}.".startswith(unit.scope)]
    counts = {other.shape[0] for other in below if is_stack(other)}
    counts |= {1 + max((other.expert for other in below if other.expert is not None), default=-1)}
    return unit.shape[0] in counts


def _with_gate(unit: Unit, parts: Parts, told: dict[Unit, Parts], siblings: Sequence[Unit]) -> Parts:
    """Return ``(gate, up)`` for an MLP's first layer if it holds both."""
    if parts != (UP,) or any(told[other] == (GATE,) and other.expert == unit.expert for other in siblings):
        return parts
    down = [other for other in siblings if told[other] == ("down",) and other.expert == unit.expert]
    if len(down) == 1 and math.prod(unit.shape) == 2 * math.prod(down[0].shape):
        return (GATE, UP)
    return parts


def _with_cross(told: dict[Unit, Parts]) -> dict[Unit, Parts]:
    """Mark attention as cross-attention if TE's names say so, or if the other one says that it is self-attention.

    Only in cross-attention does ``te.MultiheadAttention`` have a layer for queries and one for key and value;
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


# Weights that the reference stores with more dimensions than TE: convolutions over patches, projections to heads.


# The axes of a convolution's weight: channels out and in, then time, rows and columns of a patch.
_KERNEL_AXES = {3: "o c p", 4: "o c p q", 5: "o c t p q"}
_AXES = "abcdefgh"


@dataclass(frozen=True)
class Reading:
    """One way to read the reference's weights with as many dimensions as the candidate's have.

    Attributes:
        units: the reference's, in the shapes that they are read in.
        patterns: patterns of ``rearrange``, by parameter; empty if they are read as they are.
        usual: whether it is tried at once.
    """

    units: tuple[Unit, ...]
    patterns: dict[str, str]
    usual: bool = True

    def side(self, side: Side) -> Side:
        """Return a side over the parameters as they are stored, from one over the parameters as they are read."""
        return renamed(side, lambda name: rearrange(name, self.patterns[name]) if name in self.patterns else name)


def flat(shape: Shape) -> Shape:
    """Return the shape as a linear layer has it: without dimensions of 1, a convolution's channels and
    patch in one dimension.
    """
    long = tuple(length for length in shape if length != 1)
    return (long[0], math.prod(long[1:])) if len(long) > 2 else long


def readings(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Iterator[Reading]:
    """Yield the ways to read the reference's weights that the candidate's shapes ask for, the likeliest first."""
    if len(reference) == len(candidate) and all(map(_same_but_for_ones, reference, candidate)):
        yield _without_ones(reference, candidate)
        return
    convolutions = [unit for unit in reference if len(unit.shape) > 2]
    ranks = {len(unit.shape) for unit in convolutions}
    if not ranks or any(len(unit.shape) != 2 for unit in candidate):
        yield Reading(tuple(reference), {})
    elif len(ranks) == 1 and ranks <= _KERNEL_AXES.keys():
        yield from _matrices(reference, convolutions)
        if ranks == {3}:
            yield from _of_heads(reference, convolutions)


def _matrices(reference: Sequence[Unit], convolutions: Sequence[Unit]) -> Iterator[Reading]:
    """Yield each order in which a patch's channels, rows and columns can follow each other; one if it
    has one element.
    """
    shape = convolutions[0].shape
    outer, channels, *patch = _KERNEL_AXES[len(shape)].split()
    units = tuple(
        replace(unit, shapes={**unit.shapes, WEIGHT: (unit.shape[0], math.prod(unit.shape[1:]))})
        if unit in convolutions
        else unit
        for unit in reference
    )
    names = [unit.parameters[WEIGHT] for unit in convolutions]
    if math.prod(shape[2:]) == 1:
        pattern = f"{outer} {channels} {' '.join('1' for _ in patch)} -> {outer} {channels}"
        yield Reading(units, dict.fromkeys(names, pattern))
        return
    usual = [(channels, *patch), (*patch, channels)]
    others = [order for order in permutations((channels, *patch)) if order not in usual]
    for order in (*usual, *others):
        pattern = f"{outer} {channels} {' '.join(patch)} -> {outer} ({' '.join(order)})"
        yield Reading(units, dict.fromkeys(names, pattern), usual=order in usual)


def _of_heads(reference: Sequence[Unit], projections: Sequence[Unit]) -> Iterator[Reading]:
    """Yield projections to heads and back: ``[in, heads, head_dim]`` or ``[heads, head_dim, in]``, and
    the latter for out.
    """
    for pattern in ("d h k -> (h k) d", "h k d -> (h k) d", "h k d -> d (h k)"):
        units = tuple(
            replace(unit, shapes={**unit.shapes, WEIGHT: shape_of(rearrange(WEIGHT, pattern), unit.shapes)})
            if unit in projections
            else unit
            for unit in reference
        )
        yield Reading(units, {unit.parameters[WEIGHT]: pattern for unit in projections})


def _without_ones(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Reading:
    """Return the reading with dimensions of 1 where the candidate has them."""
    units: list[Unit] = []
    patterns: dict[str, str] = {}
    for left, right in zip(reference, candidate, strict=True):
        shared = left.parameters.keys() & right.parameters.keys()
        other = {kind: right.shapes[kind] for kind in shared if _differ_by_ones(left.shapes[kind], right.shapes[kind])}
        patterns |= {left.parameters[kind]: _pattern(left.shapes[kind], shape) for kind, shape in other.items()}
        units.append(replace(left, shapes={**left.shapes, **other}))
    return Reading(tuple(units), patterns)


def _same_but_for_ones(one: Unit, other: Unit) -> bool:
    return one.shape == other.shape or _differ_by_ones(one.shape, other.shape)


def _differ_by_ones(one: Shape, other: Shape) -> bool:
    return one != other and [n for n in one if n != 1] == [n for n in other if n != 1]


def _pattern(one: Shape, other: Shape) -> str:
    """Return the pattern from a shape to another that has its dimensions of 1 in other places."""
    left, right = iter(_AXES), iter(_AXES)
    before = " ".join("1" if n == 1 else next(left) for n in one)
    after = " ".join("1" if n == 1 else next(right) for n in other)
    return f"{before} -> {after}"
