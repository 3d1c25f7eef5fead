"""An input may be read by a layer of TE's and by a plain one: each gradient is rounded as its own layer's is."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import parity

WIDTH = 64


class Both(nn.Module):
    """Two layers of one input, of which a port leaves the second to PyTorch."""

    def __init__(self, linear, frozen: bool) -> None:
        super().__init__()
        self.of_te, self.plain = linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.plain.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_te(x) * self.plain(x).tanh()


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.parametrize("frozen", [True, False], ids=["a frozen plain layer", "a trained plain layer"])
def test_right_ports_pass_and_what_is_expected_of_them_is_what_they_lose(frozen, precision):
    def factory(te, **_):
        reference = Both(nn.Linear, frozen)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, Both(te.Linear, frozen), lambda rng: rng.normal(48, WIDTH), weights=names)

    for result in parity.compare(parity.Case("both", factory, sizes=({},)), [precision], seeds=range(3)):
        assert result.passed, result.findings
        by_label = {tensor.label: tensor for tensor in result.tensors}
        for name in ["of_te.weight"] if frozen else ["of_te.weight", "plain.weight"]:
            tensor = by_label[f"d {name}"]
            assert tensor.errors.relative_l2 == pytest.approx(tensor.expected.relative_l2, rel=0.1)
