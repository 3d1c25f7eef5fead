"""Workers on two GPUs that are not there: where they run, and what becomes of a run when some of them die.

The workers are real processes of pytest-xdist; what they compare is a stand-in that comes to grief by its name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest

from parity.plugin import workers
from parity.report import record
from parity.result import Result

CONFTEST = """
import fakes, pytest
patch = pytest.MonkeyPatch()
fakes.install(patch)
if "PYTEST_XDIST_WORKER" not in __import__("os").environ:
    fakes.install_gpus(patch)
"""
PAIR = """
@parity.pair({name!r}, sizes=[dict(n=2)], precisions=["fp32"])
def case(te, n): ...
"""
FATAL = ["breaks_the_device", "segfaults_at_seed_1", "hangs", "hangs_for_good"]
SOUND = [f"sound_{i}" for i in range(8)]
Eventful = tuple[int, str, dict[str, list[Result]]]


def run(folder: Path, names: list[str], *arguments: str, **environment: str) -> tuple[int, str, list[Result]]:
    """The exit code, what pytest prints, and the recorded results."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "my_pairs.py").write_text("import parity\n" + "".join(PAIR.format(name=name) for name in names))
    path = os.pathsep.join([str(Path(fakes.__file__).parent), *sys.path])
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "parity.plugin", "my_pairs.py", *arguments],
        cwd=folder,
        env={**outside, "PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:hypothesispytest", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return ran.returncode, ran.stdout + ran.stderr, list(record.read(folder / "reports/parity.jsonl").results)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Eventful:
    """A run on two GPUs with two seeds, in which an item breaks its device, one crashes, and two hang."""
    names = [name for pair in zip(FATAL, SOUND[:4], strict=True) for name in pair] + ["never_fits", *SOUND[4:]]
    folder = tmp_path_factory.mktemp("eventful")
    code, printed, results = run(folder, names, "-n", "2", "--parity-timeout=3", "--parity-seeds=2")
    return code, printed, {name: [result for result in results if result.case == name] for name in names}


def test_every_worker_has_one_gpu_and_both_gpus_have_workers(eventful: Eventful) -> None:
    notes = {note for name in SOUND for result in eventful[2][name] for note in result.notes}
    assert notes == {"computed on GPU-one", "computed on GPU-two"}


def test_what_kills_its_worker_costs_no_other_item(eventful: Eventful) -> None:
    code, printed, results = eventful
    assert all([result.status for result in results[name]] == ["passed", "passed"] for name in SOUND)
    assert all(results[name][-1].status == "error" for name in FATAL)
    assert code == 1
    assert f"{len(FATAL)} failed, {len(SOUND)} passed, 1 skipped" in printed


def test_seeds_that_were_compared_before_a_crash_are_recorded(eventful: Eventful) -> None:
    results = eventful[2]["segfaults_at_seed_1"]
    assert [(result.seed, result.status) for result in results] == [(0, "passed"), (1, "error")]


LIMIT = "(--parity-timeout, or --timeout of parity run)"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("breaks_the_device", "raised AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ("segfaults_at_seed_1", "its worker died: SIGSEGV"),
        (
            "hangs",
            f"ran longer than 3 s {LIMIT}; its worker was ended and replaced",
        ),
        (
            "hangs_for_good",
            f"ran longer than 3 s {LIMIT}, and let no Python thread run; its worker",
        ),
    ],
)
def test_its_result_says_what_happened(eventful: Eventful, name: str, reason: str) -> None:
    _, printed, results = eventful
    assert any(result.reason.startswith(reason) for result in results[name])
    assert reason in printed


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "its worker died: SIGKILL"),
        (-40, "its worker died: signal 40"),
        (3, "its worker ended with exit code 3"),
        (None, "its worker died"),
    ],
)
def test_how_a_worker_ended_is_told_by_its_code(code: int | None, cause: str) -> None:
    process = SimpleNamespace(wait=lambda timeout: code)
    assert (
        workers._cause_of_death(SimpleNamespace(gateway=SimpleNamespace(_io=SimpleNamespace(popen=process)))) == cause
    )


def test_where_an_item_hangs_is_printed(eventful: Eventful) -> None:
    assert "in _hold_the_interpreter" in eventful[1]
    assert "time.sleep(1000)" in eventful[1]


def test_what_does_not_fit_even_alone_is_skipped_with_the_bytes(eventful: Eventful) -> None:
    (result,) = eventful[2]["never_fits"]
    assert result.status == "skipped"
    assert "does not fit in memory, alone on its device and tried twice" in result.reason
    assert "GiB are free; raised OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB" in result.reason


def test_an_item_that_runs_out_of_memory_beside_others_runs_again_alone(tmp_path: Path) -> None:
    names = ["fits_alone", *(name for name in fakes.MISHAPS if name.startswith("fits_beside"))]
    code, printed, results = run(tmp_path, names, "-n", "2", PARITY_DEVICES="1")
    assert code == 0, printed
    retried = [result for result in results if any("alone on its device" in note for note in result.notes)]
    assert [result.case for result in retried] == ["fits_alone"]
    assert "computed on GPU-two" in retried[0].notes
    assert "a second time, alone on its device" in (tmp_path / "reports/parity.md").read_text()


def test_without_workers_an_item_that_hangs_ends_the_run_with_its_report(tmp_path: Path) -> None:
    code, printed, results = run(tmp_path, ["sound", "hangs", "never_reached"], "--parity-timeout=3")
    assert code == 1
    assert [result.status for result in results] == ["passed", "error"]
    assert "the run ends with it" in results[1].reason
    assert "1 item without a result" in (tmp_path / "reports/parity.md").read_text()
    assert "1 failed, 1 passed" in printed


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_that_is_terminated_keeps_the_seeds_that_were_compared_and_draws_its_report(
    tmp_path: Path, processes: str
) -> None:
    code, _, results = run(tmp_path, ["ends_the_run_at_seed_1"], "-n", processes, "--parity-seeds=3")
    assert code == pytest.ExitCode.INTERRUPTED
    assert [(result.seed, result.status) for result in results] == [(0, "passed"), (1, "error")]
    assert results[-1].reason == "interrupted before all of its seeds were compared"
    assert "1 of 1 item failed" in (tmp_path / "reports/parity.md").read_text()
