"""TE's permutations of tokens for mixtures of experts on the CPU kernels, forward and backward."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from parity.cpu import permutation

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {FP32: 2.0**-22, BF16: 2.0**-8, FP16: 2.0**-11}
TOKENS, EXPERTS, HIDDEN = 11, 4, 16


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def make_mask(seed: int = 0) -> Tensor:
    """``[TOKENS, EXPERTS]``; the third token goes nowhere, the last expert gets nothing."""
    mask = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[2] = False
    mask[:, -1] = False
    return mask


def token_of_row(mask: Tensor) -> Tensor:
    """Rows are sorted by expert; within an expert they keep the order of the tokens."""
    return torch.cat([column.nonzero()[:, 0] for column in mask.t()])


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def assert_rounded(actual: Tensor | None, exact: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.double(), exact, rtol=ROUNDING[actual.dtype], atol=2e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_mask_sends_each_token_to_a_row_of_each_of_its_experts(te_module: ModuleType, dtype: torch.dtype) -> None:
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    source = token_of_row(mask)
    rows, _ = te_module.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    assert torch.equal(rows, x[source])
    grad = torch.randn_like(rows)
    rows.backward(grad)
    assert_rounded(x.grad, torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add_(0, source, grad.double()))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_unpermuting_adds_up_rows_times_merging_probabilities(te_module: ModuleType, dtype: torch.dtype) -> None:
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN).to(dtype)
    source, probs = token_of_row(mask), (torch.rand(TOKENS, EXPERTS) * make_mask()).requires_grad_()
    rows, row_id_map = te_module.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    rows = (2 * rows).detach().requires_grad_()
    y = te_module.moe_unpermute(rows, row_id_map, merging_probs=probs, restore_shape=x.shape, map_type="mask")
    grad = torch.randn_like(y)
    y.backward(grad)
    rows64, probs64 = rows.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    chosen = probs64.t()[mask.t()]
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add(0, source, rows64 * chosen[:, None])
    exact.backward(grad.double())
    assert_rounded(y, exact)
    assert_rounded(rows.grad, rows64.grad)
    torch.testing.assert_close(grad_of(probs).double(), probs64.grad, rtol=1e-5, atol=1e-5)


def test_probabilities_move_with_their_tokens_and_bring_their_gradients_back(te_module: ModuleType) -> None:
    # In 2.14, probabilities get a gradient only if the tokens do.
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs = (torch.rand(TOKENS, EXPERTS) * mask).requires_grad_()
    source = token_of_row(mask)
    rows, row_probs, _ = te_module.moe_permute_with_probs(x, probs, mask.int(), num_out_tokens=len(source))
    assert torch.equal(rows, x[source])
    assert torch.equal(row_probs, probs.t()[mask.t()])
    grad = torch.randn_like(row_probs)
    row_probs.backward(grad)
    expected = torch.zeros(EXPERTS, TOKENS).masked_scatter_(mask.t(), grad).t()
    assert torch.equal(grad_of(probs), expected)


def test_a_row_of_probability_zero_is_zero(te_module: ModuleType) -> None:
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN)
    probs = torch.rand(TOKENS, EXPERTS) * mask
    token, expert = mask.nonzero()[0]
    probs[token, expert] = 0
    rows, row_probs, _ = te_module.moe_permute_with_probs(x, probs, mask.int(), num_out_tokens=int(mask.sum()))
    assert not rows[row_probs == 0].any()
    assert rows[row_probs != 0].all()


@pytest.mark.parametrize("align", [4, 16])
def test_padding_while_permuting_equals_padding_afterwards(te_module: ModuleType, align: int) -> None:
    if not hasattr(te_module, "moe_permute_and_pad_with_probs"):
        pytest.skip("this version does not pad while permuting")
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs, counts = torch.rand(TOKENS, EXPERTS) * mask, mask.sum(0)
    padded, _, row_id_map, pad_offsets, sizes = te_module.moe_permute_and_pad_with_probs(
        x, probs, mask.int(), counts, align
    )
    rows, _ = te_module.moe_permute(x, mask.int(), num_out_tokens=int(counts.sum()), map_type="mask")
    splits = counts.tolist()
    expected, _ = te_module.Fp8Padding(EXPERTS, align_size=align)(rows, splits)
    assert sizes.tolist() == [-(-size // align) * align for size in splits]
    assert torch.equal(padded, expected)
    back = te_module.moe_unpermute(padded, row_id_map, restore_shape=x.shape, map_type="mask", pad_offsets=pad_offsets)
    torch.testing.assert_close(back, x * mask.sum(1, keepdim=True))
    back.sum().backward()
    torch.testing.assert_close(x.grad, (mask.sum(1, keepdim=True) * 1.0).expand(TOKENS, HIDDEN))


def test_fp8_tokens_are_permuted_as_bytes(te_module: ModuleType) -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine_torch import DType

    mask, quantizer = make_mask(), Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)
    x = quantizer(torch.randn(TOKENS, HIDDEN))
    source = token_of_row(mask)
    rows, _ = te_module.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    assert torch.equal(rows._data, x._data[source])
    assert torch.equal(rows.dequantize(), x.dequantize()[source])


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kept", [0, 15])
def test_an_index_map_sorts_by_expert_and_drops_the_last_rows(
    te_module: ModuleType, dtype: torch.dtype, kept: int
) -> None:
    top_k = 2
    indices = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :top_k].int()
    x = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    probs = torch.rand(TOKENS, top_k, requires_grad=True)
    rows, row_id_map = te_module.moe_permute(x, indices, num_out_tokens=kept, map_type="index")
    choices = indices.reshape(-1).argsort(stable=True)[: kept or TOKENS * top_k]
    assert torch.equal(rows, x[choices // top_k])
    y = te_module.moe_unpermute(rows, row_id_map, merging_probs=probs, map_type="index")
    grad = torch.randn_like(y)
    y.backward(grad)
    x64, probs64 = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    weight = torch.zeros(TOKENS * top_k, dtype=torch.float64).index_fill(0, choices, 1.0).view(TOKENS, top_k)
    exact = x64 * (weight * probs64).sum(1, keepdim=True)
    exact.backward(grad.double())
    assert_rounded(y, exact)
    torch.testing.assert_close(grad_of(x).double(), x64.grad, rtol=2 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])
    torch.testing.assert_close(grad_of(probs).double(), probs64.grad, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31))
def test_unpermuting_without_probabilities_multiplies_by_the_number_of_choices(
    tokens: int, top_k: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 8, (tokens, 4), generator=rng).float()
    indices = torch.randint(0, 3, (tokens, top_k), generator=rng).int()
    rows, row_id_map, _ = permutation.moe_permute_fwd(x, 4, indices, 0, [], tokens * top_k)
    back = permutation.moe_unpermute_fwd(rows, 4, row_id_map, torch.empty(0), tokens, top_k)
    assert torch.equal(back, x * top_k)


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@settings(max_examples=30)
@given(sizes, st.randoms())
def test_chunks_change_places_and_gradients_change_back(split_sizes: list[int], random: object) -> None:
    if not sum(split_sizes):
        return
    te_module = te.kernels("cpu").te
    order = list(range(len(split_sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    x, probs = torch.randn(sum(split_sizes), 3, requires_grad=True), torch.rand(sum(split_sizes))
    y, y_probs = te_module.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor(split_sizes), torch.tensor(order))
    chunks = x.split(split_sizes)
    assert torch.equal(y, torch.cat([chunks[i] for i in order]))
    assert torch.equal(y_probs, torch.cat([probs.split(split_sizes)[i] for i in order]))
    y.backward(2 * y.detach())
    assert torch.equal(grad_of(x), 2 * x)
