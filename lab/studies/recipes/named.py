"""The recipes of the study: TE's quantizer factories, recipes with other arguments, and attention in FP8."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import parity

_FACTORIES = (
    "high_precision_factory",
    "delayed_scaling_factory",
    "current_scaling_factory",
    "float8_block_scaling_factory",
    "mxfp8_factory",
    "nvfp4_factory",
)
_ZOO = (
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_linear_fp8_dpa_factory",
)


def _new(name: str, **arguments: Any) -> Callable[[], Any]:
    """Return a function that makes a recipe; an argument ``E4M3`` or ``HYBRID`` is TE's format."""

    def make() -> Any:
        module: Any = importlib.import_module("transformer_engine.common.recipe")
        formats = {key: getattr(module.Format, one) for key, one in arguments.items() if one in ("E4M3", "HYBRID")}
        return getattr(module, name)(**arguments | formats)

    return make


def _of_factory(name: str, **arguments: Any) -> Callable[[], Any]:
    module = "quantizer_factories" if name in _FACTORIES else "quantizer_factory_zoo"

    def make() -> Any:
        factory = getattr(importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{module}"), name)
        return _new("CustomRecipe", qfactory=factory, **arguments)()

    return make


def _with_parameters(name: str, **arguments: Any) -> Callable[[], Any]:
    """Return a function that makes a recipe whose three quantizers have these parameters."""

    def make() -> Any:
        module: Any = importlib.import_module("transformer_engine.common.recipe")
        recipe = getattr(module, name)()
        for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(recipe, operand, module.QParams(**arguments))
        return recipe

    return make


FACTORIES: Mapping[str, Callable[[], Any]] = {
    name: _of_factory(name, **({"fp8_dpa": True} if "dpa" in name else {})) for name in (*_FACTORIES, *_ZOO)
}
OTHERS: Mapping[str, Callable[[], Any]] = {
    "delayed_in_e4m3": _new("DelayedScaling", fp8_format="E4M3"),
    "delayed_with_margin": _new("DelayedScaling", margin=2),
    "delayed_by_most_recent": _new("DelayedScaling", amax_history_len=4, amax_compute_algo="most_recent"),
    "current_in_e4m3": _new("Float8CurrentScaling", fp8_format="E4M3"),
    "current_by_powers_of_two": _with_parameters("Float8CurrentScaling", power_2_scale=True),
    "current_with_least_amax": _with_parameters("Float8CurrentScaling", amax_epsilon=1.0),
    "current_backward_in_bf16": _new("Float8CurrentScaling", backward_override="high_precision"),
    "current_backward_dequantized": _new("Float8CurrentScaling", backward_override="dequantized"),
    "block_in_hybrid": _new("Float8BlockScaling", fp8_format="HYBRID"),
    "block_with_fp32_scales": _with_parameters("Float8BlockScaling", power_2_scale=False),
    "block_without_squares": _new("Float8BlockScaling", w_block_scaling_dim=1),
    "block_with_squares_of_inputs": _new("Float8BlockScaling", x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block_backward_dequantized": _new("Float8BlockScaling", backward_override="dequantized"),
    "mxfp8_in_hybrid": _new("MXFP8BlockScaling", fp8_format="HYBRID"),
    "mxfp8_with_squares": _new("MXFP8BlockScaling", enable_2d_quantization=True),
    "mxfp8_backward_in_bf16": _new("MXFP8BlockScaling", backward_override="high_precision"),
    "mxfp8_backward_dequantized": _new("MXFP8BlockScaling", backward_override="dequantized"),
    "nvfp4_without_rotation": _new("NVFP4BlockScaling", disable_rht=True),
    "nvfp4_without_chance": _new("NVFP4BlockScaling", disable_stochastic_rounding=True),
    "nvfp4_without_squares": _new("NVFP4BlockScaling", disable_2d_quantization=True),
    "nvfp4_row_scaled": _new("NVFP4BlockScaling", row_scaled_activation=True, disable_rht=True),
    "nvfp4_4over6_of_weights": _new("NVFP4BlockScaling", nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE"),
    "nvfp4_4over6": _new("NVFP4BlockScaling", nvfp4_4over6="all", disable_rht=True),
    "nvfp4_backward_dequantized": _new("NVFP4BlockScaling", backward_override="dequantized"),
    "current_attention": _new("Float8CurrentScaling", fp8_dpa=True),
    "current_attention_and_results": _new("Float8CurrentScaling", fp8_dpa=True, fp8_mha=True),
    "delayed_attention": _new("DelayedScaling", fp8_dpa=True),
    "delayed_attention_and_results": _new("DelayedScaling", fp8_dpa=True, fp8_mha=True),
}
RECIPES = {name: parity.recipe(name, make) for name, make in {**FACTORIES, **OTHERS}.items()}
"""By name; all run on an emulated Blackwell."""
