"""Routers of mixtures of experts in a trace, and what ports get wrong about the weights that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parity.calls import Call, Edit, Trace, Value, edit
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.walk import CASTS, RESHAPES, back, binary, users


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses each token's experts by ``topk`` and weights what they return.

    Attributes:
        choice: the call of ``topk``.
        scores: among which it chooses, ``[..., experts]``.
        weighting: the call that returns the chosen experts' weights, ``[..., k]``: ``choice`` itself, a ``gather`` by
            its indices, or what is computed from these.
        total: their sum, by which they are divided; None where they are not.
        activation: the softmax or sigmoid of all experts' logits that makes the scores; None where they are the logits.
        is_softmax_of_chosen: whether the weights are a softmax of the chosen scores.
    """

    choice: Call
    scores: Value
    weighting: Call
    total: Value | None
    activation: Call | None
    is_softmax_of_chosen: bool


def routers(trace: Trace) -> list[Router]:
    """Every router, in order."""
    return [router for call in trace.calls if (router := _router(trace, call)) is not None]


def routing_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's routers."""
    yield from everywhere_and_somewhere(_mistakes(), routers(trace), module, lambda one: one.choice.module)


def _mistakes() -> Iterator[Mistake[Router]]:
    yield Mistake(
        "routing-weights",
        "routing weights not normalised",
        "divide the chosen experts' weights by their sum, as the reference does; they are not",
        lambda one: (edit(one.weighting, (one.total,), lambda was, total: was * total),) if one.total else (),
    )
    yield Mistake(
        "routing-weights",
        "routing weights normalised",
        "take the chosen experts' weights as they are, as the reference does; they are divided by their sum",
        lambda one: () if one.total or one.is_softmax_of_chosen else _weighted(one, _normalised),
    )
    yield Mistake(
        "routing-weights",
        "routing weights from a softmax of all experts",
        "take the softmax of the chosen experts' scores alone, as the reference does; it is of all experts",
        _softmax_of_all,
    )
    yield Mistake(
        "routing-weights",
        "routing weights missing",
        "weight what the experts return by the router's probabilities (merging_probs of moe_unpermute); it is summed "
        "as it is",
        lambda one: _weighted(one, torch.ones_like),
    )
    for name, activation in (("sigmoid", torch.sigmoid), ("softmax", _softmax)):
        yield Mistake(
            "routing-weights",
            f"routing scores by {name}",
            f"score the experts as the reference does; they are scored by a {name}",
            _activated_by(name, activation),
        )
    for more, described in ((1, "one more"), (-1, "one fewer")):
        yield Mistake(
            "top-k",
            f"{described} expert a token",
            f"send a token to as many experts as the reference does; it goes to {described}",
            _with_more(more),
        )


def _router(trace: Trace, call: Call) -> Router | None:
    if call.name != "topk" or len(call.outputs) != 2 or not call.inputs:
        return None
    scores = call.inputs[0]
    values, indices = call.outputs
    if trace.tensor(scores).dim() < 2 or not _is_used(trace, indices):
        return None
    weighting, weights = call, values
    for user, _ in users(trace, indices):
        if user.name == "gather" and len(user.outputs) == 1:
            weighting, weights = user, user.outputs[0]
    is_softmax = False
    for user, _ in users(trace, weights):
        if user.name == "softmax" and user.outputs:
            weighting, weights, is_softmax = user, user.outputs[0], True
    total = None
    for user, given in users(trace, weights):
        match binary(user):
            case ("div", left, Value() as right) if left == given and _is_sum(trace, right, given):
                weighting, total = user, right
    source = trace.producer(back(trace, scores))
    activation = source if source is not None and source.name in ("softmax", "sigmoid") else None
    return Router(call, scores, weighting, total, activation, is_softmax)


def _is_used(trace: Trace, indices: Value) -> bool:
    return bool(users(trace, indices, RESHAPES))


def _is_sum(trace: Trace, value: Value, of: Value) -> bool:
    """Whether a value is the sum of another, a tiny number added or not."""
    call = trace.producer(back(trace, value))
    if call is not None and call.name == "add" and call.inputs:
        call = trace.producer(back(trace, call.inputs[0]))
    return call is not None and call.name == "sum" and back(trace, call.inputs[0], CASTS) == back(trace, of, CASTS)


def _weighted(router: Router, change: Callable[[Tensor], Tensor]) -> tuple[Edit, ...]:
    """The weights are to be changed."""
    if router.weighting is not router.choice:
        return (edit(router.weighting, (), change),)
    return (edit(router.choice, (), lambda was: type(was)((change(was[0]), was[1]))),)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _softmax_of_all(router: Router) -> tuple[Edit, ...]:
    if not router.is_softmax_of_chosen or router.total:
        return ()

    def weights(was: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
        return scores.softmax(-1).gather(-1, indices).to(was.dtype)

    return (edit(router.weighting, (router.scores, router.choice.outputs[1]), weights),)


def _activated_by(name: str, activation: Callable[[Tensor], Tensor]) -> Callable[[Router], tuple[Edit, ...]]:
    def edits(router: Router) -> tuple[Edit, ...]:
        own = router.activation
        if own is None or own.name == name:
            return ()
        return (edit(own, own.inputs[:1], lambda was, logits: activation(logits.to(was.dtype))),)

    return edits


def _with_more(more: int) -> Callable[[Router], tuple[Edit, ...]]:
    def edits(router: Router) -> tuple[Edit, ...]:
        def chosen(was: Any, scores: Tensor) -> Any:
            return torch.topk(scores, was[0].shape[-1] + more, -1)

        return (edit(router.choice, (router.scores,), chosen),)

    return edits
