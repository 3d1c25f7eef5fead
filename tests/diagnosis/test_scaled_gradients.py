"""Gradients that are right but for one factor, though rounding moves the factor of each a little."""

import dataclasses

import pytest

import parity
from parity.zoo.bug import planted
from parity.zoo.catalogue import BUGS
from parity.zoo.hosts.catalogue import HOSTS


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed"])
def test_a_loss_scale_that_was_left_in_is_told_of_all_gradients_of_a_layer(precision):
    llama = HOSTS["llama_layer"]
    wrong = planted(BUGS["gradient-left-scaled"], dataclasses.replace(llama, sizes=llama.sizes[:1]))
    (result,) = parity.compare(wrong, [precision], seeds=[1])
    assert [finding.code for finding in result.findings] == ["PAR401"]
    assert "every gradient is 12" in result.findings[0].message
