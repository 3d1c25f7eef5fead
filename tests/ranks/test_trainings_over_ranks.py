"""Trainings over ranks: right ones pass, and what goes wrong between ranks and steps is named."""

from __future__ import annotations

import pytest

import parity
from parity.lab.studies.ranks.rows import DP
from parity.lab.studies.ranks.trained import RIGHT, STEPS, WRONG, case_of
from parity.ranks.layout import degrees


def named(entry):
    return f"{entry.host}, {entry.variant or 'right'}, {degrees(entry.ranks).label}"


@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_a_right_training_passes(right):
    precision = "bf16" if right.exists_at("bf16") else right.precisions[0]
    (result,) = parity.compare(case_of(right.host, right.variant), [precision], ranks=right.ranks, steps=STEPS)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())
    assert len(result.steps) == STEPS


@pytest.mark.parametrize("wrong", WRONG, ids=named)
def test_a_mistake_is_named(wrong):
    precision = "bf16" if wrong.exists_at("bf16") else wrong.precisions[0]
    (result,) = parity.compare(case_of(wrong.host, wrong.variant), [precision], ranks=wrong.ranks, steps=STEPS)
    assert (result.status, result.findings[0].title in wrong.titles) == ("failed", True)
    assert "rank" in result.findings[0].message


def test_gradients_that_one_rank_does_not_share_are_told_with_the_step_and_the_rank():
    (result,) = parity.compare(case_of("trained", "own gradients at step 2"), ["bf16"], ranks=DP, steps=STEPS)
    assert result.findings[0].message.startswith("in step 2 ranks 0 and 1 hold the same part")
    assert "those of rank 0 are right, and of rank 1 wrong" in result.findings[0].message


def test_a_training_over_ranks_has_no_switches():
    with pytest.raises(parity.UserError, match="without switches"):
        parity.compare(case_of("trained"), ["bf16"], ranks=DP, steps=3, switch="resume")


def test_small_weights_in_fp16_are_rounded_to_its_even_grid():
    """FP32 parts of an optimizer are held against weights below FP16's normal numbers, whose ulps do not shrink."""
    (result,) = parity.compare(case_of("divided optimizer"), ["fp16"], ranks=DP, steps=STEPS)
    assert (result.status, result.findings) == ("passed", ())
