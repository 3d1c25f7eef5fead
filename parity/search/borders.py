"""Explain errors that depend on the position: sequences that begin at the wrong place, and mistakes in decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.judge.pictures import FirstWrong, first_wrong
from parity.mistakes.attention import Attention, attentions, hidden_keys, traced_bias
from parity.mistakes.decoding import decoding_hypotheses, later_in_rows, not_reset_hypothesis, positions_of
from parity.mistakes.hypothesis import Hypothesis, in_part
from parity.mistakes.masks import is_of_sequences, lengths_of, right_sequences, sequences_instead
from parity.mistakes.packed import Packed, packed_attentions
from parity.mistakes.replay import outputs_with
from parity.mistakes.rotation import Rotation, counted_from, rotations
from parity.numerics.blocked_attention import Band
from parity.numerics.errors import TINY, norm_of
from parity.numerics.freedom import FUSED, UNFUSED
from parity.passes.all_passes import model_tensors
from parity.search.failure import Budget, Failure, few_outputs, outputs_tell_little, while_it_lasts
from parity.search.in_full import Explanation, verified
from parity.search.screen import GradientScreen, Screen
from parity.trace.trace import Trace

# The borders of the sequences in which a port attends, or counts positions, found from its outputs by position.
#
# If tokens see only what came before them, positions are right up to the port's first border that the reference does
# not have. With that border assumed, they are right up to the next one.


_MOST = 32  # sequences that are looked for
_CLEARLY = 3.0  # a wrong position is off by more than this many tolerances
_SURELY = 0.5  # or by more than this share of its norm, if that is less


Suppose = Callable[[Sequence[int]], Hypothesis]  # makes a hypothesis of where the port's sequences begin


def border_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the mistake that the port's sequences, or its rotary positions, begin elsewhere, if it explains all.

    Args:
        failure: a failure whose candidate's outputs are finite.
        trace: the reference's trace in FP64.
        budget: the search's budget.
    """
    subjects = _subjects(trace)
    seq = _positions(subjects, trace)
    if seq is None or few_outputs(failure) or any(_axis(failure, one.name, seq) is None for one in failure.outputs):
        return []
    right = _borders(subjects[0], trace)
    kinds: list[Suppose] = [lambda starts: _of(starts, right, subjects)]
    turned = [one for one in rotations(trace) if len(one.angles) == seq and one.phases is not None]
    if turned:
        kinds.append(lambda starts: turned_from(starts, turned))
        rows = wrong_rows(failure, {trace.tensor(one.x).shape[0] for one in turned})
        if rows:
            kinds.append(lambda starts: turned_from(starts, turned, rows))
    found = (_from_left(failure, suppose, right[-1], budget) for suppose in kinds)
    return next(filter(None, found), [])


def _from_left(failure: Failure, suppose: Suppose, seq: int, budget: Budget) -> list[Explanation]:
    """Return the explanation found by adding beginnings from left to right.

    Each beginning is at the first position where the outputs under the previous ones are wrong.
    """
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
    """Return the attentions; those that handle a pack's sequences one by one count as one."""
    packed = packed_attentions(trace)
    parts = {id(part) for one in packed for part in one.parts}
    return [*packed, *(one for one in attentions(trace) if id(one) not in parts)]


def _positions(subjects: Sequence[Attention | Packed], trace: Trace) -> int | None:
    """Return the number of positions if all attention is causal, over the whole or over sequences in it; else None."""
    biases = [one.bias if isinstance(one, Packed) else traced_bias(trace, one) for one in subjects]
    if not biases or len({bias.shape[-2:] for bias in biases}) > 1:
        return None
    seq: int = biases[0].shape[-1]
    are = biases[0].shape[-2] == seq and all(is_of_sequences(hidden_keys(bias)) for bias in biases)
    return seq if are else None


def _borders(subject: Attention | Packed, trace: Trace) -> list[int]:
    """Return where the reference's sequences begin and end."""
    bias = subject.bias if isinstance(subject, Packed) else traced_bias(trace, subject)
    return [0, *accumulate(lengths_of(hidden_keys(bias)) or [bias.shape[-1]])]


def _of(starts: Sequence[int], right: Sequence[int], subjects: Sequence[Attention | Packed]) -> Hypothesis:
    lengths, right_lengths = (
        [after - before for before, after in pairwise(borders)] for borders in ([*starts, right[-1]], right)
    )
    mask = sequences_instead(lengths, Band(right=0))
    borders = [0, *accumulate(lengths)]
    return Hypothesis(
        "mask",
        f"sequences with the borders {borders}",
        f"{right_sequences(right_lengths)}; the port has sequences with the borders {borders}",
        tuple(edit for one in subjects for edit in one.masked_by(mask)),
    )


def turned_from(starts: Sequence[int], turned: Sequence[Rotation], rows: Sequence[int] = ()) -> Hypothesis:
    """Return the mistake that positions are counted from each of these starts, in some rows of the batch or in all."""
    again, edits = list(starts[1:]), counted_from(starts)
    where = f" in row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the batch" if rows else ""
    found = [edit for one in turned for edit in edits(one)]
    return Hypothesis(
        "rope-position",
        f"rope positions beginning again at {again}{where}",
        f"rotate by the reference's positions; the port's begin again at {again}{where}",
        tuple(in_part(one, 0, rows) for one in found) if rows else tuple(found),
    )


def wrong_rows(failure: Failure, batches: Collection[int]) -> list[int]:
    """Return the rows of the batch where an output is wrong; empty if all are, or if rows cannot be told."""
    batch = next(iter(batches))
    if len(batches) > 1 or any(failure.golden["output", one.name].shape[0] != batch for one in failure.outputs):
        return []
    wrong = torch.zeros(batch, dtype=torch.bool)
    for result in failure.outputs:
        key = result.key
        x, candidate = (y.double().flatten(1) for y in (failure.golden[key], failure.candidate[key]))
        typical = torch.linalg.vector_norm(x) / batch**0.5
        off = torch.linalg.vector_norm(x - candidate, dim=1) / typical.clamp(min=TINY)
        wrong |= (off > result.tolerance_relative_l2).cpu()
    return wrong.nonzero().flatten().tolist() if not bool(wrong.all()) else []


def _first_wrong(failure: Failure, one: Hypothesis, seq: int) -> int | None:
    """Return the first position where an output is not the candidate's; 0 if the hypothesis does not fit."""
    outputs = outputs_with(failure.prepared, (one,), torch.float32)
    if outputs is None:
        return 0
    wrong = torch.zeros(seq, dtype=torch.bool)
    for result in failure.outputs:
        axis = _axis(failure, result.name, seq)
        x, candidate = (
            y.double().movedim(axis or 0, 0).flatten(1) for y in (outputs[result.name], failure.candidate[result.key])
        )
        typical = torch.linalg.vector_norm(x) / seq**0.5
        off = torch.linalg.vector_norm(x - candidate, dim=1) / typical.clamp(min=TINY)
        wrong |= (off > min(_CLEARLY * result.tolerance_relative_l2, _SURELY)).cpu()
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _axis(failure: Failure, name: str, seq: int) -> int | None:
    """Return the dimension of an output that counts positions."""
    shape = failure.golden["output", name].shape
    return next((axis for axis, size in enumerate(shape[:-1]) if size == seq), None)


# Rotary positions that begin again in attention that sees both ways.
#
# Without a causal mask, one wrong position spoils all others, so the search above does not work. But if a beginning is
# assumed a few positions off, only the positions in between are wrong, so the error falls all the way to the right
# place. Each beginning is therefore found by the error that it leaves, in ever smaller steps, with the previous ones
# assumed.


_MOST_BEGINNINGS = 8
_STEPS = 16  # a beginning is first tried at this many places of a sequence
_HELPS = 0.9  # another beginning must bring the error below this share of the one before


def restart_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the mistake that rotary positions begin again somewhere, if it explains everything.

    Args:
        failure: a failure whose candidate's outputs are finite.
        trace: the reference's trace in FP64.
        budget: the search's budget.
    """
    turned = [one for one in rotations(trace) if one.phases is not None]
    lengths = {len(one.angles) for one in turned}
    if len(lengths) != 1:
        return []
    starts = _Descent(failure, turned, lengths.pop(), budget).starts()
    if not starts:
        return []
    batches = {trace.tensor(one.x).shape[0] for one in turned}
    some = [] if outputs_tell_little(failure) else wrong_rows(failure, batches)
    for rows in ((), some) if some else ((),):
        explanation = verified(failure, (turned_from(starts, turned, rows),))
        if explanation is not None and explanation.complete:
            return [explanation]
    return []


class _Descent:
    """A search for beginnings that leave less and less of the error, as measured by a screen.

    Args:
        failure, budget: as in ``restart_explanations``.
        turned: the rotations.
        seq: how many positions they have.
    """

    def __init__(self, failure: Failure, turned: Sequence[Rotation], seq: int, budget: Budget) -> None:
        self._screen = GradientScreen(failure) if outputs_tell_little(failure) else Screen(failure)
        self._turned = turned
        self._seq = seq
        self._budget = budget
        self._shares: dict[tuple[int, ...], float] = {(0,): 1.0}

    def starts(self) -> list[int]:
        """Return the beginnings under which no more is left than the precision costs; empty if there are none."""
        found: tuple[int, ...] = (0,)
        while len(found) <= _MOST_BEGINNINGS and not self._budget.spent():
            before = self._share(found)
            found = self._nearby((*found, self._first_guess(found)))
            if self._share(found) > _HELPS * before:
                return []
            if self._screen.is_exact((self._share(found), ())):
                return list(found)
        return []

    def _first_guess(self, found: tuple[int, ...]) -> int:
        step = max(1, self._seq // _STEPS)
        places = [place for place in range(step, self._seq, step) if place not in found]
        return min(places, key=lambda place: self._share((*found, place)), default=self._seq - 1)

    def _nearby(self, starts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the beginnings, moved by smaller and smaller steps, the latest first, while that reduces the error."""
        step = max(1, self._seq // _STEPS)
        while step:
            for moved in starts[:0:-1]:
                others = [start for start in starts if start != moved]
                starts = self._best([starts, *((*others, place) for place in (moved - step, moved + step))])
            step //= 2
        return starts

    def _best(self, choices: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return min((tuple(sorted(one)) for one in choices), key=self._share)

    def _share(self, starts: Sequence[int]) -> float:
        """Return the share of the error that these beginnings leave; infinite if they are not valid."""
        key = tuple(sorted(set(starts)))
        if len(key) < len(starts) or not 0 <= key[0] <= key[-1] < self._seq:
            return math.inf
        if key not in self._shares:
            assumed = turned_from(key, self._turned)
            self._shares[key] = next((share for share, _ in self._screen.shares([(assumed,)], self._budget)), math.inf)
        return self._shares[key]


# A port that decodes: from the first wrong position on, the cache or the positions are wrong.


_EARLIER = 2  # positions: the first tokens that are decoded may be right, or hardly wrong
_HELPS_DECODING = 0.7  # at most this share of the error may be left
_VERIFIED = 4  # hypotheses that are computed in full, the nearest first


def decoding_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the mistake in decoding that explains everything, for a pair in evaluation mode.

    The first position that is wrong shows where a prompt ends.

    Args:
        failure: a failure whose candidate's outputs are finite.
        trace: the reference's trace in FP64.
        budget: the search's budget.
    """
    seq = positions_of(trace) if failure.prepared.evaluation else None
    if seq is None or failure.is_on_probes:
        return []
    tried = while_it_lasts(_known(failure, trace, seq), budget)
    # If two have the same effect, after prompts that differ by a token, the likelier mistake comes first.
    ranked = sorted(((round(_left(failure, one), 2), rank, one) for rank, one in tried), key=lambda entry: entry[:2])
    near = [one for left, _, one in ranked if left < _HELPS_DECODING][:_VERIFIED]
    found = [explanation for one in near if (explanation := verified(failure, (one,))) is not None]
    complete = [one for one in found if one.complete]
    return complete[:1]


def _known(failure: Failure, trace: Trace, seq: int) -> Iterator[tuple[int, Hypothesis]]:
    """Yield mistakes, each with its rank among those after the same prompt."""
    firsts = [found.index for result in failure.outputs if (found := _first(failure, result.name)) is not None]
    at_once = not firsts
    prompts = range(1, seq) if at_once else range(min(firsts), max(min(firsts) - _EARLIER - 1, 0), -1)
    for prompt in prompts:
        known = enumerate(decoding_hypotheses(trace, prompt))
        # If the first token is wrong, the mistake is in the prompt's own pass.
        yield from ((rank, one) for rank, one in known if not at_once or one.title == "mask")
    batch = _rows(failure)
    if batch is None:
        return
    if batch > 1:
        yield 0, not_reset_hypothesis(batch, seq)
    turned = [one for one in rotations(trace) if one.phases is not None]
    of_rows = {row: found.index for row in range(batch) if (found := _first_of_row(failure, row)) is not None}
    if turned and 0 < len(of_rows) < batch:
        for end in range(max(of_rows.values()) + 1, seq + 1):
            yield end, later_in_rows(turned, of_rows, end)


def _rows(failure: Failure) -> int | None:
    """Return how many rows all inputs and outputs have; None if they differ."""
    inputs = [x.shape[0] for x in tree_leaves(failure.prepared.inputs) if isinstance(x, Tensor) and x.dim() > 1]
    counts = {*inputs, *(result.shape[0] for result in failure.outputs if len(result.shape) > 1)}
    return counts.pop() if len(counts) == 1 else None


def _models(failure: Failure, name: str) -> list[Tensor]:
    models = (model_tensors(failure.prepared, failure.precision.rounding, freedom) for freedom in (FUSED, UNFUSED))
    return [model["output", name] for model in models]


def _first(failure: Failure, name: str, row: int | None = None) -> FirstWrong | None:
    result = next(one for one in failure.outputs if one.name == name)
    if result.passed:
        return None
    key = result.key
    found = first_wrong(result, failure.candidate[key], failure.golden[key], _models(failure, name), row)
    return found if found is not None and found.dim == 1 else None


def _first_of_row(failure: Failure, row: int) -> FirstWrong | None:
    found = [one for result in failure.outputs if (one := _first(failure, result.name, row)) is not None]
    return min(found, key=lambda one: one.index, default=None)


def _left(failure: Failure, one: Hypothesis) -> float:
    """Return the share of the error that a hypothesis leaves; infinite if it changes nothing or cannot be computed."""
    outputs = outputs_with(failure.prepared, (one,), torch.float32)
    if outputs is None:
        return math.inf
    left, was = 0.0, 0.0
    for result in failure.outputs:
        golden, candidate = failure.golden[result.key], failure.candidate[result.key].double()
        output = outputs.get(result.name)
        if output is None or output.shape != golden.shape or not bool(output.isfinite().all()):
            return math.inf
        size = max(norm_of(golden) * result.tolerance_relative_l2, TINY)
        left += (norm_of(output.double() - candidate) / size) ** 2
        was += (norm_of(golden - candidate) / size) ** 2
    return math.sqrt(left / max(was, TINY))
