"""A parameter that one module ties, and the other has twice, is told with what to do."""

from __future__ import annotations

import pytest

from parity.case.map_check import OtherNames, check_map
from parity.case.weight_map import Shape, Side, WeightMapError, copies

TOKENS, HEAD = "tokens.weight", "lm_head.weight"
TWO: dict[str, Shape] = {TOKENS: (96, 64), "mid.weight": (64, 64), HEAD: (96, 64)}
ONE = {name: shape for name, shape in TWO.items() if name != HEAD}
TIED = OtherNames(tied={HEAD: TOKENS})
APART = OtherNames()
ALL: dict[Side, Side] = {name: name for name in TWO}
FIRST: dict[Side, Side] = {name: name for name in ONE}


def problem(weights: dict[Side, Side], reference: OtherNames, candidate: OtherNames) -> str:
    shapes = [ONE if others is TIED else TWO for others in (reference, candidate)]
    with pytest.raises(WeightMapError) as caught:
        check_map(weights, *shapes, reference, candidate)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_head_that_the_reference_ties_comes_with_the_entry_that_fills_both_of_tes():
    told = problem(ALL, TIED, APART)
    assert f'"{HEAD}" is not a reference parameter of its own: it is tied to "{TOKENS}", and TE has both apart' in told
    assert f'write "{TOKENS}": copies("{TOKENS}", "{HEAD}") in place of both entries' in told


def test_a_head_of_tes_that_the_reference_ties_is_no_parameter_to_be_a_constant():
    told = problem(FIRST, TIED, APART)
    assert f'the reference ties "{HEAD}" to "{TOKENS}", and TE has both apart' in told
    assert f'write "{TOKENS}": copies("{TOKENS}", "{HEAD}")' in told
    assert "constant" not in told


def test_a_head_of_another_name_is_told_by_its_shape():
    renamed: dict[str, Shape] = {TOKENS: (96, 64), "mid.weight": (64, 64), "output.weight": (96, 64)}
    with pytest.raises(WeightMapError, match=r'copies\("tokens.weight", "output.weight"\)'):
        check_map(FIRST, ONE, renamed, TIED, APART)


def test_the_entry_that_was_told_is_right():
    entries: dict[Side, Side] = {**FIRST, TOKENS: copies(TOKENS, HEAD)}
    check_map(entries, ONE, TWO, TIED, APART)


@pytest.mark.parametrize("weights", [ALL, FIRST], ids=["with an entry", "without an entry"])
def test_a_head_that_te_alone_ties_cannot_hold_both_of_the_references(weights):
    told = problem(weights, APART, TIED)
    assert f'"{HEAD}"' in told
    assert f'to "{TOKENS}", and the reference has two parameters: tie these, or build the TE module so that' in told
    assert "map that" not in told


def test_a_head_that_both_tie_needs_no_entry():
    told = problem(ALL, TIED, TIED)
    assert told == (f'"{HEAD}": "{HEAD}": both modules tie this to "{TOKENS}", which has an entry: leave this one out')
