"""Try hypotheses: compute the reference's outputs and gradients as if some of them were true at once.

Each pass advances the comparison's clock, by which a search ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.mistakes.hypothesis import Hypothesis, ModuleCall, together
from parity.numerics.freedom import UNFUSED, Freedom
from parity.numerics.golden import attention_in_blocks, in_fp64
from parity.passes.all_passes import Tensors, tensors_of, under_model
from parity.passes.nominal_clock import OutOfTime
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, cast, cast_module
from parity.te import Precision
from parity.trace.calls import Misfit, edited
from parity.trace.trace import Edit

# What each takes, in forward passes in FP64: a pass in FP32, a backward pass, and any pass under a rounding model.
_IN_FP32 = 0.5
BACKWARD = 2.0
_ROUNDED = 2.0


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


def tensors_under(
    prepared: Prepared,
    hypotheses: Sequence[Hypothesis],
    precision: Precision | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    freedom: Freedom = UNFUSED,
    only_if: Callable[[dict[str, Tensor]], bool] = lambda outputs: True,
) -> Tensors | None:
    """Return the reference's outputs and gradients if the hypotheses were true; None if they cannot be computed.

    Args:
        prepared: what was compared.
        hypotheses: that hold at once.
        precision: whose rounding model to compute under, in FP32; None computes in FP64.
        cotangents: the gradient with respect to each output; None for the comparison's own.
        freedom: of the kernels that the rounding model stands for.
        only_if: tells from the outputs whether gradients are of interest; else None is returned.
    """
    dtype = torch.float64 if precision is None else torch.float32
    _cast_if_other(prepared.reference, dtype)
    given = prepared.cotangents if cotangents is None else cotangents
    model = under_model(prepared, precision.rounding, freedom) if precision else in_fp64()
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
        change = edited(module, edits) if edits else nullcontext()
        with _holding(module, _read(module, hypotheses)), change:
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


def _read(module: nn.Module, hypotheses: Sequence[Hypothesis]) -> dict[str, Tensor]:
    """Return the parameters that the hypotheses change."""
    if all(hypothesis.read is None for hypothesis in hypotheses):
        return {}
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    others: dict[str, Tensor] = {}
    for hypothesis in hypotheses:
        if hypothesis.read is not None:
            others.update(hypothesis.read(parameters | others))
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
