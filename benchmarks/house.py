"""Measure how large parity is, and how much its rooms depend on each other: ``python benchmarks/house.py``.

Prints a table in markdown. The only time in it is a share of another time, so it hardly depends on the machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
print(sum(name.split(".")[0] == "parity" for name in sys.modules))
"""


def main() -> None:
    """Print the table."""
    product = [file for file in _python("parity") if "lab" not in file.relative_to(ROOT / "parity").parts]
    lab, tests = _python("lab"), _python("tests")
    sizes = [
        (name, _size(files))
        for name, files in (("`parity/` without `lab/`", product), ("`lab/`", lab), ("tests", tests))
    ]
    sys.path.insert(0, str(ROOT))  # grimp finds this checkout's package, even if another one is installed
    graph = grimp.build_graph("parity", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    fragments, functions = _fragments([*product, *lab])
    rows = [(f"files, lines of {name}", size) for name, size in sizes]
    rows += [
        ("longest chain of imports", longest_chain(imports)),
        (
            "files with one importer",
            sum(len(graph.find_modules_that_directly_import(each)) == 1 for each in graph.modules),
        ),
        ("files that a passing comparison imports", _imported_by_a_comparison()),
        ("time to import them, over that of torch and TE", f"{_share_of_import_time():.2f}"),
        ("docstrings of functions that begin with no verb", f"{fragments} of {functions}"),
        ("exceptions in the contracts of imports", _exceptions()),
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


def _python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _size(files: Iterable[Path]) -> str:
    lines = [len(file.read_text().splitlines()) for file in files]
    return f"{len(lines)}, {sum(lines):,}"


def _fragments(files: Iterable[Path]) -> tuple[int, int]:
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
    return taken["parity"] / (taken["torch"] + taken["transformer_engine"])


def _run_a_comparison(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", PASSING_COMPARISON]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def _exceptions() -> int:
    """Return how many imports the contracts ignore, as import-linter counts them."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = [line.split("(")[1].split()[0] for line in ran.stdout.splitlines() if "ignored import" in line]
    return sum(map(int, ignored))


if __name__ == "__main__":
    main()
