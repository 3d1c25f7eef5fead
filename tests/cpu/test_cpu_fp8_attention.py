"""TE's FP8 attention: its fused backend, and its emulation with ``NVTE_UnfusedDPA_Emulate_FP8=1``."""

from __future__ import annotations

from typing import Any

import attention_oracle as oracle
import emulated_gpu
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from parity import te
from te_on_cpu import cuda, float8, versions

TE = te.kernels("cpu").te
BF16 = torch.bfloat16
BATCH, SEQ, HEADS, FEATURES = 2, 32, 4, 16
# A Hopper trains in FP8 with heads of 128 features.
FUSED_HEADS, FUSED_FEATURES = 2, 128
# The root mean square of a cast's error relative to its element; the error is spread evenly over half a place.
E4M3_ERROR, E5M2_ERROR = 2.0**-4 / 3**0.5, 2.0**-3 / 3**0.5
GPUS = {"Hopper": cuda.HOPPER, "Blackwell": cuda.BLACKWELL}
# (GPU, recipe): TE runs current scaling in fused attention only from Blackwell on.
FUSED = [("Hopper", "delayed"), ("Blackwell", "delayed"), ("Blackwell", "current")]
RECIPES = {
    "delayed": ("DelayedScaling", {"fp8_dpa": True}),
    "current": ("Float8CurrentScaling", {"fp8_dpa": True}),
    "delayed, MHA": ("DelayedScaling", {"fp8_dpa": True, "fp8_mha": True}),
    "current, MHA": ("Float8CurrentScaling", {"fp8_dpa": True, "fp8_mha": True}),
    "mxfp8": ("MXFP8BlockScaling", {"fp8_dpa": True}),
}


def recipe(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    kind, options = RECIPES[name]
    return getattr(recipes, kind)(**options)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return the fused kernels that TE called, each with whether it got FP8 tensors."""
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    names = ["fused_attn_fwd", "fused_attn_bwd"]

    def describe(name: str, arguments: tuple[Any, ...]) -> tuple[str, bool]:
        return name, any(float8.is_float8_tensor(argument) for argument in arguments)

    return emulated_gpu.record_calls(monkeypatch, names, describe)


def leaves(heads: int, features: int) -> list[Tensor]:
    """Return query, key, value and output gradient, each ``[batch, seq, heads, features]``."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, SEQ, heads, features, generator=rng).to(BF16) for _ in range(4)]


def attention_of(tensors: list[Tensor]) -> Any:
    emulated_gpu.choose_again()
    return TE.DotProductAttention(*tensors[0].shape[2:], attention_dropout=0.0, qkv_format="bshd")


def steps(tensors: list[Tensor], name: str, **call: Any) -> list[Tensor]:
    """Return output and gradients of the third step, since the first steps of delayed scaling fill its amax history."""
    results: list[Tensor] = []
    attention = attention_of(tensors)
    for _ in range(3):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        with TE.autocast(enabled=True, recipe=recipe(name)):
            output = attention(*inputs, **call).view_as(tensors[3])
        results = [output, *torch.autograd.grad(output, inputs, tensors[3])]
    return results


def exact(tensors: list[Tensor], visible: Tensor) -> list[Tensor]:
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    output = oracle.attend(q, k, v, visible)
    return [output, *torch.autograd.grad(output, [q, k, v], tensors[3].double())]


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the norms of the differences over the norms of the exact tensors."""
    return [
        oracle.relative_error(got, wanted) * torch.finfo(BF16).eps for got, wanted in zip(actual, expected, strict=True)
    ]


def norm(*contributions: float) -> float:
    """Return the norm of the sum of independent errors."""
    return sum(contribution**2 for contribution in contributions) ** 0.5


MASKS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "no_mask": (oracle.visible(SEQ, SEQ), {}),
    "causal": (oracle.visible(SEQ, SEQ, right=0), {}),
    "padding_causal": (
        oracle.visible(SEQ, SEQ, right=0)
        & oracle.tokens((SEQ, 19), SEQ)[:, None, None]
        & oracle.tokens((SEQ, 19), SEQ)[:, None, :, None],
        {"attention_mask": ~oracle.tokens((SEQ, 19), SEQ)[:, None, None]},
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("gpu", "name"), FUSED)
def test_te_takes_its_fp8_backend_which_errs_by_the_casts_it_makes(
    fused_calls: list[tuple[str, bool]], gpu: str, name: str, mask: str
) -> None:
    visible, call = MASKS[mask]
    tensors = leaves(FUSED_HEADS, FUSED_FEATURES)
    tensors[3] *= visible.any(-1).expand(BATCH, 1, SEQ).transpose(1, 2)[..., None]
    with emulated_gpu.emulated(GPUS[gpu]):
        actual = steps(tensors, name, attn_mask_type=mask, **call)
    assert fused_calls == 3 * [("fused_attn_fwd", True), ("fused_attn_bwd", True)]
    # Scores have unit variance. The casts of Q and K move them, and with them log P, by E4M3_ERROR each.
    p = norm(E4M3_ERROR, E4M3_ERROR)
    output = norm(p, E4M3_ERROR, E4M3_ERROR, E4M3_ERROR)  # P, V and the result are cast
    dv = norm(p, E4M3_ERROR, E5M2_ERROR, E5M2_ERROR)  # P, dO and the result
    dqk = norm(
        p, E4M3_ERROR, E5M2_ERROR, output, E5M2_ERROR, E4M3_ERROR, E5M2_ERROR
    )  # V, dO, O, dS, K or Q, the result
    for error, most in zip(errors(actual, exact(tensors, visible)), (output, dqk, dqk, dv), strict=True):
        assert 0.25 * most < error < most


@pytest.fixture
def _gradients_pass_fp8_outputs() -> None:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    if "requires_grad" in vars(QuantizedTensor):
        pytest.skip("this TE remembers that an FP8 output required no gradient when it was made, and passes none on")


@pytest.mark.usefixtures("_gradients_pass_fp8_outputs")
def test_scales_follow_the_amaxes_that_attention_keeps(fused_calls: list[tuple[str, bool]]) -> None:
    with emulated_gpu.emulated(cuda.HOPPER):
        emulated_gpu.choose_again()
        torch.manual_seed(0)
        hidden = FUSED_HEADS * FUSED_FEATURES
        layer = TE.MultiheadAttention(
            hidden, FUSED_HEADS, attention_dropout=0.0, params_dtype=BF16, qkv_format="bshd", device="cpu"
        )
        for _ in range(2):
            with TE.autocast(enabled=True, recipe=recipe("delayed")):
                output = layer(torch.randn(BATCH, SEQ, hidden).to(BF16))
            output.backward(torch.randn_like(output))
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    # dO is left out, because the output projection casts it with its own quantizer.
    forward = (fused_attn.META_QKV, fused_attn.META_S, fused_attn.META_O)
    backward = (fused_attn.META_DP, fused_attn.META_DQKV)
    states = layer.core_attention.fp8_meta
    for direction, places, largest in (("scaling_fwd", forward, 448.0), ("scaling_bwd", backward, 57344.0)):
        for place in map(int, places):
            history, scale = states[direction].amax_history[:, place], states[direction].scale[place]
            assert (history > 0).sum() == 2
            assert scale.item() == pytest.approx(largest / history.amax().item(), rel=1e-6)
    # The first query sees only itself, so that its probability is 1.
    assert states["scaling_fwd"].amax_history[:, int(fused_attn.META_S)].amax() == 1


def test_nvte_fp8_dpa_bwd_0_runs_the_backward_in_bf16(
    fused_calls: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    tensors = leaves(FUSED_HEADS, FUSED_FEATURES)
    with emulated_gpu.emulated(cuda.HOPPER):
        actual = steps(tensors, "delayed", attn_mask_type="causal")
    assert fused_calls == 3 * [("fused_attn_fwd", True), ("fused_attn_bwd", False)]
    assert all(tensor.isfinite().all() for tensor in actual)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_attention_in_fp8_is_as_near_to_fp64_as_e4m3_and_e5m2_allow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    tensors = leaves(HEADS, FEATURES)
    actual = steps(tensors, name, attn_mask_type="causal")
    for error in errors(actual, exact(tensors, oracle.visible(SEQ, SEQ, right=0))):
        # One rounding to E4M3 costs about 2^-5.5 in norm, one to E5M2 2^-4.5, and each result has a handful of them.
        assert 2**-6 < error < 2**-2.5


# MXFP8, which cuDNN has from 9.21 on, and TE from 2.17 on.


CUDNN_WITH_MXFP8 = 92100
HAS_MXFP8_ATTENTION = pytest.mark.skipif(
    versions.installed_version() < Version("2.20"), reason="older versions of TE pass MXFP8 tensors to cuDNN otherwise"
)


def mxfp8_leaves(query_heads: int) -> list[Tensor]:
    """Return query, key, value and output gradient, whose sequences are long enough for TE to cast them to MXFP8."""
    rng = torch.Generator().manual_seed(0)
    heads = (query_heads, FUSED_HEADS, FUSED_HEADS, query_heads)
    return [torch.randn(BATCH, 128, each, 64, generator=rng).to(BF16) for each in heads]


@HAS_MXFP8_ATTENTION
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "emulated by TE"])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_attention_in_mxfp8_errs_by_the_casts_of_its_inputs(
    fused_calls: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, mask: str, is_fused: bool
) -> None:
    if not is_fused:
        monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    visible = oracle.visible(128, 128, right=0 if mask == "causal" else None)
    tensors = mxfp8_leaves(FUSED_HEADS)
    with emulated_gpu.emulated(cuda.BLACKWELL, cudnn_version=CUDNN_WITH_MXFP8 if is_fused else None):
        actual = steps(tensors, "mxfp8", attn_mask_type=mask)
    assert len(fused_calls) == (6 if is_fused else 0)
    # All casts are to E4M3. The emulation casts the results, too.
    p, result = norm(E4M3_ERROR, E4M3_ERROR), 0.0 if is_fused else E4M3_ERROR
    output = norm(p, E4M3_ERROR, result)
    dv, dqk = norm(p, E4M3_ERROR, result), norm(p, E4M3_ERROR, E4M3_ERROR, output, E4M3_ERROR, result)
    for error, most in zip(errors(actual, exact(tensors, visible)), (output, dqk, dqk, dv), strict=True):
        assert 0.25 * most < error < most


@HAS_MXFP8_ATTENTION
@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize(
    ("window", "sink"), [((-1, 0), "learnable"), ((31, 0), "vanilla")], ids=["a sink", "a sliding window"]
)
def test_cudnn_9_21_adds_sinks_and_windows(
    fused_calls: list[tuple[str, bool]], name: str, window: tuple[int, int], sink: str
) -> None:
    tensors = mxfp8_leaves(FUSED_HEADS)
    results = []
    with emulated_gpu.emulated(cuda.BLACKWELL, cudnn_version=CUDNN_WITH_MXFP8):
        for used in (recipe(name), None):
            emulated_gpu.choose_again()
            attention = TE.DotProductAttention(
                FUSED_HEADS, 64, attention_dropout=0.0, qkv_format="bshd", softmax_type=sink, window_size=window
            )
            for _ in range(2):
                inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
                with TE.autocast(enabled=used is not None, recipe=used):
                    output = attention(*inputs, attn_mask_type="causal").view_as(tensors[3])
                offsets = [] if sink == "vanilla" else [attention.softmax_offset]
                gradients = torch.autograd.grad(output, [*inputs, *offsets], tensors[3])
            results.append([output, *gradients])
    assert [is_fp8 for _, is_fp8 in fused_calls] == [name != "mxfp8"] * 4 + [False] * 4
    for in_fp8, in_bf16 in zip(*results, strict=True):
        assert 0 < ((in_fp8 - in_bf16).float().norm() / in_bf16.float().norm()) < 0.2


@HAS_MXFP8_ATTENTION
def test_mxfp8_scales_lie_by_head_whatever_the_format_of_the_codes() -> None:
    tensors = mxfp8_leaves(2 * FUSED_HEADS)
    in_sbhd = [tensor.transpose(0, 1).contiguous() for tensor in tensors]
    with emulated_gpu.emulated(cuda.BLACKWELL, cudnn_version=CUDNN_WITH_MXFP8):
        results = []
        for qkv_format, given in (("bshd", tensors), ("sbhd", in_sbhd)):
            emulated_gpu.choose_again()
            attention = TE.DotProductAttention(
                2 * FUSED_HEADS, 64, num_gqa_groups=FUSED_HEADS, attention_dropout=0.0, qkv_format=qkv_format
            )
            inputs = [tensor.clone().requires_grad_() for tensor in given[:3]]
            with TE.autocast(enabled=True, recipe=recipe("mxfp8")):
                output = attention(*inputs, attn_mask_type="causal").view_as(given[3])
            results.append([output, *torch.autograd.grad(output, inputs, given[3])])
        # TE lays packed tensors out by head before it casts them.
        packed = torch.stack([tensor.detach() for tensor in tensors[1:3]], 2).requires_grad_()
        query = tensors[0].clone().requires_grad_()
        with TE.autocast(enabled=True, recipe=recipe("mxfp8")):
            attention = TE.DotProductAttention(
                2 * FUSED_HEADS, 64, num_gqa_groups=FUSED_HEADS, attention_dropout=0.0, qkv_format="bshd"
            )
            output = attention(query, packed[:, :, 0], packed[:, :, 1], attn_mask_type="causal").view_as(tensors[3])
        of_query, of_packed = torch.autograd.grad(output, [query, packed], tensors[3])
    apart = results[0]
    assert all(torch.equal(one, other.transpose(0, 1)) for one, other in zip(*results, strict=True))
    assert all(map(torch.equal, (output, of_query, *of_packed.unbind(2)), apart))


def losses(fp8_recipe: Any, heads: int, features: int) -> list[float]:
    """Return the losses of a layer that learns a single output, in FP8 or, without a recipe, in BF16."""
    torch.manual_seed(0)
    hidden = heads * features
    layer = TE.TransformerLayer(
        hidden, 2 * hidden, heads, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    )
    x, target = torch.randn(SEQ, BATCH, hidden).to(BF16), torch.randn(SEQ, BATCH, hidden)
    optimizer = torch.optim.SGD(layer.parameters(), lr=5.0)
    result = []
    for _ in range(6):
        with TE.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
            output = layer(x)
        loss = (output.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def assert_learns_as_in_bf16(name: str, *sizes: int) -> None:
    emulated_gpu.choose_again()
    actual, expected = losses(recipe(name), *sizes), losses(None, *sizes)
    assert expected[-1] < 0.95 * expected[0]
    assert actual == pytest.approx(expected, rel=0.02)
    assert actual != expected


@pytest.mark.usefixtures("_gradients_pass_fp8_outputs")
@pytest.mark.parametrize(
    ("gpu", "name"), [("Hopper", "delayed"), ("Hopper", "delayed, MHA"), ("Blackwell", "current, MHA")]
)
def test_a_layer_with_fused_fp8_attention_learns_as_in_bf16(
    fused_calls: list[tuple[str, bool]], gpu: str, name: str
) -> None:
    with emulated_gpu.emulated(GPUS[gpu]):
        assert_learns_as_in_bf16(name, FUSED_HEADS, FUSED_FEATURES)
    assert fused_calls[:12] == 6 * [("fused_attn_fwd", True), ("fused_attn_bwd", True)]


@pytest.mark.parametrize("name", ["delayed", "current", "delayed, MHA"])
def test_a_layer_with_emulated_fp8_attention_learns_as_in_bf16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    assert_learns_as_in_bf16(name, HEADS, FEATURES)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("delayed", FEATURES),
        pytest.param(
            "current",
            FUSED_FEATURES,
            marks=pytest.mark.skipif(
                versions.installed_version() < Version("2.15"), reason="TE 2.14 left that to cuDNN"
            ),
        ),
    ],
)
def test_a_hopper_trains_with_128_features_and_delayed_scaling_alone_and_te_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, features: int
) -> None:
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    tensors = leaves(HEADS, features)
    with (
        TE.autocast(enabled=True, recipe=recipe(name)),
        pytest.raises(ValueError, match="No dot product attention"),
    ):
        attention_of(tensors)(*tensors[:3], attn_mask_type="causal")
