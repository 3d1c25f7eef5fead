"""Test the replacements of Triton and of TE's functions that launch its kernels, including cross entropy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton_oracle
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import cross_entropy

from parity import te
from te_on_cpu import triton, versions
from te_on_cpu.loading import triton as stand_in

WITHOUT_TRITON = """
import sys

class Hidden:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden())
import torch
from parity import te
module = te.kernels("cpu").te
assert "triton" not in sys.modules
x = torch.randn(6, 4, requires_grad=True)
rows, row_id_map = module.moe_permute(x, torch.eye(6, 3).int(), num_out_tokens=3, map_type="mask")
rows.sum().backward()
assert torch.equal(rows, x[:3])
assert torch.equal(x.grad, torch.tensor([1.0, 1, 1, 0, 0, 0])[:, None].expand(6, 4))
"""


def test_te_loads_and_permutes_where_triton_cannot_be_imported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=900)


def test_a_triton_kernel_without_a_counterpart_says_so_when_it_is_launched() -> None:
    @stand_in.autotune(configs=[stand_in.Config({"BLOCK": 8})], key=["n"])
    @stand_in.jit
    def some_kernel(pointer: Any, block: stand_in.constexpr) -> None: ...

    with pytest.raises(NotImplementedError, match=r"no counterpart to the Triton kernel .*some_kernel"):
        some_kernel[(1,)](torch.zeros(1), BLOCK=8)


def test_other_modules_keep_their_functions() -> None:
    assert triton.replacements("transformer_engine.pytorch.module.linear") == {}


# The following tests compare with TE's own Triton kernels.


def routing(tokens: int, experts: int, seed: int) -> Tensor:
    return (torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) < 0.4).int()


def permutation_calls() -> Iterator[triton_oracle.Call]:
    """Yield calls of every wrapper, with and without probabilities, scales and padding; one token goes to no expert."""
    tokens, experts, hidden = 13, 5, 24
    for dtype in (torch.float32, torch.bfloat16):
        mask = routing(tokens, experts, 1)
        mask[3] = 0
        sizes = (tokens, experts, hidden)
        rows = int(mask.sum())
        pad = torch.tensor([0, 2, 2, 5, 6])
        row_id_map = triton.make_row_id_map(mask, tokens, experts)
        x, probs = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, experts) * mask
        probs[0, mask[0].argmax()] = 0
        scale, grad = torch.rand(tokens, 3), torch.randn(tokens, hidden).to(dtype)
        yield "make_row_id_map", (mask, tokens, experts)
        for offsets, out in ((None, rows), (pad, rows + 8)):
            permuted, permuted_probs = torch.randn(out, hidden).to(dtype), torch.rand(out)
            common = (offsets, tokens, experts, out, hidden)
            yield "permute_with_mask_map", (x, row_id_map, None, None, *common, None)
            yield "permute_with_mask_map", (x, row_id_map, probs, scale, *common, 3)
            yield "unpermute_with_mask_map", (permuted, row_id_map, None, permuted_probs, offsets, *sizes)
            yield "unpermute_with_mask_map", (permuted, row_id_map, probs, None, offsets, *sizes)
            yield (
                "unpermute_with_mask_map_bwd_with_merging_probs",
                (grad, row_id_map, permuted, probs, offsets, tokens, experts, out, hidden),
            )
        chunk_map = triton.make_chunk_sort_map(torch.tensor([4, 0, 6, 1]), torch.tensor([2, 3, 0, 1]), 13, 4)
        yield "make_chunk_sort_map", (torch.tensor([4, 0, 6, 1]), torch.tensor([2, 3, 0, 1]), 13, 4)
        for forward in (True, False):
            yield "sort_chunks_by_map", (x, chunk_map, torch.rand(13), tokens, hidden, forward)


def cross_entropy_calls() -> Iterator[triton_oracle.Call]:
    """Yield forward and backward calls of this TE version: an ignored row, smoothing, reduction, strided logits."""
    target = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(0))
    target[1, 2] = -100
    for dtype in (torch.float32, torch.bfloat16):
        for smoothing, reduced in ((0.0, False), (0.0, True), (0.2, False), (0.2, True)):
            logits = (4 * torch.randn(2, 5, 37)).to(dtype)
            grad = torch.rand(1) if reduced else torch.rand(2, 5)
            if versions.installed_version() < Version("2.19"):
                # Up to 2.16, TE subtracts from a BF16 gradient, which the interpreter does on the bits as integers.
                if dtype == torch.bfloat16 and not reduced and versions.installed_version() < Version("2.18"):
                    continue
                yield "cross_entropy_forward", (logits, target, smoothing, reduced, None, -100)
                yield "cross_entropy_backward", (torch.randn(2, 5, 37).to(dtype), grad, True)
                continue
            for x in (logits, logits.transpose(0, 1).contiguous().transpose(0, 1)):
                yield "cross_entropy_forward", (x, target, smoothing, reduced, None, -100, False)
            _, saved, stats, _, count, rank, ranks = triton.cross_entropy_forward(
                logits, target, smoothing, reduced, None, -100, False
            )
            yield (
                "cross_entropy_backward",
                (saved, stats, target, count, grad, smoothing, reduced, rank, ranks, -100),
            )


def grouped_dbias_calls() -> Iterator[triton_oracle.Call]:
    offsets = torch.tensor([0, 3, 3, 10])
    for dtype in (torch.float32, torch.bfloat16):
        dy, bias = torch.randn(12, 8).to(dtype), torch.randn(3, 8).to(dtype)
        yield "compute_grouped_dbias", (dy, offsets, 3)
        yield "compute_grouped_dbias", (dy, offsets, 3, torch.randn(3, 8))
        yield "compute_grouped_dbias_dscales", (dy, torch.rand(12), bias, offsets)
        yield "compute_grouped_dbias_dscales", (dy, torch.rand(12), bias, offsets, torch.randn(3, 8), torch.randn(12))


def pad_calls() -> Iterator[triton_oracle.Call]:
    for shape in ((3, 5), (128, 4), (130, 1)):
        yield "pad_columnwise_scale_inv", (torch.randint(0, 255, shape, dtype=torch.uint8),)


def meaningful(name: str, result: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return a call's results; mask columns that ``make_row_id_map`` leaves unwritten because they stand for no row."""
    if name == "make_row_id_map":
        unused = torch.arange(args[2]) >= result[:, -1:]
        result = result.masked_fill(torch.cat([unused, unused, unused[:, :1] & False], 1), -1)
    return list(result) if isinstance(result, tuple) else [result]


SUMS = 2**-20
"""How far FP32 sums of tens of terms differ if their order changes, relative to the terms."""

COPIES = {"permute_with_mask_map", "sort_chunks_by_map"}
"""Calls whose results are exact; the interpreter truncates other results to BF16, where GPUs round to the nearest."""


CALLS: dict[str, Callable[[], Iterator[triton_oracle.Call]]] = {
    "permutation": permutation_calls,
    "cross_entropy": cross_entropy_calls,
    "grouped_dbias_dscales": grouped_dbias_calls,
    "pad": pad_calls,
}


@pytest.fixture(scope="module")
def asked_and_computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[triton_oracle.Call, Any]]]:
    """Return calls and their results by module of TE; one process runs all, since loading Triton takes longest."""
    pytest.importorskip("triton")
    folder = triton_oracle.te_root() / "pytorch" / "triton"
    asked = {module: list(calls()) for module, calls in CALLS.items() if (folder / f"{module}.py").exists()}
    results = triton_oracle.run(asked, tmp_path_factory.mktemp("triton"))
    return {module: list(zip(calls, results[module], strict=True)) for module, calls in asked.items()}


@pytest.mark.parametrize("module", CALLS)
def test_replacements_compute_what_te_s_own_triton_kernels_compute(
    module: str, asked_and_computed: dict[str, list[tuple[triton_oracle.Call, Any]]]
) -> None:
    if module not in asked_and_computed:
        pytest.skip(f"TransformerEngine {versions.installed_version()} has no {module}")
    ours = triton.replacements(f"transformer_engine.pytorch.triton.{module}")
    for (name, args), result in asked_and_computed[module]:
        actual, expected = meaningful(name, ours[name](*args), args), meaningful(name, result, args)
        for a, e in zip(actual, expected, strict=True):
            if not isinstance(a, Tensor) or not a.is_floating_point():
                assert torch.equal(a, e) if isinstance(a, Tensor) else a == e
            else:
                relative = 0.0 if name in COPIES else SUMS if a.dtype == torch.float32 else torch.finfo(a.dtype).eps
                absolute = 0.0 if name in COPIES else SUMS * float(e.float().abs().max())
                torch.testing.assert_close(a, e, rtol=relative, atol=absolute)


IGNORED = -100


parallel_cross_entropy = te.kernels("cpu").te.parallel_cross_entropy


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits, target = 5 * torch.randn(3, 7, 50, generator=rng), torch.randint(0, 50, (3, 7), generator=rng)
    target[0, 0] = target[2, 3] = IGNORED
    return logits.to(dtype), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss_and_gradient_are_pytorch_s(dtype: torch.dtype, reduced: bool, smoothing: float) -> None:
    logits, target = draw(dtype)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(
        exact.view(-1, 50), target.view(-1), label_smoothing=smoothing, reduction="mean" if reduced else "none"
    )
    x = logits.clone().requires_grad_()
    loss = parallel_cross_entropy(x.clone(), target, smoothing, reduced, None, IGNORED)
    grad = torch.rand_like(loss)
    loss.backward(grad)
    expected.backward(grad.view(expected.shape).double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double().view(expected.shape), expected, rtol=1e-5, atol=1e-5)
    # Up to 2.16 a BF16 gradient is rounded when it is computed and when it is scaled.
    torch.testing.assert_close(
        x.grad.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6 if dtype == torch.float32 else 2e-3
    )
    assert not x.grad[target == IGNORED].any()


def test_a_loss_of_ignored_rows_alone_is_zero() -> None:
    logits, target = draw(torch.float32)
    x = logits.requires_grad_()
    loss = parallel_cross_entropy(x.clone(), torch.full_like(target, IGNORED), 0.0, True, None, IGNORED)
    loss.backward(torch.ones_like(loss))
    assert loss.item() == 0.0
    assert not x.grad.any()


def test_strided_logits_give_the_same_loss_and_gradient() -> None:
    logits, target = draw(torch.float32)
    x, strided = logits.clone().requires_grad_(), logits.transpose(0, 1).contiguous().requires_grad_()
    loss = parallel_cross_entropy(x.clone(), target)
    same = parallel_cross_entropy(strided.clone().transpose(0, 1), target)
    loss.sum().backward()
    same.sum().backward()
    assert torch.equal(loss, same)
    assert torch.equal(x.grad, strided.grad.transpose(0, 1))
