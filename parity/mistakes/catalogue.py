"""List every known mistake that could have been made with a reference, and compute it as if some were made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.case import Rng
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
from parity.mistakes.hypothesis import Hypothesis, ModuleCall, together
from parity.mistakes.weight_maps import Heads, Mapped
from parity.numerics.freedom import UNFUSED, Choices, Freedom, Kinks
from parity.numerics.golden import attention_in_blocks, in_blocks, in_fp64
from parity.passes.all_passes import Tensors, tensors_of, under_model
from parity.passes.draws import ScaledLookups, is_lookup
from parity.passes.nominal_clock import OutOfTime
from parity.passes.one_pass import named_outputs, outputs_of, run
from parity.passes.prepare import Calls, Prepared, cast, cast_module
from parity.te.devices import classify
from parity.trace.calls import Misfit, edited, tracing
from parity.trace.replay import Change, Replay
from parity.trace.trace import LINEAR, RESHAPES, Edit, Site, Trace, ancestors, users
from parity.trace.whose import users_line

if TYPE_CHECKING:
    from parity.te import Precision

_ADDS = ("add", "iadd")  # a bias, where the linear layer is written out
_NEAR = 60  # of a query's ancestors, among which its projection is
_NEAR_A_GATE = 16  # of a gate's ancestors, among which its weight is


def hypotheses(
    prepared: Prepared, trace: Trace, unused: Container[str] = (), broken: list[Exception] | None = None
) -> Iterator[Hypothesis]:
    """Yield every known mistake, the likeliest subjects first.

    A subject on which parity itself fails, as on a tensor without dimensions, hides no other.

    Args:
        prepared: what was compared.
        trace: of the reference.
        unused: TE's parameters without a gradient, which the reference gives one.
        broken: gets what subjects raise; None if the first of these is to be raised.
    """
    for subject in _subjects(prepared, trace, unused):
        try:
            yield from subject
        except Exception as error:
            if broken is None or isinstance(error, OutOfTime) or not is_our_own(error):
                raise
            broken.append(error)


def is_our_own(error: Exception) -> bool:
    """Return whether parity itself failed: neither the pair's code nor a broken device raised this."""
    return not (classify(error) or users_line(error))


def _subjects(prepared: Prepared, trace: Trace, unused: Container[str]) -> Iterator[Iterator[Hypothesis]]:
    """Yield the known mistakes of each subject."""
    mapped = _mapped(prepared, trace, prepared.weights, unused)
    never_came = layers.unused_parameters(prepared.weights, unused)
    yield layers.unused_branch_hypotheses(trace, never_came)
    yield layers.unused_norm_hypotheses(trace, never_came)
    yield layers.layer_order_hypotheses(mapped)
    yield weight_maps.weight_hypotheses(mapped)
    yield norms.norm_hypotheses(trace, stored_dtype(prepared))
    yield activations.activation_hypotheses(trace)
    yield attention_mistakes.attention_hypotheses(trace)
    yield attention_mistakes.joined_stream_hypotheses(trace)
    yield packed.shifted_window_hypotheses(trace)
    yield packed.packed_hypotheses(trace)
    yield rope.rope_hypotheses(trace, stored_dtype(prepared))
    yield rope.norm_order_hypotheses(trace)
    yield norms.norm_group_hypotheses(trace)
    yield residuals.residual_hypotheses(trace)
    yield norm_places.pre_norm_hypotheses(trace, prepared.reference)
    yield norm_places.branch_norm_hypotheses(trace, prepared.reference)
    yield norm_places.last_norm_hypotheses(trace, prepared.reference)
    yield norm_places.pooled_norm_hypotheses(trace)
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
    yield optimizers.optimizer_hypotheses(trace, stored_dtype(prepared))
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
    """Yield every known misreading of one of these entries of the weight map, and the exchanges of two.

    Args:
        prepared: what was compared.
        trace: of the reference.
        entries: of the pair's map.
    """
    yield from weight_maps.weight_hypotheses(_mapped(prepared, trace, entries))


def _mapped(prepared: Prepared, trace: Trace, entries: WeightMap, unused: Container[str] = ()) -> Mapped:
    shapes = parameter_shapes(prepared.reference)
    candidate_shapes = {name: tuple(tensor.shape) for name, tensor in prepared.candidate_weights.items()}
    made = [value for unit in activations.gated_units(trace) for value in (unit.gate, unit.up)]
    before = (trace.parameter(x) for value in made for x in ancestors(trace, value, _NEAR_A_GATE))
    gated = frozenset(filter(None, before))
    return Mapped(entries, shapes, candidate_shapes, _heads(trace, shapes), unused, gated)


def subtle_hypotheses(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the mistakes that change what the reference computes so little that the norm of the error may not show it.

    Each is made with all operations of its kind at once, which are those that have subtle mistakes.
    """
    return tuple(one for one in subtle_hypotheses_anywhere(prepared, trace) if one.subtle and one.scope == "all")


def subtle_hypotheses_anywhere(prepared: Prepared, trace: Trace) -> tuple[Hypothesis, ...]:
    """Return the subtle mistakes, also those made with some of the operations alone or with other constants."""
    candidates = (
        *norms.norm_hypotheses(trace, stored_dtype(prepared)),
        *activations.activation_hypotheses(trace),
        *rope.rope_hypotheses(trace, stored_dtype(prepared)),
        *optimizers.optimizer_step_hypotheses(trace),
        *attention_mistakes.softmax_scale_hypotheses(trace),
        *mixture.routing_hypotheses(trace),
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


# The reference's outputs and gradients as if some hypotheses were true at once.


# What each takes, in forward passes in FP64: a pass in FP32, a backward pass, and any pass under a rounding model.
_IN_FP32 = 0.5
BACKWARD = 2.0
_ROUNDED = 2.0
_MOVED = 1e-3  # by about this share of it each element of a parameter is moved, to see whether a replay is faithful


def outputs_under(
    prepared: Prepared, hypotheses: Sequence[Hypothesis], dtype: torch.dtype, rows: slice | None = None
) -> dict[str, Tensor] | None:
    """Return the reference's outputs if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: what was compared.
        hypotheses: that hold at once.
        dtype: in which to compute.
        rows: of each input's first dimension; None for all.
    """
    _cast_if_other(prepared.reference, dtype)
    inputs = cast(prepared.inputs, dtype)
    prepared.clock.advance(1.0, _share(inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32))
    if rows is not None:
        inputs = tree_map_only(Tensor, lambda x: x[rows], inputs)
    try:
        with torch.no_grad(), in_fp64() if dtype is torch.float64 else attention_in_blocks():
            return outputs_of(prepared.reference, _call_under(prepared, hypotheses), inputs)
    except Exception:  # the user's code may raise anything, given what it does not expect
        return None


def differentiable_outputs(prepared: Prepared, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
    """Return all rows of the outputs as ``outputs_under``, in FP64, with the graph that autograd needs."""
    _cast_if_other(prepared.reference, torch.float64)
    inputs = cast(prepared.inputs, torch.float64)
    prepared.clock.advance(1.0)
    try:
        with torch.enable_grad(), in_fp64():
            return outputs_of(prepared.reference, _call_under(prepared, hypotheses), inputs)
    except Exception:  # as above
        return None


class Outputs:
    """The reference's outputs under hypotheses, of which only what these change is computed again.

    Where that may not be what the reference computes, all of it is.
    """

    def __init__(
        self, prepared: Prepared, dtype: torch.dtype, rows: slice | None = None, differentiable: bool = False
    ) -> None:
        """Record a pass.

        Args:
            prepared, dtype, rows: as for ``outputs_under``.
            differentiable: whether outputs come as from ``differentiable_outputs``, with a graph back to what the
                hypotheses change; then they are of all rows and in FP64.
        """
        self._given = prepared, dtype, rows
        self._differentiable = differentiable
        self._share = _share(prepared.inputs, rows) * (1.0 if dtype is torch.float64 else _IN_FP32)
        self._parameters: dict[str, Tensor] = {}
        self._scaled: set[Site] = set()  # calls that look up rows of tables, where these are scaled
        self._last: tuple[Hypothesis, ...] = ()
        self._beside: tuple[Hypothesis | None, Change | None] = None, None  # one that is tried with many others
        recorded = self._recorded()
        self._replay = recorded if recorded is not None and self._is_faithful(recorded) else None

    def under(self, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor] | None:
        """Return all outputs; None if they cannot be computed."""
        if self._replay is not None and all(one.around is None for one in hypotheses):
            try:
                return self._replayed(self._replay, hypotheses)
            except OutOfTime:
                raise
            except Exception:  # as in ``outputs_under``, which may raise it again
                pass
        if self._differentiable:
            return differentiable_outputs(self._given[0], hypotheses)
        prepared, dtype, rows = self._given
        return outputs_under(prepared, hypotheses, dtype, rows)

    def _replayed(self, replay: Replay, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
        prepared, dtype, _ = self._given
        prepared.clock.check()
        if any(edit.site in self._scaled for one in hypotheses for edit in one.edits):
            raise Misfit("rows are scaled after what a lookup returns is edited")
        before = replay.made
        try:
            exactly = in_fp64() if dtype is torch.float64 else nullcontext()
            with torch.set_grad_enabled(self._differentiable), exactly:
                repeated = [one for one in hypotheses if any(one is other for other in self._last)]
                self._last = tuple(hypotheses)
                if len(hypotheses) > 1 and len(repeated) == 1 and repeated[0] is not self._beside[0]:
                    self._beside = repeated[0], self._changed(replay, repeated, None)
                return replay.outputs(self._changed(replay, hypotheses, self._beside[1]))
        finally:
            prepared.clock.advance((replay.made - before) / max(replay.calls, 1), self._share)

    def _changed(self, replay: Replay, hypotheses: Sequence[Hypothesis], beside: Change | None) -> Change:
        return replay.changed(_all_edits(hypotheses), _read(self._parameters, hypotheses), beside)

    def _recorded(self) -> Replay | None:
        """Record a pass; return None if it cannot be made."""
        prepared, dtype, rows = self._given
        found: list[tuple[Trace, list[str]]] = []

        def around(call: ModuleCall) -> ModuleCall:
            def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with tracing(module) as trace:
                    returned = call(module, *args, **kwargs)
                    outputs = named_outputs(returned)
                    for x in outputs.values():
                        x.clone()  # which tells the outputs among all values
                found.append((trace, list(outputs)))
                return returned

            return recorded

        if outputs_under(prepared, (Hypothesis("", "", "", around=around),), dtype, rows) is None:
            return None
        ((trace, names),) = found
        for number in trace.buffers:  # a call may write to them, as that of a BatchNorm does
            trace.tensors[number] = trace.tensors[number].clone()
        self._parameters = {name: x.detach() for name, x in prepared.reference.named_parameters()}
        returned = [trace.calls.pop().inputs[0] for _ in names]
        if dtype is not torch.float64:  # a mode around all calls would take its time at each
            trace.calls = [replace(call, function=in_blocks(call.function)) for call in trace.calls]
        if prepared.scales_lookups:
            scaled = ScaledLookups(prepared.dtype, prepared.evaluation)
            self._scaled = {call.site for call in trace.calls if is_lookup(call.function)}
            trace.calls = [
                replace(call, function=scaled.around(call.function)) if call.site in self._scaled else call
                for call in trace.calls
            ]
        return Replay(trace, dict(zip(reversed(names), returned, strict=True)))

    def _is_faithful(self, replay: Replay) -> bool:
        """Return whether a replay computes what the reference does with parameters that all are a little different."""
        prepared, dtype, rows = self._given
        rng = Rng(0, "replay")
        moved = {
            name: x * (1.0 + _MOVED * rng.normal(*x.shape).to(x))
            for name, x in self._parameters.items()
            if x.is_floating_point()
        }
        under = (Hypothesis("", "", "", read=lambda parameters: moved),)
        right = outputs_under(prepared, under, dtype, rows) if moved else None
        try:
            replayed = self._replayed(replay, under)
        except OutOfTime:
            raise
        except Exception:
            return False
        return right is not None and all(torch.allclose(replayed[name], x, equal_nan=True) for name, x in right.items())


def tensors_under(
    prepared: Prepared,
    hypotheses: Sequence[Hypothesis],
    precision: Precision | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    freedom: Freedom = UNFUSED,
    only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
    kinks: Kinks | None = None,
    choices: Choices | None = None,
) -> Tensors | None:
    """Return the reference's outputs and gradients if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: what was compared.
        hypotheses: that hold at once.
        precision: whose rounding model to compute under, in FP32; None computes in FP64.
        cotangents: the gradient with respect to each output; None for the comparison's own.
        freedom: of the kernels that the rounding model stands for.
        only_if: tells from the outputs whether gradients are of interest; else None is returned.
        kinks, choices: of the rounding model.
    """
    dtype = torch.float64 if precision is None else torch.float32
    _cast_if_other(prepared.reference, dtype)
    given = prepared.cotangents if cotangents is None else cotangents
    model = under_model(prepared, precision.rounding, freedom, kinks, choices) if precision else in_fp64()
    passes = _ROUNDED if precision else 1.0
    prepared.clock.advance(passes)

    def backward(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not only_if({name: output.detach() for name, output in outputs.items()}):
            raise Misfit("its outputs are others")
        prepared.clock.advance(0.0 if prepared.evaluation else BACKWARD * passes)
        return {name: given[name].to(output.dtype) for name, output in outputs.items()}

    try:
        with model as phase:
            ran = run(
                prepared.reference,
                _call_under(prepared, hypotheses),
                cast(prepared.inputs, dtype),
                prepared.input_names,
                backward,
                before_backward=phase.begin_backward if phase else lambda: None,
                differentiated=not prepared.evaluation,
            )
    except OutOfTime:  # it says nothing about the hypotheses
        raise
    except Exception:
        return None
    tensors = tensors_of(ran)
    if precision is not None:
        store, wide = precision.rounding.store_part, prepared.wide
        tensors = {key: tensor if key in wide else store(tensor) for key, tensor in tensors.items()}
    return tensors


def _cast_if_other(module: nn.Module, dtype: torch.dtype) -> None:
    tensors = chain(module.parameters(), module.buffers())
    if any(tensor.is_floating_point() and tensor.dtype is not dtype for tensor in tensors):
        cast_module(module, dtype)


def _share(inputs: Any, rows: slice | None) -> float:
    """Return what share of the batch some rows are."""
    batches = [x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    return 1.0 if rows is None or not batches else len(range(*rows.indices(batches[0]))) / max(batches[0], 1)


def _call_under(prepared: Prepared, hypotheses: Sequence[Hypothesis]) -> ModuleCall:
    """Return how to call the reference so that it computes what the hypotheses say."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edits = _all_edits(hypotheses)
        parameters = dict(module.named_parameters()) if any(one.read for one in hypotheses) else {}
        change = edited(module, edits) if edits else nullcontext()
        with _holding(module, _read(parameters, hypotheses)), change:
            return prepared.call(module, *args, **kwargs) if prepared.call else module(*args, **kwargs)

    under: ModuleCall = call
    for hypothesis in hypotheses:
        if hypothesis.around is not None:
            under = hypothesis.around(under)
    return under


def _all_edits(hypotheses: Sequence[Hypothesis]) -> tuple[Edit, ...]:
    """Return the edits of all hypotheses.

    Raises:
        Misfit: if two change the same thing.
    """
    edits: tuple[Edit, ...] = ()
    for hypothesis in hypotheses:
        both = together(edits, hypothesis.edits)
        if both is None:
            raise Misfit(f"{hypothesis.name} changes what another mistake does")
        edits = both
    return edits


def _read(parameters: Mapping[str, Tensor], hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
    """Return the parameters that the hypotheses change."""
    others: dict[str, Tensor] = {}
    for hypothesis in hypotheses:
        if hypothesis.read is not None:
            others.update(hypothesis.read({**parameters, **others}))
    return others


@contextmanager
def _holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context, the module computes with these tensors for its parameters, wherever they are tied."""
    if not tensors:
        yield
        return
    places: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for submodule in module.modules():
        for leaf, parameter in submodule._parameters.items():
            places[id(parameter)].append((submodule._parameters, leaf))
    parameters = dict(module.named_parameters())
    try:
        for name, tensor in tensors.items():
            for holder, leaf in places[id(parameters[name])]:
                holder[leaf] = tensor
        yield
    finally:
        for name in tensors:
            for holder, leaf in places[id(parameters[name])]:
                holder[leaf] = parameters[name]
