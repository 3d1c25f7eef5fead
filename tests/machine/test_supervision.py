"""A process that does the work, and a parent that waits for it and owns the exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from parity.machine import process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child ends with its parent on Linux alone")
ROOT = Path(process.__file__).parents[2]
BEGIN = f"""
import ctypes, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from parity.machine import process
word = process.supervised()
libc = ctypes.CDLL(None)
print(os.getpid(), flush=True)
"""
SENTENCE = "exit code 0 before the run was over, perhaps because C code called _exit; so the exit code is 1"
HEARS = """
heard = []


def hear(number, frame):
    heard.append(number)
    print(signal.Signals(number).name, flush=True)


def wait():
    while not heard:
        time.sleep(0.01)



for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, hear)
print("ready", flush=True)
"""


def program(work: str) -> list[str]:
    return [sys.executable, "-c", BEGIN + work]


def ended(work: str) -> tuple[int, str]:
    ran = subprocess.run(program(work), capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stderr


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("word.say(0)", 0),
        ("word.say(1); sys.exit(1)", 1),
        ("word.say(1)", 1),
        ("word.say(0); libc._exit(0)", 0),
        ("libc._exit(3)", 3),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_work_ends_with_its_own_exit_code(work: str, code: int) -> None:
    found, told = ended(work)
    assert found == code
    assert SENTENCE not in told


@pytest.mark.parametrize(
    "work",
    [
        "libc._exit(0)",
        "libc.exit(0)",
        "os._exit(0)",
        "sys.exit(0)",
        "os.closerange(3, 4096); word.say(0)",
        "os.fork() or word.say(0) or os._exit(0); os.wait(); libc._exit(0)",
        "libc.fork() or time.sleep(1); libc._exit(0)",
    ],
)
def test_an_end_with_0_that_the_work_has_not_said_is_none(work: str) -> None:
    found, told = ended(work)
    assert found == 1
    assert SENTENCE in told


def test_nothing_is_written_to_a_file_that_took_the_number_of_a_closed_pipe(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    taken = f"os.closerange(3, 4096); files = [open({str(tmp_path / 'theirs')!r}, 'r+b') for _ in range(9)]; "
    assert ended(taken + "word.say(65)")[0] == 1
    assert (tmp_path / "theirs").read_bytes() == b""


@pytest.fixture
def begun() -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Yield a function that starts work in its own process group, and returns the process and the child's id."""
    processes: list[subprocess.Popen[str]] = []

    def begin(work: str, before: Callable[[], object] = os.setpgrp) -> tuple[subprocess.Popen[str], int]:
        one = subprocess.Popen(program(work), stdout=subprocess.PIPE, text=True, preexec_fn=before)
        processes.append(one)
        assert one.stdout is not None
        return one, int(one.stdout.readline())

    yield begin
    for one in processes:
        one.kill()
        one.communicate()


def wait_for(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def state(pid: int) -> str:
    """Return a process's state as the letter that ps shows; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_work_gets_a_signal_that_its_parent_gets(begun: Callable[..., tuple], number: signal.Signals) -> None:
    process, _ = begun(HEARS + "wait(); word.say(7)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.read() == f"{number.name}\n"
    assert process.wait(60) == 7


def test_a_signal_that_ends_the_work_ends_its_parent(begun: Callable[..., tuple]) -> None:
    process, child = begun("signal.pause()")
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert state(child) == "Z"


def test_the_work_is_killed_with_its_parent(begun: Callable[..., tuple]) -> None:
    process, child = begun("time.sleep(1000)")
    process.kill()
    process.wait(60)
    assert wait_for(lambda: state(child) == "Z")


def test_both_stop_and_go_on_when_the_parent_is_asked_to(begun: Callable[..., tuple]) -> None:
    process, child = begun(HEARS + "wait(); word.say(0)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTSTP)
    assert wait_for(lambda: (state(process.pid), state(child)) == ("T", "T"))
    process.send_signal(signal.SIGCONT)
    assert wait_for(lambda: "T" not in (state(process.pid), state(child)))
    process.terminate()
    assert process.stdout.read() == "SIGTERM\n"
    assert process.wait(60) == 0


def test_it_works_under_a_program_that_ignores_the_end_of_its_children(begun: Callable[..., tuple]) -> None:
    process, _ = begun(
        "print(signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN); word.say(6)",
        lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert process.stdout.read() == "True\n"
    assert process.wait(60) == 6


def test_the_terminal_is_that_of_the_work_and_ctrl_c_comes_once() -> None:
    work = HEARS + "print('read', input(), flush=True); wait(); time.sleep(0.2); word.say(5)"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, program(work))
    printed = ""

    def reads(expected: str) -> None:
        nonlocal printed
        while expected not in printed:
            printed += os.read(terminal, 4096).decode()

    reads("ready")
    os.write(terminal, b"a line\n")
    reads("read a line")
    os.write(terminal, b"\x03")
    reads("SIGINT")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    with suppress(OSError):  # no process has the terminal open any more
        printed += os.read(terminal, 4096).decode()
    os.close(terminal)
    assert printed.count("SIGINT") == 1


# A process that is debugged, or has other threads, does the work itself.


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", True),
        ("import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()", False),
        ("sys.settrace(lambda *_: None)", False),
        ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", False),  # asks its parent to trace it, as gdb's does
    ],
)
def test_a_process_of_one_thread_that_nobody_debugs_may_be_supervised(before: str, expected: bool) -> None:
    asked = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom parity.machine import process\n{before}\n"
    code = asked + f"sys.exit(process.possible() != {expected})"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
