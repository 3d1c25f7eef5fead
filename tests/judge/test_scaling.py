"""Delayed scaling: an amax history continues from step to step, and the scale follows from it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.te.state import Kept, Slot, recasts
from parity.trainings.step_verdicts import _moved_on, wrong_scaling

LARGEST = 448.0


def kept(history, scale, role="input", algo="max", margin=0, weight=None):
    recipe = SimpleNamespace(amax_compute_algo=algo, scaling_factor_compute_algo=None, margin=margin)
    rows = torch.tensor(history)
    return Kept(Slot("", ("fwd", 0), role, ("w",), rows, torch.tensor(scale), recipe, LARGEST), rows, scale, weight)


def titles(before, after, expected=None, is_plain_step=True):
    multiplied = {} if expected is None else {("w", False): expected}
    found = wrong_scaling([(before, after)], multiplied, is_plain_step)
    return found.title if found else ""


# The first row is the amax of the current pass; then come the earlier ones, the oldest first.
WAS = [0.0, 0.0, 0.0, 4.0, 2.0]

RIGHT = {
    "a step": (WAS, [0.0, 0.0, 4.0, 2.0, 3.0], 112.0),
    "two micro-batches": (WAS, [0.0, 4.0, 2.0, 3.0, 1.0], 112.0),
    "an oldest amax counts once more": ([0.0, 8.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 2.0, 3.0], 56.0),
    "more micro-batches than the history is long": (WAS, [0.0, 1.0, 2.0, 3.0, 2.5], 112.0),
    "an amax of a pass without gradients waits": (WAS, [5.0, 0.0, 4.0, 2.0, 3.0], 112.0),
    "the first step": ([0.0] * 5, [0.0, 0.0, 0.0, 0.0, 3.0], LARGEST / 3),
}


@pytest.mark.parametrize(("was", "now", "scale"), RIGHT.values(), ids=RIGHT)
def test_a_history_that_goes_on_is_right(was, now, scale):
    assert titles(kept(was, 112.0), kept(now, scale), expected=3.0) == ""


WRONG = {
    "the scale stays": (WAS, [0.0, 0.0, 4.0, 2.0, 8.0], 112.0, "scale-not-updated"),
    "the scale is 1": (WAS, [0.0, 0.0, 4.0, 2.0, 3.0], 1.0, "scale-not-updated"),
    "the history stays": (WAS, WAS, 112.0, "amax-not-recorded"),
    "the amax waits for ever": (WAS, [8.0, *WAS[1:]], 112.0, "amax-not-recorded"),
    "nothing was ever recorded": ([0.0] * 5, [0.0] * 5, 1.0, "amax-not-recorded"),
    "the history is new": (WAS, [0.0, 0.0, 0.0, 0.0, 3.0], LARGEST / 3, "amax-history-lost"),
    "the history is new in each step": ([0.0] * 4 + [3.0], [0.0] * 4 + [3.0], LARGEST / 3, "amax-history-lost"),
    "the history is another's": (WAS, [0.0, 0.0, 7.0, 2.0, 3.0], 64.0, "amax-history-lost"),
    "the history is shorter": (WAS, [0.0, 2.0, 3.0], 112.0, "amax-history-lost"),
    "the amax is another's": (WAS, [0.0, 0.0, 4.0, 2.0, 0.1], 112.0, "amax-of-another-tensor"),
}


@pytest.mark.parametrize(("was", "now", "scale", "title"), WRONG.values(), ids=WRONG)
def test_a_history_or_a_scale_that_is_wrong_is_told(was, now, scale, title):
    assert titles(kept(was, 112.0), kept(now, scale), expected=3.0) == title


def test_a_tensor_that_no_gemm_reads_has_no_amax():
    assert titles(kept([0.0] * 5, 1.0, "output"), kept([0.0] * 5, 1.0, "output")) == ""


def test_a_port_s_own_step_may_scale_its_loss():
    was, now = kept(WAS, 112.0), kept([0.0, 0.0, 4.0, 2.0, 300.0], LARGEST / 300)
    assert titles(was, now, expected=3.0, is_plain_step=False) == ""
    assert titles(was, now, expected=3.0) == "amax-of-another-tensor"


@pytest.mark.parametrize(("amax", "title"), [(3.0, ""), (3.02, ""), (3.1, "amax-of-another-tensor")])
def test_a_weight_s_amax_is_one_of_its_numbers(amax, title):
    was = kept(WAS, 112.0, "weight", weight=3.0)
    assert titles(was, kept([0.0, 0.0, 4.0, 2.0, amax], 112.0, "weight"), is_plain_step=False) == title


@pytest.mark.parametrize(("algo", "margin", "scale"), [("max", 1, 56.0), ("most_recent", 0, 224.0)])
def test_the_scale_follows_by_the_recipe_s_own_rule(algo, margin, scale):
    was, history = kept(WAS, scale, algo=algo, margin=margin), [0.0, 0.0, 4.0, 2.0, 2.0]
    assert titles(was, kept(history, scale)) == ""
    assert titles(was, kept(history, 2 * scale)) == "scale-not-updated"


def test_all_tensors_are_named_together():
    moves = [(kept(WAS, 112.0), kept([0.0, 0.0, 4.0, 2.0, 8.0], 112.0)) for _ in range(4)]
    found = wrong_scaling(moves, {}, True)
    assert "the input of w has a scale" in found.message
    assert "so do 3 more" in found.message


AMAXES = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), max_size=7)


@given(AMAXES, st.integers(0, 7), AMAXES)
def test_a_history_has_moved_on_by_as_many_places_as_it_still_fits_at(was, by, new):
    now = torch.tensor([*was[by:], *new][: len(was)] + [0.0] * max(0, len(was) - len([*was[by:], *new])))
    was = torch.tensor(was)
    fits = [n for n in range(1, len(was)) if torch.equal(now[: len(was) - n], was[n:])]
    expected = [n for n in fits if was[n:].any()] if was.any() else fits[:1]
    assert _moved_on(was, now) == expected


# By which scales gradients of queries, keys and values are cast, once by attention and once by the layer before it.


def gradient(module: str, amax: float, weights: tuple[str, ...] = ("w",), history: float = 1.0) -> Kept:
    rows = torch.full((4,), history)
    slot = Slot(module, ("scaling_bwd", 0), "output gradient", weights, rows, torch.tensor(0.0), None, LARGEST)
    return Kept(slot, rows, LARGEST / amax, None)


CORE = gradient("0.core", 2.0, weights=())
QKV, PROJ, OTHER = gradient("0.qkv", 2.1), gradient("0.proj", 0.3), gradient("mlp", 2.0)
UNUSED = gradient("0.qkv", LARGEST, history=0.0)
SECOND = [gradient("1.core", 4.0, weights=()), gradient("1.qkv", 3.0)]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ([QKV, CORE, PROJ, OTHER], [(2.0, 2.1)]),
        ([UNUSED, CORE, PROJ], [(2.0, 2.0)]),
        ([QKV, gradient("0.k", 2.0), CORE, PROJ], []),
        ([CORE], []),
        ([gradient("0.qkv", math.inf), CORE, PROJ], []),
        ([QKV, PROJ, OTHER], []),
        ([QKV, CORE, PROJ, *SECOND], [(2.0, 2.1), (4.0, 3.0)]),
        ([QKV, CORE, PROJ, SECOND[0]], []),
    ],
    ids=[
        "TE's attention",
        "hands on FP8",
        "layers of their own",
        "alone",
        "no scale",
        "none",
        "two",
        "one of two alone",
    ],
)
def test_both_scales_are_known_if_the_layer_before_attention_is(scaling: list[Kept], expected: list[Any]) -> None:
    assert list(recasts(scaling)) == [pytest.approx(pair) for pair in expected]
