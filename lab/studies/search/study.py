"""Count which ways of the search name the wrong ports of the corpus, and which ports only one of them names.

Each port is judged once, and noted are the ways that found something. Then it is judged again without each of them. A
way that no port needs can go.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from lab.corpus.catalogue import GROUPS, PORTS, group_of
from lab.corpus.judging import Judgement, said_of
from lab.studies import reporting
from lab.studies.names.study import Judged
from lab.studies.settings import check_names
from lab.threads import one_thread
from parity import te
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.search import explanation, search
from parity.te import PRECISIONS

RECORD = "search.jsonl"


@dataclass(frozen=True)
class Way:
    """A way to find causes that the search tries.

    Attributes:
        words: what it looks for.
        module: the module whose search calls it.
        function: the name of the function there.
    """

    words: str
    module: ModuleType
    function: str

    @property
    def calls(self) -> Callable[..., Any]:
        """The function."""
        found: Callable[..., Any] = getattr(self.module, self.function)
        return found


WAYS: Mapping[str, Way] = {
    function.strip("_"): Way(words, module, function)
    for module, function, words in (
        (explanation, "_by_chance", "random numbers"),
        (explanation, "own_recipe_findings", "a recipe that the port enters itself"),
        (explanation, "shared_cache_findings", "caches that attentions share"),
        (explanation, "hidden_row_findings", "rows that a mask hides"),
        (explanation, "_of_one_number", "subtle mistakes in a single number"),
        (explanation, "_by_scale_of_scores", "the scale of scores, by gradients"),
        (explanation, "gradient_findings", "gradients alone"),
        (explanation, "detached_path_findings", "paths without a gradient"),
        (explanation, "exchange_findings", "outputs that are exchanged"),
        (explanation, "buffer_findings", "buffers"),
        (explanation, "_by_scale", "scales of quantized weights"),
        (explanation, "microbatch_findings", "micro-batches"),
        (explanation, "loss_explanations", "losses"),
        (explanation, "whole_scale_findings", "one factor in everything"),
        (explanation, "log_prob_findings", "log-probabilities"),
        (explanation, "decoding_explanations", "decoding"),
        (search, "_by_stages", "known mistakes, one at a time"),
        (search, "_in_parts", "known mistakes in a part of their place"),
        (search, "_in_pairs", "two known mistakes at once"),
        (explanation, "order_findings", "rows or columns in another order"),
        (explanation, "_of_other_operands", "calls that read another value"),
        (explanation, "border_explanations", "borders of sequences"),
        (explanation, "restart_explanations", "positions that begin again"),
        (explanation, "_against_the_stages", "known mistakes that stages speak against"),
        (explanation, "scale_findings", "one factor in some outputs"),
        (explanation, "precision_findings", "other roundings"),
        (explanation, "partly_scaled_findings", "one factor in some gradients"),
        (explanation, "mistakes", "matched filters of outputs"),
    )
}
"""The ways, by the names of their functions, in the order of the search."""

_MAIN = "by_stages"  # the search is never run without it


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        tables: groups of the corpus.
        precisions: the precisions at which every port is judged that runs there.
        seed: the seed of weights and inputs.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    tables: tuple[str, ...] = tuple(GROUPS)
    precisions: tuple[str, ...] = ("bf16", "fp8_current", "fp32")
    seed: int = 0
    workers: int = 0


FULL = Settings()
QUICK = Settings(("losses",), ("bf16",))


@dataclass(frozen=True)
class Found:
    """What the search said of a port.

    Attributes:
        outcome: as in the study ``names``.
        ways: the ways that found something, by name.
        without: the outcome without each of them but the main one.
        seconds: processor time of the search.
    """

    outcome: str
    ways: tuple[str, ...]
    without: Mapping[str, str]
    seconds: float


@contextmanager
def watching(off: str = "") -> Iterator[list[str]]:
    """Yield a list of the ways that find something meanwhile, in their order.

    Args:
        off: the name of a way that finds nothing meanwhile.
    """
    found: list[str] = []

    def watched(name: str, calls: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            results = [] if name == off else list(calls(*args, **kwargs))
            if results and name not in found:
                found.append(name)
            return results

        return call

    with ExitStack() as stack:
        for name, way in WAYS.items():
            stack.enter_context(patch.object(way.module, way.function, watched(name, way.calls)))
        yield found


def judged_without(one: Judgement) -> Found:
    """Judge a port, and again without each way that found something."""
    port = PORTS[one.row, one.host]
    with watching() as ways:
        said = said_of(one)
    without = {}
    for way in (one for one in ways if one != _MAIN):
        with watching(way):
            without[way] = Judged(port, said_of(one)).outcome
    return Found(Judged(port, said).outcome, tuple(ways), without, said.seconds)


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Judgement, Found], Settings]:
    """Judge what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a table or precision is unknown.
    """
    check_names("tables", settings.tables, GROUPS)
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Judgement, Found] = Campaign(folder / RECORD, Found, code=record.code_of(__name__))
    judgements = [
        Judgement(*port.key, precision, settings.seed)
        for precision in settings.precisions
        for table in settings.tables
        for port in GROUPS[table]
        if port.titles and port.occurs_at(precision)
    ]
    with one_thread():
        return campaign.complete(judgements, judged_without, "judging", settings.workers or None), settings


# The report.


@dataclass
class _Count:
    found: int = 0
    named: int = 0
    needed: list[Judgement] = field(default_factory=list)


def write(found: Mapping[Judgement, Found], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "search.md", _sections(found, settings))


def _sections(found: Mapping[Judgement, Found], settings: Settings) -> Iterator[str]:
    yield "# Which ways of the search are needed"
    yield (
        "Each wrong port of the corpus is judged, and again without each way that found something about it. "
        + reporting.made_on(te.kernels("cpu"))
        + f" Seed {settings.seed}. *Finds* counts the ports of which a way said something, *named* those of them that "
        "are named truly, and *only it* those that are not named without it. *Lines* are of the way's own function; "
        "what it calls may serve others."
    )
    for precision in settings.precisions:
        some = {one: each for one, each in found.items() if one.precision == precision}
        counts = _count_ways(some)
        named = sum(each.outcome == "named" for each in some.values())
        yield f"## `{precision}`: {named} of {len(some)} named"
        rows = [
            [
                way.words,
                f"`{name}`",
                str(_count_lines(way)),
                str(one.found),
                str(one.named),
                "" if name == _MAIN else str(len(one.needed)),
            ]
            for name, way in WAYS.items()
            for one in [counts[name]]
        ]
        yield reporting.texts(rows, ["looks for", "function", "lines", "finds", "named", "only it"])
        needed = [
            [way.words, ", ".join(f"{group_of(PORTS[one.row, one.host])}: {one.row}" for one in counts[name].needed)]
            for name, way in WAYS.items()
            if counts[name].needed
        ]
        yield reporting.texts(needed, ["looks for", "the ports that only it names"])


def _count_ways(some: Mapping[Judgement, Found]) -> Mapping[str, _Count]:
    counts = {name: _Count() for name in WAYS}
    for one, each in some.items():
        for name in each.ways:
            counts[name].found += 1
            counts[name].named += each.outcome == "named"
        for name, outcome in each.without.items():
            if each.outcome == "named" and outcome != "named":
                counts[name].needed.append(one)
    return counts


def _count_lines(way: Way) -> int:
    return len(inspect.getsource(inspect.unwrap(way.calls)).splitlines())
