"""Describe the freedom of faithful kernels: what they may compute in several ways, and what rounding decides.

The rounding model runs in different ways, and the error of each is expected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from parity.numerics.aten import (
    COMPARISONS,
    HARDSWISH_BACKWARD,
    INDEXED,
    KINKED_BACKWARD,
    LARGEST,
    LARGEST_AND_PLACE,
    NO_BACKWARD,
    OF_EACH,
    RELU_BACKWARD,
    SIGN,
    STEPS,
    address,
)
from parity.numerics.formats import is_exact
from parity.trace.whose import is_of_te

# Kinks, where a function's gradient jumps, and rounding decides on which side of the jump a value falls.
#
# A ReLU's gradient is 0 or 1, an absolute value's -1 or 1, and a maximum's goes to one operand or the other. A value
# that is nearer to the jump than its own error may fall on either side of it in a faithful port. The errors are
# measured, call by call, as the distance between the results of the rounding model and of FP32 without the precision's
# roundings; larger numbers have larger errors.
#
# PyTorch decides the side in two ways. A gradient kernel reads the argument of the function. If a gradient consists of
# several calls, one of them compares numbers or takes their signs. Here, both read a moved argument. If the largest of
# many values is taken, the next one is chosen if it is near enough.


# A value may cross a kink if it is within this many standard deviations of its error. Of the values that normal errors
# move across a kink, 1 in 50 is farther from it than 2, and 1 in 100,000 than 4 (the integral of the tail).
WIDTH = 4.0
# The kinks of hardswish are at plus and minus this; its gradient changes between them as well.
_HARDSWISH = 3.0
# The least relative change of a number if its sum is computed in another order.
_FP32 = torch.finfo(torch.float32).eps


class KinkSides:
    """The values that decide gradients at kinks, in the order of their calls, which can be moved across the kinks.

    Args:
        side: 0 to leave the values where they are, 1 to move each up by its largest likely error, -1 to move it down.
        exact: the same values from a pass without the precision's roundings.
    """

    def __init__(self, side: float = 0.0, exact: Sequence[Tensor] = ()) -> None:
        self.values: list[Tensor] = []
        self._side = side
        self._exact = exact
        self._arguments: dict[int, Tensor] = {}  # the arguments of ReLUs, by their results' addresses

    def on_both_sides(self) -> list[KinkSides]:
        """Return one that moves the seen values up and one that moves them down; none if none were seen."""
        return [KinkSides(side, self.values) for side in (1.0, -1.0)] if self.values else []

    def see(self, argument: Tensor, result: Tensor) -> None:
        """Note a ReLU's argument and result, because its gradient kernel reads only the result."""
        self._arguments[address(result)] = argument

    def moved(self, func: Any, args: Any) -> Any:
        """Return the arguments of a call, in which a value that decides on a side of a kink is moved."""
        place = KINKED_BACKWARD.get(func)
        if place is not None:
            value = args[place]
            if func is RELU_BACKWARD:
                value = self._arguments.get(address(value), value)
            return *args[:place], self._move_by_error(value, only_across=func is HARDSWISH_BACKWARD), *args[place + 1 :]
        if _takes_largest(func, args) and not self._side:
            self._move_by_error(args[0])
        if func in SIGN:
            return self._move_by_error(args[0]), *args[1:]
        if func in COMPARISONS and args[0].is_floating_point():
            difference = self._move_by_error(args[0] - args[1], of=args[0])
            return difference, torch.zeros_like(difference) if isinstance(args[1], Tensor) else 0.0
        return args

    def chosen(self, func: Any, args: Any) -> Any:
        """Return the result of a call that takes the largest value, or None for other calls.

        Only the largest value is lowered, so that the next one is chosen if it is near enough, and gets the gradient.
        """
        if not self._side or not _takes_largest(func, args):
            return None
        x, dim, keep = args[0], _list_dimensions(args)[0], len(args) > 2 and args[2]
        winner = x.detach().argmax(dim, keepdim=True)
        step = self._move_by_error(x, of=x) - x.detach()
        lowered = x.detach().scatter_add(dim, winner, -step.abs().gather(dim, winner))
        place = lowered.argmax(dim, keepdim=True)
        values = x.gather(dim, place)
        if not keep:
            values, place = values.squeeze(dim), place.squeeze(dim)
        return values if func is LARGEST else (values, place)

    def _move_by_error(self, value: Tensor, only_across: bool = False, of: Tensor | None = None) -> Tensor:
        """Return the value moved by its largest likely error, which is larger if it comes from large numbers ``of``."""
        value = value.detach()
        self.values.append(value)
        place = len(self.values) - 1
        if not self._side or place >= len(self._exact) or self._exact[place].shape != value.shape:
            return value
        is_open = ~is_exact(value) | (value != self._exact[place])
        noise = _root_mean_square(value - self._exact[place]) + _FP32 * _root_mean_square(value)
        if of is not None:  # the rounding error of a number grows with it
            usual = _root_mean_square(of.detach()).clamp(min=torch.finfo(of.dtype).tiny)
            noise = noise * (of.detach().abs() / usual).clamp(min=1.0)
        moved = value + self._side * WIDTH * noise * is_open
        if not only_across:
            return moved
        return torch.where((value.abs() < _HARDSWISH) != (moved.abs() < _HARDSWISH), moved, value)


def _takes_largest(func: Any, args: Any) -> bool:
    """Return whether a call returns the largest numbers along one dimension."""
    return func in (LARGEST, LARGEST_AND_PLACE) and args[0].is_floating_point() and len(_list_dimensions(args)) == 1


def _list_dimensions(args: Any) -> list[int]:
    dims = args[1] if len(args) > 1 else ()
    return [dims] if isinstance(dims, int) else list(dims)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


# Choices, which rounding may decide: the indices, masks and steps that a call makes of numbers.
#
# The largest scores are a token's experts, a threshold masks, a floor counts. A different choice makes a large error,
# because the token goes to another expert. Which tokens are affected is chance, so the rounding model chooses
# differently from a faithful port. It would expect errors where the port has none, which hides mistakes, and none where
# the port has some. So the port's choices are recorded while it runs (if the model's choices depend on rounding, or the
# port fails), and the model makes the same choice wherever its numbers are nearer to it than their errors. Errors are
# measured call by call, as for kinks. The model does not follow a choice that rounding does not explain, so that its
# error counts as a mistake. Rounding explains no choice between numbers that it has not changed, such as positions.


# Another run may choose differently within this many deviations of this run's own error. The difference of two
# independent errors is sqrt(2) times as large as either.
_WIDTH = math.sqrt(2.0) * WIDTH
# The ratio of a normal error's standard deviation to the median of its magnitude. The median is used because a
# different choice in an earlier call spoils a few rows completely.
_DEVIATION = 1.4826
# Fewer errors than this may all be small by chance.
_FEWEST_ERRORS = 32


@dataclass(frozen=True, eq=False)
class Choice:
    """What a call makes of numbers.

    Attributes:
        outcome: the indices that it chooses along a dimension, ``[rows, chosen]``, or one value for each number.
        numbers: the numbers, ``[rows, among]``, or in the shape of ``outcome``.
        other: what each number is compared with; None if it is not compared.
    """

    outcome: Tensor
    numbers: Tensor
    other: Any = None

    @property
    def kind(self) -> Any:
        """What the choices of a port and of the model have in common at the same call."""
        among = self.numbers.shape[1:]
        return among, self.outcome.shape, self.outcome.dtype is torch.bool, self.outcome.is_floating_point()


Made = tuple[Any, Tensor]
"""A choice of a port: its kind and its outcome."""


def choice_of(func: Any, args: Any, kwargs: Any, result: Any) -> Choice | None:
    """Return the choice that a call makes of floating-point numbers, or None if it makes none."""
    outcome = result[-1] if isinstance(result, tuple) and result else result
    if not isinstance(outcome, Tensor) or (outcome.is_floating_point() and not jumps(func)):
        return None
    given = _bind_arguments(func, args, kwargs)
    x, dim, other = given.get("self"), given.get("dim"), given.get("other")
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return None
    x, outcome = x.detach(), outcome.detach()
    if _get_function_name(func) in INDEXED:
        if dim is None or not x.dim():
            x, outcome, dim = x.flatten(), outcome.reshape(1), 0
        outcome = outcome if outcome.dim() == x.dim() else outcome.unsqueeze(dim)
        return Choice(*(one.movedim(dim, -1).reshape(-1, one.shape[dim]).clone() for one in (outcome, x)))
    if torch.Tag.pointwise not in func.tags and _get_function_name(func) not in OF_EACH:
        return None
    each: Any = outcome, x, other if outcome.dtype is torch.bool else None
    return Choice(*(one.expand_as(outcome).flatten().clone() if isinstance(one, Tensor) else one for one in each))


@cache
def jumps(func: Any) -> bool:
    """Return whether a function of each number jumps."""
    return _get_function_name(func) in STEPS or func._overloadname.endswith("_mode")


def _get_function_name(func: Any) -> str:
    return str(func.overloadpacket.__name__).rstrip("_")


def _bind_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | (kwargs or {})


class Choices:
    """The choices of a run of the model, in the order of their calls.

    Args:
        made: the port's choices. Of those of a choice's kind, the model follows the one that rounding explains best;
            among equals, the one that is as far from the port's last as the model's is from its own last.
        exact: the choices of a run without the precision's roundings.
        roundoff: the least deviation of a rounded number relative to it, if few numbers tell their errors.

    Attributes:
        own: the choices that the model makes by itself.
    """

    def __init__(self, made: Sequence[Made] = (), exact: Sequence[Choice] = (), roundoff: float = _FP32) -> None:
        self.own: list[Choice] = []
        self._made, self._exact, self._roundoff = made, exact, max(roundoff, _FP32)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Change a call's result to the port's choice wherever rounding explains it."""
        own = choice_of(func, args, kwargs, result)
        if own is None:
            return
        exact = [one for one in self._exact[len(self.own) :] if one.kind == own.kind]
        self.own.append(own)
        alike = [made.to(own.outcome) for kind, made in self._made if kind == own.kind]
        if not exact or not alike or own.numbers.shape[1:] == (1,):
            return
        given, width = _bind_arguments(func, args, kwargs), self._estimate_width(own, exact[0])
        shape = (result[-1] if isinstance(result, tuple) else result).shape

        def moved(side: float) -> Tensor:
            of_moved: Tensor = func(**given | {"self": (own.numbers + side * width).view(shape)})
            return of_moved.flatten()

        def explained(made: Tensor) -> Tensor:
            if own.numbers.dim() > 1:
                return _are_near(own, made, width)
            if own.other is not None:
                return _may_be_compared_so(own, exact[0], made, width)
            return _is_between(own, made, width, moved(-1.0), moved(1.0))

        tried = [(made, explained(made)) for made in (*alike[-len(exact) :][:1], *reversed(alike))]
        made, follows = max(tried, key=lambda one: int((one[1] | (one[0] == own.outcome)).sum()))
        _write_outcome(torch.where(follows, made, own.outcome), given, result)

    def _estimate_width(self, own: Choice, exact: Choice) -> Tensor:
        """Return how far another run may move each number, or the chosen ones from others; 0 for what is exact."""
        x, right = own.numbers, exact.numbers
        is_open = ~is_exact(x) | (x != right)
        errors, sizes = x - right, x.abs()
        if isinstance(own.other, Tensor):
            is_open |= own.other != exact.other
            errors, sizes = errors - (own.other - exact.other), torch.maximum(sizes, own.other.abs())
        if x.dim() > 1:
            order = x.argsort(1, descending=True)
            place = order.argsort(1).gather(1, own.outcome).clamp(max=x.shape[1] - 2)
            ends = torch.stack([order.gather(1, place), order.gather(1, place + 1)])  # numbers next to each other
            of_ends = [one.expand(2, *one.shape).gather(2, ends) for one in (errors, sizes, is_open)]
            errors, sizes, is_open = of_ends[0].diff(dim=0)[0], of_ends[1].amax(0), of_ends[2].any(0)
        counts = is_open & sizes.isfinite() & errors.isfinite()
        if not counts.any():
            return torch.zeros_like(sizes)
        usual = sizes[counts].median()
        times = (sizes / usual.clamp(min=torch.finfo(sizes.dtype).tiny)).clamp(min=1.0)
        errors = errors.abs() / times
        seen = errors[counts & (errors > 0.0)]
        deviation = _DEVIATION * seen.median() if len(seen) else 0.0
        least = self._roundoff if counts.sum() < _FEWEST_ERRORS else _FP32
        return _WIDTH * times * is_open * (deviation + least * usual)


def _are_near(own: Choice, made: Tensor, width: Tensor) -> Tensor:
    """Return the rows in which all numbers that the port chose are near those in whose place it did."""
    return ((own.numbers.gather(1, own.outcome) - own.numbers.gather(1, made)).abs() <= width).all(1, keepdim=True)


def _may_be_compared_so(own: Choice, exact: Choice, made: Tensor, width: Tensor) -> Tensor:
    """Return which numbers are so near those that they are compared with that either is the larger.

    A number may be compared with itself, such as the largest with all. Then another one must have taken its place.
    """
    is_near = ((own.numbers - own.other).abs() <= width) & (width > 0.0)
    if not isinstance(own.other, Tensor):
        return is_near
    is_itself = (own.numbers == own.other) & (exact.numbers == exact.other)
    group = own.other.unique(return_inverse=True)[1]
    takes_place = is_near & (made == own.outcome[is_itself].any())
    return is_near & (
        ~is_itself | (torch.zeros_like(own.numbers).index_add(0, group, takes_place.to(own.numbers))[group] > 0)
    )


def _is_between(own: Choice, made: Tensor, width: Tensor, *moved: Tensor) -> Tensor:
    """Return where the port's outcome lies between those of numbers that are moved down and up, beyond a jump."""
    lower, upper = torch.minimum(*moved), torch.maximum(*moved)
    if not made.is_floating_point():
        return (lower <= made) & (made <= upper)
    reach = 2.0 * width  # where it does not jump, a function may follow its numbers
    return (lower - reach <= made) & (made <= upper + reach) & ((made - own.outcome).abs() > reach) & (width > 0.0)


def _write_outcome(outcome: Tensor, given: dict[str, Any], result: Any) -> None:
    """Write another outcome to a call's result, with the numbers that it chooses."""
    *values, places = result if isinstance(result, tuple) else (result,)
    if outcome.dim() > 1 and given["dim"] is not None:
        x, dim = given["self"].detach(), given["dim"]
        outcome = outcome.view(*x.movedim(dim, -1).shape[:-1], -1).movedim(-1, dim)
        for one in values:
            one.copy_(x.gather(dim, outcome).view(one.shape))
    places.copy_(outcome.reshape(places.shape))


@contextmanager
def choices_seen(alike: Iterable[Choice]) -> Iterator[list[Made]]:
    """Record the choices of forward passes that are of the same kinds as these, within the context."""
    recorder = _ChoicesRecorder({one.kind for one in alike})
    with recorder:
        yield recorder.made


class _ChoicesRecorder(TorchDispatchMode):
    def __init__(self, kinds: Container[Any]) -> None:
        super().__init__()
        self.made: list[Made] = []
        self._kinds = kinds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            made = choice_of(func, args, kwargs, result)
            if made is not None and made.kind in self._kinds:
                self.made.append((made.kind, made.outcome))
        return result


# The dtypes in which a port's optimizers keep the weights and moments that their steps write.
#
# A step computes in FP32. TE's kernels round once, when they write weights without FP32 master weights, or moments in
# fewer bits than FP32 (``common/multi_tensor/adam.cu`` and ``pytorch/optimizers/fused_adam.py`` of TE 2.20.2).
# PyTorch's own optimizers round the result of each of their calls. While a port runs, it is recorded which of these its
# optimizers do, and this is used if the port fails.


_MASTER = "master_param"  # TE's name for master weights


@dataclass(frozen=True)
class Steps:
    """The dtypes in which optimizers keep what their steps write.

    Attributes:
        weights: the dtype in which weights are kept from step to step; None for FP32 (master weights).
        moments: the dtypes of the optimizer's state, by its name, if they have fewer bits than FP32.
        each_call: whether each call of a step rounds, as in PyTorch's optimizers, or only the end of the step.
    """

    weights: torch.dtype | None
    moments: tuple[tuple[str, torch.dtype], ...] = ()
    each_call: bool = False

    @property
    def remark(self) -> str:
        """Return a remark on the roundings that are expected, or an empty text if everything is kept in FP32."""
        held = [("weights", self.weights)] if self.weights else []
        lost = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in (*held, *self.moments))
        return f"the port's optimizer keeps {lost}, so the rounding of its steps is expected" if lost else ""


@contextmanager
def steps_seen(dtype: torch.dtype) -> Iterator[list[Steps]]:
    """Record, for each optimizer step within the context, how the optimizer keeps weights of this 16-bit dtype."""
    seen: list[Steps] = []

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = [p for p in stepped_by(optimizer) if p.dtype is dtype and dtype is not torch.float32]
        if stepped:
            seen.append(_inspect_optimizer(optimizer, stepped))

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield seen
    finally:
        handle.remove()


def together(seen: list[Steps]) -> Steps | None:
    """Return a port's steps as one, with all that any of them rounds, or None if there are no steps."""
    if not seen:
        return None
    weights = next((one.weights for one in seen if one.weights is not None), None)
    moments = tuple(sorted({moment for one in seen for moment in one.moments}, key=str))
    return Steps(weights, moments, any(one.each_call for one in seen))


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that a step of the optimizer changes."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _inspect_optimizer(optimizer: Optimizer, stepped: list[Tensor]) -> Steps:
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


# What faithful kernels may do in different ways. The rounding model runs in each, and the error of each is expected.


# Large compared with the effect of the order of sums, and small compared with the rounding that follows.
JITTER = 1 / 64


@dataclass(frozen=True)
class Freedom:
    """One of the ways in which faithful kernels may compute.

    Attributes:
        stores_scores: whether attention's scores and their gradient are rounded to the dtype. An unfused kernel stores
            them, while flash and fused kernels hold them in FP32. Kernels also scale them by different constants
            (``1 / sqrt(head_dim)``, or that times log2(e)), each rounded to FP32: scores are one step larger with it.
        stores_sums: whether a residual sum is rounded by itself, or stays in FP32 within a fused kernel.
        stores_pointwise: whether each pointwise step between two GEMMs is rounded, as if nothing were fused, including
            RoPE's cosines and sines (unfused ``pytorch/attention/rope.py`` of TE 2.20.2). The scale of a whole tensor
            then comes from the stored values. A fused kernel takes it from FP32, before rounding (TE 2.20.2,
            ``csrc/extensions/activation.cpp``), so that a value that many elements share falls elsewhere in a format.
            Only norms always take it from what they store (``common/normalization/*/*_fwd_kernels.cuh``).
        splits_of_k: into how many parts a GEMM splits the summed dimension; FP32 partial sums are then added up.
        jitter: the seed of a little noise on each value before it is stored, ``JITTER`` of a roundoff (in FP32, two
            roundoffs), as if sums were in another order. It changes which way single values are rounded, and what
            depends on them, such as the side of a ReLU's kink. It also moves the largest value of a tensor by up to a
            roundoff, and so a scale that comes from it, and the place of every value in the format; but not a weight's
            scale, which every port holds exactly. None for no noise.
        dithers: whether the noise is as large as a rounding error instead. A number between two of the dtype's becomes
            the upper one with a probability that grows with its nearness, and a number of the dtype stays. Runs with
            other seeds then round independently, with twice the variance of rounding to nearest (on average a sixth of
            the spacing's square instead of a twelfth). If the dtype is FP32, the noise is a roundoff. The inputs and
            gradients that a linear layer's GEMMs read get errors of their format, drawn in the same way; weights are
            the same in every port.
        plain: names of ATen functions that a port calls by itself. They compute in the dtype, and their results and the
            gradients behind them are stored (``parity.numerics.plain``). Some of the names are not functions, but stand
            for something else that the port does.
        steps: how the port's optimizers hold what they write in place; None for FP32.
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
        """Return a random combination; all are equally likely."""
        toss = (rng.random() < 0.5 for _ in range(3))
        return cls(next(toss), next(toss), next(toss), rng.choice((1, 2, 3, 4)))


FUSED = Freedom(stores_scores=False, stores_sums=False, stores_pointwise=False)
UNFUSED = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=True, splits_of_k=3)
FUSED_POINTWISE = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=False)


@dataclass(frozen=True)
class Port:
    """The roundings of a port outside TE's modules, and its choices.

    Attributes:
        plain, steps: as in ``Freedom``.
        choices: its choices, which rounding may have decided.
        recipes: the recipes that it turns on by itself, with the lines of its code that do so.
    """

    plain: tuple[str, ...] = ()
    steps: Steps | None = None
    choices: tuple[Made, ...] = ()
    recipes: tuple[str, ...] = ()

    @property
    def freedoms(self) -> tuple[Freedom, Freedom]:
        """The two extreme ways in which faithful kernels compute, with the port's own roundings."""
        return replace(FUSED, steps=self.steps), replace(UNFUSED, plain=self.plain, steps=self.steps)
