"""Watch what a training step does to the gradients, from the first backward pass to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parity.case.training import own_part
from parity.te import state
from parity.trace.private_functions import CLIP, exchanged
from parity.trainings.optimized import Named, Optimized, gather_whole


@dataclass(frozen=True)
class Clipping:
    """How the gradients that an optimizer got differ from those that backward passes added up.

    Attributes:
        factor: the factor by which all were multiplied, by least squares.
        lowest, highest: the smallest and the largest such factor of a single parameter.
        is_early: whether backward passes were added to gradients that had been clipped, or changed in another way.
        is_seen: whether ``clip_grad_norm_`` changed them. If they were clipped in another way, only the result is
            known.
        of_added: in a step of the port's own, the norm of the gradients divided by ``added``.
        added: in such a step, the norm of the gradients after the backward passes; otherwise 0.
        is_changed_after: whether gradients that ``clip_grad_norm_`` changed were changed again before the optimizer got
            them, for example by ranks that add them up.
        after: their norm when the optimizer got them, divided by their norm after the clipping.
    """

    factor: float
    lowest: float
    highest: float
    is_early: bool = False
    is_seen: bool = True
    of_added: float = 1.0
    added: float = 0.0
    is_changed_after: bool = False
    after: float = 1.0


@dataclass
class Seen:
    """A record of what a training step does to the gradients before the optimizer uses them.

    Attributes:
        used: the gradients that the optimizer saw, in each of its steps.
        raw: the gradients that were clipped, as they would be without clipping.
        left: the same gradients after the last clipping.
        later: names of those to which a backward pass was added since then.
        is_early: whether a backward pass was added to gradients that ``clip_grad_norm_`` had clipped.
        sizes: in a step of the port's own, the norms of the gradients after a backward pass.
        between: pairs of such a norm and the norm of the same gradient just before the next backward pass adds to it.
        moved: as in ``Stepped``.
        rates: the learning rate of each parameter, by the reference's names.
        versions: PyTorch's version counter of each parameter after the optimizer stepped it.
    """

    used: list[Named]
    raw: Named = field(default_factory=dict)
    left: Named = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    is_early: bool = False
    sizes: Named = field(default_factory=dict)
    between: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    moved: tuple[str, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def written_later(self, stepped: Mapping[str, nn.Parameter]) -> Iterator[str]:
        """Yield the names of the parameters that something wrote to after the optimizer stepped them."""
        for name, one in stepped.items():
            if self.versions.get(name, one._version) != one._version:
                yield name

    def add_later(self, now: Named) -> None:
        """Add what backward passes added since the last clipping to the gradients that would exist without clipping."""
        for name in self.later & self.raw.keys() & now.keys():
            self.raw[name] += (now[name] - self.left[name]).to(self.raw[name])
            self.left[name], self.is_early = now[name], True
        self.later.clear()

    def clip(self, before: Named, after: Named) -> list[str]:
        """Keep the gradients that a clipping changed, and return the names of those that none had changed before.

        A clipping to infinity, which only serves to log the norm, changes nothing.
        """
        changed = [name for name, x in after.items() if name in self.raw or not torch.equal(x, before[name])]
        self.left |= {name: after[name] for name in changed}
        new = [name for name in changed if name not in self.raw]
        self.raw |= {name: before[name].clone() for name in new}
        return new


@contextmanager
def watched(
    module: nn.Module, optimizer: Optimizer, optimized: Optimized, written: Mapping[str, Tensor], is_own: bool
) -> Iterator[Seen]:
    """Record the gradients that the optimizer sees within the context, and those that it would see without clipping.

    Args:
        module, optimizer: the module that is trained, and its optimizer.
        optimized: the module's parameters as the optimizer has them.
        written: gradients in the memory that a captured step writes.
        is_own: whether the step is the pair's own, which may change gradients in any way.
    """
    seen = Seen([])
    within = 0  # a class's step may call that of its base class, and PyTorch calls hooks for both

    def take() -> None:
        now = copied_gradients(optimized.stepped)
        seen.rates = optimized.rates
        seen.add_later(now)
        seen.used.append(now)
        seen.moved = moved(module, written)

    def keep(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal within
        within += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if within > 1:
            return None
        if closure is None:
            take()
            return None

        def closed() -> Any:  # the closure computes the gradients
            loss = closure()
            take()
            return loss

        return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closed})

    def leave(*_: Any) -> None:
        nonlocal within
        within -= 1
        seen.versions = {name: one._version for name, one in optimized.stepped.items()}

    def clip(original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = {id(one) for one in parameters}
        clipped = {name: one for name, one in optimized.stepped.items() if id(one) in own}
        before = copied_gradients(clipped)
        seen.add_later(before)
        result = original(parameters, *args, **kwargs)
        for name in seen.clip(before, copied_gradients(clipped)):
            hooks.append(module.get_parameter(name).register_hook(partial(add, name)))
        return result

    def add(name: str, _: Tensor) -> None:
        gradient = state.gradient(optimized.stepped[name])
        seen.later.add(name)
        if gradient is None or not bool(gradient.any()):  # it was reset to zero after it was clipped
            seen.raw.pop(name, None)

    def begin(name: str, parameter: nn.Parameter, _: Tensor) -> None:
        if name in seen.sizes and parameter.grad is not None:
            seen.between.append((seen.sizes[name], _compute_gradient_norm(parameter.grad)))

    def end(name: str, parameter: nn.Parameter) -> None:
        if (gradient := state.gradient(parameter)) is not None:
            seen.sizes[name] = _compute_gradient_norm(gradient)

    hooks = [optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(leave)]
    for name, one in module.named_parameters() if is_own else ():
        if one.requires_grad and one.is_leaf:
            hooks.append(one.register_post_accumulate_grad_hook(partial(end, name)))
            if not hasattr(one, "main_grad"):  # TE adds to that before this hook runs
                hooks.append(one.register_hook(partial(begin, name, one)))
    try:
        with exchanged(CLIP, clip):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def moved(module: nn.Module, written: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the parameters whose gradients are no longer in the memory that a captured step writes."""
    now = {name: one.grad for name, one in module.named_parameters()}
    return tuple(name for name, one in written.items() if not _are_one(one, now[name]))


def _are_one(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.data_ptr() == y.data_ptr()


def clipping_of(used: Named, raw: Named, seen: Seen) -> Clipping:
    """Return how the gradients were changed between the backward passes and the optimizer."""
    along = {name: float((x.double() * raw[name].double()).sum()) for name, x in used.items() if name in raw}
    own = {name: float(x.double().square().sum()) for name, x in raw.items()}
    factors = [along.get(name, 0.0) / size for name, size in own.items() if size]
    factor = sum(along.values()) / sum(own.values()) if factors else 1.0
    lowest, highest = min(factors, default=1.0), max(factors, default=1.0)
    added = norm_together(seen.sizes.values())
    got = norm_together(used.values()) if added else 1.0
    is_early = seen.is_early or any(now > 0.0 and abs(now - left) > 1e-3 * left for left, now in seen.between)
    is_changed_after = any(name in used and not torch.equal(x, used[name]) for name, x in seen.left.items())
    of_added = got / (added or 1.0) or 1.0
    left = norm_together(seen.left.values())
    after = norm_together(used[name] for name in seen.left if name in used) / left if left else 1.0
    return Clipping(factor, lowest, highest, is_early, bool(seen.raw), of_added, added, is_changed_after, after or 1.0)


def norm_together(tensors: Iterable[Tensor], order: float = 2.0) -> float:
    """Return the norm of all tensors together."""
    norms = [float(torch.linalg.vector_norm(x.double(), order)) for x in tensors]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), order)) if norms else 0.0


def _compute_gradient_norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(own_part(gradient.detach()), dtype=torch.float64)


def copied_gradients(parameters: Mapping[str, nn.Parameter]) -> Named:
    """Return copies of the gradients that exist."""
    found = {name: state.gradient(parameter) for name, parameter in parameters.items()}
    return {name: gather_whole(x.detach()).clone() for name, x in found.items() if x is not None}


# Estimate the error of sums in gradients that are held in 16 bits.


@dataclass(eq=False)
class Lost:
    """The rounding error of a gradient in 16 bits to which backward passes were added.

    Attributes:
        variance: the variance of each element's error.
        additions: how many passes were added.
    """

    variance: Tensor
    additions: int = 0


@contextmanager
def sums_in_16_bits(module: nn.Module) -> Iterator[dict[str, Lost]]:
    """Record the rounding error whenever a backward pass adds to a gradient in 16 bits, within the context.

    A sum is rounded to its own grid, by up to half a step either way, so that the error's variance is a twelfth of the
    step's square. The first pass counts as well, because each added gradient has been rounded, too, and the rounding
    model rounds only one pass's gradient. Gradients in ``main_grad`` are held in FP32, and lose nothing.
    """
    found: dict[str, Lost] = {}

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is None or torch.finfo(parameter.grad.dtype).bits != 16:
            return
        exponent = torch.frexp(parameter.grad.detach().float()).exponent - 1
        step = torch.finfo(parameter.grad.dtype).eps * torch.exp2(exponent.float())
        one = found.setdefault(name, Lost(torch.zeros_like(step)))
        one.variance += torch.where(parameter.grad == 0.0, 0.0, step.square() / 12.0)
        one.additions += 1

    with ExitStack() as stack:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(partial(note, name))
                stack.callback(hook.remove)
        yield found
