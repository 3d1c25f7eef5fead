"""TE's own NVFP4 in pure Python, an oracle that shares no code with the kernels."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

# The modules that have contained it since TE 2.14, newest first.
_MODULES = ("reference_nvfp4", "quantization_ref_nvfp4", "quantization_nvfp4")


def module() -> ModuleType:
    """Return the module that defines ``NVFP4QuantizerRef``."""
    for name in _MODULES:
        try:
            return importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("TransformerEngine ships no NVFP4QuantizerRef")


def knows(function: Any, *parameters: str) -> bool:
    """Return whether the function has these parameters in this version of TE."""
    return set(parameters) <= set(inspect.signature(function).parameters)


def quantizer(**options: Any) -> Any:
    """Return an ``NVFP4QuantizerRef``, with ``with_2d_quantization`` spelled as in ``NVFP4Quantizer``."""
    square = options.pop("with_2d_quantization", False)
    reference = module()
    formats = getattr(reference, "reference_utils", None) or reference.utils
    return reference.NVFP4QuantizerRef(
        dtype=formats.Fp4Formats.E2M1,
        quant_tile_shape=(16, 16) if square else (1, 16),
        **options,
    )


def bytes_of(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)
