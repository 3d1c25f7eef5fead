"""Derive a recipe's roundings from the quantizers that it gives TE for each operand of a linear layer's GEMMs.

The quantizers say formats, blocks and scales; ``parity.numerics`` computes them by code of its own. So any recipe whose
quantizers are TE's is a precision. Sources: ``pytorch/quantization.py`` and ``pytorch/tensor/`` of TE 2.20.2.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parity.numerics.formats import AttentionFormats, Format, Operands, Quantized, Requantized, Rounding
from parity.user_error import UserError

# From the finest format to the coarsest: whoever has a coarse operand has its error.
_APART = math.sqrt(2.0)  # where the numbers of one grid lie between those of another
_FAMILIES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def derive_rounding(recipe: Any, dtype: torch.dtype, module_type: str = "linear", name: str = "") -> Rounding:
    """Return what a faithful kernel rounds in a module under a recipe.

    Args:
        recipe: an object of a class of ``transformer_engine.common.recipe``.
        dtype: the dtype of what is not quantized.
        module_type, name: the module's, as its ``QuantizerRole`` says them.

    Raises:
        UserError: if a quantizer is not one of TE's.
    """
    inputs, weights, _ = _ask_for_quantizers(recipe, "forward", module_type, name)
    gradients, _ = _ask_for_quantizers(recipe, "backward", module_type, name)
    (x, x_columns), (w, w_columns), (g, g_columns) = (read_formats(q, dtype) for q in (inputs, weights, gradients))
    # Source: _linear_forward_impl and _linear_backward of pytorch/module/linear.py.
    override = getattr(recipe, "backward_override", None)  # TE 2.17 and newer
    if override == "high_precision":
        g, x_columns, w_columns, g_columns = None, None, None, None
    elif override == "dequantized":
        g, x_columns, w_columns, g_columns = None, _requantize(x, None, dtype), _requantize(w, None, dtype), None
    columnwise = Operands(x_columns, w_columns, g_columns)
    both = None if columnwise == Operands(x, w, g) else columnwise
    is_quantized = recipe.fp8_dpa or recipe.fp8_mha
    return Rounding(dtype, x, w, g, both, _derive_attention(recipe) if is_quantized else AttentionFormats())


def _derive_attention(recipe: Any) -> AttentionFormats:
    """Return the formats of attention in FP8 with a scale a tensor, which cuDNN's fused kernels compute.

    With delayed scaling they cast their results as well; with current scaling these stay in the dtype. Source:
    _fused_attn_forward_impl and _fused_attn_backward_impl of pytorch/attention/dot_product_attention/backends.py, and
    common/fused_attn/fused_attn_fp8.cu.

    Raises:
        UserError: for formats whose scales are not a tensor's.
    """
    inputs = _ask_for_quantizers(recipe, "forward", "dpa", "", ("qkv", "s"))
    gradients = _ask_for_quantizers(recipe, "backward", "dpa", "", ("do", "dp"))
    read = [read_formats(one, torch.bfloat16)[0] for one in (*inputs, *gradients)]
    formats = [one for one in read if isinstance(one, Quantized) and not one.along]
    if len(formats) < len(read):
        raise UserError(
            f"{type(recipe).__name__} with attention in FP8: parity has a rounding model of attention with a scale a "
            "tensor alone, as delayed and current scaling have it; leave fp8_dpa and fp8_mha out to compare the rest"
        )
    qkv, probabilities, context_gradients, score_gradients = formats
    context, qkv_gradients = None, None
    if type(inputs[0]).__name__ == "Float8Quantizer":
        # The next GEMM casts results once more, by a scale from another history. So the grids of the two may differ.
        context, qkv_gradients = (dataclasses.replace(one, headroom=_APART) for one in (qkv, context_gradients))
    return AttentionFormats(qkv, probabilities, context, context_gradients, score_gradients, qkv_gradients)


def has_delayed_scales(recipe: Any) -> bool:
    """Return whether a recipe scales by what earlier passes saw, so that it needs some before the first comparison."""
    quantizers = _ask_for_quantizers(recipe, "forward", "linear", "")[:2]
    return any(type(one).__name__ == "Float8Quantizer" for one in quantizers)


def find_families(rounding: Rounding, delayed: bool) -> tuple[str, ...]:
    """Return the built-in precisions whose formats a recipe's operands have, the coarsest last.

    Args:
        rounding: that of the recipe.
        delayed: whether its scales come from earlier passes.
    """
    operands = [rounding, *([rounding.columnwise] if rounding.columnwise else [])]
    formats = [getattr(one, part) for one in operands for part in ("inputs", "weights", "gradients")]
    families = {_name_family(one, delayed) for each in formats for one in _split_format(each)}
    without = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[rounding.storage]
    return tuple(sorted(families, key=_FAMILIES.index)) or (without,)


def _name_family(to_format: Quantized, delayed: bool) -> str:
    if to_format.numbers == "E2M1":
        return "nvfp4"
    return {0: "fp8_delayed" if delayed else "fp8_current", 128: "fp8_block"}.get(to_format.along, "mxfp8")


def _split_format(to_format: Format | None) -> Iterator[Quantized]:
    if isinstance(to_format, Quantized):
        yield to_format
    elif isinstance(to_format, Requantized):
        yield from _split_format(to_format.stored)
        yield from _split_format(to_format.then)


_TENSORS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}


def _ask_for_quantizers(
    recipe: Any, mode: str, module_type: str, name: str, tensors: tuple[str, ...] = ()
) -> list[Any]:
    """Return the quantizers that TE makes for a module's tensors, by default for a linear layer's in ``_TENSORS``.

    Raises:
        UserError: if the recipe gives none; says TE's reason.
    """
    quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    tensors = tensors or _TENSORS[mode]
    told: dict[str, Any] = {}
    if hasattr(quantization, "QuantizerRole"):  # older versions know the tensors by their order alone
        told["roles"] = [quantization.QuantizerRole(module_type, tensor, name) for tensor in tensors]
    try:
        state = quantization.RecipeState.create(
            recipe, mode=mode, num_quantizers=len(tensors), device=torch.device("cpu"), **told
        )
        quantizers = list(state.make_quantizers())
    except Exception as error:
        raise UserError(
            f"TE makes no quantizers of {type(recipe).__name__}: {type(error).__name__}: {error}"
        ) from error
    if recipe.float8_current_scaling() and module_type != "dpa":
        # A module overrules its recipe's use_power_2_scales: _customize_quantizers_float8_current_scaling.
        asked = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight") if mode == "forward" else ("fp8_quant_bwd_grad",)
        for quantizer, parameters in zip(quantizers, (getattr(recipe, name) for name in asked), strict=False):
            quantizer.force_pow_2_scales = parameters.power_2_scale
            quantizer.amax_epsilon = parameters.amax_epsilon
    return quantizers


def read_formats(quantizer: Any, dtype: torch.dtype) -> tuple[Format | None, Format | None]:
    """Return the formats of what GEMMs read along rows and along columns of a quantizer's tensors.

    Args:
        quantizer: an object of one of TE's classes.
        dtype: the dtype of what is not quantized.

    Raises:
        UserError: for a quantizer that is not TE's.
    """
    kind = type(quantizer)
    read = _READERS.get(kind.__name__) if kind.__module__.startswith("transformer_engine.") else None
    if read is not None:
        both = read(quantizer)
        rotates = getattr(quantizer, "with_rht", False)  # only what the weight's gradient reads
        return both, dataclasses.replace(both, rotated=True) if rotates else both
    if kind.__name__ == "IdentityQuantizer":
        return None, None
    if kind.__name__ == "HybridQuantizer":
        rowwise, _ = read_formats(quantizer.rowwise_quantizer, dtype)
        _, columnwise = read_formats(quantizer.columnwise_quantizer, dtype)
        if quantizer.columnwise_source == "rowwise_dequantized":
            columnwise = _requantize(rowwise, columnwise, dtype)
        return rowwise, columnwise
    raise UserError(
        f"the recipe has the quantizer {kind.__module__}.{kind.__qualname__}, and parity has no rounding model for it; "
        f"there are some for TE's {', '.join([*_READERS, 'HybridQuantizer', 'IdentityQuantizer'])}"
    )


def _requantize(stored: Format | None, then: Format | None, dtype: torch.dtype) -> Format | None:
    """Return the format of what is read of a matrix that was stored in a format, and then cast to another one."""
    return then if stored is None else Requantized(stored, then, dtype)


def _name_numbers(quantizer: Any) -> Any:
    return quantizer.dtype.name.removeprefix("kFloat8")


def _read_current(one: Any) -> Quantized:
    return Quantized(_name_numbers(one), power_of_two=one.force_pow_2_scales, least_amax=one.amax_epsilon)


def _read_block(one: Any) -> Quantized:
    across = 128 if one.block_scaling_dim == 2 else 1
    return Quantized(_name_numbers(one), 128, across, power_of_two=one.force_pow_2_scales, least_amax=one.amax_epsilon)


def _read_mxfp8(one: Any) -> Quantized:
    return Quantized(
        _name_numbers(one), 32, 32 if getattr(one, "with_2d_quantization", False) else 1, power_of_two=True
    )


def _read_nvfp4(one: Any) -> Quantized:
    return Quantized(
        "E2M1",
        16,
        16 if one.with_2d_quantization else 1,
        stochastic=one.stochastic_rounding,
        row_scaled=getattr(one, "row_scaled_nvfp4", False),
        largest_scale=float(getattr(one, "nvfp4_e4m3_max", 448.0)),
        four_over_six=one.nvfp4_4over6_err_mode if getattr(one, "nvfp4_use_4over6", False) else "",
    )


_READERS: dict[str, Callable[[Any], Quantized]] = {
    "Float8Quantizer": lambda one: Quantized(_name_numbers(one)),
    "Float8CurrentScalingQuantizer": _read_current,
    "Float8BlockQuantizer": _read_block,
    "MXFP8Quantizer": _read_mxfp8,
    "NVFP4Quantizer": _read_nvfp4,
}
"""By the name of TE's class: its format along rows."""
