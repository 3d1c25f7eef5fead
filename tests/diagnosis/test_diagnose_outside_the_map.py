"""What no weight map is about: a module's buffers, and the order of what it returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity

HIDDEN, FEATURES, ROWS = 64, 16, 32


class Fourier(nn.Module):
    def __init__(self, linear, seed: int, name: str = "directions", exchanged: bool = False) -> None:
        super().__init__()
        self.name, self.exchanged, self.fc = name, exchanged, linear(2 * FEATURES, HIDDEN)
        drawn = torch.randn(FEATURES, HIDDEN, generator=torch.Generator().manual_seed(seed))
        self.register_buffer(name, 0.1 * drawn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = x @ getattr(self, self.name).T
        y = self.fc(torch.cat((angles.sin(), angles.cos()), -1))
        return (x * y, y) if self.exchanged else (y, x * y)


def found(**port):
    def factory(te, **_):
        return parity.Pair(
            reference=Fourier(nn.Linear, 0),
            candidate=Fourier(te.Linear, **{"seed": 0, **port}),
            inputs=lambda rng, rows: rng.normal(rows, HIDDEN),
            weights={name: name for name in ("fc.weight", "fc.bias")},
        )

    (result,) = parity.compare(parity.Case("fourier", factory, sizes=(dict(rows=ROWS),)), ["fp32"])
    return [(one.title, one.message) for one in result.findings] if result.status == "failed" else result.status


def test_the_same_buffers_in_the_same_order_pass():
    assert found(name="of_another_name") == "passed"


@pytest.mark.parametrize("name", ["directions", "of_another_name"])
def test_a_buffer_of_other_values_is_told_by_name(name):
    ((title, message),) = found(seed=1, name=name)
    assert title == "buffer-not-copied"
    assert f"copy {name}" in message


def test_outputs_in_another_order_are_told():
    ((title, message),) = found(exchanged=True)
    assert title == "outputs-exchanged"
    assert message.startswith("output[0] is the reference's output[1], output[1] is the reference's output[0]")
