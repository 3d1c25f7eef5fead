"""Finds the borders of the sequences to which a port attends, or rotates, position by position of its outputs.

Where a token sees what came before it, a position is right up to the port's first border that the reference does not
have. With that border assumed it is right up to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from parity.diagnosis.attention.attention import Attention, attentions, traced_bias
from parity.diagnosis.attention.masks import hidden_keys
from parity.diagnosis.attention.packed import Packed, packed_attentions
from parity.diagnosis.attention.segments import is_of_sequences, lengths_of, sequences_instead
from parity.diagnosis.budget import Budget
from parity.diagnosis.failure import Failure, few_outputs
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.rope.rope_positions import counted_from, in_rows
from parity.diagnosis.rope.rotation import Rotation, rotations
from parity.diagnosis.screen import TINY
from parity.diagnosis.trial import outputs_under
from parity.diagnosis.verify import Explanation, verified
from parity.watching.trace import Edit, Trace

_MOST = 32  # sequences
_CLEARLY = 3.0  # tolerances that a wrong position is off by
_SURELY = 0.5  # of a position's norm, ditto where three tolerances are more


Suppose = Callable[[Sequence[int]], Hypothesis]  # from where the port's sequences begin


def border_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """That the port's sequences, or its rotary positions, begin elsewhere, if that explains everything.

    Args:
        failure: the outputs of the candidate are finite.
        trace: of the reference in FP64.
        budget: of the search.
    """
    subjects = _subjects(trace)
    seq = _positions(subjects, trace)
    if seq is None or few_outputs(failure) or any(_axis(failure, one.name, seq) is None for one in failure.outputs):
        return []
    right, module = _borders(subjects[0], trace), failure.prepared.reference
    kinds: list[Suppose] = [lambda starts: _of(starts, right, subjects, module)]
    turned = [one for one in rotations(trace) if len(one.angles) == seq and one.phases is not None]
    if turned:
        kinds.append(lambda starts: turned_from(starts, turned, module))
        rows = wrong_rows(failure, {trace.tensor(one.x).shape[0] for one in turned})
        if rows:
            kinds.append(lambda starts: turned_from(starts, turned, module, rows))
    found = (_from_left(failure, suppose, right[-1], budget) for suppose in kinds)
    return next(filter(None, found), [])


def _from_left(failure: Failure, suppose: Suppose, seq: int, budget: Budget) -> list[Explanation]:
    """One beginning after the other, each where the outputs with those before are wrong first."""
    starts = [0]
    while len(starts) <= _MOST and not budget.spent():
        one = suppose(starts)
        first = _first_wrong(failure, one, seq)
        if first is None:
            explanation = verified(failure, (one,))
            return [explanation] if explanation is not None and explanation.complete else []
        if first <= starts[-1]:
            return []
        starts.append(first)
    return []


def _subjects(trace: Trace) -> list[Attention | Packed]:
    """The attentions, those to sequences one by one as one."""
    packed = packed_attentions(trace)
    parts = {id(part) for one in packed for part in one.parts}
    return [*packed, *(one for one in attentions(trace) if id(one) not in parts)]


def _positions(subjects: Sequence[Attention | Packed], trace: Trace) -> int | None:
    """How many there are, if all attention is causal, to the whole or to sequences of it; else None."""
    biases = [one.bias if isinstance(one, Packed) else traced_bias(trace, one) for one in subjects]
    if not biases or len({bias.shape[-2:] for bias in biases}) > 1:
        return None
    seq: int = biases[0].shape[-1]
    are = biases[0].shape[-2] == seq and all(is_of_sequences(hidden_keys(bias)) for bias in biases)
    return seq if are else None


def _borders(subject: Attention | Packed, trace: Trace) -> list[int]:
    """Of the reference's sequences."""
    bias = subject.bias if isinstance(subject, Packed) else traced_bias(trace, subject)
    return [0, *accumulate(lengths_of(hidden_keys(bias)) or [bias.shape[-1]])]


def _of(
    starts: Sequence[int], right: Sequence[int], subjects: Sequence[Attention | Packed], module: nn.Module
) -> Hypothesis:
    lengths = [after - before for before, after in pairwise([*starts, right[-1]])]
    mask = sequences_instead(lengths)
    edits: list[Edit] = []
    for one in subjects:
        edits += one.edits(mask) if isinstance(one, Packed) else one.edits(mask=mask)
    borders = [0, *accumulate(lengths)]
    return Hypothesis(
        "mask",
        f"sequences with the borders {borders}",
        f"give TE the reference's sequences, cu_seqlens={right} in format thd, or its mask as an arbitrary one; it has "
        f"sequences with the borders {borders}",
        module,
        tuple(edits),
    )


def turned_from(
    starts: Sequence[int], turned: Sequence[Rotation], module: nn.Module, rows: Sequence[int] = ()
) -> Hypothesis:
    """That positions are counted from each start, in some rows of the batch or, where none are given, in all."""
    again, edits = list(starts[1:]), counted_from(starts)
    where = f" in row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the batch" if rows else ""
    found = [edit for one in turned for edit in edits(one)]
    return Hypothesis(
        "rope-position",
        f"rope positions beginning again at {again}{where}",
        f"rotate by the reference's positions; they begin again at {again}{where}",
        module,
        tuple(in_rows(one, rows) for one in found) if rows else tuple(found),
    )


def wrong_rows(failure: Failure, batches: Collection[int]) -> list[int]:
    """The rows of the batch where an output is wrong; empty where all are, or what a row is cannot be told."""
    batch = next(iter(batches))
    if len(batches) > 1 or any(failure.golden["output", one.name].shape[0] != batch for one in failure.outputs):
        return []
    wrong = torch.zeros(batch, dtype=torch.bool)
    for result in failure.outputs:
        key = result.kind, result.name
        x, candidate = (y.double().flatten(1) for y in (failure.golden[key], failure.candidate[key]))
        typical = torch.linalg.vector_norm(x) / batch**0.5
        off = torch.linalg.vector_norm(x - candidate, dim=1) / typical.clamp(min=TINY)
        wrong |= (off > result.tolerance_relative_l2).cpu()
    return wrong.nonzero().flatten().tolist() if not bool(wrong.all()) else []


def _first_wrong(failure: Failure, one: Hypothesis, seq: int) -> int | None:
    """The first position where an output is not the candidate's; 0 where the hypothesis does not fit."""
    outputs = outputs_under(failure.prepared, (one,), torch.float32)
    if outputs is None:
        return 0
    wrong = torch.zeros(seq, dtype=torch.bool)
    for result in failure.outputs:
        axis = _axis(failure, result.name, seq)
        x, candidate = (
            _by_position(y.double(), axis or 0)
            for y in (outputs[result.name], failure.candidate[result.kind, result.name])
        )
        typical = torch.linalg.vector_norm(x) / seq**0.5
        off = torch.linalg.vector_norm(x - candidate, dim=1) / typical.clamp(min=TINY)
        wrong |= (off > min(_CLEARLY * result.tolerance_relative_l2, _SURELY)).cpu()
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _axis(failure: Failure, name: str, seq: int) -> int | None:
    """The output's dimension of positions."""
    shape = failure.golden["output", name].shape
    return next((axis for axis, size in enumerate(shape[:-1]) if size == seq), None)


def _by_position(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, 0).flatten(1)
