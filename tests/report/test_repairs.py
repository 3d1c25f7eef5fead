"""Test what of a finding's repair can be copied."""

from __future__ import annotations

import pytest

from parity.report.repairs import repair


@pytest.mark.parametrize(
    ("sentence", "now", "then"),
    [
        (
            "give TE's norm the reference's eps, 1e-06; it computes with eps=1e-05",
            ["eps=1e-05"],
            ["eps=1e-06"],
        ),
        ('pass normalization="RMSNorm"; TE subtracts the mean', [], ['normalization="RMSNorm"']),
        (
            "give TE window_size=(-1, 0), the number of keys that a query sees before and after its own; it sees 16",
            [],
            ["window_size=(-1, 0)"],
        ),
        (
            "give TE num_attention_heads=8, as the reference has; it has 4, of 32 channels",
            [],
            ["num_attention_heads=8"],
        ),
        (
            'map stack("gate", "up") to "fc1_weight", in place of stack("up", "gate")',
            ['parity.stack("up", "gate"): "fc1_weight",'],
            ['parity.stack("gate", "up"): "fc1_weight",'],
        ),
        ('map "q" to "query", in place of "key"', ['"q": "key",'], ['"q": "query",']),
        ("exchange the halves of fc1_weight; the gate comes first", [], []),
        ("", [], []),
    ],
)
def test_a_repair_is_a_change_of_lines_where_it_names_code(sentence: str, now: list[str], then: list[str]) -> None:
    found = repair(sentence)
    assert (list(found.now), list(found.then)) == (now, then)
    assert found.to_copy == ("\n".join(then) or sentence)
