"""One comparison beside others or alone, and again if memory runs out; and the lock that makes it so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import fakes
import pytest

from parity.plugin import attempt as attempts
from parity.plugin.attempt import DeviceLock
from parity.plugin.options import Workplace
from parity.result import Result

FITS = fakes.result()
OUT_OF_MEMORY = fakes.result(status="error", reason="no memory", tensors=(), device_error="out of memory")
BESIDE = Workplace("gw0", Path("nowhere"), share=100)


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the device is taken, in turn."""
    taken: list[str] = []

    class Lock:
        def __init__(self, path: Path, release: Callable[[], None]) -> None: ...

        def shared(self) -> nullcontext[None]:
            taken.append("shared")
            return nullcontext()

        def alone(self) -> nullcontext[None]:
            taken.append("alone")
            return nullcontext()

    monkeypatch.setattr("parity.plugin.attempt.DeviceLock", Lock)
    return taken


def attempt(need: int | None, *results: Result, workplace: Workplace = BESIDE) -> Result:
    to_come = iter(results)
    return attempts.attempt(lambda: next(to_come), nullcontext, lambda: need, workplace)


def test_an_item_shares_its_device(access: list[str]) -> None:
    assert attempt(100, FITS) == FITS
    assert access == ["shared"]


def test_an_item_that_needs_more_than_a_workers_share_runs_alone(access: list[str]) -> None:
    assert attempt(101, FITS) == FITS
    assert access == ["alone"]


def test_an_item_of_unknown_need_shares_its_device(access: list[str]) -> None:
    attempt(None, FITS)
    assert access == ["shared"]


def test_an_item_that_runs_out_of_memory_runs_alone_once_more_and_says_so(access: list[str]) -> None:
    result = attempt(1, OUT_OF_MEMORY, FITS)
    assert result.passed
    assert result.notes == (attempts.RETRIED,)
    assert access == ["shared", "alone"]


def test_an_item_that_runs_out_of_memory_twice_is_skipped(access: list[str]) -> None:
    result = attempt(3 * 2**30, OUT_OF_MEMORY, OUT_OF_MEMORY)
    assert result.status == "skipped"
    assert "it needs about 3.0 GiB" in result.reason
    assert result.reason.endswith("no memory")


def test_a_wrong_port_is_not_tried_again(access: list[str]) -> None:
    wrong = fakes.result(margin=9.0)
    assert attempt(1, wrong) == wrong


def test_without_workers_there_is_nothing_to_wait_for(access: list[str]) -> None:
    assert attempt(1, OUT_OF_MEMORY, FITS, workplace=Workplace()).passed
    assert access == []


def enter(lock: Callable[[], object], order: list[str], name: str) -> threading.Thread:
    def run() -> None:
        with lock():  # type: ignore[attr-defined]
            order.append(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_many_share_a_device(tmp_path: Path) -> None:
    order: list[str] = []
    with DeviceLock(tmp_path / "device", list).shared():
        enter(DeviceLock(tmp_path / "device", list).shared, order, "second").join(10)
    assert order == ["second"]


def test_who_waits_to_be_alone_goes_before_those_who_come_later(tmp_path: Path) -> None:
    order: list[str] = []
    released: list[str] = []
    first = DeviceLock(tmp_path / "device", lambda: released.append("memory"))
    with first.shared():
        alone = enter(DeviceLock(tmp_path / "device", list).alone, order, "alone")
        alone.join(0.2)
        later = enter(DeviceLock(tmp_path / "device", list).shared, order, "later")
        later.join(0.2)
        assert order == []
    alone.join(10)
    later.join(10)
    assert order == ["alone", "later"]
    assert released == ["memory"]


def test_memory_is_kept_while_nobody_waits_to_be_alone(tmp_path: Path) -> None:
    released: list[str] = []
    with DeviceLock(tmp_path / "device", lambda: released.append("memory")).shared():
        pass
    assert released == []


def test_who_waits_for_another_to_be_done_alone_keeps_no_memory_meanwhile(tmp_path: Path) -> None:
    order: list[str] = []
    released: list[str] = []
    with DeviceLock(tmp_path / "device", list).alone():
        later = enter(DeviceLock(tmp_path / "device", lambda: released.append("memory")).shared, order, "later")
        later.join(0.2)
        assert (order, released) == ([], ["memory"])
    later.join(10)
    assert order == ["later"]
