"""Caps of scores and of logits by ``tanh`` that a port alone has, lacks, or has at another number."""

from __future__ import annotations

import math

import pytest
from language_model import Options, result

NONE = math.inf


@pytest.mark.parametrize(("precision", "loss"), [("fp32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize(
    ("right", "port", "told"),
    [
        (dict(), dict(logits_cap=3.0), "leave activations uncapped, as the reference does; they are capped at 3"),
        (dict(logits_cap=5.0), dict(logits_cap=3.0), "cap activations at 5 by tanh, as the reference does; they are"),
        (dict(logits_cap=3.0), dict(logits_cap=NONE), "cap activations at 3 by tanh, as the reference does; none are"),
        (dict(), dict(softcap=1.0), "leave the scores uncapped as the reference does, softcap=0.0 in TE; it has 1"),
        (dict(softcap=8.0), dict(softcap=1.0), "cap the scores as the reference does, softcap=8; it has 1"),
    ],
)
def test_a_cap_is_told_with_both_numbers(right, port, told, loss, precision):
    first = result(Options(loss=loss, **right), precision, **port).findings[0]
    assert first.title == "softcap"
    assert told in first.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_caps_pass(precision):
    assert result(Options(softcap=8.0, logits_cap=5.0), precision).passed
