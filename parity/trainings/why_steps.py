"""Find mistakes between training steps whose single pass is right: in gradients, the optimizer or a checkpoint."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from parity.mistakes.codes import repairable
from parity.mistakes.usual_numbers import USUAL
from parity.numerics.factors import uneven
from parity.result import NO_CODE, Code, Finding
from parity.shown import few_of
from parity.trainings.micro_batches import Made
from parity.trainings.step_verdicts import Deviation, Replay, deviations
from parity.trainings.steps import BUFFERS, COPIES, HISTORIES, SCALES, Named, Resumption, Update

# Gradients that are not those of this step: what they could be instead, tried in this order.


@dataclass(frozen=True)
class Guess:
    """Gradients that a mistake between steps would give.

    Attributes:
        title: the finding's title, a key of ``CODES``; empty for the right gradients.
        told: what is wrong.
        repair: what to do about it.
        gradients: computes these gradients, by the reference's names.
        keeps_errors: whether they have the errors of the right gradients, though they may be smaller.
    """

    title: str
    told: str
    repair: str
    gradients: Callable[[], Mapping[str, Tensor]]
    keeps_errors: bool = False


@dataclass(frozen=True)
class Before:
    """The values that a step may have wrongly taken from earlier steps.

    Attributes:
        weights: the reference's weights before the step.
        earlier: those before the previous step.
        gradients: the sum of the candidate's weight gradients over all earlier steps.
        golden_of: returns the right gradients of the batch of a step with given weights.
    """

    weights: Named
    earlier: Named
    gradients: Named
    golden_of: Callable[[int, Named], Mapping[str, Tensor]]


# A limit is one on a whole tensor: a slice with a quarter of the usual norm may be off by this many times as much.
_OF_SMALL_SLICES = 4.0


def guesses_of_any_step(
    number: int,
    candidate: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    limits: Mapping[str, float],
    of_added: float = 1.0,
) -> list[Guess]:
    """Return the guesses at wrong gradients that are possible in any step.

    Args:
        number: the number of the step.
        candidate: the candidate's weight gradients.
        golden: the right ones.
        limits: the limits on their relative errors, by name.
        of_added: as in ``Clipping``.
    """
    factor = scale_of(candidate, golden)
    scaled = f"the loss that step {number} differentiates is {factor_in_words(factor)} times the reference's"
    if abs(of_added - 1.0) > 0.01:
        scaled = (
            f"backward passes of step {number} leave {factor_in_words(factor / of_added)} times the reference's "
            f"gradients, which are then multiplied by {factor_in_words(of_added)}, so that they are "
            f"{factor_in_words(factor)} times the right ones"
        )
    guesses = [
        Guess("", "", "", lambda: golden),  # the loss alone is wrong
        Guess(
            "stale-gradient",
            f"in step {number} the optimizer gets no gradients",
            "call backward before the optimizer's step",
            lambda: {name: torch.zeros_like(x) for name, x in golden.items()},
        ),
        Guess(
            "loss-scale",
            scaled,
            "divide the loss by what it is averaged over once, whatever the number of micro-batches, undo a loss scale "
            "before the gradients are used, and clip to the reference's norm",
            lambda: {name: factor * x for name, x in golden.items()},
        ),
    ]
    is_even = all(
        uneven(candidate[name], x, unsure=_OF_SMALL_SLICES * limits.get(name, 1.0)) is None
        for name, x in golden.items()
    )
    guesses = guesses if is_even else guesses[:-1]
    factors = {name: scale_of({name: candidate[name]}, {name: x}) for name, x in golden.items()}
    if is_even and (of_some := some_scaled(number, factors, limits, golden)):
        guesses.append(
            Guess(
                "gradient-scale",
                of_some,
                "look for code that scales, zeroes or reduces these gradients by themselves, such as a hook or a "
                "norm of each, and for parameters that no gradient reaches",
                lambda: {name: factors[name] * x for name, x in golden.items()},
            )
        )
    largest = max((float(x.abs().max()) for x in candidate.values() if x.numel()), default=0.0)
    if _is_threshold(largest, candidate, golden):
        guesses.append(
            Guess(
                "gradient-clipping",
                f"in step {number} each element of the gradients is clipped to {largest:.2g}, which the reference does "
                "not do",
                "clip by the norm of all gradients, with nn.utils.clip_grad_norm_ in place of clip_grad_value_",
                lambda: {name: x.clamp(-largest, largest) for name, x in golden.items()},
                keeps_errors=True,
            )
        )
    return guesses


def _is_threshold(largest: float, candidate: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> bool:
    """Return whether the candidate's elements look clipped to its largest one.

    The elements that should be larger must be as large as that one, and the smaller ones must follow the right ones,
    since gradients that nearly vanish are also smaller than all right ones.
    """
    right = torch.cat([x.double().flatten() for x in golden.values()])
    own = torch.cat([candidate[name].double().flatten() for name in golden]).to(right.device)
    beyond, below = right.abs() > 1.1 * largest, right.abs() < 0.9 * largest
    at = own[beyond].abs() >= 0.99 * largest
    along = torch.nn.functional.cosine_similarity(own[below], right[below], 0)
    return int(at.sum()) >= max(2, 0.9 * len(at)) and (not bool(below.any()) or float(along) > 0.5)


def guesses_of_later_steps(number: int, golden: Mapping[str, Tensor], before: Before, in_fp8: bool) -> list[Guess]:
    """Return the guesses at wrong gradients that are possible in a step after the first.

    Args:
        number: the number of the step.
        golden: the right weight gradients.
        before: the values that the step may have taken from earlier ones.
        in_fp8: whether TE quantizes weights, of which it then may keep copies.
    """
    matrices = {name: x for name, x in before.earlier.items() if x.dim() > 1}
    return [
        Guess(
            "gradient-not-zeroed",
            f"the gradients of step {number} are the sum of its own and those of the steps before",
            "set gradients to zero in each step, including main_grad if TE adds to it",
            lambda: {name: x + before.gradients[name].to(x) for name, x in golden.items()},
        ),
        Guess(
            "stale-weights",
            f"the gradients of step {number} are those of the weights before the last update",
            "update every copy of the weights after each step, such as "
            f"{'FP8 weights that is_first_microbatch=False keeps, ' if in_fp8 else ''}FP32 master weights that are not "
            "copied back, or those of a graph",
            lambda: before.golden_of(number, before.earlier),
        ),
        Guess(
            "weight-cache-stale",
            f"the gradients of step {number} are those of the weight matrices before the last update, of which "
            f"{'FP8 ' if in_fp8 else ''}copies are kept",
            "call the module with is_first_microbatch=True, or None, once after each update"
            if in_fp8
            else "update these copies as well",
            lambda: before.golden_of(number, before.weights | matrices),
        ),
        Guess(
            "stale-gradient",
            f"the gradients of step {number} are those of the step before",
            "call backward before the optimizer's step, and make one step for each batch",
            lambda: before.golden_of(number - 1, before.earlier),
        ),
        Guess(
            "stale-batch",
            f"the gradients of step {number} are those of the batch before",
            "copy each batch into the buffers that a graph or a loader reads",
            lambda: before.golden_of(number - 1, before.weights),
        ),
    ]


def unexplained(number: int, worst: str, is_first_and_own: bool, in_fp8: bool) -> Finding:
    """Return the finding on a step that no guess explains, though one pass of a new module is right.

    Args:
        number: the number of the step.
        worst: the text that says which tensor is farthest off.
        is_first_and_own: whether it is the first step, and the pair makes its steps itself.
        in_fp8: whether TE quantizes activations and weights.
    """
    if is_first_and_own:
        return repairable(
            "state-between-steps",
            f"one pass of a new module with the same weights is right, but the gradients of the pair's training step "
            f"are not{worst}",
            "look at what that step does besides one pass, such as micro-batches, or gradients that it changes",
        )
    return repairable(
        "state-between-steps",
        f"a new module with the same weights computes step {number} correctly, but the trained module does not{worst}",
        "look at what earlier steps have left in the module, such as "
        f"{'FP8 scales, cached weights and' if in_fp8 else 'attributes and'} buffers, and at what your training step "
        "does besides one pass",
    )


# In limits of the right gradients. A guess has roundings of its own, such as those of all steps that it adds up.
_NEAR_ENOUGH = 2.0
# The largest margin of a guess, over that of the right gradients. Gradients times a factor that is fitted to the
# candidate's are never farther from these than the right ones are, whatever is wrong.
_NEARER = 0.9


def gradients_explained(
    limits: Mapping[str, float], candidate: Mapping[str, Tensor], guesses: Sequence[Guess]
) -> Finding | None:
    """Return the finding of the guess that is nearest to the weight gradients, if it is near enough.

    Args:
        limits: the limits on the relative errors of the weight gradients, by name.
        candidate: the candidate's weight gradients.
        guesses: what these could be; the first guess is the right gradients.
    """

    def margin(guess: Guess) -> float:
        right = guess.gradients()
        sizes = guesses[0].gradients() if guess.keeps_errors else right
        off = {name: _compute_relative_error(candidate[name], right[name], sizes[name]) for name in limits}
        return max((off[name] / limit for name, limit in limits.items()), default=math.inf)

    margins = [margin(guess) for guess in guesses]
    best = min(range(len(guesses)), key=margins.__getitem__)
    if not guesses[best].title or margins[best] > min(_NEAR_ENOUGH, _NEARER * margins[0]):
        return None
    return repairable(guesses[best].title, guesses[best].told, guesses[best].repair)


def are_made_of(made: Made, limits: Mapping[str, float]) -> bool:
    """Return whether a candidate's weight gradients are, closely enough, the fitted sum of micro-batches' gradients."""
    margins = (off / limits[name] for name, off in made.off.items() if name in limits)
    return not max(margins, default=math.inf) > _NEAR_ENOUGH


def micro_batches_explained(number: int, limits: Mapping[str, float], made: Made) -> Finding | None:
    """Return a finding if micro-batches of a step count for more or less than they should, and this explains it.

    Args:
        number: the number of the step.
        limits: the limits on the relative errors of the weight gradients, by name.
        made: by how much each counts.
    """
    if not are_made_of(made, limits):
        return None
    count = len(made.made)
    if made.right is None:
        return repairable(
            "micro-batches",
            f"in step {number}, the gradients of the {count} micro-batches do not add up to those of the whole batch, "
            "whatever factor each loss gets",
            "give every part of the batch to the module",
        )
    shares = list(zip(made.made, made.right, strict=True))
    most = max(map(abs, made.right))
    wrong = {i: own / right for i, (own, right) in enumerate(shares) if right and abs(own - right) > 0.02 * most}
    lost = [i for i, factor in wrong.items() if abs(factor) < 0.02]
    if not wrong:
        return None
    if lost:
        return repairable(
            "micro-batches",
            f"of the {count} micro-batches of step {number}, {_list_micro_batches(lost)} "
            f"{'do' if len(lost) > 1 else 'does'} not count",
            "make a backward pass for each, and set gradients to zero only before the first",
        )
    factors = _join_few([factor_in_words(factor) for factor in wrong.values()])
    return repairable(
        "micro-batches",
        f"of the {count} micro-batches of step {number}, {_list_micro_batches(list(wrong))} "
        f"count{'s' * (len(wrong) == 1)} {factors} times as much as in the gradients of the whole batch",
        "multiply the loss of each micro-batch by its share of what the whole batch's loss is averaged over, such as "
        "the tokens that count",
    )


def changed_early(number: int) -> Finding:
    """Return the finding on a step that clips gradients in the midst of its micro-batches."""
    return repairable(
        "gradient-clipping",
        f"in step {number} gradients are clipped, or changed in another way, before those of all micro-batches are "
        "added to them",
        "clip once in each step, after the last backward pass",
    )


def moved_otherwise(number: int, name: str, of: str, factor: float) -> Finding:
    """Return the finding on a step whose forward pass moves a buffer by a multiple of the right move.

    Args:
        number: the number of the step.
        name: the candidate's buffer.
        of: the reference's buffer.
        factor: the multiple.
    """
    buffer = name if name == of else f"{name} (the reference's {of})"
    told = f"moves the buffer {buffer} {factor_in_words(factor)} times as far as the reference's does"
    if abs(factor) < 0.01:
        told = f"leaves the buffer {buffer} as it is, which the reference's moves"
    return repairable(
        "buffer-moved-otherwise",
        f"in step {number} the forward pass {told}, from the same value and with the same inputs",
        "give both modules the same momentum or decay, and let each pass update such statistics once",
    )


def read_after_change(number: int, read: Sequence[str]) -> Finding:
    """Return the finding on a step whose backward pass recomputes a forward pass that has changed buffers it reads."""
    return repairable(
        "state-between-steps",
        f"step {number} computes the forward pass again in the backward pass, and the second time it reads the buffers "
        f"that the first has changed: {few_of(read)}",
        "let the forward pass read a copy from before it changes them, and change them once a step, such as after the "
        "optimizer's step, or leave such modules out of checkpointing",
    )


def diverging(number: int, why: str, own: Sequence[float] | None) -> Finding:
    """Return the finding on a training whose numbers have become too large to be judged.

    Args:
        number: the number of the first step that cannot be judged.
        why: what is too large.
        own: the losses of the reference's own training in FP64 up to that step; None if that outgrows the precision.
    """
    if own is None:
        told = "the reference, trained by itself in FP64, diverges as well: its weights outgrow the precision, too"
    elif not own[-1] <= own[0]:
        told = (
            "the reference, trained by itself in FP64, diverges as well: its loss goes from "
            f"{own[0]:.4g} to {own[-1]:.4g}"
        )
    else:
        told = (
            "the reference, trained by itself in FP64, does not diverge: its loss goes from "
            f"{own[0]:.4g} to {own[-1]:.4g}, so this training does not tolerate rounding at this precision"
        )
    before = "the step before is right" if number == 2 else f"the {number - 1} steps before are right"
    return repairable(
        "training-diverges",
        f"from step {number} on nothing can be judged, since {why}; {before}, and {told}",
        "lower the learning rate or clip gradients, on both sides, or compare fewer steps",
    )


def stale_transposes(number: int, stale: Sequence[str]) -> Finding:
    """Return the finding on a step that computes with FP8 parameters whose transposed copies are stale.

    Args:
        number: the number of the step.
        stale: the names of these parameters.
    """
    is_one = len(stale) == 1
    return repairable(
        "weight-cache-stale",
        f"step {number} computes gradients of inputs from {'a copy' if is_one else 'copies'} of {few_of(list(stale))} "
        f"that {'is' if is_one else 'are'} not the transpose of the FP8 weight{'' if is_one else 's'}: TE's optimizers "
        "update FP8 parameters under delayed scaling (te.quantized_model_init), but not their transposes, which GPUs "
        "before Blackwell read (TE 2.14 to 2.20.2)",
        "call parameter._reset_caches() after each optimizer.step(), or step FP32 copies of your own and copy_ them to "
        "the parameters",
    )


def _list_micro_batches(places: Sequence[int]) -> str:
    """Return the numbers of micro-batches, counted from 1."""
    return f"number{'s' * (len(places) > 1)} {_join_few([str(i + 1) for i in places])}"


def _join_few(texts: Sequence[str]) -> str:
    return few_of(texts, 4, " and " if len(texts) == 2 else ", ")


def factor_in_words(factor: float) -> str:
    """Return a factor as people write it: ``4``, ``1/16`` or ``1.03``."""
    for plain, text in ((factor, "{:.0f}"), (1.0 / factor if factor else math.inf, "1/{:.0f}")):
        if 1.5 <= plain < 1e6 and abs(plain - round(plain)) <= 0.01 * plain:
            nearest = 2.0 ** round(math.log2(plain))  # a loss scale is a power of two
            return text.format(nearest if abs(plain - nearest) <= 0.01 * plain else plain)
    return f"{factor:.3g}"


def scale_of(candidate: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> float:
    """Return the factor by which all gradients together are too large, by least squares."""
    along = sum(float((candidate[name].double() * x.double()).sum()) for name, x in golden.items())
    size = sum(float(x.double().square().sum()) for x in golden.values())
    return along / size if size else 1.0


# With fewer elements than this, a factor fits whatever is wrong with them.
_FEWEST_SCALED = 16


def some_scaled(
    number: int, factors: Mapping[str, float], limits: Mapping[str, float], golden: Mapping[str, Tensor]
) -> str:
    """Say which gradients of a step are scaled; return an empty text if none are, or all by the same factor.

    Args:
        number: the number of the step.
        factors: the factor of each weight gradient, by least squares.
        limits: the limits on the relative errors of the weight gradients, by name.
        golden: the right gradients.
    """
    off = {name: factor for name, factor in factors.items() if abs(factor - 1.0) > limits.get(name, math.inf)}
    if any(golden[name].numel() < _FEWEST_SCALED for name in off):
        return ""
    of: dict[str, list[str]] = {}
    for name, factor in off.items():
        of.setdefault("0" if abs(factor) < 0.01 else factor_in_words(factor), []).append(name)
    others = len(factors) - len(off)
    if not off or (not others and len(of) == 1):
        return ""
    told = few_of([f"{factor} times for {few_of(some)}" for factor, some in of.items()], between="; ")
    rest = ", and the others are right" if others and len(of) <= 3 else ""
    return f"in step {number} gradients are multiples of the reference's: {told}{rest}"


def _compute_relative_error(x: Tensor, right: Tensor, sized: Tensor) -> float:
    size, off = float(sized.double().norm()), float((x.double() - right.double()).norm())
    return off / size if size else math.inf if off else 0.0


# Steps of the optimizer that differ from the reference's, and the settings with which the reference's makes them.


@dataclass(frozen=True)
class Setting:
    """Another setting of the reference's optimizer.

    Attributes:
        told: the text that says what the port's optimizer does.
        edit: gives the reference's optimizer that setting.
        code: the port's setting and the reference's, as arguments of the optimizer, if they are numbers.
        claims: the setting's value, by its name in groups of parameters, if it is guessed.
    """

    told: str
    edit: Callable[[Optimizer], Optimizer]
    code: Code = NO_CODE
    claims: Mapping[str, Any] = field(default_factory=dict)


def optimizer_explained(
    history: Sequence[Update],
    wrong: Sequence[Deviation],
    replayed: Callable[[Setting | None], Replay],
    dtype: torch.dtype,
    settings: Mapping[str, Mapping[str, Any]],
    fused: Mapping[str, Sequence[str]],
    written: Sequence[str] = (),
) -> Finding:
    """Return the finding that explains an optimizer's last step best.

    Args:
        history: what the candidate's optimizer did in each step so far.
        wrong: the parameters whose last step is not the reference's.
        replayed: makes the reference's optimizer again, with another setting if one is given.
        dtype: the dtype in which the candidate's optimizer holds its weights.
        settings: the settings of the candidate's optimizer for each parameter, by its name in the reference.
        fused: the candidate's parameters that hold several of the reference's, with the names of these.
        written: the candidate's parameters that something wrote to after the optimizer's step.
    """
    own = replayed(None)
    # Moments in 16 bits are a fact, so they come before any setting that would explain the rounding equally well.
    narrow = {key: kept for key, kept in history[-1].kept_in.items() if kept.itemsize < 4}
    largest = max(one.share for one in wrong)
    if narrow and largest <= sum(_get_epsilon(kept) for kept in narrow.values()):
        return _narrow_moments(narrow, largest)
    for setting in (*_of_the_candidate(own, settings), None, *_guess_settings(own)):
        if setting is None:
            if told := _other_rates(history, wrong, own):
                return told
            continue
        try:
            replay = replayed(setting)
            made = [replay.step(update) for update in history]
        except Exception:  # this optimizer cannot have this setting
            continue
        if all(_is_right_update(update, after, dtype) for update, after in zip(history, made, strict=True)):
            for key, value in setting.claims.items():
                if said := {some[key] for some in settings.values() if key in some} - {value}:
                    return repairable(
                        "optimizer",
                        f"the candidate's optimizer steps as with {key}={_format_value(value)}, though its {key} is "
                        f"{_format_value(next(iter(said)))}",
                        "look at whether its state, such as moments and counts of steps, is kept from step to step, "
                        "and what else changes gradients or weights",
                    )
            return repairable(
                "optimizer",
                f"{setting.told}; with this setting, the reference's optimizer makes the candidate's steps",
                _describe_repair(setting),
                setting.code,
            )
    left_out = [one.name for one in wrong if math.isclose(one.share, 1.0, rel_tol=1e-6) and abs(one.along) < 1e-6]
    if len(left_out) == len(wrong):
        repair = "give it all parameters, including those that are created after it"
        last = history[-1]
        if dtype is torch.bfloat16 and all(torch.equal(x, last.before[name]) for name, x in last.after.items()):
            repair = (
                "take another optimizer, or step FP32 copies; TE's FusedSGD, for one, does not step BF16 parameters"
            )
        return repairable("optimizer", f"the candidate's optimizer does not step {few_of(left_out)}", repair)
    factors = [one.along for one in wrong]
    number, worst = len(history), max(wrong, key=lambda one: one.share)
    if written:
        return repairable(
            "optimizer",
            f"in step {number} something writes to {few_of(written)} after the optimizer's step, and {worst.name} "
            f"differs from what the reference's optimizer makes of it, by {worst.share:.2g} of its step",
            "let nothing but the optimizer change weights",
        )
    are_known = all(_is_multiple(one) and one.rounding < 0.5 * abs(one.along - 1.0) for one in wrong)
    if are_known and max(factors) - min(factors) <= _UNLIKE * abs(factors[0] - 1.0):
        rates, right = history[-1].rates, own.rates
        is_same = all(one.name in rates and rates[one.name] == right.get(one.name) for one in wrong)
        return repairable(
            "optimizer",
            f"step {number}{_name_wrong_parameters(wrong, own)} is {factor_in_words(factors[0])} times the step that "
            "the reference's optimizer makes with the same gradients"
            f"{', though the learning rate is the same' if is_same else ''}",
            "look at what else changes the step or the weights, such as a hook or an average"
            if is_same
            else "compare the learning rates, and when their schedules take a step",
        )
    if narrow:
        return _narrow_moments(narrow, largest)
    off = {one.name for one in wrong}
    together = {name: parts for name, parts in fused.items() if off & set(parts)}
    if history[-1].is_whole and off <= {part for parts in together.values() for part in parts}:
        holds = "; ".join(f"{name} holds {few_of(parts)}" for name, parts in list(together.items())[:3])
        return repairable(
            "optimizer",
            f"{holds}; the optimizer does not step each element independently, so its step of the fused parameter "
            "differs from its steps of the parts",
            "let it step the parts of such a parameter one by one, or fuse the reference's parameters as well",
        )
    differ = "1 parameter differs" if len(wrong) == 1 else f"{len(wrong)} parameters differ"
    return repairable(
        "optimizer",
        f"in step {number} the candidate's optimizer makes a different step than the reference's with the same "
        f"gradients: {differ}, {worst.name} by {worst.share:.2g} of its step",
        "compare the two optimizers and their arguments",
    )


# The share of a factor's difference from 1 that may be left unexplained, or by which two parameters' factors differ.
_UNLIKE = 0.1


def _is_multiple(one: Deviation) -> bool:
    """Return whether a step is the right one times a number, up to the rounding of the weights."""
    left = max(one.share**2 - (one.along - 1.0) ** 2, 0.0) ** 0.5
    return left <= _UNLIKE * one.share + one.rounding


def _other_rates(history: Sequence[Update], wrong: Sequence[Deviation], own: Replay) -> Finding | None:
    """Return a finding if learning rates of the last step are not the reference's, and this explains the deviations."""
    for update in history:
        own.step(update)
    rates = history[-1].rates
    if not all(rates.get(one.name) and own.rates.get(one.name) for one in wrong):
        return None
    told = []
    for one in wrong:
        rate, right = rates[one.name], own.rates[one.name]
        is_as = _is_multiple(one) and abs(one.along - rate / right) <= _UNLIKE * abs(rate / right - 1.0) + one.rounding
        if rate == right or not (is_as or one.rounding > 0.5):  # a step that is mostly lost tells nothing else
            return None
        told.append(f"{rate:.4g}, the reference's {right:.4g}")
    each = list(dict.fromkeys(told))
    whose = _name_wrong_parameters(wrong, own) or " of some parameters" * (len(each) > 1)
    return repairable(
        "optimizer",
        f"in step {len(history)} the learning rate{whose} is {'; or '.join(each[:2])}",
        "compare the learning rates, and when their schedules take a step",
    )


def _describe_repair(setting: Setting) -> str:
    """Return what to do about a setting that differs."""
    if setting.code.then:
        return f"give the candidate's optimizer {', '.join(setting.code.then)}, as the reference's optimizer has it"
    return "give both optimizers the same setting"


def _get_epsilon(kept: torch.dtype) -> float:
    return torch.finfo(kept if kept.is_floating_point else torch.float8_e4m3fn).eps  # TE keeps E4M3 codes as bytes


def _narrow_moments(narrow: Mapping[str, torch.dtype], largest: float) -> Finding:
    told = " and ".join(f"{key} in {str(kept).removeprefix('torch.')}" for key, kept in narrow.items())
    return repairable(
        "optimizer",
        f"the candidate's optimizer keeps {told}, and its steps differ from the reference's by up to {largest:.2g}",
        "keep them in FP32, unless you accept this error to save memory",
    )


def _name_wrong_parameters(wrong: Sequence[Deviation], own: Replay) -> str:
    """Return the parameters whose step is wrong, as text; empty if all are wrong."""
    return f" of {few_of([one.name for one in wrong])}" if len(wrong) < len(own.parameters) else ""


def _is_right_update(update: Update, after: Named, dtype: torch.dtype) -> bool:
    return all(one.is_right for one in deviations(update, after, dtype))


# Settings of how an optimizer computes, which do not change the results, and the one that tells AdamW from Adam.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})


def _of_the_candidate(own: Replay, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Setting]:
    """Yield the settings that differ between the candidate's optimizer and the reference's: each alone, then all."""
    by_id = {id(parameter): name for name, parameter in own.parameters.items()}
    right = {by_id[id(one)]: group for group in own.optimizer.param_groups for one in group["params"]}
    differing: dict[str, dict[str, Any]] = {}
    for name, group in right.items():
        for key, value in _select_constants(settings.get(name, {})).items():
            if key in group and value != _select_constants(group).get(key, value):
                differing.setdefault(key, {})[name] = value
    told = {key: _describe_setting(key, values, right) for key, values in differing.items()}
    together = [differing] if len(differing) > 1 else []
    for some in (*({key: values} for key, values in differing.items()), *together):
        yield Setting(
            f"the candidate's optimizer has {'; '.join(told[key] for key in some)}",
            _each_its_own(list(right), some),
            _write_arguments(some, right),
        )


def _write_arguments(differing: Mapping[str, Mapping[str, Any]], right: Mapping[str, Mapping[str, Any]]) -> Code:
    """Return the settings as an optimizer's arguments; empty unless each has one value for all parameters."""
    now, then = [], []
    for key, values in differing.items():
        pairs = {(value, _select_constants(right[name])[key]) for name, value in values.items()}
        if len(values) < len(right) or len(pairs) > 1:
            return NO_CODE
        (own, due) = pairs.pop()
        now.append(f"{key}={_format_value(own)}")
        then.append(f"{key}={_format_value(due)}")
    return Code(tuple(now), tuple(then))


def _select_constants(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings that are numbers, with the learning rate from before a schedule changed it."""
    found = {key: x for key, x in group.items() if key not in _HOW and isinstance(x, (bool, int, float, tuple))}
    return found | {"lr": found["initial_lr"]} if "initial_lr" in found else found


def _describe_setting(key: str, values: Mapping[str, Any], right: Mapping[str, Mapping[str, Any]]) -> str:
    """Say which values a setting has, and for which parameters."""
    pairs = {name: (value, _select_constants(right[name])[key]) for name, value in values.items()}
    texts = []
    for both in dict.fromkeys(pairs.values()):
        of = [name for name, one in pairs.items() if one == both]
        whose = f" for {few_of(of)}" if len(of) < len(right) else ""
        texts.append(f"{key}={_format_value(both[0])}{whose}, the reference's {_format_value(both[1])}")
    return few_of(texts, between="; ")


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _each_its_own(order: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> Callable[[Optimizer], Optimizer]:
    """Return an edit that gives each parameter, in this order, its own settings."""

    def edit(optimizer: Optimizer) -> Optimizer:
        stepped = [(group, one) for group in optimizer.param_groups for one in group["params"]]
        optimizer.param_groups[:] = [
            {**group, "params": [one], **{key: values[name] for key, values in settings.items() if name in values}}
            for name, (group, one) in zip(order, stepped, strict=True)
        ]
        return optimizer

    return edit


def _guess_settings(own: Replay) -> Iterator[Setting]:
    """Yield settings that ports often have instead of the reference's, the likeliest first."""
    first = own.optimizer.param_groups[0]
    decays = [value for value in (0.0, *USUAL.weight_decays) if value != first.get("weight_decay")]
    if "weight_decay" in first:
        if first["weight_decay"]:
            yield Setting(
                "the candidate's optimizer does not decay biases and the weights of norms", _make_decay_edit(_is_matrix)
            )
        yield Setting(
            "the candidate's optimizer also decays biases and the weights of norms", _make_decay_edit(lambda one: True)
        )
        for value in decays:
            yield _make_number_setting("weight_decay", value, first["weight_decay"])
        if isinstance(own.optimizer, AdamW):
            yield Setting(
                "the candidate's optimizer adds the decay to the gradient (Adam), and not to the weights (AdamW)",
                _make_kind_edit(Adam),
            )
        elif isinstance(own.optimizer, Adam):
            yield Setting(
                "the candidate's optimizer decays the weights (AdamW), and not through the gradient (Adam)",
                _make_kind_edit(AdamW),
            )
    if "betas" in first:
        for i, name in enumerate(("beta1", "beta2")):
            for value in (*USUAL.momenta, *USUAL.rare_betas, 0.0):
                if value != first["betas"][i]:
                    betas = (value, first["betas"][1]) if i == 0 else (first["betas"][0], value)
                    yield Setting(
                        f"the candidate's optimizer has {name}={value:g}, the reference's {first['betas'][i]:g}",
                        _make_settings_edit(betas=betas),
                        Code((f"betas={betas}",), (f"betas={tuple(first['betas'])}",)),
                        {"betas": betas},
                    )
        for pair in USUAL.beta_pairs:
            if pair != tuple(first["betas"]):
                yield _make_number_setting("betas", pair, tuple(first["betas"]))
        if isinstance(own.optimizer, (Adam, AdamW)):
            yield Setting("the candidate's optimizer does not correct the bias of the moments", _skip_bias_correction)
    if isinstance(first.get("eps"), float):
        for value in (*USUAL.optimizer_eps, *USUAL.rare_optimizer_eps):
            if value != first["eps"]:
                yield _make_number_setting("eps", value, first["eps"])
    for amsgrad in [True] if first.get("amsgrad") is False else []:
        yield Setting(
            "the candidate's optimizer takes the largest second moment so far (amsgrad)",
            _make_settings_edit(amsgrad=amsgrad),
        )
    if "momentum" in first:
        for value in (0.0, *USUAL.momenta):
            if value != first["momentum"]:
                yield _make_number_setting("momentum", value, first["momentum"])
        if "nesterov" in first:
            how = "plain" if first["nesterov"] else "Nesterov's"
            yield Setting(
                f"the candidate's optimizer uses {how} momentum", _make_settings_edit(nesterov=not first["nesterov"])
            )


def _make_number_setting(key: str, value: Any, right: Any) -> Setting:
    """Return a setting whose value is another number, or other numbers, than the reference's."""
    told = f"the candidate's optimizer has {key}={_format_value(value)}, the reference's {_format_value(right)}"
    code = Code((f"{key}={_format_value(value)}",), (f"{key}={_format_value(right)}",))
    return Setting(told, _make_settings_edit(**{key: value}), code, {key: value})


def _make_settings_edit(**settings: Any) -> Callable[[Optimizer], Optimizer]:
    def edit(optimizer: Optimizer) -> Optimizer:
        for group in optimizer.param_groups:
            group.update(settings)
        return optimizer

    return edit


def _make_kind_edit(kind: type[Optimizer]) -> Callable[[Optimizer], Optimizer]:
    """Return an edit that makes another kind of optimizer with the same groups and settings."""

    def edit(optimizer: Optimizer) -> Optimizer:
        known = inspect.signature(kind.__init__).parameters
        groups = [
            {key: value for key, value in group.items() if key == "params" or key in known}
            for group in optimizer.param_groups
        ]
        for group in groups:
            group.pop("decoupled_weight_decay", None)
        made: Any = kind
        other: Optimizer = made(groups)
        return other

    return edit


def _make_decay_edit(decays: Callable[[Tensor], bool]) -> Callable[[Optimizer], Optimizer]:
    """Return an edit after which only these parameters are decayed, by the largest decay of any group."""

    def edit(optimizer: Optimizer) -> Optimizer:
        decay = max(group["weight_decay"] for group in optimizer.param_groups)
        groups = [
            {**group, "params": some, "weight_decay": value}
            for group in optimizer.param_groups
            for value, some in (
                (decay, [one for one in group["params"] if decays(one)]),
                (0.0, [one for one in group["params"] if not decays(one)]),
            )
            if some
        ]
        optimizer.param_groups[:] = groups
        return optimizer

    return edit


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1


def _skip_bias_correction(optimizer: Optimizer) -> Optimizer:
    """Make Adam believe that it has made so many steps that its corrections are 1."""

    def count(*_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                state = optimizer.state[one]
                state.setdefault("exp_avg", torch.zeros_like(one))
                state.setdefault("exp_avg_sq", torch.zeros_like(one))
                state["step"] = torch.tensor(1e6)

    optimizer.register_step_pre_hook(count)
    return optimizer


# State that a training has lost when it was saved and loaded.


def lost_state(number: int, resumed: Resumption) -> Finding | None:
    """Return a finding on the state that a resumed training has lost; None if its first step is right to the bit.

    Args:
        number: the number of that step.
        resumed: how it differs from that of the uninterrupted training.
    """
    differing, moments, is_same = resumed.differing, resumed.moments, resumed.is_same
    lost = {what: _list_lost_names(names, resumed.restored.get(what, {})) for what, names in resumed.saved.items()}
    lost = {what: names for what, names in lost.items() if names}
    if is_same and not {SCALES, HISTORIES, BUFFERS} & lost.keys():
        return None
    what = few_of(differing)
    if not differing:
        later = "the scales of later steps" if {SCALES, HISTORIES} & lost.keys() else "what evaluation may read"
        what = f"its optimizer's {', '.join(moments) or 'weights'}" if not is_same else later
    beginning = (
        f"step {number}, the first after the training was saved and loaded, differs from that of the uninterrupted "
        f"training in {what}"
    )
    if not lost and resumed.caches_weights:
        return repairable(
            "weight-cache-stale",
            f"{beginning}, though the file held everything: FP8 copies of the weights from before the load are kept",
            "call the module with is_first_microbatch=True, or None, once after each load",
        )
    told = "; ".join(f"{what} ({few_of(names, 2)})" for what, names in lost.items())
    evidence = f"{beginning}; {f'not restored: {told}' if lost else 'something that no state_dict holds is lost'}"
    return repairable("state-not-saved", evidence, _write_advice(lost))


def _write_advice(lost: Mapping[str, list[str]]) -> str:
    advice = []
    if {SCALES, HISTORIES} & lost.keys():
        advice.append("save and load _extra_state of each module's state_dict, which has TE's FP8 scales and histories")
    if BUFFERS in lost:
        advice.append("save and load the buffers of the module's state_dict, such as the statistics of a BatchNorm")
    if COPIES in lost:
        advice.append("save the FP32 copies that the optimizer steps, which its state_dict does not hold")
    if any(what.startswith("the optimizer's") for what in lost):
        advice.append("save and load the optimizer's state, with its moments, its step count and its FP32 masters")
    return "; ".join(advice) or "look for state that the module or the optimizer keeps outside of its state_dict"


def _list_lost_names(saved: Mapping[str, bytes], restored: Mapping[str, bytes]) -> list[str]:
    return [name for name, digest in saved.items() if restored.get(name) != digest]
