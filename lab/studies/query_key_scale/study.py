"""Compare ways to scale queries and keys: how large these may be before scores overflow, and the error of each way.

Queries, keys and values of a given magnitude are rounded to FP16 or BF16. Attention then runs with each way of
computing scores, and on TE's own backends. Golden is FP64 attention of the same rounded numbers.
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
from matplotlib.figure import Figure
from torch import Tensor

from lab.studies import reporting, te_modules
from lab.studies.reporting import Claim
from lab.studies.settings import check_names
from parity import te
from parity.case.case import Rng
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits
from parity.numerics import errors
from parity.report.numbers import ratio, short
from parity.te import Kernels
from parity.user_error import UserError

# Attention scores as a GEMM in FP16 or BF16 computes them.
#
# In exact arithmetic, ``softmax(scale Q K^T)`` does not depend on where the scale is applied. With rounding and
# overflow, two choices matter: the placement of the scale, and the format that holds the product until it is scaled.


# The number of products that a tensor core adds before it rounds to FP16: the depth of ``mma.m16n8k16`` (PTX ISA).
PRODUCTS_AT_ONCE = 16


@dataclass(frozen=True)
class Scaled:
    """Operands of the product, its factor, and the factor that softmax applies.

    Attributes:
        query: ``[heads, queries, head_dim]``.
        key: ``[heads, keys, head_dim]``.
        alpha: the factor of the product.
        in_softmax: the factor that softmax applies in FP32.
    """

    query: Tensor
    key: Tensor
    alpha: float
    in_softmax: float = 1.0


def _both(query: Tensor, key: Tensor, scale: float, layer: int) -> Scaled:
    root = math.sqrt(scale)
    return Scaled(query * root, key * root, 1.0)


# Where the scale is applied: "after" to the product; "query" to the queries; "both" as its square root to queries and
# keys (Megatron-DeepSpeed, pull request 118); "layer" to the product, divided by the layer's number, which softmax
# multiplies back (Megatron-LM, ``apply_query_key_layer_scaling``).
PLACEMENTS: dict[str, Callable[[Tensor, Tensor, float, int], Scaled]] = {
    "after": lambda query, key, scale, layer: Scaled(query, key, scale),
    "query": lambda query, key, scale, layer: Scaled(query * scale, key, 1.0),
    "both": _both,
    "layer": lambda query, key, scale, layer: Scaled(query, key, scale / layer, float(layer)),
}


def _fp32_product(scaled: Scaled) -> Tensor:
    """Sum and scale in FP32, and round once, like cuBLAS with ``CUBLAS_COMPUTE_32F``, PyTorch's default."""
    product = scaled.query.float() @ scaled.key.float().mT
    return (product * scaled.alpha).to(scaled.query.dtype)


def _stored_product(scaled: Scaled) -> Tensor:
    """Sum in FP32, store the product, and scale it in another kernel, as ``q @ k.T / sqrt(d)`` does."""
    product = (scaled.query.float() @ scaled.key.float().mT).to(scaled.query.dtype)
    return product * scaled.alpha


def _half_product(scaled: Scaled) -> Tensor:
    """Sum and scale in the dtype, like cuBLAS with ``CUBLAS_COMPUTE_16F``, which exists only for FP16."""
    dtype = scaled.query.dtype
    chunks = zip(
        scaled.query.float().split(PRODUCTS_AT_ONCE, -1), scaled.key.float().split(PRODUCTS_AT_ONCE, -1), strict=True
    )
    total = torch.zeros((), dtype=dtype, device=scaled.query.device)
    for query, key in chunks:
        total = (total.float() + query @ key.mT).to(dtype)
    return total * scaled.alpha


# The format that holds the product until it is scaled.
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
        placement: a name in ``PLACEMENTS``.
        kept: a name in ``KEPT``.
        layer: the layer's number, from 1.

    Returns:
        ``[heads, queries, keys]`` FP32. Each is exact in the inputs' dtype, before the placement "layer" multiplies it.
    """
    scaled = PLACEMENTS[placement](query, key, 1 / math.sqrt(query.shape[-1]), layer)
    return KEPT[kept](scaled).float() * scaled.in_softmax


def overflows(scores: Tensor) -> bool:
    """Return whether softmax gives NaN, because a score is plus infinity or NaN. Minus infinity only gives 0."""
    return bool((scores.isnan() | (scores == math.inf)).any())


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """Return ``softmax(scores) value`` in value's dtype. Softmax is in FP32, as in TE and Megatron-LM."""
    probabilities = scores.softmax(-1).to(value.dtype)
    return (probabilities.float() @ value.float()).to(value.dtype)


RECORD = "query_key_scale.jsonl"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Ways that this module computes: names in ``PLACEMENTS`` and ``KEPT``.
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


# Queries and keys with a root mean square of 1. They are independent, as in an untrained model, or share a direction in
# each head, as heads learn to. With a shared direction, scores grow with the head's width instead of its square root.
DISTRIBUTIONS: dict[str, Callable[[Rng, int, int, int], tuple[Tensor, Tensor]]] = {
    "normal": _normal,
    "aligned": _aligned,
}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        dtypes: names in ``DTYPES``.
        distributions: names in ``DISTRIBUTIONS``.
        head_dims: widths of a head, multiples of 8.
        magnitudes: base 2 logarithms of the root mean square of queries and keys at which errors are measured.
        layer: the layer's number in query-key layer scaling.
        heads: number of heads; TE's fused softmax requires a multiple of 4.
        seq: number of queries and of keys; TE's fused softmax requires a multiple of 16, at least 32.
        seeds: how many seeds to run, starting at 0.
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
        dtype: the dtype that they are rounded to.
        distribution: the distribution of queries and keys.
        head_dim: width of a head.
        seed: the seed of the draw.
    """

    dtype: str
    distribution: str
    head_dim: int
    seed: int


class Errors(NamedTuple):
    """Hold the errors of one way at one magnitude.

    Attributes:
        scores: relative L2 error of the scores; NaN if one overflows, and for TE, which does not expose them.
        output: relative L2 error of attention's output; NaN if the output is not finite.
    """

    scores: FourDigits
    output: FourDigits


@dataclass(frozen=True)
class Outcome:
    """Hold the results of a run.

    Attributes:
        frontiers: by way, the largest root mean square of queries and keys at which no score overflows. ``inputs`` is
            the largest at which the inputs themselves do not overflow.
        errors: errors by way and base 2 logarithm of the magnitude.
    """

    frontiers: Mapping[str, FourDigits]
    errors: Mapping[str, Mapping[int, Errors]]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Outcome], Settings, Kernels]:
    """Measure what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a name is unknown, or TE's kernels do not support a size.
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
    """Return the ways that exist for a dtype. Only FP16 has cuBLAS's 16-bit sums and TE's layer scaling."""
    if dtype == "fp16":
        return (*WAYS, *TE_WAYS)
    ours = tuple(name for name, (_, kept) in WAYS.items() if kept != "half")
    return (*ours, *(name for name in TE_WAYS if "layer" not in name))


def nearest_to_one(settings: Settings) -> int:
    """Return the log2 of the magnitude at which the ways' scores are compared, the one nearest to 1."""
    return min(settings.magnitudes, key=abs)


def frontier(found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int, way: str) -> float:
    """Return a way's frontier as the geometric mean over seeds."""
    outcomes = _of(found, dtype, distribution, head_dim)
    return statistics.geometric_mean(outcome.frontiers[way] for outcome in outcomes)


def error(
    found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int, way: str, exponent: int
) -> Errors:
    """Return a way's errors at a magnitude as the root mean square over seeds, NaN if any seed's is."""
    each = [outcome.errors[way][exponent] for outcome in _of(found, dtype, distribution, head_dim)]
    return Errors(
        scores=math.sqrt(statistics.fmean(cost.scores**2 for cost in each)),
        output=math.sqrt(statistics.fmean(cost.output**2 for cost in each)),
    )


def _of(found: Mapping[Run, Outcome], dtype: str, distribution: str, head_dim: int) -> list[Outcome]:
    wanted = (dtype, distribution, head_dim)
    return [outcome for each, outcome in found.items() if (each.dtype, each.distribution, each.head_dim) == wanted]


def outcome_of(each: Run, settings: Settings, kernels: Kernels) -> Outcome:
    """Measure the frontiers and errors of one draw."""
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
    """Hold the results of one way: scores (None for TE), output, and whether softmax gave NaN."""

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
    """Return the largest magnitude between 2^-8 and 2^128 that fits, to a sixteenth of an octave."""
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


# Published claims about scaling queries and keys, next to this study's results.


_PULL_REQUEST = "Megatron-DeepSpeed (BigScience), pull request 118"
_SAME = 1.05  # draws differ by this factor
# Frontiers are found to a sixteenth of an octave, so equal ones may differ by this factor.
_RESOLUTION = 2.0 ** (1 / 16)


def claims(found: Mapping[Run, Outcome], settings: Settings, head_dim: int) -> Iterator[Claim]:
    """Yield each claim, tested on the first distribution that was run.

    Args:
        found: the results of all runs.
        settings: the study's settings.
        head_dim: the head's width at which frontiers are compared.
    """
    distribution = settings.distributions[0]
    at = f"{distribution}, d = {head_dim}"
    if "fp16" in settings.dtypes:
        edge = {
            way: frontier(found, "fp16", distribution, head_dim, way)
            for way in (
                "inputs",
                "after, FP32",
                "after, stored",
                "after, half",
                "both, FP32",
                "layer, FP32",
                "TE unfused",
            )
        }
        yield _alpha_overflows(edge, at)
        yield _the_fix_changed_nothing(edge, at)
        yield _layer_scaling(edge, settings.layer, at)
        yield _same_on_paper(found, settings, distribution)
        if "bf16" in settings.dtypes:
            yield _fp16_overflows_and_bf16_does_not(found, settings, edge, head_dim)


def _alpha_overflows(edge: Mapping[str, float], at: str) -> Claim:
    in_fp32 = edge["both, FP32"] / edge["after, FP32"] > _RESOLUTION
    stored = edge["both, FP32"] / edge["after, stored"] > _RESOLUTION
    return Claim(
        _PULL_REQUEST,
        "cuBLAS multiplies alpha after the product, so scores can blow up where scaled operands would not",
        f"FP16, {at}: largest RMS {short(edge['after, FP32'])} with alpha in FP32, {short(edge['after, stored'])} with "
        f"the product stored in FP16, {short(edge['after, half'])} with sums in FP16, {short(edge['both, FP32'])} with "
        f"both scaled by the root, {short(edge['TE unfused'])} in TE's unfused attention",
        {(False, True): "only if the product is kept in FP16", (True, True): "yes"}.get((in_fp32, stored), "no"),
        "unless cuBLAS is told to compute in FP16, it keeps product and alpha in FP32, and rounds afterwards",
    )


def _the_fix_changed_nothing(edge: Mapping[str, float], at: str) -> Claim:
    gain = edge["both, FP32"] / edge["after, FP32"]
    return Claim(
        "BigScience's chronicle of the 104B model, experiment 3",
        "with both scaled by the root, training failed as it had before",
        f"FP16, {at}: the root gains a factor {short(gain)} in range over alpha in FP32",
        "consistent" if gain < _RESOLUTION else "no",
        "what they replaced, `baddbmm`, computes alpha in FP32; by experiment 6 the MLP's width had proved wrong",
    )


def _layer_scaling(edge: Mapping[str, float], layer: int, at: str) -> Claim:
    gain = edge["layer, FP32"] / edge["after, FP32"]
    return Claim(
        "Megatron-LM, `--apply-query-key-layer-scaling`",
        "scale Q Kᵀ by 1 / layer number: useful for FP16 training",
        f"FP16, {at}, layer {layer}: range {short(gain)} times as large",
        "yes" if gain > _RESOLUTION else "no",
        f"stored scores are {layer} times smaller, and they grow with the square of the RMS: √{layer} = "
        f"{short(layer**0.5)}. TE does it in its unfused backend, in FP16 alone",
    )


def _same_on_paper(found: Mapping[Run, Outcome], settings: Settings, distribution: str) -> Claim:
    ratios = {}
    for head_dim in settings.head_dims:
        both, after = (
            error(found, "fp16", distribution, head_dim, way, nearest_to_one(settings)).scores
            for way in ("both, FP32", "after, FP32")
        )
        ratios[head_dim] = both / after if after else math.nan
    return Claim(
        _PULL_REQUEST,
        "n (A · B) is (√n A) · (√n B)",
        f"FP16, {distribution}, relative error of the scores, the root's over alpha's: "
        + ", ".join(f"{short(each)} at d = {head_dim}" for head_dim, each in ratios.items()),
        "yes" if max(ratios.values()) < _SAME else "on paper",
        "both operands are rounded once more, unless the root of the scale is a power of two (d = 16, 256)",
    )


def _fp16_overflows_and_bf16_does_not(
    found: Mapping[Run, Outcome], settings: Settings, edge: Mapping[str, float], head_dim: int
) -> Claim:
    distribution = settings.distributions[0]
    bf16 = frontier(found, "bf16", distribution, head_dim, "after, stored")
    coarse, fine = (
        error(found, dtype, distribution, head_dim, "after, FP32", nearest_to_one(settings)).scores
        for dtype in ("bf16", "fp16")
    )
    return Claim(
        "GLM-130B, arXiv 2210.02414, on training stability",
        "attention scores exceed FP16's range as models grow; BLOOM used BF16 for its range",
        f"{distribution}, d = {head_dim}: with a stored product FP16 overflows at an RMS of "
        f"{short(edge['after, stored'])}, its inputs at {short(edge['inputs'])}; BF16 at {short(bf16)}",
        "yes" if edge["after, stored"] * 10 < edge["inputs"] < bf16 else "no",
        "a score is a sum of d products of two inputs, so it leaves the range with their square. The price of BF16: "
        f"scores {ratio(coarse, fine)} times as coarse",
    )


_MEANS = {
    "after, FP32": "the product is scaled in FP32, then rounded (`baddbmm`'s alpha in cuBLAS, PyTorch's default)",
    "after, stored": "the product is rounded and stored, then another kernel scales it (`q @ k.T / sqrt(d)`)",
    "after, half": "the product is added up in FP16 and scaled in FP16 (cuBLAS's 16F compute type)",
    "query, FP32": "queries are scaled and rounded before the product",
    "query, half": "queries are scaled and rounded before the product, which is added up in FP16",
    "both, FP32": "queries and keys are scaled by the root and rounded before the product",
    "both, half": "queries and keys are scaled by the root and rounded before the product, which is added up in FP16",
    "layer, FP32": "as `after, FP32`, the scale divided by the layer's number, which softmax multiplies back in FP32",
    "layer, stored": "as `after, stored`, with the layer's number as in `layer, FP32`",
    "TE unfused": "`DotProductAttention` with `NVTE_UNFUSED_ATTN`: GEMM, softmax, GEMM",
    "TE unfused, layer": "as `TE unfused`, with `NVTE_APPLY_QK_LAYER_SCALING=1`, which TE obeys in FP16",
    "TE fused": "`DotProductAttention` with `NVTE_FUSED_ATTN`: scores stay in FP32 and are never stored",
}
_LOWEST_SHOWN = 1e-5
_LINES: dict[str, dict[str, Any]] = {
    "after, FP32": {"color": "tab:blue", "marker": "o"},
    "after, stored": {"color": "tab:red", "marker": "s"},
    "after, half": {"color": "tab:red", "marker": "x", "linestyle": ":"},
    "query, FP32": {"color": "tab:cyan", "marker": "v", "linestyle": "--"},
    "both, FP32": {"color": "tab:green", "marker": "^", "linestyle": "-."},
    "layer, FP32": {"color": "tab:purple", "marker": "D"},
    "TE unfused": {"color": "black", "marker": "+", "linestyle": ":"},
    "TE fused": {"color": "tab:orange", "marker": "P"},
}

_INTRODUCTION = """\
Attention multiplies each query with each key, and scales the product by 1/√d, d being the width of a head, before
softmax. On paper it does not matter where the scale goes. In a computer it can: FP16 ends at 65504, and a product that
overflows on its way is infinite whatever it is scaled by afterwards; softmax makes NaN of it. This study asks how large
queries and keys may be, and what each way costs in accuracy. Queries and keys have a root mean square (RMS) that is
varied: `normal` ones are independent, as in a young model, and a score grows as √d; `aligned` ones share a direction in
each head, as heads learn to, and a score grows as d."""

_ROUNDING = """\
Scores in FP16 have 11 significant bits, in BF16 8. What moves a probability is the absolute error of its score: at a
score of 1000, half a unit in the last place is 0.25 in FP16, a factor of 1.3, and 2 in BF16, a factor of 7. So the
error of attention grows with the magnitude of queries and keys in every way that stores scores, until softmax picks one
key; then what is left are the queries for which it picks a wrong one, and chance decides between the ways. TE's fused
backend keeps scores in FP32. Below, the relative L2 error of attention's output at d = {head_dim}; `∞`: softmax gave
NaN."""

_SCALE = """\
The scale itself costs a rounding where it is not a power of two: 1/√d is one at d = 64 and 256, its root at d = 16 and
256. At tiny magnitudes FP16 has another end: scores below 6e-5 lose bits, and layer scaling makes them {layer} times
smaller. That is harmless: probabilities of such scores are all the same."""


_MEANING = """\
- What decides is what the product is kept in when the scale reaches it. In FP32, as PyTorch's `baddbmm` and TE's GEMMs
  keep it, scaling after the product overflows no sooner than scaling before, and rounds once less.
- Written as `q @ k.transpose(-1, -2) / math.sqrt(d)`, the product is stored in FP16 first. There, scale queries before.
  Scaling both by the root buys no more range, and rounds twice.
- Layer scaling moves the frontier by the root of the layer's number, at no cost in accuracy where that number is a
  power of two. It works only together with a product in FP32.
- BF16 does not overflow, but its scores are eight times as coarse. Where scores are in the hundreds, both 16-bit
  formats move attention visibly; a backend that keeps scores in FP32 (TE's fused and flash attention) does not."""


def write(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``query_key_scale.md`` and ``.png`` into the folder, and return the report's path."""
    _plot(found, settings).savefig(folder / "query_key_scale.png", dpi=100)
    return reporting.written(folder / "query_key_scale.md", _sections(found, settings, kernels))


def typical_head_dim(settings: Settings) -> int:
    """Return the head's width for the report's comparisons: 128 if it was run, else the largest."""
    return 128 if 128 in settings.head_dims else max(settings.head_dims)


def _sections(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels) -> Iterator[str]:
    head_dim = typical_head_dim(settings)
    yield "# Where to scale queries and keys"
    yield _INTRODUCTION
    yield (
        f"{reporting.made_on(kernels)} {settings.heads} heads, {settings.seq} queries and keys, no mask; layer "
        f"{settings.layer} in layer scaling; {settings.seeds} draws. Golden is FP64 attention of the same rounded "
        "inputs. TE's unfused backend multiplies by PyTorch's own `baddbmm`, on the CPU by the CPU's. A GPU may split "
        "a long sum and store its parts in FP16 (`allow_fp16_reduced_precision_reduction`); that is not modelled, and "
        "no head here is that wide."
    )
    yield reporting.texts([[f"`{name}`", meaning] for name, meaning in _MEANS.items()], ["way", "what it does"])
    yield "![Overflow frontiers and errors](query_key_scale.png)"
    yield "## How large queries and keys may be"
    yield (
        "The largest RMS of queries and keys at which no score overflows; `inputs` is the largest at which the inputs "
        "themselves do not."
    )
    for dtype in settings.dtypes:
        yield f"### {dtype.upper()}"
        yield _frontiers(found, settings, dtype)
    yield "## What each way costs"
    yield _ROUNDING.format(head_dim=head_dim)
    for dtype in settings.dtypes:
        for distribution in settings.distributions:
            yield f"### {dtype.upper()}, {distribution}"
            yield _error_table(found, settings, dtype, distribution, head_dim)
    yield "## Relative error of the scores"
    yield _SCALE.format(layer=settings.layer)
    yield _score_errors(found, settings)
    yield "## Claims"
    yield reporting.claims(claims(found, settings, head_dim))
    yield "## What it means"
    yield _MEANING


def _frontiers(found: Mapping[Run, Outcome], settings: Settings, dtype: str) -> str:
    columns = [(distribution, head_dim) for distribution in settings.distributions for head_dim in settings.head_dims]
    rows = [
        [f"`{way}`", *(short(frontier(found, dtype, *column, way)) for column in columns)]
        for way in (*ways(dtype), "inputs")
    ]
    return reporting.numbers(rows, ["way", *(f"{distribution}, d = {head_dim}" for distribution, head_dim in columns)])


def _error_table(found: Mapping[Run, Outcome], settings: Settings, dtype: str, distribution: str, head_dim: int) -> str:
    shown = [exponent for exponent in settings.magnitudes if exponent % 2 == 0 and exponent >= -4]
    shown = shown or list(settings.magnitudes)
    rows = []
    for way in ways(dtype):
        errors_of_way = (error(found, dtype, distribution, head_dim, way, each).output for each in shown)
        rows.append([f"`{way}`", *("∞" if math.isnan(each) else short(each) for each in errors_of_way)])
    return reporting.numbers(rows, ["way", *(f"RMS {2.0**exponent:g}" for exponent in shown)])


def _score_errors(found: Mapping[Run, Outcome], settings: Settings) -> str:
    distribution, at = settings.distributions[0], nearest_to_one(settings)
    rows = []
    for dtype in settings.dtypes:
        base = "after, FP32"
        for way in (way for way in ways(dtype) if not way.startswith("TE")):
            cells = [dtype.upper(), f"`{way}`"]
            for head_dim in settings.head_dims:
                of_way, of_base = (error(found, dtype, distribution, head_dim, name, at).scores for name in (way, base))
                cells.append(f"{short(of_way)} ({ratio(of_way, of_base)})")
            rows.append(cells)
    headers = ["dtype", "way", *(f"d = {head_dim}" for head_dim in settings.head_dims)]
    table = reporting.numbers(rows, headers)
    return (
        f"Relative L2, {distribution} at an RMS of {2.0**at:g}; in brackets as a multiple of `after, FP32`.\n\n{table}"
    )


def _plot(found: Mapping[Run, Outcome], settings: Settings) -> Figure:
    dtypes, distributions = settings.dtypes, settings.distributions
    figure = Figure(figsize=(4.4 * len(distributions) + 1.5, 3.4 * (1 + len(dtypes))), layout="constrained")
    axes = figure.subplots(1 + len(dtypes), len(distributions), squeeze=False)
    for column, distribution in enumerate(distributions):
        top = axes[0][column]
        for way in (way for way in _LINES if way in ways(dtypes[0])):
            values = [frontier(found, dtypes[0], distribution, each, way) for each in settings.head_dims]
            top.loglog(settings.head_dims, values, label=way, **_LINES[way])
        top.set(title=f"{dtypes[0].upper()}, {distribution}", xlabel="width of a head", ylabel="largest RMS that fits")
        top.set_xticks(settings.head_dims, labels=map(str, settings.head_dims), minor=False)
        top.set_xticks([], minor=True)
        for row, dtype in enumerate(dtypes, start=1):
            _plot_errors(axes[row][column], found, settings, dtype, distribution)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _plot_errors(axis: Any, found: Mapping[Run, Outcome], settings: Settings, dtype: str, distribution: str) -> None:
    head_dim = typical_head_dim(settings)
    magnitudes = [2.0**exponent for exponent in settings.magnitudes]
    for way in (way for way in _LINES if way in ways(dtype)):
        values = [error(found, dtype, distribution, head_dim, way, each).output for each in settings.magnitudes]
        axis.loglog(magnitudes, values, label=way, markersize=4, **_LINES[way])
    axis.set(
        title=f"{dtype.upper()}, {distribution}, d = {head_dim}",
        xlabel="RMS of queries and keys",
        ylabel="relative L2 error of the output",
    )
    axis.set_ylim(bottom=_LOWEST_SHOWN)
    axis.grid(True, alpha=0.3)
