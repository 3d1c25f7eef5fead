"""A norm that TE has several times is computed, and differentiated, as often."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parity import copies, stack
from parity.case.transfer import separate_norms

WEIGHTS = {
    "ln.weight": copies("attention.layer_norm_weight", "mlp.layer_norm_weight"),
    "ln.bias": copies("attention.layer_norm_bias", "mlp.layer_norm_bias"),
    "query.weight": "attention.weight",
    stack("gate.weight", "up.weight"): "mlp.fc1_weight",
}


class Noting(nn.Linear):
    """Keeps what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return super().forward(x)


class Parallel(nn.Module):
    """Three layers that read one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.query, self.gate, self.up = (Noting(8, 8, bias=False) for _ in range(3))

    @property
    def read(self) -> list[Tensor]:
        """What the layers were given last."""
        return [self.query.given, self.gate.given, self.up.given]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln(x)
        return x + self.query(normed) + self.gate(normed) * self.up(normed)


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def test_layers_of_one_te_module_share_a_norm_that_others_do_not_read():
    module, x = Parallel(), torch.randn(3, 8)
    with separate_norms(module, WEIGHTS):
        module(x)
    query, gate, up = module.read
    assert gate is up
    assert query is not gate
    module(x)
    assert module.read[0] is module.read[1] is module.read[2]


def test_nothing_else_changes():
    module, x = Parallel().double(), torch.randn(3, 8, dtype=torch.float64)
    plain = run(module, x)
    with separate_norms(module, WEIGHTS):
        separate = run(module, x)
    torch.testing.assert_close(separate, plain, rtol=1e-12, atol=1e-12)


def test_each_pass_has_norms_of_its_own():
    module = Parallel().double()
    with separate_norms(module, WEIGHTS):
        for seed in (0, 1):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            module(x)
            torch.testing.assert_close(module.read[1], module.read[0])
