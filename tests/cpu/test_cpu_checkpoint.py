"""Recomputing activations: ``te.checkpoint`` and TE's tracker of random states, on the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import te
from parity.cpu import versions

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def make_layer(te_module: ModuleType, **options: Any) -> Any:
    torch.manual_seed(0)
    return te_module.TransformerLayer(32, 64, 4, params_dtype=BF16, device="cpu", **options)


def step(layer: Callable[..., Tensor], **options: Any) -> list[Tensor]:
    """Output and input gradient of one training step, from the same seed each time."""
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
    torch.manual_seed(7)
    output = layer(x, **options)
    output.float().pow(2).sum().backward()
    assert x.grad is not None
    return [output, x.grad]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_layer_changes_no_bit(te_module: ModuleType, dropout: float, use_reentrant: bool) -> None:
    results = []
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    for checkpointed in (True, False):
        layer = make_layer(te_module, hidden_dropout=dropout, attention_dropout=dropout)

        def call(x: Tensor, layer: Any = layer, checkpointed: bool = checkpointed) -> Tensor:
            return te_module.checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)

        results.append([*step(call), *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(
    versions.installed_version().release[:2] == (2, 19),
    reason="TE 2.19 hands fused attention its inputs twice, and then runs the projection's backward twice",
)
def test_checkpointing_the_core_attention_changes_no_bit(te_module: ModuleType) -> None:
    results = []
    # TE remembers from the last checkpoint whether it was reentrant, and fuses bias and GELU only then.
    for checkpointed in (True, False):
        layer = make_layer(te_module, hidden_dropout=0.0, attention_dropout=0.1)
        outputs = step(layer, checkpoint_core_attention=checkpointed)
        results.append([*outputs, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_forked_random_state_is_apart_from_the_default_one(te_module: ModuleType) -> None:
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 5)
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with tracker.fork("model-parallel-rng"):
            draws.append(torch.rand(4))
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat(draws), expected)


def test_a_layer_draws_its_dropout_from_the_tracker(te_module: ModuleType) -> None:
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    states = tracker.get_states()
    layer = make_layer(te_module, hidden_dropout=0.0, attention_dropout=0.3, get_rng_state_tracker=lambda: tracker)
    x = torch.randn(16, 2, 32).to(BF16)
    outputs = []
    for seed in (1, 2):
        tracker.set_states(dict(states))
        torch.manual_seed(seed)
        outputs.append(layer(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], layer(x))
