"""Models that are given ids are probed by the rows of their tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

VOCABULARY, WIDTH = 96, 64


class Model(nn.Module):
    """Its table holds normal numbers, far above any eps."""

    def __init__(self, norm: Any, linear: Any, eps: float, table: Any = nn.Embedding) -> None:
        super().__init__()
        self.tokens = table(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH, eps=eps) for _ in range(2))
        self.layer, self.head = linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(self.norms[1](x + self.layer(self.norms[0](x))))


class Indexed(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class OneHot(Indexed):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, len(self.weight)).to(self.weight.dtype) @ self.weight


def result(precision: str, eps: float = 1e-6, tables: tuple[Any, Any] = (nn.Embedding, nn.Embedding)) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        reference = Model(nn.RMSNorm, nn.Linear, 1e-6, tables[0])
        candidate = Model(te.RMSNorm, te.Linear, eps, tables[1])
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.integers(2, 64, high=VOCABULARY), names)

    (one,) = parity.compare(parity.Case("model", factory, sizes=({},)), [precision])
    return one


def probed(one: parity.Result) -> list[str]:
    return [tensor.name for tensor in one.tensors if tensor.probed]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current"])
def test_a_right_port_passes_on_rows_of_every_magnitude(precision):
    one = result(precision)
    assert one.passed
    assert probed(one) == ["output"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current"])
def test_an_eps_is_told_that_a_table_of_normal_numbers_hides(precision):
    one = result(precision, eps=1e-5)
    assert not one.passed
    assert one.findings[0].title == "norm-eps"
    assert "1e-06; it computes with eps=1e-05" in one.findings[0].message


def test_a_port_that_looks_its_rows_up_otherwise_is_not_probed_and_a_note_says_so():
    one = result("bf16", tables=(nn.Embedding, Indexed))
    assert one.passed
    assert not probed(one)
    assert any("looks up other rows" in note for note in one.notes)


def test_what_no_probe_would_change_is_compared_once():
    one = result("bf16", tables=(OneHot, OneHot))
    assert one.passed
    assert not probed(one)


def test_a_reference_without_lookups_is_probed_with_a_port_that_has_one():
    class Joined(nn.Module):
        def __init__(self, table: Any, norm: Any) -> None:
            super().__init__()
            self.tokens, self.norm = table(VOCABULARY, WIDTH), norm(WIDTH)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.norm(x + self.tokens(ids))

    def factory(te: Any, **_: Any) -> parity.Pair:
        reference, candidate = Joined(OneHot, nn.LayerNorm), Joined(nn.Embedding, te.LayerNorm)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, inputs, names)

    def inputs(rng: Any) -> dict[str, Tensor]:
        return {"x": rng.normal(64, WIDTH), "ids": rng.integers(64, high=VOCABULARY)}

    (one,) = parity.compare(parity.Case("joined", factory, sizes=({},)), ["bf16"])
    assert one.passed
    assert probed(one) == ["output"]
