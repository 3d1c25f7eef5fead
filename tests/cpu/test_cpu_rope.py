"""Rotary position embedding on the CPU kernels, against complex multiplication in FP64 and TE's unfused path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu import rope
from te_on_cpu.enums import NVTE_QKV_Format

SBHD, BSHD, THD = (NVTE_QKV_Format[f"NVTE_{name}"] for name in ("SBHD", "BSHD", "THD"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS32 = torch.finfo(torch.float32).eps

problems = st.tuples(
    st.integers(1, 6), st.integers(1, 3), st.sampled_from([(8, 8), (16, 8)]), st.booleans(), st.integers(0, 2**31)
)


def angles(positions: int, features: int, interleaved: bool) -> Tensor:
    """Return the usual angles, ``[positions, 1, 1, features]``, the same for both features of a pair."""
    speed = 10000.0 ** (-torch.arange(0, features, 2) / features)
    half = torch.arange(positions)[:, None] * speed
    both = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
    return both.reshape(positions, 1, 1, features)


def fp64_rotation(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Multiply pairs of ``x`` ``[s, b, h, d]``, as complex numbers, by ``exp(i angle)``, with one angle per token."""
    rotary = freqs.shape[-1]
    pairs, rest = x[..., :rotary].double(), x[..., rotary:].double()
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = freqs.double()[..., ::2] if interleaved else freqs.double()[..., : rotary // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle))
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), rest], -1)


def rotate(x: Tensor, freqs: Tensor, interleaved: bool = False, start: Tensor | None = None) -> Tensor:
    return rope.fused_rope_forward(x, freqs, start, SBHD, interleaved, None, 1, 0)


def rotate_back(x: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    return rope.fused_rope_backward(x, freqs, None, SBHD, interleaved, None, 1, 0)


def draw(problem: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, bool]:
    length, batch, (features, rotary), interleaved, seed = problem
    x = torch.randn(length, batch, 2, features, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype), angles(length, rotary, interleaved), interleaved


@settings(max_examples=50)
@given(problems, st.sampled_from(DTYPES))
def test_rope_multiplies_pairs_by_a_unit_complex_number_and_rounds_once(problem: tuple, dtype: torch.dtype) -> None:
    x, freqs, interleaved = draw(problem, dtype)
    exact = fp64_rotation(x, freqs, interleaved)
    actual = rotate(x, freqs, interleaved)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 4 * EPS32 * x.abs().max()
    assert ((actual.double() - exact).abs() <= bound).all()
    # Features past the angles are copied.
    rest = slice(freqs.shape[-1], None)
    assert torch.equal(actual[..., rest], x[..., rest])
    assert torch.equal(rotate_back(x, freqs, interleaved)[..., rest], x[..., rest])


@settings(max_examples=50)
@given(problems)
def test_rope_backward_is_the_transpose_even_if_the_angles_of_a_pair_differ(problem: tuple) -> None:
    x, freqs, interleaved = draw(problem)
    freqs = freqs + torch.linspace(0, 1, freqs.shape[-1])
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    left = (rotate(x, freqs, interleaved) * y).double().sum()
    right = (x * rotate_back(y, freqs, interleaved)).double().sum()
    torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_start_positions_shift_each_sequence() -> None:
    x, freqs = torch.randn(3, 2, 1, 8), angles(10, 8, False)
    shifted = rotate(x, freqs, start=torch.tensor([0, 5], dtype=torch.int32))
    assert torch.equal(shifted[:, :1], rotate(x[:, :1], freqs))
    assert torch.equal(shifted[:, 1:], rotate(x[:, 1:], freqs[5:]))


def test_packed_tokens_past_the_last_sequence_are_zero() -> None:
    x, cu_seqlens = torch.ones(5, 1, 8), torch.tensor([0, 0, 3], dtype=torch.int32)
    output = rope.fused_rope_forward(x, angles(3, 8, False), None, THD, False, cu_seqlens, 1, 0)
    assert torch.equal(output[:3, None], rotate(x[:3, None], angles(3, 8, False)))
    assert not output[3:].any()


@pytest.mark.parametrize("heads_in_group", [1, 2])
@pytest.mark.parametrize("layout", [SBHD, BSHD])
@pytest.mark.parametrize("interleaved", [False, True])
def test_joint_qkv_is_split_and_rotated_as_its_parts_are(layout: int, interleaved: bool, heads_in_group: int) -> None:
    split = [8 * heads_in_group, 8, 8]
    qkv = torch.randn(4, 3, 2, sum(split))
    k_freqs = 2 * angles(4, 4, interleaved)
    freqs = angles(4, 8, interleaved), torch.cat([k_freqs, k_freqs], -1)
    options = (layout, interleaved, None, 1, 0)
    q, k, v = rope.fused_qkv_rope_forward(qkv, *freqs, None, split, layout, interleaved, 1, 0)
    parts = [part.reshape(4, 3, -1, 8) for part in qkv.split(split, -1)]
    for rotated, part, of_part in zip((q, k), parts[:2], freqs, strict=True):
        assert torch.equal(rotated, rope.fused_rope_forward(part, of_part, None, *options))
    assert torch.equal(v, parts[2])
    gradient = rope.fused_qkv_rope_backward(q, k, v, *freqs, split, layout, interleaved, 1, 0)
    back = [rope.fused_rope_backward(x, of_x, None, *options) for x, of_x in zip((q, k), freqs, strict=True)]
    assert torch.equal(gradient, torch.cat([back[0].reshape(4, 3, 2, -1), back[1], v], -1))


@pytest.mark.parametrize(
    ("tokens", "freqs", "message"),
    [
        (torch.ones(4, 1, 1, 8), angles(3, 8, False), "3 positions, but a token is at 3"),
        (torch.ones(4, 1, 1, 8), angles(4, 16, False), "16 features, more than the 8"),
        (torch.ones(4, 1, 1, 8), angles(4, 8, False).double(), "freqs must be FP32"),
        (torch.ones(4, 1, 1, 8), torch.ones(4, 8), "freqs must be FP32"),
    ],
)
def test_rope_says_what_does_not_fit(tokens: Tensor, freqs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotate(tokens, freqs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_start", [False, True])
@pytest.mark.parametrize(("layout", "cp_size"), [("sbhd", 1), ("bshd", 1), ("thd", 1), ("sbhd", 3), ("thd", 3)])
def test_te_fused_rope_agrees_with_its_unfused_path_forward_and_backward(
    layout: str, cp_size: int, with_start: bool, interleaved: bool
) -> None:
    te.kernels("cpu")
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    rng = torch.Generator().manual_seed(0)
    shape = {"sbhd": (8, 3, 2, 16), "bshd": (3, 8, 2, 16), "thd": (12, 2, 16)}[layout]
    freqs = RotaryPositionEmbedding(16, interleaved=interleaved)(40)
    options = {
        "tensor_format": layout,
        "start_positions": torch.tensor([0, 7, 2], dtype=torch.int32) if with_start else None,
        "interleaved": interleaved,
        "cu_seqlens": torch.tensor([0, 4, 6, 12], dtype=torch.int32) * cp_size if layout == "thd" else None,
        "cp_size": cp_size,
        "cp_rank": cp_size // 2,
    }
    x, dy = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    results = []
    for fused in (True, False):
        leaf = x.clone().requires_grad_()
        y = apply_rotary_pos_emb(leaf, freqs, fused=fused, **options)
        y.backward(dy)
        results.append((y, leaf.grad))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_te_fused_qkv_rope_has_the_gradient_of_its_parts() -> None:
    te.kernels("cpu")
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

    freqs = angles(4, 8, False)
    qkv = torch.randn(4, 3, 2, 32, requires_grad=True)
    q, k, v = (part.reshape(4, 3, -1, 8) for part in qkv.split([16, 8, 8], -1))
    apart = [apply_rotary_pos_emb(q, freqs), apply_rotary_pos_emb(k, freqs), v]
    weights = [torch.randn(part.shape) for part in apart]
    joint = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [16, 8, 8])
    gradients = [torch.autograd.grad(outputs, qkv, weights)[0] for outputs in (joint, apart)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
