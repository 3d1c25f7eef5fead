"""Modules whose weights could not be compared are refused when their pair is checked, with what to do instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parity.case.validate import check_module
from parity.user_error import UserError


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.phases = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (None, "the reference must be a torch.nn.Module, not None"),
        (nn.Linear, "the reference must be a torch.nn.Module, not type"),
        (nn.Sequential(nn.LazyLinear(4)), "the reference's 0.weight has no shape before the first call"),
        (Rotated(), "the reference's phases holds complex numbers"),
    ],
    ids=["none", "class", "lazy", "complex"],
)
def test_it_is_refused_by_name(module, complaint):
    with pytest.raises(UserError, match=complaint):
        check_module("reference", module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_whose_parameters_are_copies_is_refused():
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UserError, match="the reference's 0 is compiled by TorchScript"):
        check_module("reference", scripted)


def test_a_lazy_module_that_was_called_once_is_accepted():
    module = nn.LazyLinear(4)
    module(torch.zeros(1, 2))
    check_module("reference", module)
