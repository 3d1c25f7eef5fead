"""Whether a port's norms round what its reference holds in FP32.

Between TE's modules a port's own lines are expected to round what they return (``second_look``). But a norm that
rounds its mean, its root or what its weight multiplies to 16 bits, where the reference does not, is a mistake, whoever
computes it. Whether the reference rounds there as well shows when it runs in the precision's dtype as plain PyTorch: a
layer of Hugging Face's Llama does, ``nn.RMSNorm`` does not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from parity.cast import cast, cast_module
from parity.execute import outputs_of
from parity.judging.directions import PRESENT, Direction, found_by_filter, share_of
from parity.prepare import Prepared
from parity.result import TensorResult

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
    found = [
        (tensor.name, direction.changes[tensor.name])
        for tensor, _, direction in found_by_filter(tensors, known)
        if direction.mistake.title in _TITLES
    ]
    rounded = _outputs_in(dtype, prepared) if found else {}
    golden = prepared.golden.outputs
    return any(name in rounded and share_of(change, rounded[name], golden[name]) < PRESENT for name, change in found)


def _outputs_in(dtype: torch.dtype, prepared: Prepared) -> dict[str, Tensor]:
    """What the reference returns where it computes in the dtype; nothing if PyTorch cannot."""
    module = cast_module(copy.deepcopy(prepared.reference), dtype)
    try:
        with torch.no_grad():
            return outputs_of(module, prepared.call, cast(prepared.inputs, dtype))
    except (RuntimeError, TypeError, ValueError):
        return {}
