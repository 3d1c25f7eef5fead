"""Modules in another dtype."""

from __future__ import annotations

import pytest
import torch

from parity.passes.build import cast_module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cast_of_a_module_leaves_its_complex_buffers_alone(dtype):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", torch.tensor([1.0 + 2.0j]))
    assert cast_module(module, dtype) is module
    assert module.weight.dtype is dtype
    assert module.table.tolist() == [1.0 + 2.0j]
