"""Norms by themselves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from parity.case.case import Pair
from parity.case.weight_map import shift
from parity.lab.zoo.hosts.case import UNQUANTIZED, host
from parity.lab.zoo.planting import construct

SIZES = (dict(batch=2, seq=32, width=128), dict(batch=2, seq=128, width=512))
# Standard deviation of embeddings in GPT-2 and Llama when training begins: what the first norm reads.
EMBEDDING_STD = 0.02


@host("layernorm", *SIZES, precisions=UNQUANTIZED)
def layernorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.LayerNorm(width),
        candidate=construct(te.LayerNorm, width),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width, mean=0.5),
    )


@host("rmsnorm", *SIZES, precisions=UNQUANTIZED)
def rmsnorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-5),
        candidate=construct(te.RMSNorm, width),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("rmsnorm_of_embeddings", *SIZES, precisions=UNQUANTIZED)
def rmsnorm_of_embeddings(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-6),
        candidate=construct(te.RMSNorm, width, eps=1e-6),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width, std=EMBEDDING_STD),
    )


@host("zero_centered_rmsnorm", *SIZES, precisions=UNQUANTIZED)
def zero_centered_rmsnorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-5),
        candidate=construct(te.RMSNorm, width, zero_centered_gamma=True),
        weights={shift("weight", -1.0): "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


HOSTS = (layernorm, rmsnorm, rmsnorm_of_embeddings, zero_centered_rmsnorm)
