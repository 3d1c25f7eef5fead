"""Judge delayed scaling by itself: what a step writes into each amax history, and the scale that follows from it.

TE records the largest magnitude of each tensor that it quantizes, appends it to the tensor's history after the pass,
and computes the next pass's scale of that history (``_amax_and_scale_update`` in ``pytorch/quantization.py`` and
``common/recipe/delayed_scaling.cu`` of TE 2.20). So the history after a step is the one before it, moved on, with new
numbers at its end. That is exact, whatever the numbers are, and a scale is exact up to FP32. Which tensor an amax was
taken of is exact for weights; of inputs and gradients the reference knows it as far as a scale need fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.mistakes.codes import repairable
from parity.result import Finding
from parity.te.scaling import Kept

# An FP32 division, and a kernel's power of two: far below what any other amax would give.
_FP32 = 1e-5
# A weight's amax is one of its own numbers, up to a cast to BF16.
_CAST = 2.0**-7
# In powers of two. A scale need fit its tensor no better than this, see ``parity.te.state``.
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
        "{what} has an amax in its history that is not its own{by}",
        "look at which tensor is quantized there, and over which ranks amaxes are reduced",
    ),
}


def wrong_scaling(
    moves: Sequence[tuple[Kept, Kept]], multiplied: Mapping[tuple[str, bool], float], is_plain_step: bool
) -> Finding | None:
    """Return what is wrong with histories or scales after a step; None if nothing is.

    Args:
        moves: what was kept of each tensor before and after the step.
        multiplied: the largest magnitude of what each weight is multiplied by, by its name and by whether that is a
            gradient; without those that are not known.
        is_plain_step: whether the step has no passes and no loss scale of a port's own, which inputs and gradients
            would depend on.
    """
    wrong: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for before, after in moves:
        slot = before.slot
        expected = before.weight
        if slot.role in ("input", "output gradient"):
            known = [multiplied.get((name, slot.role == "output gradient")) for name in slot.weights]
            expected = max((one for one in known if one is not None), default=None)
        is_known = slot.role == "weight" or is_plain_step
        title, by = _wrong(before, after, expected if expected else None, is_known)
        if title:
            wrong[title].append((slot.name, by))
    for title, (told, repair) in _TOLD.items():
        if wrong[title]:
            whose = [name for name, _ in wrong[title]]
            more = f" (and so do {len(whose) - 1} more: {', '.join(whose[1:3])})" if len(whose) > 1 else ""
            return repairable(title, told.format(what=whose[0], by=wrong[title][0][1]) + more, repair)
    return None


def _wrong(before: Kept, after: Kept, expected: float | None, is_known: bool) -> tuple[str, str]:
    """Return the title of what is wrong with one tensor, and numbers for it; empty texts if nothing is."""
    if before.history.shape != after.history.shape:
        return "amax-history-lost", ""
    was, now = before.history[1:], after.history[1:]
    pushed = _moved_on(was, now)
    is_full = bool((now != 0).all())
    if torch.equal(now, was) and not (pushed and bool(was.any())):
        # Weights may be cached from one step to the next as long as they do not change, which gradients show.
        if not len(was) or expected is None or before.slot.role == "weight":
            return "", ""
        waits = bool(after.history[0])
        is_new = len(was) > 1 and int(was.count_nonzero()) == 1  # any scale that is settled has seen more passes
        return "amax-history-lost" if is_new and not waits else "amax-not-recorded", ""
    if not pushed and not is_full:
        return "amax-history-lost", ""
    if pushed and not _follows(before, after, pushed):
        newest = float(now[-1])
        return "scale-not-updated", f": it is {after.scale:.4g}, and the newest amax is {newest:.4g}"
    if expected is not None and is_known and pushed:
        newest = float(now[-min(pushed) :].max())
        limit = math.log2(1 + _CAST) if before.slot.role == "weight" else _FITS
        if newest <= 0 or abs(math.log2(newest / expected)) > limit:
            return "amax-of-another-tensor", f": it is {newest:.4g}, and the tensor's own is {expected:.4g}"
    return "", ""


def _moved_on(was: Tensor, now: Tensor) -> list[int]:
    """Return by how many new amaxes the later history may be the earlier one, moved on, the fewest first.

    At least one amax must have stayed: nothing else tells a history that went on from another. One that was empty may
    have gone on by its new ones.
    """
    seen = was.nonzero().flatten()
    if not len(seen):
        new = max(1, len(now) - int((now.cumsum(0) == 0).sum()))
        return [new] if new < len(was) else []
    last = int(seen[-1])
    moved = [last - place for place in (now[:last] == was[last]).nonzero().flatten().tolist()]
    return [n for n in reversed(moved) if torch.equal(now[: len(was) - n], was[n:])]


def _follows(before: Kept, after: Kept, pushed: Sequence[int]) -> bool:
    """Return whether a scale follows from its history, which this many new numbers may have moved on."""
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
        dropped = torch.cat([was, now[-new:]])[new - 1 : new]  # counts once more while it is dropped
        return scale(torch.cat([dropped, now]))

    return any(math.isclose(after.scale, expected(new), rel_tol=_FP32) for new in pushed)
