"""Whether a port's norms round what its reference holds in FP32.

Between TE's modules a port's own lines are expected to round what they return (``second_look``). But a norm that
rounds its mean, its root or what its weight multiplies to 16 bits, where the reference does not, is a mistake, whoever
computes it. Whether the reference rounds there as well shows when it runs in the precision's dtype as plain PyTorch: a
layer of Hugging Face's Llama does, ``nn.RMSNorm`` does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parity.errors import difference
from parity.execute import outputs_of
from parity.judging.directions import PRESENT, Direction, coefficient
from parity.prepare import Prepared, cast
from parity.result import Check, TensorResult
from parity.summed import Summed

_TITLES = frozenset({"norm-statistics", "norm-rounding"})


def made_by_port_alone(
    tensors: Sequence[TensorResult], prepared: Prepared, known: Sequence[Direction], dtype: torch.dtype
) -> bool:
    """Whether a matched filter finds such a rounding in the port that the reference in the dtype does not make.

    Args:
        tensors: the verdicts at first look.
        prepared: what is compared.
        known: the directions of subtle mistakes.
        dtype: the precision's.
    """
    found = list(_found(tensors, known))
    rounded = _outputs_in(dtype, prepared) if found else {}
    return any(
        name in rounded and _share(rounded[name], prepared.golden.outputs[name], direction.changes[name]) < PRESENT
        for name, direction in found
    )


def _found(tensors: Sequence[TensorResult], known: Sequence[Direction]) -> Iterator[tuple[str, Direction]]:
    """Outputs by name, with the rounding that their error contains, and no other output's error lacks."""
    by_name = {direction.mistake.name: direction for direction in known if direction.mistake.title in _TITLES}
    checks = [(tensor.name, check) for tensor in tensors for check in tensor.checks if check.statistic == "mistake"]
    lacked = {check.where for _, check in checks if _is_lacking(check)}
    for name, check in checks:
        is_present = check.margin > 1 and abs(check.coefficient - 1.0) <= PRESENT
        if is_present and check.where in by_name and check.where not in lacked:
            yield name, by_name[check.where]


def _is_lacking(check: Check) -> bool:
    """Whether an output's error contains so little of a mistake that it cannot have been made.

    The statistic is the coefficient in its standard deviations, so that it says how far the coefficient is from 1.
    """
    return abs(check.value) * (1.0 - check.coefficient) > check.limit * abs(check.coefficient)


def _outputs_in(dtype: torch.dtype, prepared: Prepared) -> dict[str, Tensor]:
    """What the reference returns where it computes in the dtype; nothing if PyTorch cannot."""
    module = copy.deepcopy(prepared.reference).to(dtype)
    try:
        with torch.no_grad():
            return outputs_of(module, prepared.call, cast(prepared.inputs, dtype))
    except (RuntimeError, TypeError, ValueError):
        return {}


def _share(computed: Tensor, golden: Tensor, change: Summed) -> float:
    error = Summed(difference(computed, golden).to(change.values.dtype))
    return coefficient(error, change)
