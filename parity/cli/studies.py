"""Runs numerical studies from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from parity.studies import catalogue
from parity.user_error import UserError

FOLDER = Path("reports/studies")


def run(names: Sequence[str], quick: bool, options: Sequence[str], folder: Path | None) -> None:
    """Run studies one after the other, each with its report.

    Args:
        names: of ``catalogue.STUDIES``; none prints what there is.
        quick: use small settings; the reports then go to ``reports/studies/quick`` by default.
        options: ``field=value`` of a study's settings.
        folder: of reports and records.

    Raises:
        UserError: for an unknown study or option, and for options of several studies at once.
    """
    if not names:
        width = max(map(len, catalogue.STUDIES))
        print("\n".join(f"{name:<{width}}  {what}" for name, what in catalogue.STUDIES.items()))
        return
    if options and len(names) > 1:
        raise UserError("--set is an option of one study; run them one by one")
    folder = folder or (FOLDER / "quick" if quick else FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    for position, name in enumerate(names, start=1):
        if len(names) > 1:
            print(f"study {position} of {len(names)}: {name}", file=sys.stderr)
        study = catalogue.load(name)
        settings = catalogue.with_options(study.QUICK if quick else study.FULL, options)
        print(f"report: {study.run(settings, folder)}")
