"""The tensors that rules of comparison judge: of a candidate, of its golden reference, of low-precision PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from parity import passes
from parity.case import Case
from parity.cast import cast, cast_module
from parity.declaring.validate import CheckedSize
from parity.execute import outputs_of, run
from parity.precision import Precision
from parity.prepare import Prepared
from parity.result import PROBED, Kind
from parity.te import Kernels

# By ``output``, ``probed output`` or ``d up_proj.weight``.
Tensors = dict[str, Tensor]


def candidate(
    case: Case, checked: CheckedSize, prepared: Prepared, precision: Precision, seed: int, kernels: Kernels
) -> Tensors:
    """The candidate's, in the reference's layout and in the dtypes that it returns."""
    tensors, _ = passes.run_candidate(case, checked, prepared, precision, seed, kernels)
    return {
        _label(*key): tensor.to(precision.dtype) if key[0] == "weight gradient" else tensor
        for key, tensor in tensors.items()
    }


def golden(prepared: Prepared) -> Tensors:
    """The reference's, in FP64."""
    return _labelled(passes.golden_tensors(prepared))


def low_precision(prepared: Prepared, dtype: torch.dtype) -> Tensors:
    """The reference's in a dtype, as plain PyTorch computes it; for FP32 without TF32, which is PyTorch's default."""
    module = cast_module(copy.deepcopy(prepared.reference), dtype)
    ran = run(
        module,
        prepared.call,
        cast(prepared.inputs, dtype),
        prepared.input_names,
        lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
    )
    tensors = _labelled(passes.tensors_of(ran))
    if prepared.probed:
        with torch.no_grad():
            outputs = outputs_of(module, prepared.probe_call, cast(prepared.probe, dtype))
        tensors |= {_label(PROBED, name): output for name, output in outputs.items()}
    return tensors


def difference(one: Tensors, other: Tensors) -> Tensors:
    """``one - other`` in FP64, without the tensors in which it is not finite."""
    differences = {name: tensor.double() - other[name].double() for name, tensor in one.items()}
    return {name: tensor for name, tensor in differences.items() if bool(tensor.isfinite().all())}


def is_output(label: str) -> bool:
    """Whether a tensor is an output, probed or not; the others are gradients."""
    return not label.startswith("d ")


def _labelled(tensors: passes.Tensors) -> Tensors:
    return {_label(*key): tensor for key, tensor in tensors.items()}


def _label(kind: Kind, name: str) -> str:
    if kind == PROBED:
        return f"probed {name}"
    return name if kind == "output" else f"d {name}"
