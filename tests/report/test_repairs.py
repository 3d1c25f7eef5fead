"""Test what of a finding's repair can be copied."""

from __future__ import annotations

import pytest

from parity.mistakes.codes import Code, finding
from parity.report.markdown import repair


@pytest.mark.parametrize(
    ("sentence", "now", "then"),
    [
        ('pass normalization="RMSNorm"; TE subtracts the mean', [], ['normalization="RMSNorm"']),
        (
            "give TE window_size=(-1, 0), the number of keys that a query sees before and after its own; "
            "in the port, it sees 16",
            [],
            ["window_size=(-1, 0)"],
        ),
        (
            "give TE num_attention_heads=8, as the reference has; the port has 4, of 32 channels",
            [],
            ["num_attention_heads=8"],
        ),
        ("exchange the halves of fc1_weight; the gate comes first", [], []),
        ("", [], []),
    ],
)
def test_a_repair_is_a_change_of_lines_where_it_names_code(sentence: str, now: list[str], then: list[str]) -> None:
    found = repair(finding("norm-eps", "the error falls", repair=sentence))
    assert (list(found.now), list(found.then)) == (now, then)
    assert found.to_copy == ("\n".join(then) or sentence)


def test_lines_that_a_finding_has_come_before_what_its_sentence_names() -> None:
    code = Code(("eps=1e-05",), ("eps=1e-06",))
    found = repair(finding("norm-eps", "the error falls", repair="give it eps=0.1; it has eps=0.2", code=code))
    assert (found.now, found.then, found.to_copy) == (("eps=1e-05",), ("eps=1e-06",), "eps=1e-06")
