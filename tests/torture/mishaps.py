"""Cases that misbehave, full disks and read-only folders: what a run does with each, and what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import fakes
import forked

from parity.report import record
from parity.report.record import WORST_FIRST

LONGEST = 240.0
_SOUND = """
@parity.pair("sound{n}", sizes=[dict(rows=8)], precisions=["fp32"])
def sound{n}(te, rows):
    weights = {{"weight": "weight", "bias": "bias"}}
    return parity.Pair(nn.Linear(16, 16), te.Linear(16, 16), inputs=lambda rng: rng.normal(rows, 16), weights=weights)
"""
_CASE = """
import os, sys, time
from torch import nn
import torch
import parity
{sound1}

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        {body}
        return self.inner(x)


@parity.pair("odd", sizes=[dict(rows=8)], precisions=["fp32"])
def odd(te, rows):
    {factory}
    weights = {{"inner.weight": "weight", "inner.bias": "bias"}}
    return parity.Pair(Odd(), te.Linear(16, 16), inputs=lambda rng: rng.normal(rows, 16), weights=weights)
{sound2}
"""


@dataclass(frozen=True)
class Mishap:
    """Something that goes wrong.

    Attributes:
        what: a description.
        body: a statement in the reference's forward pass.
        factory: a statement in the function that makes the pair.
        limit: called in the run's process before it begins.
        options: further options of the run.
        odd: the statuses that the odd pair's result may have; empty if it must have none.
        others: whether the other pairs must pass.
        disk: whether the folder ``small`` is a file system of 1 MiB.
    """

    what: str
    body: str = "pass"
    factory: str = "pass"
    limit: str = ""
    options: tuple[str, ...] = ()
    odd: tuple[str, ...] = ("error", "failed")
    others: bool = True
    disk: bool = False


_MEMORY = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))"
_SMALL_FILES = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""
_DELETE = "os.path.exists('reports/parity.jsonl') and os.unlink('reports/parity.jsonl')"
_FILL = "x = [bytearray(1 << 28) for _ in range(100)]"
_ENDLESS = "while True: os.write(2, b'x' * 4096); time.sleep(1e-3)"
_FORK_AND_DIE = "os.fork() and os.kill(os.getpid(), 9); time.sleep(60)"
_FAST = "--parity-timeout=10"
_FULL = """
import errno


def fill():
    try:
        while True:
            with open("small/filler", "ab", 0) as file:
                file.write(b"x" * 4096)
    except OSError as error:
        assert error.errno == errno.ENOSPC
"""
_FULL_TEMPORARY = f"{_FULL}\n\nimport os, tempfile\n\ntempfile.tempdir = os.path.abspath('small')"
_REPORT_THERE = ("--parity-report=small/reports",)
MISHAPS = (
    Mishap("forks, and the child goes on", body="os.fork()", odd=("passed", "error", "failed")),
    Mishap("forks, and the child raises", body="os.fork() or 1 / 0", odd=("passed", "error", "failed")),
    Mishap("prints 100 MB", body="sys.stdout.write('x' * 10**8)", odd=("passed", "error")),
    Mishap(
        "writes to standard error for ever",
        body="while True: os.write(2, b'x' * 4096); time.sleep(1e-3)",
        options=(_FAST,),
    ),
    Mishap("overflows Python's stack", body="f = lambda n: f(n + 1); f(0)"),
    Mishap("overflows C's stack", body="sys.setrecursionlimit(10**9); f = lambda n: [n].sort(key=f) or f(n); f(0)"),
    Mishap("fills memory up to a limit", body=_FILL, limit=_MEMORY, odd=("skipped",)),
    Mishap("has a factory that exits", factory="sys.exit(3)", odd=()),
    Mishap("has a factory that ends the process", factory="os._exit(3)", odd=()),
    Mishap("has a factory that hangs", factory="time.sleep(1000)", odd=(), others=False, options=(_FAST,)),
    Mishap("exits in its pass", body="sys.exit(3)"),
    Mishap("ends the process in its pass", body="os._exit(0)"),
    Mishap("has C code that calls exit", body="__import__('ctypes').CDLL(None).exit(0)"),
    Mishap("has C code that calls _exit", body="__import__('ctypes').CDLL(None)._exit(0)"),
    Mishap("kills its process, and what it has forked lives on", body=_FORK_AND_DIE),
    Mishap("kills its process", body="os.kill(os.getpid(), 9)"),
    Mishap("hangs in its pass", body="time.sleep(1000)", options=(_FAST,)),
    Mishap("closes every file", body="os.closerange(3, 4096)", others=False, odd=("error", "failed", "passed")),
    Mishap("changes the folder", body="os.chdir('/')", odd=("passed", "error")),
    Mishap("deletes the record", body=_DELETE, odd=("passed", "error")),
    Mishap("raises KeyboardInterrupt", body="raise KeyboardInterrupt"),
    Mishap("writes its report to a folder that takes none", options=("--parity-report=/sys/parity",), others=False),
    Mishap("no file can grow above 4 KiB, as on a full disk", limit=_SMALL_FILES, others=False),
    Mishap(
        "fills the disk of record and report",
        body="__import__('conftest').fill()",
        limit=_FULL,
        options=_REPORT_THERE,
        odd=("passed",),
        disk=True,
    ),
    Mishap(
        "fills the disk of temporary files",
        body="__import__('conftest').fill()",
        limit=_FULL_TEMPORARY,
        odd=("passed",),
        disk=True,
    ),
    Mishap(
        "fills the disk of record, report and temporary files",
        body="__import__('conftest').fill()",
        limit=_FULL_TEMPORARY,
        options=_REPORT_THERE,
        others=False,
        disk=True,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Hold the outcome of a run with a mishap.

    Attributes:
        mishap: the mishap.
        workers: the number of workers; 0 for none.
        code: the exit code; None if the run hung.
        results: the status and reason of each result, by pair.
        last: the last line that the run printed.
        wrong: what the run did wrong.
    """

    mishap: Mishap
    workers: int
    code: int | None
    results: dict[str, tuple[str, str]]
    last: str
    wrong: tuple[str, ...]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 1 MiB in memory on a folder, within the context.

    Raises:
        OSError: if this system, or this user, cannot have one.
    """
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "parity-torture", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise OSError(mounted.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # a process may still have a file there


def run(mishap: Mishap, workers: int, folder: Path) -> Outcome:
    """Run the odd pair between two sound ones, and return the outcome.

    Raises:
        OSError: if the mishap needs a small disk, and none can be made.
    """
    folder.mkdir(parents=True)
    with small_disk(folder / "small") if mishap.disk else nullcontext():
        return _run(mishap, workers, folder)


def _run(mishap: Mishap, workers: int, folder: Path) -> Outcome:
    sound = [_SOUND.format(n=n) for n in (1, 2)]
    text = _CASE.format(sound1=sound[0], sound2=sound[1], body=mishap.body, factory=mishap.factory)
    (folder / "pairs.py").write_text(text)
    if mishap.limit:
        (folder / "conftest.py").write_text(textwrap.dedent(mishap.limit) + "\n")
    code = _pytest(folder, f"-n{workers}", *mishap.options, limit=LONGEST)
    return _outcome(mishap, workers, code, folder)


def _pytest(folder: Path, *options: str, limit: float | None = None) -> int | None:
    """Run pytest in a folder, and return its exit code; None if it takes longer than ``limit`` seconds."""
    path = os.pathsep.join([str(Path(fakes.__file__).parent), *sys.path])
    command = ["-m", "pytest", "-q", "-p", "parity.plugin", "-p", "no:cacheprovider", "pairs.py", *options]
    process = forked.begun(command, folder, "out", PYTHONPATH=path, PYTEST_ADDOPTS="-p no:hypothesispytest")
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def _outcome(mishap: Mishap, workers: int, code: int | None, folder: Path) -> Outcome:
    size = (folder / "out").stat().st_size
    with (folder / "out").open("rb") as output:
        output.seek(max(0, size - 4000))
        printed = output.read().decode(errors="replace")
    places = re.findall(r"^record: (.*)$", printed, re.MULTILINE)
    file = Path(places[-1].strip()) if places else folder / "reports" / "parity.jsonl"
    found = record.read(file).results if file.exists() and file.stat().st_size else ()
    results: dict[str, tuple[str, str]] = {}
    for each in sorted(found, key=lambda each: -WORST_FIRST.index(each.status)):
        results[each.case] = (each.status, each.reason)
    wrong = ["the run hangs"] if code is None else []
    wrong += ["an internal error of pytest"] if "INTERNALERROR" in printed else []
    wrong += ["a pair has two results"] if len(found) != len(results) else []
    odd = results.get("odd", ("", ""))[0]
    if mishap.others and workers:  # without workers, the run may end with the odd pair
        wrong += [f"{name} has no verdict" for name in ("sound1", "sound2") if results.get(name, ("",))[0] != "passed"]
        wrong += [f"the odd pair is {odd or 'without a result'}"] if odd not in (mishap.odd or ("",)) else []
    bad = {status for status, _ in results.values()} & {"failed", "error"}
    if code == 0:
        wrong += [f"exit code 0 though a pair {' and '.join(bad)}"] if bad else []
        wrong += ["exit code 0 though a pair has no result"] if len(results) < 3 else []
    wrong += ["a traceback of parity's own"] if "parity/plugin/" in printed and "Traceback" in printed else []
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    return Outcome(mishap, workers, code, results, last, tuple(wrong))


_SOAKED = """
import gc, json, tracemalloc
from pathlib import Path
import fakes, pytest

fakes.install(pytest.MonkeyPatch())
ended, kept = 0, []


def pytest_configure(config):
    tracemalloc.start()


def pytest_runtest_logfinish(nodeid, location):
    global ended
    ended += 1
    if ended in ({first}, {last}):
        gc.collect()
        sizes = {{each.traceback[0].filename: each.size for each in tracemalloc.take_snapshot().statistics("filename")}}
        kept.append((sum(sizes.values()), sum(size for name, size in sizes.items() if "_pytest" in name)))
        Path("kept.json").write_text(json.dumps(kept))
"""
_MANY = """
import parity


@parity.pair("sound", sizes=[dict(n=n) for n in range({sound})], precisions=["fp32"])
def sound(te, n): ...


@parity.pair("fails", sizes=[dict(n=n) for n in range({fail})], precisions=["fp32"])
def fails(te, n): ...
"""


@dataclass(frozen=True)
class Soak:
    """Hold the cost of many results.

    Attributes:
        megabytes: the record's size in MiB.
        kept: the bytes of Python memory that a run keeps for each result in its last third.
        by_pytest: the part of these bytes that pytest's own code has allocated.
    """

    megabytes: float
    kept: float
    by_pytest: float


def soak(results: int, folder: Path) -> Soak:
    """Compare this many items in one process, with stand-ins for the comparison, and read the record back."""
    folder.mkdir(parents=True, exist_ok=True)
    fail, first = results // 100, results * 2 // 3
    (folder / "pairs.py").write_text(_MANY.format(sound=results - fail, fail=fail))
    (folder / "conftest.py").write_text(_SOAKED.format(first=first, last=results))
    code = _pytest(folder, "-n0")
    assert code == 1, code
    file = folder / "reports" / "parity.jsonl"
    found = record.read(file)
    assert len({each.item for each in found.results}) == len(found.results) == results
    assert not found.left_out
    assert f"{fail} of {results} items failed" in (folder / "reports" / "parity.md").read_text()
    before, after = json.loads((folder / "kept.json").read_text())
    kept, by_pytest = ((after[i] - before[i]) / (results - first) for i in (0, 1))
    return Soak(file.stat().st_size / 2**20, kept, by_pytest)
