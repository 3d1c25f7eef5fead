"""What others say about FP8 recipes, next to what the study ``fp8_recipes`` found."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parity.report.numbers import short
from parity.studies.fp8_recipes.fp8_attention import BLOCKS, PLAIN, ROTATED, ROTATED_BLOCKS
from parity.studies.fp8_recipes.means import attention_rmse, delayed_steps, mean_db, tensor_mean
from parity.studies.fp8_recipes.study import DELAYED, STEPS_BEFORE, Results, Settings
from parity.studies.tables import Claim

# Format, significand bits with the leading one, a tensor's role, and the recipes that give it the format.
_SIGNIFICANDS = (
    ("E4M3", 4, "inputs", ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8")),
    ("E5M2", 3, "gradients", ("fp8_delayed", "fp8_current")),
)


def claims(found: Results, settings: Settings) -> Iterator[Claim]:
    """Those that the settings have measured."""
    if "normal" in settings.distributions:
        yield from _quantization_noise(found, settings)
    if "outliers" in settings.distributions:
        yield from _attention(found)
    if DELAYED in settings.recipes:
        yield _delay(found, settings)
    if {"mxfp8", "fp8_block"} <= set(settings.recipes):
        yield _finer_blocks(found, settings)


def _quantization_noise(found: Results, settings: Settings) -> Iterator[Claim]:
    for title, bits, role, recipes in _SIGNIFICANDS:
        measured = [tensor_mean(found, "normal", role, name) for name in recipes if name in settings.recipes]
        if not measured:
            continue
        theory = -10 * math.log10(0.180 * 2.0 ** (-2 * bits))
        yield Claim(
            source=f"Widrow and Kollár, Quantization Noise, 2008: {title}, {bits} significand bits",
            claimed=f"noise of 0.180 x 2^-{2 * bits} of the power: {theory:.1f} dB",
            found=" to ".join(dict.fromkeys(f"{each:.1f}" for each in (min(measured), max(measured)))) + " dB",
            agrees="yes" if all(abs(ratio - theory) < 0.5 for ratio in measured) else "no",
            why="whatever shares a scale: far from the format's limits the mantissa alone counts",
        )


def _attention(found: Results) -> Iterator[Claim]:
    plain, block, rotated, both = (
        attention_rmse(found, "outliers", way) for way in (PLAIN, BLOCKS, ROTATED, ROTATED_BLOCKS)
    )
    yield Claim(
        source="FlashAttention-3 (arXiv 2407.08608), abstract and section 4.3, with outliers",
        claimed="block scales and rotation: 2.6 times lower error (2.4e-2 to 9.1e-3)",
        found=f"{plain / both:.1f} times ({short(plain)} to {short(both)})",
        agrees="yes" if 2.0 <= plain / both <= 3.3 else "in direction" if plain > both else "no",
        why="the sizes of their test are not stated; the factor grows with head dim, the errors with length",
    )
    yield Claim(
        source="ibid.: which of the two does it",
        claimed="the rotation (2.4e-2 without it, 9.3e-3 without block scales)",
        found=f"block scales alone {short(block)}, the rotation alone {short(rotated)}",
        agrees="yes" if plain / rotated - 1 > 2 * (plain / block - 1) else "no",
        why="E4M3 errs in proportion to each element, so a finer scale changes little. Where a query and a key both "
        "have an outlier in a channel, its product is most of a large score, and so is its error; a rotation spreads "
        "both over all channels. Values and probabilities gain nothing",
    )


def _delay(found: Results, settings: Settings) -> Claim:
    recovered = {
        delayed_steps(found, settings, history, "up", factor).recovered_after(STEPS_BEFORE)
        for history in settings.histories
        for factor in settings.factors
    }
    return Claim(
        source="TE's documentation of DelayedScaling: scales come from the amaxes of earlier iterations",
        claimed="a tensor that has grown is scaled too large for one step",
        found=f"as good as before after {', '.join(sorted(map(str, recovered)))} step(s)",
        agrees="yes" if recovered <= {1} else "mostly" if recovered <= {1, 2, 3, 4} else "no",
        why="it is one step, but for a history so short that one draw with a smaller amax clips the next",
    )


def _finer_blocks(found: Results, settings: Settings) -> Claim:
    fine, coarse = (
        mean_db(tensor_mean(found, each, "inputs", recipe) for each in settings.distributions)
        for recipe in ("mxfp8", "fp8_block")
    )
    return Claim(
        source="OCP Microscaling Formats v1.0: a scale for each 32 elements",
        claimed="outliers spoil fewer neighbours",
        found=f"MXFP8 against blocks of 128: {fine - coarse:+.1f} dB",
        agrees="yes" if fine - coarse > 1 else "no",
        why="not in FP8 on these tensors: outliers of 40 times the rest are well within E4M3's exponents",
    )
