"""Mistakes that are made alike in several places of one kind, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, FFN, EXPERTS = 64, 96, 3


def found(plain: nn.Module, ported: Any, inputs: Any, precision: str, probe: bool = True) -> tuple[str, str]:
    """Title and message of the first finding; the status where the port passed."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        return parity.Pair(plain, ported(te), inputs, {name: name for name, _ in plain.named_parameters()})

    (one,) = parity.compare(parity.Case("alike", factory, sizes=({},), probe=probe), [precision])
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, one.reason)


class Experts(nn.Module):
    """Each token goes to one expert, and to one that all share; ``act`` is the experts' own."""

    def __init__(self, linear: Any, act: Any = F.silu) -> None:
        super().__init__()
        self.act = act
        self.experts = nn.ModuleList(Expert(linear, act) for _ in range(EXPERTS))
        self.shared = Expert(linear, F.silu)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x[number::EXPERTS]) for number, expert in enumerate(self.experts)]
        return torch.stack(outputs, 1).flatten(0, 1) + self.shared(x)


class Expert(nn.Module):
    def __init__(self, linear: Any, act: Any) -> None:
        super().__init__()
        self.act, self.up, self.down = act, linear(WIDTH, FFN, bias=False), linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_activation_of_all_experts_but_the_shared_one_is_told(precision):
    plain = Experts(nn.Linear)
    title, message = found(
        plain, lambda te: Experts(te.Linear, F.gelu), lambda rng: rng.normal(16 * EXPERTS, WIDTH), precision
    )
    assert title == "activation"
    assert "in experts.0 and 2 more like it" in message


class Modulated(nn.Module):
    """Two MLPs whose input is shifted, scaled and gated by one condition, as in DiT."""

    def __init__(self, linear: Any, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> None:
        super().__init__()
        self.order, self.condition = order, linear(WIDTH, 6 * WIDTH)
        self.first, self.second = Expert(linear, F.silu), Expert(linear, F.silu)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.condition(F.silu(condition)).chunk(6, -1)
        shift, scale, gate, second_shift, second_scale, second_gate = (parts[i] for i in self.order)
        x = x + gate * self.first(x * (1.0 + scale) + shift)
        return x + second_gate * self.second(x * (1.0 + second_scale) + second_shift)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("order", [(1, 0, 2, 4, 3, 5), (2, 0, 1, 5, 3, 4)])
def test_parts_of_a_modulation_that_are_in_another_order_twice_are_told(order, precision):
    title, message = found(
        Modulated(nn.Linear),
        lambda te: Modulated(te.Linear, order),
        lambda rng: (rng.normal(32, WIDTH), rng.normal(32, WIDTH)),
        precision,
        probe=False,
    )
    assert title == "operation"
    assert f"its parts are in the order {', '.join(str(i + 1) for i in order)}" in message


class Classifier(nn.Module):
    def __init__(self, linear: Any, smoothing: float) -> None:
        super().__init__()
        self.smoothing, self.up, self.head = smoothing, linear(WIDTH, FFN), linear(FFN, 48)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.silu(self.up(x)))
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)


def test_twice_the_smoothing_of_labels_is_told():
    title, message = found(
        Classifier(nn.Linear, 0.1),
        lambda te: Classifier(te.Linear, 0.2),
        lambda rng: (rng.normal(64, WIDTH), rng.integers(64, high=48)),
        "bf16",
    )
    assert title == "label-smoothing"
    assert message.endswith("smoothed by 0.2")
