"""Runs both modules to see how far the candidate's outputs are from the reference's under a weight map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.build import vary_constants
from parity.case import Pair, Size, draw_inputs
from parity.cast import cast
from parity.errors import measure
from parity.execute import outputs_of
from parity.golden.in_fp64 import in_fp64
from parity.inputs import Rng
from parity.precision import PRECISIONS
from parity.rounding.model import rounded
from parity.te import Kernels
from parity.te_state import caches
from parity.te_state.quantized_parameters import dequantized, moved
from parity.user_error import INTERRUPTS, UserError
from parity.watching.raised import first_paragraph, users_line
from parity.weights import transfer
from parity.weights.notation import WeightMap

FP32 = PRECISIONS["fp32"]
# A map fits if the error is at most this many times what rounding costs the reference. Measured over the default suite
# (TE 2.20.2 on emulated kernels): 1.00 to 1.09 times for right maps, 890 times or more with one entry wrong.
FITS_WITHIN = 3.0


@dataclass(frozen=True)
class Trial:
    """Two modules, ready to be run under one weight map after the other.

    Attributes:
        candidate: in FP32, in evaluation mode, so that no dropout is drawn.
        call: how to call it, or None.
        inputs: as the pair returns them, in FP32.
        reference_weights: by name, in FP32.
        golden: the reference's outputs in FP64.
        expected: relative L2 error that TF32's rounding costs the reference itself, the worst of all outputs.
        limit: the largest relative L2 error at which a map fits.
    """

    candidate: nn.Module
    call: Callable[..., Any] | None
    inputs: Any
    reference_weights: Mapping[str, Tensor]
    golden: Mapping[str, Tensor]
    expected: float
    limit: float

    def error(self, weight_map: WeightMap) -> float:
        """Relative L2 error of the candidate's outputs, the worst of them; infinite where one is not finite.

        Raises:
            UserError: if the candidate raises or returns outputs of other shapes than the reference's.
        """
        shapes = transfer.parameter_shapes(self.candidate)
        transfer.fill(self.candidate, transfer.to_candidate(weight_map, self.reference_weights, shapes))
        with caches.fresh():
            return _worst_error(self._run(), self.golden)

    def _run(self) -> dict[str, Tensor]:
        """The outputs; with gradients only where it does not run without, as TE's offloading of activations."""
        try:
            with torch.no_grad():
                return _outputs("candidate", self.candidate, self.call, self.inputs)
        except UserError:
            inputs = tree_map_only(Tensor, lambda x: x.clone().requires_grad_(x.is_floating_point()), self.inputs)
            with torch.enable_grad():
                outputs = _outputs("candidate", self.candidate, self.call, inputs)
            return {name: output.detach() for name, output in outputs.items()}


def prepare_trial(pair: Pair, size: Size, seed: int, kernels: Kernels) -> Trial:
    """Run the reference in FP64, and under FP32's rounding model.

    Parameters whose elements are all equal get noise first: two norms that are all ones could not be told apart. Those
    that TE holds quantized become FP32's: what a format loses of them would hide a wrong entry.

    Args:
        pair: its modules are changed: cast, moved, and given weights.
        size: of the case.
        seed: of the inputs and of that noise.
        kernels: on which the candidate runs.

    Raises:
        UserError: if the reference raises, returns no floating-point tensor, or is not finite or all zero.
    """
    reference = pair.reference.to(kernels.device).eval()
    candidate = dequantized(moved(pair.candidate, device=kernels.device)).float().eval()
    vary_constants(reference, Rng(seed, "weights"))
    inputs = cast(tree_map_only(Tensor, lambda x: x.to(kernels.device), draw_inputs(pair, size, Rng(seed))), FP32.dtype)
    held = {name: parameter.detach().float() for name, parameter in reference.named_parameters()}
    with torch.no_grad():
        with in_fp64():
            golden = _outputs("reference", reference.double(), pair.call_reference, cast(inputs, torch.float64))
        _check_golden(golden)
        with rounded(FP32.rounding, reference.float().parameters()):
            modelled = _outputs("reference", reference, pair.call_reference, inputs)
    errors = {name: measure(output, golden[name], FP32.dtype) for name, output in modelled.items()}
    expected = max(error.relative_l2 for error in errors.values())
    limit = FITS_WITHIN * max(expected, torch.finfo(FP32.dtype).eps)
    return Trial(candidate, pair.call_candidate, inputs, held, golden, expected, limit)


def _outputs(role: str, module: nn.Module, call: Callable[..., Any] | None, inputs: Any) -> dict[str, Tensor]:
    try:
        return outputs_of(module, call, inputs)
    except (UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        place = f"; at {users_line(error)}" if users_line(error) else ""
        raise UserError(f"the {role} raised {type(error).__name__}: {first_paragraph(error)}{place}") from error


def _check_golden(golden: Mapping[str, Tensor]) -> None:
    if not golden:
        raise UserError("the reference returns no floating-point tensor, so there is nothing to tell maps apart by")
    for name, output in golden.items():
        if not output.isfinite().all():
            raise UserError(f"the reference's {name} is not finite in FP64; look at the weights and inputs")
        if not output.any():
            raise UserError(f"the reference's {name} is all zero on these inputs, which tells no map from another")


def _worst_error(outputs: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> float:
    shapes = [{name: tuple(output.shape) for name, output in side.items()} for side in (outputs, golden)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"the candidate returns {shapes[0]} where the reference returns {shapes[1]}; "
            "bring them to one shape in the pair's call_candidate or call_reference"
        )
    errors = [measure(output, golden[name], FP32.dtype) for name, output in outputs.items()]
    return max(error.relative_l2 if error.finite else float("inf") for error in errors)
