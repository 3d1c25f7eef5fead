"""Test that a finding speaks only of what the model and its run have, and says only what was measured."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HEADS, decoder
from lab.corpus.small import Host, normal, twins
from parity.mistakes import codes
from parity.mistakes.codes import CODES, NEEDS, UNEXPLAINED, finding
from parity.passes.nominal_clock import OutOfTime
from parity.search import explanation
from parity.search.failure import Failure
from parity.trainings.why_steps import Before, guesses_of_later_steps, unexplained

# Every title declares what a model or a run must have, and is told only if they have it.


def test_every_title_declares_once_what_a_model_or_a_run_must_have():
    declared = " ".join(codes._TITLES_BY_NEED.values()).split()
    assert sorted(declared) == sorted(CODES)


class Wave(nn.Module):
    """Two linear layers, and a function that is no known mistake of ports."""

    def __init__(self, linear: Any, wave: float = 0.0) -> None:
        super().__init__()
        self.one, self.other, self.wave = linear(64, 64), linear(64, 64), wave

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).square()
        return self.other(y + self.wave * (7.0 * y.flip(-1)).sin() if self.wave else y)


class Routed(nn.Module):
    """A gated unit and two of four experts."""

    def __init__(self, linear: Any, factor: float = 1.0) -> None:
        super().__init__()
        self.gate, self.up, self.router, self.factor = linear(64, 64), linear(64, 64), nn.Linear(64, 4), factor
        self.experts = nn.ModuleList(linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate(x)) * self.up(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return y * self.factor


class Trained(nn.Module):
    """A linear layer that takes a step of SGD, with clipped gradients, before it is applied."""

    def __init__(self, linear: Any, rate: float = 0.1) -> None:
        super().__init__()
        self.linear, self.rate = linear(64, 64, bias=False), rate

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        with torch.enable_grad():
            gradient = torch.autograd.grad(F.linear(x.detach(), weight).square().mean(), weight)[0].detach()
        return F.linear(x, weight - self.rate * gradient)


ANY = {"nothing", "gradients"}
OF_A_DECODER = {"attention", "rotations", "norms", "lookups", "labels", "few outputs"}
X = normal((32, 64))
WAVE = twins(Wave, X)
MODELS = {
    "plain": (WAVE.case(wave=0.3), "bf16", ANY),
    "in FP8": (WAVE.case(wave=0.9), "fp8_current", ANY | {"FP8"}),
    "experts": (twins(Routed, X).case(factor=0.7), "fp32", ANY | {"gated units", "experts", "FP32"}),
    "trained": (twins(Trained, X).case(rate=9.0), "bf16", ANY | {"an optimizer"}),
    "decoder": (decoder("decoder").case(embedding=2.0), "bf16", ANY | OF_A_DECODER),
}


@pytest.mark.parametrize("model", MODELS)
def test_no_finding_is_told_of_what_a_model_lacks(model, monkeypatch):
    monkeypatch.setattr(
        explanation, "own_recipe_findings", lambda failure: [finding(title, "something is wrong") for title in CODES]
    )
    case, precision, needs = MODELS[model]
    (result,) = parity.compare(case, [precision])
    assert result.status == "failed", result.reason
    assert {one.title for one in result.findings} == {title for title, need in NEEDS.items() if need in needs}


def test_no_mistake_is_tried_in_a_model_that_lacks_its_subject(monkeypatch):
    seen: list[str] = []
    tried = explanation.explanations

    def watched(failure: Failure, known: Any, *rest: Any) -> Any:
        known = list(known)
        seen.extend(one.title for one in known)
        return tried(failure, known, *rest)

    monkeypatch.setattr(explanation, "explanations", watched)
    parity.compare(WAVE.case(wave=0.3), ["bf16"])
    assert seen
    assert {NEEDS[title] for title in seen} <= ANY


def _texts() -> Iterator[tuple[str, str]]:
    """Yield each title with the words that code writes for it whatever the run is."""
    for path in Path(parity.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if "lab" not in path.parts else ():
            parts = call.args if isinstance(call, ast.Call) else call.elts if isinstance(call, ast.Tuple) else []
            title = next((one.value for one in parts if isinstance(one, ast.Constant) and one.value in CODES), None)
            for one in parts if title else ():
                sometimes = {
                    id(each) for test in ast.walk(one) if isinstance(test, ast.IfExp) for each in ast.walk(test)
                }
                texts = (each for each in ast.walk(one) if isinstance(each, ast.Constant) and id(each) not in sometimes)
                yield from ((title, text.value) for text in texts if isinstance(text.value, str))


def test_what_only_some_recipes_have_is_told_only_in_their_runs():
    told = {title for title, text in _texts() if re.search(r"FP8|amax|scale_inv", text) and title != text}
    # A cached weight is told if a call passes is_first_microbatch, or if copies of a quantized weight are out of date.
    assert {title for title in told if NEEDS[title] != "FP8"} <= {"weight-cache-stale"}


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_training_is_told_of_fp8_only_in_fp8(in_fp8):
    found = [unexplained(2, "", is_first_and_own=False, in_fp8=in_fp8).message]
    found += [
        f"{one.told} {one.repair}" for one in guesses_of_later_steps(2, {}, Before({}, {}, {}, lambda *_: {}), in_fp8)
    ]
    assert any("FP8" in text for text in found) == in_fp8


# Inputs that look like a mask.


class Marked(nn.Module):
    """Add an embedding to the tokens that an input marks, in a model with or without attention; the port adds less."""

    def __init__(self, te: Any, attends: bool, share: float = 1.0) -> None:
        super().__init__()
        self.kind, self.linear, self.share = nn.Parameter(torch.randn(64)), (te or nn).Linear(64, 64), share
        self.attention = self._attention(te) if attends else None

    def _attention(self, te: Any) -> Callable[..., Tensor]:
        if te:
            return te.DotProductAttention(
                HEADS, 64 // HEADS, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
            )
        return lambda *qkv: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        y = self.linear(x)
        if self.attention is not None:
            heads = y.unflatten(-1, (HEADS, -1))
            y = y + self.attention(heads, heads, heads)
        return y + self.kind * marked[..., None].to(y.dtype) * self.share


@pytest.mark.parametrize("attends", [False, True])
def test_tokens_are_masked_only_if_attention_leaves_them_out(attends):
    marked = Host(
        "marked",
        lambda: Marked(None, attends),
        lambda te: Marked(te, attends, 0.5),
        lambda rng: (rng.normal(4, 24, 64), rng.uniform(4, 24) < 0.4),
    )
    (result,) = parity.compare(marked.case(), ["bf16"])
    assert result.status == "failed"
    assert "hidden-rows" not in [one.title for one in result.findings]


# What an unexplained error's finding says of its place.


class Spoilt(nn.Module):
    """A linear layer whose port spoils some of its rows."""

    def __init__(self, linear: Any, rows: Any = None) -> None:
        super().__init__()
        self.linear, self.rows = linear(64, 64), rows

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.rows is None:
            return y
        kept = torch.ones(y.shape[:-1])
        kept[self.rows] = 0.0
        wrong = y + 0.2 * (5.0 * y.flip(-1)).sin() * y.roll(1, -1)
        return torch.where(kept[..., None].bool(), y, wrong)


PACKED, BATCHED = normal((96, 64)), normal((4, 24, 64))
ROWS, BATCH = torch.zeros(96, dtype=torch.bool), torch.zeros(4, 24, dtype=torch.bool)
for first, last in ((3, 5), (40, 75)):
    ROWS[first : last + 1] = True
BATCH[0, 20:], BATCH[2, 3:7] = True, True


@pytest.mark.parametrize(
    ("inputs", "rows", "phrase"),
    [
        (PACKED, ROWS, "The error is in rows 3 to 5, 40 to 75 (39 of 96; the others are right)"),
        (BATCHED, BATCH, "in positions 20 to 23 of row 0, 3 to 6 of row 2 of the batch (the other 88 of 96 are right)"),
        (BATCHED, (slice(None), 7), "The error is in positions 7 (1 of 24; the others are right)"),
        (PACKED, slice(None), "The error is in each of its 96 rows and each of its 64 columns"),
    ],
)
def test_an_unexplained_error_says_which_rows_are_right(inputs, rows, phrase, monkeypatch):
    monkeypatch.setattr(explanation, "explanations", lambda *_, **__: [])
    (result,) = parity.compare(twins(Spoilt, inputs, probe=False).case(rows=rows), ["bf16"])
    assert result.findings[0].title == "unexplained"
    assert phrase in result.findings[0].message


# A part of the search that raises, or that ends it.


@pytest.fixture(scope="module")
def failure() -> Failure:
    """Return a failure that nothing explains, without the search that would try so."""
    found: list[Failure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explanation, "explain", lambda failure, *_: (found.append(failure), ((), ()))[1])
        parity.compare(WAVE.case(wave=0.3), ["bf16"])
    return found[0]


def searched(
    failure: Failure, monkeypatch: pytest.MonkeyPatch, raises: int = -1
) -> tuple[set[str], tuple[str, ...], int]:
    """Return the titles and notes of a search in which one part raises, and how many parts it has."""
    parts, usual = 0, explanation._part

    def part(tried: Callable[[], Any], failure: Failure) -> Any:
        nonlocal parts
        parts += 1

        def fails() -> Any:
            raise RuntimeError("you can only change requires_grad flags of leaf variables")

        return usual(fails if parts - 1 == raises else tried, failure)

    with monkeypatch.context() as patch:
        patch.setattr(explanation, "_part", part)
        patch.setattr(explanation, "explanations", lambda *_, **__: [])
        found, notes = explanation.explain(dataclasses.replace(failure, broken=[]), (), (), 0.0)
    return {one.title for one in found}, notes, parts


def test_whichever_part_of_a_search_raises_the_others_follow(failure, monkeypatch):
    whole, notes, parts = searched(failure, monkeypatch)
    assert (whole, notes) == ({"unexplained", "first-divergence"}, ())
    assert parts > 20
    for number in range(parts):
        titles, notes, _ = searched(failure, monkeypatch, number)
        assert titles in (whole, whole - {"unexplained"}, whole - {"first-divergence"}), number
        assert [note for note in notes if "requires_grad flags of leaf variables; at test_subject.py" in note], number


def test_a_search_that_time_ends_says_so_in_its_finding_and_knows_where_the_error_begins(failure, monkeypatch):
    def dear(failure: Failure, *_: Any, **__: Any) -> Any:
        failure.prepared.clock.ends_at = 0.0
        raise OutOfTime

    monkeypatch.setattr(explanation, "explanations", dear)
    found, notes = explanation.explain(failure, (), (), 1e6)
    assert [CODES[one.title] for one in found][-1] == CODES["first-divergence"]
    assert {one.code for one in found} == UNEXPLAINED
    assert notes[0].removeprefix("the search") in found[0].message
