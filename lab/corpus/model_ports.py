"""Mistakes in the models that ``models.py`` writes twice: constants, parts of tensors or models, and kinds.

Constants and places are typical of porting, and were chosen without looking at what the search tries. After a first
run, titles and places that say the same in other words were added. One row's number was changed too, because it had
the same effect as no rotation at all. Near constants were written with the search that finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.corpus.models import HOSTS, SEQ, Mistake, port
from lab.corpus.port import Port


def _port(
    name: str,
    host: str,
    summary: str,
    mistake: Mistake,
    titles: tuple[str, ...],
    number: float | None = None,
    place: str = "",
) -> Port:
    return Port(
        name,
        f"models.{host}",
        port(host, mistake),
        port(host, None),
        titles,
        number=number,
        place=place,
        change=mistake,
        summary=summary,
        others=True,
    )


# Constants: the port has another number than the reference.


def _number(host: str, field: str, value: float, titles: tuple[str, ...], told: float | None = None) -> Port:
    right = getattr(HOSTS[host], field)
    name = f"{host} {field} {value:g} for {right:g}"
    return _port(
        name, host, f"`{field}` is {value:g} for {right:g}.", Mistake({field: value}), titles,
        value if told is None else told,
    )  # fmt: skip


_EPS = ("norm-eps",)
_BASE = ("rope-base",)
_LATE = ("rope-position",)
_SCALING = ("rope-scaling",)
_SCALE = ("softmax-scale",)
_FACTOR = ("factor", "output-scale")
# If the reference has separate gate and up weights, exchanging these is the same mistake, so both titles are right.
_SWAPPED = ("gate-up-swapped", "parameters-exchanged")

CONSTANTS = (
    _number("norm_mlp", "eps", 5e-6, _EPS),
    _number("norm_mlp", "eps", 2e-5, _EPS),
    _number("norm_mlp", "eps", 5e-5, _EPS),
    _number("norm_mlp", "eps", 2e-6, _EPS),
    _number("gelu_mlp", "eps", 3e-6, _EPS),
    _number("gelu_mlp", "eps", 2e-4, _EPS),
    _number("llama", "eps", 3e-5, _EPS),
    _number("attention", "base", 5000.0, _BASE),
    _number("attention", "base", 20000.0, _BASE),
    _number("attention", "base", 150000.0, _BASE),
    _number("attention", "base", 32000.0, _BASE),
    _number("llama", "base", 8000.0, _BASE),
    _number("partial_rope_attention", "rotated", 0.375, ("rope-partial",)),
    _number("partial_rope_attention", "rotated", 0.75, ("rope-partial",)),
    _number("attention", "key_offset", 5, _LATE),
    _number("attention", "key_offset", 17, _LATE),
    _number("attention", "query_offset", 3, _LATE),
    _number("window_attention", "window", 10, ("window",)),
    _number("window_attention", "window", 13, ("window",)),
    _number("attention", "scaled_by", 24**-0.5, _SCALE),
    _number("attention", "scaled_by", 0.3, _SCALE),
    _number("llama", "scaled_by", 20**-0.5, _SCALE),
    _number("softcap_attention", "softcap", 6.0, ("softcap",)),
    _number("softcap_attention", "softcap", 3.5, ("softcap",)),
    _number("gemma", "logits_softcap", 4.0, ("softcap",)),
    _number("scaled_rope_attention", "factor", 16.0, _SCALING),
    _number("scaled_rope_attention", "factor", 5.0, _SCALING),
    _number("scaled_rope_attention", "high", 8.0, _SCALING),
    _number("scaled_rope_attention", "original", 96.0, _SCALING),
    _number("experts", "router_scale", 1.5, ("routing-weights", *_FACTOR)),
    _number("experts", "router_scale", 2.0, ("routing-weights", *_FACTOR)),
    _number("granite", "multiplier", 10.0, _FACTOR),
    _number("granite", "residual", 0.22, ("factor", "residual-placement")),
    _number("loss", "smoothing", 0.05, ("label-smoothing",)),
    _number("loss", "smoothing", 0.15, ("label-smoothing",)),
    _number("loss", "z_loss", 2e-2, ("z-loss",)),
    _number("clamped_mlp", "limit", 2.0, ("activation", "operation")),
    _number("clamped_mlp", "alpha", 1.5, ("activation", "operation", "factor")),
    _number("gelu_mlp", "gelu_constant", 0.06, ("activation", "operation")),
    _number("quick_mlp", "gelu_steepness", 1.6, ("activation", "operation", "factor")),
)


# Mistakes in part of a tensor or model.


def _part(
    name: str,
    host: str,
    changes: Mapping[str, Any],
    titles: tuple[str, ...],
    place: str,
    layers: tuple[int, ...] = (),
    **at: slice,
) -> Port:
    where = ", ".join(
        [f"{axis} {_written(chosen)}" for axis, chosen in at.items()] + [f"layer {layer}" for layer in layers]
    )
    made = ", ".join(f"`{field}` is {value}" for field, value in changes.items())
    summary = f"{made} at {where}." if where else f"{made}."
    return _port(name, host, summary, Mistake(changes, layers, at), titles, None, place)


def _written(chosen: slice) -> str:
    return ":".join("" if each is None else str(each) for each in (chosen.start, chosen.stop, chosen.step))


FIRST, SECOND, LAST = slice(0, 1), slice(1, 2), slice(-1, None)
SEQ_HALF = SEQ // 2
FIRST_TWO, LAST_HALF, ODD = slice(0, 2), slice(SEQ_HALF, None), slice(1, None, 2)
_ODD = r"\bodd|every (second|other)|columns? 1, 3"
_LAST_TOKEN = r"(positions?|tokens?|rows?|quer(y|ies)) (31|63|-1)\b|last (position|token|row|query)"
_FIRST_HALF = r"(positions?|tokens?|rows?|quer(y|ies)) (0|up to 15|15|16)\b|first (half|16)|before 16"
_LAST_CHANNELS = r"(channels?|columns?|features?) (4[89]|5\d|6[0-3])\b|from 48|second half"
_SECOND_HALF = r"(from|positions?|tokens?|rows?) 16\b|(last|second) half"


def _head(number: int) -> str:
    return rf"\bheads? {number}\b"


def _group(number: int) -> str:
    heads = 2 * number  # two heads a group
    return rf"\b(groups?|key.?value heads?|heads?) {number}\b|\bheads {heads} to {heads + 1}\b"


def _sequence(number: int) -> str:
    return (
        rf"\b(sequences?|batch|elements?|rows?) {number}\b|{('first', 'second')[number]} (sequence|half of the batch)"
    )


def _expert(number: int) -> str:
    return rf"\bexperts?[ .]{number}\b"


def _layer(number: int) -> str:
    return rf"layers?\.{number}\b|layer {number}\b"


PARTIAL = (
    _part("half of the heads unrotated", "attention", dict(rotates_queries=False, rotates_keys=False),
          ("rope-missing",), _head(0), head=FIRST_TWO, group=FIRST),
    _part("one head's queries unrotated", "attention", dict(rotates_queries=False), ("rope-missing", "rope-one-side"),
          _head(3), head=LAST),
    _part("one group's keys unrotated", "attention", dict(rotates_keys=False), ("rope-missing", "rope-one-side"),
          _group(0), group=FIRST),
    _part("second sequence unrotated", "attention", dict(rotates_queries=False, rotates_keys=False), ("rope-missing",),
          _sequence(1), batch=SECOND),
    _part("last query's position off", "attention", dict(query_offset=-20), _LATE, _LAST_TOKEN, position=LAST),
    _part("positions clamped at 15", "attention", dict(last_position=15), _LATE, r"\b15\b|\b16\b|clamp|last"),
    _part("one group's values rotated", "attention", dict(rotates_values=True), ("rope-unwanted",), _group(1),
          group=SECOND),
    _part("values rotated", "attention", dict(rotates_values=True), ("rope-unwanted",), "value|v_proj"),
    _part("one head's rotation interleaved", "attention", dict(interleaved=True), ("rope-layout",), _head(0),
          head=FIRST),
    _part("one head's RoPE base", "attention", dict(base=500000.0), _BASE, _head(1), head=SECOND),
    _part("one head's window", "window_attention", dict(window=None), ("window",), _head(3), head=LAST),
    _part("one sequence's window", "window_attention", dict(window=4), ("window",), _sequence(0), batch=FIRST),
    _part("one head not causal", "attention", dict(causal=False), ("mask",), _head(1), head=SECOND),
    _part("one sequence not causal", "attention", dict(causal=False), ("mask",), _sequence(1), batch=SECOND),
    _part("first half of the queries not causal", "attention", dict(causal=False), ("mask",), _FIRST_HALF,
          position=slice(0, SEQ_HALF)),
    _part("one head sees the next key", "attention", dict(diagonal=1), ("mask", "mask-corner"), _head(3), head=LAST),
    _part("one head's scale", "attention", dict(scaled_by=0.125), _SCALE, _head(0), head=FIRST),
    _part("sinks in reverse", "sink_attention", dict(sinks_reversed=True),
          ("softmax-sink", "heads-permuted", "weights-not-as-mapped"), r"\bheads?\b|revers|order"),
    _part("one head's sink negated", "sink_attention", dict(sink_sign=-1.0), ("softmax-sink",), _head(0), head=FIRST),
    _part("softcap after the mask", "softcap_attention", dict(softcap_after_mask=True), ("softcap", "mask"), "mask"),
    _part("one head without softcap", "softcap_attention", dict(softcap=None), ("softcap",), _head(1), head=SECOND),
    _part("attention's bias missing in odd rows", "attention", dict(has_bias=False), ("bias-dropped",),
          _ODD, position=ODD),
    _part("up's bias missing in odd channels", "gelu_mlp", dict(has_bias=False), ("bias-dropped",), _ODD,
          channel=ODD),
    _part("GELU exact in the second half of the channels", "gelu_mlp", dict(activation="gelu"), ("activation",),
          _LAST_CHANNELS, channel=slice(48, None)),
    _part("ReLU for GELU in the last token", "gelu_mlp", dict(activation="relu"), ("activation",), _LAST_TOKEN,
          position=LAST),
    _part("gain missing in odd channels", "norm_mlp", dict(gain=False), ("weight-not-copied", "operation"), _ODD,
          channel=ODD),
    _part("second sequence not normed", "norm_mlp", dict(normed=False), ("norm-missing",), _sequence(1), batch=SECOND),
    _part("gate and up swapped in the second sequence", "norm_mlp", dict(gate_last=True), ("gate-up-swapped",),
          _sequence(1), batch=SECOND),
    _part("one expert's gate and up swapped", "experts", dict(experts_gate_last=True), _SWAPPED, _expert(2),
          expert=slice(2, 3)),
    _part("one expert with GELU", "experts", dict(expert_activation="gelu"), ("activation",), _expert(1),
          expert=SECOND),
    _part("one expert's output doubled", "experts", dict(expert_scale=2.0), _FACTOR, _expert(0), expert=FIRST),
    _part("one sequence's routing weights not renormalised", "experts", dict(renormalised=False),
          ("routing-weights",), _sequence(0), batch=FIRST),
    _part("top-1 in the last half", "experts", dict(chosen=1), ("top-k",), _SECOND_HALF, position=LAST_HALF),
    _part("eps 1e-3 in one of four layers", "llama", dict(eps=1e-3), _EPS, _layer(2), (2,)),
    _part("RoPE missing in one of four layers", "llama", dict(rotates_queries=False, rotates_keys=False),
          ("rope-missing",), _layer(3), (3,)),
    _part("one of four layers not causal", "llama", dict(causal=False), ("mask",), _layer(1), (1,)),
    _part("gate and up swapped in one of four layers", "llama", dict(gate_last=True), _SWAPPED, _layer(0),
          (0,)),
    _part("one layer's residual in full", "granite", dict(residual=1.0), ("factor", "residual-placement"), _layer(1),
          (1,)),
    _part("one layer's input detached", "llama", dict(detached=True), ("gradient-path-missing",), _layer(2), (2,)),
    _part("logits not divided for the last token", "granite", dict(logits_divided=1.0), _FACTOR, _LAST_TOKEN,
          position=LAST),
)  # fmt: skip


# Kinds of mistakes, most of which affect the whole port. Detection is counted on these and the partial mistakes.


def _kind(name: str, host: str, titles: tuple[str, ...], number: float | None = None, **changes: Any) -> Port:
    summary = ", ".join(f"`{field}` is {value}" for field, value in changes.items())
    return _port(name, host, f"{summary}.", Mistake(changes), titles, number)


KINDS = (
    # Below FP8's noise, or near it.
    _kind("top-k not renormalised", "experts", ("routing-weights",), renormalised=False),
    _kind("scale of 48 for 40", "attention", _SCALE, scaled_by=0.25 * (40 / 48) ** 0.5),
    _kind("Llama 3.1 factor 32 for 8", "scaled_rope_attention", _SCALING, factor=32.0),
    _kind("quick GELU for tanh-GELU", "gelu_mlp", ("activation",), activation="quick_gelu"),
    _kind("plain GELU for tanh-GELU", "gelu_mlp", ("activation",), activation="gelu"),
    _kind("tanh-GELU for plain GELU", "erf_mlp", ("activation",), activation="gelu_tanh"),
    # Mistakes that parity once attributed to a wrong cause with confidence.
    _kind("LayerNorm with a variance over n-1", "gelu_mlp", ("norm-statistics", "norm-kind", "operation"),
          norm_variance="over n-1"),
    _kind("eps outside of the root", "norm_mlp", ("norm-eps", "norm-statistics", "operation"), eps_inside=False),
    _kind("routing weights on the inputs", "experts", ("routing-weights",), weighted="inputs"),
    _kind("routing weights twice", "experts", ("routing-weights",), weighted="twice"),
    # Whole models.
    _kind("logits not divided", "granite", _FACTOR, logits_divided=1.0),
    _kind("final norm twice", "llama", ("norm-twice", "norm-missing", "operation"), final_norms=2),
    _kind("final norm in each layer", "llama", ("norm-order", "post-norm", "operation"), normed_again=True),
    _kind("no final norm", "gpt", ("norm-missing",), final_norms=0),
    _kind("logits' softcap missing", "gemma", ("softcap",), logits_softcap=None),
    _kind("embeddings not multiplied", "gemma", _FACTOR, multiplier=1.0),
    _kind("learned positions one late", "gpt", ("embedding-position",), position_offset=1),
    _kind("residual scale missing", "granite", ("factor", "residual-placement"), residual=1.0),
    # Norms.
    _kind("LayerNorm for RMSNorm", "norm_mlp", ("norm-kind",), centred=True),
    _kind("RMSNorm for LayerNorm", "gelu_mlp", ("norm-kind",), centred=False),
    _kind("no norm", "norm_mlp", ("norm-missing",), normed=False),
    _kind("gain plus 1", "norm_mlp", ("gamma-shift",), gain_shift=1.0),
    # Attention.
    _kind("not causal", "attention", ("mask",), causal=False),
    _kind("diagonal off by one", "attention", ("mask", "mask-corner"), diagonal=1),
    _kind("no window", "window_attention", ("window",), window=None),
    _kind("no softcap", "softcap_attention", ("softcap",), softcap=None),
    _kind("groups interleaved", "attention", ("gqa-head-order",), groups_interleaved=True),
    _kind("heads in reverse", "attention", ("heads-permuted",), heads_reversed=True),
    _kind("keys for values", "attention", ("key-value-swapped", "qkv-layout"), keys_are_values=True),
    _kind("scale missing", "attention", _SCALE, scaled_by=1.0),
    _kind("output's bias dropped", "attention", ("bias-dropped",), has_bias=False),
    _kind("output's bias twice", "attention", ("bias-added-twice",), bias_twice=True),
    _kind("sinks negated", "sink_attention", ("softmax-sink",), sink_sign=-1.0),
    # RoPE.
    _kind("no RoPE", "attention", ("rope-missing",), rotates_queries=False, rotates_keys=False),
    _kind("keys not rotated", "attention", ("rope-one-side",), rotates_keys=False),
    _kind("RoPE interleaved", "attention", ("rope-layout",), interleaved=True),
    _kind("RoPE twice", "attention", ("rope-twice",), rotates_twice=True),
    _kind("RoPE the other way", "attention", ("rope-direction",), direction=-1.0),
    _kind("RoPE scaling missing", "scaled_rope_attention", _SCALING, factor=1.0),
    # MLPs, experts and residuals.
    _kind("gate and up swapped", "norm_mlp", _SWAPPED, gate_last=True),
    _kind("sigmoid gate for SiLU", "norm_mlp", ("activation",), activation="glu"),
    _kind("residual missing its branch", "gelu_mlp", ("branch-missing",), branch=False),
    _kind("residual from the norm", "norm_mlp", ("residual-placement",), residual_from_norm=True),
    _kind("experts shifted by one", "experts", ("experts-permuted", "layers-permuted"), experts_shifted=True),
)  # fmt: skip

# Near constants: a few per cent above and below the reference's number, where no commonly used number lies.

NEAR = tuple(
    _number(host, field, float(f"{getattr(HOSTS[host], field) * share:.3g}"), titles)
    for host, field, titles in (
        ("attention", "base", _BASE),
        ("llama", "base", _BASE),
        ("attention", "scaled_by", _SCALE),
        ("llama", "scaled_by", _SCALE),
        ("window_attention", "scaled_by", _SCALE),
        ("softcap_attention", "softcap", ("softcap",)),
        ("gemma", "logits_softcap", ("softcap",)),
        ("scaled_rope_attention", "factor", _SCALING),
        ("scaled_rope_attention", "original", _SCALING),
        ("experts", "router_scale", ("routing-weights", *_FACTOR)),
        ("granite", "multiplier", _FACTOR),
        ("granite", "residual", ("factor", "residual-placement")),
        ("granite", "logits_divided", _FACTOR),
        ("gemma", "multiplier", _FACTOR),
        ("loss", "smoothing", ("label-smoothing",)),
        ("clamped_mlp", "limit", ("activation", "operation")),
        ("clamped_mlp", "alpha", ("activation", "operation", "factor")),
        ("quick_mlp", "gelu_steepness", ("activation", "operation", "factor")),
        ("gelu_mlp", "gelu_constant", ("activation", "operation")),
    )
    for share in (1.04, 0.95)
)
