"""Mistakes in rotary frequencies that are scaled for longer sequences than a model was trained with.

There are three common ways. In each, a frequency ``f`` of a base becomes ``f * (kept + (1 - kept) / factor)``. Linear
interpolation (Chen et al., arXiv 2306.15595) keeps nothing. Llama 3 keeps frequencies that turn often within the
original length, by a ramp that is linear in the frequency (``apply_scaling`` of Meta's llama-models,
``models/llama3/model.py``). YaRN's ramp is linear in the pair's number, and YaRN also multiplies cosines and sines by a
number (Peng et al., arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parity.mistakes.alternatives import numbers, tunable
from parity.mistakes.hypothesis import Mistake
from parity.mistakes.rotation import Rotation, frequencies
from parity.mistakes.usual_numbers import USUAL
from parity.shown import written
from parity.trace.trace import Edit

_SAME = 1e-3  # relative tolerance of ratios of frequencies that were read off angles
_FEWEST = 4  # at least this many frequencies are needed to show how they are scaled
_LLAMA3 = (1.0, 4.0)  # low_freq_factor and high_freq_factor of every published model
_YARN = (32.0, 1.0)  # beta_fast and beta_slow of every published model
_LENGTHS = tuple(2.0**exponent for exponent in range(5, 19))  # lengths that a model may have been trained with first
_MOST_FACTOR = 128.0  # a base is taken for a usual one under NTK-aware scaling up to this factor


@dataclass(frozen=True, eq=False)
class Scaling:
    """Frequencies ``plain * (kept + (1 - kept) / factor)``.

    Attributes:
        base: the base of the plain frequencies.
        plain: the plain frequencies, ``[rotary / 2]``, FP64.
        kept: how much of each is kept, from 0 to 1, ``[rotary / 2]``.
        factor: the number by which the rest is divided, above 1.
    """

    base: float
    plain: Tensor
    kept: Tensor
    factor: float

    @property
    def is_linear(self) -> bool:
        """Return whether all frequencies are divided by the same number."""
        return bool((self.kept == 0.0).all())

    @property
    def frequencies(self) -> Tensor:
        """The scaled frequencies."""
        return self.plain * (self.kept + (1 - self.kept) / self.factor)


def scaling_of(frequency: Tensor) -> Scaling | None:
    """Return how frequencies ``[rotary / 2]`` are scaled; None if they are a base's plain ones or unknown."""
    frequency = frequency.double().cpu()
    count = len(frequency)
    if count < _FEWEST or not bool((frequency > 0.0).all()):
        return None
    ratios = (float(frequency[-2] / frequency[-1]), float(frequency[0] / frequency[1]))
    measured = [ratio**count for ratio in ratios if 1.0 < ratio < 10.0]
    for base in (*map(_rounded, measured), *USUAL.rope_bases):
        plain = frequencies(base, 2 * count)
        share = frequency / plain
        least = float(share[-1])
        falls = bool((share.diff() < _SAME * share[:-1]).all())
        if not falls or least > 1.0 - _SAME or float(share[0]) > 1.0 + _SAME:
            continue
        if bool(((share / least - 1.0).abs() < _SAME).all()):
            return Scaling(base, plain, torch.zeros_like(share), 1.0 / least)
        if abs(float(share[0]) - 1.0) < _SAME and abs(float(share[-2]) / least - 1.0) < _SAME:
            kept = ((share - least) / (1.0 - least)).clamp(0.0, 1.0)
            kept = torch.where(kept < _SAME, 0.0, torch.where(kept > 1.0 - _SAME, 1.0, kept))
            return Scaling(base, plain, kept, 1.0 / least)
    return None


def scaling_mistakes(rotations: Sequence[Rotation]) -> Iterator[Mistake[Rotation]]:
    """Yield mistakes in scaled frequencies, and in plain ones that ports scale."""
    scaled = [scaling for one in rotations for scaling in [_of(one)] if scaling is not None]
    if scaled:
        yield from _of_scaled(scaled[0], has_mscale=any(one.amplitude != 1.0 for one in rotations))
        yield from _of_another_kind(scaled[0])
    plain = next((one for one in rotations if one.base is not None), None)
    if plain is not None and plain.base is not None:
        yield from _linear_for_ntk(plain.base, plain.rotary)
        yield from _scaled_for_once(plain.base)


def _of(one: Rotation) -> Scaling | None:
    return scaling_of(one.phases[1]) if one.phases is not None else None


Change = Callable[[Scaling], Tensor]  # maps the reference's frequencies to a port's


def _of_scaled(like: Scaling, has_mscale: bool) -> Iterator[Mistake[Rotation]]:
    repair = _right(like)
    plain: Change = lambda scaling: scaling.plain  # noqa: E731
    yield _mistake("rope scaling missing", f"{repair}; it rotates with the plain frequencies", plain, amplitude=1.0)
    if has_mscale:
        kept = f"{repair}; it rotates with the plain frequencies, though it multiplies by YaRN's mscale"
        yield _mistake("rope scaling missing, but for mscale", kept, plain)
        lacking = "multiply softmax_scale by the square of YaRN's mscale, which the reference has in cosines and sines"
        yield _mistake("rope mscale missing", f"{lacking}; it is missing", lambda right: right.frequencies, 1.0)
    factors = like.factor / 2, like.factor * 2
    yield tunable(partial(_divided_by, repair))(like.factor)
    yield from numbers(partial(_divided_by, repair), [like.factor], factors, subtle=like.is_linear)
    if not like.is_linear:
        yield from numbers(partial(_of_factor, repair), [like.factor], factors, subtle=True)
        if has_mscale:
            yield from numbers(partial(_of_factor_and_mscale, repair), [like.factor], factors)
        between = f"{repair}; frequencies between the lowest and the highest are"
        none: Change = lambda one: replace(one, kept=(one.kept >= 1.0).double()).frequencies  # noqa: E731
        yield _mistake("rope scaling, no ramp kept", f"{between} divided like the lowest", none)
        whole: Change = lambda one: replace(one, kept=(one.kept > 0.0).double()).frequencies  # noqa: E731
        yield _mistake("rope scaling, all of the ramp kept", f"{between} kept like the highest", whole)
    length = _llama3_length(like)
    if length is not None:
        yield from numbers(partial(_of_length, repair), [length], (0.5 * length, 2.0 * length))


def _right(like: Scaling) -> str:
    """Return the repair if frequencies are scaled in another way."""
    if like.is_linear:
        return (
            f"give TE's RotaryPositionEmbedding seq_len_interpolation_factor={like.factor:.4g}, and "
            f"pretrained_max_position_embeddings so that no sequence is longer than their product"
        )
    return (
        f"pass TE rotary_pos_emb made of the reference's own frequencies, low ones of which are divided by "
        f"{like.factor:.4g}: TE's RotaryPositionEmbedding has none of these"
    )


def _divided_by(repair: str, factor: float) -> Mistake[Rotation]:
    return _mistake(
        f"rope frequencies divided by {factor:.4g}",
        f"{repair}; it divides all by {factor:.4g}",
        lambda scaling: scaling.plain / factor,
        amplitude=1.0,
    )


def _of_factor(repair: str, factor: float, amplitude: float | None = None) -> Mistake[Rotation]:
    return _mistake(
        f"rope scaling by {factor:.4g}",
        f"{repair}; it divides them by {factor:.4g}",
        lambda scaling: replace(scaling, factor=factor).frequencies,
        amplitude,
    )


def _of_factor_and_mscale(repair: str, factor: float) -> Mistake[Rotation]:
    """Return the mistake of configuring YaRN with another factor, from which its mscale follows as well."""
    return replace(_of_factor(repair, factor, _yarn_mscale(factor)), name=f"rope scaling and mscale by {factor:.4g}")


def _of_length(repair: str, length: float) -> Mistake[Rotation]:
    return _mistake(
        f"rope scaling from an original length of {written(length)}",
        f"{repair}; it takes {written(length)} for the length that the model was first trained with",
        lambda scaling: replace(scaling, kept=_llama3_kept(scaling.plain, length)).frequencies,
    )


def _of_another_kind(like: Scaling) -> Iterator[Mistake[Rotation]]:
    """Yield frequencies scaled by the reference's factor and original length, but in one of the other ways."""
    repair = _right(like)
    own = _llama3_length(like)
    of_yarn = [length for length in _LENGTHS if _agrees(_yarn_kept(like.plain, like.base, length), like)]
    lengths = [own] if own is not None else of_yarn[:1]

    def like_llama3(length: float) -> Mistake[Rotation]:
        what = f"Llama 3's scaling by {like.factor:.4g} from an original length of {written(length)}"
        return _of_kind(what, repair, lambda scaling: _llama3_kept(scaling.plain, length), amplitude=1.0)

    def like_yarn(length: float) -> Mistake[Rotation]:
        what = f"YaRN's scaling by {like.factor:.4g} from an original length of {written(length)}"
        return _of_kind(what, repair, lambda scaling: _yarn_kept(scaling.plain, scaling.base, length))

    if own is None:
        yield from numbers(like_llama3, usual=(*lengths, *USUAL.llama3_lengths))
    if not of_yarn:
        yield from numbers(like_yarn, usual=(*lengths, *USUAL.yarn_lengths))
    yield tunable(partial(_ntk_by, repair))(like.factor)


def _of_kind(
    what: str, repair: str, kept: Callable[[Scaling], Tensor], amplitude: float | None = None
) -> Mistake[Rotation]:
    change: Change = lambda scaling: replace(scaling, kept=kept(scaling)).frequencies  # noqa: E731
    return _mistake(f"rope with {what}", f"{repair}; it has {what}", change, amplitude)


def _ntk_by(repair: str, factor: float) -> Mistake[Rotation]:
    """Return the mistake of a larger base, which divides the lowest frequency by the factor (NTK-aware scaling)."""
    what = f"a base enlarged for longer sequences by {factor:.4g} (NTK)"

    def enlarged(scaling: Scaling) -> Tensor:
        rotary = 2 * len(scaling.plain)
        return frequencies(scaling.base * factor ** (rotary / (rotary - 2)), rotary)

    return _mistake(f"rope with {what}", f"{repair}; it has {what}", enlarged, amplitude=1.0)


def _linear_for_ntk(base: float, rotary: int) -> Iterator[Mistake[Rotation]]:
    """Yield plain frequencies divided by a factor, if the reference's base looks enlarged by that factor (NTK)."""
    for usual in USUAL.rope_bases if rotary > 2 else ():
        factor = (base / usual) ** ((rotary - 2) / rotary)
        if not 1.0 + _SAME < factor < _MOST_FACTOR or abs(factor - round(factor, 1)) > _SAME * factor:
            continue
        plain = frequencies(usual, rotary)
        what = f"frequencies of base {written(usual, 7)} that are all divided by {factor:.4g}"

        def edits(one: Rotation, divided: Tensor = plain / factor) -> tuple[Edit, ...]:
            return _rotated_by(one, divided) if one.rotary == 2 * len(divided) else ()

        enlarged = f"base {written(base, 7)}, which is {written(usual, 7)} enlarged for longer sequences (NTK)"
        repair = f"rotate with frequencies of {enlarged}"
        yield Mistake("rope-scaling", f"rope with {what}", f"{repair}; it has {what}", edits)


def _agrees(kept: Tensor, like: Scaling) -> bool:
    return torch.allclose(kept, like.kept, atol=10 * _SAME)


def _scaled_for_once(base: float) -> Iterator[Mistake[Rotation]]:
    """Yield scaled frequencies for a reference that has plain ones."""
    repair = f"rotate with the plain frequencies of base {written(base, 7)}, as the reference does"

    def like_llama3(factor: float) -> Mistake[Rotation]:
        return _scaled_like("Llama 3's", factor, lambda plain: _llama3_kept(plain, USUAL.llama3_lengths[0]), repair)

    yield from numbers(like_llama3, usual=USUAL.llama3_factors)
    for length in USUAL.yarn_lengths:

        def like_yarn(factor: float, length: float = length) -> Mistake[Rotation]:
            name = f"YaRN's, of an original length of {written(length)},"
            return _scaled_like(name, factor, lambda plain: _yarn_kept(plain, base, length), repair)

        yield from numbers(like_yarn, usual=USUAL.yarn_factors)


def _scaled_like(name: str, factor: float, kept: Callable[[Tensor], Tensor], repair: str) -> Mistake[Rotation]:
    def edits(one: Rotation) -> tuple[Edit, ...]:
        if one.base is None or one.phases is None:
            return ()
        plain = frequencies(one.base, one.rotary)
        return _rotated_by(one, Scaling(one.base, plain, kept(plain), factor).frequencies)

    what = f"{name} scaling by {factor:.4g}"
    return Mistake("rope-scaling", f"rope with {what}", f"{repair}; it has {what}", edits)


def _mistake(name: str, repair: str, change: Change, amplitude: float | None = None) -> Mistake[Rotation]:
    def edits(one: Rotation) -> tuple[Edit, ...]:
        scaling = _of(one)
        return () if scaling is None else _rotated_by(one, change(scaling), amplitude)

    return Mistake("rope-scaling", name, repair, edits)


def _rotated_by(one: Rotation, frequency: Tensor, amplitude: float | None = None) -> tuple[Edit, ...]:
    """Return the edits that rotate by these frequencies; empty if they are the reference's."""
    if one.phases is None:
        return ()
    positions, right = one.phases
    amplitude = one.amplitude if amplitude is None else amplitude
    if torch.allclose(frequency.to(right.device), right, rtol=_SAME, atol=0.0) and amplitude == one.amplitude:
        return ()
    angles = positions[:, None] * frequency.to(positions.device)
    return one.edits(angles=angles, amplitude=amplitude)


def _llama3_kept(plain: Tensor, length: float) -> Tensor:
    low, high = _LLAMA3
    return ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)


def _llama3_length(like: Scaling) -> float | None:
    """Return the original length if the ramp is Llama 3's; None if it is another one or no frequency lies on it."""
    low, high = _LLAMA3
    between = (like.kept > 0.0) & (like.kept < 1.0)
    if not bool(between.any()):
        return None
    lengths = (like.kept[between] * (high - low) + low) * 2 * math.pi / like.plain[between]
    length = float(lengths.mean())
    return length if _agrees(_llama3_kept(like.plain, length), like) else None


def _yarn_mscale(factor: float) -> float:
    """Return the number by which YaRN multiplies cosines and sines (Peng et al., arXiv 2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_kept(plain: Tensor, base: float, length: float) -> Tensor:
    """Return YaRN's ramp between the pairs that turn ``beta_fast`` and ``beta_slow`` times within the length."""
    count = len(plain)
    fast, slow = (count * math.log(length / (beta * 2 * math.pi)) / math.log(base) for beta in _YARN)
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), 2 * count - 1)
    ramp = (torch.arange(count, dtype=torch.float64) - low) / max(high - low, 1e-3)
    return 1.0 - ramp.clamp(0.0, 1.0)


def _rounded(measured: float) -> float:
    """Return the measured base rounded to three digits if that is within the measurement's accuracy, else as it is."""
    rounded = round(measured, 2 - math.floor(math.log10(measured)))
    return rounded if math.isclose(rounded, measured, rel_tol=_SAME) else measured
