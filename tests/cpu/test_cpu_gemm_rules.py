"""GEMMs that TE and cuBLAS refuse, and GEMMs that they accept although they look unpadded, on each GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from gemm_oracle import product, run

from parity import te
from te_on_cpu import cast, cuda
from te_on_cpu.enums import DType

TE = te.kernels("cpu").te
BF16 = torch.bfloat16
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
GPUS = {"hopper": cuda.HOPPER, "blackwell": cuda.BLACKWELL}


def codes(*shape: int, dtype: DType = E4M3, **usages: bool) -> Any:
    """Return ones with one FP8 scale for the tensor."""
    return cast.quantize(torch.ones(*shape), TE.Float8Quantizer(torch.ones(1), torch.zeros(1), dtype, **usages))


def blocks(*shape: int, dtype: DType = E4M3, dimensions: int = 1) -> Any:
    """Return ones with an FP8 scale per block of ``dimensions`` dimensions."""
    arguments = {"rowwise": True, "columnwise": True, "block_scaling_dim": dimensions, "force_pow_2_scales": True}
    return cast.quantize(torch.ones(*shape), TE.Float8BlockQuantizer(dtype, **arguments))


# op(A), op(B), layout, and the error on each GPU, or None if it accepts the GEMM.
UNPADDED: dict[str, tuple[tuple[int, int], tuple[int, int], str, dict[str, str | None]]] = {
    "24 tokens in a weight's gradient": (
        (24, 32), (24, 16), "NT",
        {"hopper": "Leading dimension requirement on A .* 24, the rows .tokens.", "blackwell": None},
    ),
    "one token in a weight's gradient": (
        (1, 32), (1, 16), "NT", {"hopper": "Leading dimension requirement on A", "blackwell": None}
    ),
    "an odd number of tokens in a result": ((16, 32), (3, 32), "TN", {"hopper": None, "blackwell": None}),
    "24 input features in a result": (
        (16, 24), (8, 24), "TN",
        dict.fromkeys(GPUS, "Leading dimension requirement on A .* 24, the layer's input features"),
    ),
    "24 input features in the input's gradient": (
        (32, 24), (8, 32), "NN",
        {"hopper": None, "blackwell": "Leading dimension requirement on A .* 24, the layer's input features"},
    ),
    "24 output features in the input's gradient": (
        (24, 16), (32, 24), "NN",
        dict(hopper="Leading dimension requirement on A .* 24, the layer's output features", blackwell=None),
    ),
    "24 output features in a weight's gradient": (
        (32, 16), (32, 24), "NT",
        {"hopper": None, "blackwell": "Leading dimension requirement on B .* 24, the layer's output features"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("gpu", [*GPUS, "rtx_blackwell"])
@pytest.mark.parametrize("case", UNPADDED)
def test_the_dimension_that_lies_contiguously_is_what_has_to_be_padded(case: str, gpu: str) -> None:
    """An RTX Blackwell reads transposed copies, as a Hopper does."""
    left, right, layout, refused = UNPADDED[case]
    with emulated(cuda.GPUS[gpu]):
        a, b, message = codes(*left), codes(*right), refused.get(gpu, refused["hopper"])
        if message is None:
            inner = left[1] if layout[0] == "T" else left[0]
            assert product(a, b, layout, BF16).unique().tolist() == [inner]
        else:
            with pytest.raises(RuntimeError, match=message):
                run(a, b, layout, BF16)


def test_a_blackwell_reads_a_transposed_copy_by_the_mirrored_flag() -> None:
    values = torch.arange(16 * 32.0).remainder(7).view(16, 32)
    expected = product(values.to(BF16), values.to(BF16))
    with emulated(cuda.HOPPER):
        a, b = (cast.quantize(values, TE.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)) for _ in range(2))
        b.update_usage(rowwise_usage=False)
    with emulated(cuda.BLACKWELL):
        assert torch.equal(product(a, b, dtype=BF16), expected)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_an_rtx_blackwell_multiplies_mxfp8_in_forward_passes_alone(layout: str) -> None:
    a = cast.quantize(torch.ones(64, 64), TE.MXFP8Quantizer(E4M3, rowwise=True, columnwise=True))
    with emulated(cuda.BLACKWELL):
        expected = product(a, a, layout, BF16)
    with emulated(cuda.RTX_BLACKWELL):
        if layout == "TN":
            assert torch.equal(product(a, a, layout, BF16), expected)
        else:
            with pytest.raises(RuntimeError, match=r"Unable to find suitable cuBLAS .* 12\.0, MXFP8 .* forward passes"):
                run(a, a, layout, BF16)


EPILOGUE = "Epilogue requested outside of the available"
ROW = {"bias": torch.ones(16, dtype=BF16)}
REFUSED_BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str | None]] = {
    "1D by 1D": ({}, {}, {}, None),
    "a 2D weight": ({"dimensions": 2}, {}, {}, None),
    "a 2D input": ({}, {"dimensions": 2}, {}, None),
    "2D by 2D": ({"dimensions": 2}, {"dimensions": 2}, {}, "Only 1D by 1D, 1D by 2D, and 2D by 1D"),
    "fast accumulation": ({}, {}, {"use_split_accumulator": False}, "CUBLAS_STATUS_NOT_SUPPORTED"),
    "E4M3 by E5M2": ({}, {"dtype": E5M2}, {}, None),
    "E5M2 by E5M2": ({"dtype": E5M2}, {"dtype": E5M2}, {}, "cannot multiply E5M2 by E5M2"),
    "a bias": ({}, {}, ROW, None),
    "a bias gradient": ({}, {}, {**ROW, "grad": True}, EPILOGUE),
    "GELU": ({}, {}, {"gelu": True}, EPILOGUE),
    "a bias with GELU": ({}, {}, {**ROW, "gelu": True}, EPILOGUE),
    "GELU's derivative": ({}, {}, {"gelu": True, "grad": True, "gelu_in": torch.ones(8, 16, dtype=BF16)}, None),
    "GELU's derivative with a bias gradient": (
        {}, {}, {**ROW, "gelu": True, "grad": True, "gelu_in": torch.ones(8, 16, dtype=BF16)}, EPILOGUE
    ),
    "an outer size of A of 12": ({"rows": 12}, {}, {}, "Outer dimension requirement on A .* 12"),
    "an outer size of B of 7, 1D": ({}, {"rows": 7}, {}, "Outer dimension requirement on B .* 7"),
    "an outer size of B of 7, 2D": ({}, {"rows": 7, "dimensions": 2}, {}, None),
    "an inner size of 120": ({"inner": 120}, {"inner": 120}, {}, "Leading dimension requirement on A and B .* 120"),
}  # fmt: skip


def refuse_or_multiply(a: dict[str, Any], b: dict[str, Any], options: dict[str, Any], message: str | None) -> None:
    """Multiply block-scaled ones, 16 x 128 and 8 x 128 unless ``a`` or ``b`` differ, and expect any ``message``."""
    left, right = ({"rows": rows, "inner": 128} | given for rows, given in ((16, a), (8, b)))
    factors = [blocks(each.pop("rows"), each.pop("inner"), **each) for each in (left, right)]
    if message is None:
        run(*factors, "TN", BF16, **options)
    else:
        with pytest.raises(RuntimeError, match=message):
            run(*factors, "TN", BF16, **options)


@pytest.mark.parametrize("case", REFUSED_BLOCKS)
def test_a_hopper_multiplies_blocks_as_cublas_does(case: str) -> None:
    with emulated(cuda.HOPPER):
        refuse_or_multiply(*REFUSED_BLOCKS[case])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("2D by 2D", None),
        ("fast accumulation", None),
        ("a bias with GELU", None),
        ("an outer size of A of 12", None),
        ("an outer size of B of 7, 2D", None),
        ("an outer size of B of 7, 1D", "Outer dimension requirement on B .* 7"),
        ("E5M2 by E5M2", "cannot multiply E5M2 by E5M2"),
    ],
)
def test_a_blackwell_multiplies_blocks_as_mxfp8(case: str, message: str | None) -> None:
    with emulated(cuda.BLACKWELL):
        refuse_or_multiply(*REFUSED_BLOCKS[case][:3], message)


def test_factors_of_two_recipes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="compatible scaling modes, but A is a Float8Tensor and B a Float8Blockwise"):
        run(codes(16, 128), blocks(8, 128), "TN", BF16)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
def test_experts_train_on_a_blackwell_with_any_number_of_tokens(recipe: str, blackwell: Any) -> None:
    from transformer_engine.common import recipe as recipes

    splits = [1, 31, 0, 96]
    layer = blackwell.GroupedLinear(4, 32, 16, params_dtype=BF16)
    x = torch.randn(sum(splits), 32, dtype=BF16)
    with blackwell.autocast(recipe=getattr(recipes, recipe)()):
        layer(x, splits).sum().backward()
    for expert, rows in enumerate(x.split(splits)):
        gradient = getattr(layer, f"weight{expert}").grad
        torch.testing.assert_close(gradient, rows.sum(0).expand(16, 32), rtol=0, atol=max(len(rows), 1) ** 0.5 / 4)
