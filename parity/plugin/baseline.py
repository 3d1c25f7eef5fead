"""Keep a run's record as a baseline, and tell at the end of a run what has changed since one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from parity.machine import files
from parity.plugin.options import Options
from parity.user_error import UserError


@dataclass(frozen=True)
class Told:
    """What has changed.

    Attributes:
        lines: for the terminal.
        code: pytest's exit code if the run itself ends well.
    """

    lines: tuple[str, ...]
    code: pytest.ExitCode


def keep(options: Options, record: Path, complete: bool) -> str:
    """Keep the record under the name that the run was given; return a sentence about it."""
    from parity.report import baselines

    if not complete:
        return f"no baseline {options.save_as} was made, since not everything was compared"
    target, replaced = baselines.keep(record, options.save_as, options.start)
    return f"baseline: {target}{', in place of the one before' if replaced else ''}"


def compare(options: Options, record: Path) -> Told:
    """Draw what has changed since the baseline that the run was given."""
    from parity.report import baselines, changes
    from parity.report.record import read

    try:
        older = baselines.find(options.against, options.start, "--parity-against")
        runs = changes.Comparison(read(older), read(record), (options.against, options.name))
    except (UserError, OSError) as error:  # it was readable when the run began
        return Told((f"nothing was compared with {options.against}: {error}",), pytest.ExitCode.USAGE_ERROR)
    target = record.with_name(f"{record.stem}_against_{older.stem}.md")
    lines = [f"against {options.against}: {line}" for line in changes.lines(runs)]
    try:
        files.replace(target, changes.draw(runs))
        lines.append(f"report: {target}")
    except OSError as error:
        lines.append(f"could not write: {error}")
    if not runs.shares_items:
        return Told(tuple(lines), pytest.ExitCode.USAGE_ERROR)
    return Told(tuple(lines), pytest.ExitCode.TESTS_FAILED if runs.is_worse else pytest.ExitCode.OK)
