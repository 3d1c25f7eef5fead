"""Test the CPU kernels' options for arithmetic that differs among GPU kernels, against slow, exact loops."""

from __future__ import annotations

import importlib
import threading
from fractions import Fraction
from itertools import product as product_of
from typing import Any

import pytest
import torch
from emulated_gpu import choose_again, emulated
from gemm_oracle import added_one_by_one, cut, exponent, product
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor, nn

from parity import te
from te_on_cpu import cuda, extension, kernel_choices, tensor_cores
from te_on_cpu.enums import DType
from te_on_cpu.kernel_choices import NAMES, VARIABLE, BadChoice, current
from te_on_cpu.kernel_choices import kernel_choices as choosing
from te_on_cpu.loading import stand_ins
from te_on_cpu.tensor_cores import BlockFactor

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def no_choices_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def to_bits(value: Fraction, bits: int) -> Fraction:
    """Cut a number to a significand of so many bits, toward zero."""
    return cut(value, Fraction(2) ** (exponent(value) - bits + 1)) if value else value


def rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- names ---


def test_no_choice_is_on_unless_asked_for_and_none_after_an_exception() -> None:
    def fail() -> None:
        with choosing("tf32-truncated", "fp8-14-bit"):
            assert current() == {"tf32-truncated", "fp8-14-bit"}
            with choosing("mx-25-bit"):
                assert current() == {"mx-25-bit"}
            raise KeyError

    assert current() == frozenset()
    with pytest.raises(KeyError):
        fail()
    assert current() == frozenset()


@pytest.mark.parametrize("value", ["tf32-truncated,fp8-14-bit", " FP8-14-bit , tf32-truncated,"])
def test_the_environment_sets_them_in_every_thread_and_a_context_goes_before_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    seen: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: seen.append(current()))
    with choosing():
        thread.start()
        thread.join()
        assert current() == frozenset()
    assert seen == [current()] == [{"tf32-truncated", "fp8-14-bit"}]


WRONG = [
    (("tf32-cut",), "names 'tf32-cut', which is not among the choices of kernels: tf32-truncated, tf32-ties-away"),
    (("fp8-14-bit", "tf32-truncated", "fp32-exact"), "tf32-truncated and fp32-exact, which contradict each other"),
    (("tf32-ties-away", "tf32-truncated"), "tf32-truncated and tf32-ties-away, which contradict each other"),
]


@pytest.mark.parametrize(("names", "message"), WRONG)
def test_what_cannot_be_chosen_is_refused_with_the_names_that_can_and_when_te_is_loaded(
    names: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadChoice, match=message) as raised, choosing(*names):
        pass
    assert all(name in str(raised.value) for name in NAMES)
    monkeypatch.setenv(VARIABLE, ",".join(names))
    with pytest.raises(ValueError, match=f"{VARIABLE}='.*'.* {message}"):
        extension.build(Version(te.version()))


# --- FP32 operands ---


def cut_to_tf32(value: float) -> float:
    return float(to_bits(Fraction(value), 11))


def away_to_tf32(value: float) -> float:
    exact = Fraction(value)
    if not exact:
        return value
    unit = Fraction(2) ** (exponent(exact, -126) - 10)
    steps = int(abs(exact) / unit + Fraction(1, 2))
    return float(steps * unit * (1 if exact > 0 else -1))


@pytest.mark.parametrize(("name", "oracle"), [("tf32-truncated", cut_to_tf32), ("tf32-ties-away", away_to_tf32)])
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1))
def test_operands_are_read_as_the_choice_says(name: str, oracle: Any, values: list[float]) -> None:
    values = [value if abs(value) > 2.0**-100 else 0.0 for value in values]
    with choosing(name):
        assert tensor_cores.operand(torch.tensor(values)).tolist() == [oracle(value) for value in values]


@pytest.mark.parametrize("name", ["tf32-truncated", "tf32-ties-away", "fp32-exact"])
def test_infinities_nans_and_the_operands_themselves_stay(name: str) -> None:
    bits = [0x7F800000, -0x00800000, 0x7F800001, 0x7FFFFFFF, -1, 0x3F801000]
    values = torch.tensor(bits, dtype=torch.int32).view(FP32)
    with choosing(name):
        read = tensor_cores.operand(values)
    assert values.view(torch.int32).tolist() == bits
    assert read[:2].tolist() == [torch.inf, -torch.inf]
    assert read[2:5].isnan().all()
    assert read[5] in (1.0, values[5], 1.0 + 2.0**-10)


@pytest.mark.parametrize("name", ["tf32-truncated", "tf32-ties-away", "fp32-exact"])
def test_a_gemm_multiplies_what_was_read(name: str) -> None:
    a, b = normal(5, 48, seed=1), normal(7, 48, seed=2)
    a = (a.view(torch.int32) & ~0x1FFF | 0x1000).view(FP32)  # halfway between two numbers of TF32
    with choosing(name):
        result, read = product(a, b, dtype=FP32), [tensor_cores.operand(factor) for factor in (a, b)]
    with choosing("fp32-exact"):
        assert torch.equal(result, product(*read, dtype=FP32))
    assert not torch.equal(result, product(a, b, dtype=FP32))


def test_the_context_that_leaves_out_tf32_goes_before_other_choices_and_keeps_them() -> None:
    with choosing("tf32-truncated", "fp8-14-bit"), tensor_cores.left_out():
        assert current() == {"fp32-exact", "fp8-14-bit"}


# --- split K ---


@pytest.mark.parametrize(
    ("inner", "lengths"),
    [(31, [31]), (63, [63]), (64, [32, 32]), (100, [32, 32, 36]), (128, [32] * 4), (1024, [256] * 4)],
)
def test_k_is_split_into_at_most_four_parts_of_at_least_32(inner: int, lengths: list[int]) -> None:
    parts = tensor_cores.parts(inner)
    assert [part.stop - part.start for part in parts] == lengths
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]


def split_sum(a: list[float], b: list[float], lengths: list[int], dtype: torch.dtype, scale: float = 1.0) -> float:
    """Return one dot product of numbers for which FP32 holds the sum of each part exactly."""
    total, start = 0.0, 0
    for length in lengths:
        part = slice(start, start + length)
        partial = rounded(scale * sum(x * y for x, y in zip(a[part], b[part], strict=True)), dtype)
        total, start = (rounded(total + partial, dtype) if start else partial), start + length
    return total


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_parts_of_a_gemm_are_rounded_and_added_in_the_output_s_dtype_before_the_bias(dtype: torch.dtype) -> None:
    a, b, bias = integers(5, 100, seed=1).abs(), integers(7, 100, seed=2).abs(), integers(5, seed=3).to(dtype)
    with choosing("split-k-in-output-type"):
        result = product(a.to(dtype), b.to(dtype), dtype=dtype)
        assert torch.equal(product(a.to(dtype), b.to(dtype), dtype=dtype, bias=bias), result + bias)
    expected = [[split_sum(x, y, [32, 32, 36], dtype) for x in a.tolist()] for y in b.tolist()]
    assert result.tolist() == expected
    assert not torch.equal(result, product(a.to(dtype), b.to(dtype), dtype=dtype))


def test_a_scale_multiplies_each_part_before_it_is_rounded() -> None:
    quantizer = TE.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")
    a, b = (quantizer(integers(8, 128, seed=seed)) for seed in (1, 2))
    values = [tensor.dequantize(dtype=FP32) for tensor in (a, b)]
    with choosing("split-k-in-output-type"):
        result = product(a, b, dtype=BF16)
    # The values are the codes times a scale that is not a power of two, so that FP32 may round a sum.
    expected = [[split_sum(x, y, [32] * 4, BF16) for x in values[0].tolist()] for y in values[1].tolist()]
    differ = result != torch.tensor(expected, dtype=BF16)
    assert differ.float().mean() < 0.05
    assert not torch.equal(result, product(a, b, dtype=BF16))


# --- unfused attention ---


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_attention_s_products_and_their_gradients_add_parts_in_16_bits(dtype: torch.dtype) -> None:
    a, b = integers(2, 3, 64, seed=1).to(dtype), integers(2, 64, 96, seed=2).to(dtype)
    gradient = integers(2, 3, 96, seed=3).to(dtype)
    a.requires_grad_(), b.requires_grad_()
    with choosing("attention-16-bit-sums"):
        result = stand_ins.baddbmm(torch.full((2, 3, 96), torch.nan, dtype=dtype), a, b, beta=0.0, alpha=0.125)
        result.backward(gradient)
    assert a.grad is not None
    for batch in range(2):
        x, y, g = (tensor[batch].detach().float() for tensor in (a, b, gradient))
        expected = [[split_sum(row, column, [32, 32], dtype, 0.125) for column in y.t().tolist()] for row in x.tolist()]
        assert result[batch].tolist() == expected
        of_a = [[0.125 * split_sum(row, column, [32] * 3, dtype) for column in y.tolist()] for row in g.tolist()]
        assert a.grad[batch].tolist() == of_a


def attention_pass(dtype: torch.dtype) -> list[Tensor]:
    """Return the output and gradients of unfused attention."""
    module = TE.DotProductAttention(2, 64, attention_dropout=0.0)
    leaves = [normal(64, 1, 2, 64, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
    output = module(*leaves, attn_mask_type="causal")
    output.backward(normal(*output.shape, seed=3).to(dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(("dtype", "changes"), [(BF16, True), (FP16, True), (FP32, False)])
def test_te_s_unfused_attention_follows(dtype: torch.dtype, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    choose_again()
    plain = attention_pass(dtype)
    with choosing("attention-16-bit-sums"):
        split = attention_pass(dtype)
    choose_again()
    for one, other in zip(plain, split, strict=True):
        assert torch.equal(one, other) != changes
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)


# --- sums of FP8 products ---


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("gpu", "core"), [(cuda.HOPPER, tensor_cores.HOPPER), (cuda.ADA, tensor_cores.ADA)], ids=["hopper", "ada"]
)
def test_per_tensor_fp8_adds_14_bits_as_the_gpu_does(
    gpu: cuda.DeviceProperties, core: tensor_cores.TensorCore, split: bool
) -> None:
    with emulated(gpu):
        one = torch.ones(1)
        quantizer = TE.Float8Quantizer(one, torch.zeros(1), DType.kFloat8E4M3)
        a, b = (quantizer(normal(4, 384, seed=seed)) for seed in (1, 2))
        values = [tensor.dequantize(dtype=FP32) for tensor in (a, b)]
        with choosing("fp8-14-bit"):
            result = product(a, b, dtype=FP32, use_split_accumulator=split)
        assert torch.equal(result, added_one_by_one(core, *values, [-6, -6], 128 if split else 384))


# --- sums of TF32, BF16 and FP16 products ---


def cut_sum(a: list[float], b: list[float], products: int, lowest: int, scales: list[Fraction] | None = None) -> float:
    """Return one dot product by exact arithmetic: terms cut to 25 fraction bits of the largest, sums to 24 bits.

    Args:
        products: how many one instruction adds.
        lowest: the exponent of subnormal numbers.
        scales: of each instruction's terms.
    """
    running = Fraction(0)
    for start in range(0, len(a), products):
        part = slice(start, start + products)
        scale = scales[start // products] if scales else Fraction(1)
        factors = [(Fraction(x), Fraction(y)) for x, y in zip(a[part], b[part], strict=True) if x and y]
        exponents = [exponent(x, lowest) + exponent(y, lowest) + exponent(scale) for x, y in factors]
        unit = Fraction(2) ** (max([*exponents, exponent(running)]) - 25)
        running = to_bits(cut(running, unit) + sum(cut(x * y * scale, unit) for x, y in factors), 24)
    return float(running)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_sums_of_what_is_not_quantized_are_cut_to_fp32_after_each_instruction_in_any_number_of_tiles(
    dtype: torch.dtype, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (tensor_cores.round_to_tf32(normal(4, 200, seed=seed) + mean).to(dtype) for seed in (1, 2))
    b *= 2.0 ** -torch.randint(12, (4, 200))
    a[0, 30:70] = 0.0
    with choosing("sums-25-bit"):
        result = product(a, b, dtype=FP32)
        monkeypatch.setattr(tensor_cores, "_PRODUCTS_AT_ONCE", 16 * 4 * 3)
        assert torch.equal(product(a, b, dtype=FP32), result)
    products, lowest = (8 if dtype == FP32 else 16), (-14 if dtype == FP16 else -126)
    assert result.tolist() == [[cut_sum(x, y, products, lowest) for x in a.tolist()] for y in b.tolist()]
    assert not torch.equal(result, product(a, b, dtype=FP32))


def test_products_without_tensor_cores_have_no_cut_sums() -> None:
    a, b = normal(5, 64, seed=1), normal(7, 64, seed=2)
    with choosing("fp32-exact"):
        plain = product(a, b, dtype=FP32)
    with choosing("sums-25-bit", "fp32-exact"):
        assert torch.equal(product(a, b, dtype=FP32), plain)


def linear_pass(recipe: str | None, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Return output, input gradient and weight gradient of ``te.Linear``; the caller's choice covers both passes."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    torch.manual_seed(0)
    module = TE.Linear(128, 128, bias=False, params_dtype=dtype, device="cpu")
    x = normal(32, 128).to(dtype).requires_grad_()
    with TE.autocast(enabled=recipe is not None, recipe=getattr(recipes, recipe)() if recipe else None):
        y = module(x)
    y.backward(normal(*y.shape, seed=1).to(dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, module.weight.grad]


def equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "name"), [("Float8CurrentScaling", "fp8-14-bit"), ("Float8BlockScaling", "fp8-block-14-bit")]
)
def test_fp8_choices_are_those_of_the_emulated_hopper(recipe: str, name: str) -> None:
    with tensor_cores.emulated():
        expected = linear_pass(recipe)
    with choosing(name):
        assert all(equal(linear_pass(recipe), expected))


# --- MXFP8 and NVFP4 ---


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("spread", [0, 6, 12])
def test_mxfp8_sums_keep_25_fraction_bits_of_the_largest_term(dtype: torch.dtype, spread: int) -> None:
    def powers(*shape: int) -> Tensor:
        return torch.exp2(torch.randint(-spread, spread + 1, shape).float())

    a, b = (
        BlockFactor((torch.randn(4, 160) * powers(4, 160)).to(dtype).float(), powers(4, 5), dtype) for _ in range(2)
    )
    result, lowest = tensor_cores.block_product(a, b), exponent(Fraction(torch.finfo(dtype).smallest_normal))
    for n, m in product_of(range(4), range(4)):
        scales = [Fraction(scale) for scale in (a.scales[m] * b.scales[n]).tolist()]
        assert result[n, m].item() == cut_sum(a.values[m].tolist(), b.values[n].tolist(), 32, lowest, scales)


def nvfp4_sum(a: list[float], b: list[float], a_scales: list[float], b_scales: list[float]) -> Fraction:
    running = Fraction(0)
    for start in range(0, len(a_scales), 4):
        terms = []
        for block in range(start, min(start + 4, len(a_scales))):
            part = slice(16 * block, 16 * block + 16)
            dot = sum(Fraction(x) * Fraction(y) for x, y in zip(a[part], b[part], strict=True))
            scales = Fraction(a_scales[block]), Fraction(b_scales[block])
            if dot and all(scales):
                terms.append((dot * scales[0] * scales[1], sum(exponent(scale, -6) for scale in scales)))
        exponents = [power for _, power in terms] + [exponent(running)] * bool(running)
        unit = Fraction(2) ** (max(exponents, default=0) - 35)
        running = to_bits(cut(running, unit) + sum(cut(term, unit) for term, _ in terms), 24)
    return running


def test_nvfp4_sums_add_exact_sums_of_blocks_in_steps_of_64() -> None:
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    e2m1 = torch.cat([e2m1, -e2m1])
    values, scales = e2m1[torch.randint(16, (2, 4, 224))], torch.randint(127, (2, 4, 14)).to(torch.uint8)
    a, b = (BlockFactor(*factor, None) for factor in zip(values, scales.view(E4M3).float(), strict=True))
    result = tensor_cores.block_product(a, b)
    for n, m in product_of(range(4), range(4)):
        factors = (tensor.tolist() for tensor in (a.values[m], b.values[n], a.scales[m], b.scales[n]))
        assert Fraction(result[n, m].item()) == nvfp4_sum(*factors)


def test_nans_and_infinities_come_out_as_of_a_plain_product() -> None:
    a, b = torch.ones(2, 64), torch.ones(3, 64)
    a[0, 3], b[1, 5], b[2, 3] = torch.inf, torch.nan, 0.0
    torch.testing.assert_close(tensor_cores.cut_product(a, b), b @ a.t(), equal_nan=True, rtol=0, atol=0)
    scales = torch.ones(3, 2)
    b[1, 5], scales[1, 1] = 1.0, torch.nan
    result = tensor_cores.block_product(BlockFactor(a, torch.ones(2, 2), E5M2), BlockFactor(b, scales, E5M2))
    plain = torch.tensor([[torch.inf, 64.0], [torch.nan, torch.nan], [torch.nan, 63.0]])
    torch.testing.assert_close(result, plain, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("quantizer", ["MXFP8Quantizer", "NVFP4Quantizer"])
def test_te_s_mx_gemms_differ_by_a_few_last_bits(quantizer: str, columnwise: bool) -> None:
    with emulated(cuda.BLACKWELL):
        arguments = (DType.kFloat8E4M3,) if quantizer == "MXFP8Quantizer" else ()
        make = getattr(TE, quantizer)(*arguments)
        shapes = [(512, 64), (512, 96)] if columnwise else [(64, 512), (96, 512)]
        size = torch.exp2(torch.arange(512) % 13 - 6.0)  # so that FP32 must round the sums
        size = size[:, None] if columnwise else size
        a, b = (make((normal(*shape, seed=seed).abs() * size).to(BF16)) for seed, shape in enumerate(shapes))
        layout = "NT" if columnwise else "TN"
        plain = product(a, b, layout, FP32, use_split_accumulator=True)
        with choosing("mx-25-bit"):
            emulated_sums = product(a, b, layout, FP32, use_split_accumulator=True)
    error = (emulated_sums.double() - plain.double()) / plain.double()
    assert 0 < error.abs().max() < 1e-5
    if quantizer == "MXFP8Quantizer":
        assert error.mean() < 0  # toward zero


# --- what a choice changes, and what it leaves alone ---

CONCERNS = {
    "tf32-truncated": {(None, FP32)},
    "tf32-ties-away": {(None, FP32)},
    "fp32-exact": {(None, FP32)},
    "fp8-14-bit": {("Float8CurrentScaling", BF16)},
    "fp8-block-14-bit": {("Float8BlockScaling", BF16)},
    "split-k-in-output-type": {(None, BF16), ("Float8CurrentScaling", BF16), ("Float8BlockScaling", BF16)},
    "attention-16-bit-sums": set(),
    "mx-25-bit": set(),
    "sums-25-bit": {(None, FP32)},
}
# Rounding the results to BF16 hides nearly all of this change.
HIDDEN = ("sums-25-bit", None, BF16)
KINDS = [(None, FP32), (None, BF16), ("Float8CurrentScaling", BF16), ("Float8BlockScaling", BF16)]


@pytest.mark.parametrize(("recipe", "dtype"), KINDS)
def test_a_linear_layer_changes_under_the_choices_that_concern_it_and_no_others(
    recipe: str | None, dtype: torch.dtype
) -> None:
    plain = linear_pass(recipe, dtype)
    with choosing():
        assert all(equal(linear_pass(recipe, dtype), plain))
    for name in NAMES:
        with choosing(name):
            changed = not all(equal(linear_pass(recipe, dtype), plain))
        assert changed == ((recipe, dtype) in CONCERNS[name]) or (name, recipe, dtype) == HIDDEN, name
    assert current() == frozenset()


def test_a_backward_pass_has_the_choice_that_holds_where_it_is_started() -> None:
    def passed(forward: str, backward: str) -> list[Tensor]:
        torch.manual_seed(0)
        module, x = TE.Linear(64, 32, bias=False, device="cpu"), normal(16, 64).requires_grad_()
        with choosing(*filter(None, [forward])):
            y = module(x)
        with choosing(*filter(None, [backward])):
            y.backward(normal(16, 32, seed=1))
        return [y.detach(), x.grad, module.weight.grad]

    plain = passed("", "")
    assert equal(passed("tf32-truncated", ""), plain) == [False, True, True]
    assert equal(passed("", "tf32-truncated"), plain) == [True, False, False]


def test_plain_modules_are_not_concerned() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(64, 64), normal(8, 64)
    plain = module(x)
    with choosing(*(name for name in NAMES if name not in kernel_choices.FP32_OPERANDS), "tf32-truncated"):
        assert torch.equal(module(x), plain)
