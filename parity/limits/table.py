"""Laws by precision, kind of tensor and statistic, as a JSON file with its provenance."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from parity.limits.law import Law
from parity.user_error import UserError

PACKAGED = Path(__file__).with_name("packaged.json")
_FORMAT = 1
# A limit as large passes zeros in the place of any tensor: not even FP32's own rounding is a smaller part of it.
_PASSES_ALL = 2.0**24

Key = tuple[str, str, str]
"""Precision, kind of tensor, statistic."""


@dataclass(frozen=True, eq=False)
class Table:
    """What ``parity calibrate`` has measured.

    Attributes:
        laws: by precision, kind of tensor and statistic.
        provenance: versions, device, cases, sizes and seeds.
    """

    laws: Mapping[Key, Law]
    provenance: Mapping[str, Any]

    def limit(self, precision: str, kind: str, statistic: str) -> float:
        """The largest value that passes.

        Raises:
            UserError: if the table has no law for it.
        """
        law = self.laws.get((precision, kind, statistic))
        if law is None:
            raise UserError(
                f"the calibration table has no law for {statistic!r} of the kind {kind!r} in {precision}; "
                f"make one with: parity calibrate --precision {precision}"
            )
        return _limit(law, statistic)


@lru_cache(maxsize=1024)
def _limit(law: Law, statistic: str) -> float:
    return law.limit(statistic)


def save(table: Table, file: Path) -> None:
    """Write the table, sorted, one law a line, so that two tables can be compared by eye."""
    laws = [
        json.dumps({"precision": key[0], "kind": key[1], "statistic": key[2], **_rounded(dataclasses.asdict(law))})
        for key, law in sorted(table.laws.items())
    ]
    provenance = json.dumps(dict(table.provenance), indent=2).replace("\n", "\n  ")
    text = f'{{\n  "format": {_FORMAT},\n  "provenance": {provenance},\n  "laws": [\n    '
    file.write_text(text + ",\n    ".join(laws) + "\n  ]\n}\n", encoding="utf-8")


@lru_cache(maxsize=4)
def load(file: Path) -> Table:
    """Read a table.

    Raises:
        UserError: if there is none in the file, it cannot be read, or one of its laws gives no limit.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise UserError(f"{file} has format {record['format']}; make a new table with: parity calibrate")
        laws = {(law.pop("precision"), law.pop("kind"), law.pop("statistic")): Law(**law) for law in record["laws"]}
        loaded = Table(laws, record["provenance"])
    except FileNotFoundError:
        raise UserError(f"there is no calibration table {file}; make one with: parity calibrate --out {file}") from None
    except OSError as error:
        raise UserError(f"cannot read the calibration table {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no calibration table: {_wrong(error)}; make one with: parity calibrate") from None
    for key, law in laws.items():
        why = why_no_limit(key, law)
        if why:
            raise UserError(f"{file} has a law that gives no limit: {why}; make another table with: parity calibrate")
    return loaded


def why_no_limit(key: Key, law: Law) -> str:
    """Say why nothing can be judged by a law; empty if something can."""
    what = f"{key[2]!r} of the kind {key[1]!r} in {key[0]}"
    for field in dataclasses.fields(law):
        value = getattr(law, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{what} has the {field.name} {value!r}, which is no number"
        if value < 0 and field.name != "center":
            return f"{what} has the {field.name} {value:g}, which is below 0"
    if law.tensors != int(law.tensors) or law.tensors < 2:
        return f"{what} was measured on {law.tensors:g} tensors, of which none can be told"
    limit = law.limit(key[2])
    if not 0 < limit < _PASSES_ALL:
        return f"{what} would be {limit:.2g}, where {'nothing passes' if limit <= 0 else 'everything would pass'}"
    return ""


def _wrong(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} is not JSON"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]!r}"
    return "its JSON is laid out otherwise"


def packaged() -> Table:
    """The table that comes with parity."""
    return load(PACKAGED)


def _rounded(law: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in law.items()}
