"""Ports of images at seeds that were once judged otherwise."""

from __future__ import annotations

import pytest
from ports import tells

import parity
from lab.corpus.small_ports.images import CLASSES, SAM_IN_TE


@pytest.mark.parametrize(("seed", "precision"), [(0, "bf16"), (1, "fp16")])
def test_a_port_that_adds_both_biases_before_the_scores_is_right(seed, precision):
    (result,) = parity.compare(SAM_IN_TE.case(), [precision], [seed])
    assert result.passed
    assert not result.notes


def test_another_pooling_is_told_before_few_classes():
    (result,) = parity.compare(CLASSES.case(pool="all"), ["bf16"], [1])
    tells(result, "operation", "it is the mean over dimension 1.")
