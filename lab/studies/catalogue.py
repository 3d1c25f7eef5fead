"""List, load and run the studies, and parse the options of the command line."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.user_error import UserError

STUDIES = {
    "expected_error": "Which error is normal: by TE module and precision, over width, length and depth.",
    "filters": "Whether any linear filter could detect the wrong ports that pass: signal to noise ratios.",
    "flops": "FLOPs of a layer by component, and the formulas next to PyTorch's counter on every case.",
    "flash_stability": "How far flash attention deviates from baseline attention, and which rounding does it.",
    "fp8_accumulation": "What the short sums of a Hopper's FP8 tensor cores cost, over the length of the sum.",
    "fp8_recipes": "FP8 recipes side by side: by distribution and module, and when a tensor's magnitude jumps.",
    "names": "Which mistakes in a fixed table of wrong ports are named: constants, local mistakes, and kinds.",
    "query_key_scale": "Where to scale queries and keys: overflow and error by magnitude, head width and dtype.",
    "ranks": "Which mistakes over ranks are detected and named, and whether right ports pass.",
    "softmax_precision": "Softmax in FP16, BF16 and FP32: error, overflow, gradient and cost by the size of scores.",
    "trainings": "Which mistakes of trainings are detected and named, and whether right trainings pass.",
    "training_curves": "Whether TE models train like the plain models, recipe by recipe.",
    "training_drift": "How far flash attention, low precision and TE move the weights that training ends with.",
}

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
    return importlib.import_module(f"lab.studies.{name}")


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
    report = study if hasattr(study, "write") else importlib.import_module(f"{study.__name__}_report")
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
