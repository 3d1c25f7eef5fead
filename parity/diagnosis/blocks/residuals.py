"""Residual connections in a trace, and what ports get wrong about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor, nn

from parity.diagnosis.attention.attention import attentions
from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.walk import CASTS, LINEAR, ancestors, back, back_along, binary
from parity.watching.trace import Call, Edit, Trace, Value, edit

_THROUGH = CASTS | {"dropout"}
_MOST_ANCESTORS = 400  # of a branch: a norm, attention or an MLP, written out


@dataclass(frozen=True, eq=False)
class Residual:
    """``result = stream + branch``, where the branch is made from the stream.

    Attributes:
        call: the sum.
        stream: what goes around the branch.
        branch: what is added.
        product: the linear layer that ends the branch, before what scales it.
        norm: of the stream, from which the branch is made; None where it has none.
        norm_before: which makes the stream, as after each sum of BERT; None where none does.
        number: among those of one call of its submodule, from 1.
    """

    call: Call
    stream: Value
    branch: Value
    product: Call
    norm: Norm | None
    norm_before: Norm | None
    number: int = 1


def residuals(trace: Trace) -> list[Residual]:
    """Every residual connection, in order."""
    normed = norms(trace)
    found = [residual for call in trace.calls if (residual := _residual(trace, call, normed)) is not None]
    alike: Counter[tuple[str, int]] = Counter()
    for i, one in enumerate(found):
        alike[one.call.site[:2]] += 1
        found[i] = replace(one, number=alike[one.call.site[:2]])
    return found


def residual_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with the reference's residual connections."""
    found = residuals(trace)
    yield from everywhere_and_somewhere(
        _mistakes(),
        found,
        module,
        lambda one: f"the {ordinal(one.number)} sum in {one.call.module}",
        lambda one: (f"each layer's {ordinal(one.number)} sum",),
    )
    yield from _order_of_blocks(found, _blocks_in_a_row(trace, found), module)
    moved = _output_layer_norms(found)
    if moved:
        yield Hypothesis(
            "post-norm",
            "first norm after the last sum",
            "put the layer's first norm in front of attention: output_layernorm=False; it comes after the last sum",
            module,
            moved,
        )
    last = found[-1] if found else None
    if last is not None and last.norm is not None:
        norm = replace(last.norm, gain=None, bias=None)
        yield Hypothesis(
            "post-norm",
            "norm after the last sum",
            "leave out the norm after the last sum: output_layernorm=False",
            module,
            (edit(last.call, (), lambda was: norm.compute(was)),),
        )


def _output_layer_norms(found: Sequence[Residual]) -> tuple[Edit, ...]:
    """Each layer's first norm after its last sum, which is what TE's ``output_layernorm`` does."""
    edits: list[Edit] = []
    for first, last in zip(found[::2], found[1::2], strict=False):
        if first.norm is not None:
            edits += _norm_after(replace(first, call=last.call, stream=last.stream, branch=last.branch))
    return tuple(edits)


def _mistakes() -> Iterator[Mistake[Residual]]:
    yield Mistake(
        "residual-placement",
        "residual taken after the norm",
        "take the residual before the norm: apply_residual_connection_post_layernorm=False; it is taken after it",
        lambda one: _sum_of(one, one.norm.call.outputs[0], one.branch) if one.norm else (),
    )
    yield Mistake(
        "residual-placement",
        "residual taken before the norm",
        "take the residual after the norm: apply_residual_connection_post_layernorm=True; it is taken before it",
        lambda one: _sum_of(one, one.norm_before.x, one.branch) if one.norm_before else (),
    )
    yield Mistake(
        "residual-placement",
        "residual missing",
        "add the residual; TE's MLP and attention modules return the branch alone",
        lambda one: _sum_of(one, one.branch),
    )
    yield Mistake(
        "residual-placement",
        "residual added twice",
        "add the residual once; it is added twice, as around TE's TransformerLayer, which adds it itself",
        lambda one: _sum_of(one, one.stream, one.stream, one.branch),
    )
    yield Mistake(
        "residual-placement",
        "branch missing",
        "add what the branch computes; the residual stream passes by alone",
        lambda one: _sum_of(one, one.stream),
    )
    yield Mistake(
        "post-norm",
        "norm after the sum",
        "put the norm before the branch as the reference does; it comes after the sum",
        _norm_after,
    )


def _blocks_in_a_row(trace: Trace, found: Sequence[Residual]) -> list[tuple[Residual, Residual]]:
    """Attention's and the MLP's residual of each layer; every other pair where no attention is seen."""
    contexts = [attention.call.outputs[0].number for attention in attentions(trace)]

    def attends(one: Residual) -> bool:
        return any(one.stream.number < context < one.branch.number for context in contexts)

    pairs = list(pairwise(found))
    return [(one, other) for one, other in pairs if attends(one) and not attends(other)] if contexts else pairs[::2]


def _order_of_blocks(
    found: Sequence[Residual], layers: Sequence[tuple[Residual, Residual]], module: nn.Module
) -> Iterator[Hypothesis]:
    """Two blocks one after the other, or side by side on the same input."""
    parallel: list[Edit] = []
    bypassed: list[Edit] = []
    for first, second in pairwise(found):
        if second.stream == first.call.outputs[0]:
            bypassed = [edit(second.call, (first.stream,), lambda was, x: was - x)]
    for first, second in layers:
        if second.norm is not None and second.stream == first.call.outputs[0] and second.norm.x == second.stream:
            parallel += _norm_of(second.norm, first.stream)
    if bypassed:
        yield Hypothesis(
            "residual-placement",
            "layer's input missing from its output",
            "add the layer's input to its output; it reaches it through the branches alone",
            module,
            tuple(bypassed),
        )
    if parallel:
        yield Hypothesis(
            "parallel-block",
            "parallel blocks",
            "let the MLP read attention's sum: parallel_attention_mlp=False; it reads what attention reads",
            module,
            tuple(parallel),
        )


def _residual(trace: Trace, call: Call, normed: Sequence[Norm]) -> Residual | None:
    named = binary(call)
    if named is None or named[0] != "add" or not all(isinstance(operand, Value) for operand in named[1:]):
        return None
    for stream, branch in (named[1:], named[:0:-1]):
        if trace.tensor(stream).shape != trace.tensor(branch).shape or trace.tensor(stream).dim() < 2:
            continue
        source = back(trace, stream, _THROUGH)
        before = ancestors(trace, branch, _MOST_ANCESTORS)
        product = _product(trace, branch)
        if source not in before or product is None:
            continue
        norm_before = next((norm for norm in normed if norm.call.outputs[0] == source), None)
        return Residual(call, stream, branch, product, _norm_between(trace, stream, before, normed), norm_before)
    return None


def _product(trace: Trace, branch: Value) -> Call | None:
    """The linear layer that ends the branch, if one does; the sum inside a rotation or a GELU is no residual."""
    call = trace.producer(back_along(trace, branch, _THROUGH | {"view", "reshape", "transpose", "add", "mul"}))
    return call if call is not None and call.name in LINEAR else None


def _norm_between(trace: Trace, stream: Value, before: Sequence[Value], normed: Sequence[Norm]) -> Norm | None:
    """The norm on the branch that reads the stream, or what the stream was made from by adding (a parallel block)."""
    added = binary(trace.producer(stream))
    for source in (stream, *(added[1:] if added and added[0] == "add" else ())):
        for norm in reversed(normed):
            if norm.call.outputs[0] in before and back(trace, norm.x, _THROUGH) == back(trace, source, _THROUGH):
                return norm
    return None


def _sum(*terms: Tensor) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _sum_of(residual: Residual, *terms: Value) -> tuple[Edit, ...]:
    return (edit(residual.call, terms, lambda was, *values: _sum(*values).to(was.dtype)),)


def _norm_of(norm: Norm, source: Value) -> tuple[Edit, ...]:
    """The norm is to be that of something else."""
    needs = (source, *norm.needs[1:])
    return (edit(norm.call, needs, lambda was, *values: norm.compute(*values).to(was.dtype)),)


def _norm_after(residual: Residual) -> tuple[Edit, ...]:
    norm = residual.norm
    if norm is None:
        return ()
    affine = norm.needs[1:]

    def compute(was: Tensor, stream: Tensor, branch: Tensor, *parameters: Tensor) -> Tensor:
        return norm.compute(stream + branch, *parameters).to(was.dtype)

    return (
        edit(norm.call, (norm.x,), lambda was, x: x.to(was.dtype)),
        edit(residual.call, (residual.stream, residual.branch, *affine), compute),
    )
