"""Have another process own the exit code of ``pytest`` where pairs are compared in pytest's own process.

C code of a case that calls ``_exit(0)`` would end the run as if all were well. The process forks before any conftest is
imported, so before PyTorch, CUDA, capturing and coverage begin, which then all are in the child; what was started only
waits (``machine/supervision.py``). That is done only where nobody else counts on this process: pytest was started by
its own command, and neither has workers nor a debugger. Who calls ``pytest.main`` goes on after it, so nothing is done.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from glob import glob
from types import FrameType
from typing import TypeAlias

import pytest

from parity.case.files import that_import_parity
from parity.machine import supervision
from parity.machine.supervision import LastWord

_NAME = "parity-watched"
_COMMANDS = ("_console_main", "console_main")  # of pytest 9.1 and later, and of those before
_MAIN = ("_main", "main")
_ELSEWHERE = ("usepdb", "trace", "collectonly", "version", "help", "looponfail", "tx")  # options


_Code: TypeAlias = int | pytest.ExitCode | None


class Watched:
    """A pytest plugin that says how the run has ended.

    Args:
        word: where it says so.
    """

    def __init__(self, word: LastWord) -> None:
        self._word = word

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, _Code, _Code]:
        code = yield
        self._word.say(int(code or 0))
        return code


def watch(config: pytest.Config) -> None:
    """Go on in a child if this process compares by itself, and is pytest's own."""
    if config.pluginmanager.is_blocked(_NAME):  # by -p no:parity-watched
        return
    if _compares_itself(config) and _is_of_its_command() and supervision.possible() and _has_cases(config):
        word = supervision.supervised()
        if word is not None:
            config.pluginmanager.register(Watched(word), _NAME)


def _compares_itself(config: pytest.Config) -> bool:
    asked = config.known_args_namespace
    return not any(getattr(asked, name, None) for name in ("numprocesses", *_ELSEWHERE))


def _is_of_its_command() -> bool:
    """Return whether pytest's command calls this, and not a run within another, or somebody else's program."""
    calls = [name for frame in _frames() if (name := _name_in_pytest(frame))]
    return any(name in _COMMANDS for name in calls) and sum(name in _MAIN for name in calls) == 1


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name_in_pytest(frame: FrameType) -> str:
    return frame.f_code.co_name if frame.f_globals.get("__name__") == "_pytest.config" else ""


def _has_cases(config: pytest.Config) -> bool:
    """Return whether a file that pytest is asked for imports parity; ``config.args`` does not know them yet."""
    start = config.invocation_params.dir
    by_default = config.getini("testpaths") if start == config.rootpath else []
    named = config.known_args_namespace.file_or_dir or [
        found for pattern in by_default for found in sorted(glob(pattern, root_dir=start, recursive=True))
    ]
    paths = [start / name.split("::")[0] for name in named or ["."]]
    return any(that_import_parity(paths, config.getini("python_files"), config.getini("norecursedirs")))
