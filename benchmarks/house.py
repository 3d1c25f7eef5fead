"""Measure how large parity is, and how much its rooms depend on each other: ``python benchmarks/house.py``.

Prints a table in markdown. The only time in it is a share of another time, so it hardly depends on the machine.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
# A function's docstring says what the function does, so it begins with a verb. None of these words is a verb.
NO_VERBS = set(
    """a all an and another any as at both by ditto each either else every for from has how if in into is it its like
    no none nothing of on one ones only other such that the their them then these this those to two under unless up
    what when where whether which who whose with without""".split()  # noqa: SIM905, a list of strings would be harder to read
)
PASSING_COMPARISON = """
import sys, torch, parity
te_linear = parity.te.kernels("cpu").te.Linear(64, 64)
pair = parity.Pair(
    torch.nn.Linear(64, 64), te_linear,
    weights={"weight": "weight", "bias": "bias"}, inputs=lambda rng: (rng.normal(8, 64),), fill=True,
)
(result,) = parity.compare(pair, precisions=["bf16"])
assert result.passed, (result.findings, result.reason)
print(sum(name.split(".")[0] in ("parity", "te_on_cpu") for name in sys.modules))
"""


CORE = ["api.py", "case", "comparison.py", "judge", "mistakes", "numerics", "passes", "ranks", "result.py", "search"]
CORE += ["te", "trace"]
WINGS = ["cli", "measuring", "plugin", "report", "trainings", "weights"]


def main() -> None:
    """Print the table."""
    parts = {
        "`parity/`, the core": [file for name in CORE for file in _python(f"parity/{name}")],
        **{f"`parity/{name}/`": _python(f"parity/{name}") for name in WINGS},
        "`parity/`, all": _python("parity"),
        "`te_on_cpu/`": _python("te_on_cpu"),
        "`lab/corpus/`, which tests share": _python("lab/corpus"),
        "`lab/`, all": _python("lab"),
        "tests": _python("tests"),
    }
    product = parts["`parity/`, all"]
    sys.path.insert(0, str(ROOT))  # grimp finds this checkout's package, even if another one is installed
    graph = grimp.build_graph("parity", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    fragments, functions = _count_fragments([*product, *parts["`lab/`, all"]])
    private = [name for file in product for name in _list_private_functions(file)]
    one_word = sum("_" not in name[1:] for name in private)
    rows = [(f"files, lines, tokens of {name}", _describe_size(files)) for name, files in parts.items()]
    rows += [
        ("tokens a line of code in `parity/`", f"{_count_tokens(product) / _count_code_lines(product):.1f}"),
        ("private functions whose name is one word", f"{one_word} of {len(private)}"),
        ("longest chain of imports", longest_chain(imports)),
        (
            "files with one importer",
            sum(len(graph.find_modules_that_directly_import(each)) == 1 for each in graph.modules),
        ),
        ("files that a passing comparison imports", _imported_by_a_comparison()),
        ("time to import them, over that of torch and TE", f"{_share_of_import_time():.2f}"),
        ("docstrings of functions that begin with no verb", f"{fragments} of {functions}"),
        ("exceptions in the contracts of imports", _count_exceptions()),
    ]
    print(tabulate(rows, ["what", "measured"], tablefmt="github", disable_numparse=True))


def longest_chain(imports: Mapping[str, Iterable[str]]) -> int:
    """Return the length of the longest chain of imports, in modules. All modules of an import cycle count.

    Args:
        imports: the modules that each module imports.
    """
    names = sorted(imports)
    edges = [(names.index(one), names.index(other)) for one in names for other in imports[one]]
    rows, columns = zip(*edges, strict=True)
    count, circle = connected_components(coo_array(([1] * len(edges), (rows, columns))), connection="strong")
    sizes = np.bincount(circle, minlength=count)
    below: dict[int, set[int]] = {each: set() for each in range(count)}
    for one, other in edges:
        below[circle[one]] |= {int(circle[other])} - {int(circle[one])}
    chains: dict[int, int] = {}
    for each in TopologicalSorter(below).static_order():
        chains[each] = int(sizes[each]) + max((chains[further] for further in below[each]), default=0)
    return max(chains.values())


def begins_with_a_verb(docstring: str) -> bool:
    """Return whether the first word may be a verb, which is to say that it is not in ``NO_VERBS``."""
    return docstring.split()[0].strip("`*,.:;").lower() not in NO_VERBS


def _python(path: str) -> list[Path]:
    place = ROOT / path
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def _describe_size(files: Sequence[Path]) -> str:
    lines = sum(len(file.read_text().splitlines()) for file in files)
    return f"{len(files)}, {lines:,}, {_count_tokens(files):,}"


def _count_tokens(files: Iterable[Path]) -> int:
    return sum(len(_read_tokens(file)) for file in files)


def _count_code_lines(files: Iterable[Path]) -> int:
    return sum(len({each.start[0] for each in _read_tokens(file)}) for file in files)


@cache
def _read_tokens(file: Path) -> list[tokenize.TokenInfo]:
    """Return a file's names, operators and numbers; comments, texts and line ends do not count."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return [each for each in tokens if each.type in kinds]


def _list_private_functions(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
            yield node.name


def _count_fragments(files: Iterable[Path]) -> tuple[int, int]:
    docstrings = [text for file in files for text in _docstrings(file) if text.strip()]
    return sum(not begins_with_a_verb(text) for text in docstrings), len(docstrings)


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
            yield ast.get_docstring(node) or ""


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read like an attribute, so that its docstring may be a noun."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _imported_by_a_comparison() -> int:
    return int(_run_a_comparison().stdout.split()[-1])


def _share_of_import_time() -> float:
    """Return the import time of parity's own modules over that of torch and TE, as CPython measures it."""
    taken: Counter[str] = Counter()
    for line in _run_a_comparison("-X", "importtime").stderr.splitlines():
        if counted := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)", line):
            taken[counted[2]] += int(counted[1])
    return (taken["parity"] + taken["te_on_cpu"]) / (taken["torch"] + taken["transformer_engine"])


def _run_a_comparison(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", PASSING_COMPARISON]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def _count_exceptions() -> int:
    """Return how many imports the contracts ignore, as import-linter counts them."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = [line.split("(")[1].split()[0] for line in ran.stdout.splitlines() if "ignored import" in line]
    return sum(map(int, ignored))


if __name__ == "__main__":
    main()
