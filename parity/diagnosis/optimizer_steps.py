"""Steps of ``torch.optim`` that a reference makes, and ports whose optimizer is of another kind or has other settings.

TE's ``FusedAdam`` decouples its weight decay unless told otherwise and decays by 0 by default, ``torch.optim.AdamW`` by
0.01. Before each step the reference's optimizer gets the settings under which it computes what the port's would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parity.diagnosis.hypothesis import Call, Hypothesis
from parity.trace import Trace

Group = dict[str, Any]
Change = Callable[[Optimizer, Group], None]

_NEAR = (0.9, 1.1)  # times the reference's own setting: from one of them another is looked for
_DECAYS = (0.01, 0.1)  # of weights, which many take
_MOMENTA = (0.9, 0.95, 0.99, 0.999)
_EPSILONS = (1e-8, 1e-6, 1e-5)


@dataclass(frozen=True)
class Stepped:
    """An optimizer's settings at its first step.

    Attributes:
        kind: its class.
        settings: of its first group of parameters.
    """

    kind: type[Optimizer]
    settings: Group


@contextmanager
def recorded_steps(trace_optimizers: list[Stepped]) -> Iterator[None]:
    """Appends each optimizer that makes a step inside of the context, once."""
    seen: list[Optimizer] = []

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is one for one in seen):
            seen.append(optimizer)
            settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            trace_optimizers.append(Stepped(type(optimizer), settings))

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def optimizer_step_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's Adam, AdamW or SGD."""
    for one in trace.optimizers[:1]:
        changes = _of_adam(one.settings) if issubclass(one.kind, torch.optim.Adam) else ()
        if issubclass(one.kind, torch.optim.SGD):
            changes = _of_sgd(one.settings)
        for change in (*changes, *_of_any(one.settings)):
            yield change(module)


_Make = Callable[[nn.Module], Hypothesis]


def _of_any(right: Group) -> Iterator[_Make]:
    yield from _numbers("lr", right, (), "its learning rate")
    yield from _numbers("weight_decay", right, (0.0, *_DECAYS), "its weight decay")
    yield _kind("maximize", "steps in the gradient's direction", "step against the gradient", _flipped("maximize"))
    yield _kind("no step", "makes no step (TE's FusedSGD skips BF16 parameters)", "make each step", _nothing)


def _of_adam(right: Group) -> Iterator[_Make]:
    if right["weight_decay"]:
        if right["decoupled_weight_decay"]:
            text, repair = "adds the decay to the gradient (L2)", "decouple it: adam_w_mode=True (AdamW)"
        else:
            text, repair = "decouples the decay (AdamW)", "add it to the gradient (L2): adam_w_mode=False"
        yield _kind("decay", text, repair, _flipped("decoupled_weight_decay"))
    yield _kind("bias correction", "corrects no bias", "correct it: bias_correction=True", _without_bias_correction)
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
    def change(optimizer: Optimizer, group: Group) -> None:
        group[setting] = value
        if setting == "dampening" and value:
            group["nesterov"] = False

    repair = f"give TE {setting}={float(right[setting]):.4g}, as the reference's optimizer has it; {described} is"
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


def _with(change: Change) -> Callable[[Call], Call]:
    """The same call, in which every step is made with changed settings."""

    def around(call: Call) -> Call:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            changed: list[tuple[Optimizer, list[Group]]] = []

            def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                own = next((groups for one, groups in changed if one is optimizer), None)
                if own is None:
                    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
                    changed.append((optimizer, own))
                for group, settings in zip(optimizer.param_groups, own, strict=True):
                    group.update(settings)
                    change(optimizer, group)

            handle = register_optimizer_step_pre_hook(before_step)
            try:
                return call(module, *args, **kwargs)
            finally:
                handle.remove()

        return under

    return around


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


def _steps(optimizer: Optimizer, group: Group) -> int:
    """How many there are with the one that is about to be made."""
    states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
    return 1 + max((int(state["step"]) for state in states if "step" in state), default=0)
