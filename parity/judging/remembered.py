"""Whether a candidate keeps something from one call to the next that its outputs hang on, as no reference may."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parity.diagnosis.codes import finding
from parity.passes import Recalled
from parity.result import Finding, TensorResult

_TITLE = "state-between-calls"


def by_recalling(recalled: Recalled, tensors: Sequence[TensorResult]) -> tuple[Finding, ...]:
    """Return a finding where the same inputs, before and after the pass, gave outputs that no rounding makes differ.

    Two outputs that are both within a tolerance of golden are within twice that of each other.

    Args:
        recalled: of the candidate's calls.
        tensors: the verdicts on its pass.
    """
    tolerance = {tensor.name: tensor.tolerance_relative_l2 for tensor in tensors if tensor.kind == "output"}
    for name, one in recalled.before.items():
        other = recalled.after.get(name)
        if other is None or other.shape != one.shape:
            return (told(recalled, f"it does not return {name} as before"),)
        apart = torch.linalg.vector_norm((other.double() - one.double()).nan_to_num())
        size = torch.linalg.vector_norm(one.double().nan_to_num())
        if name in tolerance and apart > 2 * tolerance[name] * size:
            moved = f"{(apart / size).item():.2g} of its norm" if size else f"{apart.item():.2g}"
            return (told(recalled, f"its {name} moves by {moved}"),)
    return ()


def told(recalled: Recalled, evidence: str) -> Finding:
    """Return the finding, with what shows it."""
    where = f" in {', '.join(recalled.changed)}" if recalled.changed else ""
    return finding(
        _TITLE,
        f"the candidate remembers its last call{where}: called again, {evidence}; let each call compute from its own "
        "inputs and the weights alone, and forget the rest where it begins",
    )
