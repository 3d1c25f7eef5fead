"""What mistakes do to a module's outputs, to first order: from one forward pass, and a few backward ones.

A mistake changes what some calls return. How that moves the outputs along directions drawn at random is the product of
the change with a gradient, so that thousands of mistakes are compared with the candidate's error at the cost of few
passes. Mistakes are large, and modules are not linear: this tells which to try first, and rules out none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.diagnosis.budget import Budget
from parity.diagnosis.failure import Failure
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.screen import TINY
from parity.diagnosis.trial import BACKWARD, differentiable_outputs
from parity.watching.trace import Call, Edit, Trace, Value, edit

_DIRECTIONS = 32  # of the outputs: cosines of what has nothing to do with the error are about 1/sqrt of it
_FEWEST = 8
_MOST_BYTES = 2**29  # of all gradients
_PROMISING = 0.3
_BYTES = torch.float32.itemsize


class FirstOrder:
    """The candidate's error, and what changes of the reference's calls do, along directions of the outputs.

    Attributes:
        error: along each direction.
    """

    def __init__(self, failure: Failure, trace: Trace, budget: Budget) -> None:
        """Runs the reference once.

        Args:
            failure: whose outputs failed, and are finite.
            trace: of the reference in FP64.
            budget: after which no more directions are taken than are needed.
        """
        self._trace = trace
        self._calls = {call.site: call for call in trace.calls}
        self._gradients: dict[int, Tensor] = {}
        self.error = torch.zeros(0)
        values = [x for call in trace.calls for x in call.outputs if trace.tensor(x).is_floating_point()]
        count = min(_DIRECTIONS, _MOST_BYTES // max(_BYTES * sum(trace.tensor(x).numel() for x in values), 1))
        if count >= _FEWEST:
            self._differentiate(failure, count, budget)

    def _differentiate(self, failure: Failure, count: int, budget: Budget) -> None:
        kept: dict[int, Tensor] = {}
        edits = tuple(edit(call, (), functools.partial(_keep, kept, call)) for call in self._trace.calls)
        hypothesis = Hypothesis("operation", "none", "", failure.prepared.reference, edits)
        outputs = differentiable_outputs(failure.prepared, (hypothesis,))
        if outputs is None or not kept:
            return
        golden = failure.prepared.golden.outputs
        weights = {
            one.name: 1.0 / max(torch.linalg.vector_norm(golden[one.name]).item() * one.tolerance_relative_l2, TINY)
            for one in failure.outputs
        }
        reached = [name for name in weights if name in outputs and outputs[name].requires_grad]
        off = {name: failure.candidate["output", name].double() - golden[name] for name in weights}
        rng = torch.Generator().manual_seed(0)
        error: list[float] = []
        found: list[list[Tensor | None]] = []
        for number in range(count if reached else 0):
            if number >= _FEWEST and budget.spent():
                break
            failure.prepared.clock.advance(BACKWARD)
            drawn = {name: weights[name] * _drawn(golden[name], rng) for name in weights}
            error.append(sum((drawn[name] * off[name]).sum().item() for name in weights))
            given = [outputs[name] for name in reached], list(kept.values()), [drawn[name] for name in reached]
            try:
                found.append([_single(x) for x in torch.autograd.grad(*given, retain_graph=True, allow_unused=True)])
            except RuntimeError:  # it writes to what a gradient needs
                return
        self.error = torch.tensor(error)
        for number, of_value in zip(kept, zip(*found, strict=True), strict=False):
            known = [x for x in of_value if x is not None]
            if len(known) == len(error):
                self._gradients[number] = torch.stack(known)

    def gradient(self, value: Value) -> Tensor | None:
        """Along each direction with respect to what a call returned, ``[directions, *shape]``; None for none."""
        return self._gradients.get(value.number)

    def effect(self, hypothesis: Hypothesis) -> Tensor | None:
        """What a mistake does along each direction; None where nothing says so."""
        if hypothesis.read is not None or hypothesis.around is not None or not hypothesis.edits:
            return None
        total = torch.zeros_like(self.error)
        for one in hypothesis.edits:
            effect = self._of_edit(one)
            if effect is None:
                return None
            total = total + effect
        return total

    def alignment(self, effects: Tensor) -> Tensor:
        """Cosines of effects ``[..., directions]`` with the error."""
        sizes = torch.linalg.vector_norm(effects, dim=-1) * torch.linalg.vector_norm(self.error)
        return ((effects @ self.error) / sizes.clamp(min=1e-30)).nan_to_num(nan=-1.0)

    def promising_first(self, known: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Those that may explain the error before the others, each in their order."""
        ordered: tuple[list[Hypothesis], list[Hypothesis]] = ([], [])
        for one in known:
            effect = self.effect(one) if len(self.error) else None
            ordered[effect is None or self.alignment(effect).item() < _PROMISING].append(one)
        return [*ordered[0], *ordered[1]]

    def _of_edit(self, one: Edit) -> Tensor | None:
        call = self._calls.get(one.site)
        if call is None or one.detached is not None:
            return None
        was = tree_map_only(Value, self._trace.tensor, call.result)
        try:
            with torch.no_grad():
                result = one.compute(was, *map(self._trace.tensor, one.needs))
        except Exception:  # as anybody's code, given what it does not take
            return None
        return self._moved(call.result, was, result)

    def _moved(self, named: Any, was: Any, result: Any) -> Tensor | None:
        """The effect of a call's other result."""
        total = torch.zeros_like(self.error)
        for value, before, after in zip(*map(tree_leaves, (named, was, result)), strict=False):
            gradient = self.gradient(value) if isinstance(value, Value) else None
            if gradient is not None:
                if not isinstance(after, Tensor) or after.shape != before.shape:
                    return None
                total = total + (gradient.flatten(1) @ (after - before).float().flatten()).cpu()
        return total


def _keep(kept: dict[int, Tensor], call: Call, was: Any) -> Any:
    """What a call returned, kept by its values' numbers, with a gradient also where none would be asked for."""
    values = iter([leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Value)])

    def one(tensor: Tensor) -> Tensor:
        value = next(values)
        if not tensor.is_floating_point():
            return tensor
        if not tensor.requires_grad:
            tensor = tensor.clone().requires_grad_()
            kept[value.number] = tensor
            return tensor.clone()  # which may be written to
        kept[value.number] = tensor
        return tensor

    return tree_map_only(Tensor, one, was)


def _drawn(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like)


def _single(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()
