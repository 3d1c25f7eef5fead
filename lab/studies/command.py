"""Run numerical studies from the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.studies import catalogue
from parity.measuring import record
from parity.user_error import UserError

FOLDER = Path("reports/studies")
_CHANGES_TOLD = 5


def run(names: Sequence[str], quick: bool, again: bool, options: Sequence[str], folder: Path | None) -> None:
    """Run studies one after another, each with its report.

    Args:
        names: names in ``catalogue.STUDIES``; if empty, print the list of studies.
        quick: use small settings; the reports then go to ``reports/studies/quick`` by default.
        again: repeat computations that other code made, instead of using their results.
        options: settings of a study, each as ``field=value``.
        folder: the folder for reports and records.

    Raises:
        UserError: for an unknown study or option, for options of several studies at once, or for a folder that cannot
            be written to.
    """
    if not names:
        width = max(map(len, catalogue.STUDIES))
        print("\n".join(f"{name:<{width}}  {what}" for name, what in catalogue.STUDIES.items()))
        return
    if options and len(names) > 1:
        raise UserError("--set is an option of one study; run them one by one")
    folder = folder or (FOLDER / "quick" if quick else FOLDER)
    _make(folder)
    for position, name in enumerate(names, start=1):
        if len(names) > 1:
            print(f"study {position} of {len(names)}: {name}", file=sys.stderr)
        study = catalogue.load(name)
        settings = catalogue.with_options(study.QUICK if quick else study.FULL, options)
        if hasattr(study, "RECORD"):
            _look_after(folder / study.RECORD, record.code_of(study.__name__), again)
        try:
            print(f"report: {catalogue.run(name, settings, folder)}")
        except KeyboardInterrupt:
            print(
                f"interrupted; {folder} has what is finished, and the same command goes on from there",
                file=sys.stderr,
            )
            raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-o: cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"-o: cannot write to {folder}")


def _look_after(path: Path, code: record.Code, again: bool) -> None:
    """Print how many results in a record are from other code, or remove them so that they are computed again."""
    outdated = record.outdated(path, code)
    if outdated is None:
        return
    if again:
        record.forget_outdated(path, code)
        return
    told = ", ".join(outdated.changed[:_CHANGES_TOLD])
    more = len(outdated.changed) - _CHANGES_TOLD
    reasons = [f"changed since: {told}{f' and {more} more' if more > 0 else ''}"] if told else []
    reasons += [f"the code of {outdated.unnamed} is unknown"] if outdated.unnamed else []
    print(
        f"{path}: {outdated.results} of {outdated.of} results were computed by other code ({'; '.join(reasons)}); "
        "they are used unchanged; --again computes them again",
        file=sys.stderr,
    )
