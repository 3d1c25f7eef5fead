"""Masked softmax on the CPU kernels, against FP64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_on_cpu import softmax

EPS32 = torch.finfo(torch.float32).eps
HALF = (torch.float16, torch.bfloat16)
MASKED = float("-inf")

problems = st.tuples(
    st.sampled_from(HALF),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(2, 9), st.sampled_from([8, 16, 40])),
    st.sampled_from([0.125, 1.0, 0.1, 7.0]),
    st.integers(0, 2**31),
)


def draw(problem: tuple) -> tuple[Tensor, float, Tensor]:
    """Return scores, a scale and the gradient of the probabilities."""
    dtype, shape, scale, seed = problem
    rng = torch.Generator().manual_seed(seed)
    scores, gradient = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    return scores, scale, gradient


def fp64_softmax(scores: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return the softmax of scores times the scale, which is rounded to their dtype; fully masked rows are 0."""
    scaled = scores.double() * torch.tensor(scale, dtype=scores.dtype).double()
    scaled = scaled if mask is None else scaled.masked_fill(mask, MASKED)
    return scaled.softmax(-1).nan_to_num(0)


def assert_rounded_once(actual: Tensor, exact: Tensor, relative: float, absolute: float = 0.0) -> None:
    info = torch.finfo(actual.dtype)
    bound = exact.abs() * (info.eps / 2 + relative) + info.smallest_normal * info.eps + absolute
    assert ((actual.double() - exact).abs() <= bound).all()


def largest(scores: Tensor, scale: float) -> float:
    """Return the largest exponent in magnitude, whose FP32 rounding the exponential amplifies."""
    return 1 + 2 * scale * scores.double().abs().max().item()


def causal(queries: int, keys: int, offset: int) -> Tensor:
    return torch.arange(keys) > torch.arange(queries)[:, None] + offset


@pytest.mark.parametrize("kind", ["softmax", "upper_triang_masked_softmax", "aligned_causal_masked_softmax"])
@settings(max_examples=50)
@given(problem=problems)
def test_softmax_is_the_fp64_softmax_rounded_once_and_sees_no_future_key(kind: str, problem: tuple) -> None:
    """Let the last query see all keys also where there are fewer queries than keys (aligned causal)."""
    scores, scale, _ = draw(problem)
    if "triang" in kind:
        side = min(scores.shape[-2:])
        scores = scores[0, :, :side, :side].contiguous()
    queries, keys = scores.shape[-2:]
    future = causal(queries, keys, keys - queries if "causal" in kind else 0) & (kind != "softmax")
    actual = getattr(softmax, f"scaled_{kind}_forward")(scores, scale)
    assert actual.dtype == scores.dtype
    assert not actual.masked_select(future).any()
    assert_rounded_once(actual, fp64_softmax(scores, scale, future), 8 * EPS32 * largest(scores, scale))


@settings(max_examples=50)
@given(problems, st.booleans(), st.booleans())
def test_masked_scores_get_exactly_zero_and_the_others_share_one(
    problem: tuple, one_mask: bool, as_bytes: bool
) -> None:
    scores, scale, _ = draw(problem)
    batch, _, queries, keys = scores.shape
    mask = torch.rand(1 if one_mask else batch, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0, 0, 0] = True
    actual = softmax.scaled_masked_softmax_forward(scores, mask.byte() if as_bytes else mask, scale)
    assert not actual.masked_select(mask).any()
    assert_rounded_once(actual, fp64_softmax(scores, scale, mask), 8 * EPS32 * largest(scores, scale))
    sums = actual.double().sum(-1)
    attends = (~mask).any(-1).expand_as(sums)
    torch.testing.assert_close(sums, attends.double(), rtol=0, atol=torch.finfo(scores.dtype).eps)


def test_queries_older_than_all_keys_attend_to_nothing() -> None:
    actual = softmax.scaled_aligned_causal_masked_softmax_forward(torch.zeros(1, 1, 10, 8).half(), 1.0)
    assert not actual[0, 0, :2].any()
    assert actual[0, 0, 2].tolist() == [1] + 7 * [0]


def test_a_masked_score_counts_as_minus_ten_thousand() -> None:
    scores = torch.full((1, 1, 2, 8), -20000.0).half()
    mask = torch.zeros(1, 1, 2, 8, dtype=torch.bool)
    mask[..., 1, :4] = True
    actual = softmax.scaled_masked_softmax_forward(scores, mask, 1.0)
    assert actual[0, 0, 0].tolist() == 8 * [0.125]
    assert actual[0, 0, 1].tolist() == 8 * [0.0]


def test_forward_rounds_the_scale_to_the_dtype_of_the_scores_and_backward_does_not() -> None:
    scores = (torch.arange(16.0).reshape(1, 1, 2, 8) * 4).bfloat16()
    rounded = torch.tensor(0.1).bfloat16().item()
    probabilities = softmax.scaled_softmax_forward(scores, 0.1)
    assert torch.equal(probabilities, softmax.scaled_softmax_forward(scores, rounded))
    assert torch.equal(probabilities, torch.softmax(scores.float() * rounded, -1).bfloat16())
    assert not torch.equal(probabilities, torch.softmax(scores.float() * 0.1, -1).bfloat16())
    gradient = torch.tensor([1.0, 0.0, 0, 0, 0, 0, 0, 0]).expand(1, 1, 2, 8).half()
    y = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0]).expand(1, 1, 2, 8).half()
    scale = 2.0 + 2.0**-11
    actual = softmax.scaled_softmax_backward(gradient, y, scale)
    assert actual[0, 0, 0, 0].item() == torch.tensor(0.25 * scale).half().item()


BACKWARDS = {
    "scaled_softmax_backward": 4,
    "scaled_masked_softmax_backward": 4,
    "scaled_aligned_causal_masked_softmax_backward": 4,
    "scaled_upper_triang_masked_softmax_backward": 3,
}


@pytest.mark.parametrize(("name", "dimensions"), BACKWARDS.items())
@settings(max_examples=25)
@given(problem=problems)
def test_backward_is_fp64_autograd_rounded_once_and_leaves_its_arguments(
    name: str, dimensions: int, problem: tuple
) -> None:
    scores, scale, gradient = draw(problem)
    probabilities = softmax.scaled_softmax_forward(scores, scale)
    if dimensions == 3:
        probabilities, gradient = probabilities[0], gradient[0]
    if "causal" in name or "triang" in name:
        queries, keys = scores.shape[-2:]
        probabilities = probabilities.masked_fill(causal(queries, keys, keys - queries), 0)
    y, g = probabilities.double(), gradient.double()
    exact = scale * torch.ops.aten._softmax_backward_data(g, y, -1, torch.float64)
    before = probabilities.clone(), gradient.clone()
    actual = getattr(softmax, name)(gradient, probabilities, scale)
    assert actual.dtype == gradient.dtype
    assert_rounded_once(actual, exact, 0.0, absolute=16 * EPS32 * scale * g.abs().max().item())
    assert torch.equal(before[0], probabilities)
    assert torch.equal(before[1], gradient)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["scaled_upper_triang_masked_softmax", "scaled_aligned_causal_masked_softmax"])
def test_the_gradient_of_a_future_key_is_a_positive_zero_whatever_comes_in(kind: str, dtype: torch.dtype) -> None:
    """Expect 0: the kernels read no gradient there (TE 2.20.2, common/fused_softmax/scaled_*_masked_softmax.cu)."""
    scores = torch.randn(8, 8, 8)[slice(None) if "triang" in kind else None].to(dtype)
    probabilities = getattr(softmax, f"{kind}_forward")(scores, 0.5)
    future = causal(8, 8, 0).expand_as(scores)
    for sign in (1, -1):
        incoming = torch.full_like(scores, sign).masked_fill(~future, 1.0)
        gradient = getattr(softmax, f"{kind}_backward")(incoming, probabilities, 0.5)
        assert not gradient[future].view(torch.int16).any()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(1, 1, 4, 8), "float32"),
        (torch.zeros(1, 4, 8).half(), "4D"),
        (torch.zeros(1, 1, 4, 12).half(), "multiple of 8 keys"),
        (torch.zeros(1, 1, 1, 8).half(), "at least 2 queries"),
        (torch.zeros(1, 1, 2, 16392).half(), "at most 16384 keys"),
    ],
)
def test_softmax_refuses_what_the_cuda_kernel_refuses(scores: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        softmax.scaled_softmax_forward(scores, 1.0)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[2 or 1, 1, 4, 8\], but is \[2, 3, 4, 8\]"):
        softmax.scaled_masked_softmax_forward(torch.zeros(2, 3, 4, 8).half(), torch.zeros(2, 3, 4, 8).bool(), 1.0)
