"""An item over ranks takes the cores of as many workers, every item gets its turn, and a dead worker holds no slots."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from plugin_runs import run_with_workers, write

from parity.plugin.item import Slots

pytest_plugins = ["pytester"]

LONG = 60.0  # seconds, which only a failing test waits


class Holder:
    """A thread that takes slots, and keeps them until it is told to free them."""

    def __init__(self, folder: Path, count: int, wanted: int) -> None:
        self.has, self._go = threading.Event(), threading.Event()

        def run() -> None:
            with Slots(folder, count).taken(wanted):
                self.has.set()
                self._go.wait(LONG)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Free the slots as soon as it has them."""
        assert self.has.wait(LONG)
        self._go.set()
        self._thread.join(LONG)


@pytest.mark.parametrize(
    ("count", "held", "wanted", "at_once"),
    [
        (2, [1], 1, True),
        (2, [1], 2, False),
        (2, [2], 1, False),
        (4, [2], 2, True),
        (4, [1, 1], 2, True),
        (4, [1, 2], 2, False),
        (4, [2], 1, True),
        (2, [1], 4, False),  # as many as there are
        (2, [4], 1, False),
    ],
)
def test_an_item_begins_when_as_many_slots_are_free_as_it_has_processes(
    tmp_path: Path, count: int, held: Sequence[int], wanted: int, at_once: bool
) -> None:
    holders = [Holder(tmp_path, count, own) for own in held]
    assert all(holder.has.wait(LONG) for holder in holders)
    late = Holder(tmp_path, count, wanted)
    assert late.has.wait(LONG if at_once else 0.2) == at_once
    for holder in (*holders, late):
        holder.let_go()


def test_who_wants_many_goes_before_those_who_come_later(tmp_path: Path) -> None:
    first = Holder(tmp_path, 2, 1)
    assert first.has.wait(LONG)
    many = Holder(tmp_path, 2, 2)
    assert not many.has.wait(0.2)
    later = Holder(tmp_path, 2, 1)
    assert not later.has.wait(0.2)
    first.let_go()
    assert many.has.wait(LONG)
    assert not later.has.wait(0.2)
    many.let_go()
    later.let_go()


def test_slots_are_never_more_than_there_are_and_everybody_has_them_in_the_end(tmp_path: Path) -> None:
    count, running, most, done = 3, 0, 0, []
    lock = threading.Lock()

    def worker(number: int) -> None:
        nonlocal running, most
        wants = random.Random(number)
        for _ in range(20):
            wanted = wants.randint(1, 4)
            with Slots(tmp_path, count).taken(wanted):
                with lock:
                    running += min(wanted, count)
                    most = max(most, running)
                with lock:
                    running -= min(wanted, count)
        done.append(number)

    threads = [threading.Thread(target=worker, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(done) == list(range(6))
    assert most <= count


DIES = """
import os, signal, sys
from pathlib import Path
from parity.plugin.item import Slots
with Slots(Path(sys.argv[1]), 2).taken(2):
    print("has them", flush=True)
    if not os.fork():  # what it has forked holds none of them
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_holds_none(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"has them\n"
    assert worker.wait(LONG) == -signal.SIGKILL
    Holder(tmp_path, 2, 2).let_go()
    os.killpg(worker.pid, signal.SIGKILL)


# In a run, no other item is compared while one computes over as many ranks as there are workers.


PAIRS = """
    import time
    from pathlib import Path

    import fakes
    import parity
    from parity import comparison
    from parity.trainings import parallel

    def told(kind, compare):
        def run(*arguments, **options):
            tell(f"begin {kind}")
            result = compare(*arguments[:6])
            time.sleep(0.02)
            tell(f"end {kind}")
            return result
        return run

    def tell(what):
        with Path("told.txt").open("a") as file:
            file.write(what + "\\n")

    comparison.judge_at = told("alone", fakes.judge_at)
    parallel.compare_over_ranks_at = told("over ranks", lambda *at: fakes.judge_at(*at).result)

    @parity.pair("pair", sizes=[dict(n=n) for n in range(1, 9)], precisions=["fp32"], ranks=[dict(tp=2)])
    def pair(te, n, ranks): ...
"""


@pytest.mark.usefixtures("stand_ins")
def test_in_a_run_the_others_wait_while_an_item_computes_over_as_many_ranks(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    run_with_workers(pytester, 2, "my_pairs.py").assert_outcomes(passed=16)
    told = (pytester.path / "told.txt").read_text().splitlines()
    assert sorted(told) == sorted(8 * ["begin alone", "end alone", "begin over ranks", "end over ranks"])
    for at, line in enumerate(told):
        if line == "begin over ranks":
            assert told[at + 1] == "end over ranks"
            assert told[:at].count("begin alone") == told[:at].count("end alone")
