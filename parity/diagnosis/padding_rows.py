"""Embeddings whose padding row gets no gradient, ``nn.Embedding(padding_idx=...)``, on one side alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from parity.diagnosis.budget import Budget
from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.verify import verified
from parity.result import Finding, TensorResult
from parity.watching.trace import Call, Trace, Value, edit

_MOST_OF_IT = 0.9  # of the square of a gradient's error, which lies in the row


def padding_row_findings(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """A row of a table gets a gradient by being looked up in the port and not in the reference, or the reverse."""
    wrong = {result.name for result in failed if result.kind == "weight gradient"}
    for call in trace.calls:
        given = _arguments(call)
        name = trace.parameter(given["weight"]) if given else None
        if name not in wrong or budget.spent():
            continue
        row = given["padding_idx"]
        is_left_out = row is not None
        if row is None:
            row = _row_that_differs(failure, name)
        if row is None:
            continue
        hypothesis = _looked_up(call, given, None if is_left_out else row, failure)
        explanation = verified(failure, (hypothesis,))
        if explanation is not None and explanation.complete:
            row %= len(trace.tensor(given["weight"]))
            told = (
                f"give the embedding of {name} padding_idx={row}, as the reference has it: the port's row {row} gets a "
                "gradient where it is looked up"
                if is_left_out
                else f"leave out padding_idx={row} of the embedding of {name}, as the reference does: the port's row "
                f"{row} gets no gradient where it is looked up"
            )
            yield finding("padding-row", f"{told}; every gradient agrees with that")
            return


def _arguments(call: Call) -> dict[str, Any]:
    """Of ``F.embedding``, by name; none of another call."""
    if call.name != "embedding" or call.function is not F.embedding:
        return {}
    bound = inspect.signature(F.embedding).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments if isinstance(bound.arguments["input"], Value) else {}


def _looked_up(call: Call, given: dict[str, Any], padding_idx: int | None, failure: Failure) -> Hypothesis:
    def compute(was: Tensor, index: Tensor, table: Tensor) -> Tensor:
        return F.embedding(index, table, padding_idx, scale_grad_by_freq=given["scale_grad_by_freq"])

    changed = edit(call, (given["input"], given["weight"]), compute)
    return Hypothesis("padding-row", "padding row", "", failure.prepared.reference, (changed,))


def _row_that_differs(failure: Failure, name: str) -> int | None:
    """The one row in which nearly all of the gradient's error is."""
    key = "weight gradient", name
    error = failure.candidate[key].double() - failure.golden[key]  # type: ignore[index]
    by_row = error.square().flatten(1).sum(1)
    row = int(by_row.argmax())
    return row if by_row[row] > _MOST_OF_IT * by_row.sum() else None
