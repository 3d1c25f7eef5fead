"""Which modules can be a pair's at all: their parameters have shapes, are real, and stay the module's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parity.user_error import UserError


def check_module(role: str, module: Any) -> None:
    """Make sure that a module is one that can be compared.

    Args:
        role: ``reference`` or ``candidate``, for the message.
        module: what the pair has in that place.

    Raises:
        UserError: if it is no module, is TorchScript's, or has parameters without a shape or of complex numbers.
    """
    if not isinstance(module, nn.Module):
        kind = "None" if module is None else type(module).__name__
        raise UserError(f"the {role} must be a torch.nn.Module, not {kind}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the {role}'s {name}" if name else f"the {role}"
            raise UserError(
                f"{what} is compiled by TorchScript, which hands out copies of its parameters; give the module that it "
                "was made of"
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"the {role}'s {name} has no shape before the first call of the {role}; call it once, on a tensor of "
                "zeros, before you hand it over"
            )
        if parameter.is_complex():
            raise UserError(
                f"the {role}'s {name} holds complex numbers, which no precision of TransformerEngine has; hold it as "
                "torch.view_as_real(...) and compute with torch.view_as_complex(...)"
            )
