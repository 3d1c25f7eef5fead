"""What one tensor loses when a recipe quantizes it, by its role in a linear layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.lab.studies.settings import DISTRIBUTIONS, gpu_with
from parity.numerics.errors import measure as errors_of
from parity.numerics.formats import OperandPart
from parity.te import Kernels
from parity.te.precision import PRECISIONS

# Where a TE module keeps the quantizer of each tensor.
_QUANTIZERS: Mapping[str, tuple[str, int]] = {
    "inputs": ("scaling_fwd", 0),
    "weights": ("scaling_fwd", 1),
    "gradients": ("scaling_bwd", 0),
}
ROLES: tuple[OperandPart, ...] = ("inputs", "weights", "gradients")
BODY = 0.99  # the share of elements, the smallest, that outliers are not among


@dataclass(frozen=True)
class TensorRun:
    """One tensor under one recipe.

    Attributes:
        distribution: name of ``DISTRIBUTIONS``.
        role: of ``ROLES``.
        recipe: name of a precision that has a TE recipe.
        size: the tensor is ``[size, size]``.
        earlier: passes before, from which delayed scaling has its scale: on other draws, but on the same weights.
        seed: of the values.
    """

    distribution: str
    role: OperandPart
    recipe: str
    size: int
    earlier: int
    seed: int


@dataclass(frozen=True)
class TensorLoss:
    """Signal to quantization noise ratios, in decibels.

    Attributes:
        te: of TE's quantized tensor.
        model: of the rounding model's, whose per-tensor scales are those of the tensor itself.
        te_body: of TE's over the ``BODY`` smallest elements.
        gpu: that TE ran on or was emulated.
    """

    te: float
    model: float
    te_body: float
    gpu: str


def measure(run: TensorRun, kernels: Kernels) -> TensorLoss:
    """Quantize a tensor with TE's own quantizer and with the rounding model's format."""
    precision = PRECISIONS[run.recipe]
    rng, draw = Rng(run.seed, f"{run.role} {run.distribution}"), DISTRIBUTIONS[run.distribution]
    values = draw(rng, run.size, run.size).to(kernels.device, precision.dtype)
    to_format = precision.rounding.operand_format(run.role)
    assert to_format is not None, "recipes have a format for each operand"
    with gpu_with(precision, kernels) as gpu:
        quantized = _quantized(run, values, rng, kernels)
    modelled = to_format(values.float(), 1)
    is_body = values.abs() <= values.abs().flatten().kthvalue(math.ceil(BODY * values.numel())).values
    return TensorLoss(
        te=_sqnr(quantized, values),
        model=_sqnr(modelled, values),
        te_body=_sqnr(quantized[is_body], values[is_body]),
        gpu=gpu,
    )


def _quantized(run: TensorRun, values: Tensor, rng: Rng, kernels: Kernels) -> Tensor:
    """The values after TE's quantizer in a linear layer that has seen earlier draws in their place."""
    precision, draw = PRECISIONS[run.recipe], DISTRIBUTIONS[run.distribution]
    linear = kernels.te.Linear(run.size, run.size, bias=False, params_dtype=precision.dtype, device=kernels.device.type)
    for _ in range(run.earlier):
        drawn = {role: rng.normal(run.size, run.size) for role in ROLES if role != run.role}
        drawn[run.role] = values if run.role == "weights" else draw(rng, run.size, run.size)
        tensors = {role: tensor.to(kernels.device, precision.dtype) for role, tensor in drawn.items()}
        with torch.no_grad():
            linear.weight.copy_(tensors["weights"])
        with precision.autocast(kernels):
            y = linear(tensors["inputs"].requires_grad_())
        y.backward(tensors["gradients"])
    meta, index = _QUANTIZERS[run.role]
    quantizer = linear.quantizers[meta][index]
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(values).dequantize()


def _sqnr(x: Tensor, golden: Tensor) -> float:
    return errors_of(x, golden.double(), golden.dtype).sqnr_db
