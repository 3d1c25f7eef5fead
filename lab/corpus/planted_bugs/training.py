"""Mistakes in training outside of the forward pass: in its steps, in its optimizer, and in the state of FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lab.corpus.planting import (
    ONE_SCALE_A_TENSOR,
    QUANTIZED,
    STORED_IN_16_BITS,
    Bug,
    Call,
    Plant,
    called,
    edited,
    with_attributes,
)
from parity.case.case import Pair, Rng
from parity.measuring.hosts.layer import TEModel, WithLoss
from parity.measuring.hosts.linear import ADAM_SETTINGS, LEARNING_RATE, STEPS, Trained

# Mistakes of a training step that the forward pass does not show.


# The factor by which losses are multiplied in FP16 training. A small one, so that FP16 itself does not overflow here.
LOSS_SCALE = 128.0
# How many products are summed before the sum is rounded.
ACCUMULATED = 16


def _embeddings_scaled(module: nn.Module) -> None:
    """Scale embeddings by the root of their width, as T5 and Gemma do."""
    model = module.model if isinstance(module, WithLoss) else module
    assert isinstance(model, TEModel)
    model.tokens.register_forward_hook(lambda tokens, given, rows: rows * rows.shape[-1] ** 0.5)


def _scaled_gradient(call: Call) -> Call:
    def mistaken(module: nn.Module, *inputs: Tensor) -> Tensor:
        output = call(module, *inputs)
        output.register_hook(lambda gradient: gradient * LOSS_SCALE)
        return output

    return mistaken


def _step_truncated(weight: Tensor, update: Tensor) -> Tensor:
    """Return the master weight truncated to the dtype's mantissa, as by taking the upper half of an FP32 number."""
    master = weight.float() - STEPS * LEARNING_RATE * update.float()
    dropped_bits = {torch.bfloat16: 16, torch.float16: 13}.get(weight.dtype, 0)
    cut = (master.detach().view(torch.int32) & (-1 << dropped_bits)).view(torch.float32)
    return (master + (cut - master.detach())).to(weight.dtype)


def _step_without_master(weight: Tensor, update: Tensor) -> Tensor:
    """Round each step to the weight's dtype."""
    for _ in range(STEPS):
        weight = weight - (LEARNING_RATE * update).to(weight.dtype)
    return weight


def _accumulated_in_bf16(call: Call) -> Call:
    """Round the GEMM's sum to BF16 after each ``ACCUMULATED`` products."""

    def mistaken(module: Any, x: Tensor) -> Tensor:
        total: Tensor | None = None
        for inputs, weight in zip(x.split(ACCUMULATED, -1), module.weight.split(ACCUMULATED, -1), strict=True):
            part = functional_call(module, {"weight": weight.contiguous()}, (inputs.contiguous(),))
            total = (part if total is None else total + part).bfloat16().to(part.dtype)
        assert total is not None
        return total

    return mistaken


STEPPED = ("stepped_linear",)
MICROBATCHED = ("microbatched_linear",)
TRAINING_BUGS = (
    Bug(
        "loss-over-all-tokens",
        "The loss is divided by the number of all tokens, padding included.",
        ("model_with_loss",),
        with_attributes(reduce=lambda losses, counts: losses.mean()),
        "loss-scale",
    ),
    Bug(
        "loss-as-mean-of-means",
        "Each sequence's mean loss counts the same, however many tokens it has.",
        ("model_with_loss",),
        with_attributes(reduce=lambda losses, counts: (losses.sum(-1) / counts.sum(-1)).mean()),
        "loss-scale",
    ),
    Bug(
        "loss-summed",
        "The loss is the sum over tokens (reduction='sum'), not their mean.",
        ("model_with_loss",),
        with_attributes(reduce=lambda losses, counts: losses.sum()),
        "loss-scale",
    ),
    Bug(
        "embeddings-scaled",
        "Embeddings are multiplied by sqrt(hidden), which the reference does not do.",
        ("tied_model", "model_with_loss"),
        edited(_embeddings_scaled),
        "factor",
    ),
    Bug(
        "gradient-left-scaled",
        "The loss was scaled by 128 and gradients never divided by it.",
        ("linear", "llama_layer"),
        called(_scaled_gradient),
        "gradient-scale",
    ),
    Bug(
        "gradient-overwritten",
        "is_first_microbatch=True for each microbatch: the last one's gradient replaces the sum.",
        MICROBATCHED,
        with_attributes(is_first=True),
        "gradient-accumulation",
    ),
    Bug(
        "gradient-accumulated-in-bf16",
        "main_grad is BF16: each of the microbatches' sums is rounded.",
        MICROBATCHED,
        with_attributes(main_grad_dtype=torch.bfloat16),
        "gradient-accumulation",
    ),
    Bug(
        "product-accumulated-in-bf16",
        "A GEMM rounds its partial sums to BF16.",
        ("square_linear",),
        called(_accumulated_in_bf16),
        "accumulation-precision",
    ),
    Bug(
        "master-weights-truncated",
        "FP32 master weights are cut off, not rounded, to the weights' dtype.",
        STEPPED,
        with_attributes(step=_step_truncated),
        "accumulation-precision",
        precisions=STORED_IN_16_BITS,
    ),
    Bug(
        "master-weights-missing",
        "The optimizer updates 16-bit weights: steps below half an ulp are lost.",
        STEPPED,
        with_attributes(step=_step_without_master),
        "accumulation-precision",
        precisions=STORED_IN_16_BITS,
    ),
)


# Mistakes in the settings of TE's optimizer, and in its arithmetic.


TRAINED = ("trained_linear",)


def _with(**changes: Any) -> Plant:
    """Train with other settings of FusedAdam."""
    return _by(
        lambda te, weights: te.optimizers.FusedAdam(weights, **{**ADAM_SETTINGS, "master_weights": True, **changes})
    )


def _by(optimizer: Callable[[Any, Iterable[nn.Parameter]], Optimizer]) -> Plant:
    def plant(pair: Pair, te: Any) -> Pair:
        assert isinstance(pair.candidate, Trained)
        pair.candidate.optimizer = lambda weights: optimizer(te, weights)
        return pair

    return plant


def _with_epsilon_hat(te: Any, weights: Iterable[nn.Parameter]) -> Optimizer:
    """Add eps as in ``(sqrt(v) + eps) / sqrt(1 - beta2**t)``, the shorter form of arXiv 1412.6980, section 2."""
    optimizer: Optimizer = te.optimizers.FusedAdam(weights, **ADAM_SETTINGS, master_weights=True)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            step = group.get("step", 0) + 1
            group["eps"] = optimizer.defaults["eps"] / math.sqrt(1.0 - group["betas"][1] ** step)

    optimizer.register_step_pre_hook(before_step)
    return optimizer


OPTIMIZER_BUGS = (
    Bug(
        "decay-added-to-gradient",
        "FusedAdam(adam_w_mode=False) where the reference has AdamW: the decay is divided by the second moment's root.",
        TRAINED,
        _with(adam_w_mode=False),
        "optimizer",
    ),
    Bug(
        "moments-bias-uncorrected",
        "FusedAdam(bias_correction=False): first steps are those of moments that began at 0.",
        TRAINED,
        _with(bias_correction=False),
        "optimizer",
    ),
    Bug(
        "betas-of-another-optimizer",
        "FusedAdam has the betas (0.9, 0.95), as language models are trained with, for PyTorch's (0.9, 0.999).",
        TRAINED,
        _with(betas=(0.9, 0.95)),
        "optimizer",
    ),
    Bug(
        "epsilon-before-correction",
        "The optimizer adds eps to the second moment's root before it corrects its bias (epsilon hat).",
        TRAINED,
        _by(_with_epsilon_hat),
        "optimizer",
    ),
)


# Mistakes in the state of FP8: scales, formats, caches, and where the recipe applies.


DELAYED = ("fp8_delayed",)
# How far stale weights are from those after an optimizer's update, relative to their root mean square.
UPDATE = 0.2


def _before_call(change: Callable[[nn.Module], None]) -> Plant:
    """Change something before each forward pass, once the module has made its quantizers."""

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
    """Let the forward pass use the quantized weight that an earlier microbatch cached.

    Args:
        spoil: changes what is cached; called with the module and a function that refreshes its cache.
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
    """Refresh the cache after the update, except for the copies that the backward pass reads.

    Raises:
        RuntimeError: if the GPU never needs such copies, as on Blackwell.
    """
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    if is_non_tn_fp8_gemm_supported():
        raise RuntimeError("this GPU multiplies FP8 weights without a transposed copy, so none can be stale")
    _before_the_update(module, refresh)
    transposed = {name: workspace._transpose for name, workspace in _workspaces(module).items()}
    stale = {name: copy.clone() for name, copy in transposed.items() if copy is not None}  # None without backward
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
QUANTIZATION_BUGS = (
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
