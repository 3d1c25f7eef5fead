"""te.TransformerLayer, with each of its options, equals attention and an MLP with norms and residuals; layers stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import CAN_CHECKPOINT_CORE_ATTENTION, FP32_AND_BF16, assert_agree, gradient, sequence_first, te_on_cpu
from torch import Tensor, nn
from weight_maps import Projections, cross_attention_weights, mlp_weights, norm_weights, self_attention_weights

import parity
from parity import reference
from parity.case.weight_map import WeightMap

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM = 64, 96, 4, 2, 16
BATCH, SEQ, MEMORY = 2, 16, 24
FUSED: dict[Projections, dict[str, bool]] = {
    "separate": {},
    "interleaved": {"fuse_qkv_params": True},
    "concatenated": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}
CAUSAL = plain.causal(SEQ, SEQ)


@dataclass(frozen=True)
class Arrangement:
    """The parts of a layer, in terms that the plain layer and TE's share.

    Attributes:
        groups: key-value heads.
        norm_at_output: a norm behind the layer instead of the one in front of attention.
        parallel: attention and MLP read the same input.
        residual_is_normed: residuals start behind the norms.
    """

    normalization: str = "LayerNorm"
    activation: str = "gelu"
    bias: bool = True
    groups: int = HEADS
    projections: Projections = "separate"
    zero_centered: bool = False
    decoder: bool = False
    norm_at_output: bool = False
    parallel: bool = False
    residual_is_normed: bool = False
    rotate: plain.Rotate | None = None

    def plain_layer(self) -> nn.Module:
        def norm() -> nn.Module:
            return plain.norm(self.normalization, HIDDEN)

        def attention() -> nn.Module:
            return plain.Attention(HIDDEN, HEADS, self.groups, bias=self.bias, rotate=self.rotate)

        return plain.Layer(
            attention(),
            plain.MLP(HIDDEN, FFN, self.activation, self.bias),
            (None if self.norm_at_output else norm(), norm() if self.decoder else None, norm()),
            cross=attention() if self.decoder else None,
            output_norm=norm() if self.norm_at_output else None,
            parallel=self.parallel,
            residual_is_normed=self.residual_is_normed,
        )

    def te_layer(self, te: ModuleType, **options: Any) -> nn.Module:
        return te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=self.groups,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization=self.normalization,
            activation=self.activation,
            bias=self.bias,
            zero_centered_gamma=self.zero_centered,
            layer_type="decoder" if self.decoder else "encoder",
            output_layernorm=self.norm_at_output,
            parallel_attention_mlp=self.parallel,
            apply_residual_connection_post_layernorm=self.residual_is_normed,
            rotary_pos_interleaved=self.rotate is reference.rotate_interleaved,
            **{"attn_input_format": "bshd"} | FUSED[self.projections] | options,
        )

    def weights(self, plain_prefix: str = "", te_prefix: str = "") -> WeightMap:
        p, t = plain_prefix, te_prefix
        normed = not self.norm_at_output
        norms = {"mlp_norm.": "layernorm_mlp.layer_norm_"}
        norms |= {"output_norm.": "layernorm."} if self.norm_at_output else {}
        norms |= {"attention_norm.": "self_attention.layernorm_qkv.layer_norm_"} if normed else {}
        norms |= {"cross_norm.": "inter_attention.layernorm_query.layer_norm_"} if self.decoder else {}
        weights = dict(mlp_weights(f"{p}mlp.", f"{t}layernorm_mlp.", self.bias))
        for name, te_name in norms.items():
            weights |= dict(norm_weights(self.normalization, p + name, t + te_name, self.zero_centered))
        weights |= dict(
            self_attention_weights(
                self.groups,
                HEAD_DIM,
                self.projections,
                f"{p}attention.",
                f"{t}self_attention.",
                bias=self.bias,
                normed=normed,
            )
        )
        if self.decoder:
            weights |= dict(
                cross_attention_weights(
                    self.groups, self.projections, f"{p}cross.", f"{t}inter_attention.", bias=self.bias, normed=True
                )
            )
        return weights


def agree_with_layer(
    arrangement: Arrangement,
    masked: Tensor | None = CAUSAL,
    call: dict[str, Any] | None = None,
    precisions: tuple[str, ...] = FP32_AND_BF16,
    **options: Any,
) -> None:
    """Assert that layers agree; ``options`` are only TE's, and ``call`` holds its layer's arguments besides tensors."""

    def call_te(module: nn.Module, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return module(x, encoder_output=memory, **call or {})

    def draw(rng: parity.case.case.Rng) -> Any:
        x = rng.normal(BATCH, SEQ, HIDDEN)
        return (x, rng.normal(BATCH, MEMORY, HIDDEN)) if arrangement.decoder else x

    def build(te: ModuleType) -> parity.Pair:
        is_sequence_first = options.get("attn_input_format") == "sbhd"
        return parity.Pair(
            arrangement.plain_layer(),
            arrangement.te_layer(te, **options),
            draw,
            arrangement.weights(),
            call_reference=lambda module, x, memory=None: module(x, memory, masked),
            call_candidate=sequence_first(call_te) if is_sequence_first else call_te,
        )

    assert_agree(build, precisions)


ARRANGEMENTS = {
    "gpt": Arrangement(),
    "llama": Arrangement("RMSNorm", "swiglu", bias=False, groups=GROUPS),
    "falcon": Arrangement(parallel=True, groups=1),
    "falcon without biases": Arrangement(parallel=True, bias=False),
    "bert": Arrangement(norm_at_output=True),
    "bert with RMSNorm": Arrangement("RMSNorm", norm_at_output=True, bias=False),
    "normed residuals": Arrangement(residual_is_normed=True),
    "normed residuals without biases": Arrangement("RMSNorm", bias=False, residual_is_normed=True),
    "decoder": Arrangement(decoder=True),
    "decoder without biases": Arrangement("RMSNorm", "swiglu", bias=False, groups=GROUPS, decoder=True),
    "decoder, normed residuals": Arrangement(decoder=True, residual_is_normed=True),
    "decoder, norm at output": Arrangement(decoder=True, norm_at_output=True),
    "gemma": Arrangement("RMSNorm", "geglu", bias=False, groups=1, zero_centered=True),
    "zero-centred decoder": Arrangement(decoder=True, zero_centered=True),
    "zero-centred output norm": Arrangement(norm_at_output=True, zero_centered=True),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_layer_is_arranged_as_its_options_say(name: str) -> None:
    agree_with_layer(ARRANGEMENTS[name])


@pytest.mark.parametrize("name", ["gpt", "llama", "decoder"])
@pytest.mark.parametrize("projections", ["interleaved", "concatenated"])
def test_fused_projections_are_one_parameter(name: str, projections: Projections) -> None:
    arrangement = ARRANGEMENTS[name]
    fused = Arrangement(**vars(arrangement) | {"projections": projections})
    agree_with_layer(fused, precisions=("bf16",))


@pytest.mark.parametrize("name", ["gpt", "decoder", "falcon"])
def test_sequence_first_is_the_same_transposed(name: str) -> None:
    agree_with_layer(ARRANGEMENTS[name], attn_input_format="sbhd")


@pytest.mark.parametrize("rotate", [reference.rotate_halves, reference.rotate_interleaved])
def test_rope_is_passed_to_attention(rotate: plain.Rotate) -> None:
    angles = plain.rotary_angles(SEQ, HEAD_DIM)
    is_interleaved = rotate is reference.rotate_interleaved
    full = angles.repeat_interleave(2, dim=-1) if is_interleaved else torch.cat((angles, angles), dim=-1)
    agree_with_layer(Arrangement(rotate=rotate), call={"rotary_pos_emb": full[:, None, None, :]})


MASKS: dict[str, tuple[Tensor | None, dict[str, Any]]] = {
    "no_mask": (None, {"self_attn_mask_type": "no_mask"}),
    "causal": (CAUSAL, {"self_attn_mask_type": "causal"}),
    "causal_bottom_right": (CAUSAL, {"self_attn_mask_type": "causal_bottom_right"}),
    "window": (plain.causal(SEQ, SEQ, before=5), {"self_attn_mask_type": "causal", "window_size": (5, 0)}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("when", ["built", "called"])
def test_the_mask_is_that_of_self_attention(mask: str, when: str) -> None:
    masked, options = MASKS[mask]
    built, called = (options, None) if when == "built" else ({}, options)
    agree_with_layer(Arrangement(decoder=mask == "window"), masked, called, **built)


def test_an_arbitrary_mask_is_passed_to_self_attention() -> None:
    mask = torch.rand(BATCH, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(0)) < 0.5
    mask &= ~torch.eye(SEQ, dtype=torch.bool)
    agree_with_layer(Arrangement(), mask, call={"attention_mask": mask}, self_attn_mask_type="arbitrary")


@CAN_CHECKPOINT_CORE_ATTENTION
@pytest.mark.parametrize("name", ["gpt", "decoder"])
def test_checkpoint_core_attention_recomputes_the_same(name: str) -> None:
    agree_with_layer(ARRANGEMENTS[name], call={"checkpoint_core_attention": True}, precisions=("bf16",))


@pytest.mark.parametrize("name", ["gpt", "llama", "decoder"])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_a_layer_agrees_in_fp8(name: str, precision: str) -> None:
    agree_with_layer(ARRANGEMENTS[name], precisions=(precision,))


def test_bias_dropout_and_residual_need_not_be_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_BIAS_DROPOUT_FUSION", "0")
    agree_with_layer(Arrangement(), precisions=("bf16",))


@pytest.mark.parametrize("options", [{"seq_length": SEQ, "micro_batch_size": BATCH}, {"layer_number": 3}], ids=str)
def test_options_that_only_tune_change_nothing(options: dict[str, Any]) -> None:
    agree_with_layer(Arrangement(), precisions=("bf16",), **options)


class Stack(nn.Module):
    """An encoder layer whose output is the memory of a decoder layer, and a third layer on top."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder, self.last = encoder, decoder, last

    def forward(self, x: Tensor, y: Tensor, **masks: Any) -> Tensor:
        memory = self.encoder(x, **masks)
        return self.last(self.decoder(y, memory, **masks), **masks)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_layers_stack_to_a_model(precision: str) -> None:
    parts = {
        "encoder": Arrangement("RMSNorm", "swiglu", bias=False, groups=GROUPS),
        "decoder": Arrangement("RMSNorm", "swiglu", bias=False, groups=GROUPS, decoder=True),
        "last": Arrangement(parallel=True, zero_centered=True, projections="interleaved"),
    }

    def call_te(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return module.last(module.decoder(y, encoder_output=module.encoder(x)))

    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            Stack(*(part.plain_layer() for part in parts.values())),
            Stack(*(part.te_layer(te, layer_number=number) for number, part in enumerate(parts.values(), start=1))),
            lambda rng: (rng.normal(BATCH, SEQ, HIDDEN), rng.normal(BATCH, SEQ, HIDDEN)),
            {
                side: te_side
                for name, part in parts.items()
                for side, te_side in part.weights(f"{name}.", f"{name}.").items()
            },
            call_reference=lambda module, x, y: module(x, y, masked=CAUSAL),
            call_candidate=call_te,
        )

    assert_agree(build, (precision,))


# Dropout and drop path of te.TransformerLayer are off where they should be, and have the right averages elsewhere.


# At six standard errors, a right implementation fails once in five hundred million runs. The seed is fixed as well.
SIGMAS = 6.0


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te_on_cpu().TransformerLayer(HIDDEN, FFN, HEADS, **dropouts | options)


def residual_part(module: Any, x: Tensor) -> Tensor:
    """Return what the layer adds to its input when all of it is zeroed but the MLP's last bias, which is 1."""
    with torch.no_grad():
        module.self_attention.proj.weight.zero_()
        module.layernorm_mlp.fc2_weight.zero_()
        module.layernorm_mlp.fc2_bias.fill_(1.0)
        return module(x) - x


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_evaluation_drops_nothing(option: str) -> None:
    x = torch.randn(8, 4, HIDDEN)
    dropping, keeping = make_layer(**{option: 0.5}).eval(), make_layer()
    assert torch.equal(dropping(x), keeping(x))


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_training_drops_something_else_each_time(option: str) -> None:
    x = torch.randn(8, 4, HIDDEN)
    module = make_layer(**{option: 0.5})
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("probability", [0.1, 0.6])
def test_hidden_dropout_drops_its_share_and_scales_the_rest(probability: float) -> None:
    added = residual_part(make_layer(hidden_dropout=probability), torch.randn(64, 8, HIDDEN))
    is_dropped = added.abs() < 1e-4
    torch.testing.assert_close(
        added[~is_dropped], torch.full_like(added[~is_dropped], 1 / (1 - probability)), atol=1e-4, rtol=0
    )
    assert_share(is_dropped, probability)


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_drop_path_drops_whole_entries_of_the_first_dimension(rate: float) -> None:
    layer = make_layer(drop_path_rate=rate, attn_input_format="bshd")  # attention is cheap for short sequences
    added = residual_part(layer, torch.randn(4096, 2, HIDDEN))
    is_dropped = added.abs().amax(dim=(1, 2)) < 1e-4
    torch.testing.assert_close(
        added[~is_dropped], torch.full_like(added[~is_dropped], 1 / (1 - rate)), atol=1e-4, rtol=0
    )
    assert_share(is_dropped, rate)


def assert_share(is_dropped: Tensor, probability: float) -> None:
    standard_error = math.sqrt(probability * (1 - probability) / is_dropped.numel())
    assert abs(is_dropped.double().mean().item() - probability) < SIGMAS * standard_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_is_right_on_average(dtype: torch.dtype) -> None:
    """Use values of 1 for every key, so that the context is the scaled sum of the probabilities kept."""
    probability, heads, seq = 0.25, 64, 64
    core = te_on_cpu().DotProductAttention(
        heads, 16, attention_dropout=probability, attn_mask_type="no_mask", qkv_format="bshd"
    )
    torch.manual_seed(0)
    query, key = (torch.randn(4, seq, heads, 16, dtype=dtype) for _ in range(2))
    context = core(query, key, torch.ones_like(query)).view(4, seq, heads, 16)[..., 0].double()
    assert context.std() > 0.02
    standard_error = (context.std() / math.sqrt(context.numel())).item()
    assert abs(context.mean().item() - 1.0) < SIGMAS * standard_error + torch.finfo(dtype).eps


@pytest.mark.parametrize("option", ["hidden_dropout", "drop_path_rate"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(option: str) -> None:
    """Count the entries kept by the bias's gradient, because the layer adds ``kept * bias``, scaled, to its input."""
    module = make_layer(**{option: 0.5})
    x = torch.randn(16, 4, HIDDEN)
    residual_part(module, x)
    output = module(x)
    output.sum().backward()
    torch.testing.assert_close(
        module.layernorm_mlp.fc2_bias.grad, (output - x).detach().sum(dim=(0, 1)), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_of_attention_drops_what_its_forward_pass_dropped(dtype: torch.dtype) -> None:
    """Use the context's linearity in V: V times its gradient sums to the context times the context's gradient."""
    core = te_on_cpu().DotProductAttention(4, 16, attention_dropout=0.5, attn_mask_type="no_mask", qkv_format="bshd")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 32, 4, 16, dtype=dtype) for _ in range(3))
    value.requires_grad_()
    context = core(query, key, value)
    gradient = torch.randn_like(context)
    context.backward(gradient)
    assert value.grad is not None
    forward = (context.detach().double() * gradient.double()).sum()
    backward = (value.detach().double() * value.grad.double()).sum()
    scale = context.detach().double().norm() * gradient.double().norm()
    assert abs(forward - backward) < 4 * torch.finfo(dtype).eps * scale / math.sqrt(context.numel()) + 1e-3 * abs(
        forward
    )


# ``is_first_microbatch``: the first microbatch quantizes the weights for all of them, and restarts the gradients.


BF16 = torch.bfloat16
BUILD: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda te, **options: te.Linear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(HIDDEN, FFN, **options),
    "TransformerLayer": lambda te, **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options
    ),
}
EACH_MODULE = pytest.mark.parametrize("name", BUILD)


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return BUILD[name](te_on_cpu(), params_dtype=BF16, **options)


def microbatch() -> Tensor:
    return torch.randn(16, 2, HIDDEN, dtype=BF16)


def forward(module: nn.Module, x: Tensor, is_first: bool | None, recipe_name: str = "Float8CurrentScaling") -> Tensor:
    te = te_on_cpu()
    from transformer_engine.common import recipe

    with te.autocast(enabled=True, recipe=getattr(recipe, recipe_name)()):
        return module(x, is_first_microbatch=is_first)


@EACH_MODULE
def test_microbatches_of_one_step_compute_what_whole_steps_compute(name: str) -> None:
    first, second, of_output = microbatch(), microbatch(), microbatch()
    cached, plain = build(name), build(name)
    for x, is_first in ((first, True), (second, False)):
        output, expected = forward(cached, x, is_first), forward(plain, x, None)
        assert torch.equal(output, expected)
        output.backward(of_output)
        expected.backward(of_output)
    for (parameter, value), other in zip(cached.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(gradient(value), gradient(other)), parameter


@EACH_MODULE
def test_delayed_scaling_is_as_near_with_cached_weights(name: str) -> None:
    """Allow for FP8's rounding, because the weights' scale would have changed at the second microbatch."""
    first, second = microbatch(), microbatch()
    cached, plain = build(name), build(name)
    for x, is_first in ((first, True), (second, False)):
        output, expected = forward(cached, x, is_first, "DelayedScaling"), forward(plain, x, None, "DelayedScaling")
        assert (output - expected).norm() < 0.1 * expected.norm()


@EACH_MODULE
def test_later_microbatches_use_the_first_ones_quantized_weights(name: str) -> None:
    module, x = build(name), microbatch()
    before = forward(module, x, True).detach()
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-3.0)
    cached = forward(module, x, False).detach()
    renewed = forward(module, x, True).detach()
    assert torch.equal(cached, before)
    assert not torch.equal(renewed, before)


@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bf16"])
@EACH_MODULE
def test_fused_accumulation_starts_afresh_at_the_first_microbatch(name: str, is_fp8: bool) -> None:
    module, plain = build(name, fuse_wgrad_accumulation=True), build(name)
    weights: dict[str, Any] = {key: parameter for key, parameter in module.named_parameters() if parameter.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.full(weight.shape, 7.0)  # left behind by an earlier step
    of_output = microbatch()
    for is_first in (True, False):
        x = microbatch()
        for model, first in ((module, is_first), (plain, None)):
            output = forward(model, x, first) if is_fp8 else model(x, is_first_microbatch=first)
            output.backward(of_output)
    for key, weight in weights.items():
        expected = gradient(plain.get_parameter(key))
        assert (weight.main_grad - expected.float()).norm() < 2.0**-7 * expected.float().norm(), key
