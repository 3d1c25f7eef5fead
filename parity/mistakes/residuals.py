"""Mistakes in residual streams: a branch missing, doubled, scaled, or in another order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.mistakes.alternatives import numbers
from parity.mistakes.attention import attentions
from parity.mistakes.hypothesis import Hypothesis, Mistake, Row, at_each_scope, more_like_it, titled
from parity.mistakes.layers import ends_a_branch
from parity.mistakes.norms import Norm, norms
from parity.mistakes.operations import alike, scales_of_attention
from parity.mistakes.reads import made_again
from parity.mistakes.rotation import rotations
from parity.trace.trace import (
    CASTS,
    LINEAR,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    added,
    ancestors,
    back,
    back_along,
    edit,
    grouped,
    instead,
    ordinal,
    passing_on,
    unnumbered,
    with_number,
)

# Residual connections in a trace, and mistakes in them.


_THROUGH = CASTS | {"dropout"}
_MOST_ANCESTORS = 400  # how far back a branch is followed: a norm, attention or an MLP may be written out


@dataclass(frozen=True, eq=False)
class Residual:
    """``result = stream + branch``, where the branch is computed from the stream.

    Attributes:
        call: the sum.
        stream: the value that bypasses the branch.
        branch: the branch's result, which is added.
        product: the linear layer that ends the branch, before anything scales it.
        norm: the norm of the stream that the branch reads; None if it reads none.
        norm_before: the norm that makes the stream, as after each sum of BERT; None if there is none.
        number: which of the sums in one call of its submodule it is, from 1.
    """

    call: Call
    stream: Value
    branch: Value
    product: Call
    norm: Norm | None
    norm_before: Norm | None
    number: int = 1


def residuals(trace: Trace) -> list[Residual]:
    """Return every residual connection, in order."""
    normed = norms(trace)
    found = [residual for call in trace.calls if (residual := _residual(trace, call, normed)) is not None]
    alike: Counter[tuple[str, int]] = Counter()
    for i, one in enumerate(found):
        alike[one.call.site[:2]] += 1
        found[i] = replace(one, number=alike[one.call.site[:2]])
    return found


def residual_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's residual connections."""
    found = residuals(trace)
    yield from at_each_scope(
        _mistakes(),
        found,
        lambda one: f"the {ordinal(one.number)} sum in {one.call.module}",
        lambda one: (f"each layer's {ordinal(one.number)} sum",),
    )
    yield from _order_of_blocks(found, _blocks_in_a_row(trace, found))
    moved = _output_layer_norms(found)
    if moved:
        yield Hypothesis(
            "post-norm",
            "first norm after the last sum",
            "put the layer's first norm in front of attention (te.TransformerLayer: output_layernorm=False); it comes "
            "after the last sum",
            moved,
        )
    last = found[-1] if found else None
    if last is not None and last.norm is not None:
        norm = replace(last.norm, gain=None, bias=None)
        repair = "leave out the norm after the last sum (te.TransformerLayer: output_layernorm=False)"
        yield Hypothesis("post-norm", "norm after the last sum", repair, (edit(last.call, (), norm.compute),))


def _output_layer_norms(found: Sequence[Residual]) -> tuple[Edit, ...]:
    """Return the edits that put each layer's first norm after its last sum, as TE's ``output_layernorm`` does."""
    edits: list[Edit] = []
    for first, last in zip(found[::2], found[1::2], strict=False):
        if first.norm is not None:
            edits += _norm_after(replace(first, call=last.call, stream=last.stream, branch=last.branch))
    return tuple(edits)


def _mistakes() -> Iterator[Mistake[Residual]]:
    placed: dict[str, Row[Residual]] = {
        "residual taken after the norm": (
            "take the residual before the norm: apply_residual_connection_post_layernorm=False; the port takes it "
            "after the norm",
            lambda one: _sum_of(one, one.norm.call.outputs[0], one.branch) if one.norm else (),
        ),
        "residual taken before the norm": (
            "take the residual after the norm: apply_residual_connection_post_layernorm=True; the port takes it before "
            "the norm",
            lambda one: _sum_of(one, one.norm_before.x, one.branch) if one.norm_before else (),
        ),
        "residual missing": (
            "add the residual; TE's MLP and attention modules return the branch alone",
            lambda one: _sum_of(one, one.branch),
        ),
        "residual added twice": (
            "add the residual once, as TE's TransformerLayer does by itself; the port adds it twice",
            lambda one: _sum_of(one, one.stream, one.stream, one.branch),
        ),
        "branch missing": (
            "add what the branch computes; only the residual stream is passed on",
            lambda one: _sum_of(one, one.stream),
        ),
    }
    yield from titled("residual-placement", placed)
    repair = "put the norm before the branch as the reference does; it comes after the sum"
    yield Mistake("post-norm", "norm after the sum", repair, _norm_after)


def _blocks_in_a_row(trace: Trace, found: Sequence[Residual]) -> list[tuple[Residual, Residual]]:
    """Return attention's and the MLP's residual of each layer; if no attention is found, every second pair."""
    contexts = [attention.call.outputs[0].number for attention in attentions(trace)]

    def attends(one: Residual) -> bool:
        return any(one.stream.number < context < one.branch.number for context in contexts)

    pairs = list(pairwise(found))
    return [(one, other) for one, other in pairs if attends(one) and not attends(other)] if contexts else pairs[::2]


def _order_of_blocks(found: Sequence[Residual], layers: Sequence[tuple[Residual, Residual]]) -> Iterator[Hypothesis]:
    """Yield the mistakes that two blocks read the same input, or that a layer's output lacks its input."""
    parallel: list[Edit] = []
    bypassed: list[Edit] = []
    for first, second in pairwise(found):
        if second.stream == first.call.outputs[0]:
            bypassed = [edit(second.call, (first.stream,), lambda was, x: was - x)]
    for first, second in layers:
        if second.norm is not None and second.stream == first.call.outputs[0] and second.norm.x == second.stream:
            norm = second.norm
            parallel.append(instead(norm.call, (first.stream, *norm.needs[1:]), norm.compute))
    if bypassed:
        repair = "add the layer's input to its output; in the port, it gets there only through the branches"
        yield Hypothesis("residual-placement", "layer's input missing from its output", repair, tuple(bypassed))
    if parallel:
        right = "let the MLP read attention's sum: parallel_attention_mlp=False"
        repair = f"{right}; in the port, it reads what attention reads"
        yield Hypothesis("parallel-block", "parallel blocks", repair, tuple(parallel))


def _residual(trace: Trace, call: Call, normed: Sequence[Norm]) -> Residual | None:
    terms = added(call) or ()
    for stream, branch in zip(terms, terms[::-1], strict=True):
        if trace.tensor(stream).shape != trace.tensor(branch).shape or trace.tensor(stream).dim() < 2:
            continue
        source = back(trace, stream, _THROUGH)
        before = ancestors(trace, branch, _MOST_ANCESTORS)
        # A linear layer ends a branch; the sums in a rotation or a GELU are not residuals.
        product = trace.producer(back_along(trace, branch, _THROUGH | {"view", "reshape", "transpose", "add", "mul"}))
        if source not in before or product is None or product.name not in LINEAR:
            continue
        norm_before = next((norm for norm in normed if norm.call.outputs[0] == source), None)
        return Residual(call, stream, branch, product, _norm_between(trace, stream, before, normed), norm_before)
    return None


def _norm_between(trace: Trace, stream: Value, before: Sequence[Value], normed: Sequence[Norm]) -> Norm | None:
    """Return the branch's norm that reads the stream, or a term of the stream's own sum (a parallel block)."""
    for source in (stream, *(added(trace.producer(stream)) or ())):
        for norm in reversed(normed):
            if norm.call.outputs[0] in before and back(trace, norm.x, _THROUGH) == back(trace, source, _THROUGH):
                return norm
    return None


def _sum_of(residual: Residual, *terms: Value) -> tuple[Edit, ...]:
    return (instead(residual.call, terms, lambda *values: sum(values[1:], values[0])),)


def _norm_after(residual: Residual) -> tuple[Edit, ...]:
    norm = residual.norm
    if norm is None:
        return ()
    needs = residual.stream, residual.branch, *norm.needs[1:]
    normed = lambda stream, branch, *affine: norm.compute(stream + branch, *affine)  # noqa: E731
    return passing_on(norm.call, norm.x), instead(residual.call, needs, normed)


# Factors that only a port has, on terms of sums and on embeddings.
#
# For example scaled shared experts, a residual branch scaled by depth, or embeddings times ``sqrt(hidden)``. All layers
# are assumed to be scaled alike.


@dataclass(frozen=True, eq=False)
class _Term:
    """An operand of the sum ``call``, or the whole result of ``call`` if that is ``value``."""

    call: Call
    value: Value

    def edits(self, factor: float) -> tuple[Edit, ...]:
        """Return the edits that multiply it by a number."""
        if self.value in self.call.outputs:
            return (edit(self.call, (), lambda was: factor * was),)
        return (edit(self.call, (self.value,), lambda was, x: was + ((factor - 1.0) * x).to(was.dtype)),)


def branch_factor_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every term of a sum, and every embedding, times a number that the reference does not have."""
    branches = [term for call in trace.calls for term in _terms(trace, call) if _is_branch(trace, term)]
    if len(branches) > 1:
        yield from numbers(partial(_all_branches, branches), [1.0])
    turned = {one.call.site for one in rotations(trace)} | scales_of_attention(trace)
    for calls in alike(trace):
        if any(call.site in turned for call in calls):
            continue
        by_call = [_terms(trace, call) for call in calls]
        if len({len(terms) for terms in by_call}) == 1:
            for terms in zip(*by_call, strict=True):
                first = trace.tensor(terms[0].value)
                is_embedding = terms[0].value in terms[0].call.outputs
                if is_embedding:
                    yield _left_out(trace, terms)
                of_width = (math.sqrt(first.shape[-1]),) if is_embedding else ()
                yield from numbers(partial(_times, trace, terms), [1.0], of_width)


def _all_branches(terms: Sequence[_Term], factor: float) -> Hypothesis:
    """Return the mistake of multiplying the result of every branch, such as attention or MLP, by one number."""
    return Hypothesis(
        "factor",
        f"each branch times {factor:.4g}",
        "add to the residual stream what the branches return, unscaled, as the reference does; "
        f"the port multiplies them by {factor:.4g}",
        tuple(edit for term in terms for edit in term.edits(factor)),
        scope="call",
    )


def _is_branch(trace: Trace, term: _Term) -> bool:
    """Return whether a linear layer ends this term of a sum, and none ends the other term."""
    others = [value for value in term.call.inputs if value != term.value]
    return ends_a_branch(trace, term.value) and not any(ends_a_branch(trace, value) for value in others)


def _terms(trace: Trace, call: Call) -> list[_Term]:
    """Return the activations that a call adds and does not scale, or the embedding that it returns."""
    of_sum = None if "alpha" in call.kwargs else added(call)
    values = of_sum or (call.outputs if call.name == "embedding" else ())
    shape = trace.tensor(call.outputs[0]).shape
    return [_Term(call, x) for x in values if trace.tensor(x).shape == shape and _is_plain(trace, x)]


def _is_plain(trace: Trace, value: Value) -> bool:
    """Return whether a value is an activation that is not multiplied by a number."""
    made = with_number(call) if (call := trace.producer(back(trace, value, CASTS))) is not None else None
    tensor = trace.tensor(value)
    is_scaled = made is not None and made[0] in ("mul", "div")
    return tensor.is_floating_point() and tensor.dim() > 1 and trace.parameter(value) is None and not is_scaled


def _left_out(trace: Trace, terms: Sequence[_Term]) -> Hypothesis:
    what = _described(trace, terms[0])
    return Hypothesis(
        "branch-missing",
        f"{what} left out",
        f"add {what}, as the reference does; the port leaves it out",
        tuple(edit for term in terms for edit in term.edits(0.0)),
    )


def _times(trace: Trace, terms: Sequence[_Term], factor: float) -> Hypothesis:
    what = _described(trace, terms[0])
    others = more_like_it(len(terms))
    return Hypothesis(
        "factor",
        f"{what} times {factor:.4g}",
        f"add {what}{others} as the reference does; the port's is {factor:.4g} times that",
        tuple(edit for term in terms for edit in term.edits(factor)),
        scope="all" if terms[0].value in terms[0].call.outputs else "call",
    )


def _described(trace: Trace, term: _Term) -> str:
    """Return a description of a term by the call that computes it."""
    made = trace.producer(back(trace, term.value, CASTS | RESHAPES | {"dropout"}))
    if made is None:
        return f"what the {term.call.described} is given"
    return f"the result of the {made.described}"


# Two consecutive residual branches, which a port has in the other order or in parallel.
#
# For example cross-attention before self-attention, the MLP before attention, or a Conformer's convolution after its
# second MLP. To compute a branch for another input, its calls are repeated one by one.


_IN_BETWEEN = CASTS | {"dropout"}
_LAYERS = LINEAR | {"conv1d", "conv2d"}
_MOST_CALLS = 400  # a branch has at most this many calls


@dataclass(frozen=True, eq=False)
class Branch:
    """``stream + result``, where the result is computed from the stream.

    Attributes:
        sum: the call that adds the two.
        stream, result: the operands of the sum.
        calls: the calls that compute the result from the stream, in order.
        given: the other inputs of these calls.
    """

    sum: Call
    stream: Value
    result: Value
    calls: tuple[Call, ...]
    given: tuple[Value, ...]

    @property
    def described(self) -> str:
        """The branch's name in messages, by its last layer."""
        last = [call for call in self.calls if call.name in _LAYERS][-1]
        return f"the branch that ends with the {last.described}"

    def of(self, stream: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Return the result for another stream."""
        made = dict(zip((value.number for value in self.given), given, strict=True))
        made[self.stream.number] = stream
        for call in self.calls:
            returned = made_again(call, [made[value.number] for value in call.inputs])
            values = tree_leaves(call.result)
            tensors = tree_leaves(returned)
            made.update((value.number, x) for value, x in zip(values, tensors, strict=True) if isinstance(value, Value))
        return made[self.result.number]


def branch_order_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every two consecutive branches in the other order and in parallel, in all layers at once."""
    found = [branch for call in trace.calls if (branch := _branch(trace, call)) is not None]
    by_sum = {one.sum.outputs[0].number: one for one in found}
    both = ((by_sum.get(back(trace, second.stream, _IN_BETWEEN).number), second) for second in found)
    in_a_row = [(one, other) for one, other in both if one is not None and one.sum.outputs[0] not in other.given]
    sites = lambda pair: tuple((unnumbered(one.sum.site[0]), *one.sum.site[1:]) for one in pair)  # noqa: E731
    for pairs in grouped(in_a_row, sites).values():
        one, other = (branch.described for branch in pairs[0])
        others = more_like_it(len(pairs), ",", "so for ")
        yield Hypothesis(
            "operation",
            f"not {one} before {other}{others}",
            f"compute {one} before {other}, as the reference does{others}; the port has them in the opposite order",
            tuple(_exchanged(*pair) for pair in pairs),
            scope="call",
        )
        yield Hypothesis(
            "parallel-block",
            f"{one} beside {other}{others}",
            f"compute {other} from the sum with {one}, as the reference does{others}; both are computed from one input",
            tuple(_side_by_side(*pair) for pair in pairs),
            scope="call",
        )


def _exchanged(first: Branch, second: Branch) -> Edit:
    count = len(first.given)

    def compute(stream: Tensor, *given: Tensor) -> Tensor:
        after_second = stream + second.of(stream, given[count:])
        return after_second + first.of(after_second, given[:count])

    return instead(second.sum, (first.stream, *first.given, *second.given), compute)


def _side_by_side(first: Branch, second: Branch) -> Edit:
    both = lambda stream, result, *given: stream + result + second.of(stream, given)  # noqa: E731
    return instead(second.sum, (first.stream, first.result, *second.given), both)


def _branch(trace: Trace, call: Call) -> Branch | None:
    """Return the branch that a call adds; None if it adds none."""
    terms = added(call)
    if terms is None or len(call.inputs) != 2:
        return None
    shapes = {tuple(trace.tensor(value).shape) for value in (*call.inputs, *call.outputs)}
    if len(shapes) > 1 or not trace.tensor(call.outputs[0]).is_floating_point():
        return None
    for stream, result in (terms, terms[::-1]):
        calls, given = _between(trace, stream, result)
        if any(one.name in _LAYERS for one in calls):
            return Branch(call, stream, result, calls, given)
    return None


def _between(trace: Trace, stream: Value, result: Value) -> tuple[tuple[Call, ...], tuple[Value, ...]]:
    """Return the calls that compute ``result`` from ``stream``, and their other inputs; both empty if none do."""
    upstream: dict[int, Call] = {}
    queue = [result]
    while queue:
        value = queue.pop()
        call = trace.producer(value)
        if value == stream or call is None or value.number < stream.number or call.outputs[0].number in upstream:
            continue
        upstream[call.outputs[0].number] = call
        queue += call.inputs
        if len(upstream) > _MOST_CALLS:
            return (), ()
    made, calls = {stream.number}, []
    for call in sorted(upstream.values(), key=lambda one: one.outputs[0].number):
        if any(value.number in made for value in call.inputs):
            if {value.number for value in call.outputs} & {value.number for value in call.inputs}:
                return (), ()  # the call writes to its input
            calls.append(call)
            made |= {value.number for value in call.outputs}
    if result.number not in made:
        return (), ()
    given = {value.number: value for call in calls for value in call.inputs if value.number not in made}
    return tuple(calls), tuple(given.values())
