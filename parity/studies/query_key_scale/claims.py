"""What the sources say about scaling queries and keys, next to what the study ``query_key_scale`` found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from parity.report.numbers import ratio, short
from parity.studies.query_key_scale.study import Outcome, Run, Settings, error, frontier, nearest_to_one
from parity.studies.tables import Claim

_PULL_REQUEST = "Megatron-DeepSpeed (BigScience), pull request 118"
_SAME = 1.05  # draws differ by as much
# Frontiers are found to a sixteenth of an octave, so two that are equal may differ by that.
_RESOLUTION = 2.0 ** (1 / 16)


def claims(found: Mapping[Run, Outcome], settings: Settings, head_dim: int) -> Iterator[Claim]:
    """Each claim with figures for the first distribution that was run.

    Args:
        found: outcomes of the study.
        settings: of the study.
        head_dim: the width of a head at which frontiers are compared.
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
