"""What stands in for Triton and for TE's functions that launch its kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_oracle
from packaging.version import Version
from torch import Tensor

from parity.cpu import triton, versions
from parity.cpu.loading import triton as stand_in

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


# What follows compares with TE's own Triton kernels.


def routing(tokens: int, experts: int, seed: int) -> Tensor:
    return (torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) < 0.4).int()


def permutation_calls() -> Iterator[triton_oracle.Call]:
    """Every wrapper, with and without probabilities, scales and padding; one token goes nowhere."""
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
    """Forward and backward as this version of TE calls them: an ignored row, smoothing, reduction, strided logits."""
    target = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(0))
    target[1, 2] = -100
    for dtype in (torch.float32, torch.bfloat16):
        for smoothing, reduced in ((0.0, False), (0.0, True), (0.2, False), (0.2, True)):
            logits = (4 * torch.randn(2, 5, 37)).to(dtype)
            grad = torch.rand(1) if reduced else torch.rand(2, 5)
            if versions.installed_version() < Version("2.19"):
                # Up to 2.16, a BF16 gradient is subtracted from, which the interpreter does to the bits, as integers.
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
    """A call's results; ``make_row_id_map`` leaves the columns that stand for no row unwritten."""
    if name == "make_row_id_map":
        unused = torch.arange(args[2]) >= result[:, -1:]
        result = result.masked_fill(torch.cat([unused, unused, unused[:, :1] & False], 1), -1)
    return list(result) if isinstance(result, tuple) else [result]


SUMS = 2**-20
"""How far FP32 sums of tens of terms differ with their order, relative to their terms."""

COPIES = {"permute_with_mask_map", "sort_chunks_by_map"}
"""Calls whose results are exact; the interpreter truncates other results to BF16, where GPUs round to the nearest."""


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        ("permutation", permutation_calls),
        ("cross_entropy", cross_entropy_calls),
        ("grouped_dbias_dscales", grouped_dbias_calls),
        ("pad", pad_calls),
    ],
)
def test_replacements_compute_what_te_s_own_triton_kernels_compute(
    module: str, calls: Callable[[], Iterator[triton_oracle.Call]], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    if not (triton_oracle.te_root() / "pytorch" / "triton" / f"{module}.py").exists():
        pytest.skip(f"TransformerEngine {versions.installed_version()} has no {module}")
    ours = triton.replacements(f"transformer_engine.pytorch.triton.{module}")
    asked = list(calls())
    for (name, args), result in zip(asked, triton_oracle.run(module, asked, tmp_path), strict=True):
        actual, expected = meaningful(name, ours[name](*args), args), meaningful(name, result, args)
        for a, e in zip(actual, expected, strict=True):
            if not isinstance(a, Tensor) or not a.is_floating_point():
                assert torch.equal(a, e) if isinstance(a, Tensor) else a == e
            else:
                relative = 0.0 if name in COPIES else SUMS if a.dtype == torch.float32 else torch.finfo(a.dtype).eps
                absolute = 0.0 if name in COPIES else SUMS * float(e.float().abs().max())
                torch.testing.assert_close(a, e, rtol=relative, atol=absolute)
