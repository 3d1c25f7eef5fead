"""What ``@parity.pair`` accepts: each function returns an argument as ``Case`` holds it, or says why it cannot."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity.case import Case, Pair, Size
from parity.te_state.attention_backend import BACKENDS, AttentionBackend
from parity.user_error import UserError

MARKS_BELONG = 'marks of pytest have no effect around a pair; name them in its declaration: marks=["slow"]'
_VALID_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def checked_name(name: object) -> str:
    """A case's name, of letters, digits, ``_``, ``-`` and ``.``."""
    if not isinstance(name, str) or not _VALID_NAME.fullmatch(name):
        raise UserError("a name consists of letters, digits, '_', '-' and '.'")
    return name


def checked_factory(factory: Any) -> Callable[..., Pair]:
    """A function whose first parameter is ``te``."""
    if isinstance(factory, Case):
        raise UserError(
            f"@pair decorates a function, not the pair {factory.name!r}; declare two pairs by calling "
            "parity.pair(...)(function) for each"
        )
    if not callable(factory):
        raise UserError(f"@pair decorates a function, not {factory!r}")
    if getattr(factory, "pytestmark", ()):
        raise UserError(MARKS_BELONG)
    _parameters_after_te(factory)
    return factory


def checked_switch(argument: str, value: object) -> bool:
    """True or False; a text such as ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise UserError(f"{argument} must be True or False, not {value!r}")
    return value


def checked_sizes(sizes: object, factory: Callable[..., Pair]) -> tuple[Size, ...]:
    """The sizes, each of which ``factory(te, **size)`` accepts."""
    if isinstance(sizes, (str, Mapping)) or not isinstance(sizes, Iterable):
        raise UserError(f"sizes is a list of dicts, one for each size, not {sizes!r}")
    chosen = tuple(sizes)
    if not chosen:
        raise UserError("sizes is empty; leave it out for a factory that needs none")
    parameters = _parameters_after_te(factory)
    for i, size in enumerate(chosen):
        if not isinstance(size, Mapping) or not all(isinstance(key, str) for key in size):
            raise UserError(f"size {size!r} is no dict with names as keys")
        if any(are_same(size, other) for other in chosen[:i]):
            raise UserError(f"size {dict(size)!r} is there twice")
        _check_accepts(parameters, size)
    return tuple(dict(size) for size in chosen)


def checked_precisions(precisions: object) -> tuple[str, ...] | None:
    """Names that ``parity.precision`` knows; None stays None."""
    if precisions is None:
        return None
    from parity.precision import PRECISIONS

    chosen = _strings("precisions", precisions)
    if not chosen:
        raise UserError("precisions is empty; leave it out for each that the run asks for")
    for name in chosen:
        if name not in PRECISIONS:
            close = difflib.get_close_matches(name, PRECISIONS, n=1)
            advice = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"there is no precision {name!r}, only {', '.join(PRECISIONS)}{advice}")
    return chosen


def checked_attention(backends: object) -> tuple[AttentionBackend, ...]:
    """Names of attention backends."""
    chosen = _strings("attention", backends)
    unknown = [name for name in chosen if name not in BACKENDS]
    if unknown:
        raise UserError(f"there is no attention backend {unknown[0]!r}, only {', '.join(BACKENDS)}")
    return tuple(backend for backend in BACKENDS if backend in chosen)


def checked_marks(marks: object) -> tuple[str, ...]:
    """Names of pytest marks."""
    chosen = _strings("marks", marks)
    for mark in chosen:
        if not mark.isidentifier():
            raise UserError(f"mark {mark!r} is no valid name of a pytest mark")
    return chosen


def are_same(entry: object, other: object) -> bool:
    """Whether two sizes, or entries of theirs, are equal; tensors and arrays count as different."""
    try:
        return bool(entry == other)
    except (RuntimeError, ValueError):  # they compare element by element
        return False


def _strings(argument: str, values: object) -> tuple[str, ...]:
    listed = None if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if listed is None or not all(isinstance(value, str) for value in listed):
        raise UserError(f"{argument} is a list of names, not {values!r}")
    return listed


def _parameters_after_te(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # of functions that are not written in Python
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].name != "te" or parameters[0].kind not in positional:
        raise UserError("the factory's first parameter must be te, which is transformer_engine.pytorch")
    return parameters[1:]


def _check_accepts(parameters: list[inspect.Parameter], size: Size) -> None:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    missing = [name for name in required if name not in size]
    if missing:
        raise UserError(f"size {dict(size)!r} lacks {', '.join(missing)}, which the factory requires")
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [p.name for p in parameters if p.kind in by_keyword]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [key for key in size if key == "te" or (key not in accepted and not takes_any)]
    if unknown:
        raise UserError(
            f"size {dict(size)!r} has {', '.join(unknown)}, which the factory does not take; "
            "add a parameter, or **_ for what only inputs needs"
        )
