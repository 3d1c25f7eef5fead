"""List every known mistake that could have been made with a given reference and weight map."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parity.case.transfer import parameter_shapes
from parity.case.weight_map import WeightMap
from parity.mistakes.activations import activation_hypotheses, bias_hypotheses, clamp_hypotheses, gated_units
from parity.mistakes.attention import attentions, distinct_heads, heads_of
from parity.mistakes.attention_mistakes import (
    attention_hypotheses,
    joined_stream_hypotheses,
    sequence_first_hypotheses,
    softcap_hypotheses,
    softmax_scale_hypotheses,
)
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.layers import (
    layer_order_hypotheses,
    parallel_block_hypotheses,
    step_order_hypotheses,
    unused_branch_hypotheses,
    unused_norm_hypotheses,
    unused_parameters,
)
from parity.mistakes.lookups import lookup_hypotheses
from parity.mistakes.losses import (
    cross_entropy_hypotheses,
    label_shift_hypotheses,
    log_prob_hypotheses,
    loss_hypotheses,
)
from parity.mistakes.mixture import routing_hypotheses
from parity.mistakes.norm_places import (
    branch_norm_hypotheses,
    extra_norm_hypotheses,
    last_norm_hypotheses,
    pre_norm_hypotheses,
)
from parity.mistakes.norms import norm_group_hypotheses, norm_hypotheses
from parity.mistakes.operations import (
    exchanged_factor_hypotheses,
    factor_hypotheses,
    joined_token_hypotheses,
    loop_operation_hypotheses,
    operation_hypotheses,
    scaled_linear_hypotheses,
)
from parity.mistakes.optimizers import (
    clipping_hypotheses,
    optimizer_hypotheses,
    optimizer_moment_hypotheses,
    optimizer_step_hypotheses,
)
from parity.mistakes.packed import packed_hypotheses, shifted_window_hypotheses
from parity.mistakes.residuals import branch_factor_hypotheses, branch_order_hypotheses, residual_hypotheses
from parity.mistakes.rope import norm_order_hypotheses, rope_hypotheses
from parity.mistakes.weight_maps import Heads, Mapped, repeated_weight_hypotheses, weight_hypotheses
from parity.numerics.golden import in_fp64
from parity.passes.one_pass import outputs_of
from parity.passes.prepare import Calls, Prepared, cast
from parity.trace.trace import LINEAR, RESHAPES, Trace, ancestors, users

_ADDS = ("add", "iadd")  # a bias, where the linear layer is written out
_NEAR = 60  # of a query's ancestors, among which its projection is
_NEAR_A_GATE = 16  # of a gate's ancestors, among which its weight is


def hypotheses(prepared: Prepared, trace: Trace, unused: Container[str] = ()) -> Iterator[Hypothesis]:
    """Yield every known mistake, the likeliest subjects first.

    Args:
        prepared: what was compared.
        trace: of the reference.
        unused: TE's parameters without a gradient, which the reference gives one.
    """
    mapped = _mapped(prepared, trace, prepared.weights, unused)
    never_came = unused_parameters(prepared.weights, unused)
    yield from unused_branch_hypotheses(trace, never_came)
    yield from unused_norm_hypotheses(trace, never_came)
    yield from layer_order_hypotheses(mapped)
    yield from weight_hypotheses(mapped)
    yield from function_hypotheses(prepared, trace)
    yield from repeated_weight_hypotheses(mapped)
    yield from branch_factor_hypotheses(trace)
    yield from operation_hypotheses(trace)
    yield from scaled_linear_hypotheses(trace)
    yield from step_order_hypotheses(trace)
    yield from joined_token_hypotheses(trace)
    yield from exchanged_factor_hypotheses(trace)
    yield from branch_order_hypotheses(trace)
    yield from loop_operation_hypotheses(trace)


def readings_of_weights(prepared: Prepared, trace: Trace, entries: WeightMap) -> Iterator[Hypothesis]:
    """Yield every known misreading of one of these entries of the weight map, and the exchanges of two.

    Args:
        prepared: what was compared.
        trace: of the reference.
        entries: of the pair's map.
    """
    yield from weight_hypotheses(_mapped(prepared, trace, entries))


def _mapped(prepared: Prepared, trace: Trace, entries: WeightMap, unused: Container[str] = ()) -> Mapped:
    shapes = parameter_shapes(prepared.reference)
    candidate_shapes = {name: tuple(tensor.shape) for name, tensor in prepared.candidate_weights.items()}
    gated = frozenset(_of_gated_units(trace))
    return Mapped(entries, shapes, candidate_shapes, _heads(trace, shapes), unused, gated)


def function_hypotheses(prepared: Prepared, trace: Trace) -> Iterator[Hypothesis]:
    """Yield every mistake that changes what the reference computes."""
    yield from norm_hypotheses(trace, stored_dtype(prepared))
    yield from activation_hypotheses(trace)
    yield from attention_hypotheses(trace)
    yield from joined_stream_hypotheses(trace)
    yield from shifted_window_hypotheses(trace)
    yield from packed_hypotheses(trace)
    yield from rope_hypotheses(trace, stored_dtype(prepared))
    yield from norm_order_hypotheses(trace)
    yield from norm_group_hypotheses(trace)
    yield from residual_hypotheses(trace)
    yield from pre_norm_hypotheses(trace, prepared.reference)
    yield from branch_norm_hypotheses(trace, prepared.reference)
    yield from last_norm_hypotheses(trace, prepared.reference)
    yield from extra_norm_hypotheses(trace)
    yield from parallel_block_hypotheses(trace)
    yield from bias_hypotheses(trace)
    yield from lookup_hypotheses(trace)
    yield from routing_hypotheses(trace)
    yield from softcap_hypotheses(trace)
    yield from clamp_hypotheses(trace)
    yield from factor_hypotheses(trace)
    yield from loss_hypotheses(trace)
    yield from cross_entropy_hypotheses(trace)
    yield from label_shift_hypotheses(trace)
    yield from log_prob_hypotheses(trace)
    yield from clipping_hypotheses(trace)
    yield from optimizer_step_hypotheses(trace)
    yield from optimizer_moment_hypotheses(trace)
    yield from optimizer_hypotheses(trace, stored_dtype(prepared))
    yield from sequence_first_hypotheses(trace)


def subtle_hypotheses(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the mistakes that change what the reference computes so little that the norm of the error may not show it.

    Each is made with all operations of its kind at once, which are those that have subtle mistakes.
    """
    return tuple(one for one in subtle_hypotheses_anywhere(prepared, trace) if one.subtle and one.scope == "all")


def subtle_hypotheses_anywhere(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the subtle mistakes, also made with some of the operations alone or with other values of
    their constants.
    """
    candidates = (
        *norm_hypotheses(trace, stored_dtype(prepared)),
        *activation_hypotheses(trace),
        *rope_hypotheses(trace, stored_dtype(prepared)),
        *optimizer_step_hypotheses(trace),
        *softmax_scale_hypotheses(trace),
        *routing_hypotheses(trace),
    )
    constants = {one.title for one in candidates if one.subtle and one.tuned is not None}
    return tuple(one for one in candidates if one.subtle or (one.tuned is not None and one.title in constants))


def calls_of(prepared: Prepared) -> Calls:
    """Record the calls of another forward pass of the reference in FP64, which repeats golden's."""
    prepared.reference.double()
    calls: list[Calls] = []

    def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Only the module's own calls are recorded, not the copies that a pass makes of its inputs.
        with Calls.recorded(module, calls):
            return (prepared.call or nn.Module.__call__)(module, *args, **kwargs)

    with torch.no_grad(), in_fp64():
        outputs_of(prepared.reference, recorded, cast(prepared.inputs, torch.float64))
    return calls[0]


def stored_dtype(prepared: Prepared) -> torch.dtype:
    """Return the dtype in which the port holds weights and activations."""
    return next((tensor.dtype for tensor in prepared.candidate_weights.values()), torch.float32)


def _heads(trace: Trace, shapes: Mapping[str, tuple[int, ...]]) -> Heads | None:
    """Return the number of heads that the reference's attention shows; None if it has none."""
    for attention in attentions(trace):
        query, key, _ = heads_of(trace, attention)
        rows, columns = frozenset(_projections_before(trace)), frozenset(_projections_after(trace))
        if query.dim() == 4:
            count, groups = query.shape[1], distinct_heads(key)
        else:  # [batch * heads, seq, head_dim], of which the projections tell how many are heads
            counts = {shapes[name][1] // query.shape[-1] for name in columns if len(shapes[name]) == 2}
            counts = counts or {shapes[name][0] // query.shape[-1] for name in rows if len(shapes[name]) == 2}
            count = groups = counts.pop() if len(counts) == 1 else 0
            if query.dim() != 3 or count < 1 or len(query) % count:
                continue
        return Heads(count, groups, query.shape[-1], rows, columns)
    return None


def _of_gated_units(trace: Trace) -> Iterator[str]:
    """Yield the parameters of the linear layers that make gate and up."""
    for unit in gated_units(trace):
        for value in (unit.gate, unit.up):
            yield from filter(None, map(trace.parameter, ancestors(trace, value, _NEAR_A_GATE)))


def _projections_before(trace: Trace) -> Iterator[str]:
    """Yield the parameters of the linear layers that make queries, keys and values, their biases among them."""
    for attention in attentions(trace):
        for value in (attention.query, attention.key, attention.value):
            for call in map(trace.producer, ancestors(trace, value, _NEAR)):
                if call is not None and call.name in (*LINEAR, *_ADDS):
                    yield from filter(None, map(trace.parameter, call.inputs))
                if call is not None and call.name in LINEAR:
                    break


def _projections_after(trace: Trace) -> Iterator[str]:
    """Yield the parameters of the linear layers that read contexts."""
    for attention in attentions(trace):
        for call, _ in users(trace, attention.call.outputs[0], RESHAPES):
            if call.name in LINEAR:
                yield from filter(None, map(trace.parameter, call.inputs))
