"""``fused_attn_fwd`` and ``fused_attn_bwd`` with FP8 tensors: who is quantized, with which scale, into which layout."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import fp8_attention_oracle as oracle
import pytest
import torch
from attention_oracle import visible
from test_cpu_attention_layouts import BACKWARD, FORWARD, LAYOUTS, OPTIONS, back, leaves, packed, to
from torch import Tensor

from parity import te
from parity.cpu import attention, attention_problem, cast, float8
from parity.cpu.enums import DType, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout

BF16 = torch.bfloat16
PADDED = [layout for layout in LAYOUTS if "T" not in layout.name.split("_")[1]]
PLAIN = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
SCALES = {"qkv": 64.0, "s": 300.0, "o": 150.0, "do": 1000.0, "dp": 2000.0, "dqkv": 700.0}


@pytest.fixture(scope="module", autouse=True)
def _te_module() -> ModuleType:
    return te.kernels("cpu").te


def quantizer(name: str, kind: DType | None = None) -> Any:
    """Delayed scaling with a scale of its own, and an amax of 0 so far."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    default = DType.kFloat8E5M2 if name.startswith("d") else DType.kFloat8E4M3
    scale = torch.tensor([SCALES[name]])
    return Float8Quantizer(scale, torch.zeros(1), kind or default, rowwise=True, columnwise=False)


def current_quantizer() -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cpu"), columnwise=False)


def fp8(name: str, *tensors: Tensor) -> list[Any]:
    """FP8 tensors that lie as the high-precision ones do."""
    result = []
    for tensor in tensors:
        codes = cast.quantize(tensor.contiguous(), quantizer(name))._data
        laid_out = torch.empty(0, dtype=torch.uint8).set_(
            torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        laid_out.copy_(codes)
        result.append(float8.new(quantizer(name), BF16, float8.Codes(laid_out, torch.tensor([1 / SCALES[name]]))))
    return result


def forward(layout: NVTE_QKV_Layout, qkv: list[Any], s: Any, o: Any, **options: Any) -> list[Any]:
    arguments = {**OPTIONS, **FORWARD, "s_quantizer": s, "o_quantizer": o, **options}
    return attention.fused_attn_fwd(qkv_layout=layout, Q=qkv[0], K=qkv[1], V=qkv[2], **arguments)


def backward(layout: NVTE_QKV_Layout, qkv: list[Any], o: Any, do: Any, aux: list[Any], **options: Any) -> list[Any]:
    arguments = {**OPTIONS, **BACKWARD, **options}
    tensors = dict(Q=qkv[0], K=qkv[1], V=qkv[2], O=o, dO=do, Aux_CTX_Tensors=aux)
    return attention.fused_attn_bwd(qkv_layout=layout, **tensors, **arguments)


def run(layout: NVTE_QKV_Layout, options: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """O, dQ, dK and dV with delayed scaling throughout, and the quantizers that took part."""
    parsed = attention_problem.parse_layout(layout)
    q, k, v, do = leaves()
    qkv = fp8("qkv", *packed(parsed, to(parsed.query, q), to(parsed.key, k), to(parsed.key, v)))
    quantizers = {name: quantizer(name) for name in ("s", "o", "dp", "dqkv")}
    output, *aux = forward(layout, qkv, quantizers["s"], quantizers["o"], **(options or {}))
    (incoming,) = fp8("do", to(parsed.query, do))
    names = {"s_quantizer": "s", "dp_quantizer": "dp", "dqkv_quantizer": "dqkv"}
    gradients = backward(
        layout, qkv, output, incoming, aux, **{key: quantizers[name] for key, name in names.items()}, **(options or {})
    )
    return [output, *gradients[:3]], quantizers


@pytest.mark.parametrize("layout", PADDED, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_codes_and_amaxes(layout: NVTE_QKV_Layout) -> None:
    expected, expected_quantizers = run(PLAIN)
    results, quantizers = run(layout)
    parsed = attention_problem.parse_layout(layout)
    for got, wanted, name in zip(results, expected, [parsed.query] * 2 + [parsed.key] * 2, strict=True):
        assert torch.equal(back(name, got._data), wanted._data)
    for name, wanted in expected_quantizers.items():
        assert torch.equal(quantizers[name].amax, wanted.amax)


@pytest.mark.parametrize("layout", PADDED, ids=lambda layout: layout.name)
def test_codes_of_gradients_share_a_tensor_where_the_inputs_do(layout: NVTE_QKV_Layout) -> None:
    gradients = run(layout)[0][1:]
    storages = len({gradient._data.untyped_storage().data_ptr() for gradient in gradients})
    assert storages == {"": 3, "2hd": 2, "h2d": 2, "3hd": 1, "h3d": 1}[attention_problem.parse_layout(layout).shared]


def test_results_are_codes_with_the_reciprocals_of_their_scales() -> None:
    (output, *gradients), quantizers = run(PLAIN)
    for tensor, name in ((output, "o"), *((gradient, "dqkv") for gradient in gradients)):
        assert float8.is_float8_tensor(tensor)
        assert tensor.dtype == BF16
        assert tensor._fp8_dtype == quantizers[name].dtype
        assert tensor._scale_inv.item() == pytest.approx(1 / SCALES[name], rel=1e-7)
        assert tensor._transpose is None


def in_fp64(tensor: Any) -> Tensor:
    """``[batch, heads, seq, features]``."""
    return tensor.dequantize(dtype=torch.float32).double().transpose(1, 2)


def exact_pass(lengths: Tensor) -> tuple[oracle.Exact, oracle.Exact]:
    """Forward and backward in FP64 from what the codes stand for; all sequences are causal and of these lengths."""
    (output, *_), _ = run(PLAIN)
    q, k, v = (in_fp64(tensor) for tensor in fp8("qkv", *leaves()[:3]))
    do = in_fp64(fp8("do", leaves()[3])[0])
    is_token = (torch.arange(q.shape[2]) < lengths[:, None]).view(len(lengths), 1, 1, -1)
    seen = visible(q.shape[2], q.shape[2], right=0) & is_token & is_token.mT
    o = in_fp64(output)
    scales = (OPTIONS["attn_scale"], SCALES["s"], SCALES["dp"])
    do = do * is_token.mT
    return oracle.forward(q, k, v, seen, *scales[:2]), oracle.backward(q, k, v, o, do, seen, *scales)


def test_results_are_off_by_no_more_than_their_casts_and_amaxes_are_those_of_fp64() -> None:
    results, quantizers = run(PLAIN)
    fwd, bwd = exact_pass(OPTIONS["cu_seqlens_q"].diff())
    exact, bounds = fwd.values | bwd.values, fwd.bounds | bwd.bounds
    for tensor, name in zip(results, ("o", "dq", "dk", "dv"), strict=True):
        kind = torch.float8_e5m2 if name.startswith("d") else torch.float8_e4m3fn
        own = (exact[name].abs() * oracle.HALF_PLACE[kind]).clamp(min=oracle.HALF_SUBNORMAL[kind] * tensor._scale_inv)
        error = (in_fp64(tensor) - exact[name]).abs()
        # The result is cast after the error of what it was computed from, which it may scale up a little.
        assert (error <= (own + bounds[name]) * (1 + oracle.HALF_PLACE[kind]) + 1e-5).all()
    for name, exact_amax in (("s", fwd.amax), ("dp", bwd.amax)):
        assert quantizers[name].amax.item() == pytest.approx(exact_amax.item(), rel=1e-4)
    for name, of in (("o", ["o"]), ("dqkv", ["dq", "dk", "dv"])):
        largest, bound = (max(tensors[part].abs().amax().item() for part in of) for tensors in (exact, bounds))
        assert abs(quantizers[name].amax.item() - largest) <= bound


def test_an_amax_is_kept_until_a_larger_one_comes() -> None:
    qkv = fp8("qkv", *leaves()[:3])
    s, o = quantizer("s"), quantizer("o")
    s.amax.fill_(7.0)
    forward(PLAIN, qkv, s, o)
    assert s.amax.item() == 7.0
    assert 0 < o.amax.item() < 7


def test_padding_comes_out_as_zero() -> None:
    is_padding = torch.arange(12) >= OPTIONS["cu_seqlens_q"].diff()[:, None]
    for tensor in run(PLAIN)[0]:
        assert not tensor._data[is_padding].any()
        assert tensor._data[~is_padding].any()


def test_with_current_scaling_results_are_bf16_and_the_backward_may_read_o_in_bf16() -> None:
    q, k, v, do = leaves()
    qkv, (incoming,) = fp8("qkv", q, k, v), fp8("do", do)
    output, *aux = forward(PLAIN, qkv, quantizer("s"), current_quantizer())
    quantizers = dict(s_quantizer=quantizer("s"), dp_quantizer=quantizer("dp"), dqkv_quantizer=current_quantizer())
    gradients = backward(PLAIN, qkv, output, incoming, aux, **quantizers)
    assert [tensor.dtype for tensor in (output, *gradients[:3])] == 4 * [BF16]
    fwd, bwd = exact_pass(OPTIONS["cu_seqlens_q"].diff())
    error = (output.double().transpose(1, 2) - fwd.values["o"]).abs()
    assert (error <= fwd.bounds["o"] + fwd.values["o"].abs() * 2**-8 + 1e-5).all()
    error = (gradients[2].double().transpose(1, 2) - bwd.values["dv"]).abs()
    assert (error <= bwd.bounds["dv"] + bwd.values["dv"].abs() * 2**-8 + 1e-5).all()


def test_only_delayed_scaling_casts_probabilities() -> None:
    with pytest.raises(NotImplementedError, match="casts S with delayed scaling, and not with a Float8Current"):
        forward(PLAIN, fp8("qkv", *leaves()[:3]), current_quantizer(), quantizer("o"))


@pytest.mark.parametrize("change", [{"bias_type": NVTE_Bias_Type.NVTE_ALIBI}, {"return_max_logit": True}], ids=str)
def test_there_is_neither_bias_nor_largest_logit_in_fp8(change: dict[str, Any]) -> None:
    options = {"attn_mask_type": NVTE_Mask_Type.NVTE_CAUSAL_MASK, **change}
    with pytest.raises(ValueError, match="neither biases nor the largest logit in FP8"):
        forward(PLAIN, fp8("qkv", *leaves()[:3]), quantizer("s"), quantizer("o"), **options)
