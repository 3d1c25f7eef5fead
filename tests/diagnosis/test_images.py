"""Images: shifted windows, tables of relative positions, class tokens, and patches in another order."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity

WIDTH = 64

# Swin's shifted windows: other shifts, masks of other shifts, and biases added to scores in another order.

HEADS, SIDE, WINDOW = 2, 8, 4
HEAD = WIDTH // HEADS


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
    """Attention in shifted windows, written out."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv = mistake, linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, WINDOW**2, WINDOW**2))
        self.shift = 2 if mistake == "shift" else 1
        mask = mask_of(2 if mistake in ("shift", "mask of another shift") else 1)[:, None]
        self.mask = {"windows": mask.roll(1, 0), "keys": mask.flip(-1)}.get(mistake, mask)

    def forward(self, x: Tensor) -> Tensor:
        y = windows(x.roll((-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, HEAD)).permute(3, 0, 1, 4, 2, 5)
        bias = self.bias.flip(-1, -2) if self.mistake == "bias" else self.bias
        scores = q @ k.mT * HEAD**-0.5 + bias + self.mask.to(x)
        y = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
        y = y.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (SIDE // WINDOW, -1)).transpose(2, 3)
        return x + y.flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))


class Biased(nn.Module):
    """Attention with a bias that is not symmetric between query and key."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv = mistake, linear(WIDTH, 3 * WIDTH)
        drawn = torch.Generator().manual_seed(0)  # the same in both
        self.register_buffer("table", torch.randn(1, HEADS, SIDE, SIDE, generator=drawn), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        table = {"keys": self.table.flip(-1), "turned": self.table.mT}.get(self.mistake, self.table)
        return F.scaled_dot_product_attention(q, k, v, table).transpose(1, 2).flatten(2)


class Prefix(nn.Module):
    """Attention with a boolean mask that shows each token the prefix and all earlier tokens."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        seen = torch.ones(SIDE, SIDE, dtype=torch.bool).tril() | (torch.arange(SIDE) < 3)
        self.seen = seen.T.contiguous() if mistake else seen

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.seen).transpose(1, 2).flatten(2)


@in_turn(
    ("module", "mistake", "title", "phrase"),
    [
        *((module, "", "passed", "") for module in (Swin, Biased, Prefix)),
        (Swin, "shift", "window", "windows by 1, as the reference does; the port shifts them by 2, and masks them so."),
        (Swin, "mask of another shift", "window", "the mask is that of 2."),
        (Swin, "windows", "operation", "its right operand is rolled by 1 along dimension 0."),
        (Swin, "keys", "operation", "its right operand is that of keys in reverse order."),
        (Swin, "bias", "operation", "its right operand is that of queries and keys in reverse order."),
        (Biased, "keys", "attention-bias", "the port has that of keys in reverse order."),
        (Biased, "turned", "attention-bias", "the port exchanges query and key in it."),
        (Prefix, "turned", "mask", "the port exchanges queries and keys."),
    ],
)
def test_another_shift_or_another_bias_of_scores_is_told(module, mistake, title, phrase, precision):
    tells(twins(module, dict(mistake=mistake), normal((2, SIDE, SIDE, WIDTH)), precision), title, phrase)


# Two-dimensional tables of relative positions as in Swin and SAM, with other shifts, paddings and views.

IN_WINDOW, CHANNELS, ACROSS = 4, 16, 4  # heads, channels of each, places across a window
SPAN = 2 * ACROSS - 1


def numbers(exchanged: bool = False) -> Tensor:
    """Return the row in Swin's table for each pair of places in a window, ``[places, places]``."""
    places = torch.stack(torch.meshgrid(torch.arange(ACROSS), torch.arange(ACROSS), indexing="ij")).flatten(1)
    down, across = (places[:, :, None] - places[:, None]) + ACROSS - 1
    return across * SPAN + down if exchanged else down * SPAN + across


class Table(nn.Module):
    """Attention in a window, with a learned bias for each vertical and horizontal offset."""

    def __init__(self, linear: Any, exchanged: bool = False, view: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.view = linear(WIDTH, 3 * WIDTH), view
        self.table = nn.Parameter(torch.randn(SPAN**2, IN_WINDOW))
        self.numbers = numbers(exchanged).T if turned else numbers(exchanged)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (IN_WINDOW, CHANNELS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        rows = self.table[self.numbers]
        bias = rows.reshape(IN_WINDOW, ACROSS**2, ACROSS**2) if self.view else rows.permute(2, 0, 1)
        return (((q * CHANNELS**-0.5) @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Sam(nn.Module):
    """Attention with two biases, for rows and for columns, computed from the queries and two tables."""

    def __init__(self, linear: Any, spread: float = 1.0, turned: bool = False) -> None:
        super().__init__()
        self.qkv, self.turned = linear(WIDTH, 3 * WIDTH), turned
        self.rows, self.columns = (nn.Parameter(spread * torch.randn(SPAN, CHANNELS)) for _ in range(2))

    def biases(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return both biases, ``[batch, heads, rows, columns, rows, 1]`` and ``[..., 1, columns]``."""
        places = torch.arange(ACROSS)
        steps = places[:, None] - places + ACROSS - 1
        steps = steps.T if self.turned else steps
        patches = q.unflatten(2, (ACROSS, ACROSS))
        down = torch.einsum("bnhwc,hkc->bnhwk", patches, self.rows[steps])
        across = torch.einsum("bnhwc,wkc->bnhwk", patches, self.columns[steps])
        return down[..., :, None], across[..., None, :]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (IN_WINDOW, CHANNELS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = ((q * CHANNELS**-0.5) @ k.mT).unflatten(3, (ACROSS, ACROSS)).unflatten(2, (ACROSS, ACROSS))
        down, across = self.biases(q)
        scores = (scores + down + across).flatten(4).flatten(2, 3)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class SamInTE(Sam):
    def __init__(self, te: Any, **port: Any) -> None:
        super().__init__(te.Linear, **port)
        self.core = te.DotProductAttention(
            IN_WINDOW, CHANNELS, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (IN_WINDOW, CHANNELS)).contiguous() for part in self.qkv(x).chunk(3, -1))
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


class Rolled(nn.Module):
    """Cumulative sums in windows that are shifted by less than half a window."""

    def __init__(self, linear: Any, shift: int = 2) -> None:
        super().__init__()
        self.up, self.shift = linear(WIDTH, WIDTH), shift

    def forward(self, x: Tensor) -> Tensor:
        y = x.roll(-self.shift, 1).unflatten(1, (2, -1)).cumsum(2).flatten(1, 2)
        return x + self.up(y).roll(self.shift, 1)


@in_turn(
    ("module", "mistake", "title", "phrase"),
    [
        *((module, {}, "passed", "") for module in (Table, Sam, Padded, Rolled)),
        (Table, dict(exchanged=True), "attention-bias", "the port looks up (column, row) for a position (row, column)"),
        (Table, dict(view=True), "operation", "it is a view, which moves no element"),
        (Sam, dict(turned=True), "attention-bias", "look up the relative position of query and key"),
        (Padded, dict(causal=True), "operation", "'conv1d' of conv as the reference does; its input is padded at its"),
        (Padded, dict(later=True), "operation", "'pad' of the module as the reference does; it pads the other end"),
        (Rolled, dict(shift=-2), "operation", "'roll' of the module and of 1 more like it"),
    ],
)
def test_another_table_padding_or_view_is_told(module, mistake, title, phrase, precision):
    tells(twins(module, mistake, normal((2, ACROSS**2, WIDTH)), precision), title, phrase)


@pytest.mark.parametrize(("seed", "precision"), [(0, "bf16"), (1, "fp16")])
def test_a_port_that_adds_both_biases_before_the_scores_is_right(seed, precision):
    result = compared(lambda: Sam(nn.Linear), SamInTE, normal((2, ACROSS**2, WIDTH)), precision, seeds=[seed])
    assert result.passed
    assert not result.notes


# A class token at the wrong end, and an image's vector: the class token, or a mean with or without it.

PATCHES = 12
Pool = Literal["class token", "patches", "all"]


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
        if self.pool == "class token":
            return self.head(x[:, -1] if self.last else x[:, 0])
        return self.head((x if self.pool == "all" else x[:, 1:]).mean(1))


@in_turn(
    ("right", "port", "title", "phrase"),
    [
        *((pool, pool, "passed", "") for pool in ("class token", "patches", "all")),
        ("class token", "patches", "operation", "it is the mean over the others of dimension 1."),
        ("class token", "all", "operation", "it is the mean over dimension 1."),
        ("patches", "class token", "operation", "it repeats the first of dimension 1, "),
        ("patches", "all", "operation", "it takes all of dimension 1."),
        ("all", "class token", "operation", "it takes the first of dimension 1."),
        ("all", "patches", "operation", "it leaves out the first of dimension 1."),
    ],
)
def test_another_pooling_is_told(right, port, title, phrase, precision):
    tells(twins(Vit, dict(pool=port), normal((4, PATCHES, WIDTH)), precision, right=dict(pool=right)), title, phrase)


class Classes(nn.Module):
    """A norm, a pooling and few classes; the gradient of the norm's bias differs only by rounding."""

    def __init__(self, linear: Any, pool: Pool) -> None:
        super().__init__()
        self.pool, self.up, self.norm, self.head = pool, linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + F.gelu(self.up(x)))
        return self.head(x[:, 0] if self.pool == "class token" else x.mean(1))


@pytest.mark.parametrize("seed", range(2))
def test_another_pooling_is_told_before_few_classes(seed):
    port, right = dict(pool="all"), dict(pool="class token")
    result = twins(Classes, port, normal((2, PATCHES, WIDTH)), "bf16", right=right, seeds=[seed])
    tells(result, "operation", "it is the mean over dimension 1.")


def test_a_class_token_at_the_other_end_that_is_read_there_is_told():
    phrase = "join the parts of the 1st 'cat' of the module in the reference's order"
    right = dict(pool="class token")
    tells(twins(Vit, dict(last=True), normal((4, PATCHES, WIDTH)), right=right), "operation", phrase)


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


@in_turn(("channels_last", "title"), [(False, "passed"), (True, "weight-transposed")])
def test_patches_whose_pixels_lie_in_another_order_are_told_with_that_order(channels_last, title, precision):
    result = compared(
        Convolution,
        lambda te: OfPixels(te.Linear(16, 32), channels_last),
        normal((2, 4, 8, 8)),
        precision,
        {parity.rearrange("patch.weight", "o c h w -> o (c h w)"): "linear.weight", "patch.bias": "linear.bias"},
    )
    tells_only(result, title, 'rearrange("patch.weight", "a b c d -> a (c d b)")')
