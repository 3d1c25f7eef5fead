"""What holds for every package: no name that its ``__init__`` uses is taken by one of its modules.

Importing ``parity.te.devices`` sets the name ``devices`` in ``parity.te``, and what ``parity/te/__init__.py`` had
imported under it is gone.
"""

import ast
from pathlib import Path

import pytest

import parity

ROOT = Path(parity.__file__).parent


def imported_names(package: Path) -> dict[str, str]:
    """Return the names that a package's ``__init__`` imports, and from where."""
    found = {}
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
    return found


PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_module_takes_a_name_that_its_package_imports_from_elsewhere(package: Path) -> None:
    own = ".".join(package.relative_to(ROOT.parent).parts)
    modules = {path.stem for path in package.glob("*.py")}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    taken = {name: source for name, source in imported_names(package).items() if name in modules and source != own}
    assert not taken
