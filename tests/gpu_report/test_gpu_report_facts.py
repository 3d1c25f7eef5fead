"""The questions to kernels, put to emulated kernels of which the answers are known."""

from __future__ import annotations

import pytest

from parity import te
from parity.cpu.kernel_choices import (
    FP8_14_BIT,
    FP32_EXACT,
    SPLIT_K_IN_OUTPUT_TYPE,
    TF32_TIES_AWAY,
    TF32_TRUNCATED,
    kernel_choices,
)
from parity.lab.gpu_report import facts
from parity.lab.gpu_report.facts import ALIGNED, KEPT, PARTS, PROMOTED, READ, ROUNDED, STEP, Fact

FP8 = "FP8, TE, no split accumulator"
SPLIT = "FP8, TE, split accumulator"


def asked(*choices: str) -> list[Fact]:
    with kernel_choices(*choices):
        return list(facts.facts(te.kernels("cpu"), shapes=((16, 64),)))


def answers(found: list[Fact], question: str, kernel: str) -> set[str]:
    return {fact.answer for fact in found if (fact.question, fact.kernel) == (question, kernel)}


@pytest.fixture(scope="module")
def by_default() -> list[Fact]:
    return asked()


@pytest.fixture(scope="module")
def of_a_hopper() -> list[Fact]:
    return asked(TF32_TRUNCATED, FP8_14_BIT, SPLIT_K_IN_OUTPUT_TYPE)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        (None, "rounded to TF32, ties to even"),
        (TF32_TRUNCATED, "cut to TF32, toward zero"),
        (TF32_TIES_AWAY, "rounded to TF32, ties away from zero"),
        (FP32_EXACT, "as FP32"),
    ],
)
def test_each_way_into_tf32_is_told(choice: str | None, answer: str, layout: str) -> None:
    with kernel_choices(*([choice] if choice else [])):
        assert facts.operands_read(te.kernels("cpu"), layout, (16, 64, 64)) == answer


@pytest.mark.parametrize(
    ("question", "kernel", "answer"),
    [
        (KEPT, FP8, "13"),
        (KEPT, SPLIT, "13 within an instruction, 23 across instructions"),
        (ROUNDED, FP8, "toward zero; across instructions toward zero"),
        (ALIGNED, FP8, "13"),
        (STEP, FP8, "32"),
        (STEP, SPLIT, "32"),
        (PROMOTED, FP8, "none shows: more than all"),
        (PROMOTED, SPLIT, "128"),
    ],
)
def test_the_short_sums_of_a_hopper_are_measured(
    of_a_hopper: list[Fact], question: str, kernel: str, answer: str
) -> None:
    assert answers(of_a_hopper, question, kernel) == {answer}


def test_sums_in_fp32_keep_all_bits_and_round_to_nearest(by_default: list[Fact]) -> None:
    assert answers(by_default, KEPT, FP8) == {"23"}
    assert answers(by_default, ROUNDED, FP8) == {"to nearest; across instructions to nearest"}


@pytest.mark.parametrize("kernel", ["TE, BF16, TN", "TE, FP16, NT"])
def test_parts_that_are_rounded_are_seen(by_default: list[Fact], of_a_hopper: list[Fact], kernel: str) -> None:
    assert answers(by_default, PARTS, kernel) == {"no: each result is rounded once"}
    (answer,) = answers(of_a_hopper, PARTS, kernel)
    assert "% of the results are off" in answer


def test_the_verdict_tells_what_a_reader_asks_first(of_a_hopper: list[Fact]) -> None:
    assert facts.verdict(of_a_hopper) == (
        "FP32 operands are cut to TF32, toward zero; bits that a sum of FP8 products keeps: 13; "
        "products until FP32 takes over: 128"
    )


def test_the_report_has_each_question_once(of_a_hopper: list[Fact]) -> None:
    text = facts.draw(of_a_hopper, "emulated")
    for question in (READ, KEPT, ROUNDED, STEP, PROMOTED, PARTS):
        assert text.count(f"## {question}") == 1
