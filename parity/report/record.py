"""Write and read the record of a run as JSON lines, and gather its results, one for each seed, into items."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity import data_files, shown
from parity.data_files import LeftOut, NotReadableError
from parity.machine import files
from parity.report import environment as environments
from parity.report.environment import Environment
from parity.report.numbers import markdown_table, short
from parity.result import Result, Status, TensorResult, from_json, to_json
from parity.settings import PRECISION_NAMES
from parity.user_error import UserError

# The record: first the environment, then each result as soon as it exists.


@dataclass(frozen=True)
class Uncollected:
    """A pair or a file of pairs with a mistake, so that nothing in it was compared.

    Attributes:
        node_id: its id in pytest.
        message: what is wrong, without a traceback.
    """

    node_id: str
    message: str


@dataclass(frozen=True)
class Record:
    """A run that was read back from its record.

    Attributes:
        environment: where and with which software the run was made.
        results: the results, in the order in which they arrived.
        uncollected: the pairs and files that could not be compared at all, in the order in which they arrived.
        left_out: the lines that could not be read, for example the last one because of a crash or a full disk.
    """

    environment: Environment
    results: tuple[Result, ...]
    uncollected: tuple[Uncollected, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def environment_line(environment: Environment) -> str:
    """Return the first line of a record."""
    return _format_line("environment", environments.to_json(environment))


def result_line(result: Result) -> str:
    """Return a result's line. Sizes that JSON cannot represent, such as a dtype, become text."""
    return _format_line("result", to_json(result))


def uncollected_line(uncollected: Uncollected) -> str:
    """Return the line for a pair or a file that could not be collected."""
    return _format_line("uncollected", asdict(uncollected))


def environment_of(line: str) -> Environment:
    """Return the inverse of ``environment_line``."""
    return environments.from_json(json.loads(line)["environment"])


def result_of(line: str) -> Result:
    """Return the inverse of ``result_line``."""
    return from_json(json.loads(line)["result"])


def start(path: Path, line: str) -> None:
    """Begin a record with its first line, replacing an earlier run's. Create the folder if it does not exist."""
    files.replace(path, line)


def append(path: Path, line: str) -> None:
    """Add a line, which is in the file when this returns."""
    with path.open("ab") as file:
        file.write(data(line))


def data(line: str) -> bytes:
    """Return a line's bytes. Half a surrogate pair, which UTF-8 cannot encode, is written as JSON's escape for it."""
    return line.encode("utf-8", "backslashreplace")


def read(path: Path) -> Record:
    """Return a record from its file, without lines that are damaged; their numbers and reasons are in ``left_out``.

    Raises:
        UserError: if there is no such file, or it is not a record.
    """
    return of_lines(lines(path))


def lines(path: Path) -> data_files.Lines[Environment | Result | Uncollected]:
    """Return the content of each line of a record, without lines that are damaged.

    Raises:
        UserError: if there is no such file.
    """
    return data_files.lines(path, _line_of)


def of_lines(found: data_files.Lines[Environment | Result | Uncollected]) -> Record:
    """Return the record that consists of these lines, see ``read``."""
    path = found.path
    written = "a run writes one to reports/<name>.jsonl"
    if not found.raw:
        raise UserError(f"{path} is not a record of parity: it is empty; {written}")
    contents = found.contents
    environment = contents[0] if contents and found.good[0][0] == 1 else None
    if not isinstance(environment, Environment):
        reason = found.left_out[0].reason if found.left_out and found.left_out[0].number == 1 else "no environment"
        raise UserError(f"{path} is not a record of this version of parity (line 1: {reason}); {written}")
    return Record(
        environment,
        results=tuple(each for each in contents if isinstance(each, Result)),
        uncollected=tuple(each for each in contents if isinstance(each, Uncollected)),
        left_out=found.left_out,
    )


def _line_of(content: Any) -> Environment | Result | Uncollected:
    """Return the content of a line."""
    for kind, read_back in _KINDS.items():
        if isinstance(content, dict) and kind in content:
            try:
                return read_back(content[kind])
            except Exception as error:
                raise NotReadableError(f"{kind}.{data_files.why(error)}") from None
    raise NotReadableError(f"no {', '.join(_KINDS)} in it")


@functools.cache
def _uncollected_type() -> TypeAdapter[Uncollected]:
    return TypeAdapter(Uncollected)


_KINDS: Mapping[str, Callable[[Any], Environment | Result | Uncollected]] = {
    "environment": environments.from_json,
    "result": from_json,
    "uncollected": lambda content: _uncollected_type().validate_python(content),
}


def _format_line(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({kind: content}, allow_nan=False, ensure_ascii=False, default=str) + "\n"


# Items: each gathers a case's results at one precision and size, one for each seed, as pytest's items do.


WORST_FIRST: tuple[Status, ...] = ("error", "failed", "passed", "skipped")


@dataclass(frozen=True)
class Item:
    """The results of one case at one precision and size.

    Attributes:
        results: the results, one for each seed and in the seeds' order; at least one.
    """

    results: tuple[Result, ...]

    @property
    def status(self) -> Status:
        """The worst status over all seeds. A skip counts only if nothing ran."""
        return min((result.status for result in self.results), key=WORST_FIRST.index)

    @property
    def worst(self) -> Result:
        """The result with the largest margin among those with the item's status."""
        return max(self.results, key=_rank_result)

    @property
    def severity(self) -> tuple[int, float]:
        """Return a key by which items can be sorted, larger for worse ones: the status first, then the margin."""
        return _rank_result(self.worst)

    @property
    def margin(self) -> str:
        """Return the margin as text; empty if the verdict does not rest on it."""
        worst = self.worst
        decides = worst.tensors and self.status in ("passed", "failed") and not worst.within_limits
        return short(worst.margin) if decides else ""

    @property
    def bad(self) -> tuple[Result, ...]:
        """The results that neither passed nor were skipped."""
        return tuple(result for result in self.results if result.status in ("failed", "error"))

    @property
    def equals(self) -> str:
        """Return `` = bf16`` if no seed's pass quantized anything, though the precision has a recipe; else nothing."""
        found = {result.equals for result in self.results}
        return f" = {found.pop()}" if len(found) == 1 and found != {""} else ""

    @property
    def name(self) -> str:
        """The item's name, such as ``layernorm_mlp_swiglu[bf16-2x1024x512]``."""
        return self.results[0].item

    @property
    def case(self) -> str:
        return self.results[0].case

    @property
    def precision(self) -> str:
        return self.results[0].precision

    @property
    def size_label(self) -> str:
        return self.results[0].size_label

    @property
    def ranks(self) -> str:
        return self.results[0].ranks


def _rank_result(result: Result) -> tuple[int, float]:
    return -WORST_FIRST.index(result.status), -math.inf if math.isnan(result.margin) else result.margin


@dataclass(frozen=True)
class AtWorst:
    """Hold one tensor of an item, at the seed where its margin is worst.

    Attributes:
        result: the result at that seed.
        tensor: the tensor's result at that seed.
        seeds: at how many seeds the tensor was compared.
    """

    result: Result
    tensor: TensorResult
    seeds: int


def worst_of_each_tensor(item: Item) -> list[AtWorst]:
    """Return each of an item's tensors at its worst seed, in the order of the results."""
    at_seeds: dict[str, list[tuple[Result, TensorResult]]] = {}
    for result in item.results:
        for tensor in result.tensors:
            at_seeds.setdefault(tensor.label, []).append((result, tensor))
    worst = (max(each, key=lambda pair: pair[1].margin) for each in at_seeds.values())
    return [AtWorst(result, tensor, len(at_seeds[tensor.label])) for result, tensor in worst]


def in_order(items: Iterable[Item]) -> list[Item]:
    """Return items ordered by file, case, precision, size and attention, regardless of when they arrived."""
    items = list(items)
    order = precisions(items)
    return sorted(
        items,
        key=lambda item: (
            item.results[0].path,
            item.case,
            order.index(item.precision),
            [(len(number), number) for number in re.findall(r"[1-9][0-9]*|0(?![0-9])", item.size_label)],
            item.size_label,
            item.results[0].forced_attention,
        ),
    )


def precisions(items: Sequence[Item]) -> list[str]:
    """Return the names of the precisions that occur, in the order of ``parity.te``."""
    found = dict.fromkeys(item.precision for item in items)
    return [name for name in PRECISION_NAMES if name in found] + [name for name in found if name not in PRECISION_NAMES]


# The report's overview: a table of cases and precisions, with verdicts and worst margins.


PASSED, FAILED, ERROR, SKIPPED = "✅", "❌", "💥", "–"
_SIGNS: dict[Status, str] = {"passed": PASSED, "failed": FAILED, "error": ERROR}


def draw_matrix(items: Sequence[Item]) -> str:
    """Return a markdown table with a row for each case and, if it runs over ranks, for each layout of ranks.

    A cell is empty if the case does not ask for the precision.
    """
    columns = precisions(items)
    rows = []
    for case in dict.fromkeys(item.case for item in items):
        of_case = [item for item in items if item.case == case]
        for ranks in dict.fromkeys(item.ranks for item in of_case):
            alike = [item for item in of_case if item.ranks == ranks]
            cells = [_draw_cell([item for item in alike if item.precision == precision]) for precision in columns]
            rows.append([shown.code(case) + (f", {shown.prose(ranks)}" if ranks else ""), *cells])
    return markdown_table(rows, ["case", *map(shown.prose, columns)])


def verdict_of(item: Item) -> str:
    """Return an item's verdict, such as ``✅ 0.43``, ``✅ 0.43 = bf16``, ``❌ 140``, ``❌ failed`` or ``–``."""
    if item.status == "skipped":
        return SKIPPED
    return f"{_SIGNS[item.status]} {shown.prose(f'{item.margin or item.status}{item.equals}')}"


def _draw_cell(items: Sequence[Item]) -> str:
    """Return the verdict of the worst of these items; empty if there are none."""
    return verdict_of(max(items, key=lambda item: item.severity)) if items else ""
