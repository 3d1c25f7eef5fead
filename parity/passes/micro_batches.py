"""Split the batch of a training step into micro-batches whose losses add up to that of the whole batch.

Whether a loss is a sum over a batch or a mean, of tokens that count or of all, only its reference knows. So the
reference tells: in FP64, the gradient of the whole batch must be a weighted sum of the gradients of its micro-batches,
and the weights are what a port has to multiply their losses by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.training import MicroBatch
from parity.numerics.golden import in_fp64
from parity.passes.build import cast
from parity.passes.one_pass import Pass, as_arguments, run
from parity.passes.prepare import Prepared
from parity.user_error import UserError

MOST = 4
# In FP64, sums in another order differ by far less, and losses that depend on the whole batch by far more.
_EXACT = 1e-9


def micro_batches(prepared: Prepared) -> Callable[[Any], list[MicroBatch]]:
    """Return what splits the inputs of a prepared step, or copies of these, into up to four micro-batches.

    They are split along their first dimension, or the second one if that fits: all tensors that are as long there as
    the first tensor is.

    Raises:
        UserError: if the reference's loss is no weighted sum of its micro-batches' losses.
    """
    tensors = [x for x in tree_leaves(prepared.inputs) if isinstance(x, Tensor)]
    for dim in (0, 1):
        size = next((x.shape[dim] for x in tensors if x.dim() > dim), 0)
        if size < 2:
            continue
        shares = _shares(prepared, _parts(cast(prepared.inputs, torch.float64), dim, size))
        if shares is not None:
            return lambda inputs: [
                MicroBatch(share, *as_arguments(part))
                for share, part in zip(shares, _parts(inputs, dim, size), strict=True)
            ]
    raise UserError(
        "the reference's loss is no weighted sum of the losses of its micro-batches, along the first or the second "
        "dimension of its inputs; split these in a step of your own: training=parity.Training(candidate_step=...)"
    )


def _parts(inputs: Any, dim: int, size: int) -> list[Any]:
    count = min(size, MOST)

    def part(i: int) -> Any:
        return tree_map_only(
            Tensor,
            lambda x: x.tensor_split(count, dim)[i] if x.dim() > dim and x.shape[dim] == size else x,
            inputs,
        )

    return [part(i) for i in range(count)]


def _shares(prepared: Prepared, parts: Sequence[Any]) -> list[float] | None:
    """Return by what the losses of these parts are multiplied; None if they do not add up to that of the whole."""
    columns = []
    for part in parts:
        try:
            with in_fp64():
                ran = run(prepared.reference.double(), prepared.call, part, prepared.input_names, _ones)
        except (RuntimeError, ValueError, IndexError):  # some input does not fit to the others any more
            return None
        columns.append(_flat(ran))
    whole, split = _flat(prepared.golden), torch.stack(columns, 1)
    shares = torch.linalg.lstsq(split, whole[:, None]).solution
    off = (split @ shares)[:, 0] - whole
    if not bool(off.norm() <= _EXACT * whole.norm()):
        return None
    return [float(f"{share:.9g}") for share in shares.flatten().tolist()]


def _ones(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(x) for name, x in outputs.items()}


def _flat(ran: Pass) -> Tensor:
    """Return the loss and the gradients of all weights, as one vector in FP64."""
    return torch.cat([x.reshape(-1) for x in (*ran.outputs.values(), *ran.weight_gradients.values())]).double()
