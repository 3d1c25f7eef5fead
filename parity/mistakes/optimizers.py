"""Mistakes in optimizer steps: rounding, settings, moments, and clipped gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import Around, Hypothesis, within
from parity.mistakes.usual_numbers import USUAL
from parity.trace.calls import is_in_place
from parity.trace.private_functions import clipping_at
from parity.trace.trace import Call, Edit, Stepped, Trace, Value, back, binary, edit, once_a_trace, settings_of

# Mistakes in rounding weights, in optimizer steps inside a comparison.


_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # bits of an FP32 number that truncation to the dtype drops


def optimizer_hypotheses(trace: Trace, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Yield wrong roundings of a weight to which the reference adds something of its shape, such as an update.

    Args:
        trace: the reference's trace.
        dtype: the dtype of the port's weights.
    """
    title, repair = "accumulation-precision", "add to the weights in FP32 and round the sum once, to nearest"
    if optimizers_of(trace):
        title, repair = "master-weights", "keep FP32 master weights and round them to nearest after each step"
    for call in trace.calls if dtype in _DROPPED_BITS else ():
        match binary(call):
            case ("add" | "sub", Value() as weight, _) if trace.parameter(back(trace, weight)) is not None:
                pass
            case _:
                continue
        shape = trace.tensor(weight).shape
        if len(shape) < 2 or trace.tensor(call.outputs[0]).shape != shape:
            continue
        for described, update in _updates(dtype):
            yield Hypothesis(
                title,
                f"weights {described}",
                f"{repair}; weights are {described}",
                (edit(call, (weight,), partial(_passing_gradients, update)),),
            )


def _updates(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Yield wrong updates: a description, and a function of the rightly updated weight and the one before, in FP32."""
    kept = -1 << _DROPPED_BITS[dtype]
    yield "not changed at all", lambda updated, weight: weight
    yield "cut off, not rounded", lambda updated, weight: (updated.view(torch.int32) & kept).view(torch.float32)
    for steps in USUAL.additions:
        yield f"rounded after each of {steps} additions", partial(_in_steps, steps, dtype)


def _in_steps(steps: int, dtype: torch.dtype, updated: Tensor, weight: Tensor) -> Tensor:
    step, rounded = ((updated - weight) / steps).to(dtype), weight.to(dtype)
    for _ in range(steps):
        rounded = rounded + step
    return rounded.float()


def _passing_gradients(update: Callable[[Tensor, Tensor], Tensor], was: Tensor, weight: Tensor) -> Tensor:
    return was + (update(was.detach().float(), weight.detach().float()).to(was.dtype) - was.detach())


# Ports whose optimizer is of another kind, or has other settings, than the reference's one of ``torch.optim``.
#
# TE's ``FusedAdam`` decouples its weight decay unless told otherwise and decays by 0 by default, ``torch.optim.AdamW``
# by 0.01. For each step, the reference's optimizer gets settings that make it compute what the port's would.


Group = dict[str, Any]
Change = Callable[[Optimizer, Group], None]


def optimizer_step_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's Adam, AdamW or SGD.

    The first value of each setting is subtle, because other values change the weights in the same direction.
    """
    named: set[str] = set()
    for one, edits in optimizers_of(trace)[:1]:
        if not issubclass(one.kind, (torch.optim.Adam, torch.optim.SGD)):
            return
        largest = max(float(group["weight_decay"]) for group in one.groups)
        first = one.groups[0] | {"lr": max(one.rates), "weight_decay": largest}
        of_kind = _of_adam if issubclass(one.kind, torch.optim.Adam) else _of_sgd
        of_any = _of_any(first), _of_groups(one), _of_schedule(one)
        for made in chain(of_kind(first), *of_any):
            setting = made.name.partition("=")[0]
            yield _under(edits, dataclasses.replace(made, subtle=made.tuned is not None and setting not in named))
            named.add(setting)


def optimizers_of(trace: Trace) -> list[tuple[Stepped, tuple[Edit, ...]]]:
    """Return the reference's optimizers, each with edits that replace steps by hand with those of ``torch.optim``."""
    return [(one, ()) for one in trace.optimizers] or steps_by_hand(trace)


def _under(edits: tuple[Edit, ...], one: Hypothesis) -> Hypothesis:
    """Return the mistake made in written-out steps. It is not subtle, because it exceeds the noise of every element."""
    if not edits:
        return one
    tuned = one.tuned
    another = None if tuned is None else lambda value: _under(edits, tuned(value))
    return dataclasses.replace(one, edits=edits, tuned=another, subtle=False)


def _of_any(right: Group) -> Iterator[Hypothesis]:
    own = float(right["lr"])
    # A near rate comes first, so that it is the subtle one: a matched filter needs the direction in which a small
    # change of the rate moves the weights, and a rate ten times as large moves them in another direction.
    yield from _numbers("lr", right, (0.9 * own, 10.0 * own, 0.1 * own), "its learning rate")
    yield from _numbers("weight_decay", right, (0.0, *USUAL.weight_decays), "its weight decay")
    yield _kind("maximize", "steps in the gradient's direction", "step against the gradient", _flipped("maximize"))
    yield _kind("no step", "makes no step (TE's FusedSGD skips BF16 parameters)", "make each step", _set("lr", 0.0))


def _of_groups(one: Stepped) -> Iterator[Hypothesis]:
    """Yield the mistake of one value for all parameter groups, for each setting in which they differ."""
    for setting, described in (("lr", "learning rate"), ("weight_decay", "weight decay")):
        values = dict.fromkeys(float(group[setting]) for group in one.groups)
        for value in values if len(values) > 1 else ():
            text = f"has {described} {value:.4g} for all parameters"
            repair = f"give TE the groups of parameters, each with its {setting}"
            yield _kind(f"{setting} {value:.4g} of all groups", text, repair, _set(setting, value))


def _of_schedule(one: Stepped) -> Iterator[Hypothesis]:
    """Yield learning rates that do not change from step to step, or change one step too early or too late."""
    if len(set(one.rates)) < 2:
        return
    initial = float(one.groups[0].get("initial_lr", one.rates[0]))
    for value in dict.fromkeys((one.rates[0], initial)):
        text = f"learning rate stays at {value:.4g}"
        yield _kind("no schedule", text, "change TE's learning rate: scheduler.step()", _set("lr", value))
    early = "change the learning rate after each step: optimizer.step(), then scheduler.step()"
    late = [one.rates[0], *one.rates]
    yield _kind("schedule late", "learning rates are those of the step before", early, _rate(late.__getitem__))
    yield _kind(
        "schedule early",
        "learning rates are those of the next step",
        early,
        _rate(lambda step: one.rates[min(step + 1, len(one.rates) - 1)]),
    )


def _of_adam(right: Group) -> Iterator[Hypothesis]:
    if right["weight_decay"]:
        if right["decoupled_weight_decay"]:
            text, repair = "adds the decay to the gradient (L2)", "decouple it: adam_w_mode=True (AdamW)"
        else:
            text, repair = "decouples the decay (AdamW)", "add it to the gradient (L2): adam_w_mode=False"
        yield _kind("decay", text, repair, _flipped("decoupled_weight_decay"))
    yield _kind("bias correction", "corrects no bias", "correct it: bias_correction=True", _without_bias_correction)
    text = "adds eps before it corrects the second moment's bias (epsilon hat)"
    yield _kind("epsilon hat", text, "add eps to the corrected moment's root", _epsilon_hat)
    for which in range(2):
        yield from _betas(which, right["betas"])
    yield _kind("amsgrad", "has the opposite", f"give TE amsgrad={right['amsgrad']}", _flipped("amsgrad"))
    yield from _numbers("eps", right, USUAL.optimizer_eps, "its eps")


def _of_sgd(right: Group) -> Iterator[Hypothesis]:
    if right["momentum"]:
        own = right["nesterov"]
        text = "has plain momentum" if own else "has Nesterov's momentum"
        yield _kind("nesterov", text, f"give TE nesterov={own}", _nesterov)
        yield from _numbers("dampening", right, (0.0, 0.5, right["momentum"]), "its dampening")
        yield from _numbers("momentum", right, (0.0, *USUAL.momenta), "its momentum")
        if right["weight_decay"]:
            repair = "add it to the gradient, before momentum: wd_after_momentum=False"
            yield _kind("decay after momentum", "adds the decay after momentum", repair, _decay_after_momentum)
    elif "momentum" in right:
        yield from _numbers("momentum", right, USUAL.momenta, "its momentum")


def _kind(name: str, what: str, repair: str, change: Change) -> Hypothesis:
    return Hypothesis(
        "optimizer",
        f"optimizer: {name}",
        f"{repair}, as the reference's optimizer does; the port's {what}",
        around=_with(change),
    )


def _numbers(setting: str, right: Group, usual: Iterable[float], described: str) -> Iterator[Hypothesis]:
    """Yield other values of a setting; 0 comes separately, because no search starts there."""
    own = float(right[setting])

    def another(value: float) -> Hypothesis:
        def change(optimizer: Optimizer, group: Group) -> None:
            if own:  # in proportion, because groups or steps may have their own value
                group[setting] = value * float(group[setting]) / own
            elif not group[setting]:
                group[setting] = value
            if setting == "dampening" and value:
                group["nesterov"] = False

        repair = f"give TE {setting}={own:.4g}, as the reference's optimizer has it; {described} is {value:.4g}"
        return Hypothesis("optimizer", f"optimizer: {setting}={value:.4g}", repair, around=_with(change))

    others = [value for value in usual if not math.isclose(value, own, rel_tol=1e-6, abs_tol=1e-30)]
    if 0.0 in others:
        yield another(0.0)
    yield from numbers(another, [own], others)


def _betas(which: int, right: tuple[float, float]) -> Iterator[Hypothesis]:
    """Yield other betas, searched for by their distance from 1."""

    def another(away: float) -> Hypothesis:
        beta = 1.0 - min(away, 1.0)

        def change(optimizer: Optimizer, group: Group) -> None:
            betas = list(group["betas"])
            betas[which] = beta
            group["betas"] = tuple(betas)

        name = f"beta{which + 1}"
        repair = f"give TE betas={tuple(right)}, as the reference's optimizer has them; {name} is {beta:.4g}"
        return Hypothesis("optimizer", f"optimizer: {name}={beta:.4g}", repair, around=_with(change))

    own = 1.0 - right[which]
    yield from numbers(another, [own], (1.0 - beta for beta in USUAL.momenta if not math.isclose(beta, right[which])))


def _with(change: Change) -> Around:
    """Return a wrapper that makes every step with changed settings."""

    @contextmanager
    def changed(module: nn.Module) -> Iterator[None]:
        right: list[Group] = []

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            right[:] = map(settings_of, optimizer.param_groups)
            for group in optimizer.param_groups:
                change(optimizer, group)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for group, settings in zip(optimizer.param_groups, right, strict=True):
                group.update(settings)

        handles = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return within(changed)


def _set(setting: str, value: float) -> Change:
    return lambda optimizer, group: group.update({setting: value})


def _rate(of_step: Callable[[int], float]) -> Change:
    """Return a change of the learning rate that depends on the number of the optimizer's step, from 0."""

    def change(optimizer: Optimizer, group: Group) -> None:
        made = getattr(optimizer, "_steps_made", 0)
        if group is optimizer.param_groups[-1]:
            optimizer._steps_made = made + 1  # type: ignore[attr-defined]
        group["lr"] = of_step(made)

    return change


def _flipped(setting: str) -> Change:
    return lambda optimizer, group: group.update({setting: not group[setting]})


def _nesterov(optimizer: Optimizer, group: Group) -> None:
    group["nesterov"] = not group["nesterov"]
    if group["nesterov"]:
        group["dampening"] = 0.0


def _decay_after_momentum(optimizer: Optimizer, group: Group) -> None:
    with torch.no_grad():
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
    group["weight_decay"] = 0.0


def _without_bias_correction(optimizer: Optimizer, group: Group) -> None:
    """Set the learning rate, eps and decay so that they cancel torch's own bias correction.

    TE's kernels hold the betas in FP32. Bias correction hides how far 1 - 0.999 is off there; without it, this shows.
    """
    group["betas"] = tuple(torch.tensor(beta, dtype=torch.float32).item() for beta in group["betas"])
    first, second = (1.0 - beta ** _steps(optimizer, group) for beta in group["betas"])
    ratio = first / math.sqrt(second)
    group["lr"] *= ratio
    group["eps"] /= math.sqrt(second)
    group["weight_decay"] /= ratio if group["decoupled_weight_decay"] else 1.0


def _epsilon_hat(optimizer: Optimizer, group: Group) -> None:
    group["eps"] /= math.sqrt(1.0 - group["betas"][1] ** _steps(optimizer, group))


def _steps(optimizer: Optimizer, group: Group) -> int:
    """Return the number of steps, including the one that is about to be made."""
    states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
    return 1 + max((int(state["step"]) for state in states if "step" in state), default=0)


# Moments of Adam that a port holds in fewer bits than the reference's optimizer: TE's ``exp_avg_dtype`` and the like.


_MOMENTS = (("exp_avg", "exp_avg_sq"), ("exp_avg",), ("exp_avg_sq",))
_BFLOAT16, _FLOAT16, _FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# TE scales the largest element of a tensor to this (``dtype_to_range_map``,
# ``pytorch/optimizers/fused_adam.py``, 2.20.2).
_RANGE = {_FLOAT16: torch.finfo(_FLOAT16).max / 2.0, _FLOAT8: 448.0}


def optimizer_moment_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield moments in each format that TE's FusedAdam takes, if the reference uses Adam or AdamW."""
    for one, edits in optimizers_of(trace)[:1]:
        formats = (_BFLOAT16, _FLOAT8, _FLOAT16) if issubclass(one.kind, torch.optim.Adam) else ()
        for dtype, names in itertools.product(formats, _MOMENTS):
            held = str(dtype).removeprefix("torch.")
            arguments = ", ".join(f"{name}_dtype=torch.float32" for name in names)
            right = f"give TE {arguments}, which the reference's optimizer has"
            yield Hypothesis(
                "optimizer",
                f"optimizer: {', '.join(names)} in {held}",
                f"{right}; the port's holds {' and '.join(names)} in {held}",
                edits,
                around=_holding(names, dtype),
            )


def _holding(names: tuple[str, ...], dtype: torch.dtype) -> Around:
    """Return a wrapper that rounds moments after every step."""

    @torch.no_grad()
    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for moment in (state[name] for name in names if name in state):
                moment.copy_(_held_in(dtype, moment))

    @contextmanager
    def rounding(module: nn.Module) -> Iterator[None]:
        handle = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            handle.remove()

    return within(rounding)


def _held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    if dtype not in _RANGE:
        return x.to(dtype).to(x.dtype)
    scale = x.abs().amax() / _RANGE[dtype]
    return torch.where(scale > 0, (x / scale).to(dtype).to(x.dtype) * scale, x)


# Ports that do not clip gradients before the optimizer's step as the reference does, or clip to another maximum norm.


def clipping_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield no clipping and clipping to another maximum norm, if the reference calls ``clip_grad_norm_``."""
    for own in trace.clips[:1]:
        yield Hypothesis(
            "optimizer",
            "optimizer: no clipping",
            f"clip gradients, clip_grad_norm_(parameters, {own:.4g}), before each step; the port clips none",
            around=within(lambda module: clipping_at(lambda norm: math.inf)),
        )
        yield from numbers(partial(_clipping_at, own), [own], (10.0 * own, 0.1 * own))


def _clipping_at(own: float, other: float) -> Hypothesis:
    return Hypothesis(
        "optimizer",
        f"optimizer: clipping at {other:.4g}",
        f"clip gradients at the norm {own:.4g}, as the reference does; the port clips at {other:.4g}",
        around=within(lambda module: clipping_at(lambda norm: norm * other / own)),
    )


# Finding the optimizer of ``torch.optim`` that makes given steps, from the gradients and the weights before and after.
#
# How the code of the steps is written does not matter. In FP64 a step of the right optimizer is exact: its learning
# rate and decay follow by least squares from any one step; betas, eps and momentum are among the numbers in the code.


_EXACT = 1e-6  # a step is the optimizer's if it deviates by at most this share of its norm
_MOST_NUMBERS = 12
_MOST_ELEMENTS = 4096
_USUAL_BETAS = (0.9, 0.999)
_USUAL_EPS = 1e-8

Directions = list[tuple[Tensor, Tensor]]  # each step's parts, to be scaled by rate, and by rate times decay


@dataclass(frozen=True)
class Fitted:
    """An optimizer that makes the steps of a weight.

    Attributes:
        kind: its class.
        settings: the settings of the weight's parameter group, with the first step's learning rate.
        rates: the learning rate of each step.
    """

    kind: type[Optimizer]
    settings: dict[str, Any]
    rates: tuple[float, ...]


def fitted(weights: Sequence[Tensor], gradients: Sequence[Tensor], numbers: Sequence[float]) -> Fitted | None:
    """Return the Adam, AdamW or SGD that makes these steps; None if there is none.

    Args:
        weights: the weight before each step and after the last, FP64.
        gradients: the gradient of each step.
        numbers: the numbers in the code.
    """
    ps, gs = ([x.detach().double().flatten()[:_MOST_ELEMENTS] for x in some] for some in (weights, gradients))
    for kind, settings, directions in _candidates(ps, gs, numbers):
        found = _rates_and_decay(ps, directions())
        if found is None:
            continue
        rates, decay = found
        if decay and "weight_decay" in settings:  # the weight would decay twice, in two ways
            continue
        made: Optimizer = kind([torch.zeros(1)], **{"lr": rates[0], "weight_decay": decay, **settings})
        return Fitted(kind, settings_of(made.param_groups[0]), rates)
    return None


def _candidates(
    ps: Sequence[Tensor], gs: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[tuple[Any, dict[str, Any], Callable[[], Directions]]]:
    """Yield optimizer classes, settings that least squares cannot fit, and functions of the steps' directions."""
    fractions = [x for x in _few([*numbers, *(1.0 - x for x in numbers)]) if 0.0 < x < 1.0]
    for momentum, nesterov in ((0.0, False), *itertools.product(fractions, (False, True))):
        yield SGD, dict(momentum=momentum, nesterov=nesterov), partial(_fit_sgd, ps, gs, momentum, nesterov)
    betas = [x for x in fractions if x >= 0.5]
    pairs = [pair for pair in itertools.product(betas, betas) if len(gs) > 1] or [_USUAL_BETAS]
    small = [*(x for x in _few(numbers) if 0.0 < x <= 1e-2), _USUAL_EPS]
    small = list(dict.fromkeys(small))
    added = {decay: [g + decay * p for g, p in zip(gs, ps, strict=False)] for decay in _few(numbers) if decay <= 1.0}
    for eps in small:
        for pair in pairs if _is_first_step(ps, gs, eps) else ():
            yield AdamW, dict(betas=pair, eps=eps), partial(_fit_adam, ps, gs, pair, eps)
    for (decay, sums), eps in itertools.product(added.items(), small):
        for pair in pairs if _is_first_step(ps, sums, eps) else ():
            yield Adam, dict(betas=pair, eps=eps, weight_decay=decay), partial(_fit_adam, ps, sums, pair, eps)


def _is_first_step(ps: Sequence[Tensor], gs: Sequence[Tensor], eps: float) -> bool:
    """Return whether the first step is Adam's, which does not depend on the betas."""
    return _rates_and_decay(ps[:2], _fit_adam(ps[:1], gs[:1], _USUAL_BETAS, eps)) is not None


def _few(numbers: Sequence[float]) -> list[float]:
    """Return each number once, rounded so that 1 - 0.9 is 0.1."""
    return list(dict.fromkeys(float(f"{number:.9g}") for number in numbers))[:_MOST_NUMBERS]


def _fit_sgd(ps: Sequence[Tensor], gs: Sequence[Tensor], momentum: float, nesterov: bool) -> Directions:
    found, buffers = [], [torch.zeros_like(gs[0]), torch.zeros_like(gs[0])]
    for p, g in zip(ps, gs, strict=False):
        buffers = [momentum * buffer + x for buffer, x in zip(buffers, (g, p), strict=True)]
        of_gradient, of_decay = buffers
        found.append((g + momentum * of_gradient, p + momentum * of_decay) if nesterov else (of_gradient, of_decay))
    return found


def _fit_adam(ps: Sequence[Tensor], gs: Sequence[Tensor], betas: tuple[float, float], eps: float) -> Directions:
    found, mean, square = [], torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for number, (p, g) in enumerate(zip(ps, gs, strict=False), 1):
        mean = betas[0] * mean + (1.0 - betas[0]) * g
        square = betas[1] * square + (1.0 - betas[1]) * g.square()
        root = (square / (1.0 - betas[1] ** number)).sqrt() + eps
        found.append((mean / (1.0 - betas[0] ** number) / root, p))
    return found


def _rates_and_decay(ps: Sequence[Tensor], directions: Directions) -> tuple[tuple[float, ...], float] | None:
    """Return the learning rates and the decay of steps along these directions; None if no single decay fits them."""
    rates, decays = [], []
    for (before, after), pair in zip(itertools.pairwise(ps), directions, strict=True):
        step, along = before - after, torch.stack(pair, 1)
        if not bool(along.isfinite().all()) or not step.any():
            return None
        sizes = torch.linalg.vector_norm(along, dim=0)
        if not sizes.all():
            return None
        solved = torch.linalg.lstsq(along / sizes, step[:, None], driver="gelsd").solution[:, 0]
        size = torch.linalg.vector_norm(step)
        if torch.linalg.vector_norm(step - along / sizes @ solved) > _EXACT * size:
            return None
        rate, decayed = (solved / sizes).tolist()
        if rate <= 0.0:
            return None
        rates.append(rate)
        decays.append(decayed / rate if abs(solved[1]) > _EXACT * size else 0.0)
    same = all(math.isclose(decay, decays[0], rel_tol=1e-3) for decay in decays)
    return (tuple(map(_plain, rates)), _plain(decays[0])) if same and decays[0] >= 0.0 else None


def _plain(number: float) -> float:
    """Return the number as people write it, without the error of least squares."""
    return float(f"{number:.5g}")


# Optimizer steps that a reference writes out, replaced by those of a ``torch.optim`` optimizer that computes the same.
#
# A weight is recognised when its gradient is read. Its changes until the next gradient is read are one step, however
# they are written; the fit above tells which optimizer makes such steps. An edit of each step's last call makes torch's
# optimizer take the step instead, so that its settings can be changed like those of any other.


_NEAR = 0.5  # a weight's steps together move it by at most this share of its norm
_ALIKE = 1e-12  # two values of a weight are the same if they differ by at most this share of its norm


@dataclass
class _Weight:
    """The reads of one weight's gradients.

    Attributes:
        before: the weight as it is at each read.
        gradients: the gradients that are read.
        reads: the place of each read among the trace's calls.
    """

    before: list[Value] = field(default_factory=list)
    gradients: list[Value] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


@once_a_trace
def steps_by_hand(trace: Trace) -> list[tuple[Stepped, tuple[Edit, ...]]]:
    """Return the optimizer of all weights that one kind of optimizer steps, with the edits that make its steps."""
    found: list[tuple[Fitted, list[Edit]]] = []
    for weight in _weights(trace):
        last_calls = _last_calls(trace, weight)
        count = len(last_calls)
        if not count:
            continue
        tensors = [trace.tensor(value) for value in (*weight.before[:count], last_calls[-1].outputs[0])]
        gradients = [trace.tensor(value) for value in weight.gradients[:count]]
        made = fitted(tensors, gradients, _fitted_numbers(trace.calls[weight.reads[0] :]))
        if made is not None and (not found or made.kind is found[0][0].kind):
            found.append((made, [_edit(made, weight, call, step) for step, call in enumerate(last_calls, 1)]))
    if not found:
        return []
    first = found[0][0]
    stepped = Stepped(first.kind, [made.settings for made, _ in found], list(first.rates))
    return [(stepped, tuple(one for _, edits in found for one in edits))]


def _weights(trace: Trace) -> list[_Weight]:
    """Return each weight with the last gradient that is read before each change."""
    weights: list[_Weight] = []
    for place, call in enumerate(trace.calls):
        for before, gradient in _read(trace, call):
            x = trace.tensor(before)
            known = next((one for one in weights if _apart(trace.tensor(one.before[-1]), x) < _NEAR), None)
            if known is None:
                known = _Weight()
                weights.append(known)
            if known.before and _apart(trace.tensor(known.before[-1]), x) <= _ALIKE:
                known.gradients[-1], known.reads[-1] = gradient, place
            else:
                known.before.append(before)
                known.gradients.append(gradient)
                known.reads.append(place)
    return weights


def _read(trace: Trace, call: Call) -> Iterator[tuple[Value, Value]]:
    """Yield each weight and its gradient, as ``p.grad`` or ``torch.autograd.grad(outputs, inputs)`` gives them."""
    if call.name != "grad" or not call.outputs:
        return
    of_all = call.kwargs.get("inputs", call.args[1] if len(call.args) > 1 else call.inputs)
    given = [leaf for leaf in tree_leaves(of_all) if isinstance(leaf, Value)]
    for weight, gradient in zip(given, call.outputs, strict=False):
        if trace.tensor(weight).shape == trace.tensor(gradient).shape:
            yield weight, gradient


def _last_calls(trace: Trace, weight: _Weight) -> list[Call]:
    """Return the call that ends each step; there are fewer than reads if no step follows the last read."""
    calls: list[Call] = []
    ends = [*weight.reads[1:], len(trace.calls)]
    for step, (read, end) in enumerate(zip(weight.reads, ends, strict=True)):
        before = trace.tensor(weight.before[step])
        made = [call for call in trace.calls[read + 1 : end] if _may_step(trace, call, before)]
        after = trace.tensor(weight.before[step + 1]) if step + 1 < len(ends) else None
        if after is None and made:
            after = trace.tensor(made[-1].outputs[0])
        last = [call for call in made if after is not None and _apart(trace.tensor(call.outputs[0]), after) <= _ALIKE]
        if not last:
            break
        calls.append(last[0])
    return calls


def _may_step(trace: Trace, call: Call, before: Tensor) -> bool:
    """Return whether a call's result may be the weight after a step."""
    return len(call.outputs) == 1 and _ALIKE < _apart(before, trace.tensor(call.outputs[0])) < _NEAR


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the distance relative to the first tensor; infinite if the two cannot be the same weight."""
    if one.shape != other.shape or not one.is_floating_point() or not other.is_floating_point():
        return float("inf")
    size = torch.linalg.vector_norm(one).item()
    return torch.linalg.vector_norm(one - other).item() / size if size > 0 else float("inf")


def _fitted_numbers(calls: Sequence[Call]) -> list[float]:
    leaves = (leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs)))
    return list(dict.fromkeys(abs(leaf) for leaf in leaves if isinstance(leaf, float) and leaf == leaf))


def _edit(made: Fitted, weight: _Weight, call: Call, steps: int) -> Edit:
    """Return the edit that makes a call return the weight's first value after this many steps of the optimizer."""

    def compute(was: Tensor, first: Tensor, *gradients: Tensor) -> Tensor:
        after = _stepped(made, first, gradients).to(was.dtype)
        if is_in_place(call):
            with torch.no_grad():
                return was.copy_(after)
        return was + (after - was).detach()

    return edit(call, (weight.before[0], *weight.gradients[:steps]), compute)


def _stepped(made: Fitted, first: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    parameter = first.detach().clone().requires_grad_()
    kind: Any = made.kind
    optimizer = kind([parameter])
    optimizer.param_groups[0].update(made.settings)
    for rate, gradient in zip(made.rates, gradients, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.detach().clone()
        optimizer.step()
    return parameter.detach()
