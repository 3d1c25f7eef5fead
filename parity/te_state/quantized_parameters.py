"""Parameters that TE holds quantized, as ``te.quantized_model_init`` (formerly ``fp8_model_init``) makes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parity.precision import Precision
from parity.user_error import UserError


def moved(candidate: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The candidate itself, on the device or in the dtype that is given.

    Quantized parameters forget there that they are trained (``Float8Tensor`` in TE 2.20.2), which is repaired. Complex
    buffers, such as rotary tables, keep their dtype, as under ``module.bfloat16()``: ``module.to(dtype)`` would drop
    their imaginary part.
    """
    trained = [parameter.requires_grad for parameter in candidate.parameters()]
    complex_buffers = [
        (module, name, buffer)
        for module in candidate.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complex_buffers:
        module._buffers[name] = None
    candidate.to(device=device, dtype=dtype)
    for module, name, buffer in complex_buffers:
        module._buffers[name] = buffer.to(device)
    for parameter, requires_grad in zip(candidate.parameters(), trained, strict=True):
        parameter.requires_grad_(requires_grad)
    return candidate


def dequantized(candidate: nn.Module) -> nn.Module:
    """The candidate itself, each quantized parameter replaced by one in FP32 of the same values."""
    for module in candidate.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_quantized(parameter):
                plain = nn.Parameter(dequantized_tensor(parameter.detach()).float(), parameter.requires_grad)
                module.register_parameter(name, plain)
    return candidate


def dequantized_tensor(parameter: Tensor) -> Tensor:
    """The values that a parameter stands for; itself where it is not quantized."""
    return parameter.dequantize() if is_quantized(parameter) else parameter


def check(candidate: nn.Module, precision: Precision) -> None:
    """Make sure that the precision fits the parameters that are quantized.

    Args:
        candidate: in the precision's dtype, as far as its parameters can be.
        precision: at which it is compared.

    Raises:
        UserError: if the precision has no recipe, or TE keeps such a parameter in another dtype.
    """
    quantized = {name: parameter for name, parameter in candidate.named_parameters() if is_quantized(parameter)}
    dtype = str(precision.dtype)
    if quantized and precision.recipe is None:
        raise UserError(
            f"the candidate holds {_some(list(quantized))} quantized (te.quantized_model_init), so it cannot compute "
            f"in {precision.name}; name the recipe's precision in the pair's precisions, or build the module without"
        )
    others = [name for name, parameter in quantized.items() if parameter.dtype is not precision.dtype]
    if others:
        raise UserError(
            f"TE keeps the quantized {_some(others)} in {quantized[others[0]].dtype} whatever module.to({dtype}) says, "
            f"and {precision.name} computes in {dtype}; build the module with params_dtype={dtype}"
        )


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter is a quantized tensor of TE's."""
    return type(parameter).__module__.startswith("transformer_engine.")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
