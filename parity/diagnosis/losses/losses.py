"""Losses that are averaged over tokens, and what ports get wrong about the average."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import CASTS, back, binary
from parity.watching.trace import Call, Trace, Value, edit

OF_COUNTED = "the mean over the tokens that count"
SUM = "the sum over all tokens"
AVERAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    OF_COUNTED: lambda losses, counts: losses.sum() / counts.sum(),
    "the mean over all tokens, those that do not count included": lambda losses, counts: losses.mean(),
    "the mean of each sequence's mean": lambda losses, counts: (losses.sum(-1) / counts.sum(-1)).mean(),
    "the mean of each sequence's sum": lambda losses, counts: losses.sum(-1).mean(),
    SUM: lambda losses, counts: losses.sum(),
}
"""Of losses ``[sequences, tokens]``, 0 where a token does not count, and of which count: 1 or 0."""


def loss_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Other averages of the reference's losses ``[batch, seq]``, of which some tokens count."""
    for call in trace.calls:
        summed = _average(trace, call)
        for described, average in AVERAGES.items() if summed else ():
            if described == OF_COUNTED:
                continue
            yield Hypothesis(
                "loss-scale",
                f"loss as {described}",
                f"divide the summed loss by the number of tokens that count; it is {described}",
                module,
                (edit(call, summed or (), _instead(average)),),
            )


def _instead(average: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda was, losses, counts: average(losses, counts).to(was.dtype)


def _average(trace: Trace, call: Call) -> tuple[Value, ...] | None:
    """The losses and where they count, of a sum that is divided by another."""
    named = binary(call)
    if named is None or named[0] != "div":
        return None
    summed = [trace.producer(back(trace, operand, CASTS | {"clamp", "clamp_min"})) for operand in named[1:]]
    values = [one.inputs[0] for one in summed if one is not None and one.name == "sum" and len(one.inputs) == 1]
    if len(values) != 2 or trace.tensor(values[0]).dim() != 2:
        return None
    return tuple(values) if trace.tensor(values[0]).shape == trace.tensor(values[1]).shape else None
