"""Name what a training that was saved and loaded has lost."""

from __future__ import annotations

from collections.abc import Mapping

from parity.mistakes.codes import repairable
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
        f"step {number}, the first after the training was saved and loaded, differs from that of the uninterrupted "
        f"training in {what}"
    )
    if not lost and resumed.caches_weights:
        return repairable(
            "weight-cache-stale",
            f"{beginning}, though the file held everything: FP8 copies of the weights from before the load are kept",
            "call the module with is_first_microbatch=True, or None, once after each load",
        )
    told = "; ".join(f"{what} ({_listed(names)})" for what, names in lost.items())
    evidence = f"{beginning}; {f'not restored: {told}' if lost else 'something that no state_dict holds is lost'}"
    return repairable("state-not-saved", evidence, _advice(lost))


def _advice(lost: Mapping[str, list[str]]) -> str:
    advice = []
    if {SCALES, HISTORIES} & lost.keys():
        advice.append("save and load _extra_state of each module's state_dict, which has TE's FP8 scales and histories")
    if COPIES in lost:
        advice.append("save the FP32 copies that the optimizer steps, which its state_dict does not hold")
    if any(what.startswith("the optimizer's") for what in lost):
        advice.append("save and load the optimizer's state, with its moments, its step count and its FP32 masters")
    return "; ".join(advice) or "look for state that the module or the optimizer keeps outside of its state_dict"


def _other(saved: Mapping[str, bytes], restored: Mapping[str, bytes]) -> list[str]:
    return [name for name, digest in saved.items() if restored.get(name) != digest]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
