"""Name the code of every finding, by its title; ``docs/findings.md`` has a section for each.

``PAR0xx`` are about values that cannot be judged, ``PAR1xx`` about weights, ``PAR2xx`` about the computed function,
``PAR3xx`` about precision, ``PAR4xx`` about gradients, ``PAR5xx`` say where an error is that nothing explains,
``PAR6xx`` are about what goes from one training step to the next, and ``PAR7xx`` about what ranks compute together.
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.result import Finding

CODES = {
    "not-finite": "PAR001",
    "golden-not-finite": "PAR002",
    "precision-overflows": "PAR003",
    "no-gradient": "PAR004",
    "ill-conditioned": "PAR005",
    "gate-up-swapped": "PAR101",
    "stacked-in-another-order": "PAR101",
    "qkv-layout": "PAR102",
    "key-value-swapped": "PAR102",
    "weight-transposed": "PAR103",
    "gamma-shift": "PAR104",
    "parameters-exchanged": "PAR105",
    "layers-permuted": "PAR105",
    "layer-repeated": "PAR105",
    "weight-not-copied": "PAR106",
    "gate-up-interleaved": "PAR107",
    "heads-transposed": "PAR108",
    "heads-permuted": "PAR109",
    "gqa-head-order": "PAR110",
    "experts-permuted": "PAR111",
    "weights-not-as-mapped": "PAR112",
    "buffer-not-copied": "PAR120",
    "norm-eps": "PAR201",
    "activation": "PAR202",
    "norm-statistics": "PAR203",
    "norm-rounding": "PAR204",
    "norm-kind": "PAR205",
    "norm-missing": "PAR206",
    "norm-order": "PAR207",
    "norm-groups": "PAR208",
    "norm-twice": "PAR209",
    "mask": "PAR211",
    "mask-corner": "PAR212",
    "mask-polarity": "PAR213",
    "padding-mask": "PAR214",
    "window": "PAR215",
    "softmax-scale": "PAR216",
    "softmax-sink": "PAR217",
    "softcap": "PAR218",
    "query-key-swapped": "PAR219",
    "attention-bias": "PAR220",
    "rope-layout": "PAR221",
    "rope-missing": "PAR222",
    "rope-unwanted": "PAR222",
    "rope-one-side": "PAR223",
    "rope-twice": "PAR224",
    "rope-position": "PAR225",
    "rope-base": "PAR226",
    "rope-partial": "PAR227",
    "rope-precision": "PAR228",
    "rope-direction": "PAR229",
    "rope-scaling": "PAR230",
    "residual-placement": "PAR231",
    "parallel-block": "PAR232",
    "post-norm": "PAR233",
    "bias-dropped": "PAR241",
    "bias-added-twice": "PAR242",
    "head-count": "PAR243",
    "sequence-first": "PAR251",
    "dropout": "PAR252",
    "not-reproducible": "PAR253",
    "output-scale": "PAR254",
    "loss-scale": "PAR255",
    "factor": "PAR256",
    "embedding-position": "PAR257",
    "branch-missing": "PAR258",
    "operation": "PAR259",
    "label-smoothing": "PAR260",
    "ignored-label": "PAR260",
    "labels-shifted": "PAR260",
    "z-loss": "PAR260",
    "routing-weights": "PAR261",
    "routing-bias": "PAR261",
    "top-k": "PAR262",
    "expert-splits": "PAR263",
    "optimizer": "PAR264",
    "cache-step": "PAR265",
    "cached-before-rope": "PAR265",
    "cache-not-reset": "PAR265",
    "cache-shared": "PAR265",
    "temperature": "PAR266",
    "outputs-exchanged": "PAR271",
    "rows-exchanged": "PAR271",
    "hidden-rows": "PAR272",
    "state-between-calls": "PAR273",
    "number": "PAR274",
    "tf32": "PAR301",
    "accumulation-precision": "PAR302",
    "fp8-scale-stale": "PAR304",
    "fp8-gradient-scale": "PAR304",
    "fp8-margin": "PAR305",
    "fp8-scale-inverted": "PAR306",
    "weight-cache-stale": "PAR307",
    "recipe-disabled": "PAR308",
    "recomputed-otherwise": "PAR308",
    "master-weights": "PAR309",
    "own-recipe": "PAR310",
    "log-softmax-precision": "PAR311",
    "gradient-scale": "PAR401",
    "gradient-accumulation": "PAR402",
    "gradient-path-missing": "PAR403",
    "embeddings-not-tied": "PAR403",
    "padding-row": "PAR403",
    "unexplained": "PAR501",
    "first-divergence": "PAR502",
    "gradient-not-zeroed": "PAR601",
    "stale-batch": "PAR602",
    "stale-gradient": "PAR602",
    "stale-weights": "PAR603",
    "gradient-clipping": "PAR604",
    "state-between-steps": "PAR605",
    "state-not-saved": "PAR606",
    "amax-history-lost": "PAR607",
    "amax-not-recorded": "PAR607",
    "amax-of-another-tensor": "PAR607",
    "scale-not-updated": "PAR607",
    "graph-stale-input": "PAR608",
    "graph-frozen-value": "PAR608",
    "graph-lost-gradient": "PAR608",
    "graph-not-captured": "PAR609",
    "graph-differs": "PAR609",
    "compiled-differs": "PAR610",
    "micro-batches": "PAR611",
    "training-diverges": "PAR612",
    "offload-out-of-step": "PAR613",
    "offload-stale-tensor": "PAR614",
    "offload-differs": "PAR614",
    "reduction-missing": "PAR701",
    "reduced-twice": "PAR702",
    "averaged-over-ranks": "PAR702",
    "bias-on-every-rank": "PAR703",
    "shards-in-another-order": "PAR704",
    "shard-layout": "PAR704",
    "gathered-in-another-order": "PAR705",
    "sequence-order": "PAR705",
    "replicas-differ": "PAR706",
    "nothing-exchanged": "PAR707",
    "gradient-norm": "PAR708",
    "wrong-over-ranks": "PAR709",
    "parts-added-up": "PAR711",
    "shares-of-ranks": "PAR712",
    "optimizer-shards": "PAR713",
    "amax-group": "PAR714",
    "reduced-in-16-bits": "PAR715",
    "ranks-drop-alike": "PAR716",
    "ranks-drop-differently": "PAR716",
    "stages": "PAR717",
    "tied-over-stages": "PAR718",
}


@dataclass(frozen=True)
class Code:
    """Hold lines of a user's code, for a repair that can be written as a change of lines.

    Attributes:
        now: the lines as they are; there may be none, since a default is not written.
        then: the lines as they should be.
    """

    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


NO_CODE = Code()


UNEXPLAINED = frozenset((CODES["unexplained"], CODES["first-divergence"]))
"""Codes of the findings that name no cause."""


def finding(title: str, message: str, sure: bool = True, repair: str = "", code: Code = NO_CODE) -> Finding:
    """Return a finding of this title, a key of ``CODES``."""
    return Finding(CODES[title], title, message, sure, repair, code.now, code.then)


def repairable(title: str, evidence: str, repair: str, code: Code = NO_CODE) -> Finding:
    """Return a finding whose message is the evidence, and then what to change in the user's code."""
    return finding(title, f"{evidence}; {repair}", repair=repair, code=code)
