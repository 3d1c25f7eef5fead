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


def inference(**changes: Any) -> dict[str, Any]:
    return dict(is_training=False, **changes)


FP8: dict[str, Any] = dict(qkv_dtype=DType.kFloat8E4M3, head_dim_qk=128, head_dim_v=128)


def in_fp8(**changes: Any) -> dict[str, Any]:
    return {**FP8, **changes}


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


SERVED_IN_FP8 = [
    *(in_fp8(attn_mask_type=mask) for mask in ("NO_MASK", "CAUSAL_MASK", "PADDING_MASK", "PADDING_CAUSAL_MASK")),
    in_fp8(num_gqa_groups=2),
    in_fp8(**inference(head_dim_qk=256, head_dim_v=64)),
]


@pytest.mark.parametrize("changes", [*SERVED, *SERVED_IN_FP8], ids=str)
def test_hopper_serves(changes: dict[str, Any]) -> None:
    expected = NVTE_Fused_Attn_Backend.NVTE_FP8 if changes.get("qkv_dtype") == DType.kFloat8E4M3 else FUSED
    assert answer(**changes) == (expected, "")


@pytest.mark.parametrize(
    ("changes", "reason"), [*REFUSED, *((in_fp8(**changes), why) for changes, why in REFUSED_IN_FP8)], ids=str
)
def test_hopper_refuses_and_says_why(changes: dict[str, Any], reason: str) -> None:
    backend, why = answer(**changes)
    assert backend == NONE
    assert reason in why


def test_an_older_te_passes_each_property_and_gets_the_backend_alone() -> None:
    for changes, expected in ((dict(), FUSED), (dict(head_dim_qk=60), NONE)):
        values = list(configuration(**changes).values())
        assert attention.get_fused_attn_backend(*values[:2], DType.kBFloat16, *values[2:]) == expected


# Compute capability, configuration, and whether the GPU serves it or what it says.
OTHER_GPUS = [
    ((7, 5), {}, "fused attention needs compute capability 8.0, and the GPU has 7.5"),
    ((8, 9), {}, True),
    ((8, 9), FP8, "FP8 attention needs compute capability 9.0, and the GPU has 8.9"),
    ((8, 9), dict(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD"), False),
    ((8, 9), dict(head_dim_qk=256, head_dim_v=256), False),
    ((8, 9), dict(bias_type="ALIBI"), False),
    # A Blackwell trains in FP8 with heads of any size up to 128, and has no deterministic backward.
    ((10, 0), in_fp8(head_dim_qk=64, head_dim_v=48), True),
    ((10, 0), in_fp8(**inference(head_dim_qk=144, head_dim_v=144)), False),
    ((10, 0), dict(dropout=0.1), True),
    ((10, 0), dict(deterministic=True), False),
    ((10, 0), inference(deterministic=True), True),
    ((10, 0), dict(dropout=0.1, bias_type="POST_SCALE_BIAS"), False),
    ((12, 0), {}, "on an RTX Blackwell, fused attention needs cuDNN 9.18.1"),
]
# Compute capability, configuration, and whether the GPU serves it with cuDNN 9.18.1.
WITH_CUDNN_9_18_1 = [
    ((10, 0), dict(deterministic=True), True),
    ((10, 0), dict(deterministic=True, dropout=0.1), False),
    ((12, 0), {}, True),
    ((12, 0), dict(deterministic=True), False),
    ((12, 0), inference(deterministic=True), True),
    ((12, 0), dict(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="THD_T2HD"), True),
    ((12, 0), dict(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD"), False),
]


@pytest.mark.parametrize(("capability", "changes", "expected"), OTHER_GPUS, ids=str)
def test_other_gpus_serve_less(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], changes: dict[str, Any], expected: bool | str
) -> None:
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: capability)
    backend, why = answer(**changes)
    assert (backend != NONE) == (expected is True)
    assert not isinstance(expected, str) or why == expected


@pytest.mark.parametrize(("capability", "changes", "is_served"), WITH_CUDNN_9_18_1, ids=str)
def test_blackwells_serve_more_with_a_newer_cudnn(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], changes: dict[str, Any], is_served: bool
) -> None:
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(cuda, "cudnn_version", lambda: 91801)
    assert (answer(**changes)[0] != NONE) == is_served


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


PLAIN = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
STORAGES = {"": 3, "2hd": 2, "h2d": 2, "3hd": 1, "h3d": 1}


def count_storages(tensors: list[Tensor]) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


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


def plain_pass() -> list[Tensor]:
    """Return output and gradients of tensors that lie apart."""
    q, k, v, do = leaves()
    o, *aux = forward(PLAIN, q, k, v)
    return [o, *backward(PLAIN, [q, k, v], o, do, aux)[:3]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_bits_with_gradients_that_lie_as_the_inputs_do(layout: NVTE_QKV_Layout) -> None:
    parsed = attention_problem.parse_layout(layout)
    q, k, v, do = leaves()
    qkv = packed(parsed, to(parsed.query, q), to(parsed.key, k), to(parsed.key, v))
    output, *aux = forward(layout, *qkv)
    gradients = backward(layout, qkv, output, to(parsed.query, do), aux)[:3]
    formats = [parsed.query, parsed.query, parsed.key, parsed.key]
    for got, wanted, name in zip([output, *gradients], plain_pass(), formats, strict=True):
        assert torch.equal(back(name, got), wanted)
    assert [(gradient.shape, gradient.stride()) for gradient in gradients] == [(x.shape, x.stride()) for x in qkv]
    assert count_storages(gradients) == STORAGES[parsed.shared]


def test_an_rtx_blackwell_pads_the_statistics_of_packed_sequences() -> None:
    layout = NVTE_QKV_Layout.NVTE_THD_THD_THD
    q, k, v, do = (to("thd", tensor) for tensor in leaves())
    output, *aux = forward(layout, q, k, v)
    expected = [output, *backward(layout, [q, k, v], output, do, aux)[:3]]
    with cuda.emulated(cuda.RTX_BLACKWELL):
        output, *padded = forward(layout, q, k, v)
        found = [output, *backward(layout, [q, k, v], output, do, padded)[:3]]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(padded[0].transpose(1, 2)[IS_TOKEN], aux[0])
    assert (padded[0].transpose(1, 2)[~IS_TOKEN] == float("-inf")).all()


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
    expected = forward(PLAIN, q, k, v)[0]
    pages = dict(page_table_k=table, page_table_v=table)
    output = forward(NVTE_QKV_Layout[name], to(layout.query, q), *caches, is_training=False, **pages)[0]
    assert torch.equal(back(layout.query, output), expected)


def test_the_forward_returns_what_the_backward_needs_in_te_order_and_shapes() -> None:
    q, k, v, _ = leaves()
    bias, sink = torch.zeros(1, HEADS, SEQ, SEQ).to(BF16), torch.zeros(1, HEADS, 1, 1)
    o, lse, largest, rng_state, *rest = forward(
        PLAIN,
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
    padded = forward(PLAIN, q, k, v)[1]
    ragged = forward(NVTE_QKV_Layout.NVTE_THD_THD_THD, *(to("thd", tensor) for tensor in (q, k, v)))[1]
    assert ragged.shape == (26, HEADS, 1)
    assert torch.equal(ragged, padded.transpose(1, 2)[IS_TOKEN])
    assert (padded.transpose(1, 2)[~IS_TOKEN] == -torch.inf).all()


def test_without_dropout_the_generator_of_the_user_is_left_alone() -> None:
    before = torch.get_rng_state()
    rng_state = forward(PLAIN, *leaves()[:3])[-1]
    assert torch.equal(torch.get_rng_state(), before)
    assert rng_state.tolist() == [0, 0]


def test_dropout_draws_its_seed_from_the_generator_given() -> None:
    states = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        states.append(forward(PLAIN, *leaves()[:3], p_dropout=0.5, rng_gen=generator)[-1])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (Tensor.float, {}, ValueError, "Q is torch.float32; cuDNN's fused attention takes FP16, BF16 and FP8"),
        (
            lambda t: object(),
            {},
            NotImplementedError,
            "supports FP16, BF16, MXFP8 and FP8 with one scale per tensor, but .* passed a object as Q",
        ),
        (
            lambda t: t,
            {"bias_type": NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS},
            ValueError,
            "cannot add a bias before scaling",
        ),
        (lambda t: t, {"qkv_layout": NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET}, ValueError, "needs a layout"),
    ],
)
def test_what_cudnn_does_not_take_is_refused(
    change: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v, _ = leaves()
    layout = options.pop("qkv_layout", PLAIN)
    with pytest.raises(error, match=message):
        forward(layout, change(q), k, v, **options)


PADDED = [layout for layout in LAYOUTS if "T" not in layout.name.split("_")[1]]
SCALES = {"qkv": 64.0, "s": 300.0, "o": 150.0, "do": 1000.0, "dp": 2000.0, "dqkv": 700.0}


def delayed_quantizer(name: str) -> Any:
    """Return a quantizer for delayed scaling with a scale of its own and an amax of 0 so far."""
    kind = DType.kFloat8E5M2 if name.startswith("d") else DType.kFloat8E4M3
    scale = torch.tensor([SCALES[name]])
    return TE.Float8Quantizer(scale, torch.zeros(1), kind, rowwise=True, columnwise=False)


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
    assert count_storages([gradient._data for gradient in results[1:]]) == STORAGES[parsed.shared]


def test_results_are_codes_with_the_reciprocals_of_their_scales_and_zeros_for_padding() -> None:
    (output, *gradients), quantizers = fp8_pass(PLAIN)
    for tensor, name in ((output, "o"), *((gradient, "dqkv") for gradient in gradients)):
        assert float8.is_float8_tensor(tensor)
        assert tensor.dtype == BF16
        assert tensor._fp8_dtype == quantizers[name].dtype
        assert tensor._scale_inv.item() == pytest.approx(1 / SCALES[name], rel=1e-7)
        assert tensor._transpose is None
        assert not tensor._data[~IS_TOKEN].any()
        assert tensor._data[IS_TOKEN].any()


def in_fp64(tensor: Any) -> Tensor:
    """Return the values as ``[batch, heads, seq, features]``."""
    return tensor.dequantize(dtype=torch.float32).double().transpose(1, 2)


def exact_pass() -> tuple[oracle.Exact, oracle.Exact]:
    """Return both passes in FP64 from the values of the FP8 codes."""
    q, k, v, do, o = (in_fp64(x) for x in (*fp8("qkv", *leaves()[:3]), *fp8("do", leaves()[3]), fp8_pass(PLAIN)[0][0]))
    is_token = IS_TOKEN[:, None, None, :]
    seen = visible(SEQ, SEQ, right=0) & is_token & is_token.mT
    scales = (OPTIONS["attn_scale"], SCALES["s"], SCALES["dp"])
    return oracle.forward(q, k, v, seen, *scales[:2]), oracle.backward(q, k, v, o, do * is_token.mT, seen, *scales)


def test_results_are_off_by_no_more_than_their_casts_and_amaxes_are_those_of_fp64() -> None:
    results, quantizers = fp8_pass(PLAIN)
    fwd, bwd = exact_pass()
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


def test_with_current_scaling_results_are_bf16_and_the_backward_may_read_o_in_bf16() -> None:
    q, k, v, do = leaves()
    qkv, (incoming,) = fp8("qkv", q, k, v), fp8("do", do)
    s, dp, current = delayed_quantizer("s"), delayed_quantizer("dp"), current_quantizer()
    output, *aux = forward(PLAIN, *qkv, s_quantizer=s, o_quantizer=current)
    gradients = backward(PLAIN, qkv, output, incoming, aux, s_quantizer=s, dp_quantizer=dp, dqkv_quantizer=current)
    assert [tensor.dtype for tensor in (output, *gradients[:3])] == 4 * [BF16]
    for tensor, exact, name in zip((output, gradients[2]), exact_pass(), ("o", "dv"), strict=True):
        error = (tensor.double().transpose(1, 2) - exact.values[name]).abs()
        assert (error <= exact.bounds[name] + exact.values[name].abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bias_type": NVTE_Bias_Type.NVTE_ALIBI}, ValueError, "supports neither a bias nor returning the largest"),
        ({"return_max_logit": True}, ValueError, "supports neither a bias nor returning the largest logit"),
        (
            {"s_quantizer": current_quantizer()},
            RuntimeError,
            "the quantizer of S is a Float8CurrentScalingQuantizer, which has neither",
        ),
    ],
)
def test_what_fp8_attention_does_not_do_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    quantizers = dict(s_quantizer=delayed_quantizer("s"), o_quantizer=delayed_quantizer("o"))
    options = {"attn_mask_type": NVTE_Mask_Type.NVTE_CAUSAL_MASK, **quantizers, **change}
    with pytest.raises(error, match=message):
        forward(PLAIN, *fp8("qkv", *leaves()[:3]), **options)
