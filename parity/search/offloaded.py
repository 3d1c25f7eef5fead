"""Name what offloading computes otherwise than the same training without.

TE's contexts are followed, so that it is known whether a layer gets back what it has saved. Anything else is told by
experiment: the training without offloading is made again up to the step, in which something else is read back of what
was saved; the step must then be the offloaded one to the bit.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from parity.mistakes.codes import repairable
from parity.passes.courses import Beside, Computed
from parity.passes.steps import Trainee, digest
from parity.passes.switches import Exchange, Journal
from parity.result import Finding
from parity.trace.whose import Owner, module_of, whose
from parity.user_error import raised

_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def out_of_step(number: int, journal: Journal, error: BaseException | None = None) -> Finding | None:
    """Return that a backward pass has read what another layer, or another pass of the layer, has saved, or that TE's
    offloading has raised an error; None if each layer has got its own.
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


def offload_explained(beside: Beside, journal: Journal) -> Finding:
    """Return why a step with offloading is not that of the same training without."""
    differing = beside.differing
    return (
        out_of_step(beside.number, journal)
        or _changed(beside)
        or _narrow(beside)
        or _earlier(beside)
        or repairable(
            "offload-differs",
            f"step {beside.number} with offloading differs from that of the same training without it in "
            f"{_listed(differing)}",
            "compare each tensor that is read back with a copy that stays on the device",
        )
    )


def _made(beside: Beside, where: int, exchange: Exchange, seen: list[Tensor] | None = None) -> tuple[Computed, Trainee]:
    """Return what the step is without offloading, if other tensors are read back in a step, and the candidate."""
    with beside.without.begun() as trainee:
        for number in range(1, beside.number + 1):
            with ExitStack() as stack:
                if number == where:
                    stack.enter_context(trainee.reading_back(exchange, seen))
                _, computed = beside.without.made(trainee, number)
    return computed, trainee


def _is_made_by(beside: Beside, exchange: Exchange) -> bool:
    """Return whether the step without offloading is the offloaded one, if something else is read back in it."""
    return not _made(beside, beside.number, exchange)[0].differs_in(beside.computed)


def _changed(beside: Beside) -> Finding | None:
    """Return which tensors the port itself changes between a forward pass and its backward pass."""
    saved: list[Tensor] = []
    changed: list[Tensor] = []

    def compare(number: int, x: Tensor) -> Tensor:
        if digest(x) != digest(saved[number]):
            changed.append(x)
        return x

    _, trainee = _made(beside, beside.number, compare, saved)
    if not changed:
        return None
    own = {id(one): name for name, one in trainee.owners[""].named_parameters()}
    names = (own.get(id(x), f"a saved tensor of shape {'x'.join(map(str, x.shape))}") for x in changed)
    return repairable(
        "offload-stale-tensor",
        f"in step {beside.number}, the port changes {_listed(list(dict.fromkeys(names)))} after the forward pass has "
        "saved it and before the backward pass reads it; without offloading, the backward pass reads the new values, "
        "and with it the old ones",
        "change weights and activations in place only after the backward pass",
    )


def _narrow(beside: Beside) -> Finding | None:
    """Return in which dtype of 16 bits wider tensors are kept."""
    for (dtype, name), kinds in itertools.product(_NARROW.items(), ((Tensor,), (Tensor, nn.Parameter))):

        def rounded(number: int, x: Tensor, dtype: torch.dtype = dtype, kinds: tuple[type, ...] = kinds) -> Tensor:
            return x.to(dtype).to(x.dtype) if type(x) in kinds and x.dtype is torch.float32 else x

        if _is_made_by(beside, rounded):
            return repairable(
                "offload-differs",
                f"step {beside.number} with offloading equals, bit for bit, that without it in which all saved FP32 "
                f"tensors are rounded to {name}; these include the statistics of norms, and the scales of activations "
                "that TE saves in FP8",
                "copy each tensor in its own dtype",
            )
    return None


def _earlier(beside: Beside) -> Finding | None:
    """Return whether tensors are read back that an earlier step has saved."""
    for earlier in dict.fromkeys((1, beside.number - 1)):
        if not 1 <= earlier < beside.number:
            continue
        saved: list[Tensor] = []
        _made(beside, earlier, lambda number, x: x, saved)
        for what, is_chosen in _GROUPS:

            def old(
                number: int, x: Tensor, saved: Sequence[Tensor] = saved, chosen: Callable[[Tensor], bool] = is_chosen
            ) -> Tensor:
                then = saved[number] if number < len(saved) else x
                return then if chosen(x) and then.shape == x.shape and then.dtype == x.dtype else x

            if _is_made_by(beside, old):
                return repairable(
                    "offload-stale-tensor",
                    f"step {beside.number} with offloading equals, bit for bit, that without it in which the backward "
                    f"pass reads {what} of step {earlier}",
                    "copy to the host anew in each forward pass",
                )
    return None


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)


_GROUPS: tuple[tuple[str, Callable[[Tensor], bool]], ...] = (
    ("the weights", _is_weight),
    ("the activations", lambda x: not _is_weight(x)),
    ("everything that was saved", lambda x: True),
)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
