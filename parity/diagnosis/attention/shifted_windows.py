"""Swin's shifted windows, and ports that shift by another number: rolls there and back, the mask of what came round.

A reference holds the mask as a table, or makes it; it is recognised by its values (arXiv 2103.14030).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.diagnosis.functions.reads import made_again
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import binary
from parity.watching.trace import Call, Edit, Trace, edit

_MOST_SHIFTS = 8  # other ones, the smallest


@dataclass(frozen=True, eq=False)
class _Roll:
    """``call`` rolls two dimensions by ``shift`` places, one way or the other."""

    call: Call
    shift: int
    side: int

    def edits(self, shift: int) -> Edit:
        """It is to roll by another number of places."""
        amounts, dims = _arguments(self.call)
        others = tuple(int(math.copysign(shift, amount)) for amount in amounts)
        return edit(self.call, self.call.inputs, lambda was, x: x.roll(others, dims))


@dataclass(frozen=True, eq=False)
class _Mask:
    """``call`` adds to scores the mask of windows, as its tensor number ``position``."""

    call: Call
    position: int
    side: int
    window: int
    shift: int

    def edits(self, shift: int) -> Edit:
        """The mask is to be that of another shift."""
        apart = _apart(self.side, self.window, shift)

        def compute(was: Tensor, *inputs: Tensor) -> Tensor:
            table, others = inputs[self.position], list(inputs)
            others[self.position] = apart.to(table.device).reshape(table.shape) * table.amin()
            result: Tensor = made_again(self.call, others)
            return result.to(was.dtype)

        return edit(self.call, self.call.inputs, compute)


def shifted_window_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Windows that are shifted by another number, with the mask of that number or with their own; and other masks."""
    rolls: dict[tuple[int, int], list[_Roll]] = defaultdict(list)
    masks: dict[tuple[int, int], list[_Mask]] = defaultdict(list)
    for call in trace.calls:
        roll, mask = _roll(trace, call), _mask(trace, call)
        if roll is not None:
            rolls[roll.side, roll.shift].append(roll)
        if mask is not None:
            masks[mask.side, mask.shift].append(mask)
    for side, shift in {**rolls, **masks}:
        moved, masked = rolls.get((side, shift), []), masks.get((side, shift), [])
        largest = masked[0].window - 1 if masked else side // 2
        for other in [one for one in range(largest + 1) if one != shift][: _MOST_SHIFTS + 1]:
            of_rolls, of_masks = ([one.edits(other) for one in some] for some in (moved, masked))
            named = f"the rows and columns of Swin's windows by {shift}, as the reference does"
            if moved and masked:
                told = f"shift {named}; they are shifted by {other}, and masked so"
                yield _shifted("both", told, module, [*of_rolls, *of_masks])
            if moved and other:
                kept = ", and their mask is the reference's" if masked else ""
                yield _shifted("rolls", f"shift {named}; they are shifted by {other}{kept}", module, of_rolls)
            if masked and other:
                told = f"mask windows that are shifted by {shift}, as the reference does; the mask is that of {other}"
                yield _shifted("mask", told, module, of_masks)


def _shifted(what: str, repair: str, module: nn.Module, edits: list[Edit]) -> Hypothesis:
    return Hypothesis("window", f"{what}: {repair}", repair, module, tuple(edits))


def _arguments(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shifts and dimensions of a roll."""
    amounts = call.kwargs.get("shifts", call.args[1] if len(call.args) > 1 else ())
    dims = call.kwargs.get("dims", call.args[2] if len(call.args) > 2 else ())
    both = (tuple(one) if isinstance(one, (tuple, list)) else (one,) for one in (amounts, dims))
    return next(both), next(both)


def _roll(trace: Trace, call: Call) -> _Roll | None:
    if call.name != "roll" or len(call.inputs) != 1 or not trace.tensor(call.inputs[0]).is_floating_point():
        return None
    amounts, dims = _arguments(call)
    sizes = {trace.tensor(call.inputs[0]).shape[dim] for dim in dims}
    if len(dims) != 2 or len(amounts) != 2 or len(sizes) != 1 or len({abs(amount) for amount in amounts}) != 1:
        return None
    return _Roll(call, abs(amounts[0]), sizes.pop())


def _mask(trace: Trace, call: Call) -> _Mask | None:
    """The mask that a call adds, if it is that of shifted windows."""
    named = binary(call)
    if named is None or named[0] != "add":
        return None
    for position, value in enumerate(call.inputs):
        found = _shift_of(trace.tensor(value)) if trace.tensor(value).is_floating_point() else None
        if found is not None:
            return _Mask(call, position, *found)
    return None


def _shift_of(table: Tensor) -> tuple[int, int, int] | None:
    """The side of the grid, that of a window, and the shift, of a mask of shifted windows."""
    places = table.shape[-1] if table.dim() > 2 and table.shape[-1] == table.shape[-2] else 0
    windows = table.numel() // max(places**2, 1)
    window, count = math.isqrt(places), math.isqrt(windows)
    if window < 2 or window**2 != places or count < 2 or count**2 != windows:
        return None
    least = table.amin()
    hides = table == least
    if least >= 0.0 or not bool((hides | (table == 0.0)).all()):
        return None
    hides = hides.reshape(windows, places, places)
    for shift in range(1, window):
        if torch.equal(_apart(count * window, window, shift).to(hides.device), hides):
            return count * window, window, shift
    return None


def _apart(side: int, window: int, shift: int) -> Tensor:
    """Of each window which places are no neighbours, as one came from elsewhere, ``[windows, places, places]``."""
    index = torch.arange(side)
    part = (index >= side - window).long() + (index >= side - shift).long()
    region = 3 * part[:, None] + part if shift else torch.zeros(side, side)
    cut = region.unflatten(0, (side // window, window)).unflatten(2, (side // window, window))
    places = cut.transpose(1, 2).reshape(-1, window**2)
    return places[:, :, None] != places[:, None]
