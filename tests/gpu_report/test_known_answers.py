"""A GPU that gives other bits in one of three tries is told apart from one that adds otherwise than was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parity import te
from parity.measuring.gpu_report import known_answers
from parity.measuring.gpu_report.known_answers import CALLS, Answer, judge, predict, verdict
from parity.measuring.kernel_table import table
from parity.measuring.kernel_table.table import Outcome
from te_on_cpu.kernel_choices import FP8_14_BIT, kernel_choices

KERNELS = te.kernels("cpu")


def tries_of(call: table.KernelCall) -> list[Outcome]:
    with kernel_choices(FP8_14_BIT):
        return [table.make_call(call, KERNELS, seed=0) for _ in range(3)]


def flip_bit(outcome: Outcome, place: tuple[int, int]) -> None:
    """Flip the last bit of one element, as broken hardware does."""
    outcome.buffers["D"].view(torch.int16)[place] ^= 1


def test_a_product_of_another_process_is_predicted_to_the_bit(tmp_path: Path) -> None:
    tries = tries_of(CALLS[0])
    (predicted,) = predict(CALLS[:1], tmp_path)
    assert judge("product", tries, predicted).told == "equal to the prediction"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_flipped_bit_in_one_try_is_found(number: int) -> None:
    tries = tries_of(CALLS[0])
    flip_bit(tries[number - 1], (5, 7))
    answer = judge("product", tries, tries[0])
    assert not answer.is_steady
    count = tries[0].buffers["D"].numel()
    assert answer.told == f"in try {number} of 3, 1 of {count} elements differ, first [5, 7]"


def test_kernels_that_add_otherwise_are_not_broken() -> None:
    tries = tries_of(CALLS[0])
    answer = judge("product", tries, table.make_call(CALLS[0], KERNELS, seed=0))
    assert answer.is_steady
    assert answer.told.startswith("the same each time, but not as predicted: ")
    assert judge("product", tries, None).told == "the same each time"


def test_a_kernel_that_raises_is_told() -> None:
    answer = judge("product", [Outcome(error="no such kernel")] * 3, None)
    assert answer.told == "no such kernel"
    assert not answer.is_steady


def test_the_verdict_names_what_is_unsteady() -> None:
    right, wrong = Answer("one", "equal to the prediction"), Answer("two", "in try 2 of 3, 1 of 8 elements differ")
    assert verdict([right, wrong]) == (
        "1 of 2 products as predicted, to the bit; 1 the same in 3 tries; two: in try 2 of 3, 1 of 8 elements differ"
    )


def test_the_report_fails_if_one_bit_is_flipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = table.make_call
    calls = 0

    def make_call(*arguments: object, **options: object) -> Outcome:
        nonlocal calls
        calls += 1
        outcome = made(*arguments, **options)  # type: ignore[arg-type]
        if calls == 2:
            flip_bit(outcome, (0, 0))
        return outcome

    monkeypatch.setattr(known_answers, "CALLS", CALLS[:1])
    monkeypatch.setattr(known_answers, "predict", lambda calls, folder: [None])
    report = tmp_path / "known-answers.md"
    monkeypatch.setenv("PARITY_KERNEL_CHOICES", "")
    assert known_answers._write_report("cpu", str(report)) == 0
    monkeypatch.setattr(table, "make_call", make_call)
    assert known_answers._write_report("cpu", str(report)) == 1
    assert "in try 2 of 3" in known_answers.read(report)
    assert "emulated" in report.read_text()
