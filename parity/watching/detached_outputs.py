"""Outputs through which gradients flow back in one of the two modules alone.

A loss beside a module's other outputs, as a router's, may add less to every gradient than rounding does: where it is
detached, no number shows it.
"""

from __future__ import annotations

from collections.abc import Sequence


def by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Why a candidate whose numbers are right is none in the reference's place; empty where it is.

    Args:
        reference: names of the reference's outputs that require no gradient.
        candidate: ditto of the candidate's.
    """
    detached = [name for name in candidate if name not in reference]
    if not detached:
        return ""
    names, have, they = (", ".join(detached), *(("have", "they are") if len(detached) > 1 else ("has", "it is")))
    return (
        f"{names} of the candidate {have} no gradient, where the reference's {have} one: {they} detached, or computed "
        "under no_grad, so that nothing is trained by it"
    )
