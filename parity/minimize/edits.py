"""Propose smaller texts of a file of pairs: fewer definitions, smaller numbers.

No edit may plant a mistake of its own. So a number is changed alone only where both modules get it: in the pair's
declaration, in a constant of the file and in what inputs draw. Elsewhere all equal numbers are changed at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from parity.case.case import Rng
from parity.minimize.trials import Trials
from parity.trace.trace import grouped

_LEAST_SHARED = 4  # smaller numbers outside constants may be dimensions or powers, which only one module has
_LARGE = 16  # such numbers are tried together first

_Span = tuple[int, int]
_Number = tuple[int, _Span]


class Source:
    """A Python file's text with its syntax.

    Args:
        text: the text.

    Raises:
        SyntaxError: if it is no Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._bytes = text.encode()  # in which Python counts columns
        self._lines = self._bytes.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self._lines))]
        self.tree = ast.parse(text)

    def span(self, node: Any) -> _Span:
        """Return where an expression or a statement without decorators begins and ends."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.AST) -> str:
        """Return the text of an expression."""
        return self._bytes[slice(*self.span(node))].decode()

    def replaced(self, changes: Mapping[_Span, str]) -> str:
        """Return the text with other texts in these places, which do not overlap."""
        text = self._bytes
        for start, end in sorted(changes, reverse=True):
            text = text[:start] + changes[start, end].encode() + text[end:]
        return text.decode()

    def without(self, statements: Sequence[ast.stmt]) -> str:
        """Return the text without these statements, their decorators and the comments right above them."""
        spans: list[_Span] = []
        for one in statements:
            first = min([one.lineno, *(each.lineno for each in getattr(one, "decorator_list", []))]) - 1
            while first and self._lines[first - 1].lstrip().startswith(b"#"):
                first -= 1
            spans.append((self._starts[first], self._starts[one.end_lineno or one.lineno]))
        return self.replaced(dict.fromkeys(spans, ""))

    def declaration(self, name: str) -> ast.Call | None:
        """Return the call ``parity.pair(name, ...)``; None if the file writes no such name."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and node.args)
        of_pairs = (one for one in calls if getattr(one.func, "attr", getattr(one.func, "id", "")) == "pair")
        return next((one for one in of_pairs if getattr(one.args[0], "value", None) == name), None)

    def numbers(self, node: ast.AST) -> Iterator[_Number]:
        """Yield the whole numbers above 1 in a part of the text, without negative ones, which count from the end."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and type(child.value) is int and child.value > 1:
                yield child.value, self.span(child)
            elif not (isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.USub)):
                yield from self.numbers(child)


def declared_with(source: Source, call: ast.Call, settings: Mapping[str, str]) -> str:
    """Return the text with other arguments in a pair's declaration; those that are empty are left out."""
    kept = [source.of(one) for one in [*call.args, *(one for one in call.keywords if one.arg not in settings)]]
    kept += [f"{name}={value}" for name, value in settings.items() if value]
    return source.replaced({source.span(call): f"{source.of(call.func)}({', '.join(kept)})"})


def inlined(text: str, folder: Path, seen: set[Path]) -> str:
    """Return the text with modules of this folder, unless they were seen, in place of ``from module import ...``."""
    source, changes = Source(text), dict[_Span, str]()
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and node.level < 2 and node.module:
            file = folder.joinpath(*node.module.split(".")).with_suffix(".py")
            if file.is_file():
                new = "" if file in seen else inlined(file.read_text(encoding="utf-8-sig"), file.parent, seen)
                seen.add(file)
                lines = [line for line in new.splitlines() if not line.startswith("from __future__")]
                lines += [f"{one.asname} = {one.name}" for one in node.names if one.asname]
                changes[source.span(node)] = "\n".join(lines)
    return source.replaced(changes)


def with_less(source: Source, _: Trials) -> Iterator[str]:
    """Yield texts without some of the file's statements, and without a docstring."""
    body = source.tree.body
    size = len(body)
    while size := size // 2:
        for end in range(len(body), 0, -size):
            yield source.without(body[max(0, end - size) : end])
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield source.without([node])


def with_smaller_size(source: Source, trials: Trials) -> Iterator[str]:
    """Yield texts with smaller numbers in the pair's declaration: all large ones, then each."""
    declaration = source.declaration(trials.item.case.name)
    numbers = list(source.numbers(declaration)) if declaration else []
    yield _halve_numbers(source, [one for one in numbers if one[0] >= _LARGE])
    yield from _reduce_numbers(source, [[one] for one in numbers])


def with_smaller_numbers(source: Source, _: Trials) -> Iterator[str]:
    """Yield texts with fewer elements in constants, and with smaller numbers: all large ones, each, two at once."""
    body = source.tree.body
    constants = [node.value for node in body if isinstance(node, (ast.Assign, ast.AnnAssign)) if node.value]
    lists = [x for node in constants for x in ast.walk(node) if isinstance(x, (ast.Tuple, ast.List))]
    lists = [x for x in lists if not any(isinstance(one, (ast.Tuple, ast.List)) for one in x.elts)]
    for one in lists:
        for index in range(len(one.elts)):
            for some in ([one], [x for x in lists if len(x.elts) == len(one.elts)]):
                yield source.replaced({source.span(x): _without_element(source, x, index) for x in some})
    every = list(source.numbers(source.tree))
    yield _halve_numbers(source, [one for one in every if one[0] >= _LARGE])
    places: list[ast.AST] = [*constants]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node in body and node.decorator_list:
            places += [*node.decorator_list, node.args]
        if isinstance(node, ast.Call) and hasattr(Rng, getattr(node.func, "attr", "")):
            places.append(node)
    knobs = [[one] for node in places for one in source.numbers(node)]
    knobs += [some for value, some in grouped(every, lambda one: one[0]).items() if value >= _LEAST_SHARED]
    yield from _reduce_numbers(source, knobs)
    for first, second in combinations(knobs, 2):
        yield _halve_numbers(source, [*first, *second])


def _reduce_numbers(source: Source, knobs: Sequence[Sequence[_Number]]) -> Iterator[str]:
    """Yield texts with a smaller number in place of equal ones: 1, a half, a power of two, then ever nearer ones."""
    for knob in knobs:
        value = knob[0][0]
        nearer = [value - (value >> shift) for shift in range(2, value.bit_length())]
        for new in dict.fromkeys([1, value // 2, 1 << (value - 1).bit_length() - 1, *nearer]):
            yield source.replaced({span: str(new) for _, span in knob})


def _halve_numbers(source: Source, numbers: Sequence[_Number]) -> str:
    return source.replaced({span: str((value + 1) // 2) for value, span in numbers})


def _without_element(source: Source, listed: ast.Tuple | ast.List, index: int) -> str:
    rest = [source.of(one) for one in (*listed.elts[:index], *listed.elts[index + 1 :])]
    if isinstance(listed, ast.List):
        return f"[{', '.join(rest)}]"
    return f"({', '.join(rest)}{',' * (len(rest) == 1)})"
