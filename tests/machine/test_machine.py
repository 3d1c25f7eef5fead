"""Test what a machine has and allows: memory, garbage, processes, forks, files, and the output of ``parity doctor``."""

from __future__ import annotations

import fcntl
import gc
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import forked
import pytest
import torch

from parity import te
from parity.cli import machine
from parity.machine import devices
from parity.machine.process import forks_ended, lasting, withheld
from parity.plugin.options import check_file, check_folder
from parity.te import PRECISIONS
from parity.user_error import UserError
from te_on_cpu.versions import NEWEST, OLDEST

# How much memory a machine can give, according to Linux and the limits of the container around the process.


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = dict(proc__meminfo="MemTotal:  64000 kB\nMemFree:  100 kB\nMemAvailable:  32000 kB\n")


def test_the_machine_gives_what_is_available(tmp_path: Path) -> None:
    assert devices.free_memory(write(tmp_path, **MACHINE)) == 32000 * 1024


@pytest.mark.parametrize(
    "files",
    [
        dict(memoryDOTmax="9000000\n", memoryDOTcurrent="5000000\n", memoryDOTstat="anon 1\ninactive_file 1000000\n"),
        dict(
            memory__memoryDOTlimit_in_bytes="9000000",
            memory__memoryDOTusage_in_bytes="5000000",
            memory__memoryDOTstat="cache 1\ntotal_inactive_file 1000000\n",
        ),
    ],
)
def test_a_container_gives_no_more_than_its_limit_leaves(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, **MACHINE, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    assert devices.free_memory(tmp_path) == 5000000


def test_a_container_without_a_limit_gives_what_the_machine_has(tmp_path: Path) -> None:
    write(tmp_path, **MACHINE, sys__fs__cgroup__memoryDOTmax="max\n", sys__fs__cgroup__memoryDOTcurrent="5000000\n")
    assert devices.free_memory(tmp_path) == 32000 * 1024


def test_a_system_that_does_not_tell_leaves_it_unknown(tmp_path: Path) -> None:
    assert devices.free_memory(tmp_path) is None


# Freed memory is kept for the next tensors and given back on request, and pages are large. Each test starts a process.


MEBIBYTE = 2**20
TENSOR, LARGE = 31 * MEBIBYTE, 64 * MEBIBYTE

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

PROGRAM = f"""
import torch
from pathlib import Path
from parity.machine import process

def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * {os.sysconf("SC_PAGE_SIZE")}

print(int(process.keep_freed()))
before = resident()
torch.ones({TENSOR}, dtype=torch.uint8)
print(resident() - before)
process.give_back()
print(resident() - before)
torch.ones({LARGE}, dtype=torch.uint8)
print(resident() - before)
"""


def grown(**environment: str) -> tuple[bool, int, int, int]:
    """Return whether memory is kept, and three measurements of how many bytes the process has grown by.

    They are made after it freed a tensor, after it gave memory back, and after it freed a large tensor.
    """
    kept, freed, given_back, large = printed(PROGRAM, {**os.environ, **environment})
    return bool(kept), freed, given_back, large


def printed(program: str, environment: dict[str, str]) -> list[int]:
    """Return the numbers that a program prints in a process of its own."""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(number) for number in ran.stdout.split()]


@on_glibc
def test_a_freed_tensors_memory_stays_until_it_is_given_back_but_that_of_a_large_one() -> None:
    kept, freed, given_back, large = grown()
    assert kept
    assert freed > TENSOR - MEBIBYTE
    assert given_back < TENSOR / 2
    assert large < TENSOR / 2


@on_glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_the_environment_says_of_the_heap_stays(name: str) -> None:
    kept, freed, *_ = grown(**{name: str(MEBIBYTE)})
    assert not kept
    assert freed < TENSOR / 2


HUGE_PAGES = """
import torch
from pathlib import Path
from parity.machine import process

process.use_huge_pages()
tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
lines = Path("/proc/self/smaps").read_text().splitlines()
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HOW = SETTING.read_text() if SETTING.exists() else "[never]"


@on_glibc
@pytest.mark.skipif("[never]" in HOW, reason="the kernel gives no huge pages")
@pytest.mark.parametrize(("said", "huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_large_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise(
    said: dict[str, str], huge: bool
) -> None:
    if "[always]" in HOW and not huge:
        pytest.skip("the kernel gives huge pages unasked")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | said
    (kibibytes,) = printed(HUGE_PAGES, environment)
    assert (kibibytes > 32 * 1024) is huge


# The garbage collector ignores objects that live as long as the process.


@pytest.fixture
def _thawed():
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_thawed")
def test_nothing_is_collected_within():
    with lasting():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("_thawed")
def test_what_was_made_within_is_not_looked_at_again():
    with lasting():
        made = [[] for _ in range(1000)]
    ids = {id(one) for one in made}
    assert not any(id(one) in ids for one in gc.get_objects())


@pytest.mark.usefixtures("_thawed")
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with lasting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("_thawed")
def test_it_collects_again_after_an_import_that_fails():
    with pytest.raises(ImportError), lasting():
        raise ImportError
    assert gc.isenabled()


# Processes that share work.


INTERRUPTED = """
import os, signal, time
from parity.machine.process import processes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with processes(2) as pool:
            begun = [pool.submit(time.sleep, 2) for _ in range(2)]  # both processes, which an interruption may now meet
            [job.result() for job in begun]
            jobs = [pool.submit(time.sleep, 600) for _ in range(4)]
            print("began", flush=True)
            jobs[0].result()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interruption_ends_all_of_them_and_they_say_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")


STARTED = """
import os, signal, subprocess, sys, time
from parity.machine.process import ended_with_this, processes, spawned

if __name__ == "__main__":
    # One write a line: where Python's output is unbuffered, print writes each number by itself, and the two lines mix.
    code = r"import os, time; os.write(1, b'%d %d\\n' % (os.getpid(), os.fork() or os.getpid())); time.sleep(600)"
    program = [sys.executable, "-c", code]
    with (
        processes(1) as pool,
        spawned(1) as other,
        subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True, text=True) as leader,
        ended_with_this(leader),
    ):
        those = {pool.submit(os.getpid).result(), other.submit(os.getpid).result()}
        those |= {int(number) for _ in range(2) for number in leader.stdout.readline().split()}
        pool.submit(time.sleep, 600)
        other.submit(time.sleep, 600)
        print(*those, flush=True)
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(600)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_what_a_process_has_started_ends_with_it_however_it_is_ended(tmp_path: Path, number: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [sys.executable, script, number], stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=False
    )
    assert ran.returncode == -getattr(signal, number)
    started = list(map(int, ran.stdout.split()))
    assert len(started) == 4
    until = time.monotonic() + 30
    while any(map(forked.is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(forked.is_running, started))


# A fork of a process does not continue its work, and holds none of its pipes and locks.


def fork_that_lives_on() -> int:
    """Fork a process that keeps running, and return its id."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    return child


@pytest.mark.parametrize(("raises", "code"), [(False, 0), (True, 1)])
def test_a_fork_ends_where_it_would_leave_the_context(raises: bool, code: int) -> None:
    process = os.getpid()
    with forks_ended():
        child = os.fork()
        if child == 0 and raises:
            raise ValueError
    assert os.getpid() == process
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_pipe_ends_with_its_process_though_a_fork_lives_on() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output, os.fdopen(write, "wb") as pipe:
        child = None
        try:
            withheld(pipe)
            child = fork_that_lives_on()
            pipe.close()
            assert output.read() == b""  # and not for ever
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def test_a_lock_is_free_when_its_process_lets_go_though_a_fork_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as lock:
        fcntl.flock(withheld(lock), fcntl.LOCK_EX)
        child = fork_that_lives_on()
    try:
        with path.open("w") as other:
            time.sleep(0.1)  # the fork lets go when it begins
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Whether files can be written is checked before anything is computed, and the check leaves nothing behind.


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep", "--report")
    check_file(tmp_path / "report.md", "--report")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_or_above_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--report is .*/file: that is a file, but should be a folder"):
        check_folder(tmp_path / "file", "--report")
    with pytest.raises(UserError, match=r"--report is .*/file/deep, which is below .*/file:"):
        check_folder(tmp_path / "file" / "deep", "--report")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UserError, match=r"report\.md is a folder, but should be a file"):
        check_file(tmp_path / "report.md", "--report")


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_a_place_where_nobody_may_write_is_told() -> None:
    with pytest.raises(UserError, match=r"--report is /proc/x, but /proc cannot be written to"):
        check_folder(Path("/proc/x"), "--report")


def test_a_name_that_no_file_can_have_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--report: .* cannot be written: File name too long"):
        check_file(tmp_path / (300 * "x"), "--report")


# What ``parity doctor`` finds out about a machine.


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.13.0", f"1.13.0, too old: the CPU kernels serve {OLDEST} to {NEWEST}"),
        (f"{NEWEST}.9", f"{NEWEST}.9 (the CPU kernels serve"),
        ("99.0", "99.0, newer than was tried"),
        (None, "not installed: pip install transformer-engine"),
    ],
)
def test_the_version_of_te_is_held_against_what_the_cpu_kernels_serve(version: str | None, words: str) -> None:
    assert machine.te_range(version).startswith(words)


def test_a_precision_is_available_or_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = te.Kernels("cpu", torch.device("cpu"), ModuleType("te"))
    monkeypatch.setattr("parity.te.kernels", lambda backend: kernels)
    monkeypatch.setattr(
        "parity.te.why_unavailable", lambda precision, _: "it needs Hopper" if precision.recipe else None
    )
    answers = machine.availability("cpu")
    assert (answers["bf16"], answers["fp8_current"]) == ("yes", "no: it needs Hopper")


def test_kernels_that_cannot_be_loaded_are_a_reason_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_(backend: str) -> None:
        raise te.BackendUnavailable("already loaded")

    monkeypatch.setattr("parity.te.kernels", raise_)
    assert machine.availability("cpu") == dict.fromkeys(PRECISIONS, "no: already loaded")


def test_without_a_gpu_the_doctor_tells_of_each_gpu_what_te_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.te.why_no_gpu", lambda: "PyTorch sees no CUDA device")
    diagnosis = machine.diagnose()
    assert diagnosis.real == dict.fromkeys(PRECISIONS, "no: PyTorch sees no CUDA device")
    refused = {
        gpu: {name for name, answer in answers.items() if answer.startswith("no")}
        for gpu, answers in diagnosis.emulated.items()
    }
    assert refused == {
        "Ada 8.9": {"fp8_block", "mxfp8", "nvfp4"},
        "Hopper 9.0": {"mxfp8", "nvfp4"},
        "Blackwell 10.0": set(),
        "RTX Blackwell 12.0": {"mxfp8"},
    }
    assert "compute capability 10.0" in diagnosis.emulated["Hopper 9.0"]["mxfp8"]
    assert "CublasLt version 12.1.3.x" in diagnosis.emulated["Ada 8.9"]["fp8_delayed"]
    assert "CUDA >= 12.9" in diagnosis.emulated["Hopper 9.0"]["fp8_block"]
    assert diagnosis.emulated["Hopper 9.0"]["fp8_delayed"] == "yes"


def test_the_table_has_a_row_for_each_precision_and_a_column_for_each_gpu() -> None:
    yes, no = dict.fromkeys(PRECISIONS, "yes"), dict.fromkeys(PRECISIONS, "no: it is too old")
    versions = (("PyTorch", torch.__version__),)
    diagnosis = machine.Diagnosis(
        versions, no, {"Ada 8.9": yes | {"fp32": "yes: CUDA 12"}, "Hopper 9.0": yes}, "CUDA 13"
    )
    lines = str(diagnosis).splitlines()
    assert lines[0].split() == ["PyTorch", torch.__version__]
    assert lines[2].split() == ["precision", "this", "GPU", "Ada", "8.9", "Hopper", "9.0"]
    rows = [line.split() for line in lines[4 : 4 + len(PRECISIONS)]]
    assert [row[0] for row in rows] == list(PRECISIONS)
    assert rows[0][1:] == ["no", "(1)", "yes", "(2)", "yes"]
    assert "(1) it is too old" in lines
    assert "(2) CUDA 12" in lines


def test_without_a_gpu_the_table_is_of_emulated_ones() -> None:
    answers = dict.fromkeys(PRECISIONS, "yes")
    text = str(machine.Diagnosis((), {}, {"Hopper 9.0": answers}, "CUDA 13", "PyTorch sees no CUDA device"))
    assert "this GPU" not in text
    assert "No GPU here (PyTorch sees no CUDA device).\nWhat works: every pair is compared, on CPU kernels" in text
    assert [line.split() for line in text.splitlines() if line.startswith("fp32")] == [["fp32", "yes"]]
