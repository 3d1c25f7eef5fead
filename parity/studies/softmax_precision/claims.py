"""What the sources say about softmax in FP16 and FP32, next to what the study ``softmax_precision`` found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parity.report.numbers import short
from parity.studies.over_seeds import NO, YES, mean_digits, ratios, ratios_between
from parity.studies.softmax_precision.kernel_traffic import Traffic
from parity.studies.softmax_precision.study import Outcome, Run, Settings, error, of_seeds, scales_of
from parity.studies.tables import Claim

_GLM = "GLM-130B"
# FP32 improves on FP16 where its error is below this share of FP16's.
_NO_BETTER = 0.99


@dataclass(frozen=True)
class Measured:
    """Figures for FP16 that do not come from the record.

    Attributes:
        frontiers: the largest score that each way survives.
        traffic: what each way moves.
        scores: how many scores ``traffic`` is for.
        agreement: share of probabilities in which TE's softmax has the bits of ``FP32``.
        autocast: by device, what softmax returns under autocast, and what the next product takes.
        device: that bytes were counted on.
    """

    frontiers: Mapping[str, float]
    traffic: Mapping[str, Traffic]
    scores: int
    agreement: float
    autocast: Mapping[str, tuple[torch.dtype, torch.dtype]]
    device: str

    def bytes_a_score(self, way: str) -> float:
        """Read and written forward."""
        return self.traffic[way].forward / self.scores


def claims(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Iterator[Claim]:
    """Each claim with figures for FP16, which must have been run, in both layouts."""
    yield _overflow(found, settings, measured)
    yield _relaxed_range(found, settings, measured)
    yield _relaxed_precision(found, settings)
    yield _fp32_arithmetic(found, settings, measured)
    yield _cost(measured)
    yield _autocast(measured)


def worst_scale(found: Mapping[Run, Outcome], settings: Settings) -> int:
    """The scale at which PB-Relax moves most of a mixed head's probability in FP16."""
    return max(scales_of("mixed", settings), key=lambda scale: error(found, "fp16", "mixed", "PB-Relax", scale).moved)


def _overflow(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    largest = max(scales_of("mixed", settings))
    plain, subtracted = (error(found, "fp16", "apart", way, largest).spoiled for way in ("plain", "max subtracted"))
    return Claim(
        f"{_GLM}, README, after CogView",
        "scores of 1e4 and 1e-3 in different heads lead to frequent overflows or underflows under FP16 in softmax",
        f"at a standard deviation of 1e{largest}, {short(100 * plain)} % of rows are spoiled in plain FP16, which ends "
        f"at a score of {short(measured.frontiers['plain'])}; with the maximum subtracted {short(100 * subtracted)} %, "
        f"up to {short(measured.frontiers['max subtracted'])}",
        NO if plain == 0 else "only if no maximum is subtracted" if subtracted == 0 else YES,
        "exp(11.1) is past FP16's 65504. PyTorch's and TE's softmax subtract the maximum, and work in FP32; then only "
        "scores that are stored as infinity spoil a row. What underflows were probabilities below 3e-8",
    )


def _relaxed_range(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    largest = max(settings.scales)
    head, rows, usual = (
        error(found, "fp16", "apart", way, largest).spoiled for way in ("PB-Relax", "PB-Relax by rows", "torch.softmax")
    )
    return Claim(
        "CogView, arXiv 2105.13290, section 2.4",
        "PB-Relax keeps attention from overflowing",
        f"the largest score that survives in FP16: {short(measured.frontiers['PB-Relax'])}, without it "
        f"{short(measured.frontiers['torch.softmax'])}. At a standard deviation of 1e{largest} {short(100 * head)} % "
        f"of rows are spoiled, by rows {short(100 * rows)} %, without it {short(100 * usual)} %",
        {(True, True): "yes", (False, True): "with each row's own maximum"}.get((head == 0, rows == 0), "no"),
        f"scores are stored divided by alpha = {settings.alpha:g}. But a row whose largest score lies 65504 below the "
        "head's becomes minus infinity throughout when it is multiplied back, and softmax makes NaN of it",
    )


def _relaxed_precision(found: Mapping[Run, Outcome], settings: Settings) -> Claim:
    scale = worst_scale(found, settings)
    head, rows, usual = (
        _moved(found, "mixed", way, scale) for way in ("PB-Relax", "PB-Relax by rows", "torch.softmax")
    )
    harms = ratios_between(ratios(head, usual), 10.0, math.inf)
    return Claim(
        f"{_GLM}, arXiv 2210.02414, on training stability",
        "PB-Relax does not help avoid divergence",
        f"a head with rows of several scales, FP16, the rows of standard deviation 1e{scale}: PB-Relax puts "
        f"{_percent(head)} % of the probability on wrong keys, by rows {_percent(rows)} %, `torch.softmax` "
        f"{_percent(usual)} %",
        "consistent" if harms == YES else harms,
        "the maximum of the whole head moves every row far from 0, where FP16 has few bits left for it; multiplying "
        "back restores the size, not the bits. Heads of one scale, or each row's own maximum, do not suffer",
    )


def _fp32_arithmetic(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    scale = min(settings.scales, key=lambda scale: abs(scale - 2))
    fp16, fp32, scores = (_moved(found, "apart", way, scale) for way in ("torch.softmax", "FP32", "FP32 scores"))
    smaller = ratios_between(ratios(fp32, fp16), 0.0, _NO_BETTER)
    return Claim(
        f"{_GLM}, README and figure 21",
        "FP32 in softmax significantly improves stability: success",
        f"standard deviation 1e{scale}: `torch.softmax` in FP16 moves {mean_digits(fp16)} of the probability, in FP32 "
        f"{mean_digits(fp32)}, with scores never stored {mean_digits(scores)}. Largest score in FP32 "
        f"{short(measured.frontiers['FP32'])}, with their layer scaling "
        f"{short(measured.frontiers['FP32, layer scaling'])}. TE's kernel has FP32's bits in "
        f"{100 * measured.agreement:.4g} % of probabilities",
        "not by its arithmetic" if smaller == NO else smaller,
        "PyTorch's and TE's kernels for FP16 compute in FP32 anyway. What GLM-130B's FP32 adds is that scores, stored "
        "divided by the layer's number, are multiplied back where they cannot overflow",
    )


def _moved(found: Mapping[Run, Outcome], layout: str, way: str, scale: int) -> list[float]:
    return [errors.moved for errors in of_seeds(found, "fp16", layout, way, scale)]


def _percent(shares: Sequence[float]) -> str:
    return mean_digits([100 * share for share in shares])


def _cost(measured: Measured) -> Claim:
    usual, cast, relaxed, of_te = (
        measured.bytes_a_score(way) for way in ("torch.softmax", "FP32", "PB-Relax by rows", "TE")
    )
    return Claim(
        f"{_GLM}, README and figure 21",
        "FP32 hardly brings any speed loss; PB-Relax slows down, as it manipulates whole score matrices",
        f"bytes read and written a score, forward: `torch.softmax` {usual:.3g}, PB-Relax {relaxed:.3g}, FP32 by casts "
        f"on {measured.device} {cast:.3g}, TE's kernel {of_te:.3g}",
        "yes, in a fused kernel" if relaxed > usual == of_te else "no",
        "a kernel that reads 16 bits, works in FP32 and writes 16 bits moves what one in FP16 would; casts of their "
        "own are passes over the matrix, as PB-Relax's are (PyTorch's GPU kernel fuses the first of the two)",
    )


def _autocast(measured: Measured) -> Claim:
    told = "; ".join(
        f"on {device.upper()} softmax returns {_name(softmax)}, and the product with the values takes {_name(product)}"
        for device, (softmax, product) in measured.autocast.items()
    )
    return Claim(
        "PyTorch, `torch.amp`, operations that autocast to float32 on CUDA",
        "softmax runs in float32 under autocast",
        f"PyTorch, asked for FP16: {told}",
        "yes" if measured.autocast["cuda"] == (torch.float32, torch.float16) else "no",
        "each device has its own list. On a GPU the numbers are those of `FP32`, since the cast back is the product's, "
        "and the result takes twice the memory until then",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
