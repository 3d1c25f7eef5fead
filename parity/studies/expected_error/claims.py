"""What others say about the errors of TE's modules, next to what the study ``expected_error`` found."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parity.report.numbers import short
from parity.studies.expected_error.study import ISSUE_407, ISSUE_407_SHAPE, TE, Results, Settings, base, mean, seeds_of
from parity.studies.tables import Claim

# Significand bits, with the leading one, of both operands or of the result: whichever rounding is the coarser.
_OPERAND_BITS = {"fp32": 11, "fp8_delayed": 4, "fp8_current": 4, "fp8_block": 4, "mxfp8": 4}
_RESULT_BITS = {"bf16": 8, "fp16": 11}
# atol of tests/pytorch/test_numerics.py, TE 2.20.
_TE_TOLERANCES = (
    ("layernorm_mlp_swiglu", "LayerNormMLP", {"fp32": 2e-2, "bf16": 5e-2}),
    ("transformer_layer_gpt", "TransformerLayer", {"fp32": 5e-3, "bf16": 1e-1}),
)


def claims(found: Results, settings: Settings) -> Iterator[Claim]:
    """Those that the settings have measured."""
    if "fp32" in settings.precisions:
        yield from _issue_407(found)
    if "linear" in settings.modules:
        yield from _quantization_noise(found, settings)
    yield from _tolerances(found, settings)


def _issue_407(found: Results) -> Iterator[Claim]:
    sums = [measured.sum_error for measured in seeds_of(found, ISSUE_407, ISSUE_407_SHAPE, "fp32", TE)]
    ours = ", ".join(f"{error:+.2f}" for error in sums)
    relative = mean(found, ISSUE_407, ISSUE_407_SHAPE, "fp32", TE)
    yield Claim(
        source="TransformerEngine issue 407: SwiGLU MLP and LayerNormMLP in FP32",
        claimed="their outputs' sums differ by -0.1887",
        found=f"{ours} by seed; a relative error of {short(relative)}",
        agrees="yes",
        why="rounding alone does as much: TE computes FP32 GEMMs in TF32. (The weights are not the reporter's.)",
    )
    yield Claim(
        source="ibid.: after an attempt at a repair",
        claimed="-140.2",
        found=ours,
        agrees="no",
        why=f"it is {short(140.2 / max(map(abs, sums)))} times what rounding does: a bug (gate and up exchanged)",
    )


def _quantization_noise(found: Results, settings: Settings) -> Iterator[Claim]:
    """The noise of floating-point quantization with p significand bits is 0.180 * 2^-2p of the signal's power."""
    for precision in settings.precisions:
        roundings, bits = (
            (2, _OPERAND_BITS[precision]) if precision in _OPERAND_BITS else (1, _RESULT_BITS.get(precision))
        )
        if bits is None:
            continue
        theory = math.sqrt(roundings * 0.180) * 2.0**-bits
        ours = mean(found, "linear", base(settings), precision, TE)
        rounded = "both operands are" if roundings == 2 else "the result is"
        yield Claim(
            source=f"Widrow and Kollár, Quantization Noise, 2008: Linear in `{precision}`",
            claimed=f"sqrt({roundings} x 0.180) x 2^-{bits} = {short(theory)}",
            found=short(ours),
            agrees="yes" if abs(math.log(ours / theory)) < math.log(1.15) else "in size",
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
