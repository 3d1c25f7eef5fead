"""Calls that read another tensor of the same shape than the reference's, told by what they should read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS = 64, 2
HEAD = WIDTH // HEADS


class Skips(nn.Module):
    """A U-Net's long skip connections: the last that is kept is read first."""

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
    """Each is added to what is there."""

    def joined(self, x: Tensor, skip: Tensor) -> Tensor:
        x = x.clone()
        x += skip
        return x


class Streams(nn.Module):
    """Two streams whose layers have shift, scale and gate from a condition of their own."""

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
    """Attention of one stream to both."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.of_x, self.of_y = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.of_x(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        other_k, other_v = self.of_y(y).unflatten(-1, (2, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        other_k = k if self.mistake == "keys" else other_k
        keys, values = torch.cat((k, other_k), 2), torch.cat((v, other_v), 2)
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


class Shifted(nn.Module):
    """Transformer-XL's shift of scores by relative position."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.q, self.r = mistake, linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        scores = self.q(x) @ self.r(x.flip(1).cumsum(1)).mT
        moved = F.pad(scores, (1, 0)).view(-1, seq + 1, seq)[:, 1:].reshape(-1, seq, seq)
        return (x @ x.mT + (scores if self.mistake == "shift" else moved)).softmax(-1) @ x


INPUTS: dict[Any, int] = {Skips: 1, InPlace: 1, Streams: 2, Joint: 2, Shifted: 1}


def result(module: Any, mistake: str, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right, port = module(nn.Linear), module(te.Linear, mistake)

        def inputs(rng: Any) -> tuple[Tensor, ...]:
            condition = (rng.normal(2, WIDTH),) if module is Streams else ()
            return (*(rng.normal(2, 16, WIDTH) for _ in range(INPUTS[module])), *condition)

        return parity.Pair(right, port, inputs, weights={name: name for name, _ in right.named_parameters()})

    (one,) = parity.compare(parity.Case("operands", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "mistake", "told"),
    [
        (Skips, "first", "give the result of the 3rd 'add' of the module to the 4th 'add' of the module, as the"),
        (InPlace, "first", "give the result of the 3rd 'add' of the module to the 4th 'add' of the module, as the"),
        (Skips, "off by one", "not the result of the 2nd 'add' of the module"),
        (Streams, "gate", "give part 3 of the result of the 2nd 'chunk' of layers.0 to"),
        (Streams, "shift and scale", "give part 2 of the result of the 2nd 'chunk' of layers.0 to"),
        (Joint, "keys", "to the 1st 'cat' of the module, as the reference does, not"),
        (Shifted, "shift", "as the reference does, not the result of the 1st 'matmul' of the module"),
    ],
)
def test_the_tensor_that_is_not_read_is_told_with_its_place(module, mistake, told, precision):
    (finding,) = result(module, mistake, precision).findings
    assert finding.title == "operation"
    assert told in finding.message


@pytest.mark.parametrize("module", INPUTS)
def test_right_ports_pass(module):
    assert result(module, "", "bf16").passed
