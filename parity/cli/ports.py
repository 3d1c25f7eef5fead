"""Write a port of a Hugging Face model, and run it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from parity import shown
from parity.api import compare
from parity.case import registry
from parity.case.case import Case
from parity.ports.reading import load_config
from parity.ports.writing import write
from parity.report.failure import causes_and_figures, describe_verdict
from parity.report.record import Item
from parity.result import Result
from parity.user_error import UserError

_PRECISIONS = ("fp32", "bf16")


def port(source: str, runs: bool, seconds: float) -> bool:
    """Print a port to stdout, and what is to be known of it to stderr; return whether it was right, or did not run.

    Args:
        source: a folder with a ``config.json``, such a file, or the type of a model.
        runs: whether to compare the port's pairs in their small sizes.
        seconds: real time for each search for a cause.

    Raises:
        UserError: if no port can be written.
    """
    config = load_config(source)
    text, form = write(config)
    print(text, end="")
    for title, told in (("TE differs", form.gaps), ("not known of the model", form.unknown)):
        for one in told:
            _print_line(f"{title}: {one}")
    try:
        results = run_port(text, form.kind, _PRECISIONS, seconds) if runs else []
    except UserError as error:  # such as a weight map that does not fit
        _print_line(f"✗ the port does not run yet: {error}")
        return False
    for result in results:
        _tell_result(result)
    return all(result.passed for result in results)


@contextmanager
def declared_pairs(text: str, kind: str) -> Iterator[list[Case]]:
    """Declare the pairs of a port, which is Python, as long as this context lasts."""
    declared = registry.cases()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{kind}_port.py")
        file.write_text(text, encoding="utf-8")
        try:
            yield registry.load_file(file)
        finally:
            registry.restore(declared)


def run_port(text: str, kind: str, precisions: Sequence[str], seconds: float) -> list[Result]:
    """Return the results of a port's pairs, each in its small size.

    Args:
        text: the port, as Python.
        kind: the type of the model, which its pairs are named after.
        precisions: as of ``parity.compare``.
        seconds: real time for each search for a cause.
    """
    with declared_pairs(text, kind) as cases:
        return [result for case in cases for result in compare(case, precisions, diagnosis_seconds=seconds)]


def _tell_result(result: Result) -> None:
    _print_line(describe_verdict(result.item, result))
    if not result.passed:
        for line in causes_and_figures(Item((result,))):
            _print_line(f"  {line}")


def _print_line(line: str) -> None:
    print(shown.text(line), file=sys.stderr)
