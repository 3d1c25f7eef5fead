"""Hold what a comparison is asked for, and run its candidate again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.judge.limits import Table
from parity.passes.all_passes import Recalled, Tensors, run_candidate
from parity.passes.prepare import Prepared
from parity.result import Result, Status
from parity.te import Kernels
from parity.te.attention_backend import AttentionBackend, attention_backends
from parity.te.precision import Precision


@dataclass(frozen=True, eq=False)
class Asked:
    """One comparison, as ``parity.comparison.judge_at`` is asked for it.

    Attributes:
        case, checked, precision, seed, kernels: what is compared, at which size, how, and on which kernels.
        calibration: the table of limits.
        attention: the attention backend that TE is to run; None for its own choice.
        determinism: whether the candidate is built and run a second time.
        other_kernels: whether what other faithful kernels may do is granted.
    """

    case: Case
    checked: CheckedSize
    precision: Precision
    seed: int
    kernels: Kernels
    calibration: Table
    attention: AttentionBackend | None = None
    determinism: bool = False
    other_kernels: bool = True

    def result(self, status: Status, **fields: Any) -> Result:
        """Return a result of this comparison with a status and further fields."""
        return Result(
            case=self.case.name,
            precision=self.precision.name,
            size=dict(self.checked.size),
            size_label=self.checked.label,
            seed=self.seed,
            backend=self.kernels.backend,
            path=str(self.case.path),
            forced_attention=self.attention or "",
            status=status,
            **fields,
        )


def unchanged(module: nn.Module) -> None:
    """Leave a newly built candidate as it is."""


def run_again(
    asked: Asked,
    prepared: Prepared,
    change: Callable[[nn.Module], None] = unchanged,
    cotangents: Mapping[str, Tensor] | None = None,
    recalled: Recalled | None = None,
    alone: bool = False,
) -> Tensors:
    """Build and run the candidate once more, and return its tensors in the reference's layout.

    Args:
        asked: the comparison.
        prepared: golden and what all passes share.
        change: called with the newly built module before it runs.
        cotangents: other output gradients, by the output's name.
        recalled, alone: as for ``run_candidate``.
    """
    given = prepared if cotangents is None else replace(prepared, cotangents=dict(cotangents))
    with attention_backends(asked.attention):
        ran = asked.case, asked.checked, given, asked.precision, asked.seed, asked.kernels
        return run_candidate(*ran, change, recalled=recalled, alone=alone)[0]
