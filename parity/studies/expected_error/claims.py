"""What others say about the errors of TE's modules, next to what the study ``expected_error`` found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from parity.report.numbers import short
from parity.studies.expected_error.issue_407 import AFTER_REPAIR, FIGURE, LINEARS, Drawn
from parity.studies.expected_error.study import TE, Results, Settings, base, seeds_of
from parity.studies.over_seeds import CANNOT_TELL, NO, YES, mean_digits, placed, ratios_between
from parity.studies.tables import Claim

# A figure is of one distribution and not of another if it is so many times likelier there.
_CLEARLY = 20.0
# It is not of a distribution of which a draw lies so far out, or is so small, with less than this chance.
_HARDLY_EVER = 0.01
_AS_THEORY = 1.15

# Significand bits, with the leading one, of both operands or of the result: whichever rounding is the coarser.
_OPERAND_BITS = {"fp32": 11, "fp8_delayed": 4, "fp8_current": 4, "fp8_block": 4, "mxfp8": 4}
_RESULT_BITS = {"bf16": 8, "fp16": 11}
# atol of tests/pytorch/test_numerics.py, TE 2.20.
_TE_TOLERANCES = (
    ("layernorm_mlp_swiglu", "LayerNormMLP", {"fp32": 2e-2, "bf16": 5e-2}),
    ("transformer_layer_gpt", "TransformerLayer", {"fp32": 5e-3, "bf16": 1e-1}),
)


def claims(found: Results, drawn: Sequence[Drawn], settings: Settings) -> Iterator[Claim]:
    """Those that the settings have measured."""
    if "fp32" in settings.precisions:
        yield from _issue_407(drawn)
    if "linear" in settings.modules:
        yield from _quantization_noise(found, settings)
    yield from _tolerances(found, settings)


def _issue_407(drawn: Sequence[Drawn]) -> Iterator[Claim]:
    right, swapped = [each.faithful for each in drawn], [each.swapped for each in drawn]
    yield Claim(
        source="TransformerEngine issue 407: SwiGLU MLP and LayerNormMLP in FP32",
        claimed=f"their outputs' sums differ by {FIGURE}; by rounding, this project says",
        found=_found(FIGURE, right, swapped, "the right port", "with gate and up exchanged"),
        agrees=explained(FIGURE, right, swapped),
        why=f"TE computes FP32 GEMMs in TF32, which moves the sum by {_spread(right)} (mean and standard deviation of "
        f"{len(drawn)} draws of weights and input)",
    )
    yield Claim(
        source="ibid.: after an attempt at a repair",
        claimed=f"{AFTER_REPAIR}; by gate and up exchanged, this project says",
        found=_found(AFTER_REPAIR, swapped, right, "the exchanged port", "of the right one"),
        agrees=explained(AFTER_REPAIR, swapped, right),
        why=f"exchanging the two moves it by {_spread(swapped)}, and in {_as_near(AFTER_REPAIR, swapped)} of draws "
        "by no more than this; another mistake may do so as well",
    )
    for name in LINEARS:
        share = sum(each.allclose[name] for each in drawn) / len(drawn)
        yield Claim(
            source=f"ibid.: {name}",
            claimed="Linear is precisely accurate: `torch.allclose` is True",
            found=f"True in {100 * share:.0f} % of {len(drawn)} draws",
            agrees=NO if share < 0.05 else YES if share > 0.5 else CANNOT_TELL,
            why="TF32 keeps 11 bits, and `allclose` wants 17. For FP32 cuBLAS may, and need not, take TF32 "
            "(`CUBLAS_COMPUTE_32F_FAST_TF32`, cublaslt_gemm.cu of TE 2.20): whether it does for so few outputs as the "
            "reporter's, only a GPU shows",
        )


def explained(figure: float, by: Sequence[float], other: Sequence[float]) -> str:
    """Say whether a figure is from the one distribution, and not from the other, of which these are draws.

    Returns:
        Yes where it is ``_CLEARLY`` times likelier from the one; no where that is so of the other, or where the one
        hardly ever reaches it or is as small; else that the draws cannot tell.
    """
    if min(len(by), len(other)) < 2:
        return CANNOT_TELL
    one, against = placed(figure, by), placed(figure, other)
    if min(one.chance, one.as_small) < _HARDLY_EVER or one.density * _CLEARLY < against.density:
        return NO
    return YES if one.density > _CLEARLY * against.density else CANNOT_TELL


def _found(figure: float, by: Sequence[float], other: Sequence[float], first: str, second: str) -> str:
    if min(len(by), len(other)) < 2:
        return "too few draws"
    one, against = placed(figure, by), placed(figure, other)
    likelier = one.density / against.density if against.density > 0 else math.inf
    return (
        f"{first}: {one.deviations:+.2g} standard deviations from the mean, {100 * one.below:.0f} % of draws below; "
        f"{second}: {against.deviations:+.2g} from the mean. {'Over a million' if likelier > 1e6 else short(likelier)} "
        "times as likely as the other"
    )


def _spread(draws: Sequence[float]) -> str:
    if len(draws) < 2:
        return short(draws[0])
    return f"{short(statistics.fmean(draws))} ± {short(statistics.stdev(draws))}"


def _as_near(figure: float, draws: Sequence[float]) -> str:
    return f"{100 * sum(abs(each) <= abs(figure) for each in draws) / len(draws):.0f} %"


def _quantization_noise(found: Results, settings: Settings) -> Iterator[Claim]:
    """The noise of floating-point quantization with p significand bits is 0.180 * 2^-2p of the signal's power."""
    for precision in settings.precisions:
        roundings, bits = (
            (2, _OPERAND_BITS[precision]) if precision in _OPERAND_BITS else (1, _RESULT_BITS.get(precision))
        )
        if bits is None:
            continue
        theory = math.sqrt(roundings * 0.180) * 2.0**-bits
        errors = [each.relative_l2["output"] for each in seeds_of(found, "linear", base(settings), precision, TE)]
        rounded = "both operands are" if roundings == 2 else "the result is"
        yield Claim(
            source=f"Widrow and Kollár, Quantization Noise, 2008: Linear in `{precision}`",
            claimed=f"sqrt({roundings} x 0.180) x 2^-{bits} = {short(theory)}",
            found=mean_digits(errors),
            agrees=ratios_between([error / theory for error in errors], 1 / _AS_THEORY, _AS_THEORY),
            why=f"{rounded} rounded to {bits} significand bits; within 15 % counts as agreement",
        )


def _tolerances(found: Results, settings: Settings) -> Iterator[Claim]:
    for name, title, tolerances in _TE_TOLERANCES:
        for precision, atol in tolerances.items():
            if name not in settings.modules or precision not in settings.precisions:
                continue
            measured = seeds_of(found, name, base(settings), precision, TE)
            largest = max(each.max_abs for each in measured)
            yield Claim(
                source=f"TE 2.20's own tests (test_numerics.py): {title} in {precision}",
                claimed=f"outputs agree within {atol:g}",
                found=f"largest error {short(largest)}",
                agrees="yes" if largest <= atol else "no",
                why=f"a mistake up to {short(atol / largest)} times as large as rounding's largest error passes, too",
            )
