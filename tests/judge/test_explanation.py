"""Test which inputs' findings are reported, and which parts of a search are not repeated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.mistakes.catalogue import hypotheses
from parity.passes.prepare import calls_of
from parity.search import explanation
from parity.search.failure import Failure

WIDTH, TOKENS = 64, 50


class OneHot(nn.Module):
    """Turns ids, which no probe changes, into one-hot vectors without a table."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, WIDTH).to(torch.get_default_dtype())


class Model(nn.Module):
    def __init__(self, linear: Any, tokens: nn.Module, noise: float = 0.0) -> None:
        super().__init__()
        self.tokens = tokens
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.linear, self.noise = linear(WIDTH, WIDTH, bias=False), noise

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tokens(x).to(self.norm.weight.dtype))
        noise = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(x)
        return self.linear(x) + (F.linear(x, self.noise * noise) if self.noise else 0.0)


def searches(monkeypatch: pytest.MonkeyPatch, tokens: Callable[[], nn.Module], noise: float) -> list[Failure]:
    """Return the searches for a port whose weight has noise, which no known mistake explains."""
    asked: list[Failure] = []
    original = explanation.findings

    def recorded(failure: Failure, *arguments: Any, **options: Any) -> Any:
        asked.append(failure)
        return original(failure, *arguments, **options)

    def factory(te: Any, **_: int) -> parity.Pair:
        plain = Model(nn.Linear, tokens())
        return parity.Pair(
            plain,
            Model(te.Linear, tokens(), noise),
            lambda rng, batch: (
                rng.normal(batch, 16, WIDTH) if tokens is nn.Identity else rng.integers(batch, 16, high=TOKENS)
            ),
            {name: name for name, _ in plain.named_parameters()},
        )

    monkeypatch.setattr(explanation, "findings", recorded)
    (result,) = parity.compare(parity.Case("noisy", factory, sizes=(dict(batch=4),)), ["bf16"])
    assert result.findings[0].title == "unexplained"
    return asked


def test_what_no_mistake_explains_is_searched_once_where_the_probe_is_the_inputs(monkeypatch):
    assert len(searches(monkeypatch, OneHot, noise=0.1)) == 1


@pytest.mark.parametrize("tokens", [nn.Identity, partial(nn.Embedding, TOKENS, WIDTH)])
def test_a_loud_error_is_searched_on_the_probe_among_what_helped_or_changed_nothing_before(monkeypatch, tokens):
    drawn, probing = searches(monkeypatch, tokens, noise=0.1)
    assert drawn.among is None
    every = {(one.title, one.name) for one in hypotheses(drawn.prepared, calls_of(drawn.prepared).trace)}
    assert probing.among < every
    assert len(probing.among) < len(every) / 2
