"""Attention in blocks of queries gives the same numbers as attention that is written out, with less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.numerics import blocked_attention, golden
from parity.numerics.blocked_attention import attention
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.numerics.golden import attention_in_blocks
from parity.numerics.rounding import rounded
from parity.reference import CoreAttention

MASKS = ("none", "causal", "additive", "additive of all dimensions", "boolean", "padding", "lower right", "upper left")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "WRITTEN_OUT", 0)
    monkeypatch.setattr(blocked_attention, "_BLOCK", 20)
    monkeypatch.setattr(golden, "_is_linear_already", lambda **call: False)


def gradients(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradient of each floating-point input."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = call(*leaves)
    above = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    differentiable = [x for x in leaves if x.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, differentiable, above)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, equal_nan=True)


def masked(kind: str, heads: int, queries: int, keys: int) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Return a mask as an input, if it is one, and the arguments for PyTorch's mask and for its written-out twin."""
    if kind == "causal":
        return [], {"is_causal": True}, {"is_causal": True}
    if kind == "lower right":
        written_out = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return [], {"attn_mask": causal_lower_right(queries, keys)}, {"attn_mask": written_out}
    if kind == "upper left":
        return [], {"attn_mask": causal_upper_left(queries, keys)}, {"is_causal": True}
    shapes = {"additive of all dimensions": (2, heads, queries, keys), "padding": (2, 1, 1, keys)}
    drawn = torch.randn(shapes.get(kind, (queries, keys)), dtype=torch.float64)
    if kind == "none":
        return [], {}, {}
    return [drawn if kind.startswith("additive") else drawn > 0], {}, {}


@settings(max_examples=60)
@given(
    st.sampled_from(MASKS),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([None, 0.3, -0.5, 0.0]),
    st.integers(0, 99),
)
def test_blocks_give_pytorchs_attention_and_its_gradients(
    kind: str, heads: tuple[int, int], queries: int, keys: int, scale: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    if kind == "lower right":
        keys = max(keys, queries)  # otherwise PyTorch warns of rows without keys
    shapes = ((2, heads[0], queries, 8), (2, heads[1], keys, 8), (2, heads[1], keys, 6))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mask, ours, theirs = masked(kind, heads[0], queries, keys)
    common = {"scale": scale, "enable_gqa": heads[0] != heads[1]}
    plain = gradients(lambda *x: F.scaled_dot_product_attention(*x, **common, **theirs), [*inputs, *mask])
    with attention_in_blocks():
        blocked = gradients(lambda *x: F.scaled_dot_product_attention(*x, **common, **ours), [*inputs, *mask])
    assert_same(blocked, plain)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
def test_blocks_take_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    inputs = [torch.randn(*leading, length, 4, dtype=torch.float64) for length in (7, 9, 9)]
    plain = gradients(F.scaled_dot_product_attention, inputs)
    with attention_in_blocks():
        assert_same(gradients(F.scaled_dot_product_attention, inputs), plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9)])
def test_the_reference_in_blocks_is_the_one_written_out(
    causal: bool, window: int | None, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = lengths
    inputs = [torch.randn(2, n, heads, 4, dtype=torch.float64) for n, heads in ((queries, 4), (keys, 2), (keys, 2))]
    seen = 3 if window is None else keys  # each query sees at least one key
    is_padding = torch.arange(keys) >= torch.tensor([keys, seen])[:, None]
    module = CoreAttention(causal, window)
    blocked = gradients(module, [*inputs, is_padding])
    monkeypatch.setattr(blocked_attention, "WRITTEN_OUT", 10**9)
    assert_same(blocked, gradients(module, [*inputs, is_padding]))


def test_a_query_that_sees_no_key_is_nan_like_softmax_or_zero_like_scaled_dot_product_attention() -> None:
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert attention(query, key, key, nothing).isnan().all()
    with attention_in_blocks():
        assert not F.scaled_dot_product_attention(query, key, key, attn_mask=nothing).any()


def test_what_pytorch_refuses_is_refused_in_its_words() -> None:
    query, key = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 5, 4)
    with attention_in_blocks(), pytest.raises(RuntimeError, match="size of tensor"):
        F.scaled_dot_product_attention(query, key, key)


class _Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest(length: int, call: Callable[..., Tensor]) -> int:
    inputs = [torch.randn(1, 2, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with _Largest() as seen:
        call(*inputs).sum().backward()
    return seen.elements


@pytest.mark.parametrize("length", [256, 1024])
def test_no_tensor_is_larger_than_a_block_or_an_input(length: int) -> None:
    with attention_in_blocks():
        blocked = largest(length, lambda *x: F.scaled_dot_product_attention(*x, is_causal=True))
    assert blocked == 2 * length * 4
    with sdpa_kernel(SDPBackend.MATH):  # which a GPU uses for FP64
        assert largest(length, lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)) == 2 * length**2


def test_pytorchs_own_kernel_stays_where_it_holds_no_scores_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(blocked_attention, "WRITTEN_OUT", 0)
    inputs = [torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(3)]
    with attention_in_blocks():
        computed = F.scaled_dot_product_attention(*inputs)
    assert torch.equal(computed, F.scaled_dot_product_attention(*inputs))
    assert not torch.equal(computed, attention(*inputs))


def scaled_dot_product(*x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*x, is_causal=True)


def written_out(*x: Tensor) -> Tensor:
    return CoreAttention(causal=True)(*(tensor.transpose(1, 2) for tensor in x))


@pytest.mark.parametrize("call", [scaled_dot_product, written_out])
@pytest.mark.parametrize("freedom", [FUSED, UNFUSED], ids=["fused", "unfused"])
def test_no_tensor_of_the_rounding_model_is_larger_either(call: Callable[..., Tensor], freedom: Freedom) -> None:
    inputs = [torch.randn(1, 2, 256, 4, requires_grad=True) for _ in range(3)]
    with _Largest() as seen, rounded(Rounding(torch.bfloat16), freedom=freedom) as phase:
        context = call(*inputs)
        phase.begin_backward()
        context.sum().backward()
    assert seen.elements == 2 * 256 * 4
    assert torch.equal(context, context.bfloat16().float())


@pytest.fixture(params=[(a, b, c) for a in (False, True) for b in (False, True) for c in (1, 3)], ids=str)
def freedom(request: pytest.FixtureRequest) -> Freedom:
    scores, pointwise, splits = request.param
    return Freedom(scores, False, pointwise, splits)


def rounded_gradients(dtype: torch.dtype, freedom: Freedom, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and gradients of causal attention under the rounding model."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with rounded(Rounding(dtype), freedom=freedom) as phase:
        result = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        phase.begin_backward()
        torch.autograd.backward(result, torch.ones_like(result).cumsum(-1))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_the_rounding_model_in_blocks_rounds_where_the_one_written_out_does(
    freedom: Freedom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order round a few elements differently; an extra rounding changes all of them."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 24, 20).bfloat16().float() for heads in (4, 2, 2)]
    blocked = rounded_gradients(torch.bfloat16, freedom, inputs)
    monkeypatch.setattr(blocked_attention, "WRITTEN_OUT", 10**9)
    written_out = rounded_gradients(torch.bfloat16, freedom, inputs)
    exact = rounded_gradients(torch.float32, freedom, inputs)
    for one, other, true in zip(blocked, written_out, exact, strict=True):
        assert (one - other).norm() < 0.25 * (other - true).norm()
