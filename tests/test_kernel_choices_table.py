"""The table of what TE's kernels may do otherwise on each GPU, and where a report names it."""

from __future__ import annotations

import pytest

from parity.cpu import cuda
from parity.cpu.kernel_choices import NAMES, VARIABLE
from parity.cpu.kernel_choices import kernel_choices as choosing
from parity.numerics import kernel_choices
from parity.report import environment


def test_every_option_of_the_cpu_kernels_has_a_row_with_its_source() -> None:
    assert tuple(choice.name for choice in kernel_choices.CHOICES) == NAMES
    for choice in kernel_choices.CHOICES:
        assert choice.does.endswith(".")
        assert choice.source
        assert set(choice.gpus) <= set(cuda.GPUS)


@pytest.mark.parametrize(
    ("gpu", "precision", "expected"),
    [
        ("ada", "fp32", {"tf32-truncated", "tf32-ties-away", "fp32-exact"}),
        ("ada", "fp8_delayed", {"fp8-14-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
        ("hopper", "fp8_block", {"fp8-block-14-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
        ("hopper", "bf16", {"split-k-in-output-type", "attention-16-bit-sums"}),
        ("blackwell", "fp8_current", {"split-k-in-output-type", "attention-16-bit-sums"}),
        ("blackwell", "nvfp4", {"mx-25-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
    ],
)
def test_a_gpu_has_its_own_at_each_precision(gpu: str, precision: str, expected: set[str]) -> None:
    assert {choice.name for choice in kernel_choices.of(gpu, precision)} == expected


@pytest.mark.parametrize(("gpu", "precision"), [("volta", "fp32"), ("hopper", "fp64")])
def test_what_has_no_kernels_here_is_refused_with_what_has(gpu: str, precision: str) -> None:
    with pytest.raises(ValueError, match=r"GPUs are ada, hopper, blackwell, precisions fp32, bf16"):
        kernel_choices.of(gpu, precision)


def test_a_report_names_the_choices_that_were_on_and_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = environment.measure("cpu", (0,), 1).device
    assert "choices" not in plain
    with choosing("tf32-truncated", "fp8-14-bit"):
        assert (
            environment.measure("cpu", (0,), 1).device == f"{plain} with the kernel choices fp8-14-bit, tf32-truncated"
        )
    monkeypatch.setenv(VARIABLE, "mx-25-bit")
    assert environment.measure("cpu", (0,), 1).device == f"{plain} with the kernel choices mx-25-bit"
