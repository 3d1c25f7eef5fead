"""A reference that remembers its last call has no golden value; the error names what it remembers."""

from __future__ import annotations

import torch
from bad_input import WIDTH, Wrapped, assert_says, linear, result_of, te, wrapped
from torch import Tensor, nn


class Counting(Wrapped):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Growing(Wrapped):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer(x))
        return torch.cat(self.seen)


class Remembering(Wrapped):
    """Keeps a table that every call would make the same."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, device=x.device)
        return self.layer(x) + self.table.to(x.dtype) / WIDTH


def test_a_number_that_each_call_changes_is_named():
    assert_says(result_of(wrapped(Counting)), "error", "the reference remembers its last call in calls")


def test_a_list_that_each_call_makes_longer_is_named():
    assert_says(result_of(wrapped(Growing)), "error", "the reference remembers its last call in seen")


def test_the_attribute_of_a_part_is_named_with_the_part():
    nested = dict(
        reference=nn.Sequential(Counting(nn.Linear(WIDTH, WIDTH))),
        candidate=nn.Sequential(Counting(te.Linear(WIDTH, WIDTH))),
        weights={"0.layer.weight": "0.layer.weight", "0.layer.bias": "0.layer.bias"},
    )
    assert_says(result_of(linear(**nested)), "error", "in 0.calls")


def test_a_table_that_is_made_once_and_kept_is_no_mistake():
    assert_says(result_of(wrapped(Remembering)), "passed")


class MadeInFirstCall(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = self.kind(WIDTH, WIDTH).to(x)
        return self.layer(x)


def test_parameters_that_the_first_call_makes_are_named():
    pair = linear(reference=MadeInFirstCall(nn.Linear), candidate=MadeInFirstCall(te.Linear), weights={})
    assert_says(result_of(pair), "error", "makes its parameter layer.weight in its first call")
