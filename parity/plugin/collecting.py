"""Collect files of pairs in limited time, and explain why a file or a pair could not be collected.

Also suggest pairs for an unknown id, and check in advance whether a keyword can match anything.
"""

from __future__ import annotations

import difflib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.case.files import text_of
from parity.plugin import ending
from parity.plugin.alone import exit_heard, exit_refused
from parity.plugin.options import of
from parity.settings import PRECISION_NAMES
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.case.case import Case


class Module(pytest.Module):
    """A file of pairs, whose name may occur in another folder, too: ``llama/pairs.py`` and ``mixtral/pairs.py``.

    pytest would import both as module ``pairs`` and refuse the second one.
    """

    def _getobj(self) -> Any:
        taken = getattr(sys.modules.get(self.path.stem), "__file__", None)
        if taken is None or Path(taken).resolve() == self.path.resolve() or (self.path.parent / "__init__.py").exists():
            return super()._getobj()
        from parity.case.registry import module_of

        return module_of(self.path.resolve())


@contextmanager
def collected_in_time(module: pytest.Module, seconds: float) -> Iterator[None]:
    """Limit the seconds for which the context may collect a file of pairs; 0 for no limit.

    A file that takes longer is interrupted, also in a worker, and the other files are collected: see ``too_late``. If
    it does not stop when interrupted, or if its C code ends the process, the run ends.
    """
    config = module.config
    stacks = of(config).stacks or config.stash[ending.STDERR]
    expired = partial(_end_run, module, _too_long(seconds), threading.get_ident())

    def exited() -> None:
        cause = "its C code called exit while the file was being collected, which ends the process"
        ending.end_process(partial(_end_run, module, cause, threading.get_ident()))

    limit = ending.time_limit(seconds, expired, stacks, ending.interruption(config))
    with limit, exit_heard(exited), exit_refused():  # also in a worker, whose replacements would end as well
        yield


def too_late(module: pytest.Module, seconds: float, interrupted: KeyboardInterrupt) -> pytest.CollectReport:
    """Return the report on a file that was interrupted because its time was up."""
    from parity.trace.whose import forget_handler, interrupted_at, way_there

    forget_handler(interrupted)
    return _make_failed_report(module, f"{_too_long(seconds)}; {interrupted_at(interrupted)}", way_there(interrupted))


def _too_long(seconds: float) -> str:
    return f"{ending.too_long(seconds)} while it was collected"


def _end_run(module: pytest.Module, cause: str, thread: int) -> None:
    """Report the file of pairs that ends this process. The run ends too, because every worker collects every file."""
    report = _make_failed_report(module, f"{cause}; this ends the run", ending.stack_of(thread))
    ending.announce(report)
    ending.show_output(module.config)
    module.ihook.pytest_collectreport(report=report)
    if not hasattr(module.config, "workerinput"):
        ending.finish(module.session)


def _make_failed_report(module: pytest.Module, cause: str, stack: str) -> pytest.CollectReport:
    report = pytest.CollectReport(module.nodeid, "failed", f"{module.nodeid}: {cause}\n{stack.rstrip()}", [])
    note(report, module.config.invocation_params.dir)
    return report


# The message about a pair or a file that pytest could not collect, without a traceback.


def message(report: pytest.CollectReport) -> str:
    """Return what is wrong, preceded by its place: the file and line if pytest's text names them, else the id."""
    text = without_traceback(report.longreprtext)
    file = report.nodeid.split("::")[0]
    return text if file in text else f"{_find_last_place(file, report.longreprtext) or report.nodeid}: {text}"


def without_traceback(text: str) -> str:
    """Return only the lines of the error if pytest shows a traceback, where ``E`` marks them; else the whole text."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return "\n".join(marked) or text.strip()


def note(report: pytest.CollectReport, start: Path) -> None:
    """Attach the message for the record to the report about a pair, or a file of pairs, that was not collected.

    Args:
        report: the report, which also carries the message from xdist's workers to the controller.
        start: the folder that pytest was started in, which is left out of the message.
    """
    report.parity_uncollected = message(report).replace(f"{start}/", "")  # type: ignore[attr-defined]


def noted(report: pytest.CollectReport) -> str:
    """Return the message that ``note`` attached; empty if the report is on no pair or the pair was collected."""
    return str(getattr(report, "parity_uncollected", ""))


def _find_last_place(file: str, text: str) -> str:
    """Return the last place in the file that pytest's traceback shows; empty if there is none."""
    lines = re.findall(rf"^(?:.*/)?{re.escape(Path(file).name)}:(\d+): in ", text, re.MULTILINE)
    return f"{file}:{lines[-1]}" if lines else ""


# Suggestions for an id that names no pair or item: the nearest existing names.


def unknown_pairs(
    arguments: Iterable[str],
    start: Path,
    cases: Iterable[Case],
    misdeclared: Callable[[Path], Mapping[str, UserError]] = lambda file: {},
) -> Iterator[str]:
    """Yield a sentence about each id in a file of pairs that names none of its items.

    Args:
        arguments: pytest's arguments: files, folders and ids.
        start: the folder that relative paths are relative to.
        cases: the declared cases.
        misdeclared: returns the errors in a file's declarations, by the pair's name.
    """
    by_file: dict[Path, dict[str, Case]] = {}
    for case in cases:
        by_file.setdefault(case.path, {})[case.name] = case
    for argument in arguments:
        path, _, item = argument.partition("::")
        file = (start / path).resolve()
        declared = by_file.get(file, {})
        name = item.partition("[")[0]
        if name in (wrong := misdeclared(file)):
            yield str(wrong[name])
        elif not item or not declared:
            continue
        if name == item and name in declared:
            at = ", ".join(declared[name].precisions or ("every precision",))
            yield f"the pair {name!r} of {path} has no item in this run; its precisions are {at}"
        elif name in declared:
            yield f"the pair {name!r} of {path} has no item {item!r}; `pytest {path} --collect-only -q` lists them"
        else:
            yield f"there is no pair {name!r} in {path}; {_suggest_names(path, name, list(declared))}"


# With a misspelt keyword, no workers should start: each would import PyTorch only to find nothing.


def may_match(keyword: str, files: Iterable[str]) -> bool:
    """Return whether an item of these files may match a keyword, judging by the text of the files alone.

    A pair's name and its sizes usually appear in the text, but a file may also compute them. So False means that
    probably no item matches; only collecting the files can prove it.

    Args:
        keyword: an expression like that of pytest's ``-k``.
        files: files of pairs, or pytest ids in them.
    """
    words = [word for word in re.findall(r"[^\s()]+", keyword.lower()) if word not in ("and", "or")]
    if "not" in words or not words:
        return True
    places = [Path(file.partition("::")[0]) for file in files]
    known = "\n".join([*PRECISION_NAMES, *map(str, places), *map(text_of, places)]).lower()
    return any(word in known or re.search(r"\d", word) for word in words)


def _suggest_names(path: str, name: str, declared: list[str]) -> str:
    close = difflib.get_close_matches(name, declared, n=3)
    ids = " or ".join(f"{path}::{other}" for other in close)
    return f"did you mean {ids}?" if close else f"it declares {', '.join(declared)}"
