"""Compare the pair of a text as an item is compared, and say whether it fails in the same way."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from parity.api import compare
from parity.case import registry
from parity.case.case import Case, Size
from parity.case.items import Item
from parity.passes.prepare import forget
from parity.progress import Following
from parity.result import Result
from parity.te import Kernels
from parity.user_error import UserError

_CLEAR = 2.0  # times a limit: a failure nearer to it may pass on other kernels


@dataclass
class Trials:
    """Try texts of smaller cases.

    Attributes:
        item: what fails.
        seed: the seed of weights and inputs.
        kernels: TE's kernels.
        folder: an empty one, for the files that the texts are written to.
        following: shows how many texts were tried, and the size of the smallest.
        size: arguments of the pair's factory; None for the first ones that a text declares.
        was: the result of the whole case.
        now: the result of the last text that failed in the same way.
        count: how many texts were compared.
        must_declare: whether only texts that declare ``size`` are tried.
        broken: whether a text broke the CUDA context of this process, so that no other can be compared.
    """

    item: Item
    seed: int
    kernels: Kernels
    folder: Path
    following: Following
    size: Size | None
    was: Result = field(init=False)
    now: Result = field(init=False)
    count: int = 0
    must_declare: bool = False
    broken: bool = False
    _seen: set[str] = field(default_factory=set)

    def compare(self, case: Case, diagnose: bool) -> Result:
        """Compare a case as the item is compared, and search for the cause of a failure if that is wanted.

        Raises:
            UserError: as ``parity.compare``.
        """
        item = self.item
        (result,) = compare(
            replace(case, sizes=case.sizes[:1] if self.size is None else (self.size,)),
            [item.precision],
            [self.seed],
            self.kernels.backend,
            attention=item.attention or "auto",
            diagnose=diagnose,
            steps=case.steps if item.steps else 0,
            switch=item.switch,
            ranks=item.ranks,  # type: ignore[arg-type]
        )
        return result

    def fails(self, text: str) -> bool:
        """Return whether the pair of a text fails as the whole case does; False if it was tried before."""
        if text in self._seen or self.broken:
            return False
        self._seen.add(text)
        self.count += 1
        try:
            with self.declared(text) as case:
                if self.must_declare and self.size not in (*case.sizes, *case.large_sizes):
                    return False
                result = self.compare(case, diagnose=False)
                if result.tensors and result.tensors == self.now.tensors:
                    result = replace(result, findings=self.now.findings)  # the same bits have the same cause
                elif may_be_same(self.was, result):
                    result = self.compare(case, diagnose=True)
        except UserError:
            return False
        finally:
            forget()
        self.broken = result.device_error == "broken"
        if self.broken or not is_same(self.was, result):
            return False
        self.now = result
        self.following.step(doing=f"minimizing, now {len(text.splitlines())} lines at {result.size_label}")
        return True

    @contextmanager
    def declared(self, text: str) -> Iterator[Case]:
        """Declare the pairs of a text within the context, and no others, and return the item's case.

        Raises:
            UserError: if it cannot be imported or does not declare it.
        """
        path = self.folder / str(self.count) / self.item.case.path.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        before = registry.cases()
        registry.restore([])
        try:
            yield registry.load_case(path, self.item.case.name)
        finally:
            registry.restore(before)
            sys.modules.pop(str(path), None)


def may_be_same(was: Result, now: Result) -> bool:
    """Return whether a result is of the same failure, as far as it is known without a search for the cause.

    The same kinds of tensors fail, clearly, and none that was right. An error is the same with the same words.
    """
    if now.status != was.status or _without_numbers(now.reason) != _without_numbers(was.reason):
        return False
    if now.status != "failed" or was.within_limits:
        return now.within_limits == was.within_limits
    before, after = ({one.key for one in result.tensors if not one.passed} for result in (was, now))
    were_right = {one.key for one in was.tensors} - before
    in_outputs = [any(kind == "output" for kind, _ in wrong) for wrong in (before, after)]
    return not after & were_right and in_outputs[0] == in_outputs[1] and now.margin >= min(_CLEAR, was.margin)


def is_same(was: Result, now: Result) -> bool:
    """Return whether two results are of the same failure: as before, with the same cause or, without one, place."""
    return may_be_same(was, now) and _find_cause(was) == _find_cause(now)


def _find_cause(result: Result) -> list[str]:
    """Return the first finding's title, and without a cause the words for the place at which the candidate departs."""
    places = [one.message.partition(":")[0] for one in result.findings if one.title == "first-divergence"]
    titles = [one.title for one in result.findings[:1]]
    return [*titles, *map(_without_numbers, places if titles == ["unexplained"] else [])]


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)
