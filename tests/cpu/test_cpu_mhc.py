"""Test manifold hyper-connections on the CPU kernels, against FP64 formulas and TE's own Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_oracle
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad

from parity import te
from te_on_cpu import graphs, kernel_choices, mhc, tensor_cores, versions

if versions.installed_version() < Version("2.15"):
    pytest.skip("TransformerEngine has manifold hyper-connections since 2.15", allow_module_level=True)

te.kernels("cpu")
from transformer_engine.pytorch.triton import mhc as te_mhc  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
STREAMS, COLUMNS, PADDED = 4, 24, 32
EPS = torch.finfo(FP32).eps
SUMS = 2.0**-19
"""The error of FP32 sums of a hundred terms, relative to the largest result."""
HAS_NORM_WEIGHT = versions.installed_version() >= Version("2.19")
needs_2_19 = pytest.mark.skipif(
    not HAS_NORM_WEIGHT,
    reason="before TransformerEngine 2.19, weights have the dtype of x, and no buffer or block sums",
)


# The formulas of section 4.3.1 of the DeepSeek mHC paper, in the arguments of TE's functions.


def projection(x: Tensor, phi: Tensor, use_tf32: bool, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    weights = phi if norm_weight is None else phi * norm_weight
    return pad(x @ weights.t(), (0, PADDED - COLUMNS)), x.square().mean(1)


def scale(h: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int) -> tuple[Tensor, ...]:
    factor = alpha.repeat_interleave(torch.tensor([n, n, n * n]))
    pre, post, res = (h[:, :COLUMNS] * factor / (ms + EPS).sqrt()[:, None] + beta).split([n, n, n * n], 1)
    return pre.sigmoid(), 2 * post.sigmoid(), res


def sinkhorn(logits: Tensor, n: int, recompute_hist: bool, iters: int) -> Tensor:
    for _ in range(iters):
        logits = logits - logits.logsumexp(3, keepdim=True)
        logits = logits - logits.logsumexp(2, keepdim=True)
    return logits.exp()


def aggregate(x: Tensor, h_pre: Tensor, n: int, use_tf32: bool) -> Tensor:
    return (x * h_pre[:, :, None]).sum(3)


def expand_combine(
    f: Tensor, bias: Tensor | None, h_post: Tensor, x: Tensor, h_res: Tensor, n: int, use_tf32: bool
) -> Tensor:
    f = f if bias is None else f + bias
    return f[..., None] * h_post[:, :, None] + x @ h_res


FORMULAS: dict[str, Callable[..., Any]] = {
    "mhc_fused_projection": projection,
    "mhc_fused_scale": scale,
    "mhc_fused_sinkhorn": sinkhorn,
    "mhc_fused_aggregate": aggregate,
    "mhc_fused_expand_combine": expand_combine,
}


def drawn(dtype: torch.dtype, *shape: int, factor: float = 1.0) -> Tensor:
    return (factor * torch.randn(shape)).to(dtype).requires_grad_()


def calls(dtype: torch.dtype, of_weights: torch.dtype, use_tf32: bool = False) -> Iterator[triton_oracle.Call]:
    """Yield a call of each function, with and without optional arguments, for 5 x 2 tokens and 37 channels."""
    s, b, c, n = 5, 2, 37, STREAMS
    x, h_pre, h_res = drawn(dtype, s, b, c, n), drawn(of_weights, s, b, n), drawn(of_weights, s, b, n, n)
    flat, phi = drawn(dtype, s * b, c * n), drawn(of_weights, COLUMNS, c * n, factor=0.1)
    yield "mhc_fused_projection", (flat, phi, use_tf32)
    if HAS_NORM_WEIGHT:
        yield "mhc_fused_projection", (flat, phi, use_tf32, drawn(dtype, c * n))
    ms = (torch.rand(s * b) + 0.5).to(dtype).requires_grad_()
    yield "mhc_fused_scale", (drawn(dtype, s * b, PADDED), drawn(dtype, 3), drawn(dtype, 1, COLUMNS), ms, n)
    for recompute, iters in ((True, 20), (False, 20), (True, 1)):
        yield "mhc_fused_sinkhorn", (drawn(dtype, s, b, n, n), n, recompute, iters)
    yield "mhc_fused_aggregate", (x, h_pre, n, use_tf32)
    for bias in (None, drawn(dtype, c)):
        yield "mhc_fused_expand_combine", (drawn(dtype, s, b, c), bias, h_pre, x, h_res, n, use_tf32)


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], name: str, of_bf16: float) -> None:
    """Compare each output and gradient, allowing its rounding and ``SUMS`` or ``of_bf16`` times the largest value."""
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        absolute = float(e.abs().max()) * (SUMS if a.dtype == FP32 else of_bf16)
        torch.testing.assert_close(
            a.double(), e.double(), rtol=torch.finfo(a.dtype).eps / 2, atol=absolute,
            msg=lambda text, index=index: f"{name}, result {index}: {text}",
        )  # fmt: skip


def as_fp64(arg: Any) -> Any:
    return arg.detach().double().requires_grad_() if isinstance(arg, Tensor) else arg


# With phi in BF16, the gradient of H is rounded to BF16 before it is multiplied.
DTYPES = [
    pytest.param(FP32, FP32, SUMS, id="fp32"),
    pytest.param(BF16, FP32, SUMS, id="bf16-fp32", marks=needs_2_19),
    pytest.param(BF16, BF16, 2.0**-8, id="bf16"),
]


@pytest.fixture(autouse=True)
def gemm_in_fp32() -> Iterator[None]:
    """Keep TE's GEMM, which computes phi's gradient if there is no norm weight, from rounding operands to TF32."""
    with kernel_choices.kernel_choices(kernel_choices.FP32_EXACT):
        yield


@pytest.mark.parametrize(("dtype", "of_weights", "of_bf16"), DTYPES)
def test_outputs_and_gradients_are_their_formulas(dtype: torch.dtype, of_weights: torch.dtype, of_bf16: float) -> None:
    for name, args in calls(dtype, of_weights):
        ours = triton_oracle.result_and_gradients(getattr(te_mhc, name), args)
        exact = triton_oracle.result_and_gradients(FORMULAS[name], tuple(map(as_fp64, args)), ours)
        assert_near(ours, exact, name, of_bf16)


def test_outputs_and_gradients_are_those_of_te_s_triton_kernels(tmp_path: Path) -> None:
    # The interpreter always multiplies in FP32, and cannot multiply BF16.
    pytest.importorskip("triton")
    asked = list(calls(FP32, FP32))
    results = triton_oracle.run({"mhc": asked}, tmp_path)["mhc"]
    for (name, args), result in zip(asked, results, strict=True):
        ours = triton_oracle.result_and_gradients(getattr(te_mhc, name), args, result)
        assert_near(ours, result, name, SUMS)


def test_use_tf32_cuts_fp32_operands_of_products_to_tf32() -> None:
    x, phi = drawn(FP32, 6, 128).detach(), drawn(FP32, COLUMNS, 128).detach()
    exact, ms = te_mhc.mhc_fused_projection(*map(tensor_cores.truncate_to_tf32, (x, phi)), use_tf32=False)
    with kernel_choices.kernel_choices():
        h, of_x = te_mhc.mhc_fused_projection(x, phi, use_tf32=True)
    assert torch.equal(h, exact)
    assert not torch.equal(of_x, ms)  # a mean square is not a product


@needs_2_19
def test_bf16_times_fp32_is_three_products_of_tf32() -> None:
    x, phi = drawn(BF16, 6, 128).detach(), drawn(FP32, COLUMNS, 128).detach()
    with kernel_choices.kernel_choices():
        h, _ = te_mhc.mhc_fused_projection(x, phi, use_tf32=False)
    exact = x.double() @ phi.double().t()
    torch.testing.assert_close(h[:, :COLUMNS].double(), exact, rtol=2.0**-21, atol=SUMS * float(exact.abs().max()))


def block(x: Tensor, weights: list[Tensor], buffer: Tensor | None) -> Tensor:
    """Aggregate the streams, use the result as a layer's output, and expand and combine."""
    options = {} if buffer is None else {"fused_grad_x_acc_buffer": buffer}
    out, h_post, h_res = te_mhc.mhc_generate_mix_and_aggregate(x, *weights, use_tf32=False, **options)
    mixed = te_mhc.mhc_fused_expand_combine(out, None, h_post, x, h_res, STREAMS, False, **options)
    assert isinstance(mixed, Tensor)
    return mixed


@needs_2_19
def test_gradients_of_x_may_be_added_in_one_buffer() -> None:
    s, b, c, n = 3, 2, 24, STREAMS
    weights = [drawn(FP32, COLUMNS, c * n, factor=0.1), drawn(FP32, 3), drawn(FP32, 1, COLUMNS)]
    x = drawn(FP32, s, b, c, n)
    buffer = torch.full((s, b, c, n), torch.nan)  # the first kernel of the backward pass overwrites it
    together, apart = block(x, weights, buffer), block(x, weights, None)
    grad = torch.randn(s, b, c, n)
    torch.testing.assert_close(
        torch.autograd.grad(together, x, grad), torch.autograd.grad(apart, x, grad), rtol=EPS, atol=1e-4
    )


@needs_2_19
@pytest.mark.parametrize(
    ("dtype", "of_weights", "rounded"), [(FP32, FP32, False), (BF16, FP32, False), (BF16, BF16, True)]
)
def test_a_product_is_rounded_before_it_is_added_in_the_buffer_if_both_factors_are_bf16(
    dtype: torch.dtype, of_weights: torch.dtype, rounded: bool
) -> None:
    x, h_pre, buffer = drawn(dtype, 3, 1, 8, STREAMS), drawn(of_weights, 3, 1, STREAMS), torch.randn(3, 1, 8, STREAMS)
    grad, before = torch.randn(3, 1, 8).to(dtype), buffer.double()
    te_mhc.mhc_fused_aggregate(x, h_pre, STREAMS, fused_grad_x_acc_buffer=buffer).backward(grad)
    product = grad[..., None].double() * h_pre.detach()[:, :, None].double()
    expected = (product.to(BF16).double() if rounded else product) + before
    assert torch.equal(buffer, expected.float())


@needs_2_19
def test_sums_over_tokens_may_be_made_of_those_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, n = 300, STREAMS  # not a multiple of a block of 128
    of_scale = (drawn(FP32, rows, PADDED), drawn(FP32, 3), drawn(FP32, 1, COLUMNS), torch.rand(rows) + 0.5, n)
    x, h_pre, h_res = drawn(FP32, 7, 1, 16, n), drawn(FP32, 7, 1, n), drawn(FP32, 7, 1, n, n)
    of_expand = (drawn(FP32, 7, 1, 16), drawn(FP32, 16), h_pre, x, h_res, n)
    for function, args in ((te_mhc.mhc_fused_scale, of_scale), (te_mhc.mhc_fused_expand_combine, of_expand)):
        atomic = triton_oracle.result_and_gradients(function, args)
        with monkeypatch.context() as patch:
            patch.setattr(te_mhc, "ENFORCE_DETERMINISTIC", True)
            in_blocks = triton_oracle.result_and_gradients(function, args)
        assert_near(in_blocks, atomic, function.__name__, SUMS)


def test_a_graph_launches_the_kernels_again() -> None:
    x, h_pre = drawn(FP32, 2, 1, 8, STREAMS).detach(), drawn(FP32, 2, 1, STREAMS).detach()
    graph = graphs.CUDAGraph()
    with graphs.graph(graph):
        out = te_mhc.mhc_fused_aggregate(x, h_pre, STREAMS)
    x.copy_(torch.randn(x.shape))
    graph.replay()
    assert torch.equal(out, te_mhc.mhc_fused_aggregate(x, h_pre, STREAMS))


def test_streams_are_added_in_the_order_in_which_triton_splits_them() -> None:
    # In the order 0, 2, 1, 3, the first 1 is lost when added to 2^24, which the third term then cancels.
    x = torch.tensor([2.0**24, -(2.0**24), 1.0, 1.0]).view(1, 1, 1, STREAMS)
    assert te_mhc.mhc_fused_aggregate(x, torch.ones(1, 1, STREAMS), STREAMS).item() == 1.0


def test_every_kernel_that_te_launches_has_a_counterpart() -> None:
    kernels = {name for name in vars(te_mhc) if name.startswith("_mhc_")}
    assert kernels
    assert kernels <= set(mhc.KERNELS)
