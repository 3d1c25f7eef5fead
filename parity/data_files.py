"""Read JSON and TOML files that may be damaged: what is wrong is reported in one sentence, with its line or key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from parity.settings import tomllib
from parity.user_error import UserError

# One JSON text, and what can be wrong with it.
#
# Python's own reader raises several kinds of exceptions, and it accepts numbers of any size and halves of surrogate
# pairs, which cannot be written to a file again.


Content = TypeVar("Content")

_MOST_DIGITS = 400  # a float has 309 at most
_LONGEST = 200


class NotReadableError(ValueError):
    """Raised for a text or a value that is not what it should be; its message says why, in one line."""


def parsed(data: bytes, model: Callable[[Any], Content]) -> Content:
    """Return the content of a JSON text.

    Args:
        data: the text.
        model: turns JSON's plain values into the content, for example a ``TypeAdapter``'s ``validate_python``; it may
            raise what such code usually raises for values of another shape.

    Raises:
        NotReadableError: if it is not JSON, or the model rejects it.
    """
    try:
        value = json.loads(data.decode(), parse_int=_parse_integer)
    except UnicodeDecodeError:
        raise NotReadableError("not JSON: it is not text in UTF-8") from None
    except RecursionError:
        raise NotReadableError("not JSON: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
        raise NotReadableError(f"not JSON: {at}column {error.colno}: {error.msg}") from None
    except ValueError as error:
        raise NotReadableError(f"not JSON: {error}") from None
    try:
        return model(value)
    except RecursionError:
        raise NotReadableError("it is nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise NotReadableError(why(error)) from None


def why(error: Exception) -> str:
    """Return one line that says what is wrong with a value; for pydantic's errors, the first one and its location."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors(include_url=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    elif isinstance(error, KeyError):
        text = f"it lacks {error.args[0]!r}"
    elif isinstance(error, NotReadableError):
        text = str(error)
    else:
        text = f"its JSON does not have the expected structure ({error})"
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _parse_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise NotReadableError(f"a number has {len(digits):,} digits")
    return int(digits)


def bytes_of(path: Path, what: str) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file's path.
        what: what the file should be, for the message, such as "the calibration table"; may be empty.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a path with NUL, or with something UTF-8 lacks
        why_not = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {f'{what} ' if what else ''}{path}: {why_not}") from None


def read_toml(path: Path, kind: type[Content]) -> Content:
    """Return the content of a TOML file.

    Args:
        path: the file's path.
        kind: what its content is, such as a dataclass; pydantic turns TOML's plain values into it.

    Raises:
        UserError: if it cannot be read, is not TOML, or is not of that kind; names the file, and the line or each key.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(tomllib.loads(bytes_of(path, "").decode()))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise UserError(f"{path}: {'; '.join(wrong)}") from None
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {error}") from None


# Files of JSON lines. Each line is read by itself, so that a bad one does not affect the others.


@dataclass(frozen=True)
class LeftOut:
    """A line that could not be read.

    Attributes:
        number: the line's number, from 1.
        reason: why it could not be read.
    """

    number: int
    reason: str


@dataclass(frozen=True)
class Lines(Generic[Content]):
    """Hold the lines of a file of JSON lines, and why some of them could not be read.

    Attributes:
        path: the file's path.
        good: the number and content of each line that could be read.
        left_out: the other lines.
        raw: the bytes of each line, without line ends.
    """

    path: Path
    good: tuple[tuple[int, Content], ...]
    left_out: tuple[LeftOut, ...]
    raw: tuple[bytes, ...] = ()

    @property
    def contents(self) -> tuple[Content, ...]:
        return tuple(content for _, content in self.good)


def lines(path: Path, model: Callable[[Any], Content], what: str = "") -> Lines[Content]:
    """Return the contents of a file's lines; damaged lines are left out, with the reason.

    Args:
        path: the file's path.
        model: makes one line's content, see ``parsed``.
        what: see ``bytes_of``.

    Raises:
        UserError: if the file cannot be read.
    """
    data = bytes_of(path, what)
    raw = tuple(data.removesuffix(b"\n").split(b"\n")) if data else ()
    good: list[tuple[int, Content]] = []
    left_out: list[LeftOut] = []
    for number, line in enumerate(raw, 1):
        try:
            good.append((number, parsed(line, model)))
        except NotReadableError as error:
            left_out.append(LeftOut(number, str(error)))
    return Lines(path, tuple(good), tuple(left_out), raw)


_SHOWN = 3


def warnings_for(path: Path, left_out: tuple[LeftOut, ...]) -> list[str]:
    """Return a sentence about each of the first lines that were left out."""
    return [f"{path}:{each.number}: {each.reason}" for each in left_out[:_SHOWN]]
