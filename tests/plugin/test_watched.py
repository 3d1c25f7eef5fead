"""``pytest`` without workers and its time limit: a case cannot end the run as if everything had passed."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import fakes
import forked
import pytest

from parity.plugin import alone
from parity.plugin.ending import time_limit

# ``pytest`` without workers: no case can end it as if all had passed, and callers of pytest.main keep their process.


PAIRS = """
import ctypes, os, sys
import fakes, parity, pytest

fakes.install(pytest.MonkeyPatch())


@parity.pair("sound", sizes=[dict(n=2)], precisions=["fp32"])
def sound(te, n): ...
"""
PLAIN = """
import ctypes, os, sys
import pytest
"""
TEST = "\n\ndef test_it(request):\n    {body}\n"
C_ENDS = "ctypes.CDLL(None)._exit(0)"
COMMAND = ("-m", "pytest", "-p", "parity.plugin", "-p", "no:cacheprovider", "-q", "my_pairs.py")
SCRIPT = f"import pytest, sys; pytest.main({list(COMMAND[2:])!r}); sys.exit(5)"
NESTED = TEST.format(body="assert pytest.main(['-q', '-p', 'no:cacheprovider', 'other.py']) == 2")
EARLY = "before the run was over, perhaps because C code called _exit"


@pytest.mark.parametrize(
    ("text", "arguments", "code", "told"),
    [
        (PAIRS, COMMAND, 0, "1 of 1 item passed"),
        (PAIRS + TEST.format(body=C_ENDS), COMMAND, 1, EARLY),
        (PAIRS + C_ENDS, COMMAND, 1, EARLY),
        (PAIRS + TEST.format(body="pytest.exit('enough', 7)"), COMMAND, 7, "enough"),
        (PAIRS, (*COMMAND, "-k", "nothing"), 5, "deselected"),
        (PAIRS, (*COMMAND, "--markers"), 0, "@pytest.mark"),
        (PAIRS + NESTED, COMMAND, 0, "2 passed"),
        (PLAIN + TEST.format(body=C_ENDS), COMMAND, 0, ""),  # without pairs, pytest behaves as without parity
        (PAIRS + TEST.format(body=C_ENDS), (*COMMAND, "-p", "no:parity-watched"), 0, ""),
        (PAIRS, ("-c", SCRIPT), 5, "1 of 1 item passed"),  # the script goes on after pytest.main
    ],
)
def test_it_ends_with_0_only_if_it_says_so(
    tmp_path: Path, text: str, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (tmp_path / "my_pairs.py").write_text(text)
    (tmp_path / "other.py").write_text(PAIRS)  # its pair is then declared twice
    ended = _run(tmp_path, *arguments)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert told in ended.stdout + ended.stderr
    assert (EARLY in ended.stderr) == (told == EARLY)


def _run(folder: Path, *arguments: str) -> Any:
    path = os.pathsep.join(str(place) for place in (Path(fakes.__file__).parent, Path(alone.__file__).parents[2]))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = outside | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    return forked.run(*arguments, folder=folder, environment=environment)


@pytest.mark.parametrize(
    ("options", "is_alone"),
    [
        ({}, True),
        ({"numprocesses": 0}, True),
        ({"numprocesses": "auto"}, False),
        ({"numprocesses": 2}, False),
        ({"tx": ["2*popen"]}, False),
        ({"usepdb": True}, False),
        ({"trace": True}, False),
        ({"collectonly": True}, False),
    ],
)
def test_a_run_with_workers_or_a_debugger_is_not_watched(options: dict[str, object], is_alone: bool) -> None:
    config: Any = SimpleNamespace(known_args_namespace=SimpleNamespace(**options))
    assert alone._compares_itself(config) is is_alone


# The time limit of a comparison, interrupted at any operation while it is left.


INTERRUPTED = ("ending.py", "threading.py", "contextlib.py")  # files of Python's whose code runs while it is left


def left_with_an_interruption(at: int, stacks: Path) -> tuple[bool, threading.Thread]:
    """Leave a time limit in a thread, and raise KeyboardInterrupt before operation number ``at`` of leaving it.

    Returns:
        Whether there was such an operation, and the thread.
    """
    counted, is_leaving, was_raised = 0, False, False

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal counted, was_raised
        frame.f_trace_opcodes = True
        if event == "opcode" and is_leaving and frame.f_code.co_filename.endswith(INTERRUPTED):
            counted += 1
            if counted == at:
                was_raised = True
                raise KeyboardInterrupt
        return trace

    def leave() -> None:
        nonlocal is_leaving
        sys.settrace(trace)
        try:
            with time_limit(600.0, lambda: None, stacks, lambda: None):
                is_leaving = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(30.0)
    faulthandler.cancel_dump_traceback_later()
    return was_raised, thread


@pytest.mark.skipif(sys.gettrace() is not None, reason="coverage traces this thread")
def test_an_interruption_while_a_time_limit_is_left_leaves_no_lock_held(tmp_path):
    at, was_raised = 0, True
    while was_raised:
        at += 1
        was_raised, thread = left_with_an_interruption(at, tmp_path / "stacks")
        assert not thread.is_alive(), f"it hangs if it is interrupted at its operation {at}"
    assert at > 50
