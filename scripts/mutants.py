"""Remove each title of the findings in turn, and report the titles whose loss no test notices.

    python scripts/mutants.py [TITLE ...]

If mistakes of the catalogue have the title, they are hidden from the search and the judge. Otherwise, as for
``no-gradient``, the findings with this title are removed from the results. Then the tests that mention the title, in a
row of a table or in their own lines, run until the first one fails. The exit code is 1 if no test fails for some title.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import parity
import parity.judge
import parity.search
from parity import comparison
from parity.mistakes.codes import CODES
from parity.result import Result
from parity.search import precision_mistakes

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    file
    for folder in ("diagnosis", "comparison", "ranks")
    for file in sorted((ROOT / "tests" / folder).glob("test_*.py"))
]
ELSEWHERE = {
    "not-finite": "tests/comparison/test_bad_values.py",
    "golden-not-finite": "tests/comparison/test_bad_values.py",
    "precision-overflows": "tests/comparison/test_bad_values.py",
    "weights-not-as-mapped": "tests/comparison/test_held_weights.py",
    "number": "tests/judge/test_judge.py",
    "state-between-calls": "tests/trace/test_effects.py",
    "recomputed-otherwise": "tests/te/test_te_weights.py",
}
"""Titles that are tested in other folders, and the file that tests each."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("titles", nargs="*", metavar="TITLE", help="a title of a finding; each of them by default")
    titles = parser.parse_args().titles or list(CODES)
    if unknown := sorted(set(titles) - set(CODES)):
        parser.error(f"no such title: {', '.join(unknown)}")
    unmissed = [title for title in titles if not _is_missed(title)]
    print(f"{len(titles) - len(unmissed)} of {len(titles)} titles are missed by a test")
    if unmissed:
        print(f"no test misses {', '.join(unmissed)}")
    return 1 if unmissed else 0


def _is_missed(title: str) -> bool:
    """Return whether a test that mentions the title fails without it, and print which one."""
    run = Run(title)
    files = [ROOT / ELSEWHERE[title]] if title in ELSEWHERE else [file for file in TESTS if _names(file, title)]
    with pytest.MonkeyPatch.context() as patch:
        (_forget_mistakes if _is_of_mistakes(title) else _forget_findings)(patch, title)
        if files:
            options = ["-q", "-x", "-n", "0", "--tb=no", "--no-header", "--no-summary", "--rootdir", str(ROOT)]
            pytest.main(["--full", *options, *map(str, files)], plugins=[run])
    what = f"missed by {run.failed}" if run.failed else f"missed by none of the {run.chosen} tests that mention it"
    print(f"{title}: {what}", flush=True)
    return bool(run.failed)


class Run:
    """A pytest plugin that runs only the tests that mention a title, counts them, and keeps the first that fails."""

    def __init__(self, title: str) -> None:
        self.title, self.chosen, self.failed = title, 0, ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if _mentions(item, self.title)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:], self.chosen = chosen, len(chosen)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _mentions(item: pytest.Item, title: str) -> bool:
    """Return whether a test mentions the title in its row, in its lines, or in a function of its file that it calls."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    for value in values:
        named = getattr(value, "titles", value)  # the titles of a study's row, or a title by itself
        if named == title or (isinstance(named, (set, frozenset, tuple, list)) and title in named):
            return True
    page = item.module  # type: ignore[attr-defined]
    body = _body(item.function)  # type: ignore[attr-defined]
    called = (one for name, one in inspect.getmembers(page, inspect.isfunction) if re.search(rf"\b{name}\(", body))
    return any(f'"{title}"' in lines or CODES[title] in lines for lines in (body, *map(_body, called)))


def _body(function: Callable[..., Any]) -> str:
    """Return a function's lines without its decorators, whose tables also have the rows of other tests."""
    source = inspect.getsource(function)
    return source[source.index("\ndef ") + 1 :] if "\ndef " in source else source


def _is_of_mistakes(title: str) -> bool:
    """Return whether a mistake of the catalogue or of a precision may have the title."""
    # The search gets no list of the mistakes with a cache: ``parity.search.borders`` makes them one after the other.
    apart = {"codes.py", "decoding.py"}
    pages = [page for page in (ROOT / "parity" / "mistakes").glob("*.py") if page.name not in apart]
    made = re.compile(rf'(?<!{{)"{title}",')  # a function of PyTorch in a set may have a title's name
    found = re.compile(r'(?:finding|repairable)\(\s*"')  # a finding that does not come from a mistake
    texts = (page.read_text() for page in (*pages, Path(precision_mistakes.__file__)))
    return any(made.search(found.sub("", text)) for text in texts)


def _names(file: Path, title: str) -> bool:
    """Return whether a file contains the title or its code, or imports rows from a folder of the lab that does."""
    text = file.read_text(encoding="utf-8")
    for folder in set(re.findall(r"^from lab\.(corpus|studies\.\w+)", text, re.MULTILINE)):
        pages = (ROOT / "lab" / folder.replace(".", "/")).rglob("*.py")
        text += "".join(page.read_text(encoding="utf-8") for page in pages)
    return f'"{title}"' in text or CODES[title] in text


def _forget_mistakes(patch: pytest.MonkeyPatch, title: str) -> None:
    """Remove the mistakes with this title from all lists of mistakes that modules of the search or the judge read."""
    for module in _modules(parity.search, parity.judge):
        for name, made in vars(module).copy().items():
            if inspect.isfunction(made) and ("hypotheses" in name or name == "readings_of_weights"):
                patch.setattr(module, name, _without(title, made))
    patch.setattr(precision_mistakes, "_mistakes", _without(title, precision_mistakes._mistakes))


def _without(title: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same list as another one, without the entries that have the title."""

    @functools.wraps(made)
    def others(*args: Any, **kwargs: Any) -> Any:
        all_of_them = made(*args, **kwargs)
        left = (one for one in all_of_them if one.title != title)
        return left if isinstance(all_of_them, Iterator) else type(all_of_them)(left)

    return others


def _forget_findings(patch: pytest.MonkeyPatch, title: str) -> None:
    """Remove the findings with this title, and notes that name it, from all results."""
    explained, compared = comparison.explain_at, parity.compare

    def left(result: Result) -> Result:
        findings = tuple(one for one in result.findings if one.title != title)
        return replace(result, findings=findings, notes=tuple(note for note in result.notes if title not in note))

    def others(*args: Any, **kwargs: Any) -> Result:
        return left(explained(*args, **kwargs))

    patch.setattr(comparison, "explain_at", others)
    patch.setattr(parity, "compare", lambda *args, **kwargs: [left(one) for one in compared(*args, **kwargs)])


def _modules(*packages: ModuleType) -> Iterator[ModuleType]:
    for package in packages:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


if __name__ == "__main__":
    sys.exit(main())
