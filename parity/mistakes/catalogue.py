"""List every known mistake that could have been made with a reference."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from parity.case.transfer import parameter_shapes
from parity.case.weight_map import WeightMap
from parity.mistakes import (
    activations,
    attention_mistakes,
    layers,
    lookups,
    losses,
    mixture,
    norm_places,
    norms,
    operations,
    optimizers,
    packed,
    residuals,
    rope,
    weight_maps,
)
from parity.mistakes.attention import attentions, distinct_heads, heads_of
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.weight_maps import Heads, Mapped
from parity.passes.nominal_clock import OutOfTime
from parity.passes.prepare import Prepared
from parity.te.devices import classify
from parity.trace.trace import LINEAR, RESHAPES, Trace, ancestors, users

_ADDS = ("add", "iadd")  # these add the bias where a linear layer is written out
_NEAR = 60  # a query's projection is looked for among this many of its ancestors
_NEAR_A_GATE = 16  # a gate's weight is looked for among this many of its ancestors


def hypotheses(
    prepared: Prepared, trace: Trace, unused: Container[str] = (), broken: list[Exception] | None = None
) -> Iterator[Hypothesis]:
    """Yield every known mistake, the likeliest subjects first.

    If a subject raises, for example on a tensor without dimensions, the other subjects still follow.

    Args:
        prepared: the pair that was compared.
        trace: the reference's trace.
        unused: names of TE's parameters that get no gradient though the reference's do.
        broken: collects such failures; if None, the first one is raised.
    """
    for subject in _subjects(prepared, trace, unused):
        try:
            yield from subject
        except Exception as error:
            if broken is None or isinstance(error, OutOfTime) or classify(error):
                raise
            broken.append(error)


def _subjects(prepared: Prepared, trace: Trace, unused: Container[str]) -> Iterator[Iterator[Hypothesis]]:
    """Yield the known mistakes of each subject."""
    mapped = _mapped(prepared, trace, prepared.weights, unused)
    never_came = layers.unused_parameters(prepared.weights, unused)
    yield layers.unused_branch_hypotheses(trace, never_came)
    yield layers.unused_norm_hypotheses(trace, never_came)
    yield layers.layer_order_hypotheses(mapped)
    yield weight_maps.weight_hypotheses(mapped)
    yield norms.norm_hypotheses(trace, prepared.stored_dtype)
    yield activations.activation_hypotheses(trace)
    yield attention_mistakes.attention_hypotheses(trace)
    yield attention_mistakes.joined_stream_hypotheses(trace)
    yield packed.shifted_window_hypotheses(trace)
    yield packed.packed_hypotheses(trace)
    yield rope.rope_hypotheses(trace, prepared.stored_dtype)
    yield rope.norm_order_hypotheses(trace)
    yield norms.norm_group_hypotheses(trace)
    yield residuals.residual_hypotheses(trace)
    yield norm_places.pre_norm_hypotheses(trace, prepared.reference)
    yield norm_places.branch_norm_hypotheses(trace, prepared.reference)
    yield norm_places.last_norm_hypotheses(trace, prepared.reference)
    yield norm_places.pooled_norm_hypotheses(trace, prepared.reference)
    yield norm_places.extra_norm_hypotheses(trace)
    yield layers.parallel_block_hypotheses(trace)
    yield activations.bias_hypotheses(trace)
    yield lookups.lookup_hypotheses(trace)
    yield mixture.routing_hypotheses(trace)
    yield attention_mistakes.softcap_hypotheses(trace)
    yield activations.clamp_hypotheses(trace)
    yield operations.factor_hypotheses(trace)
    yield losses.loss_hypotheses(trace)
    yield losses.cross_entropy_hypotheses(trace)
    yield losses.label_shift_hypotheses(trace)
    yield losses.log_prob_hypotheses(trace)
    yield optimizers.clipping_hypotheses(trace)
    yield optimizers.optimizer_step_hypotheses(trace)
    yield optimizers.optimizer_moment_hypotheses(trace)
    yield optimizers.optimizer_hypotheses(trace, prepared.stored_dtype)
    yield attention_mistakes.sequence_first_hypotheses(trace)
    yield weight_maps.repeated_weight_hypotheses(mapped)
    yield residuals.branch_factor_hypotheses(trace)
    yield operations.operation_hypotheses(trace)
    yield operations.scaled_linear_hypotheses(trace)
    yield operations.extra_activation_hypotheses(trace)
    yield layers.step_order_hypotheses(trace)
    yield operations.joined_token_hypotheses(trace)
    yield operations.exchanged_factor_hypotheses(trace)
    yield residuals.branch_order_hypotheses(trace)
    yield operations.loop_operation_hypotheses(trace)


def readings_of_weights(prepared: Prepared, trace: Trace, entries: WeightMap) -> Iterator[Hypothesis]:
    """Yield every known misreading of one of these entries of the weight map, and every exchange of two.

    Args:
        prepared: the pair that was compared.
        trace: the reference's trace.
        entries: some of the pair's weight map.
    """
    yield from weight_maps.weight_hypotheses(_mapped(prepared, trace, entries))


def _mapped(prepared: Prepared, trace: Trace, entries: WeightMap, unused: Container[str] = ()) -> Mapped:
    shapes = parameter_shapes(prepared.reference)
    candidate_shapes = {name: tuple(tensor.shape) for name, tensor in prepared.candidate_weights.items()}
    made = [value for unit in activations.gated_units(trace) for value in (unit.gate, unit.up)]
    before = (trace.parameter(x) for value in made for x in ancestors(trace, value, _NEAR_A_GATE))
    gated = frozenset(filter(None, before))
    return Mapped(entries, shapes, candidate_shapes, _heads(trace, shapes), unused, gated)


def _heads(trace: Trace, shapes: Mapping[str, tuple[int, ...]]) -> Heads | None:
    """Return the number of heads of the reference's attention; None if it has no attention."""
    for attention in attentions(trace):
        query, key, _ = heads_of(trace, attention)
        rows, columns = frozenset(_projections_before(trace)), frozenset(_projections_after(trace))
        if query.dim() == 4:
            count, groups = query.shape[1], distinct_heads(key)
        else:  # [batch * heads, seq, head_dim]: the projections' shapes tell how many heads there are
            counts = {shapes[name][1] // query.shape[-1] for name in columns if len(shapes[name]) == 2}
            counts = counts or {shapes[name][0] // query.shape[-1] for name in rows if len(shapes[name]) == 2}
            count = groups = counts.pop() if len(counts) == 1 else 0
            if query.dim() != 3 or count < 1 or len(query) % count:
                continue
        return Heads(count, groups, query.shape[-1], rows, columns)
    return None


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
