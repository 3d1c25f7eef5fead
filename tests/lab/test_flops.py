"""FLOP formulas against PyTorch's counter and against norms that are written out, and laws that the formulas obey."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from parity.measuring import flops
from parity.measuring.flops import Flops, LayerSizes

GPT = LayerSizes(batch=2, seq=32, hidden=64, heads=4, groups=4, head_dim=16, ffn=256)
sizes = st.builds(
    LayerSizes,
    batch=st.integers(1, 4),
    seq=st.integers(1, 64),
    hidden=st.integers(1, 64),
    heads=st.sampled_from([2, 4, 8]),
    groups=st.sampled_from([1, 2]),
    head_dim=st.integers(1, 16),
    ffn=st.integers(1, 64),
    gated=st.booleans(),
    rms=st.booleans(),
    causal=st.booleans(),
)


def products(sizes: LayerSizes) -> dict[str, Flops]:
    return flops.in_products(flops.layer(sizes))


def test_a_gpt_layer_takes_24_b_s_h2_and_4_b_s2_h_forward() -> None:
    b, s, h = GPT.batch, GPT.seq, GPT.hidden
    assert sum(each.forward for each in products(GPT).values()) == 24 * b * s * h**2 + 4 * b * s**2 * h


def test_a_gate_at_the_same_width_makes_24_into_32() -> None:
    gated = products(dataclasses.replace(GPT, gated=True))
    without_attention = sum(each.forward for name, each in gated.items() if name not in ("scores", "context"))
    assert without_attention == 32 * GPT.tokens * GPT.hidden**2


def test_a_gate_at_two_thirds_of_the_width_leaves_24() -> None:
    plain = dataclasses.replace(GPT, hidden=48, head_dim=12, ffn=192)
    gated = dataclasses.replace(plain, gated=True, ffn=128)
    assert flops.total(products(gated).values()) == flops.total(products(plain).values())


def test_grouped_queries_shrink_keys_and_values_and_nothing_else() -> None:
    grouped = flops.layer(dataclasses.replace(GPT, groups=1))
    for name, each in flops.layer(GPT).items():
        shrinks = 4 if name in ("key", "value") else 1
        assert grouped[name].forward * shrinks == each.forward


@given(sizes)
def test_backward_is_twice_forward_in_products(sizes: LayerSizes) -> None:
    assert all(each.backward == 2 * each.forward for each in products(sizes).values())


@given(sizes)
def test_full_recomputation_is_another_forward_pass_and_selective_is_attention_alone(sizes: LayerSizes) -> None:
    layer = flops.layer(sizes)
    assert flops.recomputed(layer, "none") == 0
    assert flops.recomputed(layer, "full") == sum(each.forward for each in layer.values())
    assert flops.recomputed(layer, "selective") == layer["scores"].forward + layer["context"].forward


@given(st.integers(1, 24), st.integers(1, 24), st.booleans(), st.none() | st.integers(0, 24))
def test_visible_pairs_are_those_of_the_mask(queries: int, keys: int, causal: bool, window: int | None) -> None:
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance <= window
    assert flops.visible_pairs(queries, keys, causal, window) == visible.sum().item()


def test_logits_are_counted_as_pytorch_counts_them() -> None:
    x, head = torch.randn(6, 8, requires_grad=True), nn.Linear(8, 50)
    with FlopCounterMode(display=False) as counter:
        head(x).sum().backward()
    assert counter.get_total_flops() == flops.total([flops.logits(6, 8, 50)])


def test_an_unknown_module_is_told() -> None:
    with pytest.raises(TypeError, match="FLOPs of Bilinear are not known"):
        flops.components(nn.Bilinear(2, 2, 2), torch.zeros(2))


TOKENS, HIDDEN = 8, 16
ELEMENTS = TOKENS * HIDDEN


class ElementCounter(TorchDispatchMode):
    """Counts additions and multiplications of whole ``[TOKENS, HIDDEN]`` tensors, and sums over them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, Tensor)] + [result]
        if any(tensor.numel() == ELEMENTS for tensor in tensors):
            self.count += ELEMENTS
        return result


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / HIDDEN
    scale = torch.rsqrt((centred * centred).sum(-1, keepdim=True) / HIDDEN)
    return centred * scale * gamma + beta


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / HIDDEN) * gamma


def layer_norm_backward(x: Tensor, gamma: Tensor, g: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    normed = (x - mean) * scale
    dbeta, dgamma = g.sum(0), (g * normed).sum(0)
    scaled = g * gamma
    first, second = scaled.sum(-1, keepdim=True) / HIDDEN, (scaled * normed).sum(-1, keepdim=True) / HIDDEN
    return (scaled - (normed * second + first)) * scale, dgamma, dbeta


def rms_norm_backward(x: Tensor, gamma: Tensor, g: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    normed = x * scale
    dgamma = (g * normed).sum(0)
    scaled = g * gamma
    return (scaled - normed * ((scaled * normed).sum(-1, keepdim=True) / HIDDEN)) * scale, dgamma


def counted(function: Callable[..., Any], *arguments: Tensor) -> int:
    with ElementCounter() as counter:
        function(*arguments)
    return counter.count


@pytest.fixture
def norm_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, g = (torch.randn(TOKENS, HIDDEN, generator=rng, dtype=torch.float64) for _ in range(2))
    gamma, beta = (torch.randn(HIDDEN, generator=rng, dtype=torch.float64) for _ in range(2))
    return x, g, gamma, beta


def test_layer_norm_takes_what_its_definition_written_out_takes(norm_inputs: tuple[Tensor, ...]) -> None:
    x, g, gamma, beta = norm_inputs
    mean, scale = x.mean(-1, keepdim=True), 1 / x.var(-1, keepdim=True, correction=0).sqrt()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gamma, beta)]
    plain = nn.functional.layer_norm(leaves[0], (HIDDEN,), *leaves[1:], eps=0)
    torch.testing.assert_close(layer_norm(x, gamma, beta), plain.detach())
    expected = torch.autograd.grad(plain, leaves, g)
    for ours, gradient in zip(layer_norm_backward(x, gamma, g, mean, scale), expected, strict=True):
        torch.testing.assert_close(ours, gradient)
    formula = flops.layer_norm(TOKENS, HIDDEN)
    assert counted(layer_norm, x, gamma, beta) == formula.forward
    assert counted(layer_norm_backward, x, gamma, g, mean, scale) == formula.backward


def test_rms_norm_takes_what_its_definition_written_out_takes(norm_inputs: tuple[Tensor, ...]) -> None:
    x, g, gamma, _ = norm_inputs
    scale = 1 / x.square().mean(-1, keepdim=True).sqrt()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gamma)]
    plain = nn.functional.rms_norm(leaves[0], (HIDDEN,), leaves[1], eps=0)
    torch.testing.assert_close(rms_norm(x, gamma), plain.detach())
    expected = torch.autograd.grad(plain, leaves, g)
    for ours, gradient in zip(rms_norm_backward(x, gamma, g, scale), expected, strict=True):
        torch.testing.assert_close(ours, gradient)
    formula = flops.rms_norm(TOKENS, HIDDEN)
    assert counted(rms_norm, x, gamma) == formula.forward
    assert counted(rms_norm_backward, x, gamma, g, scale) == formula.backward
