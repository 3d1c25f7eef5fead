"""Images: shifted windows, tables of relative positions, class tokens, and patches in another order."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host, normal, twins
from parity.case.weight_map import rearrange

WIDTH = 64

# Swin's shifted windows: other shifts, masks of other shifts, and biases added to scores in another order.

HEADS, SIDE, WINDOW = 2, 8, 4
HEAD, SPAN = WIDTH // HEADS, 2 * WINDOW - 1


def windows(x: Tensor) -> Tensor:
    """Return ``[batch, rows, columns, ...]`` as ``[batch, windows, places, ...]``."""
    count = SIDE // WINDOW
    return x.unflatten(1, (count, WINDOW)).unflatten(3, (count, WINDOW)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def mask_of(shift: int) -> Tensor:
    """Return Swin's own mask, ``[windows, places, places]``."""
    regions = torch.zeros(1, SIDE, SIDE)
    cuts = (slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((one, other) for one in cuts for other in cuts):
        regions[:, rows, columns] = number
    region = windows(regions)[0]
    return -100.0 * (region[:, None] != region[:, :, None])


class Swin(nn.Module):
    """Attention in shifted windows, written out, with learned biases for offsets and for pairs of places."""

    def __init__(
        self,
        linear: Any,
        shift: int = 1,
        mask_shift: int = 1,
        columns_first: bool = False,
        view: bool = False,
        reversed_: bool = False,
        moved: str = "",
    ) -> None:
        super().__init__()
        self.qkv, self.table = linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(SPAN**2, HEADS))
        self.pairs = nn.Parameter(torch.randn(HEADS, WINDOW**2, WINDOW**2))
        self.shift, self.view, self.reversed = shift, view, reversed_
        mask = mask_of(mask_shift)[:, None]
        self.mask = {"windows": mask.roll(1, 0), "keys": mask.flip(-1)}.get(moved, mask)
        places = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")).flatten(1)
        down, across = (places[:, :, None] - places[:, None]) + WINDOW - 1
        self.numbers = across * SPAN + down if columns_first else down * SPAN + across

    def forward(self, x: Tensor) -> Tensor:
        y = windows(x.roll((-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, HEAD)).permute(3, 0, 1, 4, 2, 5)
        rows = self.table[self.numbers]
        bias = rows.reshape(HEADS, WINDOW**2, WINDOW**2) if self.view else rows.permute(2, 0, 1)
        pairs = self.pairs.flip(-1, -2) if self.reversed else self.pairs
        scores = q @ k.mT * HEAD**-0.5 + bias + pairs + self.mask.to(x)
        y = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
        y = y.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (SIDE // WINDOW, -1)).transpose(2, 3)
        return x + y.flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))


class Biased(nn.Module):
    """Attention with a bias, or a boolean mask with a prefix that all see, either not symmetric in query and key."""

    table: Tensor

    def __init__(self, linear: Any, prefix: bool = False, keys_reversed: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.keys_reversed, self.turned = linear(WIDTH, 3 * WIDTH), keys_reversed, turned
        drawn = torch.Generator().manual_seed(0)  # the same in both
        table = torch.randn(1, HEADS, SIDE, SIDE, generator=drawn)
        if prefix:
            table = torch.ones(SIDE, SIDE, dtype=torch.bool).tril() | (torch.arange(SIDE) < 3)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        table = self.table.flip(-1) if self.keys_reversed else self.table
        table = table.mT.contiguous() if self.turned else table
        return F.scaled_dot_product_attention(q, k, v, table).transpose(1, 2).flatten(2)


SWIN = twins(Swin, normal((2, SIDE, SIDE, WIDTH)))
BIASED, PREFIX = (
    twins(Biased, normal((2, SIDE, WIDTH)), name, settings=dict(prefix=name == "prefix"))
    for name in ("biased", "prefix")
)

# Two biases as in SAM, and paddings.

OF_WINDOW = normal((2, WINDOW**2, WIDTH))


class Sam(nn.Module):
    """Attention with two biases, for rows and for columns, computed from the queries and two tables."""

    def __init__(self, linear: Any, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.turned = linear(WIDTH, 3 * WIDTH), turned
        self.rows, self.columns = (nn.Parameter(torch.randn(SPAN, HEAD)) for _ in range(2))

    def biases(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return both biases, ``[batch, heads, rows, columns, rows, 1]`` and ``[..., 1, columns]``."""
        places = torch.arange(WINDOW)
        steps = places[:, None] - places + WINDOW - 1
        steps = steps.T if self.turned else steps
        patches = q.unflatten(2, (WINDOW, WINDOW))
        down = torch.einsum("bnhwc,hkc->bnhwk", patches, self.rows[steps])
        across = torch.einsum("bnhwc,wkc->bnhwk", patches, self.columns[steps])
        return down[..., :, None], across[..., None, :]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = ((q * HEAD**-0.5) @ k.mT).unflatten(3, (WINDOW, WINDOW)).unflatten(2, (WINDOW, WINDOW))
        down, across = self.biases(q)
        scores = (scores + down + across).flatten(4).flatten(2, 3)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class SamInTE(Sam):
    """The same with TE's core attention, which gets the sum of both biases."""

    def __init__(self, te: Any) -> None:
        super().__init__(te.Linear)
        self.core = te.DotProductAttention(
            HEADS, HEAD, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).contiguous() for part in self.qkv(x).chunk(3, -1))
        down, across = self.biases(q.transpose(1, 2))
        bias = (down + across).flatten(4).flatten(2, 3).contiguous()
        return self.core(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)


class Padded(nn.Module):
    """A centred convolution in time, behind a causal one."""

    def __init__(self, linear: Any, causal: bool = False, later: bool = False) -> None:
        super().__init__()
        self.up, self.causal, self.later = linear(WIDTH, WIDTH), causal, later
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.pad(x, (0, 0, 0, 1) if self.later else (0, 0, 1, 0))).transpose(1, 2)
        y = y[..., 1:] + y[..., :-1]
        seen = F.conv1d(F.pad(y, (4, 0)), self.conv.weight, self.conv.bias, groups=WIDTH)
        return x + (seen if self.causal else self.conv(y)).transpose(1, 2)


SAM, PADDED = (twins(one, OF_WINDOW) for one in (Sam, Padded))
SAM_IN_TE = Host("sam_in_te", lambda: Sam(nn.Linear), SamInTE, OF_WINDOW)

# A class token at the wrong end, and an image's vector: the class token, or a mean with or without it.

PATCHES = 12
IMAGES = normal((4, PATCHES, WIDTH))
Pool = Literal["class token", "patches", "all", "last"]


def rotated(x: Tensor) -> Tensor:
    """Return patches rotated by their positions, and the first token, which has no position, unchanged."""
    token, patches = x[:, :, :1], x[:, :, 1:]
    rates = 100.0 ** -torch.linspace(0.0, 1.0, HEAD // 2).to(x)
    angles = torch.arange(patches.shape[2]).to(x)[:, None] * rates
    left, right = patches.chunk(2, -1)
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
    return torch.cat((token, torch.cat(turned, -1)), 2)


class Vit(nn.Module):
    def __init__(self, linear: Any, pool: Pool, last: bool = False) -> None:
        super().__init__()
        self.pool, self.last = pool, last
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv, self.out, self.head = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat((x, token) if self.last else (token, x), 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(rotated(q), rotated(k), v).transpose(1, 2).flatten(2))
        if self.pool in ("class token", "last"):
            return self.head(x[:, -1 if self.last or self.pool == "last" else 0])
        return self.head((x if self.pool == "all" else x[:, 1:]).mean(1))


class Classes(nn.Module):
    """A norm, a pooling and few classes; the gradient of the norm's bias differs only by rounding."""

    def __init__(self, linear: Any, pool: Pool) -> None:
        super().__init__()
        self.pool, self.up, self.norm, self.head = pool, linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + F.gelu(self.up(x)))
        return self.head(x[:, 0] if self.pool == "class token" else x.mean(1))


CLASS_TOKEN, OF_PATCHES, OF_ALL = (
    twins(Vit, IMAGES, f"vit_of_{pool.replace(' ', '_')}", settings=dict(pool=pool))
    for pool in ("class token", "patches", "all")
)
CLASSES = twins(Classes, normal((2, PATCHES, WIDTH)), settings=dict(pool="class token"))

# Pixels of patches in another order than in the convolution's weight.


class OfPixels(nn.Module):
    """A linear layer of 2 x 2 patches, whose values are ordered channels first or last."""

    def __init__(self, linear: nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.linear, self.channels_last = linear, channels_last

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unflatten(2, (-1, 2)).unflatten(4, (-1, 2))  # [batch, channels, y, 2, x, 2]
        order = (0, 2, 4, 3, 5, 1) if self.channels_last else (0, 2, 4, 1, 3, 5)
        return self.linear(patches.permute(order).flatten(3).flatten(1, 2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 32, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        return self.patch(image).flatten(2).transpose(1, 2)


CONVOLUTION = Host(
    "convolution",
    Convolution,
    lambda te, channels_last=False: OfPixels(te.Linear(16, 32), channels_last),
    normal((2, 4, 8, 8)),
    weights={rearrange("patch.weight", "o c h w -> o (c h w)"): "linear.weight", "patch.bias": "linear.bias"},
)

PORTS = (
    *(host.right() for host in (SWIN, BIASED, PREFIX, SAM, PADDED, CLASS_TOKEN, OF_PATCHES, OF_ALL)),
    CONVOLUTION.right(),
    SAM_IN_TE.right(name="both biases added before the scores"),
    SWIN.wrong(
        "window",
        "windows by 1, as the reference does; the port shifts them by 2, and masks them so.",
        shift=2,
        mask_shift=2,
    ),
    SWIN.wrong("window", "the mask is that of 2.", mask_shift=2),
    SWIN.wrong("operation", "its right operand is rolled by 1 along dimension 0.", moved="windows"),
    SWIN.wrong("operation", "its right operand is that of keys in reverse order.", moved="keys"),
    SWIN.wrong("operation", "its right operand is that of queries and keys in reverse order.", reversed_=True),
    BIASED.wrong("attention-bias", "the port has that of keys in reverse order.", keys_reversed=True),
    BIASED.wrong("attention-bias", "the port exchanges query and key in it.", turned=True),
    PREFIX.wrong("mask", "the port exchanges queries and keys.", turned=True),
    SWIN.wrong("attention-bias", "the port looks up (column, row) for a position (row, column)", columns_first=True),
    SWIN.wrong("operation", "it is a view, which moves no element", view=True),
    SAM.wrong("attention-bias", "look up the relative position of query and key", turned=True),
    PADDED.wrong("operation", "'conv1d' of conv as the reference does; its input is padded at its", causal=True),
    PADDED.wrong("operation", "'pad' of the module as the reference does; it pads the other end", later=True),
    CLASS_TOKEN.wrong("operation", "it is the mean over the others of dimension 1.", pool="patches"),
    CLASS_TOKEN.wrong("operation", "it is the mean over dimension 1.", pool="all"),
    CLASS_TOKEN.wrong("operation", "it takes the last of dimension 1", pool="last"),
    CLASS_TOKEN.wrong("operation", "join the parts of the 1st 'cat' of the module in the reference's order", last=True),
    OF_PATCHES.wrong("operation", "it repeats the first of dimension 1, ", pool="class token"),
    OF_PATCHES.wrong("operation", "it takes all of dimension 1.", pool="all"),
    OF_ALL.wrong("operation", "it takes the first of dimension 1.", pool="class token"),
    OF_ALL.wrong(
        "operation", "'mean' of the module as the reference does; it takes the last of dimension 1.", pool="last"
    ),
    OF_ALL.wrong("operation", "it leaves out the first of dimension 1.", pool="patches"),
    CLASSES.wrong("operation", "it is the mean over dimension 1.", pool="all"),
    CONVOLUTION.wrong("weight-transposed", 'rearrange("patch.weight", "a b c d -> a (c d b)")', channels_last=True),
)
