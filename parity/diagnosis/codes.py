"""The code of every finding by its title; ``docs/findings.md`` has a section for each.

``PAR0xx`` are about values that cannot be judged, ``PAR1xx`` about weights, ``PAR2xx`` about the computed function,
``PAR3xx`` about precision, ``PAR4xx`` about gradients, ``PAR5xx`` say where an error is that nothing explains.
"""

from __future__ import annotations

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
    "weight-not-copied": "PAR106",
    "gate-up-interleaved": "PAR107",
    "heads-transposed": "PAR108",
    "heads-permuted": "PAR109",
    "gqa-head-order": "PAR110",
    "experts-permuted": "PAR111",
    "norm-eps": "PAR201",
    "activation": "PAR202",
    "norm-statistics": "PAR203",
    "norm-rounding": "PAR204",
    "norm-kind": "PAR205",
    "norm-missing": "PAR206",
    "norm-order": "PAR207",
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
    "sequence-first": "PAR251",
    "dropout": "PAR252",
    "not-reproducible": "PAR253",
    "output-scale": "PAR254",
    "loss-scale": "PAR255",
    "factor": "PAR256",
    "embedding-position": "PAR257",
    "embedding-missing": "PAR258",
    "operation": "PAR259",
    "routing-weights": "PAR261",
    "top-k": "PAR262",
    "tf32": "PAR301",
    "accumulation-precision": "PAR302",
    "fp8-format": "PAR303",
    "fp8-scale-stale": "PAR304",
    "fp8-gradient-scale": "PAR304",
    "fp8-margin": "PAR305",
    "fp8-scale-inverted": "PAR306",
    "weight-cache-stale": "PAR307",
    "recipe-disabled": "PAR308",
    "master-weights": "PAR309",
    "gradient-scale": "PAR401",
    "gradient-accumulation": "PAR402",
    "gradient-path-missing": "PAR403",
    "embeddings-not-tied": "PAR403",
    "unexplained": "PAR501",
    "first-divergence": "PAR502",
}

UNEXPLAINED = frozenset((CODES["unexplained"], CODES["first-divergence"]))
"""Codes of findings that name no cause."""


def finding(title: str, message: str) -> Finding:
    """A finding of this title, a key of ``CODES``."""
    return Finding(CODES[title], title, message)
