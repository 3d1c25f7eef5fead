"""The package: its contents, what is built from it, its versions, and the forms for contributors."""

from __future__ import annotations

import ast
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import parity

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_package
import versions

# In every package, no module takes a name that the package's ``__init__`` uses.


PACKAGE = Path(parity.__file__).parent


def imported_names(package: Path) -> dict[str, str]:
    """Return the names that a package's ``__init__`` imports, each with the module it comes from."""
    found = {}
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
    return found


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_module_takes_a_name_that_its_package_imports_from_elsewhere(package: Path) -> None:
    own = ".".join(package.relative_to(PACKAGE.parent).parts)
    modules = {path.stem for path in package.glob("*.py")}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    taken = {name: source for name, source in imported_names(package).items() if name in modules and source != own}
    assert not taken


# Test what `make package` checks: the files in a wheel, and the output of its commands.


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


# Test what the forms ask people to report, and what people can cite.


yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(params=FORMS, ids=lambda path: path.stem)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert [path.stem for path in FORMS] == ["crash", "missed-bug", "rejected-right-port", "unexplained"]


def test_a_form_has_what_github_asks_for(form: dict[str, Any]) -> None:
    assert form["name"]
    assert form["description"]
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_a_form_asks_for_the_pair_the_record_and_the_machine(form: dict[str, Any]) -> None:
    asked = {part["id"]: part["attributes"] for part in form["body"]}
    assert {"pair", "record", "doctor"} <= set(asked)
    assert "`parity doctor`" in asked["doctor"]["label"]
    assert "reports/parity.jsonl" in asked["record"]["description"]


def test_what_is_cited_is_the_version_that_is_here() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert (citation["title"], citation["version"]) == ("te-parity", metadata.version("te-parity"))
    assert citation["license"] == metadata.metadata("te-parity")["License-Expression"]


# Test what `make versions` reads, requests and shows.


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
