"""What an installation holds: every package of the checkout, and what each of them reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read pyproject.toml by itself")
def test_every_package_is_installed() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    sources = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "parity").rglob("*.py")}
    assert sorted(declared["packages"]) == sorted({*sources, *declared["package-dir"]})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read pyproject.toml by itself")
def test_every_file_that_is_not_python_is_installed() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = {file for file in (ROOT / "parity").rglob("*") if file.is_file() and file.suffix not in {".py", ".pyc"}}
    installed = {ROOT.joinpath(*package.split("."), name) for package, names in declared.items() for name in names}
    assert data == installed
