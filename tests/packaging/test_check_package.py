"""Test what `make package` looks at: the files that a wheel holds, and what its commands say."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_package

HELD = ("parity/__init__.py", "parity/py.typed", "parity/judge/packaged.json", "parity/cases/norm.py")
CHECKOUT = (*HELD[:3], "cases/norm.py", "tests/test_norm.py", "parity/__pycache__/__init__.cpython-311.pyc")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in CHECKOUT:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("held", "told"),
    [
        pytest.param(HELD, [], id="the same"),
        pytest.param((*HELD, "te_parity-0.1.0.dist-info/RECORD"), [], id="and what describes a wheel"),
        pytest.param(
            HELD[:-1],
            ["the wheel lacks parity/cases/norm.py: name its package or its data in pyproject.toml"],
            id="without a case",
        ),
        pytest.param(
            HELD[1:],
            ["the wheel lacks parity/__init__.py: name its package or its data in pyproject.toml"],
            id="without a module",
        ),
        pytest.param(
            (*HELD, "tests/test_norm.py"),
            ["the wheel has tests/test_norm.py, which the checkout's packages do not have"],
            id="with a test",
        ),
    ],
)
def test_a_wheel_holds_the_packages_of_the_checkout(checkout: Path, held: tuple[str, ...], told: list[str]) -> None:
    with zipfile.ZipFile(checkout / "parity.whl", "w") as wheel:
        for name in held:
            wheel.writestr(name, "")
    assert check_package.differences(checkout / "parity.whl", checkout) == told


def test_a_command_that_ends_otherwise_is_told_with_what_it_said() -> None:
    with pytest.raises(check_package.Wrong, match=r"ended with code 3 and not 0:\nno room"):
        check_package.run([sys.executable, "-c", "print('no room'); raise SystemExit(3)"])


def test_a_command_that_passes_where_it_should_fail_is_told() -> None:
    with pytest.raises(check_package.Wrong, match="ended with code 0 and not 1"):
        check_package.run([sys.executable, "-c", ""], code=1)
