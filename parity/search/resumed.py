"""Name what a training that was saved and loaded has lost."""

from __future__ import annotations

from collections.abc import Mapping

from parity.mistakes.codes import finding
from parity.passes.steps import COPIES, HISTORIES, SCALES, Resumption
from parity.result import Finding


def lost_state(number: int, resumed: Resumption) -> Finding | None:
    """Return what a resumed training has lost; None if its first step is the uninterrupted one's to the bit.

    Args:
        number: of that step.
        resumed: how it differs.
    """
    differing, moments, is_same = resumed.differing, resumed.moments, resumed.is_same
    lost = {what: _other(names, resumed.restored.get(what, {})) for what, names in resumed.saved.items()}
    lost = {what: names for what, names in lost.items() if names}
    if is_same and not {SCALES, HISTORIES} & lost.keys():
        return None
    what = ", ".join(differing[:3]) + (" and more" if len(differing) > 3 else "")
    if not differing:
        what = f"its optimizer's {', '.join(moments) or 'weights'}" if not is_same else "the scales of later steps"
    beginning = (
        f"step {number}, the first of a training that was saved and loaded, is not that of the same training without "
        f"interruption: {what} are others"
    )
    if not lost and resumed.caches_weights:
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
    if COPIES in lost:
        advice.append("an optimizer's state_dict does not hold what it steps: save these copies beside it")
    if any(what.startswith("the optimizer's") for what in lost):
        advice.append("save and load the optimizer's state, with its moments, its count of steps and its FP32 masters")
    return "".join(f"; {one}" for one in advice)


def _other(saved: Mapping[str, bytes], restored: Mapping[str, bytes]) -> list[str]:
    return [name for name, digest in saved.items() if restored.get(name) != digest]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
