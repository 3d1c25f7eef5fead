"""A search that reaches its limit of real time ends with what it has verified, says so, and changes no verdict."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import comparison
from parity.passes import nominal_clock
from parity.passes.nominal_clock import Clock

NOTE = "the search for the cause ended after {} s; --parity-diagnosis=SECONDS gives it longer"
WIDTH = 16
UNVERIFIED = {"unexplained", "first-divergence"}


class Block(nn.Module):
    """A norm and a linear layer, several times, each scaled and behind one more function."""

    def __init__(
        self, linear: Any, norm: Any, scale: float = 1.0, last: Callable[[Tensor], Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.last = scale, last

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.scale * layer(norm(x))
        return self.last(x)


class Detached(Block):
    """What comes back through the first layer is lost."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layers[0](self.norms[0](x)).detach()
        return self.last(y + self.layers[1](self.norms[1](y)))


class Loss(Block):
    """One number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


PORTS: dict[str, tuple[type[Block], type[Block], dict[str, Any]]] = {
    "a factor": (Block, Block, dict(scale=0.5)),
    "nothing known": (Block, Block, dict(last=lambda x: torch.sin(3.0 * x))),
    "gradients alone": (Block, Detached, {}),
    "a loss": (Loss, Loss, dict(scale=0.5)),
}


def case(name: str) -> parity.Case:
    right, wrong, options = PORTS.get(name, (Block, Block, {}))

    def factory(te: Any) -> parity.Pair:
        plain = right(nn.Linear, nn.LayerNorm)
        ported = wrong(te.Linear, te.LayerNorm, **options)
        return parity.Pair(
            plain, ported, lambda rng: rng.normal(4, WIDTH), {name: name for name, _ in plain.named_parameters()}
        )

    return parity.Case("block", factory, sizes=({},))


def compared(name: str, **options: Any) -> parity.Result:
    (result,) = parity.compare(case(name), ["fp32"], backend="cpu", **options)
    return result


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Real time that passes by a second whenever the search asks for it, so that a limit is a number of questions."""
    passed: list[int] = []

    def monotonic() -> float:
        passed.append(len(passed))
        return float(passed[-1])

    monkeypatch.setattr(nominal_clock, "time", SimpleNamespace(monotonic=monotonic))
    return passed


@pytest.mark.parametrize("name", PORTS)
def test_whenever_time_is_over_the_verdict_stands_and_what_is_told_was_verified(name: str, ticks: list[int]) -> None:
    whole = compared(name)
    assert (whole.status, whole.notes) == ("failed", ())
    questions = len(ticks)
    known = {finding.title for finding in whole.findings} | UNVERIFIED
    for seconds in (1, *(questions * quarter // 4 for quarter in range(1, 4))):
        ticks.clear()
        early = compared(name, diagnosis_seconds=seconds)
        assert (early.status, early.tensors) == (whole.status, whole.tensors)
        assert [note for note in early.notes if note.startswith(NOTE.format(seconds))] == list(early.notes)
        assert {finding.title for finding in early.findings} <= known
        assert early.notes or early.findings == whole.findings


@pytest.mark.parametrize("name", PORTS)
def test_no_pass_begins_when_time_is_over(name: str, ticks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    over, begun_late = [], []
    is_over, forward = Clock.is_over, Block.forward
    monkeypatch.setattr(Clock, "is_over", lambda clock: over.append(is_over(clock)) or over[-1])
    monkeypatch.setattr(Block, "forward", lambda *args: begun_late.append(any(over)) or forward(*args))
    assert compared(name, diagnosis_seconds=5).notes
    assert any(over)
    assert not any(begun_late)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("unlimited", [0, 1e9, float("inf")])
def test_without_a_limit_that_is_reached_the_search_ends_by_what_it_computes(unlimited: float) -> None:
    one = compared("a loss", diagnosis_seconds=unlimited)
    assert one.findings
    assert one.notes == ()


def test_no_known_mistake_that_was_not_tried_is_ruled_out(ticks: list[int]) -> None:
    told = {early: compared("nothing known", diagnosis_seconds=early).findings[0].message for early in (0, 8)}
    assert "no known mistake explains output" in told[0]
    assert "no known mistake that was tried explains output" in told[8]


def test_a_verdict_alone_has_the_same_tensors_and_says_that_nothing_was_searched_for() -> None:
    whole, verdict = compared("a factor"), compared("a factor", diagnose=False)
    assert (verdict.status, verdict.tensors, verdict.findings) == ("failed", whole.tensors, ())
    assert verdict.notes == (comparison.NOT_SEARCHED,)
    assert compared("a factor").findings


@pytest.mark.parametrize("diagnose", [True, False])
def test_a_right_port_is_told_nothing_of_it(diagnose: bool) -> None:
    result = compared("nothing wrong", diagnose=diagnose, diagnosis_seconds=1e-6)
    assert (result.status, result.notes) == ("passed", ())


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_a_search_that_raises_leaves_the_verdict(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    whole = compared("a factor")

    def explain(*_: Any) -> None:
        raise error

    monkeypatch.setattr("parity.search.explanation.explain", explain)
    result = compared("a factor")
    assert (result.status, result.tensors, result.findings) == ("failed", whole.tensors, ())
    assert result.notes == (f"the search for the cause raised {type(error).__name__}: {error}",)


def test_an_environment_s_limit_counts_where_the_call_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_DIAGNOSIS_SECONDS", "0.000001")
    assert compared("a factor").notes[0].startswith(NOTE.format("1e-06"))
    assert compared("a factor", diagnosis_seconds=0).notes == ()
