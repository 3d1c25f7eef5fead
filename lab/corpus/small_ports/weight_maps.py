"""Weights that lie otherwise than TE reads them, in maps, buffers, outputs and parameters that are used again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from lab.corpus.small import Host, normal, twins
from parity import reference
from parity.case.weight_map import reorder

WIDTH, HEADS = 64, 4
KINDS = ("weight", "bias")

# Fused queries, keys and values against TE's attention.


class FusedAttention(nn.Module):
    """Attention whose fused weight holds query, key and value of each head in turn, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(-2)
        return self.proj(reference.CoreAttention(causal=True)(query, key, value))


class Rows(nn.Module):
    """Attention whose fused rows are viewed as ``shape``; ``to_heads`` permutes ``[batch, seq, *shape]``."""

    fused: Any

    def __init__(self, shape: tuple[int, ...], to_heads: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.to_heads = shape, to_heads
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused.weight.data *= 2

    def forward(self, x: Tensor) -> Tensor:
        apart = self.fused(x).unflatten(-1, self.shape).permute(*self.to_heads)  # [3, batch, heads, seq, head_dim]
        return self.out(F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2))


BY_KIND = (3, HEADS, WIDTH // HEADS), (2, 0, 3, 1, 4)
BY_HEAD = (HEADS, 3, WIDTH // HEADS), (3, 0, 2, 1, 4)
BY_CHANNEL = (HEADS, WIDTH // HEADS, 3), (4, 0, 2, 1, 3)


def of_fused(**options: Any) -> Any:
    """Return a function that makes TE's attention, whose fused weight is interleaved or not."""

    def port(te: Any, interleaved: bool = False) -> nn.Module:
        given = dict(attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd") | options
        return te.MultiheadAttention(WIDTH, HEADS, qkv_weight_interleaved=interleaved, **given)

    return port


class Conv1D(nn.Module):
    """GPT-2's linear layer, with a weight ``[in, out]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.2 * torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Conv1DRows(Rows):
    """Attention with a fused weight ``[in, out]``, as in GPT-2."""

    def __init__(self, *layout: Any) -> None:
        super().__init__(*layout)
        self.fused = Conv1D(WIDTH, 3 * WIDTH)


def of_rows(name: str, module: Any, layout: Any, **settings: Any) -> Host:
    sides: dict[Any, str] = {f"fused.{kind}": f"qkv.{kind}" for kind in KINDS}
    if module is Conv1DRows:
        sides = {parity.transpose("fused.weight"): "qkv.weight", "fused.bias": "qkv.bias"}
    return Host(
        name,
        lambda **_: module(*layout),
        of_fused(fuse_qkv_params=True),
        normal((2, 17, WIDTH)),
        settings,
        sides | {f"out.{kind}": f"proj.{kind}" for kind in KINDS},
    )


def by_head(kind: str) -> Any:
    return parity.rearrange(f"fused.{kind}", "(qkv heads c) ... -> (heads qkv c) ...", qkv=3, heads=HEADS)


ROWS_BY_KIND = of_rows("rows_by_kind", Rows, BY_KIND, interleaved=False)
ROWS_BY_HEAD = of_rows("rows_by_head", Rows, BY_HEAD, interleaved=True)
ROWS_BY_CHANNEL = of_rows("rows_by_channel", Rows, BY_CHANNEL)
CONV1D_ROWS = of_rows("conv1d_rows", Conv1DRows, BY_KIND, interleaved=False)
LAID_OUT_BY_HEAD = {by_head(kind): f"qkv.{kind}" for kind in KINDS} | {f"out.{kind}": f"proj.{kind}" for kind in KINDS}

BY_ROWS_OF_KIND: dict[Any, Any] = {f"proj.{kind}": f"proj.{kind}" for kind in KINDS}
for kind in KINDS:
    BY_ROWS_OF_KIND[f"qkv.{kind}"] = parity.stack(*(f"qkv.{name}_{kind}" for name in ("query", "key", "value")))
FUSED_BY_HEAD = Host(
    "fused_by_head",
    lambda: FusedAttention(),
    lambda te: te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, qkv_format="bshd"),
    normal((2, 32, WIDTH)),
)


class Projected(nn.Module):
    """Attention whose queries, keys and values come from one linear layer."""

    def __init__(self, qkv: nn.Module) -> None:
        super().__init__()
        self.qkv = qkv

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        return F.scaled_dot_product_attention(*heads.unbind(2))


def stacked(*order: str) -> dict[str, Any]:
    return {"qkv.weight": parity.stack(*(f"qkv.{name}_weight" for name in order))}


SPLIT_PARAMETERS = Host(
    "split_parameters",
    lambda: Projected(nn.Linear(WIDTH, 3 * WIDTH, bias=False)),
    lambda te: Projected(
        te.Linear(
            WIDTH,
            3 * WIDTH,
            bias=False,
            parameters_split={f"{name}_": WIDTH for name in ("query", "key", "value")},
        )
    ),
    normal((2, 32, WIDTH)),
    weights=stacked("query", "key", "value"),
)


class FlatAttention(nn.Module):
    """Attention over ``[batch * heads, seq, head_dim]``, as older models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q.weight.data *= 3

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for layer in (self.q, self.k, self.v)
        )
        context = torch.bmm((torch.bmm(query, key.mT) * (WIDTH // HEADS) ** -0.5).softmax(-1), value)
        return self.out(context.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


def of_separate(side: Any) -> dict[Any, str]:
    names = zip("qkv", ("query", "key", "value"), strict=True)
    return {side(f"{name}.weight"): f"qkv.{of}_weight" for name, of in names} | {"out.weight": "proj.weight"}


FLAT_ATTENTION = Host(
    "flat_attention",
    FlatAttention,
    of_fused(bias=False),
    normal((2, 17, WIDTH)),
    weights=of_separate(str),
)
BY_CHANNELS = of_separate(
    lambda name: parity.rearrange(name, "(heads channels) ... -> (channels heads) ...", heads=HEADS)
)

# Keys and values of cross-attention, which TE reads head by head unless it is told otherwise.

CROSS, CROSS_HEADS, QUERIES, KEYS = 48, 3, 20, 12


def of_cross_attention(plain: str, te: str, query: str) -> dict[Any, Any]:
    """Return the map of a cross-attention whose names have these prefixes, and of its query's layer in TE."""
    sides: dict[Any, Any] = {}
    for kind in KINDS:
        sides[f"{plain}in_proj_{kind}"] = parity.stack(f"{te}{query}.{kind}", f"{te}key_value.{kind}")
        sides[f"{plain}out_proj.{kind}"] = f"{te}proj.{kind}"
    return sides


CROSS_ATTENTION = Host(
    "cross_attention",
    lambda **_: nn.MultiheadAttention(CROSS, CROSS_HEADS, batch_first=True),
    lambda te, interleaved: te.MultiheadAttention(
        CROSS,
        CROSS_HEADS,
        attention_type="cross",
        attn_mask_type="no_mask",
        qkv_format="bshd",
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=interleaved,
    ),
    normal((2, QUERIES, CROSS), (2, KEYS, CROSS)),
    dict(interleaved=False),
    of_cross_attention("", "", "query_layer"),
    dict(
        call_reference=lambda module, x, memory: module(x, memory, memory)[0],
        call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
    ),
)

# Halves of a weight that a port takes in the other order: gate and up only if that is what they are.


class Halves(nn.Module):
    """A layer whose scale and shift come from a condition, or whose halves are a gate and an up projection."""

    def __init__(self, linear: Any, gated: bool, exchanged: bool = False) -> None:
        super().__init__()
        self.halves, self.down = linear(WIDTH, 2 * WIDTH), linear(WIDTH, WIDTH)
        self.gated, self.exchanged = gated, exchanged

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        first, second = self.halves(x if self.gated else condition).chunk(2, -1)
        first, second = (second, first) if self.exchanged else (first, second)
        if self.gated:
            return self.down(F.silu(first) * second) + condition
        return self.down(x * (1 + first) + second)


CONDITIONED = normal((32, WIDTH), (32, WIDTH))
SCALE_AND_SHIFT = twins(Halves, CONDITIONED, "scale_and_shift", settings=dict(gated=False))
GATE_AND_UP = twins(Halves, CONDITIONED, "gate_and_up", settings=dict(gated=True))

# Gate and up that alternate in blocks, as in TE's fused grouped MLP (``glu_interleave_size``).

IN_BLOCKS_OF_32 = (0, 3, 1, 4, 2, 5)  # the three blocks of gate and of up in turn


class GatedMlp(nn.Module):
    """A gated MLP with a fused first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


def of_operations(te: Any, size: int | None) -> nn.Module:
    """Return the MLP as TE's operations, which read gate and up in blocks of a size."""
    from transformer_engine.pytorch import ops

    up = ops.Linear(WIDTH, 2 * 96)
    return ops.Sequential(up, ops.SwiGLU(glu_interleave_size=size), ops.Linear(96, WIDTH))


def of_mlp(order: Any) -> dict[Any, str]:
    return {order(f"fc1.{kind}"): f"0.{kind}" for kind in KINDS} | {f"fc2.{kind}": f"2.{kind}" for kind in KINDS}


WHOLE, BLOCKED = of_mlp(str), of_mlp(lambda name: reorder(name, IN_BLOCKS_OF_32))
GATED_OPERATIONS = Host(
    "gated_operations", lambda **_: GatedMlp(), of_operations, normal((48, WIDTH)), dict(size=None), WHOLE
)

# What no map covers: a module's buffers, the order of its outputs, and a parameter that is used in another's place.

FEATURES = 16


class Fourier(nn.Module):
    """Sines and cosines of directions that a buffer holds, and the input times them."""

    def __init__(self, linear: Any, seed: int = 0, buffer: str = "directions", exchanged: bool = False) -> None:
        super().__init__()
        self.buffer, self.exchanged, self.fc = buffer, exchanged, linear(2 * FEATURES, WIDTH)
        drawn = torch.randn(FEATURES, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.register_buffer(buffer, 0.1 * drawn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = x @ getattr(self, self.buffer).T
        y = self.fc(torch.cat((angles.sin(), angles.cos()), -1))
        return (x * y, y) if self.exchanged else (y, x * y)


class Rotated(nn.Module):
    """A rotation whose frequencies are a buffer, as in Hugging Face's models."""

    inv_freq: Tensor

    def __init__(self, linear: Any, base: float = 1e4, times: float = 1.0) -> None:
        super().__init__()
        self.fc = linear(WIDTH, WIDTH)
        self.register_buffer("inv_freq", times * base ** -torch.linspace(0.0, 1.0, WIDTH // 2 + 1)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        left, right = self.fc(x).chunk(2, -1)
        turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
        return torch.cat(turned, -1).to(x.dtype)


class QueryKeyNorms(nn.Module):
    """Products of queries and keys, each with its own norm."""

    def __init__(self, linear: Any, same: bool = False) -> None:
        super().__init__()
        self.query, self.key = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.query_norm, self.key_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        key_norm = self.query_norm if self.same else self.key_norm
        return self.query_norm(self.query(x)) * key_norm(self.key(x))


FOURIER = twins(Fourier, normal((32, WIDTH)))
ROTATED = twins(Rotated, normal((2, 24, WIDTH)), "rotated_by_a_buffer")
QUERY_KEY_NORMS = twins(QueryKeyNorms, normal((2, 32, WIDTH)))

PORTS = (
    ROWS_BY_KIND.right(),
    ROWS_BY_HEAD.right(),
    CONV1D_ROWS.right(),
    CROSS_ATTENTION.right(),
    GATED_OPERATIONS.right(),
    GATED_OPERATIONS.right(name="blocks that TE reads", weights=BLOCKED, size=32),
    FOURIER.right(buffer="of_another_name"),
    ROTATED.right(),
    QUERY_KEY_NORMS.right(),
    ROWS_BY_KIND.wrong(
        "qkv-layout",
        'map "fused.weight" to separated_qkv("qkv.weight", groups=4, head_dim=16)',
        interleaved=True,
    ),
    ROWS_BY_KIND.wrong(
        "qkv-layout", 'map "fused.weight" to "qkv.weight"', name="a map by head", weights=LAID_OUT_BY_HEAD
    ),
    ROWS_BY_HEAD.wrong(
        "qkv-layout", 'map separated_qkv("fused.weight", groups=4, head_dim=16) to "qkv.weight"', interleaved=False
    ),
    ROWS_BY_CHANNEL.wrong("qkv-layout", "(heads channels qkv) ...", interleaved=False),
    ROWS_BY_CHANNEL.wrong("qkv-layout", "(heads channels qkv) ...", interleaved=True),
    CONV1D_ROWS.wrong(
        "qkv-layout",
        'map transpose("fused.weight") to separated_qkv("qkv.weight", groups=4, head_dim=16)',
        interleaved=True,
    ),
    FUSED_BY_HEAD.wrong("qkv-layout", name="rows by kind", weights=BY_ROWS_OF_KIND),
    SPLIT_PARAMETERS.wrong("key-value-swapped", name="values before keys", weights=stacked("query", "value", "key")),
    SPLIT_PARAMETERS.wrong(
        "stacked-in-another-order", name="keys before queries", weights=stacked("key", "query", "value")
    ),
    FLAT_ATTENTION.wrong("heads-transposed", name="rows by channel", weights=BY_CHANNELS),
    CROSS_ATTENTION.wrong(
        "qkv-layout", 'reorder("key_value.weight", order=(0, 2, 4, 1, 3, 5))', interleaved=True, others=True
    ),
    SCALE_AND_SHIFT.wrong("stacked-in-another-order", exchanged=True),
    GATE_AND_UP.wrong("gate-up-swapped", exchanged=True),
    GATED_OPERATIONS.wrong(
        "gate-up-interleaved",
        'lay out "0.weight" with te.interleave_glu_tensor',
        name="blocks that the map lacks",
        size=32,
    ),
    GATED_OPERATIONS.wrong(
        ("gate-up-swapped", "gate-up-interleaved", "stacked-in-another-order"),
        name="blocks that TE does not know of",
        weights=BLOCKED,
        others=True,
    ),
    FOURIER.wrong("buffer-not-copied", "copy directions", seed=1),
    FOURIER.wrong("buffer-not-copied", "copy of_another_name", seed=1, buffer="of_another_name"),
    FOURIER.wrong(
        "outputs-exchanged",
        "output[0] is the reference's output[1], output[1] is the reference's output[0]",
        exchanged=True,
    ),
    ROTATED.wrong("rope-base", "base 500000; give its rotary embedding the reference's base, 10000.", base=5e5),
    ROTATED.wrong("rope-base", "inv_freq has the frequencies of base 8300; give", base=8.3e3, others=True),
    ROTATED.wrong("buffer-not-copied", "copy inv_freq", times=0.25, others=True),
    QUERY_KEY_NORMS.wrong(
        "no-gradient", 'use "key_norm.weight" where the candidate uses "query_norm.weight" again', same=True
    ),
)
