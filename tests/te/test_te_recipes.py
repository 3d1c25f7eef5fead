"""A recipe's rounding follows from the quantizers that it gives TE; an option changes the operands that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import parity
from parity.numerics.formats import (
    AttentionFormats,
    Operands,
    Quantized,
    Recast,
    Requantized,
    Rounding,
    e4m3,
    e4m3_blocks,
    e4m3_squares,
    e5m2,
    nvfp4_blocks,
    nvfp4_squares,
    nvfp4_stochastic,
)
from parity.te import PRECISIONS, Precision
from parity.te.recipes import derive_rounding, list_roles, round_alike
from parity.user_error import UserError

te = parity.te.kernels("cpu").te
quantization = pytest.importorskip("transformer_engine.pytorch.quantization")
recipes = pytest.importorskip("transformer_engine.common.recipe")
hybrid_tensor = pytest.importorskip("transformer_engine.pytorch.tensor.hybrid_tensor")  # TE 2.20 and newer
zoo = pytest.importorskip("transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo")
factories = pytest.importorskip("transformer_engine.pytorch.custom_recipes.quantizer_factories")
identity_tensor = pytest.importorskip("transformer_engine.pytorch.tensor.identity_tensor")

BF16 = torch.bfloat16
MX = e4m3_blocks(32)
ROTATED = Operands(replace(nvfp4_blocks, rotated=True), nvfp4_squares, replace(nvfp4_stochastic, rotated=True))
PER_TENSOR = Rounding(BF16, e4m3, e4m3, e5m2)
BLOCKS = Rounding(BF16, e4m3_blocks(128), e4m3_squares, e4m3_blocks(128))
NVFP4 = Rounding(BF16, nvfp4_blocks, nvfp4_squares, nvfp4_stochastic, ROTATED)


@pytest.mark.parametrize(
    ("name", "rounding", "families"),
    [
        ("bf16", Rounding(BF16), ("bf16",)),
        ("fp8_delayed", PER_TENSOR, ("fp8_delayed",)),
        ("fp8_current", PER_TENSOR, ("fp8_current",)),
        ("fp8_block", BLOCKS, ("fp8_block",)),
        ("mxfp8", Rounding(BF16, MX, MX, MX), ("mxfp8",)),
        ("nvfp4", NVFP4, ("nvfp4",)),
    ],
)
def test_the_built_in_precisions_round_as_their_recipes_say(name: str, rounding: Rounding, families: tuple) -> None:
    assert PRECISIONS[name].rounding == rounding
    assert PRECISIONS[name].families == families


def flat(rows: int) -> Quantized:
    return replace(nvfp4_blocks, across=rows)


def of_class(name: str, **arguments: Any) -> Callable[[], Any]:
    return lambda: getattr(recipes, name)(**arguments)


class PowersOfTwo(recipes.Float8CurrentScaling):  # type: ignore[name-defined]
    fp8_quant_fwd_inp = recipes.QParams(power_2_scale=True, amax_epsilon=0.5)


HYBRID, E4M3 = recipes.Format.HYBRID, recipes.Format.E4M3
OPTIONS: dict[str, tuple[Callable[[], Any], Rounding]] = {
    "E4M3 gradients": (of_class("DelayedScaling", fp8_format=E4M3), replace(PER_TENSOR, gradients=e4m3)),
    "a margin, which moves scales": (of_class("DelayedScaling", margin=2), PER_TENSOR),
    "powers of two, which modules overrule": (of_class("Float8CurrentScaling", use_power_2_scales=True), PER_TENSOR),
    "parameters of inputs": (
        PowersOfTwo,
        replace(PER_TENSOR, inputs=Quantized("E4M3", power_of_two=True, least_amax=0.5)),
    ),
    "squares of inputs": (
        of_class("Float8BlockScaling", x_block_scaling_dim=2, w_block_scaling_dim=1),
        replace(BLOCKS, inputs=e4m3_squares, weights=e4m3_blocks(128)),
    ),
    "E5M2 gradients in blocks": (
        of_class("Float8BlockScaling", fp8_format=HYBRID),
        replace(BLOCKS, gradients=replace(e4m3_blocks(128), numbers="E5M2")),
    ),
    "squares of weights in MXFP8": (
        of_class("MXFP8BlockScaling", enable_2d_quantization=True),
        Rounding(BF16, MX, replace(MX, across=32), MX),
    ),
    "no rotation": (of_class("NVFP4BlockScaling", disable_rht=True), replace(NVFP4, columnwise=None)),
    "no squares": (
        of_class("NVFP4BlockScaling", disable_2d_quantization=True),
        replace(NVFP4, weights=nvfp4_blocks, columnwise=replace(ROTATED, weights=nvfp4_blocks)),
    ),
    "nothing random": (
        of_class("NVFP4BlockScaling", disable_stochastic_rounding=True, disable_rht=True),
        replace(NVFP4, gradients=nvfp4_blocks, columnwise=None),
    ),
    "scales for rows": (
        of_class("NVFP4BlockScaling", row_scaled_activation=True, disable_rht=True),
        replace(NVFP4, inputs=replace(nvfp4_blocks, row_scaled=True), columnwise=None),
    ),
    "four over six": (
        of_class("NVFP4BlockScaling", nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE", disable_rht=True),
        replace(NVFP4, weights=replace(flat(16), largest_scale=256.0, four_over_six="MSE"), columnwise=None),
    ),
    "a backward pass in BF16": (
        of_class("MXFP8BlockScaling", backward_override="high_precision"),
        Rounding(BF16, MX, MX, None, Operands(None, None, None)),
    ),
    "a backward pass from what the forward pass read": (
        of_class("MXFP8BlockScaling", backward_override="dequantized"),
        Rounding(BF16, MX, MX, None, Operands(Requantized(MX, None, BF16), Requantized(MX, None, BF16), None)),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_the_operands_that_it_is_for(name: str) -> None:
    make, rounding = OPTIONS[name]
    assert derive_rounding(make(), BF16) == rounding


PLAIN = Quantized("E2M1", 16)
FACTORIES: dict[Callable[..., Any], Rounding] = {
    factories.high_precision_factory: Rounding(BF16),
    factories.current_scaling_factory: PER_TENSOR,
    factories.delayed_scaling_factory: PER_TENSOR,
    factories.float8_block_scaling_factory: BLOCKS,
    factories.mxfp8_factory: Rounding(BF16, MX, MX, MX),
    factories.nvfp4_factory: NVFP4,
    zoo.high_precision_fwd_mxfp8_bwd_factory: Rounding(BF16, None, None, MX, Operands(MX, MX, MX)),
    zoo.mxfp8_fwd_nvfp4_bwd_factory: Rounding(
        BF16, MX, MX, nvfp4_stochastic, replace(ROTATED, weights=Requantized(MX, PLAIN, BF16))
    ),
    zoo.nvfp4_1d_weight_factory: replace(
        NVFP4, weights=PLAIN, columnwise=replace(ROTATED, weights=Requantized(PLAIN, PLAIN, BF16))
    ),
    zoo.mxfp8_fwd_high_precision_bwd_factory: OPTIONS["a backward pass from what the forward pass read"][1],
    zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory: Rounding(BF16, MX, MX, MX),
    zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory: Rounding(
        BF16,
        replace(PLAIN, row_scaled=True),
        PLAIN,
        None,
        Operands(Requantized(replace(PLAIN, row_scaled=True), None, BF16), Requantized(PLAIN, None, BF16), None),
    ),
    zoo.nvfp4_linear_fp8_dpa_factory: NVFP4,
}


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_a_factory_of_tes_rounds_linear_layers_as_it_says(factory: Callable[..., Any]) -> None:
    derived = derive_rounding(recipes.CustomRecipe(qfactory=factory), BF16)
    assert replace(derived, by_role=None) == FACTORIES[factory]
    assert round_alike(derived, derive_rounding(recipes.CustomRecipe(qfactory=factory), BF16))


def test_a_recipe_that_tells_modules_apart_has_a_rounding_for_each() -> None:
    def factory(role: Any) -> Any:
        is_second = role is not None and role.name.endswith("fc2")
        return identity_tensor.IdentityQuantizer() if is_second else factories.mxfp8_factory(role)

    derived = derive_rounding(recipes.CustomRecipe(qfactory=factory), BF16)
    assert derived.by_role is not None
    assert derived.by_role(("linear", "mlp.fc2")) == Rounding(BF16)
    assert derived.by_role(("linear", "mlp.fc1")) == Rounding(BF16, MX, MX, MX)
    experts = derive_rounding(recipes.CustomRecipe(qfactory=zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory), BF16)
    assert experts.by_role is not None
    assert experts.by_role(("grouped_linear", "")).weights == PLAIN
    assert not round_alike(derived, experts)


@pytest.mark.parametrize(
    ("make", "roles"),
    [
        (lambda: te.Linear(16, 16, name="proj"), {"weight": ("linear", "proj")}),
        (lambda: te.LayerNormLinear(16, 16, name="qkv"), {"weight": ("linear", "qkv")}),
        (
            lambda: te.LayerNormMLP(16, 32, name="mlp"),
            {"fc1_weight": ("linear", "mlp.fc1"), "fc2_weight": ("linear", "mlp.fc2")},
        ),
        (
            lambda: te.GroupedLinear(2, 16, 16, name="up"),
            {"weight0": ("grouped_linear", "up"), "weight1": ("grouped_linear", "up")},
        ),
        (lambda: te.ops.BasicLinear(16, 16), {"weight": ("linear", "")}),
        (lambda: te.RMSNorm(16), {}),
    ],
    ids=["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "BasicLinear", "RMSNorm"],
)
def test_modules_say_the_roles_of_their_weights(make: Callable[[], Any], roles: dict[str, Any]) -> None:
    assert list_roles(make()) == roles


@pytest.mark.parametrize(
    ("recipe", "attention"),
    [
        (of_class("DelayedScaling"), AttentionFormats()),
        (
            of_class("DelayedScaling", fp8_dpa=True),
            AttentionFormats(e4m3, e4m3, Recast(e4m3), e5m2, e5m2, Recast(e5m2)),
        ),
        (of_class("Float8CurrentScaling", fp8_dpa=True), AttentionFormats(e4m3, e4m3, None, e5m2, e5m2, None)),
        (
            of_class("Float8CurrentScaling", fp8_dpa=True, fp8_format=E4M3),
            AttentionFormats(e4m3, e4m3, None, e4m3, e4m3, None),
        ),
        (of_class("MXFP8BlockScaling", fp8_dpa=True), AttentionFormats(qkv=MX, context_gradients=MX)),
        (
            of_class("CustomRecipe", qfactory=zoo.nvfp4_linear_fp8_dpa_factory, fp8_dpa=True),
            AttentionFormats(e4m3, e4m3, None, e5m2, e5m2, None),
        ),
    ],
    ids=["none", "delayed", "current", "current in E4M3", "MXFP8", "beside NVFP4"],
)
def test_attention_in_fp8_has_formats_of_its_own(recipe: Callable[[], Any], attention: AttentionFormats) -> None:
    assert derive_rounding(recipe(), BF16).attention == attention


def test_attention_whose_formats_have_no_model_is_refused() -> None:
    with pytest.raises(UserError, match="NVFP4BlockScaling with attention in FP8: parity has rounding models of"):
        derive_rounding(recipes.NVFP4BlockScaling(fp8_dpa=True), BF16)


def test_what_te_refuses_is_told_with_its_reason() -> None:
    with pytest.raises(
        UserError, match=r"TE makes no quantizers of NVFP4BlockScaling: ValueError: .*does not support RHT"
    ):
        derive_rounding(recipes.NVFP4BlockScaling(nvfp4_4over6="all"), BF16)
    broken = Precision("mine", BF16, lambda: recipes.Float8BlockScaling(fp8_dpa=True), "/my.py::mine")
    with pytest.raises(
        UserError, match=r"the recipe mine \(/my.py::mine\) is refused: Assertion failed, FP8 attention is"
    ):
        assert broken.rounding


def test_a_quantizer_that_is_not_tes_is_refused_by_name() -> None:
    class Mine(te.MXFP8Quantizer):  # type: ignore[name-defined]
        pass

    mine = recipes.CustomRecipe(qfactory=lambda role: Mine(te.DType.kFloat8E4M3))
    with pytest.raises(
        UserError, match=r"the recipe has the quantizer .*Mine, and parity has no rounding model for it"
    ):
        derive_rounding(mine, BF16)


@pytest.mark.parametrize(
    ("recipe", "families", "passes"),
    [
        (of_class("CustomRecipe", qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory), ("mxfp8", "nvfp4"), 0),
        (of_class("CustomRecipe", qfactory=factories.delayed_scaling_factory), ("fp8_delayed",), 2),
        (of_class("CustomRecipe", qfactory=factories.high_precision_factory), ("bf16",), 0),
        (of_class("Float8CurrentScaling", fp8_dpa=True), ("fp8_current",), 2),
    ],
    ids=["of two families", "delayed", "none", "attention, whose probabilities are scaled by earlier passes"],
)
def test_a_precision_is_judged_by_the_laws_of_its_formats(recipe: Any, families: tuple, passes: int) -> None:
    precision = Precision("mine", BF16, recipe)
    assert (precision.families, precision.warmup_passes) == (families, passes)
