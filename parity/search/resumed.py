"""Name what a training that was saved and loaded has lost."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parity.mistakes.codes import finding
from parity.passes.steps import HISTORIES, SCALES, Named, State, Stepped
from parity.result import Finding, label_of


def lost_state(
    number: int, saved: State, restored: State, uninterrupted: Stepped, resumed: Stepped, caches_weights: bool
) -> Finding | None:
    """Return what a resumed training has lost; None if its first step is the uninterrupted one's to the bit.

    Args:
        number: of that step.
        saved: what the training kept when it was saved.
        restored: what it kept when it was loaded.
        uninterrupted: the step that it made without interruption.
        resumed: the step that it made after it was loaded.
        caches_weights: whether one of its modules keeps quantized copies of weights.
    """
    differing = [
        label_of(kind, "loss" if kind == "output" else name)
        for (kind, name), x in uninterrupted.tensors.items()
        if not torch.equal(x, resumed.tensors[kind, name])
    ]
    one, other = uninterrupted.update, resumed.update
    moments = [key for key, some in one.moments.items() if not _are_same(some, other.moments.get(key, {}))]
    lost = {what: _other(names, restored.get(what, {})) for what, names in saved.items()}
    lost = {what: names for what, names in lost.items() if names}
    is_same = not differing and not moments and _are_same(one.after, other.after)
    if is_same and not {SCALES, HISTORIES} & lost.keys():
        return None
    what = ", ".join(differing[:3]) + (" and more" if len(differing) > 3 else "")
    if not differing:
        what = f"its optimizer's {', '.join(moments) or 'weights'}" if not is_same else "the scales of later steps"
    beginning = (
        f"step {number}, the first of a training that was saved and loaded, is not that of the same training without "
        f"interruption: {what} are others"
    )
    if not lost and caches_weights:
        return finding(
            "weight-cache-stale",
            f"{beginning}, though the file held all: FP8 copies of the weights before are kept; call the module with "
            "is_first_microbatch=True, or None, once after a load",
        )
    told = "; ".join(f"{what} ({_listed(names)})" for what, names in lost.items())
    return finding(
        "state-not-saved",
        f"{beginning}; {f'not restored: {told}' if lost else 'something that no state_dict holds is lost'}"
        f"{_advice(lost)}",
    )


def _advice(lost: Mapping[str, list[str]]) -> str:
    advice = []
    if {SCALES, HISTORIES} & lost.keys():
        advice.append("TE keeps FP8 scales and histories in _extra_state of each module's state_dict")
    if any(what.startswith("the optimizer's") for what in lost):
        advice.append("save and load the optimizer's state, with its moments, its count of steps and its FP32 masters")
    return "".join(f"; {one}" for one in advice)


def _other(saved: Mapping[str, bytes], restored: Mapping[str, bytes]) -> list[str]:
    return [name for name, digest in saved.items() if restored.get(name) != digest]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _are_same(some: Named, others: Named) -> bool:
    return some.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in some.items())
