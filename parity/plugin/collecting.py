"""Collect a file of pairs in limited time, say of one that hangs or ends its process where it did, and why a pair was
not collected; say what an unknown id may have meant, and whether a keyword may match.
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

from parity.plugin import ending
from parity.plugin.alone import exit_heard, exit_refused
from parity.plugin.options import of
from parity.settings import PRECISION_NAMES
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.case.case import Case


class Module(pytest.Module):
    """A file of pairs, which may have the name of another folder's: ``llama/pairs.py`` beside ``mixtral/pairs.py``.

    pytest gives both the module name ``pairs``, and refuses the second one.
    """

    def _getobj(self) -> Any:
        taken = getattr(sys.modules.get(self.path.stem), "__file__", None)
        if taken is None or Path(taken).resolve() == self.path.resolve() or (self.path.parent / "__init__.py").exists():
            return super()._getobj()
        from parity.case.registry import module_of

        return module_of(self.path.resolve())


@contextmanager
def collected_in_time(module: pytest.Module, seconds: float) -> Iterator[None]:
    """Within the context, a file of pairs is collected, for so many seconds at most; 0 for no limit.

    A file that takes longer is interrupted, also in a worker, and the others are collected: see ``too_late``. One that
    goes on all the same, or whose C code ends the process, ends the run.
    """
    config, diary = module.config, of(module.config).diary
    stacks = diary.stacks if diary else config.stash[ending.STDERR]
    expired = partial(_end_run, module, _too_long(seconds), threading.get_ident())

    def exited() -> None:
        cause = "its C code called exit while it was collected, which ends the process"
        ending.end_process(partial(_end_run, module, cause, threading.get_ident()))

    limit = ending.time_limit(seconds, expired, stacks, ending.interruption(config))
    with limit, exit_heard(exited), exit_refused():  # also in a worker: each that follows would end as well
        yield


def too_late(module: pytest.Module, seconds: float, interrupted: KeyboardInterrupt) -> pytest.CollectReport:
    """Return the report on a file that was interrupted since its time was up."""
    from parity.trace.whose import forget_handler, interrupted_at, way_there

    forget_handler(interrupted)
    return _report(module, f"{_too_long(seconds)}; {interrupted_at(interrupted)}", way_there(interrupted))


def _too_long(seconds: float) -> str:
    return f"{ending.too_long(seconds)} while it was collected"


def _end_run(module: pytest.Module, cause: str, thread: int) -> None:
    """Report the file of pairs with which this process ends, and with it the run: every worker collects every file."""
    report = _report(module, f"{cause}; the run ends with it", ending.stack_of(thread))
    ending.announce(report)
    ending.show_output(module.config)
    module.ihook.pytest_collectreport(report=report)
    if not hasattr(module.config, "workerinput"):
        ending.finish(module.session)


def _report(module: pytest.Module, cause: str, stack: str) -> pytest.CollectReport:
    report = pytest.CollectReport(module.nodeid, "failed", f"{module.nodeid}: {cause}\n{stack.rstrip()}", [])
    note(report, module.config.invocation_params.dir)
    return report


# The message about a pair or a file that pytest could not collect, without a traceback.


def message(report: pytest.CollectReport) -> str:
    """Say what is wrong, beginning with where: a file's line if pytest's text has one, else the id."""
    text = without_traceback(report.longreprtext)
    file = report.nodeid.split("::")[0]
    return text if file in text else f"{_place(file, report.longreprtext) or report.nodeid}: {text}"


def without_traceback(text: str) -> str:
    """Return the error's own lines if pytest shows a traceback, where it marks them with ``E``; else
    the text as it is.
    """
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return "\n".join(marked) or text.strip()


def note(report: pytest.CollectReport, start: Path) -> None:
    """Give a report about a pair, or about a file of pairs, the message that goes into the record.

    Args:
        report: on what could not be collected; from xdist's workers the message travels with it.
        start: the folder that pytest was started in, which a record does not name.
    """
    report.parity_uncollected = message(report).replace(f"{start}/", "")  # type: ignore[attr-defined]


def noted(report: pytest.CollectReport) -> str:
    """Return that message; empty for what is not a pair, or was collected."""
    return str(getattr(report, "parity_uncollected", ""))


def _place(file: str, text: str) -> str:
    """Return the last line of the file in a traceback as pytest shows it; empty if there is none."""
    lines = re.findall(rf"^(?:.*/)?{re.escape(Path(file).name)}:(\d+): in ", text, re.MULTILINE)
    return f"{file}:{lines[-1]}" if lines else ""


# What an id that names no pair or item may have meant: the nearest existing names.


def unknown_pairs(
    arguments: Iterable[str],
    start: Path,
    cases: Iterable[Case],
    misdeclared: Callable[[Path], Mapping[str, UserError]] = lambda file: {},
) -> Iterator[str]:
    """Yield a sentence for each id of a file of pairs that names none of them.

    Args:
        arguments: pytest's: files, folders and ids.
        start: the folder that relative paths are relative to.
        cases: the declared cases.
        misdeclared: what is wrong with a file's declarations, by the pair's name.
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
            yield f"the pair {name!r} of {path} has no item in this run; it is compared at {at}"
        elif name in declared:
            yield f"the pair {name!r} of {path} has no item {item!r}; `pytest {path} --collect-only -q` lists them"
        else:
            yield f"there is no pair {name!r} in {path}; {_advice(path, name, list(declared))}"


# A keyword that is misspelt should not cost the start of workers, each of which would import PyTorch to find nothing.


def may_match(keyword: str, files: Iterable[str]) -> bool:
    """Return whether an item of these files may match, judged by their text alone.

    A pair's name and its sizes usually stand in the text, but a file may also compute them. So where this returns
    False, no item is likely to match; that none does shows in collecting them.

    Args:
        keyword: an expression, as of pytest's ``-k``.
        files: files of pairs, or pytest ids of theirs.
    """
    words = [word for word in re.findall(r"[^\s()]+", keyword.lower()) if word not in ("and", "or")]
    if "not" in words or not words:
        return True
    places = [Path(file.partition("::")[0]) for file in files]
    texts = [place.read_text(encoding="utf-8", errors="replace") for place in places]
    known = "\n".join([*PRECISION_NAMES, *map(str, places), *texts]).lower()
    return any(word in known or re.search(r"\d", word) for word in words)


def _advice(path: str, name: str, declared: list[str]) -> str:
    close = difflib.get_close_matches(name, declared, n=3)
    ids = " or ".join(f"{path}::{other}" for other in close)
    return f"did you mean {ids}?" if close else f"it declares {', '.join(declared)}"
