"""What a card says, as data. Its schema is ``docs/card.schema.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from parity import data_files
from parity.user_error import UserError

FORMAT: Literal["te-parity/card/1"] = "te-parity/card/1"


class _Part(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True, extra="forbid")


class Comparison(_Part):
    """A pair at one size and precision, at all seeds."""

    way: str
    """``one pass``, or how it was trained, such as ``3 steps`` or ``3 steps, resume``."""
    size: dict[str, Any]
    precision: str
    seeds: list[int]
    status: Literal["passed", "failed", "skipped", "error"]
    """The worst over all seeds."""
    reason: str = ""
    """Why it was skipped or could not run."""
    margin: float | None
    """The largest error over its limit, up to 1 passes; null if nothing was compared or something is not finite."""
    worst: str
    """The tensor with this margin."""
    findings: list[str] = []
    """Codes and titles of the causes of a failure."""
    attention: str = ""
    """The attention backends that TE ran."""
    formats: list[list[str]] = []
    """The formats in which TE's modules computed: modules, forward, input's gradient, weight's gradient."""
    notes: list[str] = []
    """What the comparison leaves unproven."""

    @property
    def size_in_words(self) -> str:
        """The size, such as ``batch=2, hidden=64``."""
        return ", ".join(f"{name}={value}" for name, value in self.size.items())


class Coverage(_Part):
    """The known mistakes that a comparison at the first size and seed would have passed."""

    precision: str
    tried: int
    """How many known mistakes were tried."""
    passed: list[str]
    """Those that would have passed, by title and name."""
    accepted: list[str] = []
    """Those of them whose titles the pair accepts."""
    reason: str = ""
    """Why nothing could be tried."""


class Card(_Part):
    """What was compared, and with what outcome."""

    format: Literal["te-parity/card/1"]
    pair: str
    """The pair's id, with its file relative to the card's folder."""
    model: str
    """The reference's class, and the number of its parameters at the first size."""
    commit: str
    """The commit of the pair's file; empty if it is in no repository."""
    code: dict[str, str]
    """Checksums of the user's files that were imported, by path."""
    weights: str
    """SHA-256 of the reference's weights at the first size and seed."""
    environment: dict[str, str]
    """Kernels, device and versions."""
    comparisons: list[Comparison]
    coverage: list[Coverage]
    left_out: list[str] = []
    """What the pair declares and the card does not compare."""

    @property
    def passed(self) -> bool:
        """Return whether something passed, and nothing failed or could not be compared."""
        statuses = {one.status for one in self.comparisons}
        return "passed" in statuses and not statuses & {"failed", "error"}


def write_card(card: Card) -> str:
    """Return the card as YAML."""
    return yaml.safe_dump(
        card.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True, width=120
    )


def read_card(file: Path) -> Card:
    """Return the card that a file holds.

    Raises:
        UserError: if the file cannot be read or holds no card.
    """
    try:
        return Card.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read the card {file}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{file} is not a card that parity card wrote: {data_files.why(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not a card: not YAML: {' '.join(str(error).split())}") from None
