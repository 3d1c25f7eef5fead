"""The code of every finding, by its title; ``docs/findings.md`` has a section for each.

``PAR0xx`` are about values that cannot be judged, ``PAR1xx`` about weights, ``PAR2xx`` about the computed function,
``PAR3xx`` about precision, ``PAR4xx`` about gradients, ``PAR5xx`` locate errors that no known mistake explains,
``PAR6xx`` are about state kept from one training step to the next, and ``PAR7xx`` about computations over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from parity.case.case import Case
from parity.result import NO_CODE, Code, Finding
from parity.user_error import UserError

_TITLES = {
    "PAR001": ("not-finite",),
    "PAR002": ("golden-not-finite",),
    "PAR003": ("precision-overflows",),
    "PAR004": ("no-gradient",),
    "PAR005": ("ill-conditioned",),
    "PAR101": ("gate-up-swapped", "stacked-in-another-order"),
    "PAR102": ("qkv-layout", "key-value-swapped"),
    "PAR103": ("weight-transposed",),
    "PAR104": ("gamma-shift",),
    "PAR105": ("parameters-exchanged", "layers-permuted", "layer-repeated"),
    "PAR106": ("weight-not-copied",),
    "PAR107": ("gate-up-interleaved",),
    "PAR108": ("heads-transposed",),
    "PAR109": ("heads-permuted",),
    "PAR110": ("gqa-head-order",),
    "PAR111": ("experts-permuted",),
    "PAR112": ("weights-not-as-mapped",),
    "PAR120": ("buffer-not-copied",),
    "PAR201": ("norm-eps",),
    "PAR202": ("activation",),
    "PAR203": ("norm-statistics",),
    "PAR204": ("norm-rounding",),
    "PAR205": ("norm-kind",),
    "PAR206": ("norm-missing",),
    "PAR207": ("norm-order",),
    "PAR208": ("norm-groups",),
    "PAR209": ("norm-twice",),
    "PAR211": ("mask",),
    "PAR212": ("mask-corner",),
    "PAR213": ("mask-polarity",),
    "PAR214": ("padding-mask",),
    "PAR215": ("window",),
    "PAR216": ("softmax-scale",),
    "PAR217": ("softmax-sink",),
    "PAR218": ("softcap",),
    "PAR219": ("query-key-swapped",),
    "PAR220": ("attention-bias",),
    "PAR221": ("rope-layout",),
    "PAR222": ("rope-missing", "rope-unwanted"),
    "PAR223": ("rope-one-side",),
    "PAR224": ("rope-twice",),
    "PAR225": ("rope-position",),
    "PAR226": ("rope-base",),
    "PAR227": ("rope-partial",),
    "PAR228": ("rope-precision",),
    "PAR229": ("rope-direction",),
    "PAR230": ("rope-scaling",),
    "PAR231": ("residual-placement",),
    "PAR232": ("parallel-block",),
    "PAR233": ("post-norm",),
    "PAR241": ("bias-dropped",),
    "PAR242": ("bias-added-twice",),
    "PAR243": ("head-count",),
    "PAR251": ("sequence-first",),
    "PAR252": ("dropout",),
    "PAR253": ("not-reproducible",),
    "PAR254": ("output-scale",),
    "PAR255": ("loss-scale",),
    "PAR256": ("factor",),
    "PAR257": ("embedding-position",),
    "PAR258": ("branch-missing",),
    "PAR259": ("operation",),
    "PAR260": ("label-smoothing", "ignored-label", "labels-shifted", "z-loss"),
    "PAR261": ("routing-weights", "routing-bias"),
    "PAR262": ("top-k",),
    "PAR263": ("expert-splits",),
    "PAR264": ("optimizer",),
    "PAR265": ("cache-step", "cached-before-rope", "cache-not-reset", "cache-shared"),
    "PAR266": ("temperature",),
    "PAR271": ("outputs-exchanged", "rows-exchanged"),
    "PAR272": ("hidden-rows",),
    "PAR273": ("state-between-calls",),
    "PAR274": ("number",),
    "PAR275": ("not-invariant",),
    "PAR276": ("unwritten-memory",),
    "PAR301": ("tf32",),
    "PAR302": ("accumulation-precision",),
    "PAR304": ("fp8-scale-stale", "fp8-gradient-scale"),
    "PAR305": ("fp8-margin",),
    "PAR306": ("fp8-scale-inverted",),
    "PAR307": ("weight-cache-stale",),
    "PAR308": ("recipe-disabled", "recomputed-otherwise"),
    "PAR309": ("master-weights",),
    "PAR310": ("own-recipe",),
    "PAR311": ("log-softmax-precision",),
    "PAR312": ("other-format",),
    "PAR313": ("bias",),
    "PAR401": ("gradient-scale",),
    "PAR402": ("gradient-accumulation",),
    "PAR403": ("gradient-path-missing", "embeddings-not-tied", "padding-row"),
    "PAR404": ("gradient-zeroed",),
    "PAR501": ("unexplained",),
    "PAR502": ("first-divergence",),
    "PAR601": ("gradient-not-zeroed",),
    "PAR602": ("stale-batch", "stale-gradient"),
    "PAR603": ("stale-weights",),
    "PAR604": ("gradient-clipping",),
    "PAR605": ("state-between-steps",),
    "PAR606": ("state-not-saved",),
    "PAR607": ("amax-history-lost", "amax-not-recorded", "amax-of-another-tensor", "scale-not-updated"),
    "PAR608": ("graph-stale-input", "graph-frozen-value", "graph-lost-gradient"),
    "PAR609": ("graph-not-captured", "graph-differs"),
    "PAR610": ("compiled-differs",),
    "PAR611": ("micro-batches",),
    "PAR612": ("training-diverges",),
    "PAR613": ("offload-out-of-step",),
    "PAR614": ("offload-stale-tensor", "offload-differs"),
    "PAR615": ("buffer-moved-otherwise",),
    "PAR701": ("reduction-missing",),
    "PAR702": ("reduced-twice", "averaged-over-ranks"),
    "PAR703": ("bias-on-every-rank",),
    "PAR704": ("shards-in-another-order", "shard-layout"),
    "PAR705": ("gathered-in-another-order", "sequence-order"),
    "PAR706": ("replicas-differ",),
    "PAR707": ("nothing-exchanged",),
    "PAR708": ("gradient-norm",),
    "PAR709": ("wrong-over-ranks",),
    "PAR711": ("parts-added-up",),
    "PAR712": ("shares-of-ranks",),
    "PAR713": ("optimizer-shards",),
    "PAR714": ("amax-group",),
    "PAR715": ("reduced-in-16-bits",),
    "PAR716": ("ranks-drop-alike", "ranks-drop-differently"),
    "PAR717": ("stages",),
    "PAR718": ("tied-over-stages",),
}

CODES = {title: code for code, titles in _TITLES.items() for title in titles}
"""The code of each title."""


_TITLES_BY_NEED = {
    "nothing": "not-finite golden-not-finite precision-overflows no-gradient ill-conditioned stacked-in-another-order "
    "weight-transposed parameters-exchanged layers-permuted layer-repeated weight-not-copied weights-not-as-mapped "
    "buffer-not-copied activation norm-missing softcap residual-placement parallel-block bias-dropped bias-added-twice "
    "sequence-first dropout not-reproducible output-scale factor branch-missing operation outputs-exchanged "
    "rows-exchanged state-between-calls number not-invariant unwritten-memory accumulation-precision recipe-disabled "
    "recomputed-otherwise own-recipe bias weight-cache-stale unexplained first-divergence",
    "attention": "qkv-layout key-value-swapped heads-transposed heads-permuted gqa-head-order mask mask-corner "
    "mask-polarity padding-mask window softmax-scale softmax-sink query-key-swapped attention-bias head-count "
    "cache-step",
    "rotations": "rope-layout rope-missing rope-unwanted rope-one-side rope-twice rope-position rope-base rope-partial "
    "rope-precision rope-direction rope-scaling",
    "norms": "gamma-shift norm-eps norm-statistics norm-rounding norm-kind norm-order norm-groups norm-twice post-norm",
    "gated units": "gate-up-swapped gate-up-interleaved",
    "experts": "experts-permuted routing-weights routing-bias top-k expert-splits",
    "lookups": "embedding-position embeddings-not-tied padding-row",
    "labels": "label-smoothing ignored-label labels-shifted z-loss",
    "log-probabilities": "temperature log-softmax-precision",
    "few outputs": "loss-scale",
    "an optimizer": "optimizer master-weights gradient-clipping",
    "gradients": "gradient-scale gradient-accumulation gradient-path-missing gradient-zeroed",
    "masked tokens": "hidden-rows",
    "decoding": "cached-before-rope cache-not-reset cache-shared",
    "FP8": "fp8-scale-stale fp8-gradient-scale fp8-margin fp8-scale-inverted amax-history-lost amax-not-recorded "
    "amax-of-another-tensor scale-not-updated amax-group other-format",
    "FP32": "tf32",
    "a training": "gradient-not-zeroed stale-batch stale-gradient stale-weights state-between-steps state-not-saved "
    "graph-stale-input graph-frozen-value graph-lost-gradient graph-not-captured graph-differs compiled-differs "
    "micro-batches training-diverges offload-out-of-step offload-stale-tensor offload-differs buffer-moved-otherwise",
    "ranks": "reduction-missing reduced-twice averaged-over-ranks bias-on-every-rank shards-in-another-order "
    "shard-layout gathered-in-another-order sequence-order replicas-differ nothing-exchanged gradient-norm "
    "wrong-over-ranks parts-added-up shares-of-ranks optimizer-shards reduced-in-16-bits ranks-drop-alike "
    "ranks-drop-differently stages tied-over-stages",
}

NEEDS = {title: need for need, titles in _TITLES_BY_NEED.items() for title in titles.split()}
"""What a model or a run must have for a finding with this title to be told, as ``parity.search.subject`` measures."""


UNEXPLAINED = frozenset((CODES["unexplained"], CODES["first-divergence"]))
"""Codes of the findings that do not name a cause."""


def describe_rivals(named: Sequence[str]) -> str:
    """Say that others explain a failure as well, as the end of a message; return an empty text if there are none."""
    return f"; {' or '.join(named)} explains it equally well, so it is one of these" if named else ""


def check_accepts(case: Case) -> None:
    """Raise a ``UserError`` if a case accepts what is no finding's title."""
    unknown = [title for title in case.accepts if title not in CODES]
    if unknown:
        raise UserError(
            f"pair {case.name!r} accepts {unknown[0]!r}, no finding's title; docs/findings.md has all of them"
        )


def finding(title: str, message: str, sure: bool = True, repair: str = "", code: Code = NO_CODE) -> Finding:
    """Return a finding with this title, which is a key of ``CODES``."""
    return Finding(CODES[title], title, message, sure, repair, code.now, code.then)


def repairable(title: str, evidence: str, repair: str, code: Code = NO_CODE) -> Finding:
    """Return a finding whose message is the evidence, followed by what to change in the user's code."""
    return finding(title, f"{evidence}; {repair}", repair=repair, code=code)
