"""Processes that make the calls, and replace each other where a kernel ends one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.lab.kernel_table import measure
from parity.lab.kernel_table.measure import GPU_LOST, Outcome
from parity.lab.kernel_table.table import ENDED, TIME_OVER, outcomes_of, run

COUNT = 12


def processes(folder: Path, fatal: set[int], poisonous: set[int], begun: list[int]) -> Callable[[int], int]:
    """Each process makes calls until one ends it, or, once its outcome is written, loses the GPU."""

    def start(first: int) -> int:
        begun.append(first)
        for index in range(first, COUNT):
            if index in fatal:
                return -11
            measure.write(Outcome({"x": torch.tensor([index])}), index, folder)
            if index in poisonous:
                return GPU_LOST
        return 0

    return start


calls = st.sets(st.integers(0, COUNT - 1))


@settings(max_examples=40)
@given(calls, calls)
def test_a_kernel_that_ends_its_process_loses_no_outcome_but_its_own(
    tmp_path_factory: pytest.TempPathFactory, fatal: set[int], poisonous: set[int]
) -> None:
    """Unless several in succession do."""
    fatal = {index for index in fatal if not {index - 1, index - 2} <= fatal}
    folder = tmp_path_factory.mktemp("outcomes")
    found = outcomes_of(processes(folder, fatal, poisonous - fatal, []), COUNT, folder)
    assert [index for index, outcome in enumerate(found) if outcome == ENDED] == sorted(fatal)
    assert all(outcome.buffers for index, outcome in enumerate(found) if index not in fatal)


def test_no_process_is_started_without_need(tmp_path: Path) -> None:
    begun: list[int] = []
    outcomes_of(processes(tmp_path, {4}, {7}, begun), COUNT, tmp_path)
    assert begun == [0, 5, 8]


def test_processes_that_do_not_come_to_life_are_not_started_for_ever(tmp_path: Path) -> None:
    begun: list[int] = []
    found = outcomes_of(processes(tmp_path, set(range(COUNT)), set(), begun), COUNT, tmp_path)
    assert begun == [0, 1, 2]
    assert [outcome.error for outcome in found[3:]] == ["no process came to this call"] * (COUNT - 3)


def test_when_the_time_is_over_what_was_made_stays_and_the_rest_says_so(tmp_path: Path) -> None:
    def start(first: int) -> None:
        measure.write(Outcome({"x": torch.tensor([first])}), first, tmp_path)

    first, *others = outcomes_of(start, 3, tmp_path)
    assert first.buffers
    assert others == [TIME_OVER, TIME_OVER]


def python(program: str, folder: Path, **limits: float) -> int | None:
    limits = {"ends": time.monotonic() + 100, **limits}
    return run([sys.executable, "-c", program], dict(os.environ), folder, **limits)


def test_a_process_ends_by_itself_at_the_time_that_is_set_or_when_a_kernel_hangs(tmp_path: Path) -> None:
    hangs = "import time; time.sleep(1000)"
    assert python("raise SystemExit(3)", tmp_path) == 3
    assert python(hangs, tmp_path, ends=time.monotonic()) is None
    assert python(hangs, tmp_path, longest=0.0) == -signal.SIGKILL


def test_after_an_error_of_the_gpu_the_process_gives_up_only_if_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = SimpleNamespace()
    made: Any = ["misaligned", "refused"]
    monkeypatch.setattr(measure, "make", lambda call, kernels, seed: Outcome(error=call))
    for works in (True, False):
        monkeypatch.setattr(measure, "cuda_works", lambda works=works: works)
        assert measure.make_all(made, 0, kernels, 0, tmp_path) is works
