"""Casts of grouped tensors, and TE's grouped modules on them: each group is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from packaging.version import Version
from torch import Tensor

from parity import te
from parity.cpu import cast, cuda
from parity.cpu.enums import DType

BF16 = torch.bfloat16
GROUPS, WIDTH = [128, 0, 256], 256
ROWS = sum(GROUPS)
# The first cuBLASLt with which TE 2.20 takes the grouped path for every recipe that has one.
NEW_CUBLASLT = 130600
BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
AMAXES = ("amax_rowwise", "amax_columnwise")

NEW_IN_2_18 = pytest.mark.skipif(
    Version(te.version()) < Version("2.18"), reason="TransformerEngine groups it from 2.18 on"
)
NAMES = [pytest.param("current", marks=NEW_IN_2_18), "block", "mxfp8", "nvfp4"]


@pytest.fixture(params=["Hopper", "Blackwell"])
def te_module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with emulated({"Hopper": cuda.HOPPER, "Blackwell": cuda.BLACKWELL}[request.param]) as module:
        yield module


@pytest.fixture
def blackwell() -> Iterator[ModuleType]:
    with emulated(cuda.BLACKWELL) as module:
        yield module


def quantizer_of(te_module: ModuleType, name: str, **usages: bool) -> Any:
    usages = {"rowwise": True, "columnwise": True, **usages}
    if name == "block":
        options = {"force_pow_2_scales": True, "amax_epsilon": 0.0, "block_scaling_dim": 1}
        return te_module.Float8BlockQuantizer(DType.kFloat8E4M3, **options, **usages)
    if name == "mxfp8":
        return te_module.MXFP8Quantizer(DType.kFloat8E4M3, **usages)
    if name == "nvfp4":
        return te_module.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **usages)
    return te_module.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), **usages)


def values_of(rows: int = ROWS) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, WIDTH) * torch.exp(torch.randn(rows, 1))).to(BF16)


def assert_same(member: Any, alone: Any) -> None:
    """A group's part of the buffers holds what casting it alone gives."""
    for name in ("_data", "_transpose", "_scale_inv", *(f"_{name}" for name in (*BUFFERS, *AMAXES))):
        one, other = getattr(member, name, None), getattr(alone, name, None)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other.view(one.shape)), name


@pytest.mark.parametrize("usages", [{}, {"columnwise": False}], ids=["both", "rowwise"])
@pytest.mark.parametrize("name", NAMES)
def test_each_group_is_cast_as_if_it_were_alone(te_module: ModuleType, name: str, usages: dict[str, bool]) -> None:
    quantizer, values = quantizer_of(te_module, name, **usages), values_of()
    result = cast.group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    assert isinstance(result, torch.Tensor)
    assert tuple(result.shape) == (ROWS, WIDTH)
    members = cast.members(result)
    assert [member.size()[0] if member.size().numel() else 0 for member in members] == GROUPS
    for part, member in zip(values.split(GROUPS), members, strict=True):
        if part.numel():
            assert_same(member, cast.quantize(part, quantizer))


@NEW_IN_2_18
def test_columns_alone_are_cast_with_current_scaling_too() -> None:
    """``quantize`` does not do that, nor does TE's kernel for a single tensor."""
    with emulated(cuda.HOPPER) as te_module:
        values, sizes = values_of(), torch.tensor(GROUPS)
        both, columnwise = (
            cast.group_quantize(values, quantizer_of(te_module, "current", rowwise=rowwise), len(GROUPS), sizes)
            for rowwise in (True, False)
        )
        assert columnwise.rowwise_data is None
        assert torch.equal(columnwise.columnwise_data, both.columnwise_data)
        assert torch.equal(columnwise.columnwise_scale_inv, both.scale_inv)


def test_groups_of_one_size_need_no_list_of_sizes(blackwell: ModuleType) -> None:
    quantizer, values = quantizer_of(blackwell, "mxfp8"), values_of(256)
    result = cast.group_quantize(values, quantizer, 2, None)
    for part, member in zip(values.split(128), cast.members(result), strict=True):
        assert_same(member, cast.quantize(part, quantizer))


def test_an_output_is_filled_in_place_unless_the_flag_is_set(blackwell: ModuleType) -> None:
    quantizer = quantizer_of(blackwell, "mxfp8")
    first, second = values_of(256), values_of(256).flip(0)
    output = cast.group_quantize(first, quantizer, 2, None)
    held, before = output.rowwise_data, output.rowwise_data.clone()
    cast.group_quantize(second, quantizer, 2, None, noop_flag=torch.ones(1), output=output)
    assert torch.equal(held, before)
    cast.group_quantize(second, quantizer, 2, None, noop_flag=torch.zeros(1), output=output)
    assert torch.equal(held, cast.group_quantize(second, quantizer, 2, None).rowwise_data)


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_bias_gradients_are_sums_over_each_groups_rows(blackwell: ModuleType, name: str) -> None:
    quantizer, values = quantizer_of(blackwell, name), values_of()
    result, bias_grads = cast.bgrad_group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    expected = torch.stack([part.double().sum(0) for part in values.split(GROUPS)])
    assert bias_grads.dtype == BF16
    torch.testing.assert_close(bias_grads.double(), expected, rtol=2.0**-8, atol=1e-5)
    plain = cast.group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    assert torch.equal(result.rowwise_data, plain.rowwise_data)


@pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])
def test_dequantizing_decodes_each_group(blackwell: ModuleType, name: str) -> None:
    quantizer, values = quantizer_of(blackwell, name), values_of()
    result = cast.group_quantize(values, quantizer, len(GROUPS), torch.tensor(GROUPS))
    decoded = cast.group_dequantize(result, DType.kBFloat16)
    assert decoded.quantizer is None
    alone = [cast.quantize(part, quantizer).dequantize(dtype=BF16) for part in values.split(GROUPS) if len(part)]
    assert torch.equal(decoded.rowwise_data.view(ROWS, WIDTH), torch.cat(alone))


def test_requantizing_adds_columns_cast_from_the_decoded_rows(blackwell: ModuleType) -> None:
    quantizer, sizes = quantizer_of(blackwell, "mxfp8", columnwise=False), torch.tensor(GROUPS)
    rowwise = cast.group_quantize(values_of(), quantizer, len(GROUPS), sizes)
    quantizer.set_usage(columnwise=True)
    decoded = cast.group_requantize_inplace(
        rowwise, quantizer, len(GROUPS), sizes, DType.kBFloat16, return_dequantized=True
    )
    again = cast.group_quantize(decoded, quantizer_of(blackwell, "mxfp8"), len(GROUPS), sizes)
    assert torch.equal(rowwise.columnwise_data, again.columnwise_data)
    assert torch.equal(rowwise.columnwise_scale_inv, again.columnwise_scale_inv)
    with pytest.raises(RuntimeError, match="rowwise data alone"):
        cast.group_requantize_inplace(rowwise, quantizer, len(GROUPS), sizes, DType.kBFloat16)


def test_known_amaxes_stand_in_for_the_values_own(blackwell: ModuleType) -> None:
    quantizer, values = quantizer_of(blackwell, "nvfp4"), values_of(256)
    own = cast.quantize(values, quantizer)
    amaxes = own._amax_rowwise, own._amax_columnwise
    assert_same(cast.nvfp4_quantize_with_amax(values, quantizer, *amaxes), own)
    doubled = cast.nvfp4_quantize_with_amax(values, quantizer, 2 * amaxes[0], 2 * amaxes[1])
    assert torch.equal(doubled._amax_columnwise, 2 * amaxes[1])
    # Twice the amax halves what a block scale of 1 stands for, and the block scales double: E4M3 has room for it.
    assert torch.equal(doubled._rowwise_data, cast.quantize(values, quantizer)._rowwise_data)
    two = cast.nvfp4_group_quantize_with_amax(
        values.repeat(2, 1), quantizer, 2, None, rowwise_amax=amaxes[0].repeat(2), columnwise_amax=amaxes[1].repeat(2)
    )
    for member in cast.members(two):
        assert_same(member, own)


@pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])
def test_groups_that_block_scales_do_not_fit_are_refused(blackwell: ModuleType, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"multiples of 128, but got \[96, 288\]; pad them"):
        cast.group_quantize(values_of(), quantizer_of(blackwell, name), 2, torch.tensor([96, 288]))


def test_what_te_does_not_group_is_refused(blackwell: ModuleType) -> None:
    delayed = blackwell.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)
    with pytest.raises(RuntimeError, match="serves no Float8Quantizer"):
        cast.group_quantize(values_of(), delayed, 3, torch.tensor(GROUPS))
    with pytest.raises(RuntimeError, match="needs a random Hadamard transform"):
        cast.group_quantize(values_of(), blackwell.NVFP4Quantizer(), 3, torch.tensor(GROUPS))
    with pytest.raises(RuntimeError, match="not Float8CurrentScalingQuantizer"):
        cast.bgrad_group_quantize(values_of(), quantizer_of(blackwell, "current"), 3, torch.tensor(GROUPS))


RECIPES = {
    "Hopper": [None, "Float8CurrentScaling", "Float8BlockScaling"],
    "Blackwell": [None, "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"],
}


def make_recipe(name: str | None) -> Any:
    from transformer_engine.common import recipe

    # Random roundings would differ from one pass to the next.
    return name and getattr(recipe, name)(**({"disable_stochastic_rounding": True} if name[0] == "N" else {}))


def train_step(te_module: ModuleType, module: Any, recipe: Any, *inputs: Any) -> Tensor:
    with te_module.autocast(enabled=recipe is not None, recipe=recipe):
        output = module(*inputs)
    output.backward(torch.linspace(-1, 1, output.numel()).sin().view(output.shape).to(BF16))
    return output


@pytest.mark.parametrize(("gpu", "recipe"), [(gpu, name) for gpu in RECIPES for name in RECIPES[gpu]])
def test_a_grouped_linear_operation_is_a_linear_module_for_each_group_to_the_bit(gpu: str, recipe: str | None) -> None:
    if recipe == "Float8BlockScaling" and Version(te.version()) < Version("2.18"):
        pytest.skip("TransformerEngine's operations refuse block scaling before 2.18")
    with emulated(getattr(cuda, gpu.upper()), NEW_CUBLASLT) as te_module:
        import transformer_engine.pytorch.ops as ops

        x = values_of()
        module = ops.GroupedLinear(len(GROUPS), WIDTH, 128, bias=False, dtype=BF16, device="cpu")
        whole = x.clone().requires_grad_()
        output = train_step(te_module, module, make_recipe(recipe), whole, torch.tensor(GROUPS))
        first = GROUPS[0]
        linear = te_module.Linear(WIDTH, 128, bias=False, params_dtype=BF16, device="cpu")
        linear.weight.data.copy_(module.weight0)
        part = x[:first].clone().requires_grad_()
        with te_module.autocast(enabled=recipe is not None, recipe=make_recipe(recipe)):
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
@pytest.mark.parametrize(("gpu", "recipe"), [(gpu, name) for gpu in RECIPES for name in RECIPES[gpu]])
def test_the_grouped_path_of_the_module_is_the_split_path_to_the_bit(
    gpu: str, recipe: str | None, single_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if single_weight and recipe == "NVFP4BlockScaling":
        pytest.skip("TransformerEngine has no kernel that casts a single grouped weight to NVFP4 blocks of 16 x 16")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with emulated(getattr(cuda, gpu.upper()), NEW_CUBLASLT) as te_module:
        options = {"bias": False, "params_dtype": BF16, "device": "cpu"}
        fused = te_module.GroupedLinear(
            3, WIDTH, 128, use_grouped_tensor=True, single_grouped_weight=single_weight, **options
        )
        split = te_module.GroupedLinear(3, WIDTH, 128, use_grouped_tensor=False, **options)
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
            results.append((train_step(te_module, module, make_recipe(recipe), x, sizes), x.grad))
        of_fused = fused.weight.grad if single_weight else torch.stack([p.grad for p in fused.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(of_fused.view(-1), torch.stack([weight.grad for weight in weights]).view(-1))
