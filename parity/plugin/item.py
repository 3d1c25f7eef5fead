"""The pytest item: one case at one precision and size, over all seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.plugin.options import Options

if TYPE_CHECKING:
    from parity.attention_backend import AttentionBackend
    from parity.case import Case
    from parity.precision import Precision
    from parity.result import Result
    from parity.te import Kernels
    from parity.validate import CheckedSize


class ParityError(Exception):
    """An item has a result that did not pass; the text says all that there is to say."""


class ParityItem(pytest.Item):
    """Compares a case at one precision and size, seed after seed.

    Attributes:
        results: one for each seed that was compared so far; a single one if the precision is not available.
    """

    def __init__(
        self,
        *,
        case: Case,
        checked: CheckedSize,
        precision: Precision,
        attention: AttentionBackend | None,
        kernels: Kernels,
        options: Options,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.case, self.checked, self.precision, self.attention = case, checked, precision, attention
        self.kernels, self.options = kernels, options
        self.results: list[Result] = []
        for mark in ("parity", precision.name, *case.marks):
            self.config.addinivalue_line("markers", f"{mark}: items of parity")
            self.add_marker(mark)

    def runtest(self) -> None:
        from parity.calibration import table
        from parity.comparison import compare_at
        from parity.report import failure
        from parity.report.items import Item

        self.results.clear()
        calibration = table.load(self.options.calibration) if self.options.calibration else table.packaged()
        for seed in self.options.seeds:
            result = compare_at(
                self.case,
                self.checked,
                self.precision,
                seed,
                self.kernels,
                calibration,
                self.attention,
                self.options.determinism,
            )
            self.results.append(dataclasses.replace(result, path=self._path_to_show()))
            if result.status == "skipped":
                pytest.skip(result.reason)
        item = Item(tuple(self.results))
        if item.bad:
            raise ParityError(failure.message(item))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone for a failed comparison; a traceback only for what parity itself did not expect."""
        if isinstance(excinfo.value, ParityError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.case.line - 1, self.name

    def _path_to_show(self) -> str:
        """The file as one writes it from where pytest was started; a report shows no folder above that."""
        try:
            return self.path.relative_to(self.config.invocation_params.dir).as_posix()
        except ValueError:
            return self.nodeid.split("::")[0]


class BrokenCase(pytest.Collector):
    """Stands for a case that cannot be compared, so that pytest reports it by its name beside the others."""

    def __init__(self, *, error: Exception, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._error = error

    def collect(self) -> Iterator[ParityItem]:
        raise self._error
