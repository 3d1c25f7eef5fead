"""Steps of ``torch.optim`` that a reference makes, and ports whose optimizer is of another kind or has other settings.

TE's ``FusedAdam`` decouples its weight decay unless told otherwise and decays by 0 by default, ``torch.optim.AdamW`` by
0.01. For each step the reference's optimizer gets the settings under which it computes what the port's would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parity.diagnosis.hypothesis import Hypothesis, ModuleCall
from parity.diagnosis.training.steps_by_hand import steps_by_hand
from parity.watching.optimizers import Stepped, settings_of
from parity.watching.trace import Edit, Trace

Group = dict[str, Any]
Change = Callable[[Optimizer, Group], None]

_NEAR = (0.9, 1.1)  # times the reference's own setting: from one of them another is looked for
_DECAYS = (0.01, 0.1)  # of weights, which many take
_MOMENTA = (0.9, 0.95, 0.99, 0.999)
_EPSILONS = (1e-8, 1e-6, 1e-5)


def optimizer_step_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's Adam, AdamW or SGD.

    The first of each setting is subtle: what another value of it changes points where this one does.
    """
    named: set[str] = set()
    for one, edits in optimizers_of(trace)[:1]:
        if not issubclass(one.kind, (torch.optim.Adam, torch.optim.SGD)):
            return
        largest = max(float(group["weight_decay"]) for group in one.groups)
        first = one.groups[0] | {"lr": max(one.rates), "weight_decay": largest}
        changes = _of_adam(first) if issubclass(one.kind, torch.optim.Adam) else _of_sgd(first)
        for change in (*changes, *_of_any(first), *_of_groups(one), *_of_schedule(one)):
            made = change(module)
            setting = made.name.partition("=")[0]
            yield _under(edits, dataclasses.replace(made, subtle=made.tuned is not None and setting not in named))
            named.add(setting)


def optimizers_of(trace: Trace) -> list[tuple[Stepped, tuple[Edit, ...]]]:
    """The reference's optimizers, each with the edits under which those of ``torch.optim`` step; none where they do."""
    by_hand = [(one.stepped, one.edits) for one in steps_by_hand(trace)]
    return [(one, ()) for one in trace.optimizers] or by_hand


def _under(edits: tuple[Edit, ...], one: Hypothesis) -> Hypothesis:
    """Of steps that are written out a mistake is too large to be below the noise of single elements."""
    if not edits:
        return one
    tuned = one.tuned
    another = None if tuned is None else lambda value: _under(edits, tuned(value))
    return dataclasses.replace(one, edits=edits, tuned=another, subtle=False)


_Make = Callable[[nn.Module], Hypothesis]


def _of_any(right: Group) -> Iterator[_Make]:
    own = float(right["lr"])
    yield from _numbers("lr", right, (_NEAR[0] * own, 10.0 * own, 0.1 * own), "its learning rate")
    yield from _numbers("weight_decay", right, (0.0, *_DECAYS), "its weight decay")
    yield _kind("maximize", "steps in the gradient's direction", "step against the gradient", _flipped("maximize"))
    yield _kind("no step", "makes no step (TE's FusedSGD skips BF16 parameters)", "make each step", _nothing)


def _of_groups(one: Stepped) -> Iterator[_Make]:
    """Settings that the groups of parameters do not share."""
    for setting, described in (("lr", "learning rate"), ("weight_decay", "weight decay")):
        values = dict.fromkeys(float(group[setting]) for group in one.groups)
        for value in values if len(values) > 1 else ():
            text = f"has {described} {value:.4g} for all parameters"
            repair = f"give TE the groups of parameters, each with its {setting}"
            yield _kind(f"{setting} {value:.4g} of all groups", text, repair, _set(setting, value))


def _of_schedule(one: Stepped) -> Iterator[_Make]:
    """Learning rates that change from step to step."""
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


def _of_adam(right: Group) -> Iterator[_Make]:
    if right["weight_decay"]:
        if right["decoupled_weight_decay"]:
            text, repair = "adds the decay to the gradient (L2)", "decouple it: adam_w_mode=True (AdamW)"
        else:
            text, repair = "decouples the decay (AdamW)", "add it to the gradient (L2): adam_w_mode=False"
        yield _kind("decay", text, repair, _flipped("decoupled_weight_decay"))
    yield _kind("bias correction", "corrects no bias", "correct it: bias_correction=True", _without_bias_correction)
    text = "adds eps before it corrects the second moment's bias (epsilon hat)"
    yield _kind("epsilon hat", text, "add eps to the corrected moment's root", _epsilon_hat)
    for i, name in enumerate(("beta1", "beta2")):
        yield from _betas(i, name, right["betas"])
    yield _kind("amsgrad", "keeps no maximum, or one", "take amsgrad as the reference has it", _flipped("amsgrad"))
    yield from _numbers("eps", right, _EPSILONS, "its eps")


def _of_sgd(right: Group) -> Iterator[_Make]:
    if right["momentum"]:
        own = right["nesterov"]
        text = "has plain momentum" if own else "has Nesterov's momentum"
        yield _kind("nesterov", text, f"give TE nesterov={own}", _nesterov)
        yield from _numbers("dampening", right, (0.0, 0.5, right["momentum"]), "its dampening")
        yield from _numbers("momentum", right, (0.0, *_MOMENTA), "its momentum")
        if right["weight_decay"]:
            repair = "add it to the gradient, before momentum: wd_after_momentum=False"
            yield _kind("decay after momentum", "adds the decay after momentum", repair, _decay_after_momentum)
    elif "momentum" in right:
        yield from (_number("momentum", right, value, "its momentum") for value in _MOMENTA)


def _kind(name: str, what: str, repair: str, change: Change) -> _Make:
    return lambda module: Hypothesis(
        "optimizer",
        f"optimizer: {name}",
        f"{repair}, as the reference's optimizer does; the port's {what}",
        module,
        around=_with(change),
    )


def _numbers(setting: str, right: Group, known: Sequence[float], described: str) -> Iterator[_Make]:
    own = float(right[setting])
    for value in dict.fromkeys((*known, *(near * own for near in _NEAR))):
        if not math.isclose(value, own, rel_tol=1e-6, abs_tol=1e-30):
            yield _number(setting, right, value, described)


def _number(setting: str, right: Group, value: float, described: str) -> _Make:
    own = float(right[setting])

    def change(optimizer: Optimizer, group: Group) -> None:
        if own:  # in proportion, where groups or steps have their own
            group[setting] = value * float(group[setting]) / own
        elif not group[setting]:
            group[setting] = value
        if setting == "dampening" and value:
            group["nesterov"] = False

    repair = f"give TE {setting}={own:.4g}, as the reference's optimizer has it; {described} is"
    return _tuned(f"{setting}", repair, value, change, lambda other: _number(setting, right, other, described))


def _betas(which: int, name: str, right: tuple[float, float]) -> Iterator[_Make]:
    """Tuned by how far a beta is from 1."""

    def with_beta(away: float) -> _Make:
        def change(optimizer: Optimizer, group: Group) -> None:
            betas = list(group["betas"])
            betas[which] = 1.0 - min(away, 1.0)
            group["betas"] = tuple(betas)

        text = f"give TE betas={tuple(right)}, as the reference's optimizer has them; {name} is"
        return _tuned(name, text, away, change, with_beta, 1.0 - min(away, 1.0))

    own = 1.0 - right[which]
    others = (1.0 - beta for beta in _MOMENTA)
    yield from (with_beta(away) for away in (*others, *(near * own for near in _NEAR)) if not math.isclose(away, own))


def _tuned(
    name: str, repair: str, value: float, change: Change, other: Callable[[float], _Make], shown: float | None = None
) -> _Make:
    shown = value if shown is None else shown
    return lambda module: Hypothesis(
        "optimizer",
        f"optimizer: {name}={shown:.4g}",
        f"{repair} {shown:.4g}",
        module,
        around=_with(change),
        value=value or None,
        tuned=(lambda number: other(number)(module)) if value else None,
    )


def _with(change: Change) -> Callable[[ModuleCall], ModuleCall]:
    """The same call, in which every step is made with changed settings."""

    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
                return call(module, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return under

    return around


def _set(setting: str, value: float) -> Change:
    def change(optimizer: Optimizer, group: Group) -> None:
        group[setting] = value

    return change


def _rate(of_step: Callable[[int], float]) -> Change:
    """By the number of the optimizer's step, from 0."""

    def change(optimizer: Optimizer, group: Group) -> None:
        made = getattr(optimizer, "_steps_made", 0)
        if group is optimizer.param_groups[-1]:
            optimizer._steps_made = made + 1  # type: ignore[attr-defined]
        group["lr"] = of_step(made)

    return change


def _flipped(setting: str) -> Change:
    def change(optimizer: Optimizer, group: Group) -> None:
        group[setting] = not group[setting]

    return change


def _nesterov(optimizer: Optimizer, group: Group) -> None:
    group["nesterov"] = not group["nesterov"]
    if group["nesterov"]:
        group["dampening"] = 0.0


def _nothing(optimizer: Optimizer, group: Group) -> None:
    group["lr"] = 0.0


def _decay_after_momentum(optimizer: Optimizer, group: Group) -> None:
    _shrink(group, group["lr"] * group["weight_decay"])
    group["weight_decay"] = 0.0


def _shrink(group: Group, by: float) -> None:
    with torch.no_grad():
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.mul_(1.0 - by)


def _without_bias_correction(optimizer: Optimizer, group: Group) -> None:
    """By a learning rate, an eps and a decay from which torch's own correction makes those without.

    TE's kernels hold the betas in FP32; only a correction hides how far 1 - 0.999 is off there.
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
    """How many there are with the one that is about to be made."""
    states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
    return 1 + max((int(state["step"]) for state in states if "step" in state), default=0)
