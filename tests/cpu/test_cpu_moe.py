"""Mixtures of experts: TE's permutations of tokens, and its router against FP64 formulas."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import softplus

from parity import te
from te_on_cpu import router as kernels
from te_on_cpu import versions
from te_on_cpu.router import largest

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {FP32: 2.0**-22, BF16: 2.0**-8, FP16: 2.0**-11}
TOKENS, EXPERTS, HIDDEN = 11, 4, 16


def make_mask(seed: int = 0) -> Tensor:
    """Return ``[TOKENS, EXPERTS]``; the third token goes to no expert, and the last expert gets no token."""
    mask = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[2] = False
    mask[:, -1] = False
    return mask


def token_of_row(mask: Tensor) -> Tensor:
    """Return each row's token. Rows are sorted by expert, and within an expert they keep the tokens' order."""
    return torch.cat([column.nonzero()[:, 0] for column in mask.t()])


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def assert_rounded(actual: Tensor | None, exact: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.double(), exact, rtol=ROUNDING[actual.dtype], atol=2e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_mask_sends_each_token_to_a_row_of_each_of_its_experts(dtype: torch.dtype) -> None:
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    source = token_of_row(mask)
    rows, _ = TE.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    assert torch.equal(rows, x[source])
    grad = torch.randn_like(rows)
    rows.backward(grad)
    assert_rounded(x.grad, torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add_(0, source, grad.double()))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_unpermuting_adds_up_rows_times_merging_probabilities(dtype: torch.dtype) -> None:
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN).to(dtype)
    source, probs = token_of_row(mask), (torch.rand(TOKENS, EXPERTS) * make_mask()).requires_grad_()
    rows, row_id_map = TE.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    rows = (2 * rows).detach().requires_grad_()
    y = TE.moe_unpermute(rows, row_id_map, merging_probs=probs, restore_shape=x.shape, map_type="mask")
    grad = torch.randn_like(y)
    y.backward(grad)
    rows64, probs64 = rows.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    chosen = probs64.t()[mask.t()]
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add(0, source, rows64 * chosen[:, None])
    exact.backward(grad.double())
    assert_rounded(y, exact)
    assert_rounded(rows.grad, rows64.grad)
    torch.testing.assert_close(grad_of(probs).double(), probs64.grad, rtol=1e-5, atol=1e-5)


def test_probabilities_move_with_their_tokens_and_bring_their_gradients_back() -> None:
    # In 2.14, probabilities get a gradient only if the tokens do.
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS) * mask
    probs[tuple(mask.nonzero()[0])] = 0  # a row of probability 0 is 0
    source = token_of_row(mask)
    rows, row_probs, _ = TE.moe_permute_with_probs(x, probs.requires_grad_(), mask.int(), num_out_tokens=len(source))
    assert torch.equal(row_probs, probs.t()[mask.t()])
    assert (row_probs == 0).sum() == 1
    assert torch.equal(rows, x[source] * (row_probs != 0)[:, None])
    grad = torch.randn_like(row_probs)
    row_probs.backward(grad)
    expected = torch.zeros(EXPERTS, TOKENS).masked_scatter_(mask.t(), grad).t()
    assert torch.equal(grad_of(probs), expected)


@pytest.mark.parametrize("align", [4, 16])
def test_padding_while_permuting_equals_padding_afterwards(align: int) -> None:
    if not hasattr(TE, "moe_permute_and_pad_with_probs"):
        pytest.skip("this version does not pad while permuting")
    mask, x = make_mask(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs, counts = torch.rand(TOKENS, EXPERTS) * mask, mask.sum(0)
    padded, _, row_id_map, pad_offsets, sizes = TE.moe_permute_and_pad_with_probs(x, probs, mask.int(), counts, align)
    rows, _ = TE.moe_permute(x, mask.int(), num_out_tokens=int(counts.sum()), map_type="mask")
    splits = counts.tolist()
    expected, _ = TE.Fp8Padding(EXPERTS, align_size=align)(rows, splits)
    assert sizes.tolist() == [-(-size // align) * align for size in splits]
    assert torch.equal(padded, expected)
    back = TE.moe_unpermute(padded, row_id_map, restore_shape=x.shape, map_type="mask", pad_offsets=pad_offsets)
    torch.testing.assert_close(back, x * mask.sum(1, keepdim=True))
    back.sum().backward()
    torch.testing.assert_close(x.grad, (mask.sum(1, keepdim=True) * 1.0).expand(TOKENS, HIDDEN))


def test_fp8_tokens_are_permuted_as_bytes() -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine_torch import DType

    mask, quantizer = make_mask(), Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)
    x = quantizer(torch.randn(TOKENS, HIDDEN))
    source = token_of_row(mask)
    rows, _ = TE.moe_permute(x, mask.int(), num_out_tokens=len(source), map_type="mask")
    assert torch.equal(rows._data, x._data[source])
    assert torch.equal(rows.dequantize(), x.dequantize()[source])


@pytest.mark.parametrize("kept", [0, 15])
def test_an_index_map_sorts_by_expert_and_drops_the_last_rows(kept: int) -> None:
    top_k = 2
    indices = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :top_k].int()
    x, probs = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, top_k, requires_grad=True)
    rows, row_id_map = TE.moe_permute(x, indices, num_out_tokens=kept, map_type="index")
    choices = indices.reshape(-1).argsort(stable=True)[: kept or TOKENS * top_k]
    assert torch.equal(rows, x[choices // top_k])
    y = TE.moe_unpermute(rows, row_id_map, merging_probs=probs, map_type="index")
    grad = torch.randn_like(y)
    is_kept = torch.zeros(TOKENS * top_k).index_fill(0, choices, 1.0).view(TOKENS, top_k)
    expected = x * (is_kept * probs).sum(1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    gradients, wanted = (torch.autograd.grad(out, [x, probs], grad, retain_graph=True) for out in (y, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_an_index_map_rounds_probabilities_products_and_sums_to_the_dtype_of_the_rows(dtype: torch.dtype) -> None:
    """Follow ``TCompute`` in TE 2.20.2, common/permutation/permutation.cu; products are added without being rounded."""
    tokens, top_k = 40, 3
    rng = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(n, HIDDEN, generator=rng).to(dtype) for n in (tokens * top_k, tokens))
    probs = torch.rand(tokens, top_k, generator=rng)
    row_id_map = torch.randperm(tokens * top_k, generator=rng).int()
    choices = rows[row_id_map.long()].view(top_k, tokens, HIDDEN)
    weights = probs.to(dtype).t()[:, :, None]
    merged = choices[0] * weights[0]
    summed = choices[0]
    for choice, weight in zip(choices[1:], weights[1:], strict=True):
        merged = (merged.double() + choice.double() * weight.double()).to(dtype)
        summed = summed + choice
    assert torch.equal(kernels.moe_unpermute_fwd(rows, 0, row_id_map, probs, tokens, top_k), merged)
    assert torch.equal(kernels.moe_permute_bwd(rows, 0, row_id_map, torch.empty(0), tokens, top_k), summed)
    rows_grad, probs_grad = kernels.moe_unpermute_bwd(grad, rows, 0, row_id_map, probs)
    assert torch.equal(rows_grad[row_id_map.long()].view_as(choices), grad * weights)
    products = (grad * choices).float().sum(2).t()
    torch.testing.assert_close(probs_grad, products, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_probability_is_added_up_in_the_order_of_a_warp() -> None:
    """Follow TE 2.20.2, common/permutation/permutation.cu: lanes load 16 bytes each, and their sums are added last."""
    large, lost = 2.0**24, 1.0  # FP32 loses the second when it is added to the first
    grad, rows = torch.zeros(4, 256), torch.ones(4, 256)
    grad[0, :2] = torch.tensor([large, lost])  # one lane, one load
    grad[1, [0, 128]] = torch.tensor([large, lost])  # one lane, two loads
    grad[2, [0, 4, 68]] = torch.tensor([large, lost, lost])  # three lanes, of which the latter two differ by 16
    grad[3, [0, 4, 8]] = torch.tensor([large, lost, lost])  # three lanes, of which no two do
    row_id_map = torch.arange(4, dtype=torch.int32)
    _, probs_grad = kernels.moe_unpermute_bwd(grad, rows, 0, row_id_map, torch.ones(4, 1))
    assert probs_grad.flatten().tolist() == [large, large, large + 2, large]


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@settings(max_examples=30)
@given(sizes, st.randoms())
def test_chunks_change_places_and_gradients_change_back(split_sizes: list[int], random: object) -> None:
    if not sum(split_sizes):
        return
    order = list(range(len(split_sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    x, probs = torch.randn(sum(split_sizes), 3, requires_grad=True), torch.rand(sum(split_sizes))
    y, y_probs = TE.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor(split_sizes), torch.tensor(order))
    chunks = x.split(split_sizes)
    assert torch.equal(y, torch.cat([chunks[i] for i in order]))
    assert torch.equal(y_probs, torch.cat([probs.split(split_sizes)[i] for i in order]))
    y.backward(2 * y.detach())
    assert torch.equal(grad_of(x), 2 * x)


SCORE_FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
ROUTED_TOKENS, ROUTED_EXPERTS = 9, 40

needs_2_18 = pytest.mark.skipif(
    versions.installed_version() < Version("2.18"), reason="maps of bits and dense indices came with 2.18"
)


def router() -> Any:
    te.kernels("cpu")
    from transformer_engine.pytorch import router as module

    return module


def route(
    logits: Tensor, topk: int, score_function: str = "sigmoid", bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the map of the experts chosen, by default without groups and with scale 1."""
    places = {"use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None} | options
    first = [places.pop(name) for name in ("use_pre_softmax", "num_groups", "group_topk", "scaling_factor")]
    return router().fused_topk_with_score_function(logits, topk, *first, score_function, bias, **places)


def distinct_logits(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return logits that differ within a row in any dtype, some of them beyond 20, where softplus is the identity."""
    rng = torch.Generator().manual_seed(seed)
    steps = torch.rand(ROUTED_TOKENS, ROUTED_EXPERTS, generator=rng).argsort(1).double()
    return (steps / 8 - 2).where(steps < ROUTED_EXPERTS - 1, 21.0).to(dtype)


def fp64_scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if score_function == "sigmoid" else softplus(logits).sqrt()


def fp64_probs(
    logits: Tensor, topk: int, pre_softmax: bool, scale: float, score_function: str, bias: Tensor | None
) -> Tensor:
    """Return the probabilities defined by the table in ``te_on_cpu/router.py``."""
    scores = logits if score_function == "softmax" and not pre_softmax else fp64_scores(logits, score_function)
    chosen = (scores if bias is None else scores + bias.double()).topk(topk, 1).indices
    values = scores.gather(1, chosen)
    if score_function == "softmax":
        values = values if pre_softmax else values.softmax(1)
    elif topk > 1:
        values = values / values.sum(1, keepdim=True)
    return torch.zeros_like(logits).scatter(1, chosen, scale * values)


@pytest.mark.parametrize(("topk", "dtype"), [(1, FP32), (4, BF16), (17, FP16), (17, FP32)])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_router_agrees_with_its_formula(score_function: str, topk: int, dtype: torch.dtype) -> None:
    biases = [None] if score_function == "softmax" else [None, torch.linspace(0.5, -0.5, ROUTED_EXPERTS)]
    for pre_softmax, scale, bias in product([True, False], [1.0, 2.5], biases):
        x = distinct_logits(dtype).requires_grad_()
        probs, routing_map = route(x, topk, score_function, bias, use_pre_softmax=pre_softmax, scaling_factor=scale)
        x64 = x.detach().double().requires_grad_()
        exact = fp64_probs(x64, topk, pre_softmax, scale, score_function, bias)
        grad = torch.randn(probs.shape).to(dtype)
        probs.backward(grad)
        exact.backward(grad.double())
        eps = torch.finfo(dtype).eps
        assert torch.equal(routing_map, exact != 0)
        torch.testing.assert_close(probs.double(), exact, rtol=max(eps, 1e-5), atol=1e-6)
        torch.testing.assert_close(grad_of(x).double(), x64.grad, rtol=max(eps, 1e-4), atol=1e-5)
        if score_function != "softmax" or not pre_softmax:
            # They are 0, never -0 (TE 2.20.2, common/fused_router/fused_topk_with_score_function.cu).
            assert not grad_of(x)[~routing_map].signbit().any()


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_only_experts_of_the_best_groups_are_chosen(score_function: str) -> None:
    groups, group_topk, topk = 8, 2, 4
    logits = distinct_logits(FP32)
    probs, routing_map = route(
        logits, topk, score_function, use_pre_softmax=True, num_groups=groups, group_topk=group_topk
    )
    scores = fp64_scores(logits.double(), score_function).view(ROUTED_TOKENS, groups, -1)
    best = scores.topk(topk // group_topk, 2).values.sum(2).topk(group_topk, 1).indices
    inside = torch.zeros(ROUTED_TOKENS, groups, dtype=torch.bool).scatter(1, best, True)[:, :, None]
    expected = scores.masked_fill(~inside, -1).view(ROUTED_TOKENS, ROUTED_EXPERTS).topk(topk, 1).indices
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, expected, True))
    assert torch.equal(probs != 0, routing_map)


@needs_2_18
@pytest.mark.parametrize("topk", [3, 17])
def test_a_map_of_bits_and_dense_indices_say_what_the_map_of_bytes_says(topk: int) -> None:
    logits, grad = distinct_logits(FP32)[:, :37].contiguous(), torch.randn(ROUTED_TOKENS, 37)
    results = []
    indices = torch.empty(ROUTED_TOKENS, topk, dtype=torch.int16)
    for options in ({}, {"routing_map_format": "bitmap_u8"}, {"topk_indices": indices}):
        x = logits.clone().requires_grad_()
        probs, routing = route(x, topk, **options)
        probs.backward(grad)
        results.append((probs.detach(), routing, grad_of(x)))
    (probs, mask, logits_grad), bits, dense = results
    for other in (bits, dense):
        assert torch.equal(other[0], probs)
        assert torch.equal(other[2], logits_grad)
    assert bits[1].shape == (ROUTED_TOKENS, 5)
    unpacked = torch.stack([(bits[1][:, e // 8] >> (e % 8)) & 1 for e in range(37)], 1)
    assert torch.equal(unpacked.bool(), mask)
    assert dense[1] is indices or dense[1].data_ptr() == indices.data_ptr()
    assert torch.equal(torch.zeros_like(mask).scatter(1, dense[1].long(), True), mask)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_scores_for_the_auxiliary_loss_add_up_to_one(score_function: str, dtype: torch.dtype) -> None:
    x = distinct_logits(dtype).requires_grad_()
    routing_map, scores = router().fused_compute_score_for_moe_aux_loss(x, 4, score_function)
    x64 = x.detach().double().requires_grad_()
    exact = fp64_scores(x64, score_function)
    exact = exact / exact.sum(1, keepdim=True)
    grad = torch.randn(scores.shape)
    scores.backward(grad)
    exact.backward(grad.double())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad_of(x).double(), x64.grad, rtol=max(torch.finfo(dtype).eps, 1e-4), atol=1e-5)
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, exact.topk(4, 1).indices, True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("total", [ROUTED_TOKENS, pytest.param(torch.tensor(ROUTED_TOKENS), marks=needs_2_18)])
def test_auxiliary_loss_agrees_with_its_formula(total: int | Tensor, dtype: torch.dtype) -> None:
    probs = torch.rand(ROUTED_TOKENS, ROUTED_EXPERTS).to(dtype).requires_grad_()
    counts = torch.randint(0, 9, (ROUTED_EXPERTS,))
    loss = router().fused_moe_aux_loss(probs, counts, total, ROUTED_EXPERTS, 4, 0.01)
    (3 * loss).backward()
    p64 = probs.detach().double().requires_grad_()
    exact = ROUTED_EXPERTS * 0.01 / (4 * ROUTED_TOKENS**2) * (p64.sum(0) * counts).sum()
    (3 * exact).backward()
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=0)
    torch.testing.assert_close(grad_of(probs).double(), p64.grad, rtol=2 * max(torch.finfo(dtype).eps, 1e-5), atol=0)


@pytest.mark.skipif(versions.installed_version() < Version("2.20"), reason="quantile balancing came with 2.20")
def test_quantile_balancing_counts_the_bias_that_would_have_brought_each_expert_in() -> None:
    logits, topk, bins = distinct_logits(FP32), 4, 16
    bias, bounds = torch.linspace(-0.2, 0.2, ROUTED_EXPERTS), torch.tensor([-1.0, 1.0])
    histogram = torch.ones(ROUTED_EXPERTS, bins, dtype=torch.int32)
    balancing = {"qb_histogram": histogram, "qb_bin_bounds": bounds, "qb_histogram_mode": "two_kernel"}
    probs, routing_map = route(logits, topk, bias=bias, **balancing)
    same = route(logits, topk, bias=bias)
    assert torch.equal(probs, same[0])
    assert torch.equal(routing_map, same[1])
    scores = logits.sigmoid()
    needed = (scores + bias).sort(1, descending=True).values[:, topk : topk + 1] - scores
    expected = torch.stack([1 + torch.histc(column, bins, -1, 1) for column in needed.t()]).int()
    assert torch.equal(histogram, expected)


def test_too_many_experts_are_an_error() -> None:
    with pytest.raises(ValueError, match="cannot choose 41 experts"):
        route(distinct_logits(FP32), 41)


# Which of equal scores is chosen: a simulation of the warp, lane by lane.


def warp_choice(row: list[float], taken: set[int]) -> int:
    """Return the column that one round of TE's ``naive_topk_and_mask`` finds."""
    lanes = []
    for lane in range(32):
        best = (-float("inf"), lane)
        for column in range(lane, len(row), 32):
            if column not in taken and row[column] > best[0]:
                best = (row[column], column)
        lanes.append(best)
    for step in (16, 8, 4, 2, 1):
        lanes = [lanes[i ^ step] if lanes[i ^ step][0] > lanes[i][0] else lanes[i] for i in range(32)]
    return lanes[0][1]


@settings(max_examples=40)
@given(st.integers(2, 90), st.integers(1, 15), st.integers(0, 2**31))
def test_of_equal_scores_the_one_that_the_warp_meets_first_is_chosen(columns: int, k: int, seed: int) -> None:
    k = min(k, columns)
    scores = torch.randint(0, 4, (1, columns), generator=torch.Generator().manual_seed(seed)).float()
    taken: list[int] = []
    for _ in range(k):
        taken.append(warp_choice(scores[0].tolist(), set(taken)))
    assert largest(scores, k, radix=False)[0].tolist() == taken


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2**31))
def test_radix_selection_chooses_the_lowest_of_equal_columns_and_puts_the_smallest_last(
    columns: int, k: int, seed: int
) -> None:
    k = min(k, columns)
    scores = torch.randint(0, 6, (3, columns), generator=torch.Generator().manual_seed(seed)).float()
    for row, chosen in zip(scores.tolist(), largest(scores, k, radix=True).tolist(), strict=True):
        smallest = sorted(row, reverse=True)[k - 1]
        above = [column for column in range(columns) if row[column] > smallest]
        equal = [column for column in range(columns) if row[column] == smallest]
        assert chosen == above + equal[: k - len(above)]
