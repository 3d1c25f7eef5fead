"""Fused attention of TE's extension: what cuDNN supports, layouts, pages, FP8, and tensors for the backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attention_oracle as oracle
import pytest
import torch
from attention_oracle import visible
from torch import Tensor

from parity import te
from te_on_cpu import attention, attention_problem, cast, cuda, float8
from te_on_cpu.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

TE = te.kernels("cpu").te
NONE, FUSED = NVTE_Fused_Attn_Backend.NVTE_No_Backend, NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
TRAINING: dict[str, Any] = dict(
    is_training=True,
    qkv_dtype=DType.kBFloat16,
    qkv_layout="BSHD_BSHD_BSHD",
    bias_type="NO_BIAS",
    attn_mask_type="CAUSAL_MASK",
    softmax_type="VANILLA_SOFTMAX",
    dropout=0.0,
    num_attn_heads=8,
    num_gqa_groups=8,
    max_seqlen_q=512,
    max_seqlen_kv=512,
    head_dim_qk=64,
    head_dim_v=64,
    window_size_left=-1,
    window_size_right=0,
    return_max_logit=False,
    cuda_graph=False,
    deterministic=False,
)
ENUMS = dict(
    qkv_layout=NVTE_QKV_Layout, bias_type=NVTE_Bias_Type, attn_mask_type=NVTE_Mask_Type, softmax_type=NVTE_Softmax_Type
)


def configuration(**changes: Any) -> dict[str, Any]:
    values = {**TRAINING, **changes}
    return {name: ENUMS[name][f"NVTE_{value}"] if name in ENUMS else value for name, value in values.items()}


def answer(**changes: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Return the backend and the reason, which TE 2.20 asks for with one configuration object."""
    result = attention.get_fused_attn_backend(SimpleNamespace(**configuration(**changes)))
    assert isinstance(result, tuple)
    return result


def on(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: (major, minor))


def inference(**changes: Any) -> dict[str, Any]:
    return dict(is_training=False, **changes)


SERVED = [
    dict(),
    dict(qkv_dtype=DType.kFloat16),
    dict(num_gqa_groups=1),
    dict(softmax_type="LEARNABLE_SOFTMAX"),
    dict(return_max_logit=True),
    dict(dropout=0.1),
    dict(bias_type="POST_SCALE_BIAS"),
    dict(bias_type="ALIBI"),
    dict(attn_mask_type="NO_MASK", window_size_right=-1),
    dict(attn_mask_type="PADDING_MASK", window_size_right=-1),
    dict(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD"),
    dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=100),
    dict(window_size_left=128),
    dict(attn_mask_type="PADDING_MASK", window_size_left=5, window_size_right=3),
    dict(head_dim_qk=256, head_dim_v=256),
    dict(head_dim_qk=192, head_dim_v=128),
    dict(head_dim_qk=40, head_dim_v=24),
    inference(head_dim_qk=512, head_dim_v=320),
    inference(attn_mask_type="PADDING_CAUSAL_BOTTOM_RIGHT_MASK", qkv_layout="Paged_KV_THD_BSHD_BSHD", max_seqlen_q=1),
]
REFUSED = [
    (dict(qkv_dtype=DType.kFloat32), "FP16, BF16 and FP8"),
    (dict(head_dim_qk=60), "head dimensions 60"),
    (dict(head_dim_qk=264, head_dim_v=264), "head dimensions 264"),
    (dict(head_dim_qk=256, head_dim_v=128), "head dimensions 256"),
    (dict(qkv_layout="THD_THD_THD"), "padding mask"),
    (dict(qkv_layout="BHSD_BHSD_BHSD"), "only FP8 attention"),
    (dict(qkv_layout="Paged_KV_BSHD_BSHD_BSHD"), "padding mask"),
    (dict(bias_type="PRE_SCALE_BIAS"), "before scaling"),
    (dict(bias_type="POST_SCALE_BIAS", attn_mask_type="PADDING_CAUSAL_MASK"), "together with padding"),
    (dict(bias_type="ALIBI", attn_mask_type="NO_MASK"), "ALiBi needs a causal mask"),
    (dict(bias_type="ALIBI", attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=64), "where cuDNN's ALiBi starts"),
    (dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=513), "at least as many keys"),
    (dict(window_size_left=4, dropout=0.1), "neither bias nor dropout"),
    (dict(window_size_left=4, max_seqlen_q=513), "at least as many keys"),
    (dict(attn_mask_type="NO_MASK", window_size_left=4, window_size_right=4), "end at the diagonal"),
    (dict(cuda_graph=True, max_seqlen_kv=500), "multiples of 128"),
    (inference(head_dim_qk=512, head_dim_v=512, max_seqlen_q=1), "head dimensions 512"),
]


FP8: dict[str, Any] = dict(qkv_dtype=DType.kFloat8E4M3, head_dim_qk=128, head_dim_v=128)
REFUSED_IN_FP8 = [
    (dict(head_dim_qk=64, head_dim_v=64), "head dimensions 64"),
    (dict(head_dim_qk=40, head_dim_v=40), "head dimensions 40"),
    (inference(head_dim_qk=272, head_dim_v=272), "head dimensions 272"),
    (dict(bias_type="ALIBI"), "does not support a bias"),
    (dict(softmax_type="OFF_BY_ONE_SOFTMAX"), "does not support softmax sinks"),
    (dict(return_max_logit=True), "largest logit"),
    (dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK"), "aligned top left"),
    (dict(attn_mask_type="PADDING_MASK", qkv_layout="THD_THD_THD"), "same format"),
    (inference(attn_mask_type="PADDING_MASK", qkv_layout="Paged_KV_BSHD_SBHD_SBHD"), "same format"),
]


@pytest.mark.parametrize("changes", SERVED, ids=str)
def test_hopper_serves(changes: dict[str, Any]) -> None:
    assert answer(**changes) == (FUSED, "")


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=str)
def test_hopper_refuses_and_says_why(changes: dict[str, Any], reason: str) -> None:
    backend, why = answer(**changes)
    assert backend == NONE
    assert reason in why


@pytest.mark.parametrize("mask", ["NO_MASK", "CAUSAL_MASK", "PADDING_MASK", "PADDING_CAUSAL_MASK"])
@pytest.mark.parametrize("changes", [{}, {"num_gqa_groups": 2}, inference(head_dim_qk=256, head_dim_v=64)], ids=str)
def test_hopper_serves_fp8(mask: str, changes: dict[str, Any]) -> None:
    assert answer(attn_mask_type=mask, **{**FP8, **changes}) == (NVTE_Fused_Attn_Backend.NVTE_FP8, "")


@pytest.mark.parametrize(("changes", "reason"), REFUSED_IN_FP8, ids=str)
def test_hopper_refuses_in_fp8_and_says_why(changes: dict[str, Any], reason: str) -> None:
    backend, why = answer(**{**FP8, **changes})
    assert backend == NONE
    assert reason in why


def test_ada_has_no_fp8_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 8, 9)
    assert answer(**FP8) == (NONE, "FP8 attention needs compute capability 9.0, and the GPU has 8.9")


def test_blackwell_trains_in_fp8_with_heads_up_to_128(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 10, 0)
    assert answer(**{**FP8, "head_dim_qk": 64, "head_dim_v": 48})[0] == NVTE_Fused_Attn_Backend.NVTE_FP8
    assert answer(**{**FP8, **inference(head_dim_qk=144, head_dim_v=144)})[0] == NONE


def test_an_older_te_passes_each_property_and_gets_the_backend_alone() -> None:
    for changes, expected in ((dict(), FUSED), (dict(head_dim_qk=60), NONE)):
        values = list(configuration(**changes).values())
        assert attention.get_fused_attn_backend(*values[:2], DType.kBFloat16, *values[2:]) == expected


def test_ada_has_no_packed_sequences_and_heads_up_to_128(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 8, 9)
    assert answer()[0] == FUSED
    assert answer(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD")[0] == NONE
    assert answer(head_dim_qk=256, head_dim_v=256)[0] == NONE
    assert answer(bias_type="ALIBI")[0] == NONE


def test_blackwell_has_no_deterministic_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 10, 0)
    assert answer(dropout=0.1)[0] == FUSED
    assert answer(deterministic=True)[0] == NONE
    assert answer(**inference(deterministic=True))[0] == FUSED
    assert answer(dropout=0.1, bias_type="POST_SCALE_BIAS")[0] == NONE


def test_turing_has_no_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 7, 5)
    assert answer() == (NONE, "fused attention needs compute capability 8.0, and the GPU has 7.5")


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BATCH, SEQ, HEADS, FEATURES = 3, 12, 4, 8
LENGTHS = torch.tensor([0, 12, 17, 26], dtype=torch.int32)
IS_TOKEN = torch.arange(SEQ) < LENGTHS.diff()[:, None]
OPTIONS: dict[str, Any] = dict(
    max_seqlen_q=SEQ,
    max_seqlen_kv=SEQ,
    attn_scale=0.3,
    p_dropout=0.0,
    set_zero=True,
    o_format=NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
    qkv_scale_inv_format=NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
    bias_type=NVTE_Bias_Type.NVTE_NO_BIAS,
    attn_mask_type=NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    softmax_type=NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    window_size=(-1, 0),
    bottom_right_diagonal=False,
    cu_seqlens_q=LENGTHS,
    cu_seqlens_kv=LENGTHS,
    fake_dtype=BF16,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    s_quantizer=None,
    cuda_graph=False,
)
FORWARD: dict[str, Any] = dict(
    is_training=True,
    page_table_k=None,
    page_table_v=None,
    o_quantizer=None,
    Bias=None,
    SoftmaxOffset=None,
    rng_gen=None,
    rng_elts_per_thread=16,
    return_max_logit=False,
)
BACKWARD: dict[str, Any] = dict(
    do_format=NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
    dqkv_layout=NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET,
    do_scale_inv_format=NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
    deterministic=False,
    dp_quantizer=None,
    dqkv_quantizer=None,
)
LAYOUTS = [
    layout for layout in NVTE_QKV_Layout if not any(part in layout.name for part in ("NOT_SET", "Paged", "BHSD"))
]


def forward(layout: NVTE_QKV_Layout, q: Any, k: Any, v: Any, **options: Any) -> list[Any]:
    return attention.fused_attn_fwd(qkv_layout=layout, Q=q, K=k, V=v, **{**OPTIONS, **FORWARD, **options})


def backward(layout: NVTE_QKV_Layout, qkv: list[Any], o: Any, do: Any, aux: list[Any], **options: Any) -> list[Any]:
    q, k, v = qkv
    return attention.fused_attn_bwd(
        qkv_layout=layout, Q=q, K=k, V=v, O=o, dO=do, Aux_CTX_Tensors=aux, **{**OPTIONS, **BACKWARD, **options}
    )


def leaves() -> list[Tensor]:
    """Return query, key, value and output gradient, each ``[batch, seq, heads, features]``."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, SEQ, HEADS, FEATURES, generator=rng).to(BF16) for _ in range(4)]


def to(name: str, tensor: Tensor) -> Tensor:
    """Return a ``bshd`` tensor in another format."""
    if name == "thd":
        return tensor[IS_TOKEN]
    return (tensor.transpose(0, 1) if name == "sbhd" else tensor).contiguous()


def back(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of that format as ``bshd``."""
    if name == "thd":
        return tensor.new_zeros(BATCH, SEQ, *tensor.shape[1:]).masked_scatter_(IS_TOKEN[:, :, None, None], tensor)
    return tensor.transpose(0, 1) if name == "sbhd" else tensor


def packed(layout: attention_problem.Layout, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return Q, K and V arranged in memory as the layout says."""
    axis = -3 if layout.shared.endswith("hd") else -2
    if "3" in layout.shared:
        return list(torch.stack([q, k, v], axis).unbind(axis))
    if "2" in layout.shared:
        return [q, *torch.stack([k, v], axis).unbind(axis)]
    return [q, k, v]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_bits(layout: NVTE_QKV_Layout) -> None:
    parsed = attention_problem.parse_layout(layout)
    q, k, v, do = leaves()
    plain = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    o, *aux = forward(plain, q, k, v)
    expected = [o, *backward(plain, [q, k, v], o, do, aux)[:3]]
    qkv = packed(parsed, to(parsed.query, q), to(parsed.key, k), to(parsed.key, v))
    output, *other_aux = forward(layout, *qkv)
    gradients = backward(layout, qkv, output, to(parsed.query, do), other_aux)
    formats = [parsed.query, parsed.query, parsed.key, parsed.key]
    for got, wanted, name in zip([output, *gradients[:3]], expected, formats, strict=True):
        assert torch.equal(back(name, got), wanted)
    assert [gradient.shape for gradient in gradients[:3]] == [tensor.shape for tensor in qkv]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gradients_share_a_tensor_where_the_inputs_do(layout: NVTE_QKV_Layout) -> None:
    parsed = attention_problem.parse_layout(layout)
    q, k, v, do = leaves()
    qkv = packed(parsed, to(parsed.query, q), to(parsed.key, k), to(parsed.key, v))
    output, *aux = forward(layout, *qkv)
    gradients = backward(layout, qkv, output, to(parsed.query, do), aux)[:3]
    storages = len({gradient.untyped_storage().data_ptr() for gradient in gradients})
    assert storages == {"": 3, "2hd": 2, "h2d": 2, "3hd": 1, "h3d": 1}[parsed.shared]
    assert [gradient.stride() for gradient in gradients] == [tensor.stride() for tensor in qkv]


@pytest.mark.parametrize("name", [layout.name for layout in NVTE_QKV_Layout if "Paged" in layout.name])
def test_keys_on_pages_give_the_same_bits(name: str) -> None:
    layout = attention_problem.parse_layout(NVTE_QKV_Layout[name])
    q, k, v, _ = leaves()
    table = torch.tensor([[4, 0, 7], [2, 8, 1], [5, 3, 6]], dtype=torch.int32)
    caches = []
    for tensor in (k, v):
        cache = torch.full((9, 4, HEADS, FEATURES), float("nan")).to(BF16)
        cache[table.flatten().long()] = tensor.reshape(9, 4, HEADS, FEATURES)
        caches.append(to(layout.key, cache))
    expected = forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, q, k, v)[0]
    pages = dict(page_table_k=table, page_table_v=table)
    output = forward(NVTE_QKV_Layout[name], to(layout.query, q), *caches, is_training=False, **pages)[0]
    assert torch.equal(back(layout.query, output), expected)


def test_the_forward_returns_what_the_backward_needs_in_te_order_and_shapes() -> None:
    q, k, v, _ = leaves()
    layout = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    bias, sink = torch.zeros(1, HEADS, SEQ, SEQ).to(BF16), torch.zeros(1, HEADS, 1, 1)
    o, lse, largest, rng_state, *rest = forward(
        layout,
        q,
        k,
        v,
        attn_mask_type=NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        bias_type=NVTE_Bias_Type.NVTE_POST_SCALE_BIAS,
        softmax_type=NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX,
        Bias=bias,
        SoftmaxOffset=sink,
        return_max_logit=True,
    )
    assert (o.shape, o.dtype) == (q.shape, BF16)
    assert lse.shape == largest.shape == (BATCH, HEADS, SEQ, 1)
    assert lse.dtype == largest.dtype == FP32
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    assert [tensor.data_ptr() for tensor in rest] == [bias.data_ptr(), sink.data_ptr()]


def test_packed_sequences_have_statistics_for_each_token() -> None:
    q, k, v, _ = leaves()
    padded = forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, q, k, v)[1]
    ragged = forward(NVTE_QKV_Layout.NVTE_THD_THD_THD, *(to("thd", tensor) for tensor in (q, k, v)))[1]
    assert ragged.shape == (26, HEADS, 1)
    assert torch.equal(ragged, padded.transpose(1, 2)[IS_TOKEN])
    assert (padded.transpose(1, 2)[~IS_TOKEN] == -torch.inf).all()


def test_without_dropout_the_generator_of_the_user_is_left_alone() -> None:
    before = torch.get_rng_state()
    rng_state = forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, *leaves()[:3])[-1]
    assert torch.equal(torch.get_rng_state(), before)
    assert rng_state.tolist() == [0, 0]


def test_dropout_draws_its_seed_from_the_generator_given() -> None:
    states = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        states.append(forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, *leaves()[:3], p_dropout=0.5, rng_gen=generator)[-1])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.float(), ValueError, "Q is torch.float32; cuDNN's fused attention takes FP16, BF16 and FP8"),
        (
            lambda t: object(),
            NotImplementedError,
            "supports FP16, BF16 and FP8 with one scale per tensor, but TransformerEngine .* passed a object as Q",
        ),
    ],
)
def test_what_cudnn_does_not_take_is_refused(change: Any, error: type[Exception], message: str) -> None:
    q, k, v, _ = leaves()
    with pytest.raises(error, match=message):
        forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, change(q), k, v)


def test_a_bias_before_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot add a bias before scaling"):
        forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, *leaves()[:3], bias_type=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS)


def test_a_layout_that_is_not_set_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a layout"):
        attention_problem.parse_layout(NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET)


PADDED = [layout for layout in LAYOUTS if "T" not in layout.name.split("_")[1]]
PLAIN = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
SCALES = {"qkv": 64.0, "s": 300.0, "o": 150.0, "do": 1000.0, "dp": 2000.0, "dqkv": 700.0}


def delayed_quantizer(name: str, kind: DType | None = None) -> Any:
    """Return a quantizer for delayed scaling with a scale of its own and an amax of 0 so far."""
    default = DType.kFloat8E5M2 if name.startswith("d") else DType.kFloat8E4M3
    scale = torch.tensor([SCALES[name]])
    return TE.Float8Quantizer(scale, torch.zeros(1), kind or default, rowwise=True, columnwise=False)


def current_quantizer() -> Any:
    return TE.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cpu"), columnwise=False)


def fp8(name: str, *tensors: Tensor) -> list[Any]:
    """Return FP8 tensors with the memory layout of the high-precision ones."""
    result = []
    for tensor in tensors:
        codes = cast.quantize(tensor.contiguous(), delayed_quantizer(name))._data
        laid_out = torch.empty(0, dtype=torch.uint8).set_(
            torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        laid_out.copy_(codes)
        result.append(
            float8.new(delayed_quantizer(name), BF16, float8.Codes(laid_out, torch.tensor([1 / SCALES[name]])))
        )
    return result


def fp8_pass(layout: NVTE_QKV_Layout) -> tuple[list[Any], dict[str, Any]]:
    """Return O, dQ, dK and dV with delayed scaling throughout, and the quantizers used."""
    parsed = attention_problem.parse_layout(layout)
    q, k, v, do = leaves()
    qkv = fp8("qkv", *packed(parsed, to(parsed.query, q), to(parsed.key, k), to(parsed.key, v)))
    s, o, dp, dqkv = (delayed_quantizer(name) for name in ("s", "o", "dp", "dqkv"))
    output, *aux = forward(layout, *qkv, s_quantizer=s, o_quantizer=o)
    (incoming,) = fp8("do", to(parsed.query, do))
    gradients = backward(layout, qkv, output, incoming, aux, s_quantizer=s, dp_quantizer=dp, dqkv_quantizer=dqkv)
    return [output, *gradients[:3]], dict(s=s, o=o, dp=dp, dqkv=dqkv)


@pytest.mark.parametrize("layout", PADDED, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_codes_and_amaxes(layout: NVTE_QKV_Layout) -> None:
    expected, expected_quantizers = fp8_pass(PLAIN)
    results, quantizers = fp8_pass(layout)
    parsed = attention_problem.parse_layout(layout)
    for got, wanted, name in zip(results, expected, [parsed.query] * 2 + [parsed.key] * 2, strict=True):
        assert torch.equal(back(name, got._data), wanted._data)
    for name, wanted in expected_quantizers.items():
        assert torch.equal(quantizers[name].amax, wanted.amax)


@pytest.mark.parametrize("layout", PADDED, ids=lambda layout: layout.name)
def test_codes_of_gradients_share_a_tensor_where_the_inputs_do(layout: NVTE_QKV_Layout) -> None:
    gradients = fp8_pass(layout)[0][1:]
    storages = len({gradient._data.untyped_storage().data_ptr() for gradient in gradients})
    assert storages == {"": 3, "2hd": 2, "h2d": 2, "3hd": 1, "h3d": 1}[attention_problem.parse_layout(layout).shared]


def test_results_are_codes_with_the_reciprocals_of_their_scales() -> None:
    (output, *gradients), quantizers = fp8_pass(PLAIN)
    for tensor, name in ((output, "o"), *((gradient, "dqkv") for gradient in gradients)):
        assert float8.is_float8_tensor(tensor)
        assert tensor.dtype == BF16
        assert tensor._fp8_dtype == quantizers[name].dtype
        assert tensor._scale_inv.item() == pytest.approx(1 / SCALES[name], rel=1e-7)
        assert tensor._transpose is None


def in_fp64(tensor: Any) -> Tensor:
    """Return the values as ``[batch, heads, seq, features]``."""
    return tensor.dequantize(dtype=torch.float32).double().transpose(1, 2)


def exact_pass(lengths: Tensor) -> tuple[oracle.Exact, oracle.Exact]:
    """Return both passes in FP64 from the values of the FP8 codes, with causal sequences of these lengths."""
    (output, *_), _ = fp8_pass(PLAIN)
    q, k, v = (in_fp64(tensor) for tensor in fp8("qkv", *leaves()[:3]))
    do = in_fp64(fp8("do", leaves()[3])[0])
    is_token = (torch.arange(q.shape[2]) < lengths[:, None]).view(len(lengths), 1, 1, -1)
    seen = visible(q.shape[2], q.shape[2], right=0) & is_token & is_token.mT
    o = in_fp64(output)
    scales = (OPTIONS["attn_scale"], SCALES["s"], SCALES["dp"])
    do = do * is_token.mT
    return oracle.forward(q, k, v, seen, *scales[:2]), oracle.backward(q, k, v, o, do, seen, *scales)


def test_results_are_off_by_no_more_than_their_casts_and_amaxes_are_those_of_fp64() -> None:
    results, quantizers = fp8_pass(PLAIN)
    fwd, bwd = exact_pass(OPTIONS["cu_seqlens_q"].diff())
    exact, bounds = fwd.values | bwd.values, fwd.bounds | bwd.bounds
    for tensor, name in zip(results, ("o", "dq", "dk", "dv"), strict=True):
        kind = torch.float8_e5m2 if name.startswith("d") else torch.float8_e4m3fn
        own = (exact[name].abs() * oracle.HALF_PLACE[kind]).clamp(min=oracle.HALF_SUBNORMAL[kind] * tensor._scale_inv)
        error = (in_fp64(tensor) - exact[name]).abs()
        # The cast of the result may enlarge the errors made before it a little.
        assert (error <= (own + bounds[name]) * (1 + oracle.HALF_PLACE[kind]) + 1e-5).all()
    for name, exact_amax in (("s", fwd.amax), ("dp", bwd.amax)):
        assert quantizers[name].amax.item() == pytest.approx(exact_amax.item(), rel=1e-4)
    for name, of in (("o", ["o"]), ("dqkv", ["dq", "dk", "dv"])):
        largest, bound = (max(tensors[part].abs().amax().item() for part in of) for tensors in (exact, bounds))
        assert abs(quantizers[name].amax.item() - largest) <= bound


def test_an_amax_is_kept_until_a_larger_one_comes() -> None:
    qkv = fp8("qkv", *leaves()[:3])
    s, o = delayed_quantizer("s"), delayed_quantizer("o")
    s.amax.fill_(7.0)
    forward(PLAIN, *qkv, s_quantizer=s, o_quantizer=o)
    assert s.amax.item() == 7.0
    assert 0 < o.amax.item() < 7


def test_padding_comes_out_as_zero() -> None:
    is_padding = torch.arange(12) >= OPTIONS["cu_seqlens_q"].diff()[:, None]
    for tensor in fp8_pass(PLAIN)[0]:
        assert not tensor._data[is_padding].any()
        assert tensor._data[~is_padding].any()


def test_with_current_scaling_results_are_bf16_and_the_backward_may_read_o_in_bf16() -> None:
    q, k, v, do = leaves()
    qkv, (incoming,) = fp8("qkv", q, k, v), fp8("do", do)
    output, *aux = forward(PLAIN, *qkv, s_quantizer=delayed_quantizer("s"), o_quantizer=current_quantizer())
    quantizers = dict(
        s_quantizer=delayed_quantizer("s"), dp_quantizer=delayed_quantizer("dp"), dqkv_quantizer=current_quantizer()
    )
    gradients = backward(PLAIN, qkv, output, incoming, aux, **quantizers)
    assert [tensor.dtype for tensor in (output, *gradients[:3])] == 4 * [BF16]
    fwd, bwd = exact_pass(OPTIONS["cu_seqlens_q"].diff())
    error = (output.double().transpose(1, 2) - fwd.values["o"]).abs()
    assert (error <= fwd.bounds["o"] + fwd.values["o"].abs() * 2**-8 + 1e-5).all()
    error = (gradients[2].double().transpose(1, 2) - bwd.values["dv"]).abs()
    assert (error <= bwd.bounds["dv"] + bwd.values["dv"].abs() * 2**-8 + 1e-5).all()


def test_only_delayed_scaling_casts_probabilities() -> None:
    with pytest.raises(NotImplementedError, match="casts S with delayed scaling, and not with a Float8Current"):
        forward(PLAIN, *fp8("qkv", *leaves()[:3]), s_quantizer=current_quantizer(), o_quantizer=delayed_quantizer("o"))


@pytest.mark.parametrize("change", [{"bias_type": NVTE_Bias_Type.NVTE_ALIBI}, {"return_max_logit": True}], ids=str)
def test_there_is_neither_bias_nor_largest_logit_in_fp8(change: dict[str, Any]) -> None:
    options = {"attn_mask_type": NVTE_Mask_Type.NVTE_CAUSAL_MASK, **change}
    quantizers = dict(s_quantizer=delayed_quantizer("s"), o_quantizer=delayed_quantizer("o"))
    with pytest.raises(ValueError, match="supports neither a bias nor returning the largest logit"):
        forward(PLAIN, *fp8("qkv", *leaves()[:3]), **quantizers, **options)
