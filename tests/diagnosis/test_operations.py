"""Single calls that are computed differently, in another order or on another tensor, and match no known mistake."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity

WIDTH = 64

# Calls that compute something else: another part, number, shift, mean or count.


class Modulated(nn.Module):
    """A linear layer between a shift, a scale and a gate that a condition makes, as in a diffusion transformer."""

    def __init__(self, linear: Any, order=(0, 1, 2), one: float = 1.0) -> None:
        super().__init__()
        self.modulation, self.linear = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.order, self.one = order, one

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(3, -1)
        shift, scale, gate = (parts[i] for i in self.order)
        return x + gate * self.linear(x * (self.one + scale) + shift)


class Timed(nn.Module):
    """Sines and cosines of a time."""

    def __init__(self, linear: Any, halves: bool = True, cosines_first: bool = True, steps: int = 32) -> None:
        super().__init__()
        self.linear = linear(WIDTH, WIDTH)
        self.halves, self.cosines_first, self.steps = halves, cosines_first, steps

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(32, device=x.device).to(times.dtype) / self.steps)
        angles = times[:, :1] * frequencies
        parts = (angles.cos(), angles.sin()) if self.cosines_first else (angles.sin(), angles.cos())
        embedded = torch.cat(parts, -1) if self.halves else torch.stack(parts, -1).flatten(1)
        return self.linear(x + embedded[:, None].to(x.dtype))


class Pooled(nn.Module):
    """Read the first token of a sequence."""

    def __init__(self, linear: Any, place: int = 0, mean: bool = False) -> None:
        super().__init__()
        self.linear, self.place, self.mean = linear(WIDTH, WIDTH), place, mean

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(x.mean(1) if self.mean else x[:, self.place])


class LastOfEach(nn.Module):
    """Read the last token of sequences of different lengths."""

    def __init__(self, linear: Any, off_by: int = 0, pool: str = "") -> None:
        super().__init__()
        self.linear, self.off_by, self.pool = linear(WIDTH, WIDTH), off_by, pool

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        lengths = torch.tensor([20, 12, 17, 5], device=x.device)
        rows = torch.arange(len(x), device=x.device)
        pooled = {"end": x[:, -1], "mean": x.mean(1)}.get(self.pool)
        return self.linear(x[rows, lengths - 1 + self.off_by] if pooled is None else pooled)


class LastGathered(LastOfEach):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if self.pool:
            return super().forward(x, condition)
        last = torch.tensor([19, 11, 16, 4], device=x.device) + self.off_by
        return self.linear(x.gather(1, last[:, None, None].expand(-1, 1, WIDTH)).squeeze(1))


class Latent(nn.Module):
    """Split each of four heads into two parts, as with keys and values that come from one projection."""

    def __init__(self, linear: Any, together: bool = False) -> None:
        super().__init__()
        self.up, self.out, self.together = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), together

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.up(x)
        if self.together:
            parts = x.split([WIDTH // 4, 3 * WIDTH // 4], -1)
            keys, values = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        else:
            keys, values = x.unflatten(-1, (4, -1)).transpose(1, 2).split([WIDTH // 16, 3 * WIDTH // 16], -1)
        return self.out(torch.cat((2.0 * keys, values.sin()), -1).transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Sines and cosines of positions, with frequencies that depend on one number."""

    def __init__(self, linear: Any, in_turns: bool = False, power: int = 5, table: str = "") -> None:
        super().__init__()
        self.linear, self.in_turns, self.power, self.table = linear(WIDTH, WIDTH), in_turns, power, table

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        steps = torch.arange(24.0, device=x.device)
        angles = steps[:, None] * 2.0 ** (-self.power + torch.arange(0, 4, 0.125, device=x.device))
        parts = (angles.sin(), angles.cos())
        embedded = torch.stack(parts, -1).flatten(1) if self.in_turns else torch.cat(parts, -1)
        apart = (steps[:, None] - steps).abs() * torch.tensor([0.05, 0.1, 0.2, 0.4], device=x.device)[:, None, None]
        apart = {"reversed": apart.flip(0), "first": apart[:1].expand_as(apart)}.get(self.table, apart)
        y = self.linear(x + embedded.to(x.dtype))
        return (y.unflatten(2, (4, 16)).permute(0, 2, 3, 1)[..., None, :] * (-apart).exp()[:, None]).sum(-1)


class Leaky(nn.Module):
    """An activation with a constant."""

    def __init__(self, linear: Any, slope: float = 0.2) -> None:
        super().__init__()
        self.up, self.down, self.slope = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), slope

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(x), self.slope))


class Shifted(nn.Module):
    """A product of neighbours in windows that are shifted by half a window, as in Swin."""

    def __init__(self, linear: Any, shift: int = 4) -> None:
        super().__init__()
        self.linear, self.shift = linear(WIDTH, WIDTH), shift

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = x.roll(-self.shift, 1) if self.shift else x
        y = self.linear(y.unflatten(1, (-1, 8)).cumsum(2)).flatten(1, 2)
        return x + (y.roll(self.shift, 1) if self.shift else y)


class Averaged(nn.Module):
    """Take the mean over a sequence."""

    def __init__(self, linear: Any, place: int | None = None) -> None:
        super().__init__()
        self.linear, self.place = linear(WIDTH, WIDTH), place

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.linear(x)
        return y.mean(1) if self.place is None else y[:, self.place]


class Summarised(nn.Module):
    """Take the means of a sequence without its first tokens, and of the tokens that count."""

    def __init__(self, linear: Any, first: int = 4, counted: bool = True) -> None:
        super().__init__()
        self.linear, self.first, self.counted = linear(WIDTH, WIDTH), first, counted

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.linear(x)
        counts = (torch.arange(24, device=x.device) % 3 > 0)[:, None].to(y.dtype)
        mean = (y * counts).sum(1) / counts.sum(0) if self.counted else y.mean(1)
        return torch.cat((y[:, self.first :].mean(1), mean), -1)


class Triangles(nn.Module):
    """AlphaFold's update of a pair from the edges that leave both ends, with edges normalised to unit vectors."""

    def __init__(self, linear: Any, equation: str = "bikc,bjkc->bijc", dim: int = -1) -> None:
        super().__init__()
        self.both, self.equation, self.dim = linear(WIDTH, 2 * WIDTH), equation, dim

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        edges = x[:, :8, None] + 2.0 * x[:, None, 8:16]
        left, right = F.normalize(self.both(edges), dim=self.dim).chunk(2, -1)
        return torch.einsum(self.equation, left, right)


class Whitened(nn.Module):
    """Subtract a series' mean and divide by its deviation, without the first steps."""

    def __init__(self, linear: Any, unbiased: bool = False, first: int = 4) -> None:
        super().__init__()
        self.linear, self.unbiased, self.first = linear(WIDTH, WIDTH), unbiased, first

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        deviation = (x.float().var(1, keepdim=True, unbiased=self.unbiased) + 1e-5).sqrt()
        y = self.linear(((x.float() - x.float().mean(1, keepdim=True)) / deviation).to(x.dtype))
        return y[:, 4:] if self.first == 4 else y[:, self.first : self.first + 20]


class Patched(nn.Module):
    """Cut an image into patches whose pixels come before their channels."""

    def __init__(self, linear: Any, order: tuple[int, int, int] = (3, 4, 2)) -> None:
        super().__init__()
        self.linear, self.order = linear(WIDTH, WIDTH), order

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(x.unflatten(2, (4, 4, 4)).permute(0, 1, *self.order).flatten(2))


class Decayed(nn.Module):
    """Linear attention with decaying keys, whose keys and values come from one projection."""

    def __init__(self, linear: Any, decay: str = "", heads_first: bool = False, diagonal: int = 0) -> None:
        super().__init__()
        self.query, self.both, self.out = linear(WIDTH, WIDTH), linear(WIDTH, 2 * WIDTH), linear(WIDTH, WIDTH)
        self.times, self.rates = linear(WIDTH, 4), nn.Parameter(torch.linspace(-1.0, 1.5, 4))
        self.decay, self.heads_first, self.diagonal = decay, heads_first, diagonal

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (4, 16))
        both = self.both(x).unflatten(2, (4, 2, 16) if self.heads_first else (2, 4, 16))
        key, value = both.unbind(3 if self.heads_first else 2)
        times = F.logsigmoid(-self.times(x) if self.decay == "negated" else self.times(x))
        rates = self.rates.abs() if self.decay == "abs" else self.rates.exp()
        decay = (rates * times).cumsum(1).transpose(1, 2)
        is_later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1 + self.diagonal)
        weights = (decay[..., :, None] - decay[..., None, :]).masked_fill(is_later, -math.inf).exp()
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 4.0
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores * weights, value).flatten(2))


OF_LEAKY, OF_ROLL, OF_MEAN = (
    f"the 1st {call} as the reference does; it"
    for call in ("'leaky_relu' of the module", "'roll' of the module and of 1 more like it", "'mean' of the module")
)


@in_turn(
    ("module", "port", "title", "phrase"),
    [
        *(
            (module, {}, "passed", "")
            for module in (Modulated, Timed, Pooled, LastOfEach, Positions, Leaky, Shifted, Averaged)
        ),
        *((module, {}, "passed", "") for module in (Summarised, Triangles, Whitened, Patched, Decayed)),
        (Triangles, dict(equation="bkic,bkjc->bijc"), "operation", "dimensions 1 and 2 of every operand are exchanged"),
        (
            Triangles,
            dict(dim=1),
            "operation",
            "'normalize' of the module as the reference does; it is along dimension 1",
        ),
        (Summarised, dict(first=1), "operation", "it takes all from the 2nd on of dimension 1"),
        (Summarised, dict(counted=False), "operation", "it is the mean of all elements, including those that do not"),
        (LastOfEach, dict(off_by=-1), "operation", "it takes the previous of dimension 1"),
        (LastOfEach, dict(off_by=1), "operation", "it takes the next of dimension 1"),
        (LastOfEach, dict(pool="end"), "operation", "it takes the last of dimension 1"),
        (LastOfEach, dict(pool="mean"), "operation", "it is the mean over dimension 1"),
        (Latent, {}, "passed", ""),
        (Latent, dict(together=True), "operation", "it splits all of dimension 1 at once, not each entry by itself"),
        (LastGathered, {}, "passed", ""),
        (
            LastGathered,
            dict(off_by=-1),
            "operation",
            "'gather' of the module as the reference does; it takes the previous",
        ),
        (LastGathered, dict(pool="end"), "operation", "it takes the last of dimension 1"),
        (LastGathered, dict(pool="mean"), "operation", "it is the mean over dimension 1"),
        (Positions, dict(in_turns=True), "operation", "its parts are interleaved"),
        (Positions, dict(power=6), "operation", "its number is -6 instead of -5"),
        (Positions, dict(table="reversed"), "operation", "operand is in reverse order along dimension 0"),
        (Positions, dict(table="first"), "operation", "operand is that of the first along dimension 0"),
        (Decayed, dict(decay="negated"), "operation", "its argument is negated"),
        (Decayed, dict(decay="abs"), "operation", "it is abs"),
        (Decayed, dict(heads_first=True), "operation", "it splits dimension 2 as 4 x 2 x 16, not 2 x 4 x 16"),
        (Decayed, dict(diagonal=-1), "operation", "its mask begins one place earlier"),
        (Decayed, dict(diagonal=1), "operation", "its mask begins one place later"),
        (Patched, dict(order=(4, 2, 3)), "operation", "the first of its dimensions 2 to 4 is moved to the other end"),
        (Patched, dict(order=(4, 3, 2)), "operation", "its dimensions 2 and 3 are exchanged"),
        (Modulated, dict(order=(1, 0, 2)), "operation", "its parts are in the order 2, 1, 3"),
        (Modulated, dict(order=(2, 0, 1)), "operation", "its parts are in the order 3, 1, 2"),
        (Modulated, dict(one=0.0), "operation", "1st 'add' of the module"),
        (Timed, dict(cosines_first=False), "operation", "its parts are in the order 2, 1"),
        (Timed, dict(steps=31), "operation", "its number is 31 instead of 32"),
        (Pooled, dict(place=-1), "operation", "it takes the last of dimension 1"),
        (Pooled, dict(mean=True), "operation", "it is the mean over dimension 1"),
        (Leaky, dict(slope=0.05), "operation", f"{OF_LEAKY}s negative_slope is 0.05"),
        (Leaky, dict(slope=0.0), "operation", f"{OF_LEAKY} is relu"),
        (Shifted, dict(shift=0), "operation", f"{OF_ROLL} is left"),
        (Averaged, dict(place=0), "operation", f"{OF_MEAN} takes the first of dimension"),
        (Averaged, dict(place=-1), "operation", f"{OF_MEAN} takes the last of dimension"),
        (
            Whitened,
            dict(unbiased=True),
            "operation",
            "the 1st 'var' of the module as the reference does; it divides by 23, not 24 elements",
        ),
        (Whitened, dict(first=1), "operation", "it takes 20 of dimension 1 from the 2nd on"),
        (Whitened, dict(first=3), "operation", "it takes 20 of dimension 1 from the 4th on"),
    ],
)
def test_the_call_and_what_is_wrong_with_it_are_told(module, port, title, phrase, precision):
    tells(twins(module, port, normal((4, 24, WIDTH), (4, WIDTH)), precision), title, phrase)


# Two steps in the other order.


class Scaled(nn.Module):
    """A residual branch whose result is scaled, including the bias, as in Granite."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.up, self.right = linear(WIDTH, WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        if self.right:
            return x + 0.22 * self.up(x)
        return x + 0.22 * (self.up(x) - self.up.bias) + self.up.bias


class Gated(nn.Module):
    """Mamba 2's gate, which multiplies before the norm, and its residual connection."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.down = linear(WIDTH, 2 * WIDTH), norm(WIDTH), linear(WIDTH, WIDTH)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        y, gate = F.silu(self.up(x)).chunk(2, -1)
        return x + self.down(self.norm(y * gate) if self.right else self.norm(y) * gate)


class Grouped(nn.Module):
    """Mamba 2's norm in two groups after its gate, in plain PyTorch; a port may have it before the gate."""

    def __init__(self, linear: Any, norm: Any, right: bool = True, gate_first: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.gate_first = linear(WIDTH, 4 * WIDTH), linear(2 * WIDTH, WIDTH), gate_first is right
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH))

    def normed(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (2, -1))
        return (groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.up(x).chunk(2, -1)
        gate = F.silu(gate)
        return x + self.down(self.normed(y * gate) if self.gate_first else self.normed(y) * gate)


class GateLast(Grouped):
    """The norm with its gain before the gate; a port has it after the gate."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__(linear, norm, right, gate_first=False)


class Activated(nn.Module):
    """Apply an activation, then a norm."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.right = linear(WIDTH, WIDTH), norm(WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.silu(self.up(x))) if self.right else F.silu(self.norm(self.up(x)))


class Standardized(nn.Module):
    """Subtract the inputs' mean and divide by their deviation."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.up, self.right = linear(WIDTH, WIDTH), right
        self.register_buffer("mean", torch.linspace(-1.0, 1.0, WIDTH))
        self.register_buffer("deviation", torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.up((x - self.mean) / self.deviation if self.right else x / self.deviation - self.mean)


class WeightedTokens(nn.Module):
    """Layers whose results are weighted by token; a port weights their inputs instead, and so not their biases."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.layers, self.right = nn.ModuleList(linear(WIDTH, 2 * WIDTH) for _ in range(2)), right

    def forward(self, x: Tensor) -> Tensor:
        weight = x[..., :1].sigmoid()
        return sum(layer(x) * weight if self.right else layer(x * weight) for layer in self.layers)


class WeightedInputs(nn.Module):
    """A layer whose input is weighted by token; a port weights its result instead, including the bias."""

    def __init__(self, linear: Any, norm: Any, right: bool = True) -> None:
        super().__init__()
        self.layer, self.right = linear(WIDTH, 2 * WIDTH), right

    def forward(self, x: Tensor) -> Tensor:
        weight = x[..., :1].sigmoid()
        return self.layer(x * weight) if self.right else self.layer(x) * weight


STEPS = [
    (
        Scaled,
        "take up.bias before the 1st 'mul' of the module, as the reference does; the port has them in",
    ),
    (Gated, "take the 1st 'mul' of the module before the norm of norm, as the reference does"),
    (Grouped, "take the 1st 'mul' of the module before the norm of the module, as the reference does"),
    (GateLast, "take the norm of the module before the 3rd 'mul' of the module, as the reference does"),
    (Activated, "take the silu of the module before the norm of norm, as the reference does"),
    (Standardized, "take the 1st 'sub' of the module before the 1st 'div' of the module, as the reference does"),
    (
        WeightedTokens,
        "take layers.0.bias before the 1st 'mul' of the module, as the reference does, and so for 1 more",
    ),
    (WeightedInputs, "take the 1st 'mul' of the module before the layer of layer.bias, as the reference does"),
]


@in_turn(("right", "module", "steps"), [(right, *row) for right in (False, True) for row in STEPS])
def test_two_steps_in_the_other_order_are_told_by_both(module, steps, right, precision):
    tells_only(in_order(module, precision, right), "passed" if right else "operation", steps)


def test_an_eps_that_fits_best_by_chance_is_not_told_where_something_else_is_wrong_too():
    result = in_order(Gated, "fp32", right=False, also=lambda output: output + 0.003 * torch.sin(9 * output))
    assert result.status == "failed"
    assert {one.title for one in result.findings} <= {"unexplained", "first-divergence"}


def in_order(module: Any, precision: str, right: bool, also: Any = None) -> parity.Result:
    return compared(
        lambda: module(nn.Linear, nn.RMSNorm),
        lambda te: module(te.Linear, lambda width: te.RMSNorm(width, eps=torch.finfo(torch.float32).eps), right),
        normal((2, 16, WIDTH)),
        precision,
        call_candidate=also and (lambda module, x: also(module(x))),
    )


# Calls that read the wrong tensor of the same shape; findings name the tensor that they should read.

HEADS, HEAD = 2, 32


class Skips(nn.Module):
    """A U-Net's long skip connections, of which the last one stored is read first."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.down, self.up = (nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = x + F.silu(layer(x))
            kept.append(x)
        for i, layer in enumerate(self.up):
            skip = kept[{"first": i, "off by one": max(1 - i, 0)}.get(self.mistake, 2 - i)]
            x = self.joined(x, skip)
            x = F.silu(layer(x))
        return x

    def joined(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


class InPlace(Skips):
    """The same skip connections, each added in place."""

    def joined(self, x: Tensor, skip: Tensor) -> Tensor:
        x = x.clone()
        x += skip
        return x


class Streams(nn.Module):
    """Two streams whose layers get shift, scale and gate from the stream's own condition."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stream(linear, mistake) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, y = layer(x, y, condition)
        return x, y


class Stream(nn.Module):
    def __init__(self, linear: Any, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.modulations, self.mixes = (nn.ModuleList(linear(WIDTH, n * WIDTH) for _ in range(2)) for n in (3, 1))

    def forward(self, x: Tensor, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_y = (list(layer(condition)[:, None].chunk(3, -1)) for layer in self.modulations)
        if self.mistake == "gate":
            of_y[2] = of_x[2]
        if self.mistake == "shift and scale":
            of_y[:2] = of_x[:2]
        mixed = (
            given + gate * layer(F.layer_norm(given, (WIDTH,)) * (1 + scale) + shift)
            for layer, given, (shift, scale, gate) in zip(self.mixes, (x, y), (of_x, of_y), strict=True)
        )
        new_x, new_y = mixed
        return new_x, new_y


class Joint(nn.Module):
    """Attention of one stream to both streams."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.of_x, self.of_y = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.of_x(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        other_k, other_v = self.of_y(y).unflatten(-1, (2, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        other_k = k if self.mistake == "keys" else other_k
        keys, values = torch.cat((k, other_k), 2), torch.cat((v, other_v), 2)
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """A sum with learned weights and a bias, each of them a single number."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.up, self.weights = mistake, linear(WIDTH, WIDTH), nn.Parameter(torch.tensor([0.75, 0.25]))
        self.bias = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        of_x, of_up = self.weights.unbind()
        return (of_up if self.mistake == "weight" else of_x) * x + of_up * self.up(x) + self.bias


class Relative(nn.Module):
    """Transformer-XL's shift of scores by relative position."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.q, self.r = mistake, linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        scores = self.q(x) @ self.r(x.flip(1).cumsum(1)).mT
        moved = F.pad(scores, (1, 0)).view(-1, seq + 1, seq)[:, 1:].reshape(-1, seq, seq)
        return (x @ x.mT + (scores if self.mistake == "shift" else moved)).softmax(-1) @ x


ONE, TWO = normal((2, 16, WIDTH)), normal(*[(2, 16, WIDTH)] * 2)
WITH_CONDITION = normal(*[(2, 16, WIDTH)] * 2, (2, WIDTH))
OF_SKIP = "give the result of the 3rd 'add' of the module to the 4th 'add' of the module, as the"


@in_turn(
    ("module", "inputs", "mistake", "title", "phrase"),
    [
        (Skips, ONE, "", "passed", ""),
        (InPlace, ONE, "", "passed", ""),
        (Streams, WITH_CONDITION, "", "passed", ""),
        (Joint, TWO, "", "passed", ""),
        (Relative, ONE, "", "passed", ""),
        (Mixed, ONE, "", "passed", ""),
        (Mixed, ONE, "weight", "operation", "give part 1 of the result of the 1st 'unbind' of the module to the 1st"),
        (Skips, ONE, "first", "operation", OF_SKIP),
        (InPlace, ONE, "first", "operation", OF_SKIP),
        (Skips, ONE, "off by one", "operation", "not the result of the 2nd 'add' of the module"),
        (Streams, WITH_CONDITION, "gate", "operation", "give part 3 of the result of the 2nd 'chunk' of layers.0 to"),
        (
            Streams,
            WITH_CONDITION,
            "shift and scale",
            "operation",
            "give part 2 of the result of the 2nd 'chunk' of layers.0 to",
        ),
        (Joint, TWO, "keys", "operation", "to the 1st 'cat' of the module, as the reference does, not"),
        (
            Relative,
            ONE,
            "shift",
            "operation",
            "as the reference does, not the result of the 1st 'matmul' of the module",
        ),
    ],
)
def test_the_tensor_that_is_not_read_is_told_with_its_place(module, inputs, mistake, title, phrase, precision):
    tells_only(twins(module, dict(mistake=mistake), inputs, precision), title, phrase)
