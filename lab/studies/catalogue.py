"""List, load and run the studies, and parse the options of the command line."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.user_error import UserError

_FOLDER = Path(__file__).parent


def _read_topic(folder: Path) -> str:
    """Return the docstring of a study's package without importing it."""
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""


STUDIES = {study.parent.name: _read_topic(study.parent) for study in sorted(_FOLDER.glob("*/study.py"))}
"""Each folder with a study, and its topic."""

_ANSWERS = ("yes", "no")


def load(name: str) -> ModuleType:
    """Return a study's module.

    Raises:
        UserError: if there is no such study, or a library that studies need is missing.
    """
    if name not in STUDIES:
        raise UserError(f"there is no study {name!r}; there are {', '.join(STUDIES)}")
    for library in ("matplotlib", "scipy"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f"studies need {library}: pip install 'te-parity[studies]'")
    return importlib.import_module(f"lab.studies.{name}.study")


def run(name: str, settings: Any, folder: Path) -> Path:
    """Measure what is missing from a study's record, then write its report and plots into the folder.

    Args:
        name: a name in ``STUDIES``.
        settings: the study's ``Settings``.
        folder: an existing folder.

    Returns:
        The report's path.

    Raises:
        UserError: if there is no such study, a library is missing, or the settings contradict each other.
    """
    study = load(name)
    measured = study.measured(settings, folder)
    report = study if hasattr(study, "write") else importlib.import_module(f"lab.studies.{name}.report")
    path: Path = report.write(*measured, folder)
    return path


def with_options(settings: Any, options: Sequence[str]) -> Any:
    """Return settings changed by options such as ``steps=20`` or ``models=gpt,llama``.

    A value is parsed as the type of its default. It must be positive if the default is (sizes and counts), and may be
    negative only if the default is negative or contains a negative number.

    Args:
        settings: a dataclass instance whose fields are numbers, strings, tuples of either, or yes and no.
        options: ``field=value``; a tuple's elements are separated by commas, and duplicates are dropped.

    Raises:
        UserError: if a field does not exist, or a value has the wrong type or range.
    """
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    chosen: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if name not in fields or not equals:
            known = ", ".join(f"{field}={_written(value)}" for field, value in fields.items())
            raise UserError(f"{option!r} is not an option of this study; its options, with their defaults, are {known}")
        try:
            chosen[name] = _parsed(text, fields[name])
        except ValueError:
            default = _written(fields[name])
            raise UserError(f"{option!r}: {text!r} is not a valid value (the default is {default!r})") from None
        _check_range(option, chosen[name], fields[name])
    return dataclasses.replace(settings, **chosen)


def _parsed(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return _ANSWERS.index(text) == 0
    if isinstance(default, tuple):
        return tuple(dict.fromkeys(type(default[0])(element) for element in text.split(",")))
    return type(default)(text)


def _check_range(option: str, value: Any, default: Any) -> None:
    values, defaults = (x if isinstance(x, tuple) else (x,) for x in (value, default))
    if isinstance(defaults[0], str | bool):
        return
    if not all(math.isfinite(each) for each in values):
        raise UserError(f"{option!r}: the value must be finite")
    if min(defaults) > 0 >= min(values):
        raise UserError(f"{option!r}: the value must be greater than 0")
    if min(defaults) == 0 > min(values):
        raise UserError(f"{option!r}: the value must not be negative")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return _ANSWERS[0] if value else _ANSWERS[1]
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
