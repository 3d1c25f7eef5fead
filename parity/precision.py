"""What a precision's name means: dtype, TE recipe, rounding model, and the GPU that it needs."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass

import torch

from parity.rounding import E4M3, E5M2, TF32, Rounding
from parity.te import Kernels


@dataclass(frozen=True)
class Precision:
    """A way to compute a module.

    Attributes:
        name: as users write it and reports show it.
        dtype: of parameters, inputs, gradients and stored activations.
        rounding: what a faithful kernel rounds, for the expected error.
        recipe: a class of ``transformer_engine.common.recipe``, or None where no FP8 is used.
        warmup_passes: forward and backward passes before the one that is compared; a recipe that scales by the past
            has no scales before.
    """

    name: str
    dtype: torch.dtype
    rounding: Rounding
    recipe: str | None = None
    warmup_passes: int = 0

    def autocast(self, kernels: Kernels) -> contextlib.AbstractContextManager[None]:
        """The context in which TE's modules compute their forward pass; a new recipe each time."""
        if self.recipe is None:
            return contextlib.nullcontext()
        recipes = importlib.import_module("transformer_engine.common.recipe")
        return kernels.te.autocast(enabled=True, recipe=getattr(recipes, self.recipe)())


_BF16 = torch.bfloat16

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, Rounding(torch.float32, TF32, TF32)),
        Precision("bf16", _BF16, Rounding(_BF16)),
        Precision("fp16", torch.float16, Rounding(torch.float16)),
        Precision("fp8_delayed", _BF16, Rounding(_BF16, E4M3, E5M2), "DelayedScaling", warmup_passes=2),
        Precision("fp8_current", _BF16, Rounding(_BF16, E4M3, E5M2), "Float8CurrentScaling"),
    )
}


def why_unavailable(precision: Precision, kernels: Kernels) -> str | None:
    """The reason why this machine cannot run the precision on these kernels, or None if it can.

    The CPU kernels emulate a Hopper GPU, whose answers TE itself gives.
    """
    if precision.recipe is not None:
        available, reason = kernels.te.is_fp8_available(return_reason=True)
        return None if available else reason
    if precision.dtype is torch.bfloat16 and not kernels.te.is_bf16_available():
        return "BF16 needs a GPU of compute capability 8.0 or higher"
    return None
