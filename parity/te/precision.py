"""Define what a precision's name means: dtype, TE recipe, rounding model, and the GPU that it needs."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from parity.numerics.formats import (
    Rounding,
    e4m3,
    e4m3_blocks,
    e4m3_squares,
    e5m2,
    nvfp4_blocks,
    nvfp4_squares,
    nvfp4_stochastic,
    tf32,
)
from parity.te import Kernels


@dataclass(frozen=True)
class Precision:
    """A way to compute a module.

    Attributes:
        name: as users write it and reports show it.
        dtype: that of parameters, inputs, gradients and stored activations.
        rounding: what a faithful kernel rounds, for the expected error.
        recipe: a class of ``transformer_engine.common.recipe``, or None if no FP8 is used.
        warmup_passes: the least number of forward and backward passes before the one that is compared; a recipe that
            scales by the past has no scales before.
    """

    name: str
    dtype: torch.dtype
    rounding: Rounding
    recipe: str | None = None
    warmup_passes: int = 0

    def new_recipe(self) -> Any:
        """Return an object of TE's recipe; None without one."""
        if self.recipe is None:
            return None
        return getattr(importlib.import_module("transformer_engine.common.recipe"), self.recipe)()

    def autocast(self, kernels: Kernels, group: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return the context for the forward pass of TE's modules; it has a new recipe each time.

        Args:
            kernels: TE's.
            group: the process group over which amaxes are reduced, if there is one.
        """
        recipe = self.new_recipe()
        if recipe is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = kernels.te.autocast(
            enabled=True, recipe=recipe, amax_reduction_group=group
        )
        return context


_BF16 = torch.bfloat16
_PER_TENSOR = Rounding(_BF16, inputs=e4m3, weights=e4m3, gradients=e5m2)
_BLOCKS = Rounding(_BF16, inputs=e4m3_blocks(128), weights=e4m3_squares, gradients=e4m3_blocks(128))
_MX_BLOCKS = Rounding(_BF16, inputs=e4m3_blocks(32), weights=e4m3_blocks(32), gradients=e4m3_blocks(32))
_NVFP4 = Rounding(_BF16, inputs=nvfp4_blocks, weights=nvfp4_squares, gradients=nvfp4_stochastic, rotate_wgrad=True)

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, Rounding(torch.float32, tf32, tf32, tf32)),
        Precision("bf16", _BF16, Rounding(_BF16)),
        Precision("fp16", torch.float16, Rounding(torch.float16)),
        Precision("fp8_delayed", _BF16, _PER_TENSOR, "DelayedScaling", warmup_passes=2),
        Precision("fp8_current", _BF16, _PER_TENSOR, "Float8CurrentScaling"),
        Precision("fp8_block", _BF16, _BLOCKS, "Float8BlockScaling"),
        Precision("mxfp8", _BF16, _MX_BLOCKS, "MXFP8BlockScaling"),
        Precision("nvfp4", _BF16, _NVFP4, "NVFP4BlockScaling"),
    )
}

# The function of ``transformer_engine.pytorch`` that says whether the GPU at hand runs a recipe.
_IS_AVAILABLE = {
    "DelayedScaling": "is_fp8_available",
    "Float8CurrentScaling": "is_fp8_available",
    "Float8BlockScaling": "is_fp8_block_scaling_available",
    "MXFP8BlockScaling": "is_mxfp8_available",
    "NVFP4BlockScaling": "is_nvfp4_available",
}


def why_unavailable(precision: Precision, kernels: Kernels) -> str | None:
    """Return why this machine cannot run the precision on these kernels, or None if it can.

    The CPU kernels emulate a Hopper GPU, whose answers TE itself gives.
    """
    if precision.recipe is not None:
        available, reason = getattr(kernels.te, _IS_AVAILABLE[precision.recipe])(return_reason=True)
        return None if available else reason
    if precision.dtype is torch.bfloat16 and not kernels.te.is_bf16_available():
        return "BF16 needs a GPU of compute capability 8.0 or higher"
    return None
