"""Explain why a training with CUDA graphs, offloading or compilation differs from the same training without.

Causes are found by experiment. The training without the switch runs again up to the wrong step, and in that step one
thing is changed to what the switch may have left. If that is the cause, the step equals the switched one to the bit.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from parity.mistakes.codes import repairable
from parity.passes.one_pass import Arguments, as_arguments
from parity.result import Finding
from parity.shown import few_of, raised
from parity.te.state import is_quantized
from parity.trace.whose import Owner, is_of_te, module_of, users_line, whose
from parity.trainings.courses import Computed, PairedStep
from parity.trainings.steps import Batch, Trainee, digest
from parity.trainings.switches import DIFFERENTIATED, GENERATED, TRACED, Exchange, Journal, NotCaptured

# CUDA graphs: values that a graph may keep from its capture are set back to what they were at the capture.


# At most this many inputs and values are tried one by one.
_ALONE = 6


def not_captured(error: NotCaptured) -> Finding:
    """Return the finding on code that a graph cannot capture."""
    cause = error.__cause__ or error
    where = users_line(cause)
    return repairable(
        "graph-not-captured",
        f"the capture raised {raised(cause)}{f'; at {where}' if where else ''}",
        "move code that reads a tensor's value (item, tolist, cpu, a branch, a mask as an index), or that waits for "
        "the device, out of the captured part",
    )


@dataclass(frozen=True)
class Replayed(PairedStep):
    """A step that a graph has computed differently from the training without graphs."""

    def without_graph(self, change: Callable[[Trainee, list[Value]], Batch | None]) -> Computed:
        """Return the results of the step without a graph, after a change to the candidate.

        Args:
            change: gets the candidate, and the values that it had when the graph was captured; it may return another
                batch.
        """
        at_capture: list[Value] = []
        return self.made_again(
            lambda trainee: change(trainee, at_capture), lambda trainee: at_capture.extend(values(trainee))
        )

    def is_made_by(self, change: Callable[[Trainee, list[Value]], Batch | None]) -> bool:
        """Return whether the step without a graph equals the graph's after a change to the candidate."""
        return not self.without_graph(change).differs_in(self.computed)

    def other_shapes(self) -> tuple[str, str] | None:
        """Return the shapes of the inputs that TE's graph was captured with, and those of a call with others."""
        with self.without.begun() as trainee:
            if trainee.training.graph is not None:
                return None
            captured = _describe_shapes(as_arguments(trainee.batch(self.number).inputs))
        return next(
            ((captured, own) for call in self.stepped.calls if (own := _describe_shapes(call)) != captured), None
        )


def _describe_shapes(arguments: Arguments) -> str:
    shapes = [tuple(x.shape) for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return " and ".join("x".join(map(str, shape)) for shape in shapes)


def replay_explained(replayed: Replayed) -> Finding | None:
    """Return a finding on a mistake in the capture, or a value kept from it, that explains the graph's step."""
    number = replayed.number
    if number == 1 and replayed.without.changed_before:
        return repairable(
            "graph-differs",
            f"the capture has changed {few_of(replayed.without.changed_before, 4)}",
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
            f"in step {number}, the optimizer does not read the gradients of {few_of(replayed.stepped.moved, 4)} where "
            "the graph writes them, which is the memory that grad had when the graph was captured",
            "change gradients in place; zero_grad(set_to_none=True) and parameter.grad = ... replace their memory",
        )
    if replayed.stepped.unmade:
        return repairable(
            "weight-cache-stale",
            f"step {number} of the graph computes gradients of inputs from copies of "
            f"{few_of(replayed.stepped.unmade, 4)} that are not the transposes of the FP8 weights; "
            "parameter._reset_caches() has no effect on a replay, which runs no Python",
            "call parameter._create_transpose() after each optimizer.step(), which writes the memory that the graph "
            "reads, or step FP32 copies of your own and copy_ them to the parameters",
        )
    if replayed.is_made_by(lambda trainee, at_capture: trainee.leave_recipe()):
        return repairable(
            "graph-differs",
            f"step {number} of the graph equals, bit for bit, the step without the precision's recipe",
            "pass enabled=True and the recipe to make_graphed_callables, or capture within te.autocast",
        )
    return _stale_input(replayed) or _frozen_value(replayed)


def replay_frozen(replayed: Replayed) -> tuple[Finding, bool]:
    """Return the finding on a step that nothing explains, and whether it names values that the graph may have kept."""
    number, differing = replayed.number, replayed.differing
    beginning = (
        f"step {number} of the graph differs from that of the same training without a graph in {few_of(differing, 4)}"
    )
    anew = replayed.without_graph(lambda trainee, at_capture: trainee.capture())
    if number == 1 or anew.differs_in(replayed.without.steps[number - 1]):
        told = repairable(
            "graph-differs",
            f"{beginning}, and so does a graph that is captured right before the step",
            "look for code that runs only in the capture, and for inputs that are not copied into the graph's memory",
        )
        return told, False
    changed = _find_changed_values(replayed)
    was = f": since then, {few_of([one.was for one in changed], 4)}" if changed else ", FP8 weights or memory"
    told = repairable(
        "graph-frozen-value",
        f"{beginning}, but a graph that is captured right before the step does not; so the graph keeps a number, a "
        f"branch or something else from the time of its capture{was}",
        "keep what changes in a tensor that is written in place, or capture again",
    )
    return told, bool(changed)


def _stale_input(replayed: Replayed) -> Finding | None:
    """Return a finding if inputs of the graph's step are those of an earlier step, or zero."""
    number = replayed.number

    def with_old(old: int, chosen: Sequence[int], trainee: Trainee, at_capture: list[Value]) -> Batch:
        now = trainee.batch(number)
        leaves, spec = tree_flatten(now.inputs)
        others = tree_flatten(_make_zero_inputs(now.inputs) if not old else trainee.batch(old).inputs)[0]
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
                f"step {number} of the graph equals, bit for bit, the step without a graph if "
                f"{few_of([names[i] for i in chosen], 4)} is {told}; a replay reads the memory that the capture read",
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


def _make_zero_inputs(inputs: Any) -> Any:
    return tree_map(lambda x: x.new_zeros(x.shape) if isinstance(x, Tensor) else x, inputs)


def _frozen_value(replayed: Replayed) -> Finding | None:
    """Return a finding if the graph still has Python values from the time of its capture."""
    changed = _find_changed_values(replayed)
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
                f"step {replayed.number} of the graph equals, bit for bit, the step without a graph if "
                f"{few_of([one.again for one in group], 4)}; a graph keeps the numbers, branches and memory of its "
                "capture",
                "keep what changes in a tensor that is written in place, or capture again",
            )
    return None


def _find_changed_values(replayed: Replayed) -> list[Value]:
    """Return the values that change from the capture to the end of the step, as they were at the capture."""
    with replayed.without.begun() as trainee:
        at_capture = list(values(trainee))
        for number in range(1, replayed.number + 1):
            replayed.without.made(trainee, number)
        return [one for one in at_capture if one.is_changed]


# Values that Python holds for a training, and that a CUDA graph freezes: numbers, and the addresses of tensors.


@dataclass(frozen=True)
class Value:
    """A value that a step may read, and that may have changed at the next step.

    Attributes:
        name: where it is, in words.
        value: the value at the capture.
        read: returns the current value.
        write: puts another value in its place.
    """

    name: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]

    @property
    def is_memory(self) -> bool:
        """Return whether it is a tensor."""
        return isinstance(self.value, Tensor)

    @property
    def is_changed(self) -> bool:
        """Return whether there is now another number, or a tensor in other memory."""
        now = self.read()
        if isinstance(self.value, Tensor) and isinstance(now, Tensor):
            return self.value.data_ptr() != now.data_ptr()
        return _is_followed(now) and (type(self.value) is not type(now) or bool(self.value != now))

    @property
    def was(self) -> str:
        """Say how it has changed since the capture."""
        return f"{self.name} lies in other memory" if self.is_memory else f"{self.name} is no longer {self.value!r}"

    @property
    def again(self) -> str:
        """Say which change makes the step equal the graph's."""
        return (
            f"{self.name} {'has the memory that it had' if self.is_memory else f'is {self.value!r}, as'} at the capture"
        )


def values(trainee: Trainee) -> Iterator[Value]:
    """Yield the values held by the module and its submodules, the optimizer's groups, and the pair's functions."""
    for what, owner in trainee.owners.items():
        if isinstance(owner, nn.Module):
            for path, module in owner.named_modules():
                own = {} if is_of_te(type(module)) else vars(module)  # TE sets its own in its first call
                for held in (own, module._buffers):
                    yield from _list_values(held, f"{path}.".lstrip("."))
                yield from (
                    _make_memory_value(f"{path}.{key}".lstrip("."), one)
                    for key, one in module._parameters.items()
                    if one is not None and not is_quantized(one)
                )
        elif isinstance(owner, Optimizer):
            for number, group in enumerate(owner.param_groups):
                where = "the optimizer" if len(owner.param_groups) == 1 else f"the optimizer's group {number}"
                yield from _list_values(group, after=f" of {where}")
        elif owner is not None:
            yield from _of_function(owner, what)


def _make_memory_value(name: str, parameter: nn.Parameter) -> Value:
    def write(memory: Tensor) -> None:
        parameter.data = memory

    return Value(name, parameter.data, lambda: parameter.data, write)


def _list_values(held: dict[str, Any], before: str = "", after: str = "") -> Iterator[Value]:
    for key, one in list(held.items()):
        if _is_followed(one) and not key.startswith("_"):
            yield Value(f"{before}{key}{after}", one, partial(held.get, key), partial(held.__setitem__, key))


def _is_followed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, (bool, int, float, str)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def _of_function(owner: Any, what: str) -> Iterator[Value]:
    """Yield the values in a function's closure, or in an object's attributes."""
    if isinstance(owner, MethodType):
        owner = owner.__self__
    if not isinstance(owner, FunctionType):
        yield from _list_values(getattr(owner, "__dict__", {}), after=f" of {what}")
        return
    for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        if _is_followed(content):
            yield Value(
                f"{name} of {what}", content, partial(getattr, cell, "cell_contents"), partial(_fill_cell, cell)
            )
        elif not isinstance(content, (nn.Module, Optimizer, ModuleType, type)):
            yield from _list_values(getattr(content, "__dict__", {}), f"{name}.", f" of {what}")


def _fill_cell(cell: CellType, content: Any) -> None:
    cell.cell_contents = content


# Offloading: TE's contexts are followed to find out whether a layer gets back what it has saved. Other causes are found
# by experiments in which something else is read back.


_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def out_of_step(number: int, journal: Journal, error: BaseException | None = None) -> Finding | None:
    """Return a finding if TE's offloading has raised an error or given a layer tensors that it has not saved.

    These tensors may be those of another layer, or of another pass of the layer.
    """
    told = [f"raised {raised(error)}"] if error is not None and _is_of_offloading(error) else []
    for saved, read in journal.misread[:1]:
        where = f"layer {read}'s memory" if saved != read else "its own memory, where another forward pass has written"
        told.insert(0, f"looked for what layer {saved} had saved in {where}")
    if not told:
        return None
    return repairable(
        "offload-out-of-step",
        f"in step {number}, TE's offloading, which counts layers as they enter its context, {' and '.join(told)}",
        "pass the output of each layer to the synchronization function before the next layer enters the context; set "
        "model_layers to the number of times that a forward pass enters it; and finish each backward pass before the "
        "next forward pass",
    )


def _is_of_offloading(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module_of(frame).endswith(".cpu_offload") and whose(frame) is Owner.TE for frame in frames)


def offload_explained(beside: PairedStep, journal: Journal) -> Finding:
    """Return the finding on why a step with offloading differs from that of the same training without it."""
    differing = beside.differing
    return (
        out_of_step(beside.number, journal)
        or _changed_saved(beside)
        or _find_narrow_copies(beside)
        or _find_earlier_tensors(beside)
        or repairable(
            "offload-differs",
            f"step {beside.number} with offloading differs from that of the same training without it in "
            f"{few_of(differing, 4)}",
            "compare each tensor that is read back with a copy that stays on the device",
        )
    )


def _run_without_offloading(
    beside: PairedStep, where: int, exchange: Exchange, seen: list[Tensor] | None = None
) -> tuple[Computed, Trainee]:
    """Return the step's results without offloading, with other tensors read back in one step, and the candidate."""
    with beside.without.begun() as trainee:
        for number in range(1, beside.number + 1):
            with ExitStack() as stack:
                if number == where:
                    stack.enter_context(trainee.reading_back(exchange, seen))
                _, computed = beside.without.made(trainee, number)
    return computed, trainee


def _is_made_by(beside: PairedStep, exchange: Exchange) -> bool:
    """Return whether the step without offloading equals the offloaded one if other tensors are read back in it."""
    return not _run_without_offloading(beside, beside.number, exchange)[0].differs_in(beside.computed)


def _changed_saved(beside: PairedStep) -> Finding | None:
    """Return a finding if the port itself changes tensors between a forward pass and its backward pass."""
    saved: list[Tensor] = []
    changed: list[Tensor] = []

    def compare(number: int, x: Tensor) -> Tensor:
        if digest(x) != digest(saved[number]):
            changed.append(x)
        return x

    _, trainee = _run_without_offloading(beside, beside.number, compare, saved)
    if not changed:
        return None
    own = {id(one): name for name, one in trainee.owners[""].named_parameters()}
    names = (own.get(id(x), f"a saved tensor of shape {'x'.join(map(str, x.shape))}") for x in changed)
    return repairable(
        "offload-stale-tensor",
        f"in step {beside.number}, the port changes {few_of(list(dict.fromkeys(names)), 4)} after the forward pass has "
        "saved it and before the backward pass reads it; without offloading, the backward pass reads the new values, "
        "and with it the old ones",
        "change weights and activations in place only after the backward pass",
    )


def _find_narrow_copies(beside: PairedStep) -> Finding | None:
    """Return a finding if wider tensors are kept in a dtype of 16 bits."""
    for (dtype, name), kinds in itertools.product(_NARROW.items(), ((Tensor,), (Tensor, nn.Parameter))):

        def rounded(number: int, x: Tensor, dtype: torch.dtype = dtype, kinds: tuple[type, ...] = kinds) -> Tensor:
            return x.to(dtype).to(x.dtype) if type(x) in kinds and x.dtype is torch.float32 else x

        if _is_made_by(beside, rounded):
            return repairable(
                "offload-differs",
                f"step {beside.number} with offloading equals, bit for bit, the step without it if all saved FP32 "
                f"tensors are rounded to {name}, such as the statistics of norms and the scales of quantized tensors",
                "copy each tensor in its own dtype",
            )
    return None


def _find_earlier_tensors(beside: PairedStep) -> Finding | None:
    """Return a finding if the tensors that are read back are those that an earlier step has saved."""
    for earlier in dict.fromkeys((1, beside.number - 1)):
        if not 1 <= earlier < beside.number:
            continue
        saved: list[Tensor] = []
        _run_without_offloading(beside, earlier, lambda number, x: x, saved)
        for what, is_chosen in _GROUPS:

            def old(
                number: int, x: Tensor, saved: Sequence[Tensor] = saved, chosen: Callable[[Tensor], bool] = is_chosen
            ) -> Tensor:
                then = saved[number] if number < len(saved) else x
                return then if chosen(x) and then.shape == x.shape and then.dtype == x.dtype else x

            if _is_made_by(beside, old):
                return repairable(
                    "offload-stale-tensor",
                    f"step {beside.number} with offloading equals, bit for bit, the step without it if the backward "
                    f"pass reads {what} of step {earlier}",
                    "copy to the host again in each forward pass",
                )
    return None


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)


_GROUPS: tuple[tuple[str, Callable[[Tensor], bool]], ...] = (
    ("the weights", _is_weight),
    ("the activations", lambda x: not _is_weight(x)),
    ("everything that was saved", lambda x: True),
)


# Compilation: the step of ``torch.compile`` that makes a candidate wrong.


_STEPS = {
    TRACED: (
        "tracing the Python code changes what it computes",
        "look for values that are declared constant or read where no guard checks them, and for code that asks "
        "torch.compiler.is_compiling()",
    ),
    DIFFERENTIATED: (
        "functionalization or ahead-of-time differentiation changes what is computed",
        "look at your own custom operations: what they write to (mutates_args), register_fake and register_autograd",
    ),
    GENERATED: (
        "the generated kernels compute something else, beyond what the limits allow for unrounded intermediate results",
        "try parity.Training(compile=...) with other options",
    ),
}


def compiled_otherwise(number: int, backends: Sequence[str], is_right: Callable[[str], bool]) -> Finding:
    """Return the finding on a step of a compiled candidate that is right without ``torch.compile``.

    Args:
        number: the number of the step.
        backends: the backends to try, each of which does more than the one before; the last is the candidate's. Empty
            if the pair compiles the candidate by itself.
        is_right: whether a new candidate with the same weights is right if a backend compiles it; an empty name stands
            for the pair's own compilation.
    """
    beginning = f"a new module with the same weights computes step {number} correctly without torch.compile"
    wrong = next((one for one in backends or ("",) if not is_right(one)), None)
    if wrong is None:
        return repairable(
            "compiled-differs",
            f"{beginning}, and also if it is compiled now; only the code that was compiled in an earlier step is wrong",
            "look for values that the compiled code keeps from its compilation, such as a result of "
            "assume_constant_result, or a number that is read where no guard checks it",
        )
    if not wrong:
        return repairable(
            "compiled-differs",
            f"{beginning}, but not if it is compiled as the pair does it",
            "leave out parts of that compilation until the step is right",
        )
    what, repair = _STEPS[wrong]
    return repairable("compiled-differs", f'{beginning}, but not with backend="{wrong}": {what}', repair)
