"""Test the cost of a search, which ends after a budget of computation or a limit of real time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import errors, tensor
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HIDDEN, decoder
from parity import comparison
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.weight_maps import Mapped, weight_hypotheses
from parity.passes import nominal_clock
from parity.passes.nominal_clock import Clock
from parity.result import Finding
from parity.search.explanation import _first_found
from parity.search.failure import Budget, while_it_lasts
from parity.search.in_full import _is_explained
from parity.search.search import _nearest_first

# A budget of computation.


def slow(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Make processor time pass faster by this factor, as on a slower machine."""
    usual = time.process_time
    monkeypatch.setattr(time, "process_time", lambda: factor * usual())


def test_a_budget_is_spent_when_its_clock_has_passed_it():
    clock = Clock(seconds=5.0)
    budget = Budget.of(clock, 2.0)
    clock.seconds = 6.9
    assert not budget.spent()
    clock.seconds = 7.1
    assert budget.spent()


def test_a_share_begins_with_the_budget_and_more_begins_now():
    clock = Clock()
    budget = Budget.of(clock, 10.0)
    clock.seconds = 6.0
    assert budget.share(0.5).spent()
    more = budget.more(0.1)
    assert not more.spent()
    clock.seconds = 7.1
    assert more.spent()
    assert not budget.spent()


def test_what_comes_after_the_budget_is_left_in_the_iterator():
    clock, left = Clock(), iter(range(4))
    budget = Budget.of(clock, 1.5)
    for _ in while_it_lasts(left, budget):
        clock.seconds += 1.0
    assert list(left) == [2, 3]


def test_a_machine_a_thousand_times_as_slow_finds_the_same(monkeypatch):
    scaled = decoder("decoder", embedding=math.sqrt(HIDDEN)).case(embedding=float(HIDDEN))
    (here,) = parity.compare(scaled, ["fp8_current"])
    slow(monkeypatch, 1000.0)
    (there,) = parity.compare(scaled, ["fp8_current"])
    assert there.findings == here.findings


def test_what_one_share_of_a_budget_does_not_last_for_is_left_for_another():
    budget, left = (
        Budget.of(Clock(), 1e9),
        iter([(Hypothesis("title", name, ""),) for name in ("one", "other")]),
    )
    assert list(while_it_lasts(left, budget.share(0.0))) == []
    assert [one.name for (one,) in while_it_lasts(left, budget)] == ["one", "other"]
    assert not budget.exceeded


# The order in which mistakes are tried, since a budget may not last for all of them.


def test_where_gradients_alone_tell_mistakes_without_a_place_come_first_then_those_near_the_worst_gradient():
    far, near, everywhere, with_decimals = (
        Hypothesis("title", name, "")
        for name in ("exchanged layers.0.q.weight", "layers.1.v scaled", "window", "norm eps=0.0001")
    )
    results = [tensor(margin=0.1), tensor("layers.1.v.weight", "weight gradient", margin=9.0)]
    golden = {("output", "output"): torch.zeros(2, 64)}
    prepared = SimpleNamespace(golden=SimpleNamespace(outputs={"output": torch.zeros(2, 64)}))
    failed: Any = SimpleNamespace(results=results, outputs=results[:1], golden=golden, prepared=prepared)
    assert _nearest_first(failed, [far, near, everywhere, with_decimals]) == [everywhere, with_decimals, near, far]


@pytest.mark.parametrize(
    ("one", "other", "scope"),
    [
        ("layers.0.q.weight", "layers.0.o.weight", "all"),
        ("layers.0.q.weight", "layers.1.q.weight", "all"),
        ("layers.0.q.weight", "layers.1.o.weight", "call"),
    ],
)
def test_an_exchange_of_two_kinds_of_parameters_in_two_layers_is_tried_last(one, other, scope):
    shapes = dict.fromkeys((one, other), (8, 8))
    found = weight_hypotheses(Mapped({one: one, other: other}, shapes, shapes))
    assert [each.scope for each in found if each.title == "parameters-exchanged"] == [scope]


# A limit of real time, after which a search reports what it has verified, says so, and changes no verdict.

NOTE = "the search for the cause was stopped after {} s; give it more time with --parity-diagnosis=SECONDS"
WIDTH = 16
UNVERIFIED = {"unexplained", "first-divergence"}


class Block(nn.Module):
    """A stack of norms and linear layers with scaled branches, and a function after the last."""

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
    """The same stack without the gradient through the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layers[0](self.norms[0](x)).detach()
        return self.last(y + self.layers[1](self.norms[1](y)))


class Loss(Block):
    """The same stack, reduced to a single number."""

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
    """Let a second of real time pass whenever the search asks for the time, so that a limit counts these questions."""
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
    for seconds in (1, questions // 3, questions * 2 // 3):
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
    assert "no known mistake explains the error of output" in told[0]
    assert "no known mistake that was tried explains the error of output" in told[8]


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
    (note,) = result.notes
    assert note.startswith(f"the search for the cause raised {type(error).__name__}: {error}; at test_search.py:")


def test_a_cause_that_raises_hides_no_other() -> None:
    told = Finding("PAR212", "activation", "it computes relu")
    failure: Any = SimpleNamespace(broken=[])
    breaks = partial(torch.sub, torch.tensor(True), torch.tensor(True))
    assert _first_found([breaks, list, lambda: [told]], failure) == [told]
    assert _first_found([list, breaks], failure) == []
    assert ["bool tensor" in str(error) for error in failure.broken] == [True, True]


@pytest.mark.parametrize("port", ["a factor", "nothing known"])
def test_a_subject_that_raises_hides_no_other_and_is_told_if_none_holds(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> Iterator[Any]:
        # This raises when it is iterated over, without a line of this file in the traceback, as in parity's own code.
        return map(partial(torch.sub, torch.tensor(True)), [torch.tensor(True)])

    whole = compared(port)
    monkeypatch.setattr("parity.mistakes.weight_maps.weight_hypotheses", raises)
    result = compared(port)
    assert [finding.title for finding in result.findings] == [finding.title for finding in whole.findings]
    assert ("no known mistake that was tried" in result.findings[0].message) == (port == "nothing known")
    started = ["a part of the search for the cause raised RuntimeError: Subtraction"] if port == "nothing known" else []
    assert [note[: len(start)] for note, start in zip(result.notes, started, strict=True)] == started


def test_an_environment_s_limit_counts_where_the_call_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_DIAGNOSIS_SECONDS", "0.000001")
    assert compared("a factor").notes[0].startswith(NOTE.format("1e-06"))
    assert compared("a factor", diagnosis_seconds=0).notes == ()


@pytest.mark.parametrize(("costs", "explained"), [(3.2e-3, True), (4.5e-3, True), (5e-3, False)])
def test_an_error_that_passes_because_rounding_costs_more_is_not_explained(costs, explained):
    was = replace(tensor(margin=1.2), expected=errors(3.2e-3))
    now = replace(was, expected=errors(costs), margin=0.9)
    golden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).double()
    failure = SimpleNamespace(
        outputs=[was], results=[was], golden={was.key: golden}, candidate={was.key: 1.001 * golden}
    )
    assert _is_explained(failure, {(was.kind, was.name): was}, [now], {was.key: golden}) is explained
