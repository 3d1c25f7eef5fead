"""The tensors that rules of comparison judge: of a candidate, of its golden reference, of low-precision PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from parity import weights
from parity.case import Case
from parity.execute import Pass, run
from parity.precision import Precision
from parity.prepare import Prepared, build, cast
from parity.te import Kernels
from parity.validate import CheckedSize

Tensors = dict[str, Tensor]


def candidate(
    case: Case, checked: CheckedSize, prepared: Prepared, precision: Precision, seed: int, kernels: Kernels
) -> Tensors:
    """The candidate's outputs and gradients in the reference's layout, in the dtypes that it returns."""
    pair = build(case, checked, seed, kernels)
    module = pair.candidate.to(precision.dtype)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in prepared.candidate_weights.items():
            parameters[name].copy_(tensor)
    for _ in range(1 + precision.warmup_passes):
        ran = run(
            module,
            pair.call_candidate,
            prepared.inputs,
            prepared.input_names,
            lambda outputs: _fitting(prepared.cotangents, outputs),
            forward_context=precision.autocast(kernels),
        )
    gradients = {
        name: ran.weight_gradients.get(name, torch.zeros_like(parameter)) for name, parameter in parameters.items()
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in prepared.reference.named_parameters()}
    in_reference_layout = weights.gradients_to_reference(pair.weights, gradients, shapes)
    return _named(dataclasses.replace(ran, weight_gradients=in_reference_layout))


def golden(prepared: Prepared) -> Tensors:
    """The reference's, in FP64."""
    return _named(prepared.golden)


def low_precision(prepared: Prepared, dtype: torch.dtype) -> Tensors:
    """The reference's in a dtype, as plain PyTorch computes it; for FP32 without TF32, which is PyTorch's default."""
    module = copy.deepcopy(prepared.reference).to(dtype)
    ran = run(
        module,
        prepared.call,
        cast(prepared.inputs, dtype),
        prepared.input_names,
        lambda outputs: _fitting(prepared.cotangents, outputs),
    )
    return _named(ran)


def difference(one: Tensors, other: Tensors) -> Tensors:
    """``one - other`` in FP64, without the tensors in which it is not finite."""
    differences = {name: tensor.double() - other[name].double() for name, tensor in one.items()}
    return {name: tensor for name, tensor in differences.items() if bool(tensor.isfinite().all())}


def is_output(name: str) -> bool:
    """Whether a tensor is an output; the others are gradients, ``d`` and the name of what they are with respect to."""
    return not name.startswith("d ")


def _fitting(cotangents: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Tensors:
    return {name: cotangents[name].to(output.dtype) for name, output in outputs.items()}


def _named(ran: Pass) -> Tensors:
    gradients = {**ran.input_gradients, **ran.weight_gradients}
    return {**ran.outputs, **{f"d {name}": tensor for name, tensor in gradients.items()}}
