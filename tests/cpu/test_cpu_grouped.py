"""Experts: TE's ``GroupedLinear``, its padding, and grouped tensors, whose groups equal the same tensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor

import parity
from parity import te
from parity.recordings import folder
from te_on_cpu import cast, cuda, gemm, router
from te_on_cpu.enums import DType
from te_on_cpu.graphs import CUDAGraph, graph, recorded

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
IN, OUT = 32, 48
RECIPES = [None, "DelayedScaling", "Float8CurrentScaling"]


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def make_recipe(name: str | None) -> Any:
    from transformer_engine.common import recipe as recipes

    return None if name is None else getattr(recipes, name)()


def make_experts(dtype: torch.dtype, experts: int, **options: Any) -> tuple[Any, list[Any]]:
    """Return a ``GroupedLinear``, and a ``Linear`` with the same weights for each expert."""
    torch.manual_seed(0)
    grouped = TE.GroupedLinear(experts, IN, OUT, params_dtype=dtype, device="cpu", **options)
    options.pop("delay_wgrad_compute", None)
    single = [TE.Linear(IN, OUT, params_dtype=dtype, device="cpu", **options) for _ in range(experts)]
    for i, linear in enumerate(single):
        linear.weight.data.copy_(getattr(grouped, f"weight{i}"))
        if linear.use_bias:
            linear.bias.data.copy_(getattr(grouped, f"bias{i}"))
    return grouped, single


def run(module: Any, x: Tensor, grad: Tensor, recipe: Any, *splits: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the input gradient."""
    x = x.clone().requires_grad_()
    with TE.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *splits)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(("dtype", "bias"), [(FP32, True), (BF16, False), (FP16, True)])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_grouped_linear_is_a_linear_for_each_expert(recipe_name: str | None, dtype: torch.dtype, bias: bool) -> None:
    splits = [16, 0, 48, 32]
    grouped, single = make_experts(dtype, len(splits), bias=bias)
    recipe, other_recipe = make_recipe(recipe_name), make_recipe(recipe_name)
    for gain in (1.0, 100.0, 0.1):
        x, grad = (gain * torch.randn(sum(splits), IN)).to(dtype), torch.randn(sum(splits), OUT).to(dtype)
        grouped.zero_grad()
        y, x_grad = run(grouped, x, grad, recipe, splits)
        parts = zip(single, x.split(splits), grad.split(splits), y.split(splits), x_grad.split(splits), strict=True)
        for i, (linear, x_i, grad_i, y_i, x_grad_i) in enumerate(parts):
            gradients = {name: getattr(grouped, f"{name}{i}").grad for name in ("weight", *["bias"] * bias)}
            if not len(x_i):
                assert not any(gradient.any() for gradient in gradients.values())
                continue
            linear.zero_grad()
            expected = run(linear, x_i, grad_i, other_recipe)
            assert torch.equal(y_i, expected[0])
            assert torch.equal(x_grad_i, expected[1])
            assert torch.equal(gradients["weight"], linear.weight.grad)
            if bias:
                torch.testing.assert_close(gradients["bias"], linear.bias.grad)


def test_weight_gradients_can_wait_or_be_added_to_main_grad() -> None:
    splits = [16, 32]
    changes: list[dict[str, bool]] = [{}, {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}]
    plain, delayed, fused = (make_experts(BF16, 2, bias=True, **options)[0] for options in changes)
    for i in range(2):
        getattr(fused, f"weight{i}").main_grad = torch.full((OUT, IN), 2.0)
    x, grad = torch.randn(48, IN).to(BF16), torch.randn(48, OUT).to(BF16)
    expected = run(plain, x, grad, None, splits)
    for module in (delayed, fused):
        assert torch.equal(expected[1], run(module, x, grad, None, splits)[1])
    delayed.backward_dw()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(delayed.get_parameter(name).grad, parameter.grad)
    for i, (x_i, grad_i) in enumerate(zip(x.double().split(splits), grad.double().split(splits), strict=True)):
        main_grad = getattr(fused, f"weight{i}").main_grad
        torch.testing.assert_close(main_grad.double(), 2.0 + grad_i.t() @ x_i, rtol=1e-5, atol=1e-4)


def test_grouped_gemm_applies_gelu_and_hands_back_its_input() -> None:
    a, b = [torch.randn(8, 16), torch.randn(8, 16)], [torch.randn(4, 16), torch.zeros(0, 16)]
    bias = [torch.randn(8), torch.randn(8)]
    outputs = [torch.empty(4, 8), torch.empty(0, 8)]
    inputs = [torch.empty(4, 8), torch.empty(0, 8)]
    gemm.te_general_grouped_gemm(
        a, True, b, False, outputs, 4, None, bias, 4, False, inputs, False, [torch.empty(0)], 0, False, False, 0
    )
    torch.testing.assert_close(inputs[0], b[0] @ a[0].t() + bias[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(outputs[0], torch.nn.functional.gelu(inputs[0], approximate="tanh"))


rows = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(rows, st.sampled_from([FP32, BF16, torch.uint8]))
def test_padding_puts_zeros_after_each_part_and_unpadding_takes_them_away(
    parts: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    sizes = [size for size, _ in parts]
    padded_sizes = [size + extra if size else 0 for size, extra in parts]
    x = torch.randint(1, 100, (sum(sizes), 3)).to(dtype)
    padded = torch.full((sum(padded_sizes), 3), 77).to(dtype)
    router.fused_multi_row_padding(x, padded, sizes, padded_sizes)
    for part, padded_part in zip(x.split(sizes), padded.split(padded_sizes), strict=True):
        assert torch.equal(padded_part[: len(part)], part)
        assert not padded_part[len(part) :].any()
    back = torch.empty_like(x)
    router.fused_multi_row_unpadding(padded, back, padded_sizes, sizes)
    assert torch.equal(back, x)


def test_padding_needs_a_size_for_each_part() -> None:
    with pytest.raises(ValueError, match="2 parts of the input but 1 of the output"):
        router.fused_multi_row_padding(torch.zeros(4, 2), torch.zeros(8, 2), [2, 2], [8])


def test_te_pads_experts_for_fp8_and_drops_the_padding_again() -> None:
    splits = [5, 16, 3]
    pad, unpad = TE.Fp8Padding(3, align_size=16), TE.Fp8Unpadding(3, align_size=16)
    x = torch.randn(sum(splits), IN, requires_grad=True)
    padded, padded_splits = pad(x, splits)
    assert padded_splits == [16, 16, 16]
    y = unpad(2 * padded, splits)
    assert torch.equal(y, 2 * x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(grad_of(x), 2 * grad)


GROUPS, WIDTH = [128, 0, 256], 256
ROWS = sum(GROUPS)
# The oldest cuBLASLt with which TE 2.20 takes the grouped path for every recipe that has one.
NEW_CUBLASLT = 130600
BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
AMAXES = ("amax_rowwise", "amax_columnwise")

NEW_IN_2_18 = pytest.mark.skipif(
    Version(te.version()) < Version("2.18"), reason="TransformerEngine groups it from 2.18 on"
)
NAMES = [pytest.param("current", marks=NEW_IN_2_18), "block", "mxfp8", "nvfp4"]


@pytest.fixture(params=["Hopper", "Blackwell"])
def each_gpu(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with emulated({"Hopper": cuda.HOPPER, "Blackwell": cuda.BLACKWELL}[request.param]) as module:
        yield module


def quantizer_of(name: str, **usages: bool) -> Any:
    usages = {"rowwise": True, "columnwise": True, **usages}
    if name == "block":
        options = {"force_pow_2_scales": True, "amax_epsilon": 0.0, "block_scaling_dim": 1}
        return TE.Float8BlockQuantizer(DType.kFloat8E4M3, **options, **usages)
    if name == "mxfp8":
        return TE.MXFP8Quantizer(DType.kFloat8E4M3, **usages)
    if name == "nvfp4":
        return TE.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **usages)
    return TE.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), **usages)


def values_of(rows: int = ROWS, columns: int = WIDTH) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1))).to(BF16)


def assert_same(member: Any, alone: Any) -> None:
    """Assert that a group's part of the buffers holds the same as a cast of that group alone."""
    for name in ("_data", "_transpose", "_scale_inv", *(f"_{name}" for name in (*BUFFERS, *AMAXES))):
        one, other = getattr(member, name, None), getattr(alone, name, None)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other.view(one.shape)), name


@pytest.mark.parametrize("usages", [{}, {"columnwise": False}], ids=["both", "rowwise"])
@pytest.mark.parametrize("name", NAMES)
def test_each_group_is_cast_as_if_it_were_alone(each_gpu: ModuleType, name: str, usages: dict[str, bool]) -> None:
    quantizer = quantizer_of(name, **usages)
    for groups, listed in ((GROUPS, torch.tensor(GROUPS)), ([128, 128], None)):  # groups of one size need no list
        values = values_of(sum(groups))
        result = cast.group_quantize(values, quantizer, len(groups), listed)
        assert isinstance(result, torch.Tensor)
        assert result.shape[-1] == WIDTH
        assert result.shape.numel() == values.numel()
        members = cast.members(result)
        assert [member.size()[0] if member.size().numel() else 0 for member in members] == groups
        for part, member in zip(values.split(groups), members, strict=True):
            if part.numel():
                assert_same(member, cast.quantize(part, quantizer))


@NEW_IN_2_18
@pytest.mark.parametrize("is_longer", [False, True], ids=["", "with a tail"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("current", [(128, 64), (128, 192), (128, 32)]),
        ("mxfp8", [(128, 64), (128, 192), (128, 32)]),
        ("mxfp8", [(128, 64), (256, 192), (384, 32)]),
    ],
    ids=["current, columns", "mxfp8, columns", "mxfp8, rows and columns"],
)
def test_groups_of_several_widths_lie_one_after_another(
    blackwell: ModuleType, name: str, shapes: list[tuple[int, int]], is_longer: bool
) -> None:
    quantizer, parts = quantizer_of(name), [values_of(rows, columns) for rows, columns in shapes]
    flat = torch.cat([part.flatten() for part in parts])
    if is_longer:
        flat = torch.cat([flat, torch.full_like(flat, 1e4)])
    rows, columns = (torch.tensor(sizes) for sizes in zip(*shapes, strict=True))
    are_level = len(set(rows.tolist())) == 1
    matrix = flat.view(shapes[0][0] if are_level else 1, -1)
    result = cast.group_quantize(matrix, quantizer, len(shapes), None if are_level else rows, columns)
    assert torch.equal(result.last_dims, columns)
    for part, member in zip(parts, cast.members(result), strict=True):
        assert_same(member, cast.quantize(part, quantizer))


@NEW_IN_2_18
def test_columns_alone_are_cast_with_current_scaling_too() -> None:
    """Cast only columns, which neither ``quantize`` nor TE's kernel for a single tensor does."""
    with emulated(cuda.HOPPER):
        values, sizes = values_of(), torch.tensor(GROUPS)
        both, columnwise = (
            cast.group_quantize(values, quantizer_of("current", rowwise=rowwise), len(GROUPS), sizes)
            for rowwise in (True, False)
        )
        assert columnwise.rowwise_data is None
        assert torch.equal(columnwise.columnwise_data, both.columnwise_data)
        assert torch.equal(columnwise.columnwise_scale_inv, both.scale_inv)


def test_offsets_that_are_known_are_kept(blackwell: ModuleType) -> None:
    quantizer, values = quantizer_of("mxfp8"), values_of()
    sizes, offsets = torch.tensor(GROUPS), torch.tensor([0, *GROUPS]).cumsum(0) * WIDTH
    for result in (
        cast.group_quantize(values, quantizer, len(GROUPS), sizes, tensor_offsets=offsets),
        cast.bgrad_group_quantize(values, quantizer, len(GROUPS), sizes, tensor_offsets=offsets)[0],
    ):
        assert result.tensor_offsets is offsets
        assert torch.equal(result.rowwise_data, cast.group_quantize(values, quantizer, len(GROUPS), sizes).rowwise_data)


def test_a_graph_holds_a_cast_of_groups(each_gpu: ModuleType) -> None:
    """Make a grouped tensor within a capture: TE's extension allows it, though TE's Python refuses it."""
    quantizer, values, sizes = quantizer_of("current", columnwise=False), values_of(), torch.tensor(GROUPS)
    captured = CUDAGraph()
    with graph(captured):
        result = recorded(cast.group_quantize)(values, quantizer, len(GROUPS), sizes)
    values.copy_(values.flip(0))
    captured.replay()
    again = cast.group_quantize(values, quantizer, len(GROUPS), sizes)
    assert torch.equal(result.rowwise_data, again.rowwise_data)
    assert torch.equal(result.scale_inv, again.scale_inv)


def test_an_output_is_filled_in_place_unless_the_flag_is_set(blackwell: ModuleType) -> None:
    quantizer = quantizer_of("mxfp8")
    first, second = values_of(256), values_of(256).flip(0)
    output = cast.group_quantize(first, quantizer, 2, None)
    held, before = output.rowwise_data, output.rowwise_data.clone()
    cast.group_quantize(second, quantizer, 2, None, noop_flag=torch.ones(1), output=output)
    assert torch.equal(held, before)
    cast.group_quantize(second, quantizer, 2, None, noop_flag=torch.zeros(1), output=output)
    assert torch.equal(held, cast.group_quantize(second, quantizer, 2, None).rowwise_data)


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_bias_gradients_are_sums_over_each_groups_rows(blackwell: ModuleType, name: str) -> None:
    quantizer, values = quantizer_of(name), values_of()
    result, bias_grads = cast.bgrad_group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    expected = torch.stack([part.double().sum(0) for part in values.split(GROUPS)])
    assert bias_grads.dtype == BF16
    torch.testing.assert_close(bias_grads.double(), expected, rtol=2.0**-8, atol=1e-5)
    plain = cast.group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    assert torch.equal(result.rowwise_data, plain.rowwise_data)


@pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])
def test_dequantizing_decodes_each_group(blackwell: ModuleType, name: str) -> None:
    quantizer, values = quantizer_of(name), values_of()
    result = cast.group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    decoded = cast.group_dequantize(result, DType.kBFloat16)
    assert decoded.quantizer is None
    alone = [cast.quantize(part, quantizer).dequantize(dtype=BF16) for part in values.split(GROUPS) if len(part)]
    assert torch.equal(decoded.rowwise_data.view(ROWS, WIDTH), torch.cat(alone))


def test_requantizing_adds_columns_cast_from_the_decoded_rows_for_a_gemm(blackwell: ModuleType) -> None:
    quantizer, sizes = quantizer_of("mxfp8", columnwise=False), torch.tensor(GROUPS)
    rowwise = cast.group_quantize(values_of(), quantizer, len(GROUPS), sizes)
    quantizer.set_usage(columnwise=True)
    decoded = cast.group_requantize_inplace(
        rowwise, quantizer, len(GROUPS), sizes, DType.kBFloat16, return_dequantized=True
    )
    for_gemm = quantizer_of("mxfp8")
    for_gemm.optimize_for_gemm = True
    again = cast.group_quantize(decoded, for_gemm, len(GROUPS), sizes)
    assert rowwise._with_gemm_swizzled_scales
    for name in ("columnwise_data", "columnwise_scale_inv"):
        assert torch.equal(getattr(rowwise, name), getattr(again, name))
    assert torch.equal(cast.group_dequantize(rowwise, DType.kBFloat16).rowwise_data, decoded.flatten())
    both = cast.group_quantize(decoded, quantizer_of("mxfp8"), len(GROUPS), sizes)
    with pytest.raises(RuntimeError, match="only rowwise data"):
        cast.group_requantize_inplace(both, quantizer, len(GROUPS), sizes, DType.kBFloat16)


def test_known_amaxes_stand_in_for_the_values_own(blackwell: ModuleType) -> None:
    quantizer, values = quantizer_of("nvfp4"), values_of(256)
    own = cast.quantize(values, quantizer)
    amaxes = own._amax_rowwise, own._amax_columnwise
    assert_same(cast.nvfp4_quantize_with_amax(values, quantizer, *amaxes), own)
    doubled = cast.nvfp4_quantize_with_amax(values, quantizer, 2 * amaxes[0], 2 * amaxes[1])
    assert torch.equal(doubled._amax_columnwise, 2 * amaxes[1])
    # Twice the amax halves the meaning of a block scale of 1, so that the block scales double; E4M3 has room for it.
    assert torch.equal(doubled._rowwise_data, cast.quantize(values, quantizer)._rowwise_data)
    two = cast.nvfp4_group_quantize_with_amax(
        values.repeat(2, 1), quantizer, 2, None, rowwise_amax=amaxes[0].repeat(2), columnwise_amax=amaxes[1].repeat(2)
    )
    for member in cast.members(two):
        assert_same(member, own)


SIZES, WIDTHS = torch.tensor(GROUPS), torch.tensor([32, 64, 32])
NOT_GROUPED: list[tuple[Any, str, tuple[Any, ...], str]] = [
    (cast.group_quantize, "delayed", (SIZES,), "does not support Float8Quantizer"),
    (cast.group_quantize, "nvfp4 as it is", (SIZES,), "needs a random Hadamard transform"),
    (cast.bgrad_group_quantize, "current", (SIZES,), "not Float8CurrentScalingQuantizer"),
    (cast.group_quantize, "block", (None, WIDTHS), "cannot cast groups of different widths"),
    (cast.group_quantize, "nvfp4", (None, WIDTHS), "cannot cast groups of different widths"),
    (cast.group_quantize, "current", (SIZES, WIDTHS), "rows or in columns, but not in both"),
    (cast.bgrad_group_quantize, "mxfp8", (None, WIDTHS), "because their bias gradients differ"),
    *(
        (
            cast.group_quantize,
            name,
            (torch.tensor([96, 0, 288]),),
            r"multiples of 128, but got \[96, 0, 288\]; pad them",
        )
        for name in ("block", "mxfp8", "nvfp4")
    ),
]


@pytest.mark.parametrize(("kernel", "name", "sizes", "message"), NOT_GROUPED)
def test_what_te_does_not_group_is_refused(
    blackwell: ModuleType, kernel: Any, name: str, sizes: tuple[Any, ...], message: str
) -> None:
    others = {
        "delayed": lambda: TE.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3),
        "nvfp4 as it is": TE.NVFP4Quantizer,
    }
    quantizer = others[name]() if name in others else quantizer_of(name)
    with pytest.raises(RuntimeError, match=message):
        kernel(values_of(), quantizer, 3, *sizes)


GPU_RECIPES = {
    "Hopper": [None, "Float8CurrentScaling", "Float8BlockScaling"],
    "Blackwell": [None, "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"],
}


def nearest_recipe(name: str | None) -> Any:
    from transformer_engine.common import recipe

    # Stochastic roundings would differ from one pass to the next.
    return name and getattr(recipe, name)(**({"disable_stochastic_rounding": True} if name[0] == "N" else {}))


def train_step(module: Any, recipe: Any, *inputs: Any) -> Tensor:
    with TE.autocast(enabled=recipe is not None, recipe=recipe):
        output = module(*inputs)
    output.backward(torch.linspace(-1, 1, output.numel()).sin().view(output.shape).to(BF16))
    return output


@pytest.mark.parametrize(("gpu", "recipe"), [(gpu, name) for gpu in GPU_RECIPES for name in GPU_RECIPES[gpu]])
def test_a_grouped_linear_operation_is_a_linear_module_for_each_group_to_the_bit(gpu: str, recipe: str | None) -> None:
    if recipe == "Float8BlockScaling" and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's operations refuse block scaling before 2.18")
    with emulated(getattr(cuda, gpu.upper()), NEW_CUBLASLT):
        import transformer_engine.pytorch.ops as ops

        x = values_of()
        module = ops.GroupedLinear(len(GROUPS), WIDTH, 128, bias=False, dtype=BF16, device="cpu")
        whole = x.clone().requires_grad_()
        output = train_step(module, nearest_recipe(recipe), whole, torch.tensor(GROUPS))
        first = GROUPS[0]
        linear = TE.Linear(WIDTH, 128, bias=False, params_dtype=BF16, device="cpu")
        linear.weight.data.copy_(module.weight0)
        part = x[:first].clone().requires_grad_()
        with TE.autocast(enabled=recipe is not None, recipe=nearest_recipe(recipe)):
            alone = linear(part)
        alone.backward(torch.linspace(-1, 1, output.numel()).sin().view(output.shape).to(BF16)[:first])
        assert torch.equal(output[:first], alone)
        assert torch.equal(whole.grad[:first], part.grad)
        assert torch.equal(module.weight0.grad, linear.weight.grad)
        assert not module.weight1.grad.any()


@pytest.mark.skipif(
    Version(te.version()) < Version("2.20"), reason="before TransformerEngine 2.20 the module has no such choice"
)
@pytest.mark.filterwarnings("ignore:GroupedLinear is using single_grouped_weight:UserWarning")
@pytest.mark.parametrize("single_weight", [False, True])
@pytest.mark.parametrize(("gpu", "recipe"), [(gpu, name) for gpu in GPU_RECIPES for name in GPU_RECIPES[gpu]])
def test_the_grouped_path_of_the_module_is_the_split_path_to_the_bit(
    gpu: str, recipe: str | None, single_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if single_weight and recipe == "NVFP4BlockScaling":
        pytest.skip("TransformerEngine has no kernel that casts a single grouped weight to NVFP4 blocks of 16 x 16")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with emulated(getattr(cuda, gpu.upper()), NEW_CUBLASLT):
        options = {"bias": False, "params_dtype": BF16, "device": "cpu"}
        fused = TE.GroupedLinear(3, WIDTH, 128, use_grouped_tensor=True, single_grouped_weight=single_weight, **options)
        split = TE.GroupedLinear(3, WIDTH, 128, use_grouped_tensor=False, **options)
        weights = [split.weight0, split.weight1, split.weight2]
        stacked = torch.stack([weight.detach() for weight in weights])
        if single_weight:
            fused.weight.rowwise_data.copy_(stacked.view(-1))
        else:
            for i, weight in enumerate(stacked):
                getattr(fused, f"weight{i}").data.copy_(weight)
        results = []
        for module, sizes in ((fused, torch.tensor(GROUPS)), (split, GROUPS)):
            x = values_of().requires_grad_()
            results.append((train_step(module, nearest_recipe(recipe), x, sizes), x.grad))
        of_fused = fused.weight.grad if single_weight else torch.stack([p.grad for p in fused.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(of_fused.view(-1), torch.stack([weight.grad for weight in weights]).view(-1))


@pytest.mark.skipif(Version(te.version()) < Version("2.20"), reason="TransformerEngine has no such weight before 2.20")
@pytest.mark.filterwarnings("ignore:GroupedLinear is using single_grouped_weight:UserWarning")
def test_a_weight_of_all_experts_is_recorded_as_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    options = {"bias": False, "params_dtype": BF16, "single_grouped_weight": True, "use_grouped_tensor": True}
    with emulated(cuda.HOPPER, NEW_CUBLASLT):
        experts = TE.GroupedLinear(3, WIDTH, 128, **options)
        with parity.recording(tmp_path):
            experts(values_of(), torch.tensor(GROUPS)).float().sum().backward()
    (stored,) = folder.read(tmp_path)
    assert torch.equal(stored.tensor("weight", "weight"), 1.0 * experts.weight)
    assert stored.tensor("gradient of weight", "weight").shape == (3, 128, WIDTH)
