"""Test what `make versions` reads, asks for and shows."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_package
import versions

ROOT = versions.ROOT

METADATA = """Metadata-Version: 2.4
Name: te-parity
Version: 0.1.0
Requires-Dist: torch
Requires-Dist: rich>=13.8
Requires-Dist: triton>=3; platform_system == "Linux"
Requires-Dist: ray>=2.49; extra == "ray"

Text.
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(path := tmp_path / "te_parity-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("te_parity-0.1.0.dist-info/METADATA", METADATA)
    return path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read pyproject.toml by itself")
def test_every_dependency_has_a_lower_bound_but_those_that_a_machine_has() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    unbounded = {one.name for one in map(Requirement, declared) if not one.specifier}
    assert unbounded == set(versions.PINNED)


def test_a_dependency_without_a_lower_bound_is_told() -> None:
    with pytest.raises(check_package.Wrong, match=r"no lower bound \(>=\) to rich, tabulate$"):
        versions.oldest([Requirement("torch"), Requirement("rich"), Requirement("tabulate<2")], "3.11.7")


def test_extras_are_not_installed(wheel: Path) -> None:
    assert [one.name for one in versions.requirements(wheel)] == ["torch", "rich", "triton"]


def test_pytorch_and_te_are_those_of_ci() -> None:
    assert [line.partition("==")[0] for line in versions.pins()] == list(versions.PINNED)


def test_a_python_that_is_not_there_is_told() -> None:
    with pytest.raises(check_package.Wrong, match=r"this machine has no Python 3\.0$"):
        versions.interpreter("3.0")


def test_the_report_shows_what_was_left_out_and_what_failed(wheel: Path) -> None:
    tried = [
        versions.Tried("3.11.7", "newest", "2.13.0+cpu", "works", "34 passed"),
        versions.Tried("3.13.0", "oldest", "left out", "9 modules compile"),
        versions.Tried("3.10", "newest", wrong="pip found no torch"),
    ]
    report = versions.draw(tried, wheel)
    assert "| 3.11.7   | newest         | 2.13.0+cpu | works             | 34 passed |" in report
    assert "| 3.13.0   | oldest         | left out   | 9 modules compile |           |" in report
    assert "### Python 3.10, newest\n\n```\npip found no torch\n```" in report


def test_the_time_that_pytest_took_is_not_in_the_report() -> None:
    assert versions.summary("...\n34 passed, 2 skipped in 12.30s (0:00:12)\n") == "34 passed, 2 skipped"
