"""One comparison beside others or alone, repeated if memory runs out; its verdict before the search for its cause."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import fakes
import pytest
from plugin_runs import recorded, run, run_in_a_process, write

from parity.plugin import item as attempts
from parity.plugin.item import DeviceLock
from parity.plugin.options import Workplace
from parity.report import record
from parity.result import Result

# One comparison beside others or alone, repeated if memory runs out, and the lock that this needs.


FITS = fakes.result()
OUT_OF_MEMORY = fakes.result(status="error", reason="no memory", tensors=(), device_error="out of memory")
BESIDE = Workplace("gw0", Path("nowhere"), share=100)


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records how the device is taken, in order."""
    taken: list[str] = []

    class Lock:
        def __init__(self, path: Path, release: Callable[[], None]) -> None: ...

        def shared(self) -> nullcontext[None]:
            taken.append("shared")
            return nullcontext()

        def alone(self) -> nullcontext[None]:
            taken.append("alone")
            return nullcontext()

    monkeypatch.setattr("parity.plugin.item.DeviceLock", Lock)
    return taken


def attempt(need: int | None, *results: Result, workplace: Workplace = BESIDE) -> Result:
    to_come = iter(results)
    return attempts.attempt(lambda: next(to_come), nullcontext, lambda: need, workplace)


def test_an_item_shares_its_device(access: list[str]) -> None:
    assert attempt(100, FITS) == FITS
    assert access == ["shared"]


def test_an_item_that_needs_more_than_a_workers_share_runs_alone(access: list[str]) -> None:
    assert attempt(101, FITS) == FITS
    assert access == ["alone"]


def test_what_an_item_needs_is_asked_within_the_time_limit_since_it_calls_the_pairs_code(
    access: list[str],
) -> None:
    order: list[str] = []

    @contextmanager
    def limit() -> Iterator[None]:
        order.append("begin")
        yield
        order.append("end")

    def note(what: str, value: Any) -> Any:
        order.append(what)
        return value

    attempts.attempt(lambda: note("compare", FITS), limit, lambda: note("need", 1), BESIDE)
    assert order == ["begin", "need", "end", "begin", "compare", "end"]


def test_an_item_of_unknown_need_shares_its_device(access: list[str]) -> None:
    attempt(None, FITS)
    assert access == ["shared"]


def test_an_item_that_runs_out_of_memory_runs_alone_once_more_and_says_so(access: list[str]) -> None:
    result = attempt(1, OUT_OF_MEMORY, FITS)
    assert result.passed
    assert result.notes == (attempts.RETRIED,)
    assert access == ["shared", "alone"]


def test_an_item_that_runs_out_of_memory_twice_is_skipped(access: list[str]) -> None:
    result = attempt(3 * 2**30, OUT_OF_MEMORY, OUT_OF_MEMORY)
    assert result.status == "skipped"
    assert "it needs about 3.0 GiB" in result.reason
    assert "no memory; declare a smaller size, or " in result.reason


def test_a_wrong_port_is_not_tried_again(access: list[str]) -> None:
    wrong = fakes.result(margin=9.0)
    assert attempt(1, wrong) == wrong


def test_without_workers_there_is_nothing_to_wait_for(access: list[str]) -> None:
    assert attempt(1, OUT_OF_MEMORY, FITS, workplace=Workplace()).passed
    assert access == []


def enter(lock: Callable[[], object], order: list[str], name: str) -> threading.Thread:
    def run() -> None:
        with lock():  # type: ignore[attr-defined]
            order.append(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_many_share_a_device(tmp_path: Path) -> None:
    order: list[str] = []
    with DeviceLock(tmp_path / "device", list).shared():
        enter(DeviceLock(tmp_path / "device", list).shared, order, "second").join(10)
    assert order == ["second"]


def test_who_waits_to_be_alone_goes_before_those_who_come_later(tmp_path: Path) -> None:
    order: list[str] = []
    released: list[str] = []
    first = DeviceLock(tmp_path / "device", lambda: released.append("memory"))
    with first.shared():
        alone = enter(DeviceLock(tmp_path / "device", list).alone, order, "alone")
        alone.join(0.2)
        later = enter(DeviceLock(tmp_path / "device", list).shared, order, "later")
        later.join(0.2)
        assert order == []
    alone.join(10)
    later.join(10)
    assert order == ["alone", "later"]
    assert released == ["memory"]


def test_memory_is_kept_while_nobody_waits_to_be_alone(tmp_path: Path) -> None:
    released: list[str] = []
    with DeviceLock(tmp_path / "device", lambda: released.append("memory")).shared():
        pass
    assert released == []


def test_who_waits_for_another_to_be_done_alone_keeps_no_memory_meanwhile(tmp_path: Path) -> None:
    order: list[str] = []
    released: list[str] = []
    with DeviceLock(tmp_path / "device", list).alone():
        later = enter(DeviceLock(tmp_path / "device", lambda: released.append("memory")).shared, order, "later")
        later.join(0.2)
        assert (order, released) == ([], ["memory"])
    later.join(10)
    assert order == ["later"]


# A failure is recorded with its tensors, whatever happens to the process that searches for its cause.


pytest_plugins = ["pytester"]

LIMIT = "ran longer than 3 s (--parity-timeout, or --timeout of parity run)"
CUT_SHORT = "the search for the cause was cut short: "
ENDS = {
    "fails_and_its_search_kills_it": "its worker died: SIGKILL",
    "fails_and_its_search_exits": "its worker ended with exit code 3",
    "fails_and_its_search_hangs": f"{LIMIT}; its worker was ended and replaced",
    "fails_and_its_search_hangs_for_good": f"{LIMIT}, and kept every Python thread from running; its worker was ended",
}


def assert_verdict(result: Result, note: str) -> None:
    """Check that a failure has the verdict as judged, and a note that says why its cause is not known."""
    assert (result.status, result.reason, result.findings) == ("failed", "", ())
    assert result.tensors == (fakes.tensor(margin=100.0),)
    assert result.notes[-1].startswith(note)


def test_the_end_of_a_worker_or_a_device_during_the_search_leaves_the_verdict(tmp_path: Path) -> None:
    broken = "fails_and_its_search_breaks_the_device"
    names = [*ENDS, broken, "fails", "sound"]
    code, printed, recorded = run_in_a_process(tmp_path, names, "-n", "2", "--parity-timeout=3")
    assert code == 1
    assert sorted(result.case for result in recorded) == sorted(names)  # exactly one line for each item
    results, report = {result.case: result for result in recorded}, (tmp_path / "reports/parity.md").read_text()
    for name, cause in ENDS.items():
        assert_verdict(results[name], CUT_SHORT + cause)
        assert CUT_SHORT + cause in printed
        assert CUT_SHORT + cause in report
    raised = "the search for the cause raised AcceleratorError: CUDA error: an illegal memory access"
    assert_verdict(results[broken], raised)
    assert results[broken].device_error == "broken"
    # Other items have their findings, and the summary counts all failures.
    assert results["fails"].findings == (fakes.GATE_UP_SWAPPED,)
    assert results["sound"].status == "passed"
    assert "6 failed, 1 passed" in printed
    assert "6 of 7 items failed" in report


def test_without_workers_the_time_limit_leaves_the_verdict_and_a_report(tmp_path: Path) -> None:
    code, printed, results = run_in_a_process(tmp_path, ["sound", "fails_and_its_search_hangs"], "--parity-timeout=3")
    assert code == 1
    assert [result.status for result in results] == ["passed", "failed"]
    assert_verdict(results[1], f"{CUT_SHORT}{LIMIT}; it was interrupted at fakes.py")
    assert "1 of 2 items failed" in (tmp_path / "reports/parity.md").read_text()
    assert "margin 100 at output" in printed


def test_without_workers_the_end_of_the_process_leaves_the_verdict_in_the_record(tmp_path: Path) -> None:
    _, _, results = run_in_a_process(tmp_path, ["sound", "fails_and_its_search_kills_it"], "-n", "0")
    assert [result.status for result in results] == ["passed", "failed"]
    assert_verdict(results[1], "the search for the cause was cut short")


@pytest.mark.parametrize(
    ("processes", "name", "cause"),
    [("0", "fails_and_its_search_hangs", LIMIT), ("1", "fails_and_its_search_exits", "its worker ended")],
)
def test_seeds_before_are_recorded_and_the_note_says_that_none_after_was_compared(
    tmp_path: Path, processes: str, name: str, cause: str
) -> None:
    arguments = ["-n", processes, "--parity-timeout=3", "--parity-seeds=1,0,2"]
    _, _, results = run_in_a_process(tmp_path, [name], *arguments)
    assert [(result.seed, result.status) for result in results] == [(1, "passed"), (0, "failed")]
    assert_verdict(results[1], f"the search for the cause was cut short, and no later seed was compared: {cause}")


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_run_that_is_terminated_during_a_search_keeps_the_verdict(tmp_path: Path, processes: str) -> None:
    code, _, results = run_in_a_process(tmp_path, ["fails_and_its_search_is_interrupted"], "-n", processes)
    assert code == pytest.ExitCode.INTERRUPTED
    (result,) = results
    assert_verdict(result, f"{CUT_SHORT}interrupted")


@pytest.mark.usefixtures("stand_ins")
def test_what_is_recorded_meanwhile_gives_way_to_the_results(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    file = pytester.path / "reports/parity.jsonl"

    def look() -> None:
        seen.extend((result.case, result.status) for result in record.read(file).results)

    monkeypatch.setitem(fakes.DURING_THE_SEARCH, "fails", look)
    pairs = "".join(
        f"@parity.pair({name!r}, sizes=[dict(n=2)], precisions=['fp32'])\ndef case(te, n): ...\n"
        for name in ("sound", "fails", "sound_2")
    )
    write(pytester, f"import parity\n{pairs}")
    run(pytester, "my_pairs.py").assert_outcomes(passed=2, failed=1)
    assert seen == [("sound", "passed"), ("fails", "failed")]
    _, fails, _ = recorded(pytester).results
    assert (fails.findings, fails.notes) == ((fakes.GATE_UP_SWAPPED,), ())


@pytest.mark.usefixtures("stand_ins")
def test_a_verdict_alone_says_that_no_cause_was_searched_for(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity\n@parity.pair('fails', sizes=[dict(n=2)], precisions=['fp32'])\ndef f(te, n): ...")
    result = run(pytester, "my_pairs.py", "--parity-diagnosis=no")
    result.assert_outcomes(failed=1)
    (verdict,) = recorded(pytester).results
    assert_verdict(verdict, "the cause was not searched for")
    result.stdout.fnmatch_lines(
        ["*the cause was not searched for, because of diagnose=False or --parity-diagnosis=no*"]
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("arguments", "variable", "seconds"),
    [
        ((), None, 30.0),
        ((), "0", 0.0),
        ((), "90", 90.0),
        (("--parity-diagnosis=yes",), "90", 90.0),
        (("--parity-diagnosis=4.5",), "90", 4.5),
        (("--parity-diagnosis=0",), None, 0.0),
    ],
)
def test_the_option_counts_before_the_environment_and_that_before_30_s(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments, variable, seconds
) -> None:
    given: list[float | None] = []
    explain_at = fakes.explain_at
    monkeypatch.setattr(
        "parity.comparison.explain_at", lambda judged, diagnosis: given.append(diagnosis) or explain_at(judged, None)
    )
    monkeypatch.delenv("PARITY_DIAGNOSIS_SECONDS")
    if variable is not None:
        monkeypatch.setenv("PARITY_DIAGNOSIS_SECONDS", variable)
    write(pytester, "import parity\n@parity.pair('fails', sizes=[dict(n=2)], precisions=['fp32'])\ndef f(te, n): ...")
    run(pytester, "my_pairs.py", *arguments)
    assert given == [seconds]


def test_a_bad_variable_is_told_before_anything_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_DIAGNOSIS_SECONDS", "soon")
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*PARITY_DIAGNOSIS_SECONDS is 'soon', but must be a number of seconds*"])
