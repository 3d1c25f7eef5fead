"""An input that splits rows as a mask does: ids of packed documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import parity
from lab.corpus.small import twins
from parity.case.case import Rng


class Packed(nn.Module):
    """A linear layer of tokens that also reads the id of each token's document; the port adds no known mistake."""

    def __init__(self, linear: Any, wave: float = 0.0) -> None:
        super().__init__()
        self.linear, self.wave = linear(64, 64), wave

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        y = self.linear(x) * (1.0 + 0.0 * documents[..., None])
        return y + self.wave * (7.0 * y.flip(-1)).sin() if self.wave else y


def test_the_ids_of_documents_are_no_mask():
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        return rng.normal(2, 32, 64), (torch.arange(32) > 19).long().expand(2, -1).contiguous()

    (result,) = parity.compare(twins(Packed, inputs).case(wave=0.3), ["bf16"])
    assert not result.passed
    assert "hidden-rows" not in [one.title for one in result.findings]
