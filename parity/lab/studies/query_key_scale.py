"""Compare where to scale queries and keys: how large they may be before scores overflow, and what each way costs.

Queries, keys and values are drawn at a magnitude, rounded to FP16 or BF16, and attended to by each way of
computing scores and by TE's own backends. Golden is FP64 attention of the same rounded numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parity import te
from parity.case.case import Rng
from parity.lab import record
from parity.lab.campaign import Campaign, FourDigits
from parity.lab.studies import te_modules
from parity.lab.studies.settings import check_names
from parity.numerics import errors
from parity.te import Kernels
from parity.user_error import UserError

# Attention scores as a GEMM in FP16 or BF16 computes them, by where the scale is applied and what is rounded.
#
# ``softmax(scale Q K^T)`` is the same wherever the scale is applied, until numbers are rounded and overflow. Two
# choices matter: the placement of the scale, and what the product is kept in before the scale reaches it.


# Products that a tensor core adds before its sum is rounded to FP16: the depth of ``mma.m16n8k16`` (PTX ISA).
PRODUCTS_AT_ONCE = 16


@dataclass(frozen=True)
class Scaled:
    """Operands of the product, what is multiplied with it, and what softmax multiplies the scores with.

    Attributes:
        query: ``[heads, queries, head_dim]``.
        key: ``[heads, keys, head_dim]``.
        alpha: factor of the product.
        in_softmax: factor that softmax applies in FP32.
    """

    query: Tensor
    key: Tensor
    alpha: float
    in_softmax: float = 1.0


def _after(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query, key, scale)


def _query(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query * scale, key, 1.0)


def _both(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    root = math.sqrt(scale)
    return Scaled(query * root, key * root, 1.0)


def _layer(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    return Scaled(query, key, scale / layer, float(layer))


# Where the scale is applied: to the product; to the queries; its square root to both (Megatron-DeepSpeed, pull request
# 118); to the product, divided by the layer's number, which softmax multiplies back (Megatron-LM,
# ``apply_query_key_layer_scaling``).
PLACEMENTS: dict[str, Callable[[Tensor, Tensor, float, int], Scaled]] = {
    "after": _after,
    "query": _query,
    "both": _both,
    "layer": _layer,
}


def _fp32_product(scaled: Scaled) -> Tensor:
    """Sum and scale in FP32, and round once: cuBLAS with ``CUBLAS_COMPUTE_32F``, PyTorch's default."""
    product = scaled.query.float() @ scaled.key.float().mT
    return (product * scaled.alpha).to(scaled.query.dtype)


def _stored_product(scaled: Scaled) -> Tensor:
    """Sum in FP32, store, then scale by another kernel: ``q @ k.T / sqrt(d)``."""
    product = (scaled.query.float() @ scaled.key.float().mT).to(scaled.query.dtype)
    return product * scaled.alpha


def _half_product(scaled: Scaled) -> Tensor:
    """Sum and scale in the dtype: cuBLAS with ``CUBLAS_COMPUTE_16F``, which FP16 alone has."""
    dtype = scaled.query.dtype
    chunks = zip(
        scaled.query.float().split(PRODUCTS_AT_ONCE, -1), scaled.key.float().split(PRODUCTS_AT_ONCE, -1), strict=True
    )
    total = torch.zeros((), dtype=dtype, device=scaled.query.device)
    for query, key in chunks:
        total = (total.float() + query @ key.mT).to(dtype)
    return total * scaled.alpha


# What the product is kept in before the scale reaches it.
KEPT: dict[str, Callable[[Scaled], Tensor]] = {
    "fp32": _fp32_product,
    "stored": _stored_product,
    "half": _half_product,
}


def scores(query: Tensor, key: Tensor, placement: str, kept: str, layer: int) -> Tensor:
    """Return the scaled scores as softmax sees them.

    Args:
        query: ``[heads, queries, head_dim]``, FP16 or BF16.
        key: ``[heads, keys, head_dim]``, of the same dtype.
        placement: of ``PLACEMENTS``.
        kept: of ``KEPT``.
        layer: the layer's number, from 1.

    Returns:
        ``[heads, queries, keys]`` FP32; each is a number of the inputs' dtype, times ``layer`` with that placement.
    """
    scaled = PLACEMENTS[placement](query, key, 1 / math.sqrt(query.shape[-1]), layer)
    return KEPT[kept](scaled).float() * scaled.in_softmax


def overflows(scores: Tensor) -> bool:
    """Return whether softmax gives NaN: a score is plus infinity or NaN. Minus infinity is a probability of 0."""
    return bool((scores.isnan() | (scores == math.inf)).any())


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """Return ``softmax(scores) value``, softmax in FP32 as in TE and Megatron-LM; rounded to value's dtype."""
    probabilities = scores.softmax(-1).to(value.dtype)
    return (probabilities.float() @ value.float()).to(value.dtype)


RECORD = "query_key_scale.jsonl"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Ways that are computed here: where the scale is applied, and what the product is kept in until then.
WAYS = {
    "after, FP32": ("after", "fp32"),
    "after, stored": ("after", "stored"),
    "after, half": ("after", "half"),
    "query, FP32": ("query", "fp32"),
    "query, half": ("query", "half"),
    "both, FP32": ("both", "fp32"),
    "both, half": ("both", "half"),
    "layer, FP32": ("layer", "fp32"),
    "layer, stored": ("layer", "stored"),
}
TE_WAYS = ("TE unfused", "TE unfused, layer", "TE fused")
_STEPS_AN_OCTAVE = 16


def _normal(rng: Rng, heads: int, seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    return rng.normal(heads, seq, head_dim), rng.normal(heads, seq, head_dim)


def _aligned(rng: Rng, heads: int, seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    direction = rng.normal(heads, 1, head_dim, std=math.sqrt(0.8))
    first, second = (direction + rng.normal(heads, seq, head_dim, std=math.sqrt(0.2)) for _ in range(2))
    return first, second


# Queries and keys with a root mean square of 1: independent, as in a young model, and sharing a direction in each head,
# as heads learn to: then a score grows with the head's width, not with its root.
DISTRIBUTIONS: dict[str, Callable[[Rng, int, int, int], tuple[Tensor, Tensor]]] = {
    "normal": _normal,
    "aligned": _aligned,
}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        dtypes: names of ``DTYPES``.
        distributions: names of ``DISTRIBUTIONS``.
        head_dims: widths of a head, multiples of 8.
        magnitudes: base 2 logarithms of the root mean square of queries and keys, at which errors are measured.
        layer: the layer's number in query-key layer scaling.
        heads: a multiple of 4, which TE's fused softmax asks for.
        seq: queries and keys, a multiple of 16 from 32 on, which it asks for, too.
        seeds: how many, from 0.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    head_dims: tuple[int, ...] = (32, 64, 128, 256)
    magnitudes: tuple[int, ...] = tuple(range(-12, 9))
    layer: int = 16
    heads: int = 4
    seq: int = 128
    seeds: int = 3


FULL = Settings()
QUICK = Settings(head_dims=(64, 128), magnitudes=(-10, -6, -2, 0, 2, 4, 6), seq=64, seeds=1)


@dataclass(frozen=True)
class Run:
    """Queries, keys and values of one draw.

    Attributes:
        dtype: that they are rounded to.
        distribution: of queries and keys.
        head_dim: width of a head.
        seed: of the draw.
    """

    dtype: str
    distribution: str
    head_dim: int
    seed: int


class Errors(NamedTuple):
    """Hold what a way costs at one magnitude.

    Attributes:
        scores: relative L2 error of the scores; NaN if one overflows, and for TE, which does not show them.
        output: relative L2 error of attention's output; NaN if it is not finite.
    """

    scores: FourDigits
    output: FourDigits


@dataclass(frozen=True)
class Outcome:
    """Hold what a run gave.

    Attributes:
        frontiers: by way, the root mean square of queries and keys up to which softmax gets no infinity; ``inputs``
            is where the inputs themselves overflow.
        errors: by way and base 2 logarithm of the magnitude.
    """

    frontiers: Mapping[str, FourDigits]
    errors: Mapping[str, Mapping[int, Errors]]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Outcome], Settings, Kernels]:
    """Measure what the folder's record lacks.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a name that there is not, or a size that TE's kernels do not take.
    """
    _check(settings)
    kernels = te.kernels()
    campaign: Campaign[Run, Outcome] = Campaign(
        folder / RECORD,
        Outcome,
        functools.partial(_identity, settings=settings, kernels=kernels),
        record.code_of(__name__),
    )
    found = campaign.complete(runs(settings), lambda each: outcome_of(each, settings, kernels), "scaling")
    return found, settings, kernels


def runs(settings: Settings) -> Iterator[Run]:
    """Yield all draws."""
    for dtype in settings.dtypes:
        for distribution in settings.distributions:
            for head_dim in settings.head_dims:
                yield from (Run(dtype, distribution, head_dim, seed) for seed in range(settings.seeds))


def ways(dtype: str) -> tuple[str, ...]:
    """Return the ways that a dtype has: cuBLAS adds in FP16, not in BF16, and TE scales by layer in FP16 alone."""
    if dtype == "fp16":
        return (*WAYS, *TE_WAYS)
    ours = tuple(name for name, (_, kept) in WAYS.items() if kept != "half")
    return (*ours, *(name for name in TE_WAYS if "layer" not in name))


def nearest_to_one(settings: Settings) -> int:
    """Return the log2 of the magnitude at which scores of the ways are compared: 1, or what was run near it."""
    return min(settings.magnitudes, key=abs)


def frontier(found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int, way: str) -> float:
    """Return the frontier of a way, the geometric mean over seeds."""
    outcomes = _of(found, dtype, distribution, head_dim)
    return statistics.geometric_mean(outcome.frontiers[way] for outcome in outcomes)


def error(
    found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int, way: str, exponent: int
) -> Errors:
    """Return what a way costs at a magnitude: the root mean square over seeds; NaN if any is."""
    each = [outcome.errors[way][exponent] for outcome in _of(found, dtype, distribution, head_dim)]
    return Errors(
        scores=math.sqrt(statistics.fmean(cost.scores**2 for cost in each)),
        output=math.sqrt(statistics.fmean(cost.output**2 for cost in each)),
    )


def _of(found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int) -> list[Outcome]:
    wanted = (dtype, distribution, head_dim)
    return [outcome for each, outcome in found.items() if (each.dtype, each.distribution, each.head_dim) == wanted]


def outcome_of(each: Run, settings: Settings, kernels: Kernels) -> Outcome:
    """Measure frontiers and errors of one draw."""
    rng = Rng(each.seed)
    query, key = DISTRIBUTIONS[each.distribution](rng, settings.heads, settings.seq, each.head_dim)
    value = rng.normal(settings.heads, settings.seq, each.head_dim)
    draw = [tensor.to(kernels.device) for tensor in (query, key, value)]
    dtype = DTYPES[each.dtype]
    attentions = {name: _attention(name, settings.layer, kernels) for name in ways(each.dtype)}

    def fits(name: str, magnitude: float) -> bool:
        inputs = _at(draw, magnitude, dtype)
        if not all(bool(tensor.isfinite().all()) for tensor in inputs):
            return False
        return name == "inputs" or not attentions[name](*inputs).overflowed

    frontiers = {name: _frontier(functools.partial(fits, name)) for name in ("inputs", *attentions)}
    return Outcome(frontiers, _errors(draw, dtype, settings, attentions))


@dataclass(frozen=True)
class _Attended:
    """Hold what a way computes: scores (None for TE), output, and whether softmax gave NaN."""

    scores: Tensor | None
    output: Tensor
    overflowed: bool


_Attention = Callable[[Tensor, Tensor, Tensor], _Attended]


def _attention(name: str, layer: int, kernels: Kernels) -> _Attention:
    def ours(query: Tensor, key: Tensor, value: Tensor) -> _Attended:
        found = scores(query, key, *WAYS[name], layer)
        return _Attended(found, attend(found, value), overflows(found))

    def of_te(query: Tensor, key: Tensor, value: Tensor) -> _Attended:
        backend: te_modules.Backend = "fused" if name == "TE fused" else "unfused"
        output = te_modules.attend(kernels, backend, query, key, value, layer if "layer" in name else 0)
        return _Attended(None, output, not bool(output.isfinite().all()))

    return of_te if name in TE_WAYS else ours


def _at(draw: list[Tensor], magnitude: float, dtype: torch.dtype) -> list[Tensor]:
    query, key, value = draw
    return [(query.double() * magnitude).to(dtype), (key.double() * magnitude).to(dtype), value.to(dtype)]


def _frontier(fits: Callable[[float], bool]) -> float:
    """Return the largest magnitude that fits, between 2^-8 and 2^128, to a sixteenth of an octave."""
    low, high = -8 * _STEPS_AN_OCTAVE, 128 * _STEPS_AN_OCTAVE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(2.0 ** (middle / _STEPS_AN_OCTAVE)) else (low, middle)
    return float(2.0 ** (low / _STEPS_AN_OCTAVE))


def _errors(
    draw: list[Tensor], dtype: torch.dtype, settings: Settings, attentions: Mapping[str, _Attention]
) -> dict[str, dict[int, Errors]]:
    found: dict[str, dict[int, Errors]] = {name: {} for name in attentions}
    for exponent in settings.magnitudes:
        inputs = _at(draw, 2.0**exponent, dtype)
        query, key, value = (tensor.double() for tensor in inputs)
        golden_scores = query @ key.mT / math.sqrt(query.shape[-1])
        golden = golden_scores.softmax(-1) @ value
        for name, attention in attentions.items():
            attended = attention(*inputs)
            found[name][exponent] = _measured(attended, golden_scores, golden)
    return found


def _measured(attended: _Attended, golden_scores: Tensor, golden: Tensor) -> Errors:
    output = math.nan if attended.overflowed else _relative(attended.output, golden)
    if attended.scores is None or not bool(attended.scores.isfinite().all()):
        return Errors(math.nan, output)
    return Errors(_relative(attended.scores, golden_scores), output)


def _relative(computed: Tensor, golden: Tensor) -> float:
    error = computed.double() - golden
    return errors.relative_l2(error.norm().item(), golden.norm().item())


def _identity(each: Run, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    start = record.fingerprint(DISTRIBUTIONS[each.distribution](Rng(each.seed), 1, 8, each.head_dim))
    chosen = {name: value for name, value in vars(settings).items() if name in ("magnitudes", "layer", "heads", "seq")}
    on = {"kernels": kernels.backend, "te": te.version(), "start": start}
    return dataclasses.asdict(each) | chosen | {"magnitudes": list(settings.magnitudes)} | on


def _check(settings: Settings) -> None:
    check_names("dtypes", settings.dtypes, DTYPES)
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    for head_dim in settings.head_dims:
        if head_dim < 8 or head_dim % 8:
            raise UserError(f"head_dims: TE's attention takes multiples of 8, not {head_dim}")
    if settings.heads % 4 or settings.seq < 32 or settings.seq % 16:
        raise UserError(
            f"heads={settings.heads}, seq={settings.seq}: TE's fused softmax takes a multiple of 4 heads, and a "
            "multiple of 16 queries from 32 on"
        )
