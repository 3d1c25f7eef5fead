"""What a precision costs each value that a reference computes on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.cast import cast
from parity.execute import outputs_of
from parity.passes import under_model
from parity.precision import Precision
from parity.prepare import Prepared
from parity.rounding.freedom import UNFUSED
from parity.watching.calls import tracing
from parity.watching.trace import Site, Trace

Place = tuple[Site, int, bool]


def values_under(prepared: Prepared, precision: Precision) -> dict[Place, Tensor]:
    """The reference's values under the rounding model, each by the call that returned it or was given it, and where.

    Numbers of values do not find them: in FP64 a reference may make other casts than in FP32.
    """
    prepared.reference.float()
    traces: list[Trace] = []

    def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with tracing(module) as trace:
            returned = (prepared.call or nn.Module.__call__)(module, *args, **kwargs)
        traces.append(trace)
        return returned

    # What depends on a tensor that requires a gradient is an activation to the model.
    inputs = tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
        cast(prepared.inputs, torch.float32),
    )
    with under_model(prepared, precision.rounding, UNFUSED):
        outputs_of(prepared.reference, traced, inputs)
    return places(traces[0])


def places(trace: Trace) -> dict[Place, Tensor]:
    """A trace's tensors, each by the call that returned it or was given it first, and where among its own."""
    values = {value.number: value for call in trace.calls for value in (*call.inputs, *call.outputs)}
    return {(one.site, one.position, one.returned): trace.tensor(one) for one in values.values()}
