"""Both passes of a TE module beside those of a formula in FP64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def pairs_with_formula(
    module: Any, formula: Callable[[Tensor, Mapping[str, Tensor]], Tensor], *shape: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return a module's output, input gradient and parameters' gradients, each with what the formula gives in FP64.

    Parameters, input and the output's gradient are drawn anew; sums of a product's terms have a variance of about 1.

    Args:
        formula: takes the input and the parameters by their names.
        shape: of the input.
        dtype: of the input.
    """
    rng = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=rng)
        parameter.data.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else values)
    x = torch.randn(shape, generator=rng).to(dtype).requires_grad_()
    y = module(x)
    grad = torch.randn(y.shape, generator=rng).to(dtype)
    y.backward(grad)
    p = {name: parameter.detach().double().requires_grad_() for name, parameter in module.named_parameters()}
    exact_x = x.detach().double().requires_grad_()
    exact = formula(exact_x, p)
    exact.backward(grad.double())
    of_parameters = [(parameter.grad, p[name].grad) for name, parameter in module.named_parameters()]
    return [(y.detach(), exact.detach()), (x.grad, exact_x.grad), *of_parameters]
