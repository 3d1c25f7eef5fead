"""FP8 attention, which TE emulates on its unfused path with ``NVTE_UnfusedDPA_Emulate_FP8=1``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attention_oracle as oracle
import backend_choice
import pytest
import torch

from parity import te

BF16 = torch.bfloat16
BATCH, SEQ, HEADS, FEATURES = 2, 32, 4, 16
RECIPES = {
    "delayed": ("DelayedScaling", {"fp8_dpa": True}),
    "current": ("Float8CurrentScaling", {"fp8_dpa": True}),
    "delayed, MHA": ("DelayedScaling", {"fp8_dpa": True, "fp8_mha": True}),
}


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def recipe(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    kind, options = RECIPES[name]
    return getattr(recipes, kind)(**options)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_attention_in_fp8_is_as_near_to_fp64_as_e4m3_and_e5m2_allow(
    te_module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    backend_choice.choose_again()
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(BATCH, SEQ, HEADS, FEATURES, generator=rng).to(BF16) for _ in range(4)]
    attention = te_module.DotProductAttention(HEADS, FEATURES, attention_dropout=0.0, qkv_format="bshd")
    actual: list[torch.Tensor] = []
    # The first steps of delayed scaling fill the history of amaxes.
    for _ in range(3):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        with te_module.autocast(enabled=True, recipe=recipe(name)):
            output = attention(*inputs, attn_mask_type="causal").view_as(tensors[3])
        actual = [output, *torch.autograd.grad(output, inputs, tensors[3])]
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    exact = oracle.attend(q, k, v, oracle.visible(SEQ, SEQ, right=0))
    expected = [exact, *torch.autograd.grad(exact, [q, k, v], tensors[3].double())]
    for got, wanted in zip(actual, expected, strict=True):
        error = oracle.relative_error(got, wanted) * torch.finfo(BF16).eps
        # One rounding to E4M3 costs about 2^-5.5 in norm, to E5M2 2^-4.5; a handful of them take part.
        assert 2**-6 < error < 2**-2.5


def losses(te_module: ModuleType, fp8_recipe: Any) -> list[float]:
    """Of a layer that learns one output by heart, in FP8 or, without a recipe, in BF16."""
    torch.manual_seed(0)
    layer = te_module.TransformerLayer(
        64, 128, 4, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    )
    x, target = torch.randn(SEQ, BATCH, 64).to(BF16), torch.randn(SEQ, BATCH, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=5.0)
    result = []
    for _ in range(6):
        with te_module.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
            output = layer(x)
        loss = (output.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_with_fp8_attention_learns_as_in_bf16(
    te_module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    backend_choice.choose_again()
    expected = losses(te_module, None)
    actual = losses(te_module, recipe(name))
    assert expected[-1] < 0.95 * expected[0]
    assert actual == pytest.approx(expected, rel=0.02)
    assert actual != expected


def test_without_emulation_te_says_that_it_has_no_backend(
    te_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    backend_choice.choose_again()
    attention = te_module.DotProductAttention(HEADS, FEATURES, attention_dropout=0.0, qkv_format="bshd")
    inputs = [torch.randn(BATCH, SEQ, HEADS, FEATURES).to(BF16) for _ in range(3)]
    with (
        te_module.autocast(enabled=True, recipe=recipe("delayed")),
        pytest.raises(ValueError, match="No dot product attention"),
    ):
        attention(*inputs, attn_mask_type="causal")
