"""Test what a process forks does not go on with its work, and holds none of its pipes and locks."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from parity.machine.process import forks_ended, withheld


def forked() -> int:
    """Fork a process that lives on."""
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
            child = forked()
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
        child = forked()
    try:
        with path.open("w") as other:
            time.sleep(0.1)  # the fork lets go when it begins
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
