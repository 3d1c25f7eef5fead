"""Kill small runs at random moments, resume each, and compare the result with a run that was never killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import fakes
import forked

from parity.report import record
from parity.result import Result

_CONFTEST = """
import time
import fakes, pytest
from parity import comparison

patch = pytest.MonkeyPatch()
fakes.install(patch)
judge_at = comparison.judge_at


def judge_slowly(*arguments, **options):
    time.sleep(0.004)
    return judge_at(*arguments, **options)


patch.setattr(comparison, "judge_at", judge_slowly)
"""
_STAND_INS = """
import parity


@parity.pair("sound", sizes=[dict(n=2), dict(n=4), dict(n=8)], precisions=["fp32", "bf16", "fp16", "fp8_current"])
def sound(te, n): ...


@parity.pair("fails", sizes=[dict(n=2), dict(n=4)], precisions=["fp32", "bf16"])
def fails(te, n): ...


@parity.pair("raises", sizes=[dict(n=2)], precisions=["fp32"])
def raises(te, n): ...
"""
_REAL = """
from torch import nn

import parity


@parity.pair("sound", precisions=["fp32", "bf16"])
def sound(te):
    weights = {"weight": "weight", "bias": "bias"}
    return parity.Pair(nn.Linear(16, 16), te.Linear(16, 16), inputs=lambda rng: rng.normal(32, 16), weights=weights)


@parity.pair("fails", precisions=["fp32", "bf16"])
def fails(te):
    return parity.Pair(
        nn.Sequential(nn.RMSNorm(16, eps=1e-2), nn.Linear(16, 16, bias=False)),
        te.LayerNormLinear(16, 16, normalization="RMSNorm", bias=False, eps=1e-6),
        inputs=lambda rng: rng.normal(32, 16),
        weights={"0.weight": "layer_norm_weight", "1.weight": "weight"},
    )
"""
LONGEST = 240.0  # seconds for a run to end
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_PYTEST = ("pytest", "-q", "-p", "parity.plugin", "-p", "no:cacheprovider", "pairs.py", "--parity-seeds=2")
_PARITY = ("parity", "run", "pairs.py", "--seeds", "2")
# The processes that compare: a child of the run's process, which only waits, or two workers.
_WAYS = {
    "pytest -n 0": (*_PYTEST, "-n", "0"),
    "parity run -n 0": (*_PARITY, "-n", "0"),
    "pytest -n 2": (*_PYTEST, "-n", "2"),
}
_CHILDREN = {
    "pytest -n 0": "what compares, or waits for its end",
    "parity run -n 0": "what compares, or waits for its end",
    "pytest -n 2": "a worker",
}
_RESUME = {"pytest": "--parity-resume=yes", "parity": "--resume"}


@dataclass
class Tally:
    """Hold the outcomes of the kills.

    Attributes:
        kills: the number of kills, by signal, target, and command of the run.
        results: the number of results that runs had written when they were killed.
        kept: the number of these that the resumed runs kept.
        moments: the number of kills before the first result was written, between results, and after the last.
        wrong: the errors found, each with its seed.
    """

    kills: Counter[str] = field(default_factory=Counter)
    results: int = 0
    kept: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Runs:
    """Runs of one file of pairs in folders of their own, and the results of runs that nobody kills."""

    def __init__(self, folder: Path, real: bool = False) -> None:
        self.folder, self._real = folder, real
        self._whole: dict[str, tuple[int, set[str], str]] = {}

    def whole(self, way: str) -> tuple[int, set[str], str]:
        """Return the exit code, the results and the report of a run that nobody kills."""
        if way not in self._whole:
            place = self._place(f"whole-{way.replace(' ', '')}")
            code = self._begin(place, way).wait(LONGEST)
            self._whole[way] = code, set(_lines(place)), _report(place)
        return self._whole[way]

    def trial(self, seed: int, tally: Tally) -> None:
        """Kill one run, and in one of three cases also the run that resumes it, and compare."""
        draw = random.Random(seed)
        way = draw.choice(tuple(_WAYS))
        code, results, report = self.whole(way)
        place = self._place(f"run{seed}")
        for number in range(draw.choice((1, 1, 2))):
            before = _finished(place)
            process = self._begin(place, way, resumed=bool(number))
            self._kill(process, place, way, draw, tally, seed)
            if number and not before <= set(_lines(place)):
                tally.wrong.append(f"{seed}: a result was lost when the resumed run was killed")
        before = _finished(place)
        written = _lines(place)
        tally.results += len(written)
        tally.kept += len(before)
        ended = self._begin(place, way, resumed=True)
        try:
            found = ended.wait(LONGEST)
        except subprocess.TimeoutExpired:
            tally.wrong.append(f"{seed}: the resumed run hangs")
            return
        after = _lines(place)
        for what, is_wrong in {
            f"exit code {found}, and not {code}": found != code,
            "a result is there twice": len(after) != len(set(after)) or len(after) != len(results),
            "a finished result was lost": not before <= set(after),
            "other results": set(after) != results,
            "another report": _report(place) != report,
        }.items():
            if is_wrong:
                tally.wrong.append(f"{seed} ({way}): {what}; see {place}")

    def _kill(
        self, process: forked.Process, place: Path, way: str, draw: random.Random, tally: Tally, seed: int
    ) -> None:
        """Send a signal to the run or to one of its workers after a number of written lines, and wait for its end."""
        all_of_them = len(self.whole(way)[1])
        name = draw.choice(_SIGNALS)
        # The number of written lines: none yet, some, or all, in which case the report is being drawn.
        at = draw.choice((0, all_of_them + 1, *3 * (draw.randrange(1, all_of_them + 1),)))
        ends = time.monotonic() + LONGEST
        file = place / "reports" / "parity.jsonl"
        while process.returncode is None and _count(file) < at and time.monotonic() < ends:
            time.sleep(0.001)
            _poll(process)
        time.sleep(draw.expovariate(5 if at == 0 else 100))
        others = [pid for pid in _processes_in(place) if pid != process.pid]
        of_workers = bool(others) and draw.random() < 0.5
        target = draw.choice(others) if of_workers else process.pid
        lines = _count(file)
        if forked.is_running(target):
            os.kill(target, name)
            tally.kills[f"{name.name} of {_CHILDREN[way] if of_workers else 'the run'}, {way}"] += 1
            tally.moments["none yet" if lines <= 1 else "some" if lines <= all_of_them else "all"] += 1
        else:
            tally.kills["came too late: the run had ended"] += 1
        try:
            process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            tally.wrong.append(f"{seed}: hangs after {name.name} of {target}; see {place}")
            process.kill()
            process.wait(60)
        ends = time.monotonic() + 60
        while left := [pid for pid in _processes_in(place) if forked.is_running(pid)]:
            if time.monotonic() > ends:
                tally.wrong.append(f"{seed}: processes outlive the run: {left}")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        text = place.joinpath("reports", "parity.md")
        if file.exists() and _count(file) and not text.exists():
            tally.wrong.append(f"{seed}: a record without any report")

    def _place(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir(parents=True)
        (place / "pairs.py").write_text(_REAL if self._real else _STAND_INS)
        if not self._real:
            (place / "conftest.py").write_text(_CONFTEST)
        return place

    def _begin(self, place: Path, way: str, resumed: bool = False) -> forked.Process:
        path = os.pathsep.join([str(Path(fakes.__file__).parent), *sys.path])
        command = ["-m", *_WAYS[way], *([_RESUME[_WAYS[way][0]]] if resumed else [])]
        number = len(list(place.glob("*.out")))
        return forked.begun(command, place, f"{number}.out", PYTHONPATH=path, PYTEST_ADDOPTS="-p no:hypothesispytest")


def _lines(place: Path) -> list[str]:
    """Return the results of a record without their durations."""
    file = place / "reports" / "parity.jsonl"
    if not file.exists() or not file.read_bytes():
        return []
    return [_timeless(each) for each in record.read(file).results]


def _timeless(each: Result) -> str:
    return re.sub(r'"seconds": [^,]*', "", record.result_line(each))


def _finished(place: Path) -> set[str]:
    """Return the results of items that have one for each seed and none cut short."""
    file = place / "reports" / "parity.jsonl"
    if not file.exists() or not file.read_bytes():
        return set()
    by_item: dict[str, list[Result]] = {}
    for each in record.read(file).results:
        by_item.setdefault(each.item, []).append(each)
    return {
        _timeless(each)
        for results in by_item.values()
        if not any(each.cut_short for each in results) and (len(results) == 2 or results[0].status == "skipped")
        for each in results
    }


def _report(place: Path) -> str:
    return re.sub(r"\| date +\| [^|]*\|", "", (place / "reports" / "parity.md").read_text())


def _count(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return 0


def _processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is this folder: a run and its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def _poll(process: forked.Process) -> None:
    try:
        process.wait(0)
    except subprocess.TimeoutExpired:
        return
