"""Attention to the joined keys of two streams, of which a port leaves some out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS = 64, 2
HEAD = WIDTH // HEADS


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """MMDiT's attention: queries of both streams see keys of both."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.of_image, self.of_text = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        of_image, of_text = (
            layer(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
            for layer, x in ((self.of_image, image), (self.of_text, text))
        )
        q, k, v = (torch.cat(parts, 2) for parts in zip(of_image, of_text, strict=True))
        if self.mistake == "without text":
            k, v = of_image[1], of_image[2]
        new_image, new_text = attended(q, k, v).split((image.shape[1], text.shape[1]), 1)
        if self.mistake in ("image alone", "each alone"):
            new_image = attended(*of_image)
        if self.mistake == "each alone":
            new_text = attended(*of_text)
        return image + new_image, text + new_text


class Blocks(nn.Module):
    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear, mistake) for _ in range(2))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            image, text = block(image, text)
        return image, text


def result(mistake: str, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right, port = Blocks(nn.Linear), Blocks(te.Linear, mistake)
        names = {name: name for name, _ in right.named_parameters()}
        return parity.Pair(right, port, lambda rng: (rng.normal(2, 16, WIDTH), rng.normal(2, 8, WIDTH)), weights=names)

    (one,) = parity.compare(parity.Case("streams", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("each alone", "those of each stream see its own keys alone"),
        ("image alone", "those of stream 1 see its own keys alone"),
        ("without text", "none sees the keys of stream 2"),
    ],
)
def test_the_stream_whose_keys_are_not_seen_is_told(mistake, told, precision):
    finding = result(mistake, precision).findings[0]
    assert finding.title == "mask"
    assert finding.message.endswith(told)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_streams_seen_by_both_pass(precision):
    assert result("", precision).passed
