"""Which optimizer of ``torch.optim`` makes given steps, told from weights before and after each and their gradients.

How the steps are written does not matter. In FP64 a step of the right optimizer is exact: its learning rate and decay
follow by least squares from any one step; betas, eps and momentum are among the numbers that the code has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from parity.watching.optimizers import settings_of

_EXACT = 1e-6  # of a step's norm, within which it is the optimizer's
_MOST_NUMBERS = 12
_MOST_ELEMENTS = 4096
_USUAL_BETAS = (0.9, 0.999)
_USUAL_EPS = 1e-8

Directions = list[tuple[Tensor, Tensor]]  # of each step: by learning rate, and by learning rate times decay


@dataclass(frozen=True)
class Fitted:
    """An optimizer that makes the steps of a weight.

    Attributes:
        kind: its class.
        settings: of the weight's group, with the first step's learning rate.
        rates: the learning rate of each step.
    """

    kind: type[Optimizer]
    settings: dict[str, Any]
    rates: tuple[float, ...]


def fitted(weights: Sequence[Tensor], gradients: Sequence[Tensor], numbers: Sequence[float]) -> Fitted | None:
    """The optimizer, if one of Adam, AdamW and SGD makes these steps.

    Args:
        weights: before each step and after the last, FP64.
        gradients: of each step.
        numbers: that the code has.
    """
    ps, gs = ([x.detach().double().flatten()[:_MOST_ELEMENTS] for x in some] for some in (weights, gradients))
    for kind, settings, directions in _candidates(ps, gs, numbers):
        found = _rates_and_decay(ps, directions())
        if found is None:
            continue
        rates, decay = found
        if decay and "weight_decay" in settings:  # twice, in two ways
            continue
        made: Optimizer = kind([torch.zeros(1)], **{"lr": rates[0], "weight_decay": decay, **settings})
        return Fitted(kind, settings_of(made.param_groups[0]), rates)
    return None


def _candidates(
    ps: Sequence[Tensor], gs: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[tuple[Any, dict[str, Any], Callable[[], Directions]]]:
    """Classes with the settings that least squares do not give, and the steps' directions under them."""
    fractions = [x for x in _few([*numbers, *(1.0 - x for x in numbers)]) if 0.0 < x < 1.0]
    for momentum, nesterov in ((0.0, False), *itertools.product(fractions, (False, True))):
        yield SGD, dict(momentum=momentum, nesterov=nesterov), partial(_of_sgd, ps, gs, momentum, nesterov)
    betas = [x for x in fractions if x >= 0.5]
    pairs = [pair for pair in itertools.product(betas, betas) if len(gs) > 1] or [_USUAL_BETAS]
    small = [*(x for x in _few(numbers) if 0.0 < x <= 1e-2), _USUAL_EPS]
    small = list(dict.fromkeys(small))
    added = {decay: [g + decay * p for g, p in zip(gs, ps, strict=False)] for decay in _few(numbers) if decay <= 1.0}
    for eps in small:
        for pair in pairs if _is_first_step(ps, gs, eps) else ():
            yield AdamW, dict(betas=pair, eps=eps), partial(_of_adam, ps, gs, pair, eps)
    for (decay, sums), eps in itertools.product(added.items(), small):
        for pair in pairs if _is_first_step(ps, sums, eps) else ():
            yield Adam, dict(betas=pair, eps=eps, weight_decay=decay), partial(_of_adam, ps, sums, pair, eps)


def _is_first_step(ps: Sequence[Tensor], gs: Sequence[Tensor], eps: float) -> bool:
    """Whether the first step is Adam's, which no beta changes."""
    return _rates_and_decay(ps[:2], _of_adam(ps[:1], gs[:1], _USUAL_BETAS, eps)) is not None


def _few(numbers: Sequence[float]) -> list[float]:
    """Each once, without what rounding made of 1 - 0.9."""
    return list(dict.fromkeys(float(f"{number:.9g}") for number in numbers))[:_MOST_NUMBERS]


def _of_sgd(ps: Sequence[Tensor], gs: Sequence[Tensor], momentum: float, nesterov: bool) -> Directions:
    found, buffers = [], [torch.zeros_like(gs[0]), torch.zeros_like(gs[0])]
    for p, g in zip(ps, gs, strict=False):
        buffers = [momentum * buffer + x for buffer, x in zip(buffers, (g, p), strict=True)]
        of_gradient, of_decay = buffers
        found.append((g + momentum * of_gradient, p + momentum * of_decay) if nesterov else (of_gradient, of_decay))
    return found


def _of_adam(ps: Sequence[Tensor], gs: Sequence[Tensor], betas: tuple[float, float], eps: float) -> Directions:
    found, mean, square = [], torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for number, (p, g) in enumerate(zip(ps, gs, strict=False), 1):
        mean = betas[0] * mean + (1.0 - betas[0]) * g
        square = betas[1] * square + (1.0 - betas[1]) * g.square()
        root = (square / (1.0 - betas[1] ** number)).sqrt() + eps
        found.append((mean / (1.0 - betas[0] ** number) / root, p))
    return found


def _rates_and_decay(ps: Sequence[Tensor], directions: Directions) -> tuple[tuple[float, ...], float] | None:
    """Of steps along these directions; None where they are not along them, or decay differently."""
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
    """As people write it, but for what least squares leave."""
    return float(f"{number:.5g}")
