"""Declaring pairs, reporting mistakes in a declaration by file and line, and finding pairs in files and packages."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from parity.case import registry
from parity.case.case import Case
from parity.case.files import imports_parity
from parity.user_error import UserError

DECLARATION = """
import parity

@parity.pair("{name}")
def factory(te):
    raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    declared, modules, path = registry.cases(), dict(sys.modules), list(sys.path)
    registry.restore([])
    yield
    registry.restore(declared)
    sys.path[:] = path
    for name in sys.modules.keys() - modules.keys():
        if not name.startswith(("parity", "torch")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def factory(te, hidden, ffn=4):
    raise NotImplementedError


# Declaring


def test_a_declaration_becomes_a_case_with_its_place():
    line = inspect.currentframe().f_lineno + 1
    case = registry.pair("mlp.a-1", sizes=[{"hidden": 8}], precisions=["fp32"], marks=["slow"])(factory)
    assert isinstance(case, Case)
    assert (case.name, case.precisions, case.marks) == ("mlp.a-1", ("fp32",), ("slow",))
    assert (case.path, case.line) == (Path(__file__).resolve(), line)
    assert registry.cases() == [case]


def test_sizes_may_come_from_a_generator():
    case = registry.pair("mlp", sizes=({"hidden": n} for n in (8, 16)))(factory)
    assert list(case.sizes) == [{"hidden": 8}, {"hidden": 16}]


def test_two_places_with_one_name_are_both_named():
    first = registry.pair("mlp", sizes=[{"hidden": 8}])(factory)
    with pytest.raises(UserError) as caught:
        registry.pair("mlp", sizes=[{"hidden": 8}])(factory)
    assert f"{first.path}:{first.line}" in str(caught.value)
    assert f"{first.path}:{first.line + 2}: pair 'mlp' is already declared" in str(caught.value)
    assert registry.cases() == [first]


def test_the_same_lines_imported_again_replace_the_case():
    first, second = (registry.pair("mlp", sizes=[{"hidden": 8}])(factory) for _ in range(2))
    assert first is not second
    assert registry.cases() == [second]


def test_a_function_typed_again_in_a_notebook_replaces_the_case():
    def run_cell(cell: str) -> None:
        code = 'import parity\n@parity.pair("typed")\ndef f(te): ...'
        exec(compile(code, f"/no/such/folder/{cell}.py", "exec"), {"__name__": "__main__"})

    run_cell("cell1")
    run_cell("cell2")
    assert [case.path.stem for case in registry.cases()] == ["cell2"]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("a b", {}, "a name may only have"),
        ("a[1]", {}, "a name may only have"),
        ("", {}, "a name may only have"),
        ("mlp", {"sizes": []}, "sizes is empty"),
        ("mlp", {"sizes": {"hidden": 8}}, "sizes must be a list of dicts"),
        ("mlp", {"sizes": [8]}, "size 8 is not a dict"),
        ("mlp", {"sizes": [{"hidden": 8}, {"hidden": 8}]}, "is listed twice"),
        ("mlp", {"sizes": [{"ffn": 8}]}, "lacks hidden, which the factory requires"),
        ("mlp", {"sizes": [{"hidden": 8, "seq": 2}]}, "has seq, which the factory does not take"),
        ("mlp", {"sizes": [{"hidden": 8, "te": 2}]}, "has te, which the factory does not take"),
        ("mlp", {"ranks": [{"tp": 2}]}, "declared with ranks=, so its function needs a parameter of that name"),
        ("mlp", {"precisions": ["bf61"]}, "unknown precision 'bf61' in precisions; did you mean bf16?"),
        ("mlp", {"precisions": ["int3", "bf16"]}, "unknown precision 'int3' in precisions; there are fp32, bf16"),
        ("mlp", {"precisions": "bf16"}, "precisions must be a list, such as"),
        ("mlp", {"precisions": []}, "precisions is empty"),
        ("mlp", {"marks": "slow"}, "marks must be a list of names"),
        ("mlp", {"marks": ["very slow"]}, "not a valid name of a pytest mark"),
        ("mlp", {"probe": "no"}, "probe must be True or False, not 'no'"),
        ("mlp", {"vary_constants": None}, "vary_constants must be True or False, not None"),
    ],
)
def test_a_bad_argument_is_told_with_its_place(name, arguments, complaint):
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(UserError) as caught:
        registry.pair(name, **{"sizes": [{"hidden": 8}], **arguments})(factory)
    assert complaint in str(caught.value)
    assert f"{Path(__file__).resolve()}:{line}: pair {name!r}: " in str(caught.value)
    assert registry.cases() == []


@pytest.mark.parametrize(
    "not_a_factory",
    [lambda: None, lambda hidden, te: None, lambda *, te: None, lambda *te: None, max],
    ids=["nothing", "second", "keyword-only", "variadic", "not Python's"],
)
def test_a_factory_takes_te_first(not_a_factory):
    with pytest.raises(UserError, match="first parameter must be te"):
        registry.pair("mlp", sizes=[{}])(not_a_factory)


def test_a_declaration_without_a_name_is_told_where_it_stands():
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(UserError) as caught:
        registry.pair(factory)
    assert str(caught.value) == f'{Path(__file__).resolve()}:{line}: @parity.pair needs a name: @parity.pair("factory")'


def test_a_pair_of_a_pair_is_told_to_be_two():
    inner = registry.pair("inner")(lambda te: None)
    with pytest.raises(UserError, match="decorates a function, not the pair 'inner'"):
        registry.pair("outer")(inner)


def test_a_mark_of_pytest_on_the_function_is_told_where_marks_belong():
    def marked(te): ...

    with pytest.raises(UserError, match=r'marks=\["slow"\]'):
        registry.pair("mlp")(pytest.mark.skip(marked))


def test_sizes_may_hold_tensors():
    sizes = [{"hidden": 8, "ffn": torch.ones(2)}, {"hidden": 8, "ffn": torch.zeros(2)}]
    assert len(registry.pair("mlp", sizes=sizes)(factory).sizes) == 2


def test_a_factory_with_variadic_keywords_takes_any_size():
    registry.pair("mlp", sizes=[{"hidden": 8, "seq": 2}])(lambda te, hidden, **_: None)
    assert len(registry.cases()) == 1


# Files


def test_load_file_returns_the_cases_of_that_file(write):
    path = write("mine.py", DECLARATION.format(name="mine"))
    (case,) = registry.load_file(path)
    assert (case.name, case.path, case.line) == ("mine", path.resolve(), 4)
    assert case.factory.__module__ == "mine"


def test_a_file_finds_the_modules_beside_it_while_it_is_imported(write):
    write("helper_beside.py", "NAME = 'from_helper'\n")
    path = write("mine.py", "from helper_beside import NAME\n" + DECLARATION.format(name="x").replace('"x"', "NAME"))
    before = list(sys.path)
    assert [case.name for case in registry.load_file(path)] == ["from_helper"]
    assert sys.path == before


TWO = DECLARATION.format(name="mlp") + DECLARATION.format(name="mlp-1")


@pytest.mark.parametrize("item", ["mlp", "mlp[bf16-2x64]"])
def test_a_pytest_id_loads_its_case_alone(write, item):
    path = write("mine.py", TWO)
    assert [case.name for case in registry.load(f"{path}::{item}")] == ["mlp"]
    assert [case.name for case in registry.load(str(path))] == ["mlp", "mlp-1"]


def test_a_name_that_a_file_does_not_declare_is_told_with_those_that_it_does(write):
    path = write("mine.py", TWO)
    with pytest.raises(UserError) as caught:
        registry.load_case(path, "ml")
    assert str(caught.value) == f"there is no pair 'ml' in {path}; name one of {path}::mlp, {path}::mlp-1"


def test_load_file_returns_no_cases_of_files_that_it_imports(write):
    write("other_pairs.py", DECLARATION.format(name="other"))
    path = write("mine.py", "import other_pairs\n" + DECLARATION.format(name="mine"))
    assert [case.name for case in registry.load_file(path)] == ["mine"]


def test_load_file_returns_cases_that_a_helper_elsewhere_declares_for_the_file(write):
    write("declare_helper.py", "import parity\ndef declare(f):\n    return parity.pair(f.__name__)(f)\n")
    path = write("mine.py", "from declare_helper import declare\n@declare\ndef mine(te): ...\n")
    assert [case.name for case in registry.load_file(path)] == ["mine"]


HELPER = """
import parity

def declare(name):
    def factory(te): ...
    return parity.pair(name)(factory)
"""


def test_a_pair_belongs_to_the_file_that_is_imported_wherever_its_function_is_written(write):
    write("declare_helper.py", HELPER)
    path = write("mine.py", "from declare_helper import declare\n\ndeclare('a')\nfor n in 'bc':\n    declare(n)\n")
    found = registry.load_file(path)
    assert [(case.name, case.path, case.line) for case in found] == [("a", path, 3), ("b", path, 5), ("c", path, 5)]
    assert registry.load_file(path) == found
    assert registry.load_case(path, "b") is found[1]


def test_a_decorator_that_another_file_makes_declares_where_it_is_applied(write):
    write("decorators.py", "import parity\nmine = parity.pair('mine')\n")
    path = write("mine.py", "from decorators import mine\n\nmine(lambda te: 0)\n")
    assert [(case.path, case.line) for case in registry.load_file(path)] == [(path, 3)]


def test_pairs_that_a_text_declares_belong_to_the_file_that_executes_it(write):
    path = write("mine.py", "text = 'import parity; parity.pair(\"mine\")(lambda te: 0)'\n\nexec(text, globals())\n")
    assert [(case.path, case.line) for case in registry.load_file(path)] == [(path, 3)]


def test_a_helpers_own_pairs_stay_its_own_with_two_files_that_import_it(write):
    helper = write("declare_helper.py", HELPER + "\ndeclare('shared')\n")
    files = [write(f"{n}.py", f"from declare_helper import declare\ndeclare('{n}')\n") for n in ("one", "two")]
    names = [[case.name for case in registry.load_file(path)] for path in (*files, helper)]
    assert names == [["one"], ["two"], ["shared"]]
    assert [case.name for case in registry.cases()] == ["shared", "one", "two"]


def test_one_name_for_two_pairs_of_one_line_is_told(write):
    write("declare_helper.py", HELPER)
    path = write("mine.py", "from declare_helper import declare\n\nfor n in 'aba':\n    declare(n)\n")
    with pytest.raises(UserError, match=f"{path}:4: pair 'a' is already declared at {path}:4; rename one of them"):
        registry.load_file(path)


def test_one_name_for_pairs_of_two_files_with_one_helper_is_told_with_both_files(write):
    write("declare_helper.py", HELPER)
    one, two = (write(f"{n}.py", "from declare_helper import declare\n\ndeclare('a')\n") for n in ("one", "two"))
    registry.load_file(one)
    with pytest.raises(UserError, match=f"{two}:3: pair 'a' is already declared at {one}:3"):
        registry.load_file(two)


def test_a_file_that_is_imported_again_replaces_its_pairs_though_its_lines_moved(write, monkeypatch):
    path = write("mine_again.py", DECLARATION.format(name="mine"))
    monkeypatch.syspath_prepend(str(path.parent))
    module = importlib.import_module("mine_again")
    write("mine_again.py", "\n# edited\n" + DECLARATION.format(name="mine"))
    importlib.reload(module)
    assert [case.line for case in registry.cases()] == [6]


def test_a_file_that_is_loaded_twice_is_imported_once(write):
    path = write("mine.py", DECLARATION.format(name="mine"))
    assert registry.load_file(path) == registry.load_file(path)


def test_files_of_one_name_in_two_folders_are_both_loaded(write):
    for folder in ("a", "b"):
        write(f"{folder}/mlp_pairs.py", DECLARATION.format(name=folder))
    paths = [write(f"{folder}/mlp_pairs.py", DECLARATION.format(name=folder)) for folder in ("a", "b")]
    assert [case.name for path in paths for case in registry.load_file(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("import pytest\n\npytest.importorskip('no_such_module_at_all')\n", 3, "Skipped: could not import"),
        ("import parity\ndef f(:\n", 2, "SyntaxError"),
        ("\nimport no_such_module_at_all\n", 2, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError: division by zero"),
        ("import sys\n\nsys.exit(3)\n", 3, "SystemExit: 3"),
        (DECLARATION.format(name="not valid"), 4, "a name may only have"),
    ],
    ids=["skip", "syntax", "import", "exception", "exit", "declaration"],
)
def test_a_file_that_cannot_be_imported_is_told_with_its_line(write, text, line, complaint):
    path = write("broken.py", text)
    with pytest.raises(UserError) as caught:
        registry.load_file(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert complaint in str(caught.value)


def test_a_file_that_fails_half_way_declares_nothing(write):
    path = write("broken.py", DECLARATION.format(name="early") + "\nraise ValueError\n")
    with pytest.raises(UserError, match="ValueError"):
        registry.load_file(path)
    assert registry.cases() == []
    assert "broken" not in sys.modules


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (".", "this is a folder"),
        ("missing.py", "there is no such file"),
        ("pairs.txt", "is a Python file"),
        ("empty.py", "declares no pair"),
    ],
)
def test_a_path_without_pairs_is_told(write, tmp_path, name, complaint):
    write("pairs.txt", "")
    write("empty.py", "import parity\n")
    with pytest.raises(UserError, match=complaint):
        registry.load_file(tmp_path / name)


# Packages


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], tmp_path: Path) -> Callable[[str], None]:
    """Return a function that installs a distribution ``my-ports`` with a module as its ``parity.pairs`` entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    own = metadata.entry_points

    def only_ours(*, group: str) -> metadata.EntryPoints:
        return metadata.EntryPoints(entry for entry in own(group=group) if entry.dist.name == "my-ports")

    monkeypatch.setattr(metadata, "entry_points", only_ours)

    def announce(module: str) -> None:
        write("my_ports-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-ports\nVersion: 1.0\n")
        write("my_ports-1.0.dist-info/entry_points.txt", f"[parity.pairs]\nports = {module}\n")

    return announce


def test_entry_points_bring_the_cases_of_their_module_and_its_submodules(announce, write):
    write("my_ports/__init__.py", "from my_ports import llama\n")
    write("my_ports/llama.py", DECLARATION.format(name="llama"))
    announce("my_ports")
    assert [case.name for case in registry.load_entry_points()] == ["llama"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("import no_such_module_at_all\n", "importing it raised ModuleNotFoundError"), ("", "which declares none")],
)
def test_a_broken_entry_point_is_told_with_its_package_and_module(announce, write, text, complaint):
    write("my_broken_ports.py", text)
    announce("my_broken_ports")
    with pytest.raises(UserError, match=complaint) as caught:
        registry.load_entry_points()
    assert "the package my-ports announces pairs in the module my_broken_ports" in str(caught.value)


# The syntax of a file tells whether it uses parity, however it imports it.


def uses_parity(folder: Path, text: str) -> bool:
    file = folder / "a_file.py"
    file.write_text(text)
    return imports_parity(file)


@pytest.mark.parametrize(
    "text",
    [
        "import parity",
        "import torch, parity",
        "import parity as p",
        "import parity.te as te",
        "from parity import pair",
        "from parity.case.case import Pair",
        "x = 1; import parity",
        "try:\n    import parity\nexcept ImportError:\n    parity = None",
        "def build():\n    from parity import (\n        Pair,\n    )",
        "from torch import \\\n    nn; import parity",
        "\ufeffimport torch, parity",
    ],
)
def test_every_form_of_an_import_counts(tmp_path: Path, text: str) -> None:
    assert uses_parity(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "import parity_check",
        "from . import parity",
        "from .parity import bit",
        '"""Not a file of pairs:\n\nimport parity\n"""',
        "# import parity",
        "parity = 1",
    ],
)
def test_what_only_reads_alike_does_not(tmp_path: Path, text: str) -> None:
    assert not uses_parity(tmp_path, text)


@pytest.mark.parametrize(("text", "uses"), [("import torch, parity\nx = (", True), ("x = (  # import parity", False)])
def test_a_file_that_cannot_be_parsed_is_told_by_its_lines(tmp_path: Path, text: str, uses: bool) -> None:
    assert uses_parity(tmp_path, text) is uses
