"""Derive a recipe's roundings from the quantizers that it gives TE for each operand of a linear layer's GEMMs.

The quantizers say formats, blocks and scales; ``parity.numerics`` computes them by code of its own. So any recipe whose
quantizers are TE's is a precision. Sources: ``pytorch/quantization.py`` and ``pytorch/tensor/`` of TE 2.20.2.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parity.numerics.formats import AttentionFormats, Format, Operands, Quantized, Recast, Requantized, Role, Rounding
from parity.user_error import UserError

# From the finest format to the coarsest: whoever has a coarse operand has its error.
_FAMILIES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
REFUSED_SHAPES = ("FP8 execution requires", "requirement on", "needs tensors whose last dimension")
"""What TE's kernels, and the CPU's, say of shapes that they do not quantize or multiply."""


def derive_rounding(recipe: Any, dtype: torch.dtype) -> Rounding:
    """Return what a faithful kernel rounds under a recipe.

    Args:
        recipe: an object of a class of ``transformer_engine.common.recipe``.
        dtype: the dtype of what is not quantized.

    Raises:
        UserError: if a quantizer is not one of TE's.
    """
    derived = _derive_in_module(recipe, dtype, ("linear", ""))
    if hasattr(recipe, "qfactory"):  # which may tell modules apart
        derived = replace(derived, by_role=functools.cache(partial(_derive_in_module, recipe, dtype)))
    return derived


def _derive_in_module(recipe: Any, dtype: torch.dtype, role: Role) -> Rounding:
    """Return what a faithful kernel rounds in a module of this role.

    Raises:
        UserError: if a quantizer is not one of TE's.
    """
    inputs, weights, _ = _ask_for_quantizers(recipe, "forward", *role)
    gradients, _ = _ask_for_quantizers(recipe, "backward", *role)
    (x, x_columns), (w, w_columns), (g, g_columns) = (read_formats(q, dtype) for q in (inputs, weights, gradients))
    # Source: _linear_forward_impl and _linear_backward of pytorch/module/linear.py.
    override = getattr(recipe, "backward_override", None)  # TE 2.17 and newer
    if override == "high_precision":
        g, x_columns, w_columns, g_columns = None, None, None, None
    elif override == "dequantized":
        g, x_columns, w_columns, g_columns = (
            None,
            _requantize_format(x, None, dtype),
            _requantize_format(w, None, dtype),
            None,
        )
    columnwise = Operands(x_columns, w_columns, g_columns)
    both = None if columnwise == Operands(x, w, g) else columnwise
    is_quantized = recipe.fp8_dpa or recipe.fp8_mha
    return Rounding(dtype, x, w, g, both, _derive_attention(recipe) if is_quantized else AttentionFormats())


def _derive_attention(recipe: Any) -> AttentionFormats:
    """Return the formats of attention in FP8, which cuDNN's fused kernels compute.

    With MXFP8, no step inside the kernel is cast. With a scale a tensor, probabilities and gradients of scores are, and
    with delayed scaling also the results. Source:
    _fused_attn_forward_impl and _fused_attn_backward_impl of pytorch/attention/dot_product_attention/backends.py, and
    common/fused_attn/fused_attn_fp8.cu.

    Raises:
        UserError: for other formats.
    """
    inputs = _ask_for_quantizers(recipe, "forward", "dpa", "", ("qkv", "s"))
    gradients = _ask_for_quantizers(recipe, "backward", "dpa", "", ("do", "dp"))
    read = [read_formats(one, torch.bfloat16)[0] for one in (*inputs, *gradients)]
    formats = [one for one in read if isinstance(one, Quantized) and one.numbers != "E2M1" and one.along in (0, 32)]
    if len(formats) < len(read) or len({one.along for one in formats}) > 1:
        raise UserError(
            f"{type(recipe).__name__} with attention in FP8: parity has rounding models of attention with a scale a "
            "tensor and of MXFP8; leave fp8_dpa and fp8_mha out to compare the rest"
        )
    qkv, probabilities, context_gradients, score_gradients = formats
    if qkv.along:
        return AttentionFormats(qkv=qkv, context_gradients=context_gradients)
    context, qkv_gradients = None, None
    if type(inputs[0]).__name__ == "Float8Quantizer":
        context, qkv_gradients = Recast(qkv), Recast(context_gradients)
    return AttentionFormats(qkv, probabilities, context, context_gradients, score_gradients, qkv_gradients)


_ROLES = tuple((kind, name) for kind in ("linear", "grouped_linear") for name in ("", "qkv", "proj", "fc1", "fc2"))


def round_alike(one: Rounding, other: Rounding) -> bool:
    """Return whether two recipes round alike, as far as modules of the usual names tell."""
    if replace(one, by_role=None) != replace(other, by_role=None):
        return False
    if one.by_role is None or other.by_role is None:
        return one.by_role is other.by_role
    return all(one.by_role(role) == other.by_role(role) for role in _ROLES)


def list_roles(module: nn.Module) -> dict[str, Role]:
    """Return the roles under which a module of TE's asks for quantizers of its own weights, by their names.

    TE's versions before 2.17 know no roles. A module with several GEMMs names each role after its weight.
    """
    ask = getattr(module, "get_quantizer_roles", None)
    weights = [name for name, one in module.named_parameters(recurse=False) if one.dim() > 1]
    if ask is None or not weights:
        return {}
    is_operation = "mode" in inspect.signature(ask).parameters
    roles = (ask("forward") if is_operation else ask(fwd=True, num_quantizers=_SLOTS)) or []
    found = [role for role in roles if role is not None and role.tensor_type == "weight"]
    if not found:
        return {}
    chosen = {}
    for name in weights:
        prefix = name.partition("_")[0]
        own = [role for role in found if role.name.rpartition(".")[2] == prefix] or found
        chosen[name] = own[0].module_type, own[0].name
    return chosen


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


_SLOTS = 6  # of two GEMMs, the most that a module of TE's has: input, weight and output of each
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
        return both, replace(both, rotated=True) if rotates else both
    if kind.__name__ == "IdentityQuantizer":
        return None, None
    if kind.__name__ == "HybridQuantizer":
        rowwise, _ = read_formats(quantizer.rowwise_quantizer, dtype)
        _, columnwise = read_formats(quantizer.columnwise_quantizer, dtype)
        if quantizer.columnwise_source == "rowwise_dequantized":
            columnwise = _requantize_format(rowwise, columnwise, dtype)
        return rowwise, columnwise
    raise UserError(
        f"the recipe has the quantizer {kind.__module__}.{kind.__qualname__}, and parity has no rounding model for it; "
        f"there are some for TE's {', '.join([*_READERS, 'HybridQuantizer', 'IdentityQuantizer'])}"
    )


def _requantize_format(stored: Format | None, then: Format | None, dtype: torch.dtype) -> Format | None:
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
