"""A function runs on every rank, and a rank that fails ends the launch with its place."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parity.ranks import launch as launching
from parity.ranks.launch import RankFailure, RanksFailed, launch


def _sum_of_ranks(factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() * factor], dtype=torch.float32)
    dist.all_reduce(total)
    print("summed")
    return dist.get_rank(), total


def test_every_rank_s_result_is_returned_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    results = launch(_sum_of_ranks, 3, (10,))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.tensor([30.0])) for _, total in results)
    assert capfd.readouterr().out.splitlines() == [f"[rank {rank}] summed" for rank in range(3)]


def _raise() -> None:
    raise ValueError("no such shard")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(3)


def _crash() -> None:
    signal.raise_signal(signal.SIGSEGV)


def _hang() -> None:
    dist.recv(torch.zeros(1), 0)


def _return_what_cannot_be_sent() -> Any:
    return lambda: None


def _alone(function: Any) -> Any:
    """Call the function on rank 1, while rank 0 waits for it."""
    if dist.get_rank() == 1:
        return function()
    return dist.barrier()


@pytest.mark.parametrize(
    ("function", "how", "what", "where"),
    [
        (_raise, "raised", "ValueError: no such shard", "in _raise"),
        (_die, "died", "by signal SIGKILL", ""),
        (_leave, "died", "with exit code 3", ""),
        (_crash, "died", "by signal SIGSEGV", "in _crash"),
        (_return_what_cannot_be_sent, "raised", "pickle", ""),
    ],
)
def test_a_rank_that_fails_ends_the_launch(function: Any, how: str, what: str, where: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(_alone, 2, (function,), timeout=60.0)
    first = caught.value.failures[0]
    assert (first.rank, first.how) == (1, how)
    assert what in first.what
    assert where in first.where
    assert str(first) in str(caught.value)


def test_ranks_that_hang_are_ended_and_say_where_they_are() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(_alone, 2, (_hang,), timeout=3.0)
    by_rank = {failure.rank: failure for failure in caught.value.failures}
    assert {failure.how for failure in by_rank.values()} == {"hung"}
    assert "in barrier" in by_rank[0].where
    assert "in _hang" in by_rank[1].where


def _print_without_end() -> None:
    while True:
        os.write(1, b"x" * 4095 + b"\n")
        time.sleep(1e-4)


def test_a_rank_that_prints_without_end_fills_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    shorten = launching._shorten
    monkeypatch.setattr(launching, "_LOOKS", 0.1)
    monkeypatch.setattr(launching, "_MOST_PRINTED", 200_000)
    monkeypatch.setattr(launching, "_KEPT", 100_000)

    def shorten_and_look(file: Path) -> None:
        shorten(file)
        sizes.append(launching._size(file))

    monkeypatch.setattr(launching, "_shorten", shorten_and_look)
    with pytest.raises(RanksFailed) as caught:
        launch(_alone, 2, (_print_without_end,), timeout=3.0)
    by_rank = {failure.rank: failure for failure in caught.value.failures}
    assert by_rank[1].how == "hung"
    assert "in _print_without_end" in by_rank[1].where
    assert 100_000 <= max(sizes) < 1_000_000  # it prints some 20 MB in all, and the rest of what it does meanwhile


def _process_id() -> int:
    return os.getpid()


def test_nothing_is_left_running() -> None:
    def runs(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    processes = launch(_process_id, 2)
    deadline = time.monotonic() + 10.0
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, processes))


def test_a_failure_reads_as_a_sentence_and_a_place() -> None:
    failure = RankFailure(1, "died", "by signal SIGKILL", "")
    assert str(RanksFailed(2, [failure])) == "1 of 2 ranks failed\nrank 1 died: by signal SIGKILL"
