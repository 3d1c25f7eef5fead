"""Split the batch of a training step into micro-batches, and find the weight that a port gave each of its own.

A loss may be a sum or a mean, over all tokens or over some. The reference shows which: in FP64, the gradient of the
whole batch must be a weighted sum of the gradients of its micro-batches. These weights, called shares here, are the
factors by which a port must multiply the losses of its micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.training import MicroBatch
from parity.numerics.golden import in_fp64
from parity.passes.one_pass import Arguments, Pass, as_arguments, restored_buffers, run
from parity.passes.prepare import Prepared, cast
from parity.user_error import UserError

MOST = 4
# In FP64, the order of sums changes a result by far less, and a loss that depends on the whole batch by far more.
_EXACT = 1e-9


def micro_batches(prepared: Prepared, is_quantized: bool = False) -> Callable[[Any], list[MicroBatch]]:
    """Return a function that splits the inputs of a prepared step, or copies of them, into up to four micro-batches.

    It splits along the first dimension, or along the second if only that works. All tensors that are as long there as
    the first tensor are split. A quantized format takes only some numbers of tokens, so there may be fewer parts then.

    Raises:
        UserError: if the reference's loss is not a weighted sum of its micro-batches' losses.
    """
    if read := buffers_read(prepared):
        raise UserError(
            f"the forward pass reads buffers that it also changes ({', '.join(read[:3])}), so a micro-batch gives "
            "other results than the same part of the whole batch: leave out the switch micro-batches"
        )
    tensors = [x for x in tree_leaves(prepared.inputs) if isinstance(x, Tensor)]
    for dim in (0, 1):
        first = next((x for x in tensors if x.dim() > dim), None)
        if first is None or first.shape[dim] < 2:
            continue
        split = partial(_split_inputs, dim=dim, size=first.shape[dim], count=_choose_count(first, dim, is_quantized))
        shares = _find_loss_shares(prepared, split(cast(prepared.inputs, torch.float64)))
        if shares is not None:
            return lambda inputs: [
                MicroBatch(share, *as_arguments(part)) for share, part in zip(shares, split(inputs), strict=True)
            ]
    raise UserError(
        "the reference's loss is not a weighted sum of the losses of its micro-batches, whether its inputs are split "
        "along the first or the second dimension; split them in your own training step: "
        "training=parity.Training(candidate_step=...)"
    )


def buffers_read(prepared: Prepared) -> list[str]:
    """Return the buffers that the reference's forward pass changes and reads; none if the next pass is the same.

    If there are any, the calls of one step depend on each other.
    """
    moved = prepared.golden.buffers
    if not moved:
        return []
    held = dict(prepared.reference.double().named_buffers())
    with restored_buffers(prepared.reference):
        with torch.no_grad():
            for name, x in moved.items():
                held[name].copy_(x)
        again = _run_golden(prepared, cast(prepared.inputs, torch.float64))
    golden = _flatten_pass(prepared.golden)
    is_same = again is not None and bool((_flatten_pass(again) - golden).norm() <= _EXACT * golden.norm())
    return [] if is_same else list(moved)


def _choose_count(x: Tensor, dim: int, is_quantized: bool) -> int:
    """Return into how many parts to split a batch: up to four, and fewer if only those have 32 or 16 tokens each."""
    size, tokens = x.shape[dim], x.numel() // (x.shape[-1] if x.is_floating_point() and x.dim() > 1 else 1)
    counts = range(min(size, MOST), 1, -1)
    even = [count for count in counts if size % count == 0]
    multiples = (32, 16) if is_quantized else ()
    fitting = (count for multiple in multiples for count in even if tokens // count % multiple == 0)
    return next(fitting, counts[0])


def _split_inputs(inputs: Any, dim: int, size: int, count: int) -> list[Any]:
    def part(i: int) -> Any:
        return tree_map_only(
            Tensor,
            lambda x: x.tensor_split(count, dim)[i] if x.dim() > dim and x.shape[dim] == size else x,
            inputs,
        )

    return [part(i) for i in range(count)]


def _find_loss_shares(prepared: Prepared, parts: Sequence[Any]) -> list[float] | None:
    """Return the factors with which the losses of these parts add up to the whole loss, or None if there are none."""
    columns = []
    for part in parts:
        ran = _run_golden(prepared, part)
        if ran is None:
            return None
        columns.append(_flatten_pass(ran))
    return _exact_shares(torch.stack(columns, 1), _flatten_pass(prepared.golden))


def _run_golden(prepared: Prepared, inputs: Any, cotangents: Mapping[str, Tensor] | None = None) -> Pass | None:
    """Return the reference's pass in FP64, or None if it cannot run on these inputs, which may not fit together."""

    def flowing(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (cotangents or {})[name].double() for name in outputs}

    try:
        with in_fp64():
            return run(
                prepared.reference.double(),
                prepared.call,
                inputs,
                prepared.input_names,
                flowing if cotangents else (lambda outputs: {name: torch.ones_like(x) for name, x in outputs.items()}),
            )
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
        return None


def _exact_shares(parts: Tensor, whole: Tensor) -> list[float] | None:
    """Return the share of each column in the whole, or None if no weighted sum of the columns gives the whole."""
    shares = torch.linalg.lstsq(parts, whole[:, None]).solution
    off = (parts @ shares)[:, 0] - whole
    if not bool(off.norm() <= _EXACT * whole.norm()):
        return None
    return [float(f"{share:.9g}") for share in shares.flatten().tolist()]


def _flatten_pass(ran: Pass) -> Tensor:
    """Return the loss and the gradients of all weights, as one vector in FP64."""
    return torch.cat([x.reshape(-1) for x in (*ran.outputs.values(), *ran.weight_gradients.values())]).double()


# The shares of a port's own micro-batches, found after its step.


@dataclass(frozen=True, eq=False)
class Made:
    """The share that each of a port's micro-batches has in its gradients.

    Attributes:
        made: the shares that fit the candidate's gradients best, by least squares.
        right: the shares that give the gradients of the whole batch; None if none do, for example because a part of the
            batch is left out.
        off: the relative distance of the candidate's gradients from those that ``made`` gives, by name.
    """

    made: list[float]
    right: list[float] | None
    off: dict[str, float]


_MOST_FITTED = 4096  # elements of each gradient that shares are fitted to
# This argument tells TE's modules whether to quantize their weights again; no reference takes it.
_OF_TE = "is_first_microbatch"


def shares_made(
    prepared: Prepared,
    calls: Sequence[Arguments],
    gradients: Mapping[str, Tensor],
    cotangents: Sequence[Mapping[str, Tensor] | None] = (),
) -> Made | None:
    """Return the share that each of a step's calls has in its weight gradients.

    Args:
        prepared: the step, with the whole batch.
        calls: the arguments of each call of the candidate in the step.
        gradients: the candidate's weight gradients, by the reference's names.
        cotangents: the gradients with respect to the outputs of each call, by name; None for a call that returns a
            loss.

    Returns:
        None if there is only one call, if the reference cannot take these arguments, or if the gradients of the calls
        are linearly dependent.
    """
    if len(calls) < 2:
        return None
    columns = []
    for (args, kwargs), flowing in itertools.zip_longest(calls, cotangents):
        given = {name: x for name, x in kwargs.items() if name != _OF_TE}
        if args and given:
            return None
        ran = _run_golden(prepared, cast(given or args, torch.float64), flowing)
        if ran is None:
            return None
        columns.append({name: _sample_elements(x) for name, x in ran.weight_gradients.items()})
    known = columns[0].keys() & gradients.keys()
    parts = {name: torch.stack([column[name] for column in columns], 1) for name in known}
    all_parts = torch.cat([parts[name] for name in known])
    if torch.linalg.matrix_rank(all_parts / all_parts.norm(dim=0).clamp(min=1e-300), rtol=1e-6) < len(calls):
        return None
    own = {name: _sample_elements(gradients[name]) for name in known}
    made = torch.linalg.lstsq(all_parts, torch.cat([own[name] for name in known])[:, None]).solution[:, 0]
    whole = torch.cat([_sample_elements(prepared.golden.weight_gradients[name]) for name in known])
    off = {name: _compute_relative_l2(own[name], parts[name] @ made) for name in known}
    return Made(made.tolist(), _exact_shares(all_parts, whole), off)


def _sample_elements(x: Tensor) -> Tensor:
    return x.detach().reshape(-1)[:: max(x.numel() // _MOST_FITTED, 1) | 1].double()


def _compute_relative_l2(x: Tensor, right: Tensor) -> float:
    size, off = float(right.norm()), float((x - right).norm())
    return off / size if size else float(off > 0.0)
