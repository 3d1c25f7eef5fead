"""Collect NVIDIA's tests, draw a sample, and run it: each file in a process of its own, and each test within limits."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parity
from lab.nvidia_tests.checkout import TESTS, Job
from lab.nvidia_tests.host import READ_AT_IMPORT
from parity.machine.process import ended_with_this

# How many tests one process runs when all are run. A file with more is split, so that several processors can share it.
_PORTION = 60
# How many tests of a file are tried for each one wanted in a sample, before the rest is taken to be skipped.
_TRIES = 25
# Limit in seconds for a process between tests, while it imports, collects or ends.
_BETWEEN_TESTS = 300.0
_LOOK_EVERY = 0.2
# Processor time that shows that a process does more than wait for others. A launcher that polls its ranks takes less.
_MOVES = 0.1


@dataclass(frozen=True)
class Limits:
    """The limits of a test, including all processes that it starts.

    Attributes:
        seconds: how much processor time it may take, and how long it may stand still.
        gibibytes: how much resident memory it may take.
    """

    seconds: float = 120.0
    gibibytes: float = 6.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        gpu: the emulated GPU.
        job: the name of the file and of the way in which NVIDIA runs it.
        test: pytest's name for the test; the file's name if the file could not be read.
        outcome: ``passed``, ``failed``, ``skipped`` or ``beyond`` (a limit).
        why: why it did not pass.
        seconds: the processor time of the test and of all processes that it started.
        smaller: which sizes were reduced.
        after_others: why it failed after other tests, if it passed by itself.
    """

    gpu: str
    job: str
    test: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    smaller: str = ""
    after_others: str = ""


@dataclass(frozen=True)
class Collected:
    """The tests of a file on a GPU, or why pytest could not collect it."""

    gpu: str
    job: Job
    tests: tuple[str, ...] = ()
    unread: Outcome | None = None


@dataclass(frozen=True)
class File:
    """A file whose tests a process collects on a GPU."""

    gpu: str
    job: Job


@dataclass(frozen=True)
class Portion:
    """The tests of a file that a process runs on a GPU.

    Attributes:
        gpu: the emulated GPU.
        job: how NVIDIA runs the file.
        tests: the tests, in the order in which they are run.
        wanted: how many of them to run, not counting those that TE's tests skip.
        limits: the limits of a test.
    """

    gpu: str
    job: Job
    tests: tuple[str, ...]
    wanted: int
    limits: Limits


def files_of(jobs: Sequence[Job], gpus: Sequence[str]) -> list[File]:
    """Return the files to collect, in an order in which processes that have imported TE can be reused."""
    return sorted((File(gpu, job) for gpu in gpus for job in jobs), key=lambda file: _host_of(file.gpu, file.job))


def drawn(
    collected: Sequence[Collected],
    deselected: Mapping[tuple[str, str], str],
    sample: int | None,
    seed: int,
    limits: Limits,
) -> list[Portion]:
    """Return which tests to run, in an order in which processes that have imported TE can be reused.

    Args:
        collected: the tests on all GPUs.
        deselected: by job and test, why no CPU can run it.
        sample: how many tests to draw; None for all. Each file contributes one, and more in proportion to its number
            of tests. They are drawn by hashes of their names. If one is skipped, the file's next one is run instead.
        seed: the seed of the sample.
        limits: the limits of a test.
    """
    left = {
        (each.gpu, each.job): [test for test in each.tests if (each.job.name, test) not in deselected]
        for each in collected
    }
    least = {key: min(1, len(tests)) for key, tests in left.items()}
    total = sum(map(len, left.values()))
    share = max(0, (sample or 0) - sum(least.values())) / total if total else 0.0
    portions = []
    for (gpu, job), tests in left.items():
        if sample is None:
            parts = [tuple(tests[at : at + _PORTION]) for at in range(0, len(tests), _PORTION)]
            portions += [Portion(gpu, job, part, len(part), limits) for part in parts]
        elif tests:
            wanted = min(len(tests), least[gpu, job] + round(share * len(tests)))
            ordered = sorted(tests, key=lambda test, job=job: _hashed(seed, job.name, test))  # type: ignore[misc]
            portions.append(Portion(gpu, job, tuple(ordered[: _TRIES * wanted]), wanted, limits))
    return sorted(portions, key=lambda portion: (_starts_ranks(portion.job), *_host_of(portion.gpu, portion.job)))


def _starts_ranks(job: Job) -> bool:
    """Return whether the tests of a file start processes that import TE. These take longest, and so come last."""
    return "distributed/" in job.file or "with_cp" in job.file


def _hashed(*words: object) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


def collect(root: Path, folder: Path, file: File) -> Collected:
    """Return the tests of a file of a checkout. ``folder`` is for pytest's output."""
    gpu, job = file.gpu, file.job
    lines = _Lines(_new_file(folder))
    with _hosts(root).begun(gpu, job, lines.path, [job.file], ("--collect-only", *job.arguments)) as process:
        _watch(process, lines, Limits(_BETWEEN_TESTS))
    if tests := tuple(test for line in lines.every for test in line.get("collected", ())):
        return Collected(gpu, job, tests)
    unread = (line for line in lines.every if line.get("unread") == job.file)
    said = next(unread, {"outcome": "failed", "why": "no test was collected"})
    return Collected(gpu, job, unread=Outcome(gpu, job.name, job.file, said["outcome"], said["why"]))


def run(root: Path, folder: Path, portion: Portion) -> list[Outcome]:
    """Run tests of a checkout. If one kills its process, another process goes on with the remaining tests.

    A test that fails after others is run again by itself, since tests leave state behind and NVIDIA's order differs.
    """
    gpu, job = portion.gpu, portion.job
    _prepare(root, folder, gpu, job)
    found: dict[str, Outcome] = {}
    while left := [test for test in portion.tests if test not in found]:
        wanted = portion.wanted - _not_skipped(found.values())
        if wanted <= 0:
            break
        lines = _Lines(_new_file(folder))
        chosen = lines.path.with_suffix(".txt")
        chosen.write_text("\n".join(left), encoding="utf-8")
        options = (*job.arguments, "--nvidia-tests", str(chosen), "--nvidia-wanted", str(wanted))
        with _hosts(root).begun(gpu, job, lines.path, [job.file], options) as process:
            ended = _watch(process, lines, portion.limits)
        new = {line["test"]: Outcome(gpu, job.name, **line) for line in lines.every if "test" in line}
        missing = [test for test in left if test not in new]
        if missing and _not_skipped(new.values()) < wanted:  # the test that was running, or the first if none was
            begun = [line["begun"] for line in lines.every if "begun" in line]
            blamed = begun[-1] if begun and begun[-1] in missing else missing[0]
            new[blamed] = Outcome(gpu, job.name, blamed, *ended)
        found |= new
    for failed in [one for one in found.values() if one.outcome == "failed" and len(found) > 1]:
        (again,) = run(root, folder, dataclasses.replace(portion, tests=(failed.test,), wanted=1))
        after_others = failed.why if again.outcome == "passed" else ""
        found[failed.test] = dataclasses.replace(again, after_others=after_others)
    return list(found.values())


def _not_skipped(outcomes: Iterable[Outcome]) -> int:
    return sum(one.outcome != "skipped" for one in outcomes)


def _prepare(root: Path, folder: Path, gpu: str, job: Job) -> None:
    """Run what NVIDIA's script runs before the file's tests, once for each GPU."""
    done = folder / f"prepared-{gpu}-{Path(job.file).stem}.txt"
    if job.before and not done.exists():
        command = [sys.executable, "-m", "parity", "exec", job.file, *job.before]
        environment = environment_of(root, gpu, job.variables)
        made = subprocess.run(
            command, cwd=root / TESTS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_bytes(made.stdout)


def _host_of(gpu: str, job: Job) -> tuple[str, tuple[tuple[str, str], ...]]:
    return gpu, tuple((name, value) for name, value in job.variables if name in READ_AT_IMPORT)


def environment_of(root: Path, gpu: str, variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the environment of a process that runs tests of the checkout on an emulated GPU."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NVTE_", "PYTEST_"))},
        "OMP_NUM_THREADS": "1",
        "PARITY_EMULATED_GPU": gpu,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",  # for any pytest that tests start
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(parity.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "TE_PATH": str(root),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",  # as in NVIDIA's container
        **dict(variables),
    }


class _Hosts:
    """Keep a host, which has imported TE and forks a process for each file; replace it for another GPU or variables."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key: object = None
        self._process: subprocess.Popen[bytes] | None = None
        self._until_end = ExitStack()

    @contextmanager
    def begun(
        self, gpu: str, job: Job, record: Path, files: Sequence[str], options: Sequence[str]
    ) -> Iterator[_Running]:
        """Run pytest on these files, and wait until it has ended."""
        key = _host_of(gpu, job)
        if self._process is None or self._key != key or self._process.poll() is not None:
            self._end()
            self._key, self._process = key, self._new(*key)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [*files, *options, "-q", "-p", "lab.nvidia_tests.plugin"]
        arguments += ["-p", "no:cacheprovider", f"--rootdir={self._root / TESTS}", f"--nvidia-record={record}"]
        order = {
            "arguments": arguments,
            "variables": dict(job.variables),
            "folder": str(self._root / TESTS),
            "log": str(record.with_suffix(".log")),
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        running = _Running(int(self._process.stdout.readline()), self._process)
        yield running
        running.wait()

    def _new(self, gpu: str, variables: Iterable[tuple[str, str]]) -> subprocess.Popen[bytes]:
        environment = environment_of(self._root, gpu, variables)
        command = [sys.executable, "-m", "lab.nvidia_tests.host"]
        # Unbuffered, because ``select`` would not see an answer that lies in a buffer.
        process = subprocess.Popen(
            *(command, 0), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._until_end.enter_context(ended_with_this(process))
        return process

    def _end(self) -> None:
        """End the host, all of whose processes have ended."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        self._until_end.close()


@functools.cache
def _hosts(root: Path) -> _Hosts:
    """Return the hosts of this process, which runs one portion at a time."""
    return _Hosts(root)


class _Running:
    """A process that the host has forked, and that has ended when the host says so."""

    def __init__(self, number: int, host: subprocess.Popen[bytes]) -> None:
        assert host.stdout is not None
        self.number, self.host, self._said = number, host.pid, host.stdout
        self.code: int | None = None

    def ends_within(self, seconds: float) -> bool:
        if self.code is None and select.select([self._said], [], [], seconds)[0]:
            self.code = int(self._said.readline())
        return self.code is not None

    def wait(self) -> None:
        while not self.ends_within(60.0):
            pass


def _new_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(suffix=".jsonl", dir=folder)
    os.close(descriptor)
    return Path(name)


class _Lines:
    """A file of JSON lines that other processes add to. A line that is cut short is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def every(self) -> list[dict[str, Any]]:
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


# Watching a process from outside, since a test that hangs in a kernel or takes all memory cannot watch itself.


def _watch(process: _Running, lines: _Lines, limits: Limits) -> tuple[str, str, float]:
    """Wait until a process ends, and kill it if one of its tests exceeds the limits.

    The host's times include those of its children that have ended, whether of this file or of others.

    Returns:
        The outcome of a test that the process did not finish, why, and its processor time in seconds.
    """
    size, allowed = -1, _BETWEEN_TESTS
    seconds = before = busy = sum(each.seconds for each in _tree(process.host))
    moved = time.monotonic()
    why = ""
    while not why and not process.ends_within(_LOOK_EVERY):
        tree = list(_tree(process.host))
        seconds = sum(each.seconds for each in tree)
        memory = sum(each.memory for each in tree if each.number != process.host) / 2**30
        if size != (size := lines.path.stat().st_size):
            before, moved = seconds, time.monotonic()
            allowed = limits.seconds if _is_at_a_test(lines) else max(_BETWEEN_TESTS, limits.seconds)
        if abs(seconds - busy) > _MOVES:
            busy, moved = seconds, time.monotonic()
        if memory > limits.gibibytes:
            why = f"more than {limits.gibibytes:g} GiB"
        elif seconds - before > allowed:
            why = f"more than {allowed:g} s of processor time"
        elif time.monotonic() - moved > allowed:
            why = f"stood still for {allowed:g} s"
    for each in _tree(process.host):  # even if the process has ended, since it may have left others behind
        if each.number != process.host:
            with suppress(ProcessLookupError):
                os.kill(each.number, signal.SIGKILL)
    if why:
        return "beyond", why, seconds - before
    said = _last_words(lines.path.with_suffix(".log"))
    return "failed", f"the process ended with code {process.code}: {said}", seconds - before


def _is_at_a_test(lines: _Lines) -> bool:
    return bool(every := lines.every) and "begun" in every[-1]


def _last_words(log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return said[-1][:200] if said else "it said nothing"


@dataclass(frozen=True)
class _Process:
    number: int
    seconds: float = 0.0
    memory: int = 0


def _tree(root: int) -> Iterator[_Process]:
    """Yield a process and all that it started, with processor time and resident memory from Linux's ``/proc``."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    parents, found = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        number = int(folder.name)
        parents[number] = int(words[1])
        found[number] = _Process(number, sum(map(int, words[11:15])) / tick, int(words[21]) * page)
    for number in found:
        above = number
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root:
            yield found[number]
