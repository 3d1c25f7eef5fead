"""The time limit of a comparison, left in every way in which an interruption may make it be left."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from parity.plugin.ending import time_limit

INTERRUPTED = ("ending.py", "threading.py", "contextlib.py")  # files of Python in which leaving it runs


def left_with_an_interruption(at: int, stacks: Path) -> tuple[bool, threading.Thread]:
    """Leave a time limit in a thread, and raise KeyboardInterrupt before the so many-th operation of that.

    Returns:
        Whether there were as many operations, and the thread.
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
