"""Name what a CUDA graph computes otherwise than the same training without one.

What a graph keeps from its capture is told by experiment: the training without graphs is made again up to the step,
something is given back what it was at the capture, and the step must then be the graph's to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from parity.mistakes.codes import repairable
from parity.passes.courses import Beside, Computed
from parity.passes.one_pass import Arguments, as_arguments
from parity.passes.steps import Batch, Trainee
from parity.passes.switches import NotCaptured
from parity.result import Finding
from parity.search.held_by_python import Value, values
from parity.trace.whose import users_line
from parity.user_error import raised

# So many inputs and values are tried one by one.
_ALONE = 6


def not_captured(error: NotCaptured) -> Finding:
    """Return what a capture has met that no graph holds."""
    cause = error.__cause__ or error
    where = users_line(cause)
    return repairable(
        "graph-not-captured",
        f"the capture raised {raised(cause)}{f'; at {where}' if where else ''}",
        "move code that reads a tensor's value (item, tolist, cpu, a branch, a mask as an index), or that waits for "
        "the device, out of the captured part",
    )


@dataclass(frozen=True)
class Replayed(Beside):
    """A step that a graph has made otherwise than the training without graphs."""

    def without_graph(self, change: Callable[[Trainee, list[Value]], Batch | None]) -> Computed:
        """Return what the step is without a graph, if the candidate is changed before it.

        Args:
            change: gets the candidate, and the values that it had when the graph was captured; it may return another
                batch.
        """
        at_capture: list[Value] = []
        return self.made_again(
            lambda trainee: change(trainee, at_capture), lambda trainee: at_capture.extend(values(trainee))
        )

    def is_made_by(self, change: Callable[[Trainee, list[Value]], Batch | None]) -> bool:
        """Return whether the step without a graph is then the graph's."""
        return not self.without_graph(change).differs_in(self.computed)

    def other_shapes(self) -> tuple[str, str] | None:
        """Return the shapes of the inputs that TE's graph was captured with, and those of a call with others."""
        with self.without.begun() as trainee:
            if trainee.training.graph is not None:
                return None
            captured = _shapes(as_arguments(trainee.batch(self.number).inputs))
        return next(((captured, own) for call in self.stepped.calls if (own := _shapes(call)) != captured), None)


def _shapes(arguments: Arguments) -> str:
    shapes = [tuple(x.shape) for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return " and ".join("x".join(map(str, shape)) for shape in shapes)


def replay_explained(replayed: Replayed) -> Finding | None:
    """Return which value of the capture, or which mistake of it, the graph's step shows; None if none is found."""
    number = replayed.number
    if number == 1 and replayed.without.changed_before:
        return repairable(
            "graph-differs",
            f"the capture has changed {_listed(replayed.without.changed_before)}",
            "let warm-up passes before a capture leave no trace: step no optimizer there, and restore the scales of "
            "delayed scaling, as make_graphed_callables does",
        )
    if shapes := replayed.other_shapes():
        return repairable(
            "graph-differs",
            f"step {number} calls the candidate with inputs of {shapes[1]}, but its graph was captured with "
            f"those of the batch, of {shapes[0]}; a graph keeps these shapes, and other inputs are broadcast to them",
            "capture with a micro-batch, by parity.Training(graph=...), or give each call inputs of the batch's shapes",
        )
    if replayed.stepped.moved:
        return repairable(
            "graph-lost-gradient",
            f"in step {number}, the optimizer does not read the gradients of {_listed(replayed.stepped.moved)} where "
            "the graph writes them, which is the memory that grad had when the graph was captured",
            "change gradients in place; zero_grad(set_to_none=True) and parameter.grad = ... replace their memory",
        )
    if replayed.stepped.unmade:
        return repairable(
            "weight-cache-stale",
            f"step {number} of the graph computes gradients of inputs from copies of "
            f"{_listed(replayed.stepped.unmade)} that are not the transposes of the FP8 weights; "
            "parameter._reset_caches() has no effect on a replay, which runs no Python",
            "call parameter._create_transpose() after each optimizer.step(), which writes the memory that the graph "
            "reads, or step FP32 copies of your own and copy_ them to the parameters",
        )
    if replayed.is_made_by(lambda trainee, at_capture: trainee.leave_recipe()):
        return repairable(
            "graph-differs",
            f"step {number} of the graph equals, bit for bit, that without the precision's recipe",
            "pass enabled=True and the recipe to make_graphed_callables, or capture within te.autocast",
        )
    return _stale_input(replayed) or _frozen_value(replayed)


def replay_frozen(replayed: Replayed) -> tuple[Finding, bool]:
    """Return what to say of a step that nothing explains, and whether it names values that the graph may have kept."""
    number, differing = replayed.number, replayed.differing
    beginning = (
        f"step {number} of the graph differs from that of the same training without a graph in {_listed(differing)}"
    )
    anew = replayed.without_graph(lambda trainee, at_capture: trainee.capture())
    if number == 1 or anew.differs_in(replayed.without.steps[number - 1]):
        told = repairable(
            "graph-differs",
            f"{beginning}, and so does a graph that is captured right before the step",
            "look for code that runs only in the capture, and for inputs that are not copied into the graph's memory",
        )
        return told, False
    changed = _changed(replayed)
    was = f": since then, {_listed([one.was for one in changed])}" if changed else ", FP8 weights or memory"
    told = repairable(
        "graph-frozen-value",
        f"{beginning}, but a graph that is captured right before the step does not; so the graph keeps a number, a "
        f"branch or something else from the time of its capture{was}",
        "keep what changes in a tensor that is written in place, or capture again",
    )
    return told, bool(changed)


def _stale_input(replayed: Replayed) -> Finding | None:
    """Return which inputs are those of an earlier step, or zero."""
    number = replayed.number

    def with_old(old: int, chosen: Sequence[int], trainee: Trainee, at_capture: list[Value]) -> Batch:
        now = trainee.batch(number)
        leaves, spec = tree_flatten(now.inputs)
        others = tree_flatten(_zero(now.inputs) if not old else trainee.batch(old).inputs)[0]
        mixed = [others[i] if i in chosen else one for i, one in enumerate(leaves)]
        return Batch(tree_unflatten(mixed, spec), now.input_names)

    names = _input_names(replayed)
    every = range(len(names))
    choices = [every[i : i + 1] for i in every[:_ALONE]] + ([every] if len(names) > 1 else [])
    for old, chosen in itertools.product(dict.fromkeys((*range(1, number)[:1], *range(1, number)[-1:], 0)), choices):
        if replayed.is_made_by(partial(with_old, old, chosen)):
            told = f"that of step {old}" if old else "zero"
            return repairable(
                "graph-stale-input",
                f"step {number} of the graph equals, bit for bit, that without a graph in which "
                f"{_listed([names[i] for i in chosen])} is {told}; a replay reads the memory that the capture read",
                "copy each batch into the memory that was captured (static.copy_(batch)) before the replay",
            )
    return None


def _input_names(replayed: Replayed) -> list[str]:
    with replayed.without.begun() as trainee:
        batch = trainee.batch(1)
    if isinstance(batch.inputs, dict):
        return [f"the input {name}" for name, one in batch.inputs.items() for _ in tree_flatten(one)[0]]
    leaves = tree_flatten(batch.inputs)[0]
    named = len(batch.input_names) == len(leaves)
    return [f"the input {batch.input_names[i] if named else i}" for i in range(len(leaves))]


def _zero(inputs: Any) -> Any:
    return tree_map(lambda x: x.new_zeros(x.shape) if isinstance(x, Tensor) else x, inputs)


def _frozen_value(replayed: Replayed) -> Finding | None:
    """Return what Python held at the capture, and the graph still has."""
    changed = _changed(replayed)
    memory = [one for one in changed if one.is_memory]
    numbers = [one for one in changed if not one.is_memory]
    groups = [[one] for one in (numbers + memory)[:_ALONE]] + [some for some in (numbers, memory) if len(some) > 1]

    def set_back(names: set[str], trainee: Trainee, at_capture: list[Value]) -> None:
        for one in at_capture:
            if one.name in names:
                one.write(one.value)

    for group in [*groups, changed] if numbers and memory else groups:
        if replayed.is_made_by(partial(set_back, {one.name for one in group})):
            return repairable(
                "graph-frozen-value",
                f"step {replayed.number} of the graph equals, bit for bit, that without a graph in which "
                f"{_listed([one.again for one in group])}; a graph keeps the numbers, branches and memory of its "
                "capture",
                "keep what changes in a tensor that is written in place, or capture again",
            )
    return None


def _changed(replayed: Replayed) -> list[Value]:
    """Return the values that change from the capture to the end of the step, as they were."""
    with replayed.without.begun() as trainee:
        at_capture = list(values(trainee))
        for number in range(1, replayed.number + 1):
            replayed.without.made(trainee, number)
        return [one for one in at_capture if one.is_changed]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
