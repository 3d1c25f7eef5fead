"""Norms that a port alone has: before linear layers, of queries and keys, of a branch's result, after a sum.

TE's ``LayerNormLinear`` and ``LayerNormMLP`` in the place of ``Linear`` and an MLP, ``qk_norm_type``, or norms of
another model, with weights that say nothing; in all layers, or in some.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.blocks.norms_in_attention import KINDS, Compute, attention_norm_hypotheses
from parity.diagnosis.blocks.residuals import Residual, residuals
from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import MOST_PLACES, Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import norms
from parity.diagnosis.walk import CASTS, back
from parity.watching.trace import Call, Edit, Trace, Value, edit

_NUMBER = re.compile(r"\d+")


def extra_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """A norm in each place where ports have one that the reference lacks."""
    for calls in _alike(trace):
        for kind, norm in KINDS.items():
            yield _before(calls, kind, norm, module)
            places = _by_input(trace, calls)
            for some in places if 1 < len(places) <= MOST_PLACES else ():
                yield _before(some, kind, norm, module, calls)
    yield from attention_norm_hypotheses(trace, module)
    for mistake in (_of_branch, _of_product, _after_sum):
        yield from everywhere_and_somewhere(
            (mistake(*named) for named in KINDS.items()),
            residuals(trace),
            module,
            lambda one: f"{one.call.module} (sum {one.number})",
            lambda one: (f"each layer (sum {one.number})",),
        )


def _of_branch(kind: str, norm: Compute) -> Mistake[Residual]:
    return Mistake(
        "norm-missing",
        f"{kind} before a sum",
        f"add what the branch computes as it is, as the reference does; a {kind} comes before the sum",
        lambda one: (edit(one.call, (one.stream, one.branch), lambda was, x, y: (x + norm(y)).to(was.dtype)),),
    )


def _of_product(kind: str, norm: Compute) -> Mistake[Residual]:
    """As above, before a gate, a gain or a number scales it."""

    def edits(one: Residual) -> tuple[Edit, ...]:
        if one.product.outputs[0] == one.branch:
            return ()
        return (edit(one.product, (), lambda was: norm(was).to(was.dtype)),)

    return Mistake(
        "norm-missing",
        f"{kind} before the scale of a branch",
        f"scale what the branch computes as it is, as the reference does; a {kind} comes before",
        edits,
    )


def _after_sum(kind: str, norm: Compute) -> Mistake[Residual]:
    return Mistake(
        "norm-missing",
        f"{kind} after a sum",
        f"pass the sum on as it is, as the reference does; a {kind} comes after it",
        lambda one: (edit(one.call, (), lambda was: norm(was).to(was.dtype)),),
    )


def _alike(trace: Trace) -> list[list[Call]]:
    """Linear layers that read no norm, those of the same name in all layers together."""
    normed = {norm.call.outputs[0].number for norm in norms(trace)}
    alike: dict[tuple[str, ...], list[Call]] = defaultdict(list)
    for number, calls in _readers(trace).items():
        if number not in normed:
            where = tuple(_NUMBER.sub("#", trace.parameter(x) or "") for call in calls for x in call.inputs)
            alike[where].extend(calls)
    return list(alike.values())


def _by_input(trace: Trace, calls: Sequence[Call]) -> list[list[Call]]:
    """The calls that read one value, for each."""
    found: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        found[back(trace, call.inputs[0], CASTS).number].append(call)
    return list(found.values())


def _before(
    calls: Sequence[Call], kind: str, norm: Compute, module: nn.Module, alike: Sequence[Call] = ()
) -> Hypothesis:
    """That these linear layers, all or some of those that are alike, read a norm."""
    first = _named(calls[0])
    others = f" and {len(calls) - 1} more like it" if len(calls) > 1 else ""
    as_reference = "as the reference does (Linear for LayerNormLinear, no LayerNormMLP)"
    like = f"linear layers like {_named(alike[0])}" if alike else ""
    return Hypothesis(
        "norm-missing",
        f"{kind} before {first}{' alone' if alike else ''}",
        f"leave out the norm before {first}{others}, {as_reference}; a {kind} comes before",
        module,
        tuple(_of_normed(call, norm) for call in calls),
        scope="one" if alike else "all",
        place=calls[0].module if alike else "",
        family=(f"{kind} before {like}", f"leave out the {kind} before {like}, {as_reference},") if alike else ("", ""),
    )


def _named(call: Call) -> str:
    return f"the {ordinal(call.site[3] + 1)} 'linear' of {call.module}"


def _readers(trace: Trace) -> dict[int, list[Call]]:
    """The products with parameters by the number of the activation that each reads, casts aside."""
    found: dict[int, list[Call]] = {}
    for call in trace.calls:
        given = _activation(trace, call)
        if given is not None:
            found.setdefault(back(trace, given, CASTS).number, []).append(call)
    return found


def _activation(trace: Trace, call: Call) -> Value | None:
    """What a linear layer multiplies by its parameter."""
    if call.name != "linear" or not any(trace.parameter(value) for value in call.inputs[1:]):
        return None
    return None if trace.parameter(call.inputs[0]) else call.inputs[0]


def _of_normed(call: Call, norm: Compute) -> Edit:
    return edit(call, call.inputs, _again(call, norm))


def _again(call: Call, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The call, given something else in the place of its first tensor."""

    def compute(was: Tensor, *inputs: Tensor) -> Tensor:
        given = dict(zip((value.number for value in call.inputs), _changed(inputs, change), strict=True))
        args, kwargs = tree_map_only(Value, lambda value: given[value.number], (call.args, call.kwargs))
        result: Tensor = call.function(*args, **kwargs)
        return result

    return compute


def _changed(inputs: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [change(inputs[0]).to(inputs[0].dtype), *inputs[1:]]
