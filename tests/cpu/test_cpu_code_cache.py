"""The cache of TE's rewritten code."""

import sys

import pytest

from parity.cpu.loading.loader import cached

SOURCE = b"answer = 42"


class Compiler:
    """Compiles a source and counts how often."""

    def __init__(self, source):
        self.source, self.calls = source, 0

    def __call__(self):
        self.calls += 1
        return compile(self.source, "module.py", "exec")


def code_of(source, compiler, path="module.py"):
    return cached(source, path, compiler)


def value(code):
    namespace = {}
    exec(code, namespace)
    return namespace["answer"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "parity" / "transformer_engine"


def test_a_source_is_compiled_once():
    compiler = Compiler(SOURCE)
    assert [value(code_of(SOURCE, compiler)) for _ in range(2)] == [42, 42]
    assert compiler.calls == 1


def test_a_changed_source_is_compiled_again_and_takes_the_place_of_the_other(folder):
    code_of(SOURCE, Compiler(SOURCE))
    changed = b"answer = 43"
    assert value(code_of(changed, Compiler(changed))) == 43
    assert len(list(folder.iterdir())) == 1


def test_the_same_source_at_another_path_is_another_entry(folder):
    for path in ("one.py", "two.py"):
        code_of(SOURCE, Compiler(SOURCE), path)
    assert len(list(folder.iterdir())) == 2


def test_a_broken_entry_is_replaced(folder):
    code_of(SOURCE, Compiler(SOURCE))
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-5])
    assert value(code_of(SOURCE, Compiler(SOURCE))) == 42


def test_nothing_is_written_where_python_is_to_write_no_bytecode(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert value(code_of(SOURCE, Compiler(SOURCE))) == 42
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert value(code_of(SOURCE, Compiler(SOURCE))) == 42
