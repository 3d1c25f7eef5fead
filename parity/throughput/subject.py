"""A workload's modules, holding the same rounded numbers, with the inputs that its passes take in turn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity import errors, execute, weights
from parity.build import build, rounded_inputs, share_rounded_weights, vary_constants
from parity.case import Case, Pair
from parity.cast import cast
from parity.declaring.validate import CheckedSize
from parity.golden.in_fp64 import in_fp64
from parity.inputs import Rng
from parity.one_line import one_line
from parity.te import Kernels
from parity.te_state.quantized_parameters import moved
from parity.throughput.clock import Passes
from parity.throughput.fused_attention import with_fused_attention

_SEED = 0
_SETS_ON_CPU = 4
_CACHES_FILLED = 2  # how often the inputs together fill the GPU's last cache


@dataclass(frozen=True, eq=False)
class Subject:
    """A workload in one dtype.

    Attributes:
        pair: its reference holds the rounded weights, in FP64 until ``plain`` casts it.
        dtype: of parameters, inputs and gradients.
        inputs: as the pair returns them, in the dtype, on the device; passes take them in turn.
        candidate_weights: of the TE module, by name.
        golden: the reference's outputs in FP64 for the first inputs, by name.
        why_no_golden: why there are none, or empty.
    """

    pair: Pair
    dtype: torch.dtype
    inputs: list[Any]
    candidate_weights: dict[str, Tensor]
    golden: dict[str, Tensor]
    why_no_golden: str = ""

    def plain(self) -> nn.Module:
        """The reference in the dtype, in which its weights are exact, from now on with PyTorch's fused attention."""
        return with_fused_attention(self.pair.reference).to(self.dtype)

    def worst_error(self, outputs: Sequence[Tensor]) -> float:
        """The largest relative L2 error of any output against golden; NaN or infinite where an output is.

        Raises:
            ValueError: if there are not as many outputs, or not of the same shapes.
        """
        shapes, golden_shapes = ([list(x.shape) for x in tensors] for tensors in (outputs, self.golden.values()))
        if shapes != golden_shapes:
            raise ValueError(f"it returns {shapes} where the plain module returns {golden_shapes}")
        return max(
            errors.relative_l2(float((output.detach().double() - golden).norm()), float(golden.norm()))
            for output, golden in zip(outputs, self.golden.values(), strict=True)
        )


def subject(case: Case, checked: CheckedSize, dtype: torch.dtype, kernels: Kernels) -> Subject:
    """Build the workload, round its weights and inputs to the dtype, and compute golden, long attention in blocks.

    Golden may not fit into memory, or the reference may not run in FP64: then only the errors are missing.
    """
    pair = built(case, checked, kernels)
    pair.reference.double()
    if case.vary_constants:
        vary_constants(pair.reference, Rng(_SEED, "weights"))
    candidate_weights = share_rounded_weights(pair, dtype)
    pair = dataclasses.replace(pair, candidate=nn.Identity())  # its memory is needed
    first = rounded_inputs(pair, checked, dtype, _SEED, kernels.device)
    rest = [
        rounded_inputs(pair, checked, dtype, _SEED + i, kernels.device) for i in range(1, _sets(first, kernels.device))
    ]
    golden: dict[str, Tensor] = {}
    why = ""
    try:
        with torch.no_grad(), in_fp64():
            golden = execute.outputs_of(pair.reference, pair.call_reference, cast(first, torch.float64))
    except (RuntimeError, NotImplementedError) as error:
        why = f"the plain module in FP64: {one_line(error)}"
    return Subject(pair, dtype, [first, *rest], candidate_weights, golden, why)


def built(case: Case, checked: CheckedSize, kernels: Kernels) -> Pair:
    """The pair on the kernels' device, where it is initialised much faster than on the CPU if its factory lets it."""
    try:
        with kernels.device:
            return build(case, checked, _SEED, kernels)
    except RuntimeError:  # a factory may draw from a generator of the CPU's
        return build(case, checked, _SEED, kernels)


def candidate(case: Case, checked: CheckedSize, subject: Subject, kernels: Kernels) -> Pair:
    """A new pair whose candidate holds the subject's weights, in its dtype; TE's modules keep state between passes."""
    pair = dataclasses.replace(built(case, checked, kernels), reference=nn.Identity())
    weights.fill(moved(pair.candidate, dtype=subject.dtype), subject.candidate_weights)
    return pair


def passes(
    module: nn.Module, call: Callable[..., Any] | None, inputs: list[Any], forward_context: Callable[[], Any]
) -> Passes:
    """Forward and backward passes over inputs in turn; all floating-point inputs get gradients, as inside a model.

    Args:
        module: in the inputs' dtype.
        call: as in ``parity.Pair``.
        inputs: one entry a pass, as a pair's ``inputs`` returns them.
        forward_context: makes the context of each forward pass.
    """
    leaves = [tree_map_only(Tensor, _leaf, entry) for entry in inputs]
    gradients: list[list[Tensor]] = []

    def clear() -> None:
        module.zero_grad(set_to_none=True)
        for leaf in tree_leaves(leaves):
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def forward(i: int) -> list[Tensor]:
        args, kwargs = execute.as_arguments(leaves[i % len(leaves)])
        with forward_context():
            returned = call(module, *args, **kwargs) if call else module(*args, **kwargs)
        return [leaf for leaf in execute.leaves_of(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def backward(outputs: list[Tensor], i: int) -> None:
        reached = [output for output in outputs if output.requires_grad]
        if not gradients:  # in the first warm-up pass
            gradients.extend([torch.randn_like(output) for output in reached] for _ in leaves)
        torch.autograd.backward(reached, gradients[i % len(leaves)])

    def rotating_bytes() -> int:
        return sum(gradient.nbytes for entry in gradients[1:] for gradient in entry)

    return Passes(clear, forward, backward, rotating_bytes)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _sets(inputs: Any, device: torch.device) -> int:
    """How many inputs rotate: on a GPU as many as its last cache cannot hold."""
    if device.type != "cuda":
        return _SETS_ON_CPU
    size = sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20))
    return max(2, 1 + math.ceil(_CACHES_FILLED * cache / max(1, size)))
