"""Runs of pytest for which nobody asked parity: they are the same with the plugin and without it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_runs import write

from parity.case.files import text_of
from parity.plugin import scan

pytest_plugins = ["pytester"]
TEST = "def test_a():\n    assert True\n"
PAIR = "import parity\n@parity.pair({!r})\ndef pair(te): ...\n"


def hostile(folder: Path) -> None:
    """Fill a folder with an ordinary test and with everything else that a name in it may stand for."""
    (folder / "test_a.py").write_text(TEST)
    for name, target in {
        "test_gone.py": "/nonexistent",
        ".#pairs.py": "me@host.4242:1732850000",
        "test_itself.py": "test_itself.py",
        "test_zero.py": "/dev/zero",
        "test_folder_link.py": ".",
        "circle": ".",
    }.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "test_pipe.py")
    os.mkfifo(folder / "helper.py")
    (folder / "test_link_to_pipe.py").symlink_to("test_pipe.py")
    (folder / "test_folder.py").mkdir()
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(os.path.relpath(folder / "test_socket.py"))
    (folder / "test_latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1") + TEST.encode())
    (folder / "test_mark.py").write_bytes(b"\xef\xbb\xbf" + TEST.encode())
    (folder / "test_broken.py").write_bytes(b"\x00\xff def (")
    imports = f"import {'a' * 300}\n    import helper, gone\n    from . import *"
    (folder / "test_imports.py").write_text(f"try:\n    {imports}\nexcept Exception: pass\n{TEST}")
    (folder / "test_secret.py").write_text(TEST)
    (folder / "test_secret.py").chmod(0)


def outcome(folder: Path, *arguments: str, shell: str = "") -> tuple[int, list[str]]:
    """Return the exit code, and what pytest says, without times."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-q",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:randomly",
        *arguments,
    ]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return ran.returncode, re.sub(r"in [\d.]+s", "", ran.stdout).splitlines()


@pytest.mark.parametrize(
    ("arguments", "shell"),
    [
        (["-rA", "--continue-on-collection-errors", "--ignore=circle", "--ignore=test_folder_link.py"], ""),
        (["test_a.py", "-p", "no:debugging", "-p", "no:junitxml", "-p", "no:cacheprovider", "-W", "error"], ""),
        (["test_a.py", "-p", "no:xdist", "-p", "no:capture", "-p", "no:logging"], ""),
        (["test_a.py"], "2>&-"),
    ],
    ids=["files", "no debugger", "no workers", "no stderr"],
)
def test_pytest_is_the_same_with_the_plugin_where_there_is_no_pair(
    tmp_path: Path, arguments: list[str], shell: str
) -> None:
    hostile(tmp_path)
    (with_it, without) = (outcome(tmp_path, *arguments, "-p", name, shell=shell) for name in _PLUGIN)
    assert with_it == without
    assert with_it[0] in (0, 1)


_PLUGIN = ("parity.plugin", "no:parity.plugin")


def test_only_files_that_pytest_would_collect_are_searched_for_pairs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("top", "ignored", "by_option", "venv_here", "node_modules", "linked_from/deep"):
        place = pytester.path / folder.removeprefix("top")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"test_{folder.replace('/', '_')}.py").write_text(PAIR.format(folder))
    write(pytester, TEST, "helper")
    (pytester.path / "venv_here/pyvenv.cfg").touch()
    (pytester.path / "circle").symlink_to(".")
    pytester.makeconftest("collect_ignore = ['ignored']")
    opened: list[str] = []
    monkeypatch.setattr(scan, "imports_parity", lambda file: opened.append(file.name))
    pytester.parseconfigure("-p", "parity.plugin", "-p", "no:parity-watched", "--ignore=by_option")
    assert opened == ["test_top.py", "test_linked_from_deep.py"]


def test_what_is_no_regular_file_has_no_text(tmp_path: Path) -> None:
    hostile(tmp_path)
    read = {file.name for file in tmp_path.iterdir() if text_of(file)}
    assert read == {f"test_{name}.py" for name in ("a", "latin", "mark", "broken", "imports", "secret")}


@pytest.mark.parametrize("start", [["-m", "pytest"], ["-c", "import pytest, sys; sys.exit(pytest.main())"]])
def test_another_package_called_parity_keeps_its_tests(tmp_path: Path, start: list[str]) -> None:
    other = tmp_path / "parity"
    other.mkdir()
    (other / "__init__.py").write_text("")
    (other / "bits.py").write_text("count = 3\n")
    (other / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef three(): return 3\n")
    (other / "test_bits.py").write_text("from parity.bits import count\ndef test_it(three): assert count == three\n")
    command = [sys.executable, *start]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
