"""Routers of mixtures of experts in a trace: which scores choose a token's experts, and which weights they get."""

from __future__ import annotations

from dataclasses import dataclass

from parity.diagnosis.walk import CASTS, RESHAPES, back, binary, users
from parity.watching.trace import Call, Trace, Value, once_a_trace


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses each token's experts by ``topk``, or its one expert by ``max``, and weights what they return.

    Attributes:
        choice: the call that chooses, which returns values and indices.
        scores: among which it chooses, ``[..., experts]``; those of groups that are not chosen may be masked.
        unbiased: the scores before masks, and before a bias is added.
        bias: ``[experts]``, a parameter or a buffer; None where none is added.
        biasing: the call that adds it; ditto.
        taken: the ``gather`` of weights by the choice's indices; None where they are the values that it returns.
        source: what ``taken`` gathers from; None where it is None.
        weighting: the call that returns the chosen experts' weights, ``[..., k]``: ``choice`` itself, ``taken``, or
            what is computed from these.
        total: their sum, by which they are divided; None where they are not.
        activation: the softmax or sigmoid of all experts' logits that makes the scores; None where they are the logits.
        is_softmax_of_chosen: whether the weights are a softmax of the chosen scores.
    """

    choice: Call
    scores: Value
    unbiased: Value
    bias: Value | None
    biasing: Call | None
    taken: Call | None
    source: Value | None
    weighting: Call
    total: Value | None
    activation: Call | None
    is_softmax_of_chosen: bool

    @property
    def indices(self) -> Value:
        """Of the chosen experts."""
        return self.choice.outputs[1]


@once_a_trace
def routers(trace: Trace) -> list[Router]:
    """Every router, in order."""
    return [router for call in trace.calls if (router := _router(trace, call)) is not None]


def _router(trace: Trace, call: Call) -> Router | None:
    if call.name not in ("topk", "max") or len(call.outputs) != 2 or not call.inputs:
        return None
    scores = call.inputs[0]
    values, indices = call.outputs
    if trace.tensor(scores).dim() < 2 or not users(trace, indices, RESHAPES):
        return None
    unbiased, bias, biasing = _without_bias(trace, _unmasked(trace, scores))
    taken, weights = None, values
    for user, _ in users(trace, indices):
        if user.name == "gather" and len(user.outputs) == 1:
            taken, weights = user, user.outputs[0]
    weighting = taken or call
    is_softmax = False
    for user, _ in users(trace, weights):
        if user.name == "softmax" and user.outputs:
            weighting, weights, is_softmax = user, user.outputs[0], True
    total = None
    for user, given in users(trace, weights):
        match binary(user):
            case ("div", left, Value() as right) if left == given and _is_sum(trace, right, given):
                weighting, total = user, right
    source = trace.producer(back(trace, unbiased))
    activation = source if source is not None and source.name in ("softmax", "sigmoid") else None
    gathered = taken.inputs[0] if taken is not None else None
    return Router(call, scores, unbiased, bias, biasing, taken, gathered, weighting, total, activation, is_softmax)


def _unmasked(trace: Trace, scores: Value) -> Value:
    """The scores before those of some experts are masked, as DeepSeek's of groups that are not chosen."""
    shape = trace.tensor(scores).shape
    while (call := trace.producer(back(trace, scores))) is not None and call.name in ("masked_fill", "where"):
        masked = [x for x in call.inputs if trace.tensor(x).is_floating_point() and trace.tensor(x).shape == shape]
        if len(masked) != 1:
            break
        scores = masked[0]
    return scores


def _without_bias(trace: Trace, scores: Value) -> tuple[Value, Value | None, Call | None]:
    """The scores, what is added to all tokens' scores alike, and the call that adds it, where something is."""
    call = trace.producer(back(trace, scores))
    match binary(call):
        case ("add", Value() as left, Value() as right):
            width = trace.tensor(scores).shape[-1]
            for value, bias in ((left, right), (right, left)):
                if trace.tensor(bias).numel() == width < trace.tensor(value).numel():
                    return value, bias, call
    return scores, None, None


def _is_sum(trace: Trace, value: Value, of: Value) -> bool:
    """Whether a value is the sum of another, a tiny number added or not."""
    call = trace.producer(back(trace, value))
    if call is not None and call.name == "add" and call.inputs:
        call = trace.producer(back(trace, call.inputs[0]))
    return call is not None and call.name == "sum" and back(trace, call.inputs[0], CASTS) == back(trace, of, CASTS)
