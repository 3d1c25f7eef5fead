"""Mistakes in the places of norms: before instead of after a branch, around pooling, or where there should be none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from parity.mistakes.attention import Attention, attentions, heads_of
from parity.mistakes.hypothesis import (
    MOST_PLACES,
    Hypothesis,
    Mistake,
    Row,
    at_each_scope,
    more_like_it,
    titled,
    with_attributes,
)
from parity.mistakes.norms import Norm, norms
from parity.mistakes.reads import made_again
from parity.mistakes.residuals import Residual, residuals
from parity.trace.trace import (
    CASTS,
    LINEAR,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    ancestors,
    back,
    binary,
    edit,
    grouped,
    instead,
    ordinal,
    passing_on,
    unnumbered,
    users,
)

# Norms after residual sums, as in the original transformer, or of branches' results, as in OLMo 2. A port may put them
# before its branches, as TE's layers do.


_OF_A_STREAM = 400  # a norm that makes a stream is looked for among this many of its ancestors
_SUMS_OF_A_LAYER = (1, 2, 3)  # residual sums of a parallel block, a decoder layer, and one with cross-attention


def pre_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Yield the mistake of putting each norm that follows a sum before the sum's branch."""
    edits: list[Edit] = []
    for one in residuals(trace):
        after = next((norm for norm in norms(trace) if back(trace, norm.x) == one.call.outputs[0]), None)
        if after is not None and one.norm is None:
            edits += _norm_before(trace, one.stream, after, module)
    if edits:
        yield Hypothesis(
            "post-norm",
            "norms before the branches",
            "put each norm after the sum, as the reference does; it is before the branch, as in TE's TransformerLayer",
            tuple(edits),
        )


def branch_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Yield the mistakes of putting each norm of a branch's result before the branch or after the sum."""
    found = list(_normed_branches(trace))
    before = [one for call, stream, norm in found for one in _norm_before(trace, stream, norm, module)]
    after = [_norm_of_sum(call, stream, norm) for call, stream, norm in found]
    right = "norm each branch's result before it is added, as the reference does"
    for edits, name, wrong in (
        (before, "before them", "each norm is before its branch, as in TE's layers"),
        (after, "after the sums", "each norm is after the sum"),
    ):
        if edits:
            yield Hypothesis("post-norm", f"norms of branches {name}", f"{right}; {wrong}", tuple(edits))


def last_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Yield the mistakes of applying the norm after all layers, with its own weights, after each of them."""
    found = residuals(trace)
    last = next((norm for norm in norms(trace) if found and back(trace, norm.x) == found[-1].call.outputs[0]), None)
    normed = None if last is None else _with_parameters_of(module, trace, last)
    if last is None or normed is None:
        return
    weight = next(iter(last.needs[1:]), None)
    called = (trace.parameter(weight) or "").rpartition(".")[0] if weight is not None else "the last norm"
    for of_a_layer in _SUMS_OF_A_LAYER:
        ends = found[of_a_layer - 1 :: of_a_layer]
        if len(ends) < 2 or len(found) % of_a_layer:
            continue
        after = "each sum" if of_a_layer == 1 else f"each {ordinal(of_a_layer)} sum"
        for where, sums in ((f"after {after}", ends[:-1]), (f"after {after}, and once more at the end", ends)):
            yield Hypothesis(
                "post-norm",
                f"last norm {where}",
                f"apply {called} once, after all layers, as the reference does; it is {where}",
                tuple(_of_result(one.call, normed) for one in sums),
            )


def pooled_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Yield the mistakes of picking or averaging tokens after instead of before their norm, or the reverse."""
    for norm in norms(trace):
        pool, normed = trace.producer(back(trace, norm.x)), _with_parameters_of(module, trace, norm)
        if pool is not None and normed is not None and pool.inputs and _keeps_channels(trace, pool, pool.inputs[0]):
            repair = f"average tokens before they are normed, as the reference does in {norm.call.module}"
            yield Hypothesis(
                "post-norm",
                f"norm of {norm.call.module} before pooling",
                f"{repair}; the port norms each of them",
                (_of_normed(pool, pool.inputs[0], normed), passing_on(norm.call, norm.x)),
            )
        pools = _pools(trace, norm.call.outputs[0])
        if pools:
            repair = f"norm all tokens before some are picked, or averaged, as the reference does in {norm.call.module}"
            yield Hypothesis(
                "post-norm",
                f"norm of {norm.call.module} after pooling",
                f"{repair}; the port norms only those that are picked, or their average",
                (passing_on(norm.call, norm.x), *(_of_result(call, norm.compute, norm.needs[1:]) for call in pools)),
            )


def _pools(trace: Trace, value: Value) -> list[Call]:
    """Return the last calls that pick or average a value's tokens; empty if one of its readers does neither."""
    found: list[Call] = []
    for call, _ in users(trace, value, CASTS):
        if not _keeps_channels(trace, call, value):
            return []
        found += _pools(trace, call.outputs[0]) or [call]
    return found


def _of_result(call: Call, norm: Callable[..., Tensor], affine: Sequence[Value] = ()) -> Edit:
    """Return the edit that applies a norm to a call's result."""
    return edit(call, affine, lambda was, *parameters: norm(was, *parameters).to(was.dtype))


def _keeps_channels(trace: Trace, call: Call, given: Value) -> bool:
    """Return whether a call picks or averages tokens of a value and keeps their channels."""
    if call.name not in ("getitem", "select", "narrow", "index_select", "mean") or len(call.outputs) != 1:
        return False
    before, after = trace.tensor(given).shape, trace.tensor(call.outputs[0]).shape
    return len(before) > 2 and before[-1] == after[-1] and before.numel() > after.numel()


def _normed_branches(trace: Trace) -> Iterator[tuple[Call, Value, Norm]]:
    """Yield sum, stream and norm of every ``stream + norm(branch)``, unless the norm reads or makes the stream."""
    by_result = {norm.call.outputs[0]: norm for norm in norms(trace)}
    for call in trace.calls:
        named = binary(call)
        operands = [back(trace, operand) for operand in named[1:]] if named and named[0] == "add" else []
        for stream, branch in (operands, operands[::-1]) if operands else ():
            norm = by_result.get(branch) if isinstance(branch, Value) else None
            if norm is None or not isinstance(stream, Value) or back(trace, norm.x) == stream:
                continue
            normed = norm.call.outputs[0]
            is_stream = trace.tensor(stream).shape == trace.tensor(normed).shape
            if is_stream and normed not in ancestors(trace, stream, _OF_A_STREAM):
                yield call, stream, norm


def _norm_of_sum(call: Call, stream: Value, norm: Norm) -> Edit:
    of_sum = lambda stream, branch, *affine: norm.compute(stream + branch, *affine)  # noqa: E731
    return instead(call, (stream, *norm.needs), of_sum)


def _norm_before(trace: Trace, stream: Value, after: Norm, module: nn.Module) -> Iterator[Edit]:
    """Yield the edits that make a branch read the norm of the stream and leave out the norm after it or its sum."""
    normed = _with_parameters_of(module, trace, after)
    if normed is None:
        return
    yield passing_on(after.call, after.x)
    width = trace.tensor(stream).shape[-1]
    for call, given in users(trace, stream, RESHAPES):  # nn.MultiheadAttention puts the sequence first
        if call.name in LINEAR and given in call.inputs and trace.tensor(given).shape[-1] == width:
            yield _of_normed(call, given, normed)


def _with_parameters_of(module: nn.Module, trace: Trace, norm: Norm) -> Callable[[Tensor], Tensor] | None:
    """Return a norm that reads its parameters from the module; None if one of them is not a parameter."""
    # In the trace, the parameters first appear with the norm, too late for earlier calls.
    names = [trace.parameter(value) or "" for value in norm.needs[1:]]
    return (lambda x: norm.compute(x, *map(module.get_parameter, names))) if all(names) else None


def _of_normed(call: Call, given: Value, norm: Callable[[Tensor], Tensor]) -> Edit:
    """Return the edit that makes a call read the norm of ``given``."""

    def compute(was: Tensor, *inputs: Tensor) -> Any:
        changed = (norm(x).to(x.dtype) if value == given else x for value, x in zip(call.inputs, inputs, strict=True))
        return made_again(call, list(changed))

    return edit(call, call.inputs, compute)


# Norms of queries, keys and values that only a port has: of some or all of them, of each head or all heads at once.
#
# They come from TE's ``qk_norm_type`` or from another model. Their weights are 1 and 0, or those of the keys' norm.


_EPS = 1e-5  # TE's default
_EPS_OF_L2 = 1e-6  # TE's default for L2Normalization
_NEAR = 24  # a key's norm is looked for among this many of its ancestors

Compute = Callable[[Tensor], Tensor]


def _rms_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()


KINDS: dict[str, Compute] = {"LayerNorm": lambda x: _rms_norm(x - x.mean(-1, keepdim=True)), "RMSNorm": _rms_norm}
"""Norms without weights, by their name in TE."""


def attention_norm_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every such norm in all layers; norms of queries and keys also in single layers."""
    found = attentions(trace)
    l2_norm: Compute = lambda x: x * (x.square().sum(-1, keepdim=True) + _EPS_OF_L2).rsqrt()  # noqa: E731
    right = "take queries and keys as they are, as the reference does: qk_norm_type=None"
    of_both: dict[str, Row[Attention]] = {
        f"{kind} of queries and keys": (
            f"{right}; in the port, they go through a {kind}",
            with_attributes(arrange=(norm, norm, None, None)),
        )
        for kind, norm in (*KINDS.items(), ("L2Normalization", l2_norm))
    }
    yield from at_each_scope(titled("norm-missing", of_both), found, lambda one: one.call.module)
    yield from at_each_scope((made for named in KINDS.items() for made in _of_some(*named)), found)
    keyed = [_Keyed(one, norm) for one in found if (norm := _of_key(trace, one)) is not None]
    yield from at_each_scope([_values_as_keys()], keyed)


def _of_some(kind: str, norm: Compute) -> Iterator[Mistake[Attention]]:
    """Yield norms of combinations other than queries and keys, or of all heads at once, as in OLMo 2."""
    arranged: dict[str, tuple[Compute | None, ...]] = {
        f"{kind} of values": (None, None, norm, None),
        f"{kind} of queries, keys and values": (norm, norm, norm, None),
        f"{kind} of queries": (norm, None, None, None),
        f"{kind} of keys": (None, norm, None, None),
        f"{kind} of queries and keys, all heads at once": (_of_all_heads(norm), _of_all_heads(norm), None, None),
    }
    right = "take queries, keys and values as they are where the reference does"
    for name, arrange in arranged.items():
        yield Mistake("norm-missing", name, f"{right}; attention has a {name}", with_attributes(arrange=arrange))


def _of_all_heads(norm: Compute) -> Compute:
    """Return a norm over all heads' channels at each position of ``[..., heads, seq, head_dim]``."""

    def computed(x: Tensor) -> Tensor:
        rows = norm(x.transpose(-3, -2).flatten(-2))
        return rows.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)

    return lambda x: computed(x) if x.dim() > 3 else norm(x)


@dataclass(frozen=True, eq=False)
class _Keyed:
    """Attention whose keys are normalised."""

    attention: Attention
    norm: Norm


def _of_key(trace: Trace, attention: Attention) -> Norm | None:
    """Return the norm of each head's keys, before or after a rotation; None if the values may pass through it too."""
    *_, value = heads_of(trace, attention)
    made = set(ancestors(trace, attention.key, _NEAR)) | {attention.key}
    of_value = set(ancestors(trace, attention.value, _NEAR)) | {attention.value}
    of_heads = (one for one in norms(trace) if one.call.outputs[0] in made - of_value)
    return next((one for one in of_heads if trace.tensor(one.x).shape[-1] == value.shape[-1]), None)


def _values_as_keys() -> Mistake[_Keyed]:
    def edits(one: _Keyed) -> tuple[Edit, ...]:
        attention, count, parameters = one.attention, len(one.attention.needs), one.norm.needs[1:]

        def compute(*values: Tensor) -> Tensor:
            normed = (None, None, lambda x: one.norm.compute(x, *values[count:]), None)
            return replace(attention, arrange=normed).compute(*values[:count])

        return (instead(attention.call, (*attention.needs, *parameters), compute),)

    return Mistake(
        "norm-missing",
        "norm of keys for values, too",
        "take values as they are, as the reference does; in the port, they go through the norm of the keys",
        edits,
    )


# Norms that only a port has: before linear layers, of queries and keys, of a branch's result, or after a sum.
#
# They come from TE's ``LayerNormLinear`` and ``LayerNormMLP`` in place of ``Linear`` and an MLP, from ``qk_norm_type``,
# or from another model. Their weights are 1 and 0. A port may have them in all layers or in some.


def extra_norm_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield a norm at each place where ports have one that the reference lacks."""
    for calls in _alike(trace):
        for kind, norm in KINDS.items():
            yield _before(calls, kind, norm)
            places = grouped(calls, partial(_input, trace)).values()
            for some in places if 1 < len(places) <= MOST_PLACES else ():
                yield _before(some, kind, norm, calls)
    yield from attention_norm_hypotheses(trace)
    yield from at_each_scope(
        _at_sums(),
        residuals(trace),
        lambda one: f"{one.call.module} (sum {one.number})",
        lambda one: (f"each layer (sum {one.number})",),
    )


def _at_sums() -> Iterator[Mistake[Residual]]:
    """Yield a norm of a branch's result, before or after a gate, a gain or a number scales it, or of the sum."""

    def of_branch(norm: Compute, one: Residual) -> tuple[Edit, ...]:
        return (instead(one.call, (one.stream, one.branch), lambda x, y: x + norm(y)),)

    def of_product(norm: Compute, one: Residual) -> tuple[Edit, ...]:
        return () if one.product.outputs[0] == one.branch else (_of_result(one.product, norm),)

    for where, right, comes, edits in (
        ("before a sum", "add what the branch computes as it is", "before the sum", of_branch),
        ("before the scale of a branch", "scale what the branch computes as it is", "before", of_product),
        ("after a sum", "pass the sum on as it is", "after it", lambda norm, one: (_of_result(one.call, norm),)),
    ):
        for kind, norm in KINDS.items():
            repair = f"{right}, as the reference does; a {kind} comes {comes}"
            yield Mistake("norm-missing", f"{kind} {where}", repair, partial(edits, norm))


def _alike(trace: Trace) -> list[list[Call]]:
    """Return linear layers that read no norm, grouped by input; those of the same name in all layers share a group."""
    normed = {norm.call.outputs[0].number for norm in norms(trace)}
    linear = (call for call in trace.calls if call.name == "linear" and any(map(trace.parameter, call.inputs[1:])))
    of_activations = (call for call in linear if trace.parameter(call.inputs[0]) is None)
    by_input = grouped(of_activations, partial(_input, trace))
    readers = [calls for given, calls in by_input.items() if given.number not in normed]

    def parameters(calls: Sequence[Call]) -> tuple[str, ...]:
        return tuple(unnumbered(trace.parameter(x) or "") for call in calls for x in call.inputs)

    return [list(chain.from_iterable(some)) for some in grouped(readers, parameters).values()]


def _input(trace: Trace, call: Call) -> Value:
    """Return the activation that a linear layer reads, before any casts."""
    given: Value = back(trace, call.inputs[0], CASTS)
    return given


def _before(calls: Sequence[Call], kind: str, norm: Compute, alike: Sequence[Call] = ()) -> Hypothesis:
    """Return the mistake that these linear layers, which may be some of those ``alike``, read a norm."""
    first = f"the {calls[0].described}"
    others = more_like_it(len(calls))
    as_reference = "as the reference does (Linear for LayerNormLinear, no LayerNormMLP)"
    like = f"linear layers like the {alike[0].described}" if alike else ""
    return Hypothesis(
        "norm-missing",
        f"{kind} before {first}{' alone' if alike else ''}",
        f"leave out the norm before {first}{others}, {as_reference}; a {kind} comes before",
        tuple(_of_normed(call, call.inputs[0], norm) for call in calls),
        scope="one" if alike else "all",
        place=calls[0].module if alike else "",
        family=(f"{kind} before {like}", f"leave out the {kind} before {like}, {as_reference},") if alike else ("", ""),
    )
