"""Numbers by which a port multiplies what its reference adds, or looks up, as it is.

Shared experts that are scaled, a residual branch that is scaled by depth, embeddings times ``sqrt(hidden)``. Layers are
taken to be scaled alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from parity.diagnosis.blocks.parallel_blocks import ends_a_branch
from parity.diagnosis.functions.factors import scales_of_attention
from parity.diagnosis.functions.operations import alike, ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.rope.rotation import rotations
from parity.diagnosis.walk import CASTS, RESHAPES, back, binary, with_number
from parity.watching.trace import Call, Edit, Trace, Value, edit

_NEAR = (0.9, 1.1)  # from one of them the port's own number is looked for


@dataclass(frozen=True, eq=False)
class _Term:
    """An operand of ``call``, which adds it; or all that ``call`` returns, where ``value`` is its result."""

    call: Call
    value: Value

    def edits(self, factor: float) -> tuple[Edit, ...]:
        """It is to be multiplied by a number."""
        if self.value in self.call.outputs:
            return (edit(self.call, (), lambda was: factor * was),)

        def compute(was: Tensor, x: Tensor) -> Tensor:
            return was + ((factor - 1.0) * x).to(was.dtype)

        return (edit(self.call, (self.value,), compute),)


def branch_factor_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every term of a sum, and every embedding, times a number that the reference does not have."""
    yield from filter(None, (_all_branches(factor, trace, module) for factor in _NEAR))
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
                    yield _left_out(trace, terms, module)
                of_width = (math.sqrt(first.shape[-1]),) if is_embedding else ()
                yield from (_times(factor, trace, terms, module) for factor in (*of_width, *_NEAR))


def _all_branches(factor: float, trace: Trace, module: nn.Module) -> Hypothesis | None:
    """What attention, the MLP and their like add to the residual stream, times one number."""
    terms = [term for call in trace.calls for term in _terms(trace, call) if _is_branch(trace, term)]
    if len(terms) < 2:
        return None
    return Hypothesis(
        "factor",
        f"each branch times {factor:.4g}",
        "add to the residual stream what attention and MLP return, multiplied by no number, as the reference does; "
        f"they are multiplied by {factor:.4g}",
        module,
        tuple(edit for term in terms for edit in term.edits(factor)),
        value=factor,
        tuned=lambda value: _all_branches(value, trace, module),  # type: ignore[arg-type, return-value]
        scope="call",
    )


def _is_branch(trace: Trace, term: _Term) -> bool:
    """Whether a linear layer ends what is added, and none what it is added to."""
    others = [value for value in term.call.inputs if value != term.value]
    return ends_a_branch(trace, term.value) and not any(ends_a_branch(trace, value) for value in others)


def _terms(trace: Trace, call: Call) -> list[_Term]:
    """Activations that are added and not scaled; an embedding."""
    match binary(call):
        case ("add", Value() as left, Value() as right) if "alpha" not in call.kwargs:
            values = [left, right]
        case _:
            values = call.outputs if call.name == "embedding" else []
    shape = trace.tensor(call.outputs[0]).shape
    return [_Term(call, x) for x in values if trace.tensor(x).shape == shape and _is_plain(trace, x)]


def _is_plain(trace: Trace, value: Value) -> bool:
    """Whether a value is an activation that no number multiplies."""
    made = with_number(call) if (call := trace.producer(back(trace, value, CASTS))) is not None else None
    tensor = trace.tensor(value)
    is_scaled = made is not None and made[0] in ("mul", "div")
    return tensor.is_floating_point() and tensor.dim() > 1 and trace.parameter(value) is None and not is_scaled


def _left_out(trace: Trace, terms: Sequence[_Term], module: nn.Module) -> Hypothesis:
    what = _described(trace, terms[0])
    return Hypothesis(
        "branch-missing",
        f"{what} left out",
        f"add {what}, as the reference does; it is left out",
        module,
        tuple(edit for term in terms for edit in term.edits(0.0)),
    )


def _times(factor: float, trace: Trace, terms: Sequence[_Term], module: nn.Module) -> Hypothesis:
    what = _described(trace, terms[0])
    others = f" and {len(terms) - 1} more like it" if len(terms) > 1 else ""
    return Hypothesis(
        "factor",
        f"{what} times {factor:.4g}",
        f"add {what}{others} as the reference does, multiplied by no number; it is multiplied by {factor:.4g}",
        module,
        tuple(edit for term in terms for edit in term.edits(factor)),
        value=factor,
        tuned=lambda value: _times(value, trace, terms, module),
        scope="all" if terms[0].value in terms[0].call.outputs else "call",
    )


def _described(trace: Trace, term: _Term) -> str:
    """By the call that makes it."""
    made = trace.producer(back(trace, term.value, CASTS | RESHAPES | {"dropout"}))
    if made is None:
        return f"what the {ordinal(term.call.site[3] + 1)} {term.call.name!r} of {term.call.module} is given"
    return f"the result of the {ordinal(made.site[3] + 1)} {made.name!r} of {made.module}"
