"""Cases that misbehave cost themselves alone, and many results are all kept; `make torture` has more of both."""

from __future__ import annotations

from pathlib import Path

import mishaps
import pytest

TRIED = [
    ("no file can grow above 4 KiB, as on a full disk", 0, 2),
    ("forks, and the child goes on", 1, 0),
    ("ends the process in its pass", 1, 1),
    ("has C code that calls _exit", 0, 1),
    ("fills the disk of record and report", 0, 0),
    ("fills the disk of temporary files", 1, 0),
    ("fills the disk of record, report and temporary files", 0, 2),
]


@pytest.mark.parametrize(("what", "workers", "code"), TRIED)
def test_a_case_that_misbehaves_is_told_and_costs_no_other(what: str, workers: int, code: int, tmp_path: Path) -> None:
    (mishap,) = (each for each in mishaps.MISHAPS if each.what == what)
    try:
        found = mishaps.run(mishap, workers, tmp_path / "run")
    except OSError as error:
        assert mishap.disk
        pytest.skip(f"no small file system can be mounted here: {error}")
    assert found.wrong == ()
    assert found.code == code


def test_many_results_are_all_kept(tmp_path: Path) -> None:
    found = mishaps.soak(300, tmp_path)
    assert found.megabytes > 0
    assert found.kept > found.by_pytest > 0
