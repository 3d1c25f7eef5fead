"""Judge the results of a training step other than its outputs and gradients: updates, buffers and delayed scaling.

An update is compared with that of the reference's optimizer, which steps in FP64 with the candidate's gradients. So the
comparison does not depend on how the gradients came about, and an error of one step does not carry over to the next.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parity.case.case import MakeOptimizer
from parity.mistakes.codes import repairable
from parity.numerics.factors import uneven
from parity.result import Finding
from parity.te.state import Kept
from parity.trainings.steps import Named, Update
from parity.user_error import UserError

# An optimizer that computes in FP32 rounds each of about ten operations to 6e-8, and TE's FusedAdam holds betas in
# FP32, which moves 1 - 0.999 by 5e-5 of itself. A share of 1e-3 is larger than all that. A setting that changes a step
# by less is not seen; ``reports/judge_constants.md`` has settings that change it by hardly more.
ARITHMETIC = 1e-3
# About ten roundings to FP32, as many as there are in an optimizer's sum of its average and its gradient.
_ROUNDINGS = 10 * torch.finfo(torch.float32).eps

_State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Deviation:
    """The distance of the optimizer's step of one parameter from the reference's.

    Attributes:
        name: the name of the reference's parameter.
        share: the norm of the difference over the norm of the reference's step.
        rounding: the same for the weights after the reference's step, rounded to the candidate's dtype.
        along: how much of the reference's step the candidate's contains; 1 if it is right.
    """

    name: str
    share: float
    rounding: float
    along: float

    @property
    def is_right(self) -> bool:
        """Return whether arithmetic and the dtype of the weights explain the difference."""
        return self.share <= ARITHMETIC + self.rounding


@dataclass(frozen=True, eq=False)
class _Taken:
    """The inputs of an optimizer's step: its state, the settings of its groups, and gradients by name."""

    state: _State
    settings: list[dict[str, Any]]
    gradients: Named


class Replay:
    """The reference's optimizer, which steps the followed elements of each parameter in FP64.

    Attributes:
        parameters: the parameters that it steps, by name.
    """

    def __init__(
        self,
        reference: nn.Module,
        make: MakeOptimizer,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        edit: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
    ) -> None:
        """Make the optimizer of a copy of the reference; ``edit`` may change its settings.

        Raises:
            UserError: if ``make`` returns no optimizer.
        """
        self._module = copy.deepcopy(reference).double()
        self.parameters = dict(self._module.named_parameters())
        self._shapes = {name: one.shape for name, one in self.parameters.items()}
        made = make(self._module)
        if not isinstance(made, Optimizer):
            raise UserError(f"a training's optimizer must be a torch.optim.Optimizer, not {type(made).__name__}")
        self.optimizer = edit(made)
        self._scheduler = scheduler(self.optimizer) if scheduler else None
        self._taken = _Taken({}, [], {})

    def step(self, update: Update) -> Named:
        """Return the weights after this optimizer has stepped with the weights and gradients of an update.

        An optimizer may step by a sign, as Lion does. If the terms of its sum nearly cancel, FP32 arithmetic decides
        that sign. So if the step differs from the candidate's, it is also made with gradients that are a few FP32
        roundings larger and smaller, and each element is taken from the result that is nearest to the candidate's.
        """
        right = self._make_step(update)
        if not all(one.is_right for one in deviations(update, right, torch.float32)):
            chosen, taken = self._copy_state(), self._taken
            for factor in (1.0 - _ROUNDINGS, 1.0 + _ROUNDINGS):
                self._restore_state(taken.state)
                self._take_nearer(self._made_again(update, taken, factor), update.after, right, chosen)
            self._restore_state(chosen)
        if self._scheduler is not None:
            self._scheduler.step()
        return right

    def _take_nearer(self, other: Named, made: Named, right: Named, chosen: _State) -> None:
        """Put each element of the last step that is nearer to ``made`` into ``right`` and into the state ``chosen``."""
        for name, parameter in self.parameters.items():
            if name not in right:
                continue
            target = made[name].to(parameter.device)
            nearer = (other[name] - target).abs() < (right[name] - target).abs()
            right[name] = torch.where(nearer, other[name], right[name])
            kept, others = chosen.get(parameter, {}), self.optimizer.state.get(parameter, {})
            for key, x in kept.items():
                if isinstance(x, Tensor) and x.numel() == nearer.numel():
                    kept[key] = torch.where(nearer.view(x.shape), others[key], x)

    def _copy_state(self) -> _State:
        return {parameter: copy.deepcopy(kept) for parameter, kept in self.optimizer.state.items()}

    def _restore_state(self, state: _State) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: copy.deepcopy(kept) for parameter, kept in state.items()})

    def _make_step(self, update: Update) -> Named:
        """Return the weights after the optimizer has stepped with an update's gradients."""
        self._load_weights_and_gradients(
            update, {name: x.to(self.parameters[name].device) for name, x in update.gradients.items()}
        )
        last_hook = self.optimizer.register_step_pre_hook(self._record_step_inputs)
        self.optimizer.step()
        last_hook.remove()
        return self._copy_weights()

    def _made_again(self, update: Update, taken: _Taken, factor: float) -> Named:
        """Return the weights after the same step with gradients times a factor.

        Hooks do not run again: one may step a schedule, or may already have changed the gradients that were taken.
        """
        self._load_weights_and_gradients(update, {name: factor * x for name, x in taken.gradients.items()})
        optimizer, now = self.optimizer, [dict(group) for group in self.optimizer.param_groups]
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            self._apply_settings(taken.settings)
            optimizer.step()
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
            self._apply_settings(now)
        return self._copy_weights()

    def _apply_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)

    @property
    def rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter in the last step, by its name."""
        of = {id(one): name for name, one in self.parameters.items()}
        groups = zip(self.optimizer.param_groups, self._taken.settings, strict=False)
        return {of[id(one)]: float(own["lr"]) for group, own in groups if "lr" in own for one in group["params"]}

    def _record_step_inputs(self, *_: Any) -> None:
        """Keep the inputs of the optimizer's step as its other hooks leave them."""
        gradients = {name: one.grad.clone() for name, one in self.parameters.items() if one.grad is not None}
        self._taken = _Taken(self._copy_state(), [dict(group) for group in self.optimizer.param_groups], gradients)

    def _load_weights_and_gradients(self, update: Update, gradients: Named) -> None:
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.grad = None  # it has the parameter's previous shape
                shape = self._shapes[name] if update.is_whole else update.gradients[name].shape
                parameter.data = update.before[name].to(parameter.device, copy=True).view(shape)
                parameter.grad = gradients[name].clone().view(shape)

    def _copy_weights(self) -> Named:
        return {name: one.detach().flatten().clone() for name, one in self.parameters.items() if one.requires_grad}


def deviations(update: Update, expected: Named, dtype: torch.dtype) -> list[Deviation]:
    """Compare the weights after a step with those that the reference's optimizer makes.

    Args:
        update: what the candidate's optimizer did.
        expected: the reference's weights after the same step.
        dtype: the dtype in which the candidate's optimizer holds its weights.
    """
    return [_measure_deviation(name, update, right, dtype) for name, right in expected.items()]


def _measure_deviation(name: str, update: Update, right: Tensor, dtype: torch.dtype) -> Deviation:
    step, made = right - update.before[name], update.after[name] - update.before[name]
    size = float(step.norm())
    if not size:
        off = float(made.norm())
        return Deviation(name, float("inf") if off else 0.0, 0.0, 1.0)
    rounding = float((right.to(dtype).double() - right).norm()) / size
    along = float((made * step).sum()) / size**2
    return Deviation(name, float((made - step).norm()) / size, 1.01 * rounding, along)


def not_as(update: Update, expected: Named, name: str, dtype: torch.dtype) -> Tensor:
    """Return a mask of a parameter's elements that are not stepped as the reference's optimizer steps them.

    In a single element, arithmetic may change much of a small step, and rounding may change more than that. So a
    difference counts only if it exceeds both a tenth of the parameter's largest step and an ulp.
    """
    before, after, right = update.before[name], update.after[name], expected[name]
    ulp = torch.finfo(dtype).eps * right.abs()
    return (after - right).abs() > torch.maximum(0.1 * (right - before).abs().max(), ulp)


def holds_weights(dtype: torch.dtype, update: Update) -> bool:
    """Return whether the dtype represents every weight after this step exactly."""
    return all(torch.equal(x.to(dtype).double(), x) for x in update.after.values())


# Buffers that a forward pass changes, such as running statistics.


# With fewer elements than this, a multiple fits whatever is wrong with them: with this many, one in ten million does.
_FEWEST_MOVED = 8
# The least difference of a multiple from 1 that counts, and the least difference as a share of the buffer. Errors of
# NVFP4 are about a tenth, and their squares add a hundredth to a variance.
_MULTIPLE, _OF_BUFFER = 0.1, 0.01


def multiple_moved(own: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> float:
    """Return the multiple of the right move by which a buffer has moved if it explains 90 % of the difference, else 1.

    Args:
        own: the candidate's buffer before and after the pass.
        right: the same of the reference. If it began with other numbers, nothing is known, and 1 is returned.
    """
    (was, now), (begun, due) = ((x.double().cpu() for x in both) for both in (own, right))
    if not was.shape == now.shape == due.shape:
        return 1.0
    moved, step = now - was, due - begun
    # That nothing has moved is no fit, so that a few numbers are enough, and a move that the dtype can hold.
    fewest, share = (_FEWEST_MOVED, _OF_BUFFER) if bool(moved.any()) else (1, ARITHMETIC)
    least = max(torch.finfo(own[1].dtype).eps, share) * float(due.norm())
    off, size = float((moved - step).norm()), float(step.norm())
    factor = float((moved * step).sum()) / size**2 if size else 1.0
    is_all = float((moved - factor * step).norm()) <= 0.1 * off
    begins_alike = float((was - begun).norm()) <= torch.finfo(own[0].dtype).eps * float(begun.norm())
    is_multiple = is_all and abs(factor - 1.0) > _MULTIPLE and uneven(moved, step) is None
    is_known = begins_alike and off > least and due.numel() >= fewest
    return factor if is_known and is_multiple else 1.0


# Delayed scaling: the numbers that a step writes into each amax history, and the scale that follows from them.
#
# TE records the largest magnitude of each tensor that it quantizes, appends it to the tensor's history after the pass,
# and computes the next pass's scale from that history (``_amax_and_scale_update`` in ``pytorch/quantization.py`` and
# ``common/recipe/delayed_scaling.cu`` of TE 2.20). So the history after a step is the one before it, shifted, with new
# numbers at its end. This check is exact, whatever the numbers are, and that of a scale is exact up to FP32. Whether an
# amax is that of the right tensor can be checked exactly for weights. For inputs and gradients, the reference's own
# amax is compared, as closely as a scale need fit.


# The error of an FP32 division and of a kernel's power of two. Any other amax would make a far larger difference.
_FP32 = 1e-5
# A weight's amax is one of its own numbers, up to a cast to BF16.
_CAST = 2.0**-7
# In powers of two. A scale need not fit its tensor more closely than this, see ``parity.te.state``.
_FITS = 1.0

_TOLD = {  # the evidence, and the repair
    "amax-history-lost": (
        "{what} has an amax history that does not continue the one before the step: it was reset, or belongs to "
        "another module",
        "keep the modules, and their fp8_meta, from step to step",
    ),
    "amax-not-recorded": (
        "{what} has the same amax history as before the step: its amax was not recorded, or not added to the history "
        "at the end of the pass, so its scale stays the same",
        "run the module within te.autocast, with gradients enabled, and run the module itself, not a copy of it",
    ),
    "scale-not-updated": (
        "{what} has a scale that does not follow from its amax history{by}",
        "leave the scales to TE, and load them together with the histories",
    ),
    "amax-of-another-tensor": (
        "{what} has an amax of another tensor in its history{by}",
        "look at which tensor is quantized there, and over which ranks amaxes are reduced",
    ),
}


def wrong_scaling(
    moves: Sequence[tuple[Kept, Kept]],
    multiplied: Mapping[tuple[str, bool], float],
    is_plain_step: bool,
    hands_on: bool = False,
) -> Finding | None:
    """Return a finding if histories or scales are wrong after a step, else None.

    Args:
        moves: the scaling state of each tensor before and after the step.
        multiplied: the amax of each weight's other operand, by the weight's name and by whether the operand is a
            gradient; unknown ones are missing.
        is_plain_step: whether the port adds no passes and no loss scale of its own, which inputs and gradients would
            depend on.
        hands_on: whether attention hands on what it has cast to FP8, so that its neighbours never cast that themselves.
    """
    wrong: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for before, after in moves:
        slot = before.slot
        if hands_on and slot.role != "weight" and not bool(after.history.any()):
            continue
        expected = before.weight
        if slot.role in ("input", "output gradient"):
            known = [multiplied.get((name, slot.role == "output gradient")) for name in slot.weights]
            expected = max((one for one in known if one is not None), default=None)
        is_known = slot.role == "weight" or is_plain_step
        title, by = _diagnose_scaling(before, after, expected if expected else None, is_known)
        if title:
            wrong[title].append((slot.name, by))
    for title, (told, repair) in _TOLD.items():
        if wrong[title]:
            whose = [name for name, _ in wrong[title]]
            more = f" (and so do {len(whose) - 1} more: {', '.join(whose[1:3])})" if len(whose) > 1 else ""
            return repairable(title, told.format(what=whose[0], by=wrong[title][0][1]) + more, repair)
    return None


def _diagnose_scaling(before: Kept, after: Kept, expected: float | None, is_known: bool) -> tuple[str, str]:
    """Return the title of the finding on one tensor, and its numbers as text; empty texts if nothing is wrong."""
    if before.history.shape != after.history.shape:
        return "amax-history-lost", ""
    was, now = before.history[1:], after.history[1:]
    pushed = _moved_on(was, now)
    is_full = bool((now != 0).all())
    if torch.equal(now, was) and not (pushed and bool(was.any())):
        # Weights may be cached from one step to the next as long as they do not change. If they do, gradients show it.
        if not len(was) or expected is None or before.slot.role == "weight":
            return "", ""
        waits = bool(after.history[0])
        is_new = len(was) > 1 and int(was.count_nonzero()) == 1  # a settled scale has seen more passes
        return "amax-history-lost" if is_new and not waits else "amax-not-recorded", ""
    if not pushed and not is_full:
        return "amax-history-lost", ""
    if pushed and not _scale_follows_history(before, after, pushed):
        newest = float(now[-1])
        return "scale-not-updated", f": it is {after.scale:.4g}, and the newest amax is {newest:.4g}"
    if expected is not None and is_known and pushed:
        newest = float(now[-min(pushed) :].max())
        limit = math.log2(1 + _CAST) if before.slot.role == "weight" else _FITS
        if newest <= 0 or abs(math.log2(newest / expected)) > limit:
            return "amax-of-another-tensor", f": it is {newest:.4g}, but the tensor's own is {expected:.4g}"
    return "", ""


def _moved_on(was: Tensor, now: Tensor) -> list[int]:
    """Return by how many new amaxes the earlier history may have been shifted to give the later one, the fewest first.

    At least one amax must have stayed, since nothing else tells a shifted history from a different one. An empty
    history may have been shifted by as many amaxes as it has now.
    """
    seen = was.nonzero().flatten()
    if not len(seen):
        new = max(1, len(now) - int((now.cumsum(0) == 0).sum()))
        return [new] if new < len(was) else []
    last = int(seen[-1])
    moved = [last - place for place in (now[:last] == was[last]).nonzero().flatten().tolist()]
    return [n for n in reversed(moved) if torch.equal(now[: len(was) - n], was[n:])]


def _scale_follows_history(before: Kept, after: Kept, pushed: Sequence[int]) -> bool:
    """Return whether a scale follows from its history, into which one of these counts of new amaxes was pushed."""
    recipe: Any = before.slot.recipe
    is_own = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None
    if is_own:
        return True
    was, now = before.history[1:], after.history[1:]

    def scale(amaxes: Tensor) -> float:
        amax = float(amaxes.max())
        if not amax > 0 or math.isinf(amax):
            return before.scale
        return min(before.slot.largest / amax / 2.0**recipe.margin, torch.finfo(torch.float32).max)

    def expected(new: int) -> float:
        if recipe.amax_compute_algo == "most_recent":
            return scale(now[-1:])
        dropped = torch.cat([was, now[-new:]])[new - 1 : new]  # the amax that is dropped still counts once
        return scale(torch.cat([dropped, now]))

    return any(math.isclose(after.scale, expected(new), rel_tol=_FP32) for new in pushed)
