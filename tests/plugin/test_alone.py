"""Runs without workers: every item gets one status, whatever a case does, and a run reports it if its process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fakes
import forked
import pytest
from plugin_runs import CASE, CONFTEST, recorded, run, run_in_a_process, write

from parity.plugin import ending
from parity.plugin.alone import exit_heard
from parity.report import record

pytest_plugins = ["pytester"]

LIMIT = "ran longer than 3 s (--parity-timeout, or --timeout of parity run); it was interrupted at fakes.py"
ENDS = {
    "exits": "raised EndedProcess: os._exit(0), which would have ended the run",
    "exits_in_a_thread": "the pair's code called os._exit(0), which would have ended the run",
    "quits": "raised SystemExit: 0",
    "leaves_pytest": "raised Exit: bye",
    "raises_ctrl_c": "raised KeyboardInterrupt",
    "raises_mutely": "raised Mute: (its __str__ raises RuntimeError)",
    "raises_a_surrogate": "raised ValueError: \\udcff\\x1b",
    "hangs": LIMIT,
}


def test_cases_that_would_end_the_run_are_errors_that_say_how_and_those_after_them_are_compared(tmp_path: Path) -> None:
    names = [name for i, end in enumerate(ENDS) for name in (end, f"sound_{i}")]
    names += ["fails_and_its_search_hangs", "exits_in_a_fork"]
    code, printed, recorded = run_in_a_process(tmp_path, names, "--parity-timeout=3")
    assert code == 1
    assert [result.case for result in recorded] == names  # exactly one line for each item
    results = {result.case: result for result in recorded}
    for i, (name, how) in enumerate(ENDS.items()):
        assert results[name].status == "error"
        assert how in results[name].reason
        assert how in printed
        assert results[f"sound_{i}"].status == "passed"
    # A verdict stays even if the time for its search is up.
    hung = results["fails_and_its_search_hangs"]
    assert (hung.status, hung.tensors) == ("failed", (fakes.tensor(margin=100.0),))
    assert hung.notes[-1].startswith(f"the search for the cause was cut short: {LIMIT}")
    # A process that a case forks may exit, and no error is counted as passed.
    assert results["exits_in_a_fork"].status == "passed"
    failed, items = len(ENDS) + 1, len(names)
    assert f"{failed} failed, {items - failed} passed" in printed
    assert f"{failed} of {items} items failed" in (tmp_path / "reports/parity.md").read_text()


def test_an_interrupted_seed_is_the_item_s_last(tmp_path: Path) -> None:
    _, _, results = run_in_a_process(tmp_path, ["hangs"], "--parity-timeout=3", "--parity-seeds=3,5")
    assert [(result.seed, result.status) for result in results] == [(3, "error")]


def test_a_case_that_hangs_whatever_is_raised_ends_the_run_and_every_item_has_its_status(tmp_path: Path) -> None:
    names = ["sound", "hangs_whatever_is_raised", "never_reached"]
    code, printed, results = run_in_a_process(tmp_path, names, "--parity-timeout=3")
    assert code == 1
    assert [(result.case, result.status) for result in results] == [
        ("sound", "passed"), ("hangs_whatever_is_raised", "error"), ("never_reached", "error")
    ]  # fmt: skip
    assert "ran longer than 3 s (--parity-timeout, or --timeout of parity run); this ends the run" in printed
    told = "not compared, because my_pairs.py::hangs_whatever_is_raised[fp32-2] ended the run; use -n 1 or more"
    assert results[2].reason.startswith(told)
    assert "2 of 3 items failed" in (tmp_path / "reports/parity.md").read_text()


@pytest.mark.parametrize("name", ["exits_in_c", "exits_in_c_in_a_thread"])
def test_c_code_that_calls_exit_ends_the_run_with_its_report_and_another_exit_code(tmp_path: Path, name: str) -> None:
    code, printed, results = run_in_a_process(tmp_path, ["sound", name, "never_reached"])
    assert code == 1
    assert [(result.case, result.status) for result in results] == [
        ("sound", "passed"), (name, "error"), ("never_reached", "error")
    ]  # fmt: skip
    assert results[1].reason.startswith("C code of the pair called exit, which ends the process")
    assert results[2].reason.startswith(f"not compared, because my_pairs.py::{name}[fp32-2] ended the run; use -n 1")
    assert "1 failed, 1 passed" in printed
    assert "2 of 3 items failed" in (tmp_path / "reports/parity.md").read_text()


def test_c_code_of_a_fork_may_exit_and_so_may_the_process_once_it_compares_no_more(tmp_path: Path) -> None:
    heard: list[str] = []
    with exit_heard(lambda: heard.append("exit")):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    assert heard == []


def test_what_a_case_forks_ends_with_its_comparison_and_keeps_nothing_waiting(tmp_path: Path) -> None:
    names = ["forks_and_goes_on", "sound", "forks_what_lives_on"]
    code, printed, results = run_in_a_process(tmp_path, names)
    assert code == 0
    assert [(result.case, result.status) for result in results] == [(name, "passed") for name in names]
    assert "again" not in printed
    goes_on, lives_on = (int((tmp_path / name).read_text()) for name in (names[0], names[2]))
    wait_for(lambda: not forked.is_running(goes_on))
    assert not forked.is_running(goes_on)
    assert forked.is_running(lives_on)
    os.kill(lives_on, signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dead_process_has_forked_keeps_nothing_waiting(tmp_path: Path, workers: int) -> None:
    names = ["sound", "dies_beside_a_fork", "another"]
    code, _, results = run_in_a_process(tmp_path, names, f"-n{workers}")
    found = {result.case: result.status for result in results}
    wait_for(lambda: "dies_beside_a_fork" in (tmp_path / "reports/parity.md").read_text())
    assert "1 of" in (tmp_path / "reports/parity.md").read_text()
    child = int((tmp_path / "dies_beside_a_fork").read_text())
    assert forked.is_running(child)
    os.kill(child, signal.SIGKILL)
    if workers:
        assert (code, found) == (1, dict(zip(names, ("passed", "error", "passed"), strict=True)))
    else:
        assert (code, found) == (-signal.SIGKILL, dict(zip(names[:2], ("passed", "error"), strict=False)))


# What nothing in the process can prevent is reported by another process.


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.parametrize(("name", "code"), [("exits_in_c_unheard", 1), ("dies", -9), ("hangs_for_good", 1)])
def test_the_record_and_a_report_tell_which_item_ended_the_process(tmp_path: Path, name: str, code: int) -> None:
    ended, _, results = run_in_a_process(tmp_path, ["sound", name, "never_reached"], "--parity-timeout=3")
    assert ended == code
    assert [(result.case, result.status) for result in results] == [("sound", "passed"), (name, "error")]
    assert results[-1].reason.startswith("the process of this run ended while it was comparing this item; resume")
    report = tmp_path / "reports/parity.md"
    wait_for(lambda: report.exists() and "of this run ended" in report.read_text())
    assert "1 of 2 items failed; 1 item without a result" in report.read_text()


# Two signals within a moment, as ``timeout`` sends them to a process and its group, count as one.


@pytest.mark.parametrize(("seconds", "interrupted"), [(0.5, 1), (1.5, 2)])
def test_a_second_signal_within_a_moment_does_not_interrupt_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, interrupted: int
) -> None:
    now = iter((10.0, 10.0 + seconds))
    monkeypatch.setattr("parity.plugin.ending.time", SimpleNamespace(monotonic=lambda: next(now)))
    cleanups: list[Callable[[], None]] = []
    config = SimpleNamespace(stash=pytest.Stash(), add_cleanup=cleanups.append)
    usual = signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    ending.heed_signals(config)
    heard = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            heard += 1
    for cleanup in cleanups:
        cleanup()
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), usual, strict=True):
        signal.signal(number, handler)
    assert heard == interrupted


# Failures around the comparison of an item.


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("phase", ["runtest_setup", "runtest_call"])
def test_an_item_that_pytest_fails_is_an_error_and_not_missing(pytester: pytest.Pytester, phase: str) -> None:
    write(pytester, "import parity\n@parity.pair('sound', sizes=[dict(n=2)], precisions=['fp32'])\ndef f(te, n): ...")
    pytester.makeconftest(f"def pytest_{phase}(item):\n    raise ValueError('no fixture')")
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (error,) = recorded(pytester).results
    assert (error.status, error.reason) == ("error", f"pytest's {phase[8:]} of the item raised ValueError: no fixture")
    result.stdout.fnmatch_lines(["*1 of 1 item failed*"])


@pytest.mark.usefixtures("stand_ins")
def test_a_record_is_complete_while_the_first_item_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    file = pytester.path / "reports/parity.jsonl"
    monkeypatch.setitem(fakes.MISHAPS, "looks", lambda: seen.append(record.read(file).results[0].status))
    write(pytester, "import parity\n@parity.pair('looks', sizes=[dict(n=2)], precisions=['fp32'])\ndef f(te, n): ...")
    run(pytester, "my_pairs.py").assert_outcomes(passed=1)
    assert seen == ["error"]
    assert [result.status for result in recorded(pytester).results] == ["passed"]


# A file of pairs that hangs while it is collected loses only its own pairs; one that ends the process is reported.


HANGS = "import time, parity\ntime.sleep(1000)\n"
SOUND = "import parity\n" + CASE.format(name="sound")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_hangs_when_it_is_collected_is_interrupted_and_the_others_are_compared(
    tmp_path: Path, workers: int
) -> None:
    (tmp_path / "hanging_pairs.py").write_text(HANGS)
    arguments = ("hanging_pairs.py", f"-n{workers}", "--parity-timeout=3", "--continue-on-collection-errors")
    code, printed, results = run_in_a_process(tmp_path, ["sound"], *arguments)
    assert code == 1
    assert [(result.case, result.status) for result in results] == [("sound", "passed")]
    told = (
        "hanging_pairs.py: ran longer than 3 s (--parity-timeout, or --timeout of parity run) while it was collected; "
        "it was interrupted at hanging_pairs.py:2"
    )
    assert told in printed
    way = 'hanging_pairs.py", line 2, in <module>\n    time.sleep(1000)\nKeyboardInterrupt: its time is up\n'
    assert way in printed
    assert told in (tmp_path / "reports/parity.md").read_text()


@pytest.mark.parametrize(
    ("mishap", "workers", "told"),
    [
        ("hangs_whatever_is_raised", 0, "ran longer than 3 s (--parity-timeout, or --timeout of parity run) while it"),
        ("hangs_whatever_is_raised", 2, "ran longer than 3 s (--parity-timeout, or --timeout of parity run) while it"),
        ("exits_in_c", 0, "its C code called exit while the file was being collected, which ends the process; this"),
        ("exits_in_c", 2, "its C code called exit while the file was being collected, which ends the process; this"),
    ],
)
def test_a_file_that_ends_its_process_when_it_is_collected_ends_the_run_and_says_where(
    tmp_path: Path, mishap: str, workers: int, told: str
) -> None:
    (tmp_path / "bad_pairs.py").write_text(f"import fakes, parity\nfakes.MISHAPS[{mishap!r}]()\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "my_pairs.py").write_text(SOUND)
    path = os.pathsep.join([str(Path(fakes.__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    arguments = ("bad_pairs.py", "my_pairs.py", f"-n{workers}", "--parity-timeout=3")
    ran = forked.run("-m", "pytest", "-p", "parity.plugin", *arguments, folder=tmp_path, environment=environment)
    assert ran.returncode in (1, 2)
    assert f"bad_pairs.py: {told}" in ran.stdout
    assert 'bad_pairs.py", line 2, in <module>' in ran.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_exits_when_it_is_collected_is_an_error(tmp_path: Path, workers: int) -> None:
    (tmp_path / "bad_pairs.py").write_text("import os, parity\nos._exit(0)")
    arguments = ("bad_pairs.py", f"-n{workers}", "--continue-on-collection-errors")
    code, printed, results = run_in_a_process(tmp_path, ["sound"], *arguments)
    assert code == 1
    assert "os._exit(0), which would have ended the run" in printed
    assert [(result.case, result.status) for result in results] == [("sound", "passed")]


LEAVES_A_THREAD = """
import threading, time
from torch import nn
import parity


class Leaving(nn.Linear):
    def forward(self, x):
        threading.Thread(target=time.sleep, args=(1000,), name="sleeper").start()
        return super().forward(x)


@parity.pair("leaving", precisions=["fp32"])
def leaving(te):
    weights = {"weight": "weight", "bias": "bias"}
    return parity.Pair(Leaving(16, 16), te.Linear(16, 16), inputs=lambda rng: rng.normal(8, 16), weights=weights)
"""


def test_a_thread_that_a_case_leaves_does_not_keep_the_run_from_ending(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    write(pytester, LEAVES_A_THREAD)
    ended = pytester.runpython_c(
        "import sys, pytest\n"
        "from parity.plugin import alone\n"
        "alone._SECONDS_TO_END = 0.1\n"
        "sys.exit(pytest.main(['-q', '-p', 'parity.plugin', 'my_pairs.py']))"
    )
    assert ended.ret == 0
    ended.stderr.fnmatch_lines(["parity: my_pairs.py::leaving* left the thread sleeper running; *"])
    assert recorded(pytester).results[0].status == "passed"
