"""Test that the first look's verdict stays if the second look runs out of time or its process ends."""

from __future__ import annotations

from pathlib import Path

import fakes
import pytest
from plugin_runs import run_in_a_process

from parity.plugin.ending import Notes
from parity.result import Result

LIMIT = "ran longer than 3 s (--parity-timeout, or --timeout of parity run)"
# New workers import PyTorch while they collect, and the limit covers that as well.
LIMIT_OF_WORKERS = LIMIT.replace("3 s", "20 s")
CUT_SHORT = "the second look, which tells chance from a mistake, was cut short"
COUNTS = "; the first look counts, so statistics may exceed their limits by chance: "
WITH_WORKERS = {
    "looks_again_and_dies": "its worker died: SIGKILL",
    "looks_again_and_exits": "its worker ended with exit code 3",
    "looks_again_and_hangs": f"{LIMIT_OF_WORKERS}; its worker was ended and replaced",
    "looks_again_and_hangs_for_good": f"{LIMIT_OF_WORKERS}, and kept every Python thread from running; its worker",
}
WITHOUT = {
    "looks_again_and_dies": "the process of this run ended while it was comparing this item",
    "looks_again_and_hangs": f"{LIMIT}; it was interrupted at fakes.py",
}


def assert_first_look(result: Result, cause: str) -> None:
    assert (result.status, result.reason, result.findings) == ("failed", "", ())
    assert result.tensors == (fakes.tensor(margin=2.0),)
    assert result.notes[-1].startswith(f"{CUT_SHORT}{COUNTS}{cause}")


def test_the_end_of_a_worker_in_a_second_look_leaves_the_first_and_says_so(tmp_path: Path) -> None:
    names = [*WITH_WORKERS, "looks_again_and_passes", "dies_after_it_looks_again"]
    code, printed, recorded = run_in_a_process(tmp_path, names, "-n", "2", "--parity-timeout=20")
    assert code == 1
    assert sorted(result.case for result in recorded) == sorted(names)  # exactly one line for each item
    results, report = {result.case: result for result in recorded}, (tmp_path / "reports/parity.md").read_text()
    for name, cause in WITH_WORKERS.items():
        assert_first_look(results[name], cause)
        assert COUNTS + cause in printed
        assert COUNTS + cause in report
    # A second look that ends replaces the first one's verdict.
    assert results["looks_again_and_passes"].status == "passed"
    assert CUT_SHORT not in "".join(results["looks_again_and_passes"].notes)
    after = results["dies_after_it_looks_again"]
    assert (after.status, after.reason, after.tensors) == ("error", "its worker died: SIGKILL", ())


@pytest.mark.parametrize("name", WITHOUT)
def test_without_workers_the_record_has_the_first_look(tmp_path: Path, name: str) -> None:
    _, _, results = run_in_a_process(tmp_path, ["sound", name], "-n", "0", "--parity-timeout=3")
    assert [result.status for result in results] == ["passed", "failed"]
    assert_first_look(results[1], WITHOUT[name])


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_run_that_is_terminated_in_a_second_look_keeps_the_first_and_compares_it_again(
    tmp_path: Path, processes: str
) -> None:
    code, _, (result,) = run_in_a_process(tmp_path, ["looks_again_and_is_interrupted"], "-n", processes)
    assert code == pytest.ExitCode.INTERRUPTED
    assert_first_look(result, "interrupted")
    assert result.cut_short


def test_the_note_says_that_no_later_seed_was_compared(tmp_path: Path) -> None:
    arguments = ["-n", "0", "--parity-timeout=3", "--parity-seeds=2"]
    _, _, (result,) = run_in_a_process(tmp_path, ["looks_again_and_hangs"], *arguments)
    assert result.notes[-1].startswith(f"{CUT_SHORT}, and no later seed was compared{COUNTS}{LIMIT}")


def heard(*said: tuple[str, int, list[str]]) -> tuple[str, tuple[str, ...]]:
    """Return the item and the finished lines that a controller knows when it has heard this."""
    notes = Notes()
    for node_id, count, line in said:
        notes.hear(((node_id, "", "", ""), count, line))
    assert notes.last is not None
    return notes.last[0].node_id, notes.last[1]


def test_a_controller_knows_the_seeds_of_the_last_item_alone() -> None:
    a, b = ("a", 0, []), ("b", 0, [])
    assert heard(a) == ("a", ())
    assert heard(a, ("a", 1, ["0"]), ("a", 1, ["0"]), ("a", 2, ["1"])) == ("a", ("0", "1"))
    assert heard(a, ("a", 1, ["0"]), b) == ("b", ())
    assert heard(a, ("a", 1, ["0"]), a, ("a", 1, ["0 again"])) == ("a", ("0 again",))  # as a plugin runs it again
