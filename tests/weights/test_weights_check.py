"""Mistakes in a weight map are all told at once, each with its entry, parameters and shapes."""

from __future__ import annotations

import pytest

from parity.case.map_check import check_map
from parity.case.weight_map import (
    Shape,
    Side,
    WeightMapError,
    constant,
    copies,
    experts,
    interleaved_qkv,
    rearrange,
    reorder,
    rope_halves,
    separated_qkv,
    shift,
    stack,
    transpose,
    under,
)

Shapes = dict[str, Shape]
REFERENCE = {"norm.weight": (8,), "gate.weight": (16, 8), "up.weight": (16, 8), "down.weight": (8, 16)}
CANDIDATE = {"layer_norm_weight": (8,), "fc1_weight": (32, 8), "fc2_weight": (8, 16)}
RIGHT: dict[Side, Side] = {
    "norm.weight": "layer_norm_weight",
    stack("gate.weight", "up.weight"): "fc1_weight",
    "down.weight": "fc2_weight",
}


def problems(entries: dict[Side, Side], reference: Shapes = REFERENCE, candidate: Shapes = CANDIDATE) -> list[str]:
    with pytest.raises(WeightMapError) as caught:
        check_map(entries, reference, candidate)
    return str(caught.value).splitlines()


def without(key: Side) -> dict[Side, Side]:
    return {left: right for left, right in RIGHT.items() if left != key}


def test_a_map_that_fits_raises_nothing():
    check_map(RIGHT, REFERENCE, CANDIDATE)


def test_a_misspelt_name_comes_with_the_closest_one():
    found = problems({**without("norm.weight"), "norm.wieght": "layer_norm_weight"})
    assert found[0] == (
        '"norm.wieght": "layer_norm_weight": there is no reference parameter "norm.wieght"; '
        'did you mean "norm.weight" (8,)?'
    )


def test_an_unknown_te_parameter_is_named():
    found = problems({**without("down.weight"), "down.weight": "fc3_weight"})
    assert 'there is no TE parameter "fc3_weight"; did you mean "fc2_weight" (8, 16)?' in found[0]


def test_parameters_that_no_entry_mentions_are_named_with_their_shapes():
    found = problems(without("down.weight"))
    assert found[0] == 'reference parameter "down.weight" (8, 16) is used by no entry'
    assert found[1].startswith('TE parameter "fc2_weight" (8, 16) is filled by no entry')
    assert "constant(0.0, 8, 16)" in found[1]


def test_a_parameter_that_two_entries_mention_is_named_with_both():
    found = problems({**RIGHT, transpose("down.weight"): "more"}, candidate={**CANDIDATE, "more": (16, 8)})
    assert found == [
        'reference parameter "down.weight" is used 2 times: in "down.weight": "fc2_weight" and in '
        'transpose("down.weight"): "more"; copies(...) on the right fills several TE parameters with one'
    ]


def test_a_te_parameter_that_is_filled_twice_is_named():
    found = problems({**without("down.weight"), "down.weight": "fc2_weight", constant(0.0, 8, 16): "fc2_weight"})
    assert found[0].startswith('TE parameter "fc2_weight" is used 2 times')


def test_shapes_that_differ_are_told_with_the_parameters_that_make_them():
    found = problems(RIGHT, candidate={**CANDIDATE, "fc1_weight": (24, 8)})
    assert found == [
        'stack("gate.weight", "up.weight"): "fc1_weight": the left side is (32, 8), the right side (24, 8) '
        "(gate.weight (16, 8), up.weight (16, 8); fc1_weight (24, 8))"
    ]


def test_a_transposed_weight_is_recognized():
    (found,) = problems(RIGHT, reference={**REFERENCE, "down.weight": (16, 8)})
    assert "transpose()" in found


def test_a_shape_of_as_many_elements_brings_rearrange_to_mind():
    (found,) = problems(RIGHT, reference={**REFERENCE, "norm.weight": (1, 8)})
    assert "rearrange()" in found


def test_a_te_parameter_left_over_brings_copies_to_mind():
    (found,) = problems(RIGHT, candidate={**CANDIDATE, "second_norm_weight": (8,)})
    assert "copies(...)" in found


def test_stacked_parts_must_agree_in_their_other_dimensions():
    (found,) = problems(RIGHT, reference={**REFERENCE, "up.weight": (16, 4)})
    assert "differ in more than dimension 0" in found


@pytest.mark.parametrize(
    ("term", "complaint"),
    [
        (interleaved_qkv("q", "k", "v", groups=3, head_dim=4), "must have groups * head_dim = 3 * 4 rows"),
        (interleaved_qkv("k", "q", "v", groups=4, head_dim=4), "must agree in all but the query's rows"),
        (interleaved_qkv("odd", "k", "v", groups=2, head_dim=4), "must have a multiple of groups * head_dim = 8 rows"),
        (separated_qkv("q", groups=3, head_dim=4), "groups * head_dim * n = 3 * 4 * n rows"),
        (rope_halves("q", head_dim=6), "must have a multiple of head_dim = 6 rows"),
        (reorder("q", (2, 1, 0)), "has no 3 equal blocks"),
        (reorder("q", (1, 0), dim=2), "dim=2 is out of range"),
        (stack("q", "k", dim=2), "dim=2 is out of range"),
        (transpose("bias"), "has no two dimensions"),
        (experts("q", "k"), "differ in shape"),
        (rearrange("q", "(a b) c -> b a c", a=5), "16"),
        (rearrange("q", "a b -> b"), "a"),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else value.function,
)
def test_numbers_that_do_not_fit_a_terms_parts_are_told(term, complaint):
    shapes = {"q": (16, 2), "k": (8, 2), "v": (8, 2), "odd": (12, 2), "bias": (16,)}
    found = problems({term: "te"}, shapes, {"te": (32, 2)})
    assert complaint in found[0]


def test_every_problem_is_told_at_once():
    found = problems({"a": "layer_norm_weight", "down.weight": "fc1_weight"})
    assert len(found) == 6


def test_a_constant_on_the_right_is_refused():
    found = problems({"a": stack("x", constant(0.0, 2))}, {"a": (4,)}, {"x": (2,)})
    assert found == [
        '"a": stack("x", constant(0.0, 2)): a constant stands for what the reference lacks, so it belongs on the left'
    ]


def test_copies_differ_in_nothing():
    (found,) = problems({"a": copies("x", "y")}, {"a": (4,)}, {"x": (4,), "y": (2,)})
    assert "the copies (4,), (2,) differ in shape" in found


def test_copies_on_the_left_are_refused():
    (found,) = problems({copies("a", "b"): "x"}, {"a": (4,), "b": (4,)}, {"x": (4,)})
    assert "they belong on the right" in found


def test_a_tuple_of_names_is_no_term():
    found = problems({**without(stack("gate.weight", "up.weight")), ("gate.weight", "up.weight"): "fc1_weight"})
    assert "several make one with stack(...)" in found[0]


def test_a_list_is_no_map():
    assert problems([("a", "b")]) == ["weights must be a dict {left: right}, not list"]


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: stack(), "at least one"),
        (lambda: stack(["gate", "up"]), "takes parameters' names and terms"),
        (lambda: interleaved_qkv("q", "k", "v", groups=0, head_dim=4), "positive whole number groups"),
        (lambda: rope_halves("q", head_dim=7), "must be even"),
        (lambda: rope_halves("q", head_dim=8, rotary_dim=10), "at most 8"),
        (lambda: reorder("w", (0, 2)), "each number from 0 to n - 1 once"),
        (lambda: rearrange("w", "a b"), "a pattern"),
        (lambda: rearrange("w", "(a b) -> a b", a=0), "positive whole number a"),
        (lambda: reorder("w", 2), "each number from 0 to n - 1 once"),
        (lambda: stack("q", "k", dim="0"), "a dimension is a whole number, not '0'"),
        (lambda: shift("w", float("nan")), "a finite number, not nan"),
        (lambda: constant("0", 4), "a finite number, not '0'"),
        (lambda: constant(0.0, (4, 4)), r"one after the other, not \(4, 4\)"),
        (lambda: under([("a", "b")], "layers.0."), "takes a map {left: right}, not list"),
    ],
    ids=[
        *("no-part", "list", "groups", "odd", "rotary", "order", "pattern", "length"),
        *("number", "dimension", "nan", "text", "shape", "pairs"),
    ],
)
def test_a_term_of_wrong_arguments_cannot_be_built(build, complaint):
    with pytest.raises(WeightMapError, match=complaint):
        build()
