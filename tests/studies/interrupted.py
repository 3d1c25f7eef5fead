"""Interrupt a study, and run it again."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import pytest

Made = TypeVar("Made")


def run_again(
    monkeypatch: pytest.MonkeyPatch, study: ModuleType, measure: str, run: Callable[[], Made], after: int = 1
) -> tuple[list[Any], Made]:
    """Interrupt a study after ``after`` calls of its function ``measure``, and run it again.

    Return the measurements of both runs, and the result of the second.
    """
    faithful, interruptions = getattr(study, measure), iter([KeyboardInterrupt])
    measured: list[Any] = []

    def counted(one: Any, *rest: Any) -> Any:
        if len(measured) == after and (interruption := next(interruptions, None)):
            raise interruption
        measured.append(one)
        return faithful(one, *rest)

    monkeypatch.setattr(study, measure, counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    return measured, run()
