"""Single calls that compute something else: another part, number, shift, mean or count."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import normal, twins

WIDTH, SEQ = 64, 24
SEQUENCES = normal((4, SEQ, WIDTH))

# Tables of sines and cosines, biases made of distances, and which tokens of a sequence are read.


class Timed(nn.Module):
    """Sines and cosines of times, with frequencies that depend on numbers, and ALiBi's distances."""

    def __init__(
        self,
        linear: Any,
        parts: tuple[int, int] = (0, 1),
        in_turns: bool = False,
        power: int = 5,
        steps: int = 8,
        slopes: str = "",
    ) -> None:
        super().__init__()
        self.linear, self.parts, self.in_turns = linear(WIDTH, WIDTH), parts, in_turns
        self.power, self.steps, self.slopes = power, steps, slopes

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        frequencies = 2.0 ** (-self.power + torch.arange(32.0, device=x.device) / self.steps)
        angles = times.float() * frequencies
        parts = [(angles.cos(), angles.sin())[part] for part in self.parts]
        embedded = torch.stack(parts, -1).flatten(1) if self.in_turns else torch.cat(parts, -1)
        places = torch.arange(24.0, device=x.device)
        apart = (places[:, None] - places).abs() * torch.tensor([0.05, 0.1, 0.2, 0.4], device=x.device)[:, None, None]
        apart = {"reversed": apart.flip(0), "the first": apart[:1].expand_as(apart)}.get(self.slopes, apart)
        y = self.linear(x + embedded[:, None].to(x.dtype))
        return (y.unflatten(2, (4, 16)).permute(0, 2, 3, 1)[..., None, :] * (-apart).exp()[:, None]).sum(-1)


class LastOfEach(nn.Module):
    """Read the last token of sequences of different lengths."""

    def __init__(self, linear: Any, gather: bool = False, off_by: int = 0, pool: str = "") -> None:
        super().__init__()
        self.linear, self.gather, self.off_by, self.pool = linear(WIDTH, WIDTH), gather, off_by, pool

    def forward(self, x: Tensor) -> Tensor:
        if self.pool:
            return self.linear(x[:, -1] if self.pool == "end" else x.mean(1))
        last = torch.tensor([19, 11, 16, 4], device=x.device) + self.off_by
        if self.gather:
            return self.linear(x.gather(1, last[:, None, None].expand(-1, 1, WIDTH)).squeeze(1))
        return self.linear(x[torch.arange(len(x), device=x.device), last])


class Series(nn.Module):
    """Subtract a series' mean and divide by its deviation; return its last steps, and their mean and that of others."""

    def __init__(
        self, linear: Any, unbiased: bool = False, summarised: int = 4, counted: bool = True, returned: int = 4
    ) -> None:
        super().__init__()
        self.linear, self.unbiased, self.counted = linear(WIDTH, WIDTH), unbiased, counted
        self.summarised, self.returned = summarised, returned

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        deviation = (x.float().var(1, keepdim=True, unbiased=self.unbiased) + 1e-5).sqrt()
        y = self.linear(((x.float() - x.float().mean(1, keepdim=True)) / deviation).to(x.dtype))
        counts = (torch.arange(SEQ, device=x.device) % 3 > 0)[:, None].to(y.dtype)
        mean = (y * counts).sum(1) / counts.sum(0) if self.counted else y.mean(1)
        summary = torch.cat((y[:, self.summarised :].mean(1), mean), -1)
        return summary, y[:, self.returned : self.returned + SEQ - 4]


# Dimensions that are split, exchanged or shifted.


class Latent(nn.Module):
    """Split each of four heads into two parts, as with keys and values that come from one projection."""

    def __init__(self, linear: Any, together: bool = False) -> None:
        super().__init__()
        self.up, self.out, self.together = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), together

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.together:
            parts = x.split([WIDTH // 4, 3 * WIDTH // 4], -1)
            keys, values = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        else:
            keys, values = x.unflatten(-1, (4, -1)).transpose(1, 2).split([WIDTH // 16, 3 * WIDTH // 16], -1)
        return self.out(torch.cat((2.0 * keys, values.sin()), -1).transpose(1, 2).flatten(2))


class Shifted(nn.Module):
    """Cumulative sums in shifted windows, as in Swin."""

    def __init__(self, linear: Any, shift: int = 2) -> None:
        super().__init__()
        self.linear, self.shift = linear(WIDTH, WIDTH), shift

    def forward(self, x: Tensor) -> Tensor:
        y = x.roll(-self.shift, 1) if self.shift else x
        y = self.linear(y.unflatten(1, (-1, 8)).cumsum(2)).flatten(1, 2)
        return x + (y.roll(self.shift, 1) if self.shift else y)


class Triangles(nn.Module):
    """AlphaFold's update of a pair from the edges that leave both ends, with edges normalised to unit vectors."""

    def __init__(self, linear: Any, equation: str = "bikc,bjkc->bijc", dim: int = -1) -> None:
        super().__init__()
        self.both, self.equation, self.dim = linear(WIDTH, 2 * WIDTH), equation, dim

    def forward(self, x: Tensor) -> Tensor:
        edges = x[:, :8, None] + 2.0 * x[:, None, 8:16]
        left, right = F.normalize(self.both(edges), dim=self.dim).chunk(2, -1)
        return torch.einsum(self.equation, left, right)


class Patched(nn.Module):
    """Cut an image into patches whose pixels come before their channels."""

    def __init__(self, linear: Any, order: tuple[int, int, int] = (3, 4, 2)) -> None:
        super().__init__()
        self.linear, self.order = linear(WIDTH, WIDTH), order

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unflatten(2, (4, 4, 4)).permute(0, 1, *self.order).flatten(2))


class Leaky(nn.Module):
    """An activation with a constant."""

    def __init__(self, linear: Any, slope: float = 0.2) -> None:
        super().__init__()
        self.up, self.down, self.slope = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), slope

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(x), self.slope))


class Decayed(nn.Module):
    """Linear attention with decaying keys, whose keys and values come from one projection."""

    def __init__(self, linear: Any, decay: str = "", heads_first: bool = False, diagonal: int = 0) -> None:
        super().__init__()
        self.query, self.both, self.out = linear(WIDTH, WIDTH), linear(WIDTH, 2 * WIDTH), linear(WIDTH, WIDTH)
        self.times, self.rates = linear(WIDTH, 4), nn.Parameter(torch.linspace(-1.0, 1.5, 4))
        self.decay, self.heads_first, self.diagonal = decay, heads_first, diagonal

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (4, 16))
        both = self.both(x).unflatten(2, (4, 2, 16) if self.heads_first else (2, 4, 16))
        key, value = both.unbind(3 if self.heads_first else 2)
        times = F.logsigmoid(-self.times(x) if self.decay == "negated" else self.times(x))
        rates = self.rates.abs() if self.decay == "abs" else self.rates.exp()
        decay = (rates * times).cumsum(1).transpose(1, 2)
        is_later = torch.ones(SEQ, SEQ, dtype=torch.bool, device=x.device).triu(1 + self.diagonal)
        weights = (decay[..., :, None] - decay[..., None, :]).masked_fill(is_later, -math.inf).exp()
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 4.0
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores * weights, value).flatten(2))


TIMED = twins(Timed, normal((4, SEQ, WIDTH), (4, 1)))
SERIES, LATENT, SHIFTED, TRIANGLES, PATCHED, LEAKY, DECAYED = (
    twins(one, SEQUENCES) for one in (Series, Latent, Shifted, Triangles, Patched, Leaky, Decayed)
)
LAST_INDEXED, LAST_GATHERED = (
    twins(LastOfEach, SEQUENCES, name, settings=dict(gather=name == "last_gathered"))
    for name in ("last_indexed", "last_gathered")
)
OF_LEAKY, OF_ROLL, OF_GATHER = (
    f"the 1st {call} as the reference does; it"
    for call in (
        "'leaky_relu' of the module",
        "'roll' of the module and of 1 more like it",
        "'gather' of the module",
    )
)

PORTS = (
    *(host.right() for host in (TIMED, LAST_INDEXED, LAST_GATHERED, SERIES)),
    *(host.right() for host in (LATENT, SHIFTED, TRIANGLES, PATCHED, LEAKY, DECAYED)),
    TIMED.wrong("operation", "its parts are in the order 2, 1", parts=(1, 0)),
    TIMED.wrong("operation", "its parts are interleaved", in_turns=True),
    TIMED.wrong("operation", "its number is 7 instead of 8", steps=7),
    TIMED.wrong("operation", "its number is -6 instead of -5", power=6),
    TIMED.wrong("operation", "operand is in reverse order along dimension 0", slopes="reversed"),
    TIMED.wrong("operation", "operand is that of the first along dimension 0", slopes="the first"),
    LAST_INDEXED.wrong("operation", "it takes the previous of dimension 1", off_by=-1),
    LAST_INDEXED.wrong("operation", "it takes the next of dimension 1", off_by=1),
    LAST_INDEXED.wrong("operation", "it takes the last of dimension 1", pool="end"),
    LAST_INDEXED.wrong("operation", "it is the mean over dimension 1", pool="mean"),
    LAST_GATHERED.wrong("operation", f"{OF_GATHER} takes the previous", off_by=-1),
    LAST_GATHERED.wrong("operation", f"{OF_GATHER} takes the last of dimension 1", pool="end"),
    LAST_GATHERED.wrong("operation", f"{OF_GATHER} is the mean over dimension 1", pool="mean"),
    SERIES.wrong("operation", "it takes all from the 2nd on of dimension 1", summarised=1),
    SERIES.wrong("operation", "it is the mean of all elements, including those that do not", counted=False),
    SERIES.wrong(
        "operation",
        "the 1st 'var' of the module as the reference does; it divides by 23, not 24 elements",
        unbiased=True,
    ),
    SERIES.wrong("operation", "it takes 20 of dimension 1 from the 4th on", returned=3),
    LATENT.wrong("operation", "it splits all of dimension 1 at once, not each entry by itself", together=True),
    SHIFTED.wrong("operation", f"{OF_ROLL} is left", shift=0),
    SHIFTED.wrong("operation", OF_ROLL, shift=-2),
    TRIANGLES.wrong("operation", "dimensions 1 and 2 of every operand are exchanged", equation="bkic,bkjc->bijc"),
    TRIANGLES.wrong("operation", "'normalize' of the module as the reference does; it is along dimension 1", dim=1),
    PATCHED.wrong("operation", "the first of its dimensions 2 to 4 is moved to the other end", order=(4, 2, 3)),
    PATCHED.wrong("operation", "its dimensions 2 and 3 are exchanged", order=(4, 3, 2)),
    LEAKY.wrong("operation", f"{OF_LEAKY}s negative_slope is 0.05", slope=0.05),
    LEAKY.wrong("operation", f"{OF_LEAKY} is relu", slope=0.0),
    DECAYED.wrong("operation", "its argument is negated", decay="negated"),
    DECAYED.wrong("operation", "it is abs", decay="abs"),
    DECAYED.wrong("operation", "it splits dimension 2 as 4 x 2 x 16, not 2 x 4 x 16", heads_first=True),
    DECAYED.wrong("operation", "its mask begins one place earlier", diagonal=-1),
    DECAYED.wrong("operation", "its mask begins one place later", diagonal=1),
)
