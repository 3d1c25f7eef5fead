"""Recognise routers of mixtures of experts in a trace, and yield mistakes in their weights and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.hypothesis import Hypothesis, Mistake, Row, at_each_scope, titled
from parity.trace.calls import Misfit
from parity.trace.trace import (
    CASTS,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    added,
    back,
    binary,
    edit,
    instead,
    once_a_trace,
    users,
    with_number,
)

# Routers in a trace: the scores that choose a token's experts, and the experts' weights.


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses each token's experts by ``topk``, or its one expert by ``max``, and weights their results.

    Attributes:
        choice: the call that chooses, which returns values and indices.
        scores: the scores to choose from, ``[..., experts]``; those of groups that are not chosen may be masked.
        unbiased: the scores before they are masked and before a bias is added.
        bias: ``[experts]``, a parameter or a buffer; None if none is added.
        biasing: the call that adds the bias; None if none is added.
        taken: the ``gather`` of weights by the choice's indices; None if the weights are the values of ``choice``.
        source: the values that ``taken`` gathers from; None if there is no ``taken``.
        weighting: the call that returns the chosen experts' weights, ``[..., k]``: ``choice``, ``taken``, or a call
            that follows them.
        total: the sum of the weights, by which they are divided; None if they are not.
        activation: the softmax or sigmoid of all experts' logits that makes the scores; None if they are the logits.
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
        """The indices of the chosen experts."""
        return self.choice.outputs[1]


@once_a_trace
def routers(trace: Trace) -> list[Router]:
    """Return every router, in order."""
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
    weighting, total = _scaled(trace, weighting, weights)
    source = trace.producer(back(trace, unbiased))
    activation = source if source is not None and source.name in ("softmax", "sigmoid") else None
    gathered = taken.inputs[0] if taken is not None else None
    return Router(call, scores, unbiased, bias, biasing, taken, gathered, weighting, total, activation, is_softmax)


def _scaled(trace: Trace, made: Call, weights: Value) -> tuple[Call, Value | None]:
    """Return the call that computes the final weights, and the sum by which they are divided.

    Factors and the division may follow ``made``, which returns the weights before them, in any order. The call is
    ``made`` if none follows; the sum is None if the weights are not divided by it.
    """
    total, known = None, [weights]
    while True:
        for user, given in users(trace, known[-1]):
            match binary(user):
                case ("div", left, Value() as right) if left == given and any(_is_sum(trace, right, x) for x in known):
                    total = right
                case ("mul" | "div", *_) if with_number(user) is not None:
                    pass
                case _:
                    continue
            made, known = user, [*known, user.outputs[0]]
            break
        else:
            return made, total


def _unmasked(trace: Trace, scores: Value) -> Value:
    """Return the scores before some experts are masked, as in DeepSeek's groups that are not chosen."""
    shape = trace.tensor(scores).shape
    while (call := trace.producer(back(trace, scores))) is not None and call.name in ("masked_fill", "where"):
        masked = [x for x in call.inputs if trace.tensor(x).is_floating_point() and trace.tensor(x).shape == shape]
        if len(masked) != 1:
            break
        scores = masked[0]
    return scores


def _without_bias(trace: Trace, scores: Value) -> tuple[Value, Value | None, Call | None]:
    """Return the scores without the bias that is added for all tokens, this bias, and the call that adds it."""
    call = trace.producer(back(trace, scores))
    terms, width = added(call) or (), trace.tensor(scores).shape[-1]
    for value, bias in zip(terms, terms[::-1], strict=True):
        if trace.tensor(bias).numel() == width < trace.tensor(value).numel():
            return value, bias, call
    return scores, None, None


def _is_sum(trace: Trace, value: Value, of: Value) -> bool:
    """Return whether a value is the sum of another, possibly plus a tiny number."""
    call = trace.producer(back(trace, value))
    if call is not None and call.name == "add" and call.inputs:
        call = trace.producer(back(trace, call.inputs[0]))
    return call is not None and call.name == "sum" and back(trace, call.inputs[0], CASTS) == back(trace, of, CASTS)


# Mistakes in the weights that a router gives, and in the experts that it chooses.


_Edits = tuple[Edit, ...]
Rows = dict[str, Row[Router]]
_NO_SCORE = -1e4  # a softmax turns this into 0
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


def routing_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's routers."""
    found = routers(trace)
    mistakes = (*_weight_mistakes(), *_bias_mistakes(), *_choice_mistakes())
    yield from at_each_scope(mistakes, found, lambda one: one.choice.module)
    for one in at_each_scope(_split_mistakes(), found, lambda one: one.choice.module):
        # A token's expert depends on the other tokens here, so the batch must not be cut to one row.
        yield replace(one, around=lambda call: call)


def _weight_mistakes() -> Iterator[Mistake[Router]]:
    normalised: Rows = {
        "routing weights not normalised": (
            "divide the chosen experts' weights by their sum, as the reference does; the port does not",
            _not_normalised,
        ),
        "routing weights normalised": (
            "take the chosen experts' weights as they are, as the reference does; the port divides them by their sum",
            _normalised,
        ),
        "routing weights from a softmax of all experts": (
            "take the softmax of the chosen experts' scores alone, as the reference does; the port takes it of all "
            "experts",
            _softmax_of_all,
        ),
    }
    yield from titled("routing-weights", normalised, subtle=True)
    right = "weight what the experts return"
    weighted: Rows = {
        "routing weights missing": (
            f"{right} by the router's probabilities (merging_probs of moe_unpermute); the port sums it unweighted",
            lambda one: _weighted(one, torch.ones_like),
        ),
        "routing weights applied twice": (
            f"{right} once (merging_probs of moe_unpermute, or by hand); the port weights it twice",
            lambda one: _weighted(one, torch.square),
        ),
    }
    for name in _ACTIVATIONS:
        by = f"score the experts as the reference does; the port scores them by a {name}"
        where = f"choose experts by the reference's scores; for the choice alone, the port scores them by a {name}"
        scored = partial(_activated_by, name)
        weighted |= {
            f"routing scores by {name}": (by, scored),
            f"routing scores by {name}, weights not normalised": (
                f"{by}, and the chosen experts' weights are not normalised",
                partial(_scored_and_weighted, scored, _not_normalised),
            ),
            f"routing scores by {name}, weights normalised": (
                f"{by}, and the chosen experts' weights are normalised",
                partial(_scored_and_weighted, scored, _normalised),
            ),
            f"routing scores by {name}, elsewhere as they are": (where, partial(_chosen_by_activated, name)),
        }
    weighted["routing weights by sigmoid of the chosen"] = (
        "take the softmax of the chosen experts' scores, as the reference does; the port takes the sigmoid of each",
        _sigmoid_of_chosen,
    )
    yield from titled("routing-weights", weighted)


def _bias_mistakes() -> Iterator[Mistake[Router]]:
    """Yield mistakes in a bias that the reference adds to scores, for the choice or for the weights."""
    right = "add the router's bias to the scores where the reference does,"
    biased: Rows = {
        "routing bias in the weights": (
            f"{right} for the choice alone; the weights come from scores with the bias",
            lambda one: _taken_from(one, one.biasing.outputs[0]) if one.biasing and one.source == one.unbiased else (),
        ),
        "routing bias not in the weights": (
            f"{right} in the weights too; they come from scores without the bias",
            _weights_without_bias,
        ),
        "routing bias missing": (
            f"{right} for the choice; the port chooses experts without it",
            partial(_with_bias, lambda scores, bias: scores),
        ),
        "routing bias subtracted": (
            f"{right} for the choice; the port subtracts it",
            partial(_with_bias, torch.sub),
        ),
        "routing bias added to the logits": (
            f"{right} for the choice; the port adds it to the logits, from which the scores are computed",
            _biased_logits,
        ),
    }
    yield from titled("routing-bias", biased)


def _choice_mistakes() -> Iterator[Mistake[Router]]:
    for edits, described in ((_with_one_more, "one more"), (_with_one_fewer, "one fewer")):
        repair = f"send a token to as many experts as the reference does; the port sends it to {described}"
        yield Mistake("top-k", f"{described} expert a token", repair, edits)
    yield Mistake(
        "routing-weights",
        "experts sorted, not their weights",
        "keep each chosen expert's weight with it; the port sorts the experts by number, but not their weights",
        lambda one: _rerouted(one, lambda indices, experts: indices.sort(-1).values),
    )


def _split_mistakes() -> Iterator[Mistake[Router]]:
    right = "give GroupedLinear m_splits in the experts' own order, as many for each as moe_permute put there"
    for described, split in _SPLITS.items():
        yield Mistake(
            "expert-splits", f"tokens split {described}", f"{right}; they are {described}", partial(_split, split)
        )


_SPLITS: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted, the largest first": lambda counts: counts.sort(descending=True).values,
    "sorted, the smallest first": lambda counts: counts.sort().values,
    "in reverse order": lambda counts: counts.flip(0),
    "equal, the rest to the first": lambda counts: _equal(counts, 0),
    "equal, the rest to the last": lambda counts: _equal(counts, -1),
}


def _equal(counts: Tensor, last: int) -> Tensor:
    equal = torch.full_like(counts, int(counts.sum()) // len(counts))
    equal[last] += counts.sum() - equal.sum()
    return equal


def _weighted(router: Router, change: Callable[[Tensor], Tensor]) -> _Edits:
    """Return the edits that change the weights."""
    if router.weighting is not router.choice:
        return (edit(router.weighting, (), change),)
    return (edit(router.choice, (), lambda was: type(was)((change(was[0]), was[1]))),)


def _not_normalised(router: Router) -> _Edits:
    return (edit(router.weighting, (router.total,), lambda was, total: was * total),) if router.total else ()


def _normalised(router: Router) -> _Edits:
    if router.total or router.is_softmax_of_chosen:
        return ()
    return _weighted(router, lambda weights: weights / weights.sum(-1, keepdim=True))


def _scored_and_weighted(
    scored: Callable[[Router], _Edits], weighted: Callable[[Router], _Edits], router: Router
) -> _Edits:
    """Return the edits of both mistakes; empty if one of them has none."""
    some, others = scored(router), weighted(router)
    return (*some, *others) if some and others else ()


def _sigmoid_of_chosen(router: Router) -> _Edits:
    if not router.is_softmax_of_chosen or router.total or router.taken is not None:
        return ()
    return (instead(router.weighting, router.choice.outputs[:1], torch.sigmoid),)


def _softmax_of_all(router: Router) -> _Edits:
    if not router.is_softmax_of_chosen or router.total:
        return ()
    of_all = lambda scores, indices: scores.softmax(-1).gather(-1, indices)  # noqa: E731
    return (instead(router.weighting, (router.scores, router.indices), of_all),)


def _activated_by(name: str, router: Router) -> _Edits:
    own, activation = router.activation, _ACTIVATIONS[name]
    if own is None or own.name == name:
        return ()
    return (edit(own, own.inputs[:1], lambda was, logits: activation(logits.to(was.dtype))),)


def _chosen_by_activated(name: str, router: Router) -> _Edits:
    """Return the edits that choose by activated scores; other readers, such as an auxiliary loss, keep the scores."""
    own = router.activation
    if own is None or own.name == name or router.taken is not None or router.scores != router.unbiased:
        return ()

    def chosen(was: Any, logits: Tensor) -> Any:
        count = was[0].shape[-1] if router.choice.name == "topk" else 1
        values, indices = torch.topk(_ACTIVATIONS[name](logits), count, -1)
        return type(was)((values.view_as(was[0]), indices.view_as(was[1])))

    return (edit(router.choice, own.inputs[:1], chosen),)


def _taken_from(router: Router, source: Value) -> _Edits:
    """Return the edits that take the weights from other scores."""
    if router.taken is None:
        return ()
    return (instead(router.taken, (source, router.indices), lambda x, indices: x.gather(-1, indices)),)


def _weights_without_bias(router: Router) -> _Edits:
    if router.bias is None:
        return ()
    if router.taken is not None:
        return _taken_from(router, router.unbiased) if router.source != router.unbiased else ()
    return (edit(router.choice, (router.unbiased,), lambda was, x: type(was)((x.gather(-1, was[1]), was[1]))),)


def _with_bias(scores: Callable[[Tensor, Tensor], Tensor], router: Router) -> _Edits:
    """Return the edits that add the bias another way; values computed from the sum, such as masks, change with it."""
    if router.biasing is None or router.bias is None:
        return ()
    needs = router.unbiased, router.bias
    return (edit(router.biasing, needs, lambda was, x, bias: scores(x, bias).expand_as(was).to(was.dtype)),)


def _biased_logits(router: Router) -> _Edits:
    own = router.activation
    if router.biasing is None or router.bias is None or own is None:
        return ()
    activation = _ACTIVATIONS[own.name]
    needs = own.inputs[0], router.bias
    return (instead(router.biasing, needs, lambda logits, bias: activation(logits + bias)),)


def _with_one_more(router: Router) -> _Edits:
    def chosen(was: Any, scores: Tensor) -> Any:
        return torch.topk(scores, was[0].shape[-1] + 1, -1)

    return (edit(router.choice, (router.scores,), chosen),) if router.choice.name == "topk" else ()


def _with_one_fewer(router: Router) -> _Edits:
    """Return the edits that take the weight from the last chosen expert; shapes stay as they are."""
    nothing = _NO_SCORE if router.is_softmax_of_chosen else 0.0

    def fewer(was: Any, scores: Tensor) -> Any:
        if was[0].shape[-1] < 2:
            raise Misfit("it is the only one")
        values, indices = torch.topk(scores, was[0].shape[-1] - 1, -1)
        is_left = (was[1].unsqueeze(-1) != indices.unsqueeze(-2)).all(-1)
        last = was[1].gather(-1, is_left.int().argmax(-1, keepdim=True))
        return type(was)((without_last(was[0], values), torch.cat((indices, last), -1)))

    def without_last(was: Tensor, chosen: Tensor) -> Tensor:
        return F.pad(chosen, (0, was.shape[-1] - chosen.shape[-1]), value=nothing).to(was.dtype)

    if router.choice.name != "topk":
        return ()
    edits = [edit(router.choice, (router.scores,), fewer)]
    if router.taken is not None:
        edits.append(edit(router.taken, (), lambda was: without_last(was, was[..., :-1])))
    return tuple(edits)


def _split(split: Callable[[Tensor], Tensor], router: Router) -> _Edits:
    """Return the edits that sort tokens by expert and cut them at other counts."""

    def cut(indices: Tensor, experts: int) -> Tensor:
        right = indices.flatten()
        counts = split(torch.bincount(right, minlength=experts))
        read_by = torch.empty_like(right)
        read_by[right.argsort(stable=True)] = torch.arange(experts, device=right.device).repeat_interleave(counts)
        return read_by.view_as(indices)

    return _rerouted(router, cut)


def _rerouted(router: Router, change: Callable[[Tensor, int], Tensor]) -> _Edits:
    """Return the edits that send tokens to other experts, with the weights of the right ones.

    Args:
        router: the reference's router.
        change: maps the right experts ``[..., k]``, and the number of all experts, to the wrong ones.
    """

    def chosen(was: Any, scores: Tensor) -> Any:
        return type(was)((was[0], change(was[1], scores.shape[-1])))

    def weights(was: Tensor, source: Tensor, scores: Tensor) -> Tensor:
        return source.gather(-1, torch.topk(scores, was.shape[-1], -1).indices).to(was.dtype)

    changed = [edit(router.choice, (router.scores,), chosen)]
    if router.taken is not None and router.source is not None:
        changed.append(edit(router.taken, (router.source, router.scores), weights))
    return tuple(changed)
