"""Weight gradients that TE adds to ``main_grad``, a buffer that a trainer keeps, in the place of ``grad``.

``fuse_wgrad_accumulation`` of TE's modules and ``accumulate_into_main_grad`` of ``te.ops.Linear`` have a GEMM add to
``weight.main_grad``. Where the weight has an attribute ``grad_added_to_main_grad`` TE sets it, and leaves a dummy in
``grad``, which is zero where the weight's ``zero_out_wgrad`` is true. Source: ``pytorch/module/linear.py`` and
``pytorch/ops/_common.py`` of TE 2.20; Megatron-LM's ``DistributedDataParallel`` is such a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SWITCHES = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""What TE's modules and its operations name the choice."""


def clear(module: nn.Module) -> None:
    """Set every ``main_grad`` to zero; where TE adds to one and there is none, make it, in FP32."""
    for parameter in _added_to_main_grad(module):
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None or main_grad.device != parameter.device:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.grad_added_to_main_grad = False
        parameter.zero_out_wgrad = True
    for parameter in module.parameters():
        main_grad = getattr(parameter, "main_grad", None)
        if isinstance(main_grad, Tensor):
            main_grad.zero_()


def gradient(parameter: Any) -> Tensor | None:
    """A parameter's gradient, wherever it is; None where none arrived.

    A parameter that PyTorch uses as well, as a tied embedding does, has one part in ``main_grad`` and one in ``grad``.
    A port's own hook may have handed ``main_grad`` over to ``grad``.
    """
    grad, main_grad = parameter.grad, getattr(parameter, "main_grad", None)
    if not (getattr(parameter, "grad_added_to_main_grad", False) and isinstance(main_grad, Tensor)):
        return grad
    if grad is None or torch.equal(grad, main_grad.to(grad.dtype)):
        return main_grad
    return main_grad + grad


def _added_to_main_grad(module: nn.Module) -> Iterator[Any]:
    """The parameters whose gradients TE adds to ``main_grad``, and a few that never get one there, such as biases."""
    for submodule in module.modules():
        if any(getattr(submodule, switch, False) is True for switch in _SWITCHES):
            yield from (parameter for parameter in submodule.parameters(recurse=False) if parameter.requires_grad)
