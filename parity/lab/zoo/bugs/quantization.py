"""Mistakes in the state of FP8: scales, formats, caches, and where the recipe applies."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair, Rng
from parity.lab.zoo.planting import ONE_SCALE_A_TENSOR, QUANTIZED, Bug, Call, Plant, called

DELAYED = ("fp8_delayed",)
# Of weights before an optimizer's update, relative to their root mean square.
UPDATE = 0.2


def _before_call(change: Callable[[nn.Module], None]) -> Plant:
    """Change something before each forward pass of a module that has made its quantizers."""

    def wrap(call: Call) -> Call:
        def mistaken(module: nn.Module, *inputs: Tensor) -> Any:
            with torch.no_grad():
                call(module, *inputs)
            change(module)
            return call(module, *inputs)

        return mistaken

    return called(wrap)


def _with_delayed_scaling(**arguments: Any) -> Plant:
    """Run the candidate under a recipe of its own."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        from transformer_engine.common.recipe import DelayedScaling

        def wrap(call: Call) -> Call:
            def mistaken(module: nn.Module, *inputs: Tensor) -> Any:
                with te.autocast(enabled=True, recipe=DelayedScaling(**arguments)):
                    return call(module, *inputs)

            return mistaken

        return called(wrap)(pair, te)

    return plant


def _quantized_modules(module: nn.Module) -> list[Any]:
    """Return TE's modules that quantize."""
    return [part for part in module.modules() if getattr(part, "quantizers", {}).get("scaling_fwd")]


def _scales(direction: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Overwrite the scales of delayed scaling, where ``direction`` is ``scaling_fwd`` or ``scaling_bwd``."""

    def overwrite(module: nn.Module) -> None:
        for part in _quantized_modules(module):
            scale = part.fp8_meta[direction].scale
            scale.copy_(change(scale))

    return overwrite


def _with_cached_weight(spoil: Callable[[nn.Module, Callable[[], None]], None]) -> Plant:
    """Let the forward pass take the quantized weight that an earlier microbatch cached.

    Args:
        spoil: gets the module and what refreshes its cache; changes what is cached.
    """

    def wrap(call: Call) -> Call:
        def mistaken(module: nn.Module, x: Tensor) -> Tensor:
            def refresh() -> None:
                module(x, is_first_microbatch=True)

            spoil(module, refresh)
            return module(x, is_first_microbatch=False)

        return mistaken

    return called(wrap)


def _before_the_update(module: nn.Module, refresh: Callable[[], None]) -> None:
    """Cache the weights as they were before an update."""
    kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                noise = Rng(0, "update").normal(*parameter.shape).to(parameter)
                parameter.add_(UPDATE * parameter.square().mean().sqrt() * noise)
    refresh()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(kept[name])


def _transposes_before_the_update(module: nn.Module, refresh: Callable[[], None]) -> None:
    """Refresh the cache after the update, but for the copies that the backward pass reads.

    Raises:
        RuntimeError: where there never are any, as on a Blackwell.
    """
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    if is_non_tn_fp8_gemm_supported():
        raise RuntimeError("this GPU multiplies FP8 weights without a transposed copy, so none can be stale")
    _before_the_update(module, refresh)
    transposed = {name: workspace._transpose for name, workspace in _workspaces(module).items()}
    stale = {name: copy.clone() for name, copy in transposed.items() if copy is not None}  # none without backward
    refresh()
    for name, copy in stale.items():
        _workspaces(module)[name]._transpose.copy_(copy)


def _inverted_scale(module: nn.Module, refresh: Callable[[], None]) -> None:
    refresh()
    for workspace in _workspaces(module).values():
        workspace._scale_inv.reciprocal_()


def _workspaces(module: nn.Module) -> dict[str, Any]:
    return dict(module._fp8_workspaces)  # type: ignore[arg-type]


def _mlp_without_recipe(pair: Pair, te: ModuleType) -> Pair:
    module = pair.candidate.get_submodule("layernorm_mlp")
    forward = module.forward

    def without_recipe(*args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=False):
            return forward(*args, **kwargs)

    module.forward = without_recipe
    return pair


LINEAR = ("square_linear", "swiglu_mlp")
BUGS = (
    Bug(
        "fp8-scale-never-updated",
        "The scales of inputs and weights stay 1: amax is recorded, but never used.",
        LINEAR,
        _before_call(_scales("scaling_fwd", torch.ones_like)),
        "fp8-scale-stale",
        precisions=DELAYED,
    ),
    Bug(
        "fp8-scale-of-smaller-activations",
        "Scales come from a time when values were 8 times smaller, so the largest saturate.",
        LINEAR,
        _before_call(_scales("scaling_fwd", lambda scale: 8 * scale)),
        "fp8-scale-stale",
        precisions=DELAYED,
    ),
    Bug(
        "fp8-gradient-not-scaled",
        "Output gradients are cast to E5M2 as they are, and underflow.",
        ("averaged_linear",),
        _before_call(_scales("scaling_bwd", torch.ones_like)),
        "fp8-gradient-scale",
        precisions=DELAYED,
    ),
    Bug(
        "fp8-margin-negative",
        "margin=-2: scales are 4 times too large, so the largest values saturate.",
        LINEAR,
        _with_delayed_scaling(margin=-2),
        "fp8-margin",
        precisions=DELAYED,
    ),
    Bug(
        "fp8-margin-large",
        "margin=8: scales are 256 times too small, so small values underflow.",
        LINEAR,
        _with_delayed_scaling(margin=8),
        "fp8-margin",
        precisions=DELAYED,
    ),
    Bug(
        "fp8-scale-inverted",
        "A weight is multiplied by its scale where the inverse is due.",
        LINEAR,
        _with_cached_weight(_inverted_scale),
        "fp8-scale-inverted",
        precisions=ONE_SCALE_A_TENSOR,
    ),
    Bug(
        "fp8-weight-cache-stale",
        "is_first_microbatch=False after an optimizer's step: the quantized weight is the old one.",
        LINEAR,
        _with_cached_weight(_before_the_update),
        "weight-cache-stale",
        precisions=QUANTIZED,
    ),
    Bug(
        "fp8-transpose-cache-stale",
        "The transposed copy of a quantized weight was not refreshed after an optimizer's step.",
        LINEAR,
        _with_cached_weight(_transposes_before_the_update),
        "weight-cache-stale",
        precisions=ONE_SCALE_A_TENSOR,
    ),
    Bug(
        "recipe-disabled-in-mlp",
        "The layer's MLP runs outside of the recipe.",
        ("llama_layer",),
        _mlp_without_recipe,
        "recipe-disabled",
        precisions=QUANTIZED,
    ),
)
