"""Whether rounding alone decides the numbers that differ: then no port can be judged on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.cast import cast
from parity.execute import outputs_of, run
from parity.golden.in_fp64 import in_fp64
from parity.inputs import Rng
from parity.passes import Tensors, tensors_of
from parity.prepare import Prepared
from parity.result import PROBED, Finding, TensorResult

# A kernel that computes in FP32 rounds at each of its steps, the inputs are perturbed once: by this many roundoffs.
# Measured on LayerNorms of constant rows (width 32 to 1024, values 0.3 to 1e4, TE 2.20.2 on emulated kernels), whose
# mean is rounded several times, one perturbation of 4 unit roundoffs explains every error.
ROUNDINGS = 8.0


def ill_conditioned(failed: Sequence[TensorResult], prepared: Prepared) -> Finding | None:
    """The finding that a change of the inputs by a few roundoffs of FP32 moves every failed tensor as far as its error.

    A row of equal numbers is an example: LayerNorm subtracts the mean and divides what rounding left by ``sqrt(eps)``.

    Args:
        failed: all tensors that failed.
        prepared: what was compared.
    """
    if not failed or not all(tensor.errors.finite for tensor in failed):
        return None
    changes = _changes(prepared)
    if any(tensor.errors.max_abs > changes[tensor.kind, tensor.name] for tensor in failed):
        return None
    worst = max(failed, key=lambda tensor: tensor.margin)
    change = changes[worst.kind, worst.name]
    return Finding(
        "PAR005",
        "ill-conditioned",
        f"{worst.label} is off by up to {worst.errors.max_abs:.2g}; but already in FP64, changing the inputs by "
        f"{ROUNDINGS:g} roundoffs of FP32 changes the reference's by up to {change:.2g}: rounding decides these "
        "numbers, whoever computes them, so give other inputs, such as rows that are not constant",
    )


def _changes(prepared: Prepared) -> dict[tuple[str, str], float]:
    """The largest change of each golden tensor when every input changes by some roundoffs of FP32, up or down."""
    prepared.reference.double()
    with in_fp64():
        ran = run(
            prepared.reference,
            prepared.call,
            _perturbed(prepared.inputs),
            prepared.input_names,
            lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
        )
    golden, perturbed = tensors_of(prepared.golden), tensors_of(ran)
    if prepared.probed:
        with torch.no_grad(), in_fp64():
            probed = outputs_of(prepared.reference, prepared.probe_call, _perturbed(prepared.probe))
        golden |= _as_probed(prepared.probed)
        perturbed |= _as_probed(probed)
    return {key: _largest(perturbed[key] - truth) for key, truth in golden.items()}


def _perturbed(inputs: Any) -> Any:
    """The inputs in FP64, each element of a floating-point one a little larger or smaller."""
    rng = Rng(0, "conditioning")
    step = ROUNDINGS * torch.finfo(torch.float32).eps / 2

    def perturb(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = rng.integers(*x.shape, high=2).to(x.device, x.dtype) * 2 - 1
        return x * (1 + step * signs)

    return tree_map_only(Tensor, perturb, cast(inputs, torch.float64))


def _as_probed(outputs: dict[str, Tensor]) -> Tensors:
    return {(PROBED, name): output for name, output in outputs.items()}


def _largest(change: Tensor) -> float:
    return change.abs().max().item() if change.numel() else 0.0
