"""Dropout and drop path of te.TransformerLayer: off where they should be, and their averages where they are on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from agreement import te_on_cpu
from torch import Tensor

HIDDEN, FFN, HEADS = 64, 96, 4
# Six standard errors: a right implementation fails once in five hundred million runs, and the seed is fixed besides.
SIGMAS = 6.0


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te_on_cpu().TransformerLayer(HIDDEN, FFN, HEADS, **dropouts | options)


def residual_part(module: Any, x: Tensor) -> Tensor:
    """What an MLP behind a dead attention adds to its input, where only the MLP's bias of the last layer is alive."""
    with torch.no_grad():
        module.self_attention.proj.weight.zero_()
        module.layernorm_mlp.fc2_weight.zero_()
        module.layernorm_mlp.fc2_bias.fill_(1.0)
        return module(x) - x


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_evaluation_drops_nothing(option: str) -> None:
    x = torch.randn(8, 4, HIDDEN)
    dropping, keeping = make_layer(**{option: 0.5}).eval(), make_layer()
    assert torch.equal(dropping(x), keeping(x))


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_training_drops_something_else_each_time(option: str) -> None:
    x = torch.randn(8, 4, HIDDEN)
    module = make_layer(**{option: 0.5})
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("probability", [0.1, 0.6])
def test_hidden_dropout_drops_its_share_and_scales_the_rest(probability: float) -> None:
    added = residual_part(make_layer(hidden_dropout=probability), torch.randn(64, 8, HIDDEN))
    is_dropped = added.abs() < 1e-4
    torch.testing.assert_close(
        added[~is_dropped], torch.full_like(added[~is_dropped], 1 / (1 - probability)), atol=1e-4, rtol=0
    )
    assert_share(is_dropped, probability)


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_drop_path_drops_whole_entries_of_the_first_dimension(rate: float) -> None:
    added = residual_part(make_layer(drop_path_rate=rate), torch.randn(4096, 2, HIDDEN))
    is_dropped = added.abs().amax(dim=(1, 2)) < 1e-4
    torch.testing.assert_close(
        added[~is_dropped], torch.full_like(added[~is_dropped], 1 / (1 - rate)), atol=1e-4, rtol=0
    )
    assert_share(is_dropped, rate)


def assert_share(is_dropped: Tensor, probability: float) -> None:
    standard_error = math.sqrt(probability * (1 - probability) / is_dropped.numel())
    assert abs(is_dropped.double().mean().item() - probability) < SIGMAS * standard_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_is_right_on_average(dtype: torch.dtype) -> None:
    """Values are 1 for every key, so the context is the sum of the probabilities that are kept, scaled."""
    probability, heads, seq = 0.25, 64, 64
    core = te_on_cpu().DotProductAttention(
        heads, 16, attention_dropout=probability, attn_mask_type="no_mask", qkv_format="bshd"
    )
    torch.manual_seed(0)
    query, key = (torch.randn(4, seq, heads, 16, dtype=dtype) for _ in range(2))
    context = core(query, key, torch.ones_like(query)).view(4, seq, heads, 16)[..., 0].double()
    assert context.std() > 0.02
    standard_error = (context.std() / math.sqrt(context.numel())).item()
    assert abs(context.mean().item() - 1.0) < SIGMAS * standard_error + torch.finfo(dtype).eps


@pytest.mark.parametrize("option", ["hidden_dropout", "drop_path_rate"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(option: str) -> None:
    """The layer adds ``kept * bias`` to its input, so the bias's gradient is the number of entries kept, scaled."""
    module = make_layer(**{option: 0.5})
    x = torch.randn(16, 4, HIDDEN)
    residual_part(module, x)
    output = module(x)
    output.sum().backward()
    torch.testing.assert_close(
        module.layernorm_mlp.fc2_bias.grad, (output - x).detach().sum(dim=(0, 1)), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_of_attention_drops_what_its_forward_pass_dropped(dtype: torch.dtype) -> None:
    """The context is linear in V: V times its gradient sums to the context times the gradient that went in."""
    core = te_on_cpu().DotProductAttention(4, 16, attention_dropout=0.5, attn_mask_type="no_mask", qkv_format="bshd")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 32, 4, 16, dtype=dtype) for _ in range(3))
    value.requires_grad_()
    context = core(query, key, value)
    gradient = torch.randn_like(context)
    context.backward(gradient)
    assert value.grad is not None
    forward = (context.detach().double() * gradient.double()).sum()
    backward = (value.detach().double() * value.grad.double()).sum()
    scale = context.detach().double().norm() * gradient.double().norm()
    assert abs(forward - backward) < 4 * torch.finfo(dtype).eps * scale / math.sqrt(context.numel()) + 1e-3 * abs(
        forward
    )
