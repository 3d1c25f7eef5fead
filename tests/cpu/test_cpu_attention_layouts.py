"""``fused_attn_fwd`` and ``fused_attn_bwd`` as TE's extension: layouts, pages, and the tensors between the two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.cpu import attention, attention_problem
from parity.cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

BF16, FP32 = torch.bfloat16, torch.float32
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


def forward(layout: NVTE_QKV_Layout, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    return attention.fused_attn_fwd(qkv_layout=layout, Q=q, K=k, V=v, **{**OPTIONS, **FORWARD, **options})


def backward(
    layout: NVTE_QKV_Layout, qkv: list[Tensor], o: Tensor, do: Tensor, aux: list[Tensor], **options: Any
) -> list[Any]:
    q, k, v = qkv
    return attention.fused_attn_bwd(
        qkv_layout=layout, Q=q, K=k, V=v, O=o, dO=do, Aux_CTX_Tensors=aux, **{**OPTIONS, **BACKWARD, **options}
    )


def leaves() -> list[Tensor]:
    """Query, key, value and output gradient, ``[batch, seq, heads, features]``."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, SEQ, HEADS, FEATURES, generator=rng).to(BF16) for _ in range(4)]


def to(name: str, tensor: Tensor) -> Tensor:
    """A ``bshd`` tensor in another format."""
    if name == "thd":
        return tensor[IS_TOKEN]
    return (tensor.transpose(0, 1) if name == "sbhd" else tensor).contiguous()


def back(name: str, tensor: Tensor) -> Tensor:
    """A tensor of that format as ``bshd``."""
    if name == "thd":
        return tensor.new_zeros(BATCH, SEQ, *tensor.shape[1:]).masked_scatter_(IS_TOKEN[:, :, None, None], tensor)
    return tensor.transpose(0, 1) if name == "sbhd" else tensor


def packed(layout: attention_problem.Layout, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Q, K and V in memory as the layout says."""
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
            "serves FP16, BF16 and FP8 with one scale a tensor, and no object for Q",
        ),
    ],
)
def test_what_cudnn_does_not_take_is_refused(change: Any, error: type[Exception], message: str) -> None:
    q, k, v, _ = leaves()
    with pytest.raises(error, match=message):
        forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, change(q), k, v)


def test_a_bias_before_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="no bias that is added before scaling"):
        forward(NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, *leaves()[:3], bias_type=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS)


def test_a_layout_that_is_not_set_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a layout"):
        attention_problem.parse_layout(NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET)
