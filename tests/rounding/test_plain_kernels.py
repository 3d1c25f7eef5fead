"""What PyTorch's own kernels do to a port is expected of it: they are the port's, and nothing of TE stands for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.numerics.formats import Rounding
from parity.numerics.rounding import rounded


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_the_gradient_of_an_embedding_is_summed_as_pytorch_sums_it_in_the_dtype(storage):
    """On a CPU in the dtype itself, where a row that is read a thousand times loses most of its gradient."""
    index, ones = torch.zeros(1, 1024, dtype=torch.int64), torch.full((1, 1024, 4), 0.7).to(storage)
    table = torch.zeros(2, 4, requires_grad=True)
    with rounded(Rounding(storage)) as phase:
        rows = F.embedding(index, table)
        phase.begin_backward()
        rows.backward(ones.float())
    stored = torch.zeros(2, 4, dtype=storage, requires_grad=True)
    F.embedding(index, stored).backward(ones)
    assert torch.equal(table.grad, stored.grad.float())


class Images(nn.Module):
    """A convolution and a batch norm in front of a linear layer; a bias in front of a batch norm has no gradient."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.linear = linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.avg_pool2d(F.relu(self.norm(self.convolution(x))), 4).flatten(1))


class Groups(nn.Module):
    """A group norm behind a linear layer."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.linear, self.norm, self.last = linear(64, 64), nn.GroupNorm(8, 64), linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


class Mixed(nn.Module):
    """Parameters of which something is computed first, and a mean over the tokens that count."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(64))
        self.linear = linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        y = self.linear(x * self.mix + before * (1 - self.mix))
        counted = (torch.arange(x.shape[1]) % 3 > 0).to(y.dtype)[None, :, None]
        return (y * counted).sum(1) / counted.sum(1)


class Typed(nn.Module):
    """An embedding whose rows are read by many tokens each."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.types, self.linear = nn.Embedding(2, 64), linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.types((torch.arange(x.shape[1]) > 3).long()[None].expand(len(x), -1)))


TOKENS = (16, 48, 64)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
@pytest.mark.parametrize(
    ("module", "shape"), [(Images, (32, 3, 16, 16)), (Groups, TOKENS), (Mixed, TOKENS), (Typed, TOKENS)]
)
def test_right_ports_with_layers_that_te_has_not_pass_on_every_seed(module, shape, precision):
    def factory(te, **_):
        right = module(nn.Linear)
        return parity.Pair(
            reference=right,
            candidate=module(te.Linear),
            inputs=lambda rng: rng.normal(*shape),
            weights={name: name for name, _ in right.named_parameters()},
        )

    results = parity.compare(parity.Case("plain", factory, sizes=({},)), [precision], seeds=range(4))
    assert {result.status for result in results} == {"passed"}
