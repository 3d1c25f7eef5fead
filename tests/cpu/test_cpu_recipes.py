"""Each recipe of TE, with each of its options, errs by what its formats explain, or is refused with TE's reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulated_gpu import choose_again, emulated
from packaging.version import Version
from torch import Tensor

from parity import te
from te_on_cpu import cuda

pytestmark = pytest.mark.skipif(
    Version(te.version()) < Version("2.20"), reason="the table is of the recipes and options of TransformerEngine 2.20"
)
TE = te.kernels("cpu").te
BF16 = torch.bfloat16
TOKENS, IN, OUT, GROUPS = 128, 128, 256, 2
GPUS = {"hopper": cuda.HOPPER, "blackwell": cuda.BLACKWELL}
# The most that a cast errs, in norm and relative to its tensor: half a place, evenly spread. Rounding at random errs by
# up to a whole place.
ERROR = {
    "e4m3": 2.0**-4 / 3**0.5,
    "e5m2": 2.0**-3 / 3**0.5,
    "e2m1": 2.0**-2 / 3**0.5,
    "e2m1 at random": 2.0**-1.5 / 3**0.5,
}


def recipe(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that makes the recipe; options that are no arguments of it are set as attributes."""

    def make() -> Any:
        from transformer_engine.common import recipe as recipes

        kind = getattr(recipes, name)
        values = {key: value() if callable(value) else value for key, value in options.items() if key != "qfactory"}
        arguments = {key: value for key, value in values.items() if key in kind.__dataclass_fields__}
        made = kind(**arguments, **{key: options[key] for key in options if key == "qfactory"})
        for key in values.keys() - arguments.keys():
            setattr(made, key, values[key])
        return made

    return make


def parameters(**options: Any) -> dict[str, Callable[[], Any]]:
    """Return the options of a recipe that give its inputs, weights and gradients these quantization parameters."""
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    return dict.fromkeys(names, recipe("QParams", **options))


def format_of(name: str) -> Callable[[], Any]:
    from transformer_engine.common import recipe as recipes

    return lambda: recipes.Format[name]


def factory(name: str) -> Callable[[Any], Any]:
    """Return the factory of this name from TE's two modules of factories; it is imported when it is called."""

    def call(role: Any) -> Any:
        from transformer_engine.pytorch.custom_recipes import quantizer_factories, quantizer_factory_zoo

        module = quantizer_factories if hasattr(quantizer_factories, name) else quantizer_factory_zoo
        return getattr(module, name)(role)

    return call


def custom(name: str, **options: Any) -> Callable[[], Any]:
    return recipe("CustomRecipe", qfactory=factory(name), **options)


def hybrid(rowwise: str, columnwise: str, source: str = "original") -> Callable[[Any], Any]:
    """Return a factory with two formats: one for the forward pass, the other for gradients."""

    def call(role: Any) -> Any:
        if role is not None and role.tensor_type == "grad_output":
            return factory(columnwise)(role)
        own = {"rowwise_quantizer": factory(rowwise)(role), "columnwise_quantizer": factory(columnwise)(role)}
        return TE.HybridQuantizer(**own, columnwise_source=source)

    return call


def delayed_with_margin(role: Any) -> Any:
    from transformer_engine.pytorch.quantization import DelayedScalingRequest

    return DelayedScalingRequest(margin=1, amax_history_len=4, amax_compute_algo="most_recent")


@dataclass(frozen=True)
class Row:
    """A recipe, and the casts that its three products read: for the output, the input's gradient and the weight's."""

    make: Callable[[], Any]
    output: tuple[str, ...]
    input_grad: tuple[str, ...]
    weight_grad: tuple[str, ...]
    modules: tuple[str, ...] = ("Linear", "LayerNormLinear", "GroupedLinear")


E4M3, E5M2, E2M1, RANDOM = "e4m3", "e5m2", "e2m1", "e2m1 at random"
HYBRID = (E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2)
ALL_E4M3 = 3 * ((E4M3, E4M3),)
NVFP4, ALL_E2M1 = ((E2M1, E2M1), (E2M1, RANDOM), (E2M1, RANDOM)), 3 * ((E2M1, E2M1),)
PLAIN: dict[str, Any] = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}

ROWS: dict[str, Row] = {
    "delayed": Row(recipe("DelayedScaling"), *HYBRID),
    "delayed in E4M3": Row(recipe("DelayedScaling", fp8_format=format_of("E4M3")), *ALL_E4M3),
    "delayed with margin": Row(recipe("DelayedScaling", margin=1), *HYBRID),
    "delayed by the last amax": Row(
        recipe("DelayedScaling", amax_history_len=2, amax_compute_algo="most_recent"), *HYBRID
    ),
    "current": Row(recipe("Float8CurrentScaling"), *HYBRID),
    "current in E4M3": Row(recipe("Float8CurrentScaling", fp8_format=format_of("E4M3")), *ALL_E4M3),
    "current in powers of two": Row(recipe("Float8CurrentScaling", **parameters(power_2_scale=True)), *HYBRID),
    "current with epsilon": Row(recipe("Float8CurrentScaling", **parameters(amax_epsilon=6.0)), *HYBRID),
    "current, high precision": Row(
        recipe("Float8CurrentScaling", backward_override="high_precision"), (E4M3, E4M3), (), ()
    ),
    "current, dequantized": Row(
        recipe("Float8CurrentScaling", backward_override="dequantized"), (E4M3, E4M3), (E4M3,), (E4M3,)
    ),
    "block": Row(recipe("Float8BlockScaling"), *ALL_E4M3),
    "block in both formats": Row(recipe("Float8BlockScaling", fp8_format=format_of("HYBRID")), *HYBRID),
    "block in vectors": Row(recipe("Float8BlockScaling", w_block_scaling_dim=1), *ALL_E4M3),
    "block, squares of inputs": Row(
        recipe("Float8BlockScaling", x_block_scaling_dim=2, w_block_scaling_dim=1), *ALL_E4M3
    ),
    "block, squares of gradients": Row(
        recipe("Float8BlockScaling", w_block_scaling_dim=1, grad_block_scaling_dim=2), *ALL_E4M3
    ),
    "block with epsilon": Row(
        recipe("Float8BlockScaling", **parameters(power_2_scale=True, amax_epsilon=6.0)), *ALL_E4M3
    ),
    "block, high precision": Row(
        recipe("Float8BlockScaling", backward_override="high_precision"), (E4M3, E4M3), (), ()
    ),
    "block, dequantized": Row(
        recipe("Float8BlockScaling", backward_override="dequantized"), (E4M3, E4M3), (E4M3,), (E4M3,)
    ),
    "MXFP8": Row(recipe("MXFP8BlockScaling"), *ALL_E4M3),
    "MXFP8 in both formats": Row(recipe("MXFP8BlockScaling", fp8_format=format_of("HYBRID")), *HYBRID),
    "MXFP8, squares of weights": Row(recipe("MXFP8BlockScaling", enable_2d_quantization=True), *ALL_E4M3),
    "MXFP8, high precision": Row(recipe("MXFP8BlockScaling", backward_override="high_precision"), (E4M3, E4M3), (), ()),
    "MXFP8, dequantized": Row(
        recipe("MXFP8BlockScaling", backward_override="dequantized"), (E4M3, E4M3), (E4M3,), (E4M3,)
    ),
    "NVFP4": Row(recipe("NVFP4BlockScaling"), *NVFP4),
    "NVFP4 without Hadamard": Row(recipe("NVFP4BlockScaling", disable_rht=True), *NVFP4),
    "NVFP4 to nearest": Row(recipe("NVFP4BlockScaling", disable_stochastic_rounding=True), *ALL_E2M1),
    "NVFP4 in vectors": Row(recipe("NVFP4BlockScaling", disable_2d_quantization=True), *NVFP4),
    "NVFP4 by row": Row(recipe("NVFP4BlockScaling", row_scaled_activation=True, disable_rht=True), *NVFP4),
    "NVFP4 4over6": Row(recipe("NVFP4BlockScaling", nvfp4_4over6="all", **PLAIN), *ALL_E2M1),
    "NVFP4 4over6 of weights": Row(recipe("NVFP4BlockScaling", nvfp4_4over6="weights"), *NVFP4),
    "NVFP4 4over6 of inputs": Row(
        recipe("NVFP4BlockScaling", nvfp4_4over6="activations", disable_rht=True), *NVFP4
    ),
    "NVFP4 4over6 up to 448": Row(
        recipe("NVFP4BlockScaling", nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="none", **PLAIN), *ALL_E2M1
    ),
    "NVFP4 4over6 up to 256 for weights": Row(
        recipe("NVFP4BlockScaling", nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights", **PLAIN), *ALL_E2M1
    ),
    "NVFP4 4over6 by squares of errors": Row(
        recipe("NVFP4BlockScaling", nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", **PLAIN), *ALL_E2M1
    ),
    "NVFP4, high precision": Row(recipe("NVFP4BlockScaling", backward_override="high_precision"), (E2M1, E2M1), (), ()),
    "NVFP4, dequantized": Row(
        recipe("NVFP4BlockScaling", backward_override="dequantized"), (E2M1, E2M1), (E2M1,), (E2M1,)
    ),
    "NVFP4 4over6 by row, dequantized": Row(
        recipe(
            "NVFP4BlockScaling",
            nvfp4_4over6="all", row_scaled_activation=True, backward_override="dequantized", **PLAIN,
        ),
        (E2M1, E2M1), (E2M1,), (E2M1,),
    ),
    "custom, high precision": Row(custom("high_precision_factory"), (), (), ()),
    "custom delayed, dequantized": Row(
        custom("delayed_scaling_factory", backward_override="dequantized"), (E4M3, E4M3), (E4M3,), (E4M3,)
    ),
    "custom delayed with margin": Row(recipe("CustomRecipe", qfactory=delayed_with_margin), *HYBRID),
    "high precision, then MXFP8": Row(
        custom("high_precision_fwd_mxfp8_bwd_factory"), (), (E4M3, E4M3), (E4M3, E4M3)
    ),
    "MXFP8, then NVFP4": Row(
        custom("mxfp8_fwd_nvfp4_bwd_factory"), (E4M3, E4M3), (E4M3, E2M1, RANDOM), (E2M1, RANDOM)
    ),
    "NVFP4 of weights, cast twice": Row(
        custom("nvfp4_1d_weight_factory"), (E2M1, E2M1), (E2M1, E2M1, RANDOM), (E2M1, RANDOM)
    ),
    "MXFP8, then high precision": Row(
        custom("mxfp8_fwd_high_precision_bwd_factory"), (E4M3, E4M3), (E4M3,), (E4M3,)
    ),
    "NVFP4 by row, then MXFP8": Row(
        custom("nvfp4_row_scaled_fwd_mxfp8_bwd_factory"),
        (E2M1, E2M1), (E2M1, E4M3, E4M3), (E2M1, E4M3, E4M3), ("GroupedLinear",),
    ),
    "NVFP4 by row, then high precision": Row(
        custom("nvfp4_row_scaled_fwd_high_precision_bwd_factory"), (E2M1, E2M1), (E2M1,), (E2M1,)
    ),
    "current, then blocks": Row(
        recipe("CustomRecipe", qfactory=hybrid("current_scaling_factory", "float8_block_scaling_factory")), *ALL_E4M3
    ),
    "blocks, then current from blocks": Row(
        recipe(
            "CustomRecipe",
            qfactory=hybrid("float8_block_scaling_factory", "current_scaling_factory", "rowwise_dequantized"),
        ),
        (E4M3, E4M3), (E4M3, E4M3, E5M2), (E4M3, E4M3, E5M2),
    ),
}  # fmt: skip


def run(kind: str, make: Callable[[], Any] | None, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Return the output and gradients of the third step on one input; the first ones fill the history of amaxes."""
    torch.manual_seed(0)
    options = {"params_dtype": BF16, "device": "cpu", "bias": False}
    grouped = kind == "GroupedLinear"
    module = getattr(TE, kind)(*([GROUPS] if grouped else []), IN, OUT, **options)
    x, grad = (torch.randn(tokens * (GROUPS if grouped else 1), size).to(BF16) for size in (IN, OUT))
    with torch.no_grad():
        for weight in (parameter for parameter in module.parameters() if parameter.dim() == 2):
            weight *= 2 ** (-16 * torch.rand_like(weight))  # so that scales of blocks differ, and some codes are 0
    arguments = [[tokens] * GROUPS] if grouped else []
    used = None if make is None else make()
    for _ in range(3):
        torch.manual_seed(1)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with TE.autocast(enabled=used is not None, recipe=used):
            output = module(leaf, *arguments)
        output.backward(grad)
    weights = torch.cat([parameter.grad for name, parameter in module.named_parameters() if "norm" not in name])
    return {"output": output.detach(), "input_grad": leaf.grad, "weight_grad": weights}


@pytest.fixture(autouse=True)
def _forgotten_state() -> Iterator[None]:
    """Make TE forget what a test leaves behind, such as the context that a refused recipe was raised in."""
    yield
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_errs_by_the_casts_of_its_operands(name: str, kind: str) -> None:
    row = ROWS[name]
    if kind not in row.modules:
        kind = row.modules[0]
    exact, actual = run(kind, None), run(kind, row.make)
    for what, tensor in exact.items():
        most = sum(ERROR[cast] ** 2 for cast in getattr(row, what)) ** 0.5
        error = ((actual[what] - tensor).float().norm() / tensor.float().norm()).item()
        assert error == 0 or 0.4 * most < error < most, what
        assert (error == 0) == (most == 0), what


# The options that decide numbers are those that change them.

VARIED = ("current", "block", "MXFP8", "NVFP4")


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        # The arguments that modules read are made from the environment when TE is imported, not from these.
        ("Float8CurrentScaling", {"use_power_2_scales": True}),
        ("Float8BlockScaling", {"use_f32_scales": True}),
        ("MXFP8BlockScaling", {"margin": 2}),
        ("DelayedScaling", {"reduce_amax": False}),
    ],
)
def test_an_argument_that_te_does_not_read_changes_no_bit(name: str, option: dict[str, Any]) -> None:
    without, having = run("Linear", recipe(name)), run("Linear", recipe(name, **option))
    assert all(torch.equal(having[what], tensor) for what, tensor in without.items())


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith(VARIED) and name not in VARIED])
def test_each_other_option_changes_numbers(name: str) -> None:
    kind = ROWS[name].modules[0]
    base = next(base for base in VARIED if name.startswith(base))
    default, changed = run(kind, ROWS[base].make), run(kind, ROWS[name].make)
    assert not all(torch.equal(changed[what], tensor) for what, tensor in default.items())


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("delayed_scaling_factory", "DelayedScaling"),
        ("current_scaling_factory", "Float8CurrentScaling"),
        ("float8_block_scaling_factory", "Float8BlockScaling"),
        ("mxfp8_factory", "MXFP8BlockScaling"),
        ("nvfp4_factory", "NVFP4BlockScaling"),
        ("nvfp4_linear_fp8_dpa_factory", "NVFP4BlockScaling"),
    ],
)
def test_a_factory_of_te_makes_the_recipe_that_it_mirrors(name: str, like: str) -> None:
    ours, theirs = run("Linear", custom(name)), run("Linear", recipe(like))
    assert all(torch.equal(ours[what], tensor) for what, tensor in theirs.items())


def test_scales_of_blocks_that_are_no_powers_of_two_are_cut_on_a_blackwell() -> None:
    errors = {}
    for gpu, properties in GPUS.items():
        with emulated(properties):
            exact = run("Linear", None)["output"]
            scaled = run("Linear", recipe("Float8BlockScaling", **parameters(power_2_scale=False)))["output"]
        errors[gpu] = ((scaled - exact).norm() / exact.norm()).item()
    # A Hopper multiplies by the scales themselves. A Blackwell reads their exponents, so each operand is too small by a
    # factor between 1 and 2.
    assert errors["hopper"] < 2**0.5 * ERROR["e4m3"]
    assert 0.25 < errors["blackwell"] < 0.75


# What TE refuses.


def attend(make: Callable[[], Any]) -> None:
    choose_again()
    attention = TE.DotProductAttention(2, 128, attention_dropout=0.0, qkv_format="bshd")
    tensors = [torch.randn(1, 128, 2, 128).to(BF16).requires_grad_() for _ in range(3)]
    with TE.autocast(enabled=True, recipe=make()):
        attention(*tensors, attn_mask_type="causal")


def mixed(role: Any) -> Any:
    """Return another format for inputs than for weights."""
    return factory("mxfp8_factory" if getattr(role, "tensor_type", "") == "input" else "nvfp4_factory")(role)


def two_histories(role: Any) -> Any:
    from transformer_engine.pytorch.quantization import DelayedScalingRequest

    return DelayedScalingRequest(amax_history_len=4 if getattr(role, "tensor_type", "") == "weight" else 8)


def delayed_in_hybrid(role: Any) -> Any:
    return TE.HybridQuantizer(
        rowwise_quantizer=delayed_with_margin(role), columnwise_quantizer=factory("mxfp8_factory")(role)
    )


LINEAR, BLOCKS = "Linear", "float8_block_scaling_factory"
REFUSED: dict[str, tuple[str, str, Callable[[], object]]] = {
    "E5M2 alone": (
        "blackwell", "Pure E5M2 training is not supported", recipe("MXFP8BlockScaling", fp8_format=format_of("E5M2"))
    ),
    "delayed, dequantized": (
        "hopper", "only supports backward_override=None", recipe("DelayedScaling", backward_override="dequantized")
    ),
    "an override that TE does not know": (
        "hopper", "must be unset or one of", recipe("Float8CurrentScaling", backward_override="exact")
    ),
    "squares by squares": ("hopper", "2D by 2D block gemm", recipe("Float8BlockScaling", x_block_scaling_dim=2)),
    "blocks in attention": (
        "hopper", "FP8 attention is not supported for Float8BlockScaling", recipe("Float8BlockScaling", fp8_dpa=True)
    ),
    "blocks with fast sums": (
        "hopper", "Split accumulator required for fprop",
        recipe("Float8BlockScaling", fp8_gemm_fprop=recipe("MMParams", use_split_accumulator=False)),
    ),
    "an override in LayerNormMLP": (
        "hopper", "is not implemented in LayerNormMLP",
        lambda: run("LayerNormMLP", recipe("Float8CurrentScaling", backward_override="dequantized")),
    ),
    "MXFP8 on a Hopper": (
        "hopper", "compute capability 10.0 or higher required for MXFP8",
        lambda: run(LINEAR, recipe("MXFP8BlockScaling")),
    ),
    "NVFP4 on a Hopper": (
        "hopper", "compute capability 10.0 or higher required for NVFP4",
        lambda: run(LINEAR, recipe("NVFP4BlockScaling")),
    ),
    "MXFP8 in a custom recipe on a Hopper": (
        "hopper", "products of MXFP8TensorStorage need compute capability 10.0",
        lambda: run(LINEAR, custom("mxfp8_factory")),
    ),
    "row scaling of transformed values": (
        "blackwell", "Row-scaled NVFP4 quantization does not support RHT",
        lambda: run(LINEAR, recipe("NVFP4BlockScaling", row_scaled_activation=True)),
    ),
    "row scaling with 4over6": (
        "blackwell", "Row-scaled NVFP4 transpose quantization is not supported with 4over6 mode",
        lambda: run(
            LINEAR, recipe("NVFP4BlockScaling", row_scaled_activation=True, nvfp4_4over6="all", disable_rht=True)
        ),
    ),
    "row scaling of 16 rows": (
        "blackwell", "requires BF16 input and dimensions that are multiples of 32",
        lambda: run(LINEAR, recipe("NVFP4BlockScaling", row_scaled_activation=True, disable_rht=True), tokens=16),
    ),
    "4over6 of transformed values": (
        "blackwell", "NVFP4 4over6 quantization does not support RHT",
        lambda: run(LINEAR, recipe("NVFP4BlockScaling", nvfp4_4over6="all")),
    ),
    "NVFP4 of experts with 32 tokens": (
        "blackwell", "component 0 of split_sections should be 64 multiple",
        lambda: run("GroupedLinear", recipe("NVFP4BlockScaling"), tokens=32),
    ),
    "current scaling for gradients alone on a Hopper": (
        "hopper", "Quantizing in only the columnwise direction not supported yet!",
        lambda: run(LINEAR, recipe("CustomRecipe", qfactory=hybrid(BLOCKS, "current_scaling_factory"))),
    ),
    "two formats in a product": (
        "blackwell", "compatible scaling modes", lambda: run(LINEAR, recipe("CustomRecipe", qfactory=mixed))
    ),
    "no quantizer": (
        "blackwell", "qfactory returned None for slot 0",
        lambda: run(LINEAR, recipe("CustomRecipe", qfactory=lambda role: None)),
    ),
    "two histories": (
        "blackwell", "All DelayedScalingRequests in one CustomRecipeState must match",
        lambda: run(LINEAR, recipe("CustomRecipe", qfactory=two_histories)),
    ),
    "delayed scaling in a hybrid quantizer": (
        "blackwell", "HybridQuantizer does not support nested QuantizerRequest",
        lambda: run(LINEAR, recipe("CustomRecipe", qfactory=delayed_in_hybrid)),
    ),
    "current scaling in attention on a Hopper": (
        "hopper", "No dot product attention backend", lambda: attend(recipe("Float8CurrentScaling", fp8_dpa=True))
    ),
    "MXFP8 in attention before cuDNN 9.21": (
        "blackwell", "No dot product attention backend", lambda: attend(recipe("MXFP8BlockScaling", fp8_dpa=True))
    ),
    "NVFP4 in attention": (
        "blackwell", "No dot product attention backend", lambda: attend(recipe("NVFP4BlockScaling", fp8_dpa=True))
    ),
    "attention without quantizers": (
        "blackwell", "requires FP8-compatible quantizers",
        lambda: attend(custom("high_precision_factory", fp8_dpa=True)),
    ),
    "attention whose probabilities have no scale yet": (
        "blackwell", "the quantizer of S is a Float8CurrentScalingQuantizer",
        lambda: attend(custom("current_scaling_factory", fp8_dpa=True)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_te_refuses_is_refused_for_its_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    gpu, reason, call = REFUSED[name]
    with ExitStack() as stack:
        stack.enter_context(emulated(GPUS[gpu]))
        stack.enter_context(pytest.raises((AssertionError, RuntimeError, TypeError, ValueError), match=reason))
        call()
