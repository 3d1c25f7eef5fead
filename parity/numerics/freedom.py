"""List what faithful kernels do in one way or another, and the numbers on which rounding alone decides.

The rounding model runs both ways, and either loss is expected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from parity.numerics.aten import (
    COMPARISONS,
    HARDSWISH_BACKWARD,
    KINKED_BACKWARD,
    LARGEST,
    LARGEST_AND_PLACE,
    LARGEST_FEW,
    NO_BACKWARD,
    RELU_BACKWARD,
    SIGN,
    address,
)
from parity.trace.whose import is_of_te

# Kinks: a function's gradient jumps there, and rounding decides on which side of the jump a value falls.
#
# A ReLU's gradient is 0 or 1, an absolute value's -1 or 1, a maximum's is one operand's or the other's. A value that is
# nearer to the jump than its own error may fall on either side of it in a faithful port. Which values these are depends
# on their errors. These are measured, call by call, as the distance between what the rounding model computes and what
# FP32 computes without the precision's roundings; larger numbers have larger errors.
#
# PyTorch decides in two ways. Its kernels of gradients read the argument of the function; and if a gradient consists of
# several calls, one of them compares numbers or takes their signs. Here, both read a moved argument. If the largest of
# many values is taken, the next one is chosen if it is as near.


# A value may be beyond a kink if it is within so many standard deviations of its error. Of the values that normal
# errors move across a kink, 1 in 50 is farther from it than 2, and 1 in 100,000 than 4 (the integral of the tail).
WIDTH = 4.0
# The kinks of hardswish are at plus and minus this; its gradient changes between them as well.
_HARDSWISH = 3.0
# Summing in another order changes at least this much, relative to the number.
_FP32 = torch.finfo(torch.float32).eps


class Kinks:
    """The values that decide gradients at kinks, in the order of their calls, and where they are moved to.

    Args:
        side: 0 to leave them where they are; 1 to move each up by as much as it may be wrong, -1 down.
        exact: the values, from a pass without the precision's roundings.
    """

    def __init__(self, side: float = 0.0, exact: Sequence[Tensor] = ()) -> None:
        self.values: list[Tensor] = []
        self._side = side
        self._exact = exact
        self._arguments: dict[int, Tensor] = {}  # of ReLUs, by their results' address

    def on_both_sides(self) -> list[Kinks]:
        """Return what puts the values that were seen above their kinks, and what puts them below; empty for none."""
        return [Kinks(side, self.values) for side in (1.0, -1.0)] if self.values else []

    def see(self, argument: Tensor, result: Tensor) -> None:
        """Take note of a ReLU's argument and result: the kernel of its gradient reads only the result."""
        self._arguments[address(result)] = argument

    def moved(self, func: Any, args: Any) -> Any:
        """Return the arguments of a call, with the value moved that decides on which side of a kink it
        is, if one does.
        """
        place = KINKED_BACKWARD.get(func)
        if place is not None:
            value = args[place]
            if func is RELU_BACKWARD:
                value = self._arguments.get(address(value), value)
            return *args[:place], self._beside(value, only_across=func is HARDSWISH_BACKWARD), *args[place + 1 :]
        if _takes_largest(func, args) and not self._side:
            self._beside(args[0])
        if func in SIGN:
            return self._beside(args[0]), *args[1:]
        if func in COMPARISONS and args[0].is_floating_point():
            difference = self._beside(args[0] - args[1], of=args[0])
            return difference, torch.zeros_like(difference) if isinstance(args[1], Tensor) else 0.0
        return args

    def chosen(self, func: Any, args: Any) -> Any:
        """Return the result of a call that takes the largest value, with the next one chosen if it is
        as near; None for other calls.

        A largest value's gradient goes to where it is: the winner's argument, and no other, is lowered.
        """
        if not self._side or not _takes_largest(func, args):
            return None
        x, dim, keep = args[0], _dimensions(args)[0], len(args) > 2 and args[2]
        winner = x.detach().argmax(dim, keepdim=True)
        step = self._beside(x, of=x) - x.detach()
        lowered = x.detach().scatter_add(dim, winner, -step.abs().gather(dim, winner))
        place = lowered.argmax(dim, keepdim=True)
        values = x.gather(dim, place)
        if not keep:
            values, place = values.squeeze(dim), place.squeeze(dim)
        return values if func is LARGEST else (values, place)

    def _beside(self, value: Tensor, only_across: bool = False, of: Tensor | None = None) -> Tensor:
        """Return the value, moved by as much as it may be wrong; by more if it is computed from large
        numbers ``of``.
        """
        value = value.detach()
        self.values.append(value)
        place = len(self.values) - 1
        if not self._side or place >= len(self._exact) or self._exact[place].shape != value.shape:
            return value
        noise = _root_mean_square(value - self._exact[place]) + _FP32 * _root_mean_square(value)
        if of is not None:  # what floating point loses of a number grows with it
            usual = _root_mean_square(of.detach()).clamp(min=torch.finfo(of.dtype).tiny)
            noise = noise * (of.detach().abs() / usual).clamp(min=1.0)
        moved = value + self._side * WIDTH * noise
        if not only_across:
            return moved
        return torch.where((value.abs() < _HARDSWISH) != (moved.abs() < _HARDSWISH), moved, value)


def _takes_largest(func: Any, args: Any) -> bool:
    """Return whether a call returns the largest of numbers along one dimension."""
    return func in (LARGEST, LARGEST_AND_PLACE) and args[0].is_floating_point() and len(_dimensions(args)) == 1


def _dimensions(args: Any) -> list[int]:
    dims = args[1] if len(args) > 1 else ()
    return [dims] if isinstance(dims, int) else list(dims)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


# Choices: rounding may decide which of many numbers are the largest, such as a token's experts.
#
# A different choice is no small error: the token goes to another expert. Which tokens these are is chance, so a run of
# the rounding model chooses differently from a faithful port. It would expect errors that a port does not have, which
# hides mistakes, and none where a port has them. So the port's choices are recorded while it runs (if the model's
# choices depend on rounding, or the port fails), and the model chooses alike wherever the numbers are nearer to each
# other than their errors. Errors are measured call by call, as for kinks. A choice that rounding does not explain stays
# the port's own, and its error counts as a mistake's.


# Another run may choose otherwise within so many deviations of this run's own error: two errors that share nothing
# differ by sqrt(2) times what one of them is.
_WIDTH = math.sqrt(2.0) * WIDTH
# A normal error's standard deviation over the median of its magnitude. The median is taken because an earlier choice
# that fell otherwise spoils a few rows altogether.
_DEVIATION = 1.4826


class Choices:
    """The choices of one forward pass, in the order of their calls.

    Args:
        made: the port's, ``[rows, chosen]`` for each call; what the port did not choose is left to the model, and so is
            every call until one that chooses as many of as many as the port's next.
        exact: the numbers, from a pass without the precision's roundings.

    Attributes:
        values: the numbers of each call, ``[rows, numbers]``.
        own: which of them are the largest, ``[rows, chosen]``, in no order.
    """

    def __init__(self, made: Sequence[Tensor] = (), exact: Sequence[Tensor] = ()) -> None:
        self.values: list[Tensor] = []
        self.own: list[Tensor] = []
        self._made, self._exact = made, exact

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return a call's result, with the port's choice in each row where rounding explains it."""
        count = _chosen_of_last(func, args, kwargs)
        if count is None:
            return result
        values = args[0].detach().flatten(0, -2)
        own = result[1].flatten(0, -2)
        self.values.append(values)
        self.own.append(own)
        place = len(self.values) - 1
        if place >= len(self._exact) or not self._made or self._made[0].shape != (len(values), count):
            return result
        (first, *self._made), exact = self._made, self._exact[place]
        made = first.to(values.device)
        if exact.shape != values.shape or count == values.shape[1]:
            return result
        follows = _nearer_than(values, own, made, _WIDTH * _noise(values, exact.to(values), own))
        order = values.gather(1, made).argsort(1, descending=True)
        chosen = torch.where(follows[:, None], made.gather(1, order), own).view_as(result[1])
        return args[0].gather(-1, chosen), chosen


@dataclass(eq=False)
class Chosen:
    """The choices of a pass on the inputs, and of one on the probing inputs."""

    compared: Choices = field(default_factory=Choices)
    probed: Choices = field(default_factory=Choices)

    def is_as(self, other: Chosen) -> bool:
        """Return whether both passes chose the same numbers as another pair of passes."""
        pairs = ((self.compared.own, other.compared.own), (self.probed.own, other.probed.own))
        return all(len(one) == len(two) and all(map(_same_sets, one, two)) for one, two in pairs)


@dataclass(frozen=True, eq=False)
class PortsChoices:
    """Hold what a port chose: ``[rows, chosen]`` for each call.

    Attributes:
        compared: in the pass on the inputs.
        probed: in the pass on the probing inputs.
    """

    compared: tuple[Tensor, ...] = ()
    probed: tuple[Tensor, ...] = ()

    def following(self, exact: Chosen) -> Chosen:
        """Return the choices for another run of the model, which is to choose as the port did.

        Args:
            exact: has seen a run of the model without roundings.
        """
        probed = self.probed[-len(self.compared) :]  # those before are from passes that settle scales
        return Chosen(Choices(self.compared, exact.compared.values), Choices(probed, exact.probed.values))


NONE_MADE = PortsChoices()


@contextmanager
def choices_seen() -> Iterator[ChoicesRecorder]:
    """Within the context, record what is chosen of many numbers; a compiled kernel's choices are not seen."""
    recorder = ChoicesRecorder()
    with recorder:
        yield recorder


class ChoicesRecorder(TorchDispatchMode):
    """Records choices, forward pass by forward pass: each of them, except those on probing inputs, ends
    with a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[list[Tensor]] = [[]]
        self._was_backward = False

    def of_port(self, probed: bool) -> PortsChoices:
        """Return the choices of the last pass on the inputs; ``probed`` says whether passes on probing
        inputs came after it.
        """
        passes = [tuple(choices) for choices in self._passes if choices]
        if not passes or (probed and len(passes) == 1):
            return NONE_MADE
        return PortsChoices(passes[-2], passes[-1]) if probed else PortsChoices(passes[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            self._was_backward = True
        elif _chosen_of_last(func, args, kwargs) is not None:
            if self._was_backward:
                self._passes.append([])
            self._was_backward = False
            self._passes[-1].append(result[1].detach().flatten(0, -2))
        return result


def _chosen_of_last(func: Any, args: Any, kwargs: Any) -> int | None:
    """Return how many of the last dimension's largest numbers a call chooses; None for any other call."""
    if func is not LARGEST_FEW or kwargs or args[0].dim() < 2 or not args[0].is_floating_point():
        return None
    dim, largest = (args[2] if len(args) > 2 else -1), (args[3] if len(args) > 3 else True)
    return int(args[1]) if largest and dim in (-1, args[0].dim() - 1) else None


def _same_sets(one: Tensor, other: Tensor) -> bool:
    """Return whether the same numbers are in each row, in any order."""
    return torch.equal(one.sort(-1).values, other.sort(-1).values)


def _noise(values: Tensor, exact: Tensor, own: Tensor) -> Tensor:
    """Return by how much the least chosen number and the largest one not chosen are off each other, ``[rows]``.

    As a deviation: the usual one, and more where the numbers are larger than usual, as their errors are.
    """
    least = own.gather(1, values.gather(1, own).argmin(1, keepdim=True))
    next_to_it = values.scatter(1, own, -torch.inf).argmax(1, keepdim=True)
    ends = torch.cat((least, next_to_it), 1)
    sizes = values.gather(1, ends).abs().amax(1)
    are_finite = sizes.isfinite()
    if not are_finite.any():
        return torch.zeros_like(sizes)
    usual = sizes[are_finite].median()
    times = (sizes / usual.clamp(min=torch.finfo(sizes.dtype).tiny)).clamp(min=1.0)
    errors = (values - exact).gather(1, ends).diff(dim=1).abs().flatten() / times
    return times * (_DEVIATION * errors[are_finite].median() + _FP32 * usual)


def _nearer_than(values: Tensor, own: Tensor, made: Tensor, distance: Tensor) -> Tensor:
    """Return the rows in which what is chosen instead is that near to what is not chosen."""
    none = torch.zeros_like(values, dtype=torch.bool)
    is_own, is_made = none.scatter(1, own, True), none.scatter(1, made, True)
    left = values.masked_fill(~(is_own & ~is_made), -torch.inf).amax(1)
    entered = values.masked_fill(~(is_made & ~is_own), torch.inf).amin(1)
    return left - entered <= distance


# How a port's optimizers hold what their steps write in place: weights and moments.
#
# A step computes in FP32. TE's kernels round once what it writes: weights, unless there are FP32 master weights beside
# them, and moments that are held in fewer bits than FP32 (``common/multi_tensor/adam.cu`` and
# ``pytorch/optimizers/fused_adam.py`` of TE 2.20.2). PyTorch's own optimizers round what each of their calls returns.
# Which of these a port's optimizers do is recorded as the port runs, and used once it has failed.


_MASTER = "master_param"  # TE's name for it


@dataclass(frozen=True)
class Steps:
    """Say how optimizers hold what their steps write.

    Attributes:
        weights: the dtype in which weights are kept from step to step; None for FP32 (master weights).
        moments: the dtypes of the optimizer's state, by its name, if they have fewer bits than FP32.
        each_call: whether each of a step's calls rounds, as PyTorch's do, or the step once at its end.
    """

    weights: torch.dtype | None
    moments: tuple[tuple[str, torch.dtype], ...] = ()
    each_call: bool = False

    @property
    def remark(self) -> str:
        """Say what is expected because of these; return an empty text if all is kept in FP32."""
        held = [("weights", self.weights)] if self.weights else []
        lost = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in (*held, *self.moments))
        return f"the port's optimizer holds {lost}: what its steps round is expected" if lost else ""


@contextmanager
def steps_seen(dtype: torch.dtype) -> Iterator[list[Steps]]:
    """Within the context, append for each step how its optimizer holds weights of this dtype, if that
    is less than FP32.
    """
    seen: list[Steps] = []

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = [p for p in stepped_by(optimizer) if p.dtype is dtype and dtype is not torch.float32]
        if stepped:
            seen.append(_held(optimizer, stepped))

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield seen
    finally:
        handle.remove()


def together(seen: list[Steps]) -> Steps | None:
    """Join what a port's steps round; None if it made none."""
    if not seen:
        return None
    weights = next((one.weights for one in seen if one.weights is not None), None)
    moments = tuple(sorted({moment for one in seen for moment in one.moments}, key=str))
    return Steps(weights, moments, any(one.each_call for one in seen))


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that a step changes."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _held(optimizer: Optimizer, stepped: list[Tensor]) -> Steps:
    of_te = any(is_of_te(kind) for kind in type(optimizer).__mro__)
    masters: set[torch.dtype] = set()
    moments: set[tuple[str, torch.dtype]] = set()
    for parameter in stepped:
        held = {name: x for name, x in optimizer.state[parameter].items() if isinstance(x, Tensor) and x.dim()}
        master = held.pop(_MASTER, parameter)
        masters.add(torch.float32 if master.dtype is torch.int16 else master.dtype)  # int16 has the rest of FP32's bits
        moments |= {(name, x.dtype) for name, x in held.items() if x.dtype in (torch.float16, torch.bfloat16)}
    weights = next((dtype for dtype in masters if dtype is not torch.float32), None)
    return Steps(weights, tuple(sorted(moments, key=str)), each_call=not of_te)


# What faithful kernels may do in two ways: the rounding model runs both ways, and either loss is expected.


# Large compared with what the order of sums changes, and small compared with the rounding that follows.
JITTER = 1 / 64


@dataclass(frozen=True)
class Freedom:
    """Hold what a faithful kernel may do in one way or another.

    Attributes:
        stores_scores: whether attention's scores, and their gradient, are rounded to the dtype: an unfused kernel
            stores them, flash and fused kernels hold them in FP32. Kernels also scale them by different constants
            (``1 / sqrt(head_dim)``, or that times log2(e)), each rounded to FP32: scores are one step larger with it.
        stores_sums: whether a residual sum is rounded by itself, or stays in FP32 within a fused kernel.
        stores_pointwise: whether each pointwise step between two GEMMs is rounded, as if nothing is fused, and
            RoPE's cosines and sines with it (unfused ``pytorch/attention/rope.py`` of TE 2.20.2). The scale
            of a whole tensor then comes from what was stored; a fused kernel takes it from FP32, before rounding (TE
            2.20.2, ``csrc/extensions/activation.cpp``), so values that many elements share fall elsewhere in a format.
            Only norms take it from what they store in either case (``common/normalization/*/*_fwd_kernels.cuh``).
        splits_of_k: into how many parts a GEMM splits the summed dimension; FP32 partial sums are then added up.
        jitter: the seed of a little noise on each value before it is stored, ``JITTER`` of a roundoff (of FP32, two),
            as if sums were in another order. It changes which way single values are rounded, and what depends on them,
            such as the side of a ReLU's kink. It also moves the largest value of a tensor, and so a scale that comes
            from it, by up to a roundoff, and with the scale where every value of the tensor falls in its format; but
            not a weight's scale, which every port holds exactly. None for no noise.
        dithers: whether the noise is as large as a rounding's error instead: a number between two of the dtype becomes
            the upper one with a probability that grows with its nearness, and a number of the dtype stays. Runs with
            other seeds then round independently, with twice the variance of rounding to nearest (a sixth of a spacing's
            square on average, for a twelfth). If the dtype is FP32, it is noise of a roundoff. What a linear layer's
            GEMMs read of inputs and gradients gets errors of the format that are drawn likewise; weights are the same
            in every port.
        plain: names of ATen functions that a port calls by itself. What they return is stored, as are the gradients
            behind them, and they compute in the dtype (``parity.numerics.plain``). Some of the names are no
            functions, but stand for something else that the port does.
        steps: how its optimizers hold what they write in place; None for FP32.
        kernels: what GEMM kernels do beyond the rounding of operands and results, by name
            (``parity.numerics.kernel_choices``).
    """

    stores_scores: bool
    stores_sums: bool
    stores_pointwise: bool
    splits_of_k: int = 1
    jitter: int | None = None
    dithers: bool = False
    plain: tuple[str, ...] = ()
    steps: Steps | None = None
    kernels: tuple[str, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random) -> Freedom:
        """Draw one of all combinations, each with the same probability."""
        toss = (rng.random() < 0.5 for _ in range(3))
        return cls(next(toss), next(toss), next(toss), rng.choice((1, 2, 3, 4)))


FUSED = Freedom(stores_scores=False, stores_sums=False, stores_pointwise=False)
UNFUSED = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=True, splits_of_k=3)
FUSED_POINTWISE = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=False)


@dataclass(frozen=True)
class Port:
    """Hold what a port rounds outside TE's modules, and what it chooses.

    Attributes:
        plain, steps: as in ``Freedom``.
        choices: its choices of the largest of many numbers, such as a token's experts.
        recipes: the recipes that it turns on by itself, with the lines where it does.
    """

    plain: tuple[str, ...] = ()
    steps: Steps | None = None
    choices: PortsChoices = NONE_MADE
    recipes: tuple[str, ...] = ()

    @property
    def freedoms(self) -> tuple[Freedom, Freedom]:
        """The two ways in which faithful kernels compute, with what the port rounds by itself."""
        return replace(FUSED, steps=self.steps), replace(UNFUSED, plain=self.plain, steps=self.steps)
