"""Norms that a port alone has, before linear layers that read their input as it is in the reference.

TE's ``LayerNormLinear`` and ``LayerNormMLP`` in the place of ``Linear`` and an MLP, with weights that say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms import Norm, norms
from parity.diagnosis.operations import ordinal
from parity.diagnosis.walk import CASTS, back
from parity.watching.trace import Call, Edit, Trace, Value, edit

_EPS = 1e-5  # TE's default
_NUMBER = re.compile(r"\d+")


def extra_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That the linear layers which read one value, in all layers alike, read its norm."""
    normed = {norm.call.outputs[0].number for norm in norms(trace)}
    alike: dict[tuple[str, ...], list[Call]] = {}
    for number, calls in _readers(trace).items():
        if number not in normed:
            where = tuple(_NUMBER.sub("#", trace.parameter(x) or "") for call in calls for x in call.inputs)
            alike.setdefault(where, []).extend(calls)
    for calls in alike.values():
        first = f"the {ordinal(calls[0].site[3] + 1)} 'linear' of {calls[0].module}"
        others = f" and {len(calls) - 1} more like it" if len(calls) > 1 else ""
        for centred, kind in ((True, "LayerNorm"), (False, "RMSNorm")):
            yield Hypothesis(
                "norm-missing",
                f"{kind} before {first}",
                f"leave out the norm before {first}{others}, as the reference does (Linear for LayerNormLinear, no "
                f"LayerNormMLP); a {kind} comes before",
                module,
                tuple(_of_normed(call, centred) for call in calls),
            )


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


def _of_normed(call: Call, centred: bool) -> Edit:
    norm = Norm(call, call.inputs[0], centred, _EPS)
    return edit(call, call.inputs, _again(call, norm.compute))


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
