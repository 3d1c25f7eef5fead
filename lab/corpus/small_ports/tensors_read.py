"""Calls that read the wrong tensor of the same shape; findings name the tensor that they should read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import normal, twins

WIDTH, HEADS, HEAD = 64, 2, 32


class Skips(nn.Module):
    """A U-Net's long skip connections, of which the last one stored is read first."""

    def __init__(self, linear: Any, in_place: bool = False, reads: str = "last") -> None:
        super().__init__()
        self.in_place, self.reads = in_place, reads
        self.down, self.up = (nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = x + F.silu(layer(x))
            kept.append(x)
        for i, layer in enumerate(self.up):
            skip = kept[{"first": i, "the one before": max(1 - i, 0)}.get(self.reads, 2 - i)]
            if self.in_place:
                x = x.clone()
                x += skip
            else:
                x = x + skip
            x = F.silu(layer(x))
        return x


class Stream(nn.Module):
    def __init__(self, linear: Any, exchanged: slice) -> None:
        super().__init__()
        self.exchanged = exchanged
        self.modulations, self.mixes = (nn.ModuleList(linear(WIDTH, n * WIDTH) for _ in range(2)) for n in (3, 1))

    def forward(self, x: Tensor, y: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
        of_x, of_y = (list(layer(condition)[:, None].chunk(3, -1)) for layer in self.modulations)
        of_y[self.exchanged] = of_x[self.exchanged]
        return tuple(
            given + gate * layer(F.layer_norm(given, (WIDTH,)) * (1 + scale) + shift)
            for layer, given, (shift, scale, gate) in zip(self.mixes, (x, y), (of_x, of_y), strict=True)
        )


class Streams(nn.Module):
    """Two streams whose layers get shift, scale and gate from the stream's own condition."""

    def __init__(self, linear: Any, exchanged: slice = slice(0)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stream(linear, exchanged) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, y = layer(x, y, condition)
        return x, y


class Joint(nn.Module):
    """Attention of one stream to both streams."""

    def __init__(self, linear: Any, own_keys_twice: bool = False) -> None:
        super().__init__()
        self.own_keys_twice = own_keys_twice
        self.of_x, self.of_y = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.of_x(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        other_k, other_v = self.of_y(y).unflatten(-1, (2, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((k, k if self.own_keys_twice else other_k), 2), torch.cat((v, other_v), 2)
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """A sum with learned weights and a bias, each of them a single number."""

    def __init__(self, linear: Any, one_weight: bool = False) -> None:
        super().__init__()
        self.one_weight, self.up, self.weights = (
            one_weight,
            linear(WIDTH, WIDTH),
            nn.Parameter(torch.tensor([0.75, 0.25])),
        )
        self.bias = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        of_x, of_up = self.weights.unbind()
        return (of_up if self.one_weight else of_x) * x + of_up * self.up(x) + self.bias


class Relative(nn.Module):
    """Transformer-XL's shift of scores by relative position."""

    def __init__(self, linear: Any, shifts: bool = True) -> None:
        super().__init__()
        self.shifts, self.q, self.r = shifts, linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        scores = self.q(x) @ self.r(x.flip(1).cumsum(1)).mT
        moved = F.pad(scores, (1, 0)).view(-1, seq + 1, seq)[:, 1:].reshape(-1, seq, seq)
        return (x @ x.mT + (moved if self.shifts else scores)).softmax(-1) @ x


ONE = (2, 16, WIDTH)
SKIPS, MIXED, RELATIVE = (twins(one, normal(ONE)) for one in (Skips, Mixed, Relative))
IN_PLACE = twins(Skips, normal(ONE), "skips_in_place", settings=dict(in_place=True))
JOINT, STREAMS = twins(Joint, normal(ONE, ONE)), twins(Streams, normal(ONE, ONE, (2, WIDTH)))
OF_SKIP = "give the result of the 3rd 'add' of the module to the 4th 'add' of the module, as the"
OF_STREAM = "of the result of the 2nd 'chunk' of layers.0 to"

PORTS = (
    *(host.right() for host in (SKIPS, IN_PLACE, STREAMS, JOINT, RELATIVE, MIXED)),
    SKIPS.wrong("operation", OF_SKIP, reads="first"),
    SKIPS.wrong("operation", "not the result of the 2nd 'add' of the module", reads="the one before"),
    IN_PLACE.wrong("operation", "to the 4th 'add' of the module, as the", reads="first"),
    MIXED.wrong("operation", "give part 1 of the result of the 1st 'unbind' of the module to the 1st", one_weight=True),
    STREAMS.wrong("operation", f"give part 3 {OF_STREAM}", name="the other stream's gate", exchanged=slice(2, 3)),
    STREAMS.wrong(
        "operation", f"give part 1 {OF_STREAM}", name="the other stream's shift and scale", exchanged=slice(2)
    ),
    JOINT.wrong("operation", "to the 1st 'cat' of the module, as the reference does, not", own_keys_twice=True),
    RELATIVE.wrong(
        "operation", "as the reference does, not the result of the 1st 'matmul' of the module", shifts=False
    ),
)
