"""The arithmetic of fused attention, block by block: its masks and, in FP8, its casts and their scales."""

from __future__ import annotations

import math

import attention_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_on_cpu import attention_problem, flash, flash_fp8, float8
from te_on_cpu.attention_problem import Attention, Band
from te_on_cpu.enums import NVTE_Mask_Type
from te_on_cpu.flash_fp8 import Cast, Operand, with_one_scale

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERYTHING = Band(None, None, False)

sides = st.none() | st.integers(0, 12)
bands = st.builds(Band, sides, sides, st.booleans())


def draw(
    dtype: torch.dtype, batch: int, heads: int, groups: int, queries: int, keys: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value and output gradient, each ``[batch, heads or groups, seq, 16 or 24]``."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(heads, queries, 16), (groups, keys, 16), (groups, keys, 24), (heads, queries, 24)]
    query, key, value, gradient = (torch.randn(batch, *shape, generator=rng).to(dtype) for shape in shapes)
    return query, key, value, gradient


def in_band(band: Band, queries: int, keys: int) -> Tensor:
    offset = keys - queries if band.bottom_right else 0
    return oracle.visible(queries, keys, band.left, band.right, offset)


@settings(max_examples=200)
@given(bands, st.integers(1, 30), st.integers(1, 30), st.data())
def test_a_block_sees_exactly_the_keys_of_the_band(band: Band, queries: int, keys: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, queries - 1))
    rows = range(start, data.draw(st.integers(start + 1, queries)))
    columns = attention_problem.visible_keys(band, rows, queries, keys)
    seen = torch.zeros(len(rows), keys, dtype=torch.bool)
    if columns:
        hidden = attention_problem.hidden_keys(band, rows, columns, queries, keys)
        shape = (len(rows), len(columns))
        seen[:, columns.start : columns.stop] = torch.ones(shape, dtype=torch.bool) if hidden is None else ~hidden
    assert torch.equal(seen, in_band(band, queries, keys)[0, 0, rows.start : rows.stop])


@settings(max_examples=60)
@given(
    st.sampled_from([BF16, FP16]),
    bands,
    st.integers(1, 2),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.integers(1, 16),
    st.integers(1, 16),
    st.none() | st.integers(1, 64),
)
def test_forward_and_backward_agree_with_fp64_in_blocks_of_any_size(
    dtype: torch.dtype, band: Band, batch: int, heads: tuple[int, int], queries: int, keys: int, scores: int | None
) -> None:
    tensors = draw(dtype, batch, *heads, queries, keys)
    sink = torch.linspace(-1, 1, heads[0])
    attention = Attention(scale=0.25, band=band, sink=sink)
    with pytest.MonkeyPatch.context() as patch:
        if scores is not None:
            patch.setattr(attention_problem, "_SCORES_IN_A_BLOCK", scores)
        output, lse, _ = flash.forward(*tensors[:3], attention)
        gradients = flash.backward(*tensors[:3], output, tensors[3], lse, attention)
    q, k, v = (tensor.double().transpose(1, 2).requires_grad_() for tensor in tensors[:3])
    exact_sink = sink.double().requires_grad_()
    exact = oracle.attend(q, k, v, in_band(band, queries, keys), sink=exact_sink)
    exact_gradients = torch.autograd.grad(exact, [q, k, v, exact_sink], tensors[3].double().transpose(1, 2))
    eps = torch.finfo(dtype).eps
    pairs = zip((gradients.query, gradients.key, gradients.value), exact_gradients, strict=False)
    for actual, expected in [(output, exact), *pairs]:
        error = (actual.double() - expected.transpose(1, 2)).norm()
        # A gradient whose terms nearly cancel has the error of its terms.
        assert error <= eps * (expected.norm() + exact.norm())
    assert gradients.sink is not None
    size = (tensors[3].double().abs() * exact.transpose(1, 2).abs()).sum((0, 2, 3))
    assert ((gradients.sink.double() - exact_gradients[3]).abs() <= eps * size + 1e-6).all()


def test_log_sum_exp_and_largest_score_are_fp32() -> None:
    query, key, value, _ = draw(BF16, 2, 4, 2, 30, 40)
    _, lse, largest = flash.forward(query, key, value, Attention(scale=0.3, band=EVERYTHING))
    scores = 0.3 * query.double() @ key.double().repeat_interleave(2, 1).mT
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1, keepdim=True), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(largest.double(), scores.amax(-1, keepdim=True), rtol=2e-6, atol=2e-6)
    assert lse.dtype == largest.dtype == FP32


def test_scores_are_not_rounded_to_the_dtype_of_the_operands() -> None:
    query = torch.tensor([256.0, 0.25]).to(BF16).view(1, 1, 1, 2)
    key = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to(BF16).view(1, 1, 2, 2)
    value = torch.tensor([[0.0], [1.0]]).to(BF16).view(1, 1, 2, 1)
    output, lse, _ = flash.forward(query, key, value, Attention(scale=1.0, band=EVERYTHING))
    assert output.item() == torch.tensor(0.25).sigmoid().to(BF16).item()
    assert lse.item() == pytest.approx(256 + math.log(1 + math.exp(0.25)), abs=2e-5)


def test_weights_are_rounded_before_they_multiply_values_and_their_sum_is_not() -> None:
    query, score = torch.ones(1, 1, 1, 1).to(BF16), torch.tensor(-0.3).to(BF16)
    weight = score.float().exp()
    key = torch.stack([torch.zeros_like(score), score]).view(1, 1, 2, 1)
    value = torch.stack([weight.to(BF16), torch.tensor(-1.0).to(BF16)]).view(1, 1, 2, 1)
    attention = Attention(scale=1.0, band=EVERYTHING)
    output, lse, _ = flash.forward(query, key, value, attention)
    assert weight.to(BF16) != weight
    assert output.item() == 0
    assert lse.item() == pytest.approx(math.log(1 + weight.item()), abs=1e-7)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_a_shared_key_are_rounded_for_each_head_and_summed_in_fp32(
    dtype: torch.dtype, groups: int
) -> None:
    """Follow cuDNN's graph (cudnn-frontend 1.23.0, scaled_dot_product_flash_attention.h: dK_fullhead, dV_fullhead)."""
    # FP32 adds products of quarters without rounding, so that the order of a matrix product's sums does not matter.
    query, key, value, gradient = ((4 * tensor).round() / 4 for tensor in draw(dtype, 2, 4, groups, 20, 20))
    attention = Attention(scale=0.25, band=Band(None, 0, False))
    output, lse, _ = flash.forward(query, key, value, attention)
    shared = flash.backward(query, key, value, output, gradient, lse, attention)
    repeated = (tensor.repeat_interleave(4 // groups, 1) for tensor in (key, value))
    alone = flash.backward(query, *repeated, output, gradient, lse, attention)
    for total, of_heads in ((shared.key, alone.key), (shared.value, alone.value)):
        assert torch.equal(total, of_heads.to(dtype).float().unflatten(1, (groups, -1)).sum(2))
        assert torch.equal(of_heads, of_heads.to(dtype).float())


@pytest.mark.parametrize("scores_in_a_block", [2**20, 10])
def test_queries_without_keys_give_zero_and_pass_no_gradient(
    scores_in_a_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_problem, "_SCORES_IN_A_BLOCK", scores_in_a_block)  # also in blocks without any key
    tensors = draw(BF16, 1, 2, 2, 20, 5)
    attention = Attention(scale=0.25, band=Band(None, 0, True))
    output, lse, largest = flash.forward(*tensors[:3], attention)
    assert not output[:, :, :15].any()
    assert output[:, :, 15:].all()
    assert (lse[:, :, :15] == -math.inf).all()
    assert (largest[:, :, :15] == -math.inf).all()
    gradients = flash.backward(*tensors[:3], output, tensors[3], lse, attention)
    assert not gradients.query[:, :, :15].any()
    assert all(gradient.isfinite().all() for gradient in (gradients.query, gradients.key, gradients.value))


def test_bias_gradient_is_summed_over_what_the_bias_is_shared_by() -> None:
    tensors = draw(BF16, 2, 4, 2, 12, 9)
    shared = torch.randn(1, 1, 12, 9, generator=torch.Generator().manual_seed(1)).to(BF16)
    exact, *sums = (
        _bias_gradient(tensors, shared.expand(batch, heads, 12, 9).contiguous())
        for batch, heads in ((2, 4), (1, 4), (2, 1), (1, 1))
    )
    for total in sums:
        torch.testing.assert_close(total, exact.sum_to_size(total.shape), rtol=1e-5, atol=1e-5)


def _bias_gradient(tensors: tuple[Tensor, Tensor, Tensor, Tensor], bias: Tensor) -> Tensor:
    attention = Attention(scale=0.25, band=EVERYTHING, bias=bias)
    output, lse, _ = flash.forward(*tensors[:3], attention)
    gradient = flash.backward(*tensors[:3], output, tensors[3], lse, attention).bias
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    ("heads", "exponents"), [(4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3]), (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5])]
)
def test_alibi_slopes_are_those_of_the_paper(heads: int, exponents: list[float]) -> None:
    expected = [2.0**-exponent for exponent in exponents]
    torch.testing.assert_close(attention_problem.alibi_slopes(heads), torch.tensor(expected))


def test_a_mask_type_tells_whether_it_is_causal_and_whether_it_pads() -> None:
    names = {member.name for member in NVTE_Mask_Type}
    causal = {name for name in names if attention_problem.is_causal(NVTE_Mask_Type[name])}
    padding = {name for name in names if attention_problem.is_padding(NVTE_Mask_Type[name])}
    assert names - causal == {"NVTE_NO_MASK", "NVTE_PADDING_MASK"}
    assert names - padding == {"NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_CAUSAL_BOTTOM_RIGHT_MASK"}


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = 0.25
# The relative error of FP32 sums of at most 64 products.
FP32_SUM = 64 * 2.0**-24

powers = st.integers(-6, 8).map(lambda exponent: 2.0**exponent)


def operand(dtype: torch.dtype, shape: tuple[int, ...], seed: int, descale: float) -> Operand:
    """Return normal deviates as codes, which stand for ``descale`` times their values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Operand(float8.rounded(values / descale, dtype), descale)


def value(of: Operand) -> Tensor:
    return of.values.double() * of.descale


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert ((actual.double() - exact).abs() <= bound * (1 + 2.0**-10) + FP32_SUM * (1 + exact.abs().amax())).all()


@settings(max_examples=60)
@given(
    bands,
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.integers(1, 16),
    st.integers(1, 16),
    st.lists(powers, min_size=4, max_size=4),
    st.none() | st.integers(1, 64),
    st.integers(0, 2**31),
)
def test_results_are_off_by_no_more_than_the_casts_of_p_and_ds(
    band: Band, heads: tuple[int, int], queries: int, keys: int, descales: list[float], scores: int | None, seed: int
) -> None:
    shapes = [(2, heads[0], queries, 16), (2, heads[1], keys, 16), (2, heads[1], keys, 24), (2, heads[0], queries, 24)]
    dtypes = (E4M3, E4M3, E4M3, E5M2)
    q, k, v, do = (operand(*kind, seed, descale) for *kind, descale in zip(dtypes, shapes, descales, strict=True))
    attention = Attention(scale=SCALE, band=band)
    s_cast, dp_cast = Cast(E4M3, 256.0), Cast(E5M2, 64.0)
    seen = in_band(band, queries, keys)
    with pytest.MonkeyPatch.context() as patch:
        if scores is not None:
            patch.setattr(attention_problem, "_SCORES_IN_A_BLOCK", scores)
        result = flash_fp8.forward(q, k, v, attention, s_cast)
        o = Operand(result.output, 1.0)
        gradients, amax = flash_fp8.backward(with_one_scale(q, k, v, o, do), result.lse, attention, s_cast, dp_cast)
    exact = oracle.forward(value(q), value(k), value(v), seen, SCALE, s_cast.scale)
    assert_within(result.output, exact.values["o"], exact.bounds["o"])
    torch.testing.assert_close(result.amax.double(), exact.amax, rtol=1e-5, atol=0)
    scales = (SCALE, s_cast.scale, dp_cast.scale)
    exact = oracle.backward(value(q), value(k), value(v), result.output, value(do), seen, *scales)
    for actual, name in ((gradients.query, "dq"), (gradients.key, "dk"), (gradients.value, "dv")):
        assert_within(actual, exact.values[name], exact.bounds[name])
    torch.testing.assert_close(amax.double(), exact.amax, rtol=1e-4, atol=1e-6)


def two_keys(score: float) -> tuple[Operand, Operand]:
    """Return a query, and two keys that give it the scores 0 and ``score``."""
    query = Operand(torch.ones(1, 1, 1, 1), 1.0)
    return query, Operand(torch.tensor([0.0, score]).view(1, 1, 2, 1), 1.0)


def test_normalised_probabilities_are_cast_with_their_scale_saturate_and_their_sum_is_not_cast() -> None:
    probability = torch.tensor(-1.0).sigmoid().item()
    casted = torch.tensor(100 * probability).to(E4M3).item() / 100
    assert abs(casted - probability) > 0.005
    for score, scale, expected, largest in ((1.0, 100.0, casted, 1 - probability), (-100.0, 1000.0, 0.448, 1.0)):
        value = Operand(torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), 2.0)
        result = flash_fp8.forward(*two_keys(score), value, Attention(1.0, EVERYTHING), Cast(E4M3, scale))
        assert result.output.item() == pytest.approx(2 * expected, rel=1e-6)
        assert result.lse.item() == pytest.approx(math.log(1 + math.exp(score)), abs=1e-6)
        assert result.amax.item() == pytest.approx(largest, rel=1e-6)


def test_ds_is_cast_with_its_scale_for_its_products_with_q_and_k() -> None:
    query, key = two_keys(1.0)
    values = Operand(torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), 1.0)
    attention, s_cast, dp_cast = Attention(0.5, EVERYTHING), Cast(E4M3, 1.0), Cast(E5M2, 3.0)
    do, o = Operand(torch.ones(1, 1, 1, 1), 4.0), Operand(torch.ones(1, 1, 1, 1), 0.25)
    lse = torch.tensor([0.0, 0.5]).logsumexp(0).view(1, 1, 1, 1)
    gradients, amax = flash_fp8.backward(with_one_scale(query, key, values, o, do), lse, attention, s_cast, dp_cast)
    p = torch.tensor([0.0, 0.5]).softmax(0)
    # dP is 4 and 0, and the sum of dO O is 1.
    ds = p * (torch.tensor([4.0, 0.0]) - 1) * 0.5
    cast = (ds * 3).to(E5M2).float() / 3
    assert gradients.query.item() == pytest.approx(cast[1].item(), rel=1e-6)
    assert gradients.key.flatten().tolist() == pytest.approx(cast.tolist(), rel=1e-6)
    assert amax.item() == pytest.approx(ds.abs().amax().item(), rel=1e-6)


def test_a_sink_takes_its_part_and_gets_a_gradient() -> None:
    query, key = two_keys(1.0)
    value, do = Operand(torch.ones(1, 1, 2, 1), 1.0), Operand(torch.ones(1, 1, 1, 1), 1.0)
    attention = Attention(1.0, EVERYTHING, sink=torch.tensor([2.0]))
    cast = Cast(E4M3, 1.0)
    result = flash_fp8.forward(query, key, value, attention, cast)
    p = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert result.amax.item() == pytest.approx(p[1].item(), rel=1e-6)
    assert result.output.item() == pytest.approx(p[:2].to(E4M3).float().sum().item(), rel=1e-6)
    output = Operand(p[:2].sum().view(1, 1, 1, 1), 1.0)
    gradients, _ = flash_fp8.backward(
        with_one_scale(query, key, value, output, do), result.lse, attention, cast, Cast(E5M2, 1.0)
    )
    assert gradients.sink is not None
    assert gradients.sink.item() == pytest.approx(-(p[2] * p[:2].sum()).item(), rel=1e-5)


def test_backward_of_dropout_uses_the_mask_of_the_forward() -> None:
    shape = (1, 2, 16, 16)
    q, k, do = (operand(dtype, shape, seed, 1.0) for seed, dtype in enumerate((E4M3, E4M3, E5M2)))
    v = operand(E4M3, shape, 3, 1.0)
    attention = Attention(SCALE, EVERYTHING, dropout=0.5, seed=7)
    cast = Cast(E4M3, 64.0)
    result = flash_fp8.forward(q, k, v, attention, cast)
    gradients, _ = flash_fp8.backward(
        with_one_scale(q, k, v, Operand(result.output, 1.0), do), result.lse, attention, cast, Cast(E5M2, 1.0)
    )
    # The output is linear in V, so that V and its gradient have the same inner product as the output and its gradient.
    by_output = (result.output.double() * value(do)).sum().item()
    assert (gradients.value.double() * value(v)).sum().item() == pytest.approx(by_output, rel=1e-4)
