"""Ranks' parts of a tensor are the whole, each element once, whatever divides it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parity
from parity.ranks.layout import DIVIDING, Degrees, degrees, held_by, over, part, places

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
