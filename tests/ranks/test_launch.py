"""Ranks: a function runs on each, a rank that fails ends the launch, and the parts of a tensor form the whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import parity
from parity.ranks import launch as launching
from parity.ranks.launch import RankFailure, RanksFailed, launch
from parity.ranks.layout import DIVIDING, Degrees, degrees, held_by, over, part, places

# A function runs on every rank, and a rank that fails ends the launch, which says where.


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
    shorten = launching._shorten_file
    monkeypatch.setattr(launching, "_LOOKS", 0.1)
    monkeypatch.setattr(launching, "_MOST_PRINTED", 200_000)
    monkeypatch.setattr(launching, "_KEPT", 100_000)

    def shorten_and_look(file: Path) -> None:
        shorten(file)
        sizes.append(launching._get_file_size(file))

    monkeypatch.setattr(launching, "_shorten_file", shorten_and_look)
    with pytest.raises(RanksFailed) as caught:
        launch(_alone, 2, (_print_without_end,), timeout=3.0)
    by_rank = {failure.rank: failure for failure in caught.value.failures}
    assert by_rank[1].how == "hung"
    assert "in _print_without_end" in by_rank[1].where
    assert 100_000 <= max(sizes) < 1_000_000  # it prints some 20 MB in all, and then what it does meanwhile


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


# The ranks' parts of a tensor form the whole, with each element once, however the tensor is divided.


SIZES = st.sampled_from([1, 2, 4])
SPLITS = st.lists(
    st.tuples(st.sampled_from(DIVIDING), st.sampled_from([0, 1, -1]), st.sampled_from([1, 2]), st.booleans()),
    max_size=2,
    unique_by=lambda one: one[0],
)


@given(SIZES, SIZES, SIZES, SPLITS)
def test_parts_are_the_whole(tp, dp, cp, splits):
    made = Degrees(tp=tp, dp=dp, cp=cp)
    split = tuple(over(a, d, blocks=1 if balanced else b, balanced=balanced) for a, d, b, balanced in splits)
    whole = torch.randn(64, 64)
    times = torch.zeros(64 * 64, dtype=torch.int64)
    for rank in range(made.count):
        at = places((64, 64), split, made, rank)
        assert torch.equal(part(whole, split, made, made.place(rank)), whole.flatten()[at])
        times[at.flatten()] += 1
    copies = made.count
    for one in split:
        copies //= made.of(one.axis)
    assert torch.equal(times, torch.full_like(times, copies))


def test_neighbours_are_tensor_parallel():
    made = Degrees(tp=2, dp=3)
    assert [made.place(rank)["tp"] for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert made.peers("tp") == [[0, 1], [2, 3], [4, 5]]
    assert made.peers("dp") == [[0, 2, 4], [1, 3, 5]]


def test_a_balanced_rank_holds_a_part_from_the_front_and_one_from_the_back():
    made, split = Degrees(cp=2), (over("cp", 0, balanced=True),)
    assert part(torch.arange(4), split, made, made.place(0)).tolist() == [0, 3]
    assert part(torch.arange(4), split, made, made.place(1)).tolist() == [1, 2]


def test_a_rank_holds_its_part_of_each_block():
    made, split = Degrees(tp=2), (over("tp", 0, blocks=2),)
    assert part(torch.arange(8), split, made, made.place(1)).tolist() == [2, 3, 6, 7]


WRONG = {
    "no dict": ([2], "ranks must be a dict"),
    "another axis": (dict(sp=2), "ranks must be a dict"),
    "no number": (dict(tp="2"), "tp must be a whole number"),
    "one rank": (dict(tp=1), "there must be from 2"),
    "too many": (dict(tp=64, dp=2), "there must be from 2"),
    "sequences over one rank": (dict(dp=2, sequence_parallel=True), "tp is 1"),
}


@pytest.mark.parametrize(("asked", "told"), WRONG.values(), ids=WRONG)
def test_what_is_no_number_of_ranks_is_told(asked, told):
    with pytest.raises(parity.UserError, match=told):
        degrees(asked)


@pytest.mark.parametrize(
    ("asked", "label"),
    [
        (dict(tp=2), "tp2"),
        (dict(tp=2, sequence_parallel=True), "tp2-sp"),
        (dict(dp=2, tp=4, cp=2), "tp4xcp2xdp2"),
    ],
)
def test_items_are_called_by_their_ranks(asked, label):
    assert degrees(asked).label == label


def test_a_dimension_that_does_not_divide_is_told():
    with pytest.raises(parity.UserError, match="does not divide into 2 parts"):
        part(torch.empty(3), [over("tp")], Degrees(tp=2), Degrees(tp=2).place(0))


def test_experts_are_counted_over_ranks_and_wrappers_left_out():
    made = Degrees(ep=2)
    module = torch.nn.Module()
    module.module = torch.nn.ParameterDict({"weight0": torch.empty(2), "weight1": torch.empty(2)})
    shapes = {f"weight{i}": (2,) for i in range(4)}
    held = held_by(module, shapes, {}, made, made.place(1))
    assert {name: one.whole for name, one in held.items()} == {"module.weight0": "weight2", "module.weight1": "weight3"}


def test_a_parameter_whose_part_is_not_known_is_told_with_what_to_say():
    made = Degrees(tp=2)
    with pytest.raises(parity.UserError, match=r"weight is .* say how it is split"):
        held_by(torch.nn.Linear(4, 2), {"weight": (4, 4), "bias": (2,)}, {}, made, made.place(0))
