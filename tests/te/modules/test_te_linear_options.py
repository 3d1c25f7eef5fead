"""te.Linear, the norms, te.LayerNormLinear and te.LayerNormMLP, with each of their options, equal plain layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import FP32_AND_BF16, assert_agree, gradient, te_on_cpu
from packaging.version import Version
from torch import Tensor, nn
from weight_maps import kinds, mlp_weights, norm_weights

import parity
from parity import reference
from parity.case.weight_map import WeightMap
from te_on_cpu import versions

# te.Linear, with each of its options, equals a linear layer.


IN, OUT = 64, 48
TOKENS = (2, 16)


def agree_with_linear(
    weights: WeightMap, bias: bool = True, bias_apart: bool = False, tokens: tuple[int, ...] = TOKENS, **options: Any
) -> None:
    def build(te: ModuleType) -> parity.Pair:
        candidate = te.Linear(IN, OUT, bias=bias, return_bias=bias_apart, **options)
        return parity.Pair(
            plain.linear(IN, OUT, bias, bias_apart), candidate, lambda rng: rng.normal(*tokens, IN), weights
        )

    assert_agree(build)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_a_linear_layer(bias: bool) -> None:
    agree_with_linear({kind: kind for kind in kinds(bias)}, bias)


@pytest.mark.parametrize("tokens", [(24,), (3, 8), (2, 3, 4), (1,)], ids=str)
def test_linear_takes_any_number_of_leading_dimensions(tokens: tuple[int, ...]) -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, tokens=tokens)


@pytest.mark.skipif(
    versions.installed_version() < Version("2.20"),
    reason="the backward pass of TE's Linear takes vectors from 2.20 on",
)
def test_a_vector_counts_as_one_token() -> None:
    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            plain.linear(IN, OUT),
            te.Linear(IN, OUT),
            lambda rng: rng.normal(IN),
            {"weight": "weight", "bias": "bias"},
            call_candidate=lambda module, x: module(x).squeeze(0),
        )

    assert_agree(build)


def test_return_bias_of_linear_leaves_it_to_the_caller() -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, bias_apart=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("split", "names"),
    [
        (("query", "key", "value"), ("query", "key", "value")),
        ({"gate_": 32, "up_": 16}, ("gate", "up")),
        (("only",), ("only",)),
    ],
    ids=["equal", "sizes", "one"],
)
def test_parameters_split_of_linear_stacks_named_parameters(split: Any, names: tuple[str, ...], bias: bool) -> None:
    weights: WeightMap = {kind: parity.stack(*(f"{name}_{kind}" for name in names)) for kind in kinds(bias)}
    agree_with_linear(weights, bias, parameters_split=split)


def test_save_original_input_changes_nothing() -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, save_original_input=True)


@pytest.mark.parametrize("parallel_mode", ["column", "row"])
def test_a_parallel_mode_on_one_device_changes_nothing(parallel_mode: str) -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, parallel_mode=parallel_mode, tp_size=1)


def test_init_method_fills_the_weight_and_zeros_the_bias() -> None:
    module = te_on_cpu().Linear(IN, OUT, init_method=lambda weight: torch.nn.init.constant_(weight, 0.25))
    assert torch.equal(module.weight, torch.full((OUT, IN), 0.25))
    assert torch.equal(module.bias, torch.zeros(OUT))


def test_the_weight_is_drawn_from_the_tracked_random_state() -> None:
    te = te_on_cpu()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("weights", 7)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    module = te.Linear(IN, OUT, get_rng_state_tracker=lambda: tracker, rng_tracker_name="weights")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.empty(OUT, IN).normal_(0.0, 0.023)
    assert torch.equal(module.weight, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_delayed_weight_gradient_comes_when_it_is_called_for(bias: bool) -> None:
    te = te_on_cpu()
    at_once, delayed = (te.Linear(IN, OUT, bias=bias, delay_wgrad_compute=delay) for delay in (False, True))
    delayed.load_state_dict(at_once.state_dict())
    x, of_output = torch.randn(*TOKENS, IN), torch.randn(*TOKENS, OUT)
    for module in (at_once, delayed):
        module(x).backward(of_output)
    assert delayed.weight.grad is None
    delayed.backward_dw()
    assert torch.equal(gradient(delayed.weight), gradient(at_once.weight))
    if bias:
        assert torch.equal(gradient(delayed.bias), gradient(at_once.bias))


def test_meta_parameters_are_filled_by_reset_parameters() -> None:
    module = te_on_cpu().Linear(IN, OUT, device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert 0.02 < module.weight.std().item() < 0.026
    assert module(torch.randn(4, IN)).isfinite().all()


# te.LayerNorm and te.RMSNorm, with each of their options, equal PyTorch's norms.


NORMED = 96
NORMS = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def agree_with_norm(
    kind: str, tokens: tuple[int, ...] = (2, 16), eps: float = 1e-5, scale: float = 1.0, **options: Any
) -> None:
    weights = norm_weights(kind, "", "", zero_centered=options.get("zero_centered_gamma", False))

    def build(te: ModuleType) -> parity.Pair:
        candidate = getattr(te, kind)(NORMED, eps=eps, **options)
        return parity.Pair(
            plain.norm(kind, NORMED, eps), candidate, lambda rng: rng.normal(*tokens, NORMED, std=scale), weights
        )

    assert_agree(build)


@NORMS
@pytest.mark.parametrize("tokens", [(24,), (3, 8), (2, 3, 4), (1,), ()], ids=str)
def test_norm_takes_any_number_of_leading_dimensions(kind: str, tokens: tuple[int, ...]) -> None:
    agree_with_norm(kind, tokens)


@NORMS
def test_zero_centered_gamma_of_a_norm_stores_the_gain_minus_one(kind: str) -> None:
    agree_with_norm(kind, zero_centered_gamma=True)
    assert torch.equal(getattr(te_on_cpu(), kind)(NORMED, zero_centered_gamma=True).weight, torch.zeros(NORMED))


@NORMS
def test_eps_counts_where_the_input_is_small(kind: str) -> None:
    agree_with_norm(kind, eps=1e-2, scale=0.1)


@NORMS
@pytest.mark.parametrize("margin", [4, {"forward": 1, "backward": 2, "inference": 3}], ids=["number", "stages"])
def test_a_margin_of_multiprocessors_changes_nothing(kind: str, margin: Any) -> None:
    agree_with_norm(kind, sm_margin=margin)


@NORMS
def test_several_dimensions_are_normed_as_one(kind: str) -> None:
    shape = (6, 16)

    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            getattr(nn, kind)(shape, eps=1e-5),
            getattr(te, kind)(shape),
            lambda rng: rng.normal(5, *shape),
            norm_weights(kind, "", ""),
        )

    assert_agree(build)


@NORMS
def test_the_input_may_lie_in_memory_in_any_order(kind: str) -> None:
    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            plain.norm(kind, NORMED),
            getattr(te, kind)(NORMED),
            lambda rng: rng.normal(8, 4, NORMED),
            norm_weights(kind, "", ""),
            call_reference=lambda module, x: module(x.transpose(0, 1)),
            call_candidate=lambda module, x: module(x.transpose(0, 1)),
        )

    assert_agree(build)


# te.LayerNormLinear, with each of its options, equals a norm and a linear layer.


EITHER_NORM = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])


def agree_with_norm_and_linear(
    normalization: str = "LayerNorm",
    weights: WeightMap | None = None,
    bias: bool = True,
    tokens: tuple[int, ...] = TOKENS,
    eps: float = 1e-5,
    precisions: tuple[str, ...] = FP32_AND_BF16,
    **options: Any,
) -> None:
    """Assert agreement; ``weights`` maps the linear layer's, which by default have the same names on both sides."""
    of_norm = norm_weights(normalization, "norm.", "layer_norm_", options.get("zero_centered_gamma", False))
    of_linear = {f"body.{kind}": kind for kind in kinds(bias)} if weights is None else weights

    def build(te: ModuleType) -> parity.Pair:
        reference = plain.Normed(
            plain.norm(normalization, IN, eps),
            plain.linear(IN, OUT, bias, options.get("return_bias", False)),
            returns_norm=options.get("return_layernorm_output", False),
        )
        candidate = te.LayerNormLinear(IN, OUT, eps=eps, bias=bias, normalization=normalization, **options)
        return parity.Pair(reference, candidate, lambda rng: rng.normal(*tokens, IN), dict(of_norm) | dict(of_linear))

    assert_agree(build, precisions)


@EITHER_NORM
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_layernorm_linear_is_a_norm_and_a_linear_layer(normalization: str, bias: bool, zero_centered: bool) -> None:
    agree_with_norm_and_linear(normalization, bias=bias, zero_centered_gamma=zero_centered)


@pytest.mark.xfail(
    strict=True,
    reason="TransformerEngine itself drops this gradient without sequence parallelism (layernorm_linear.py, backward)",
)
@EITHER_NORM
def test_the_gathered_layernorm_output_has_its_gradient_on_one_device(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, return_layernorm_output=True, return_layernorm_output_gathered=True)


@EITHER_NORM
def test_return_bias_leaves_the_bias_to_the_caller(normalization: str) -> None:
    agree_with_norm_and_linear(normalization, return_bias=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("split", "names"),
    [(("query", "key", "value"), ("query", "key", "value")), ({"gate_": 32, "up_": 16}, ("gate", "up"))],
    ids=["equal", "sizes"],
)
def test_parameters_split_stacks_named_parameters(split: Any, names: tuple[str, ...], bias: bool) -> None:
    weights = {f"body.{kind}": parity.stack(*(f"{name}_{kind}" for name in names)) for kind in kinds(bias)}
    agree_with_norm_and_linear(weights=weights, bias=bias, parameters_split=split)


@EITHER_NORM
@pytest.mark.parametrize("returns_norm", [True, False])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_layernorm_linear_agrees_in_fp8(normalization: str, returns_norm: bool, precision: str) -> None:
    agree_with_norm_and_linear(
        normalization, tokens=(4, 16), precisions=(precision,), return_layernorm_output=returns_norm
    )


# te.LayerNormMLP, with each of its options, equals a norm, two linear layers and an activation.


HIDDEN, FFN = 64, 96
OTHERS = sorted({*reference.POINTWISE, *reference.GATES} - {"gelu", "swiglu"})


def agree_with_mlp(
    activation: str = "gelu",
    normalization: str = "LayerNorm",
    bias: bool = True,
    tokens: tuple[int, ...] = TOKENS,
    gate: Any = None,
    eps: float = 1e-5,
    precisions: tuple[str, ...] = FP32_AND_BF16,
    **options: Any,
) -> None:
    """Assert agreement; ``gate`` is the plain activation if its name does not identify it."""
    weights = dict(norm_weights(normalization, "norm.", "layer_norm_", options.get("zero_centered_gamma", False)))

    def build(te: ModuleType) -> parity.Pair:
        mlp = plain.MLP(HIDDEN, FFN, gate or activation, bias, bias_apart=options.get("return_bias", False))
        return parity.Pair(
            plain.Normed(
                plain.norm(normalization, HIDDEN, eps), mlp, returns_norm=options.get("return_layernorm_output", False)
            ),
            te.LayerNormMLP(
                HIDDEN, FFN, eps=eps, bias=bias, normalization=normalization, activation=activation, **options
            ),
            lambda rng: rng.normal(*tokens, HIDDEN),
            weights | dict(mlp_weights("body.", bias=bias)),
        )

    assert_agree(build, precisions)


@pytest.mark.parametrize(
    ("activation", "normalization", "bias"),
    [
        *itertools.product(("gelu", "swiglu"), ("LayerNorm", "RMSNorm"), (True, False)),
        *((name, norm, norm == "LayerNorm") for name, norm in itertools.product(OTHERS, ("LayerNorm", "RMSNorm"))),
    ],
)
def test_layernorm_mlp_is_a_norm_and_an_mlp(activation: str, normalization: str, bias: bool) -> None:
    agree_with_mlp(activation, normalization, bias)


@EITHER_NORM
def test_zero_centered_gamma_stores_the_gain_minus_one(normalization: str) -> None:
    agree_with_mlp("swiglu", normalization, bias=False, zero_centered_gamma=True)


def test_return_bias_leaves_the_second_bias_to_the_caller() -> None:
    agree_with_mlp(return_bias=True)


def test_activation_params_are_those_of_the_clamped_swiglu() -> None:
    def gate(gate_half: Tensor, up: Tensor) -> Tensor:
        gate_half, up = gate_half.clamp(max=0.5), up.clamp(-0.5, 0.5)
        return gate_half * torch.sigmoid(1.2 * gate_half) * (up + 0.25)

    agree_with_mlp(
        "clamped_swiglu", gate=gate, activation_params={"limit": 0.5, "alpha": 1.2, "glu_linear_offset": 0.25}
    )


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_checkpoint_recomputes_the_same(activation: str, bias: bool) -> None:
    agree_with_mlp(activation, bias=bias, checkpoint=True)


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_layernorm_mlp_agrees_in_fp8(activation: str, precision: str, checkpoint: bool) -> None:
    agree_with_mlp(activation, tokens=(4, 16), precisions=(precision,), checkpoint=checkpoint)


# Both te.LayerNormLinear and te.LayerNormMLP.


WITH_NORM = pytest.mark.parametrize(
    "agree", [agree_with_norm_and_linear, agree_with_mlp], ids=["LayerNormLinear", "LayerNormMLP"]
)


@WITH_NORM
@pytest.mark.parametrize("tokens", [(24,), (2, 3, 4), (1,)], ids=str)
def test_any_number_of_leading_dimensions_is_taken(agree: Callable[..., None], tokens: tuple[int, ...]) -> None:
    agree(tokens=tokens)


@WITH_NORM
@EITHER_NORM
def test_eps_is_that_of_the_norm(agree: Callable[..., None], normalization: str) -> None:
    agree(normalization=normalization, eps=0.5)


@WITH_NORM
@EITHER_NORM
def test_return_layernorm_output_returns_it_with_its_gradient(agree: Callable[..., None], normalization: str) -> None:
    agree(normalization=normalization, return_layernorm_output=True)


@EITHER_NORM
def test_so_does_the_gathered_one_of_an_mlp(normalization: str) -> None:
    agree_with_mlp(normalization=normalization, return_layernorm_output=True, return_layernorm_output_gathered=True)


@WITH_NORM
def test_all_that_can_be_returned_is_returned_in_order(agree: Callable[..., None]) -> None:
    agree(return_bias=True, return_layernorm_output=True)
