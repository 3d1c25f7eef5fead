"""What is wrong in each layer alike is told once, and advice once for all that it serves."""

from __future__ import annotations

import pytest

from parity.case.map_check import MOST_LETTERS, MOST_LINES, check_map
from parity.case.weight_map import Shape, Side, WeightMapError, experts, under

LAYERS = 12
MLP: dict[Side, Side] = {"up.weight": "fc1_weight", "down.weight": "fc2_weight"}


def problems(weights: dict[Side, Side], reference: dict[str, Shape], candidate: dict[str, Shape]) -> list[str]:
    with pytest.raises(WeightMapError) as caught:
        check_map(weights, reference, candidate)
    return str(caught.value).splitlines()


def layers(shapes: dict[str, Shape], which: range | list[int] = range(LAYERS)) -> dict[str, Shape]:
    return {f"layers.{i}.{name}": shape for i in which for name, shape in shapes.items()}


REFERENCE = layers({"up.weight": (32, 8), "down.weight": (8, 32)})
CANDIDATE = layers({"fc1_weight": (32, 8), "fc2_weight": (8, 32)})
RIGHT = {left: right for i in range(LAYERS) for left, right in under(MLP, f"layers.{i}.").items()}


def test_a_parameter_that_each_layer_lacks_is_told_once():
    (found,) = problems(RIGHT, REFERENCE, CANDIDATE | layers({"fc1_bias": (32,)}))
    assert found.startswith('TE parameter "layers.0..11.fc1_bias" (32,) is filled by no entry; ')


def test_layers_that_are_not_concerned_are_left_out_of_the_range():
    (found,) = problems(RIGHT, REFERENCE, CANDIDATE | layers({"fc1_bias": (32,)}, [0, 1, 2, 7]))
    assert '"layers.0..2,7.fc1_bias"' in found


def test_a_wrong_prefix_is_told_once_for_each_parameter():
    wrong = {left: right for i in range(LAYERS) for left, right in under(MLP, f"model.{i}.", f"layers.{i}.").items()}
    found = problems(wrong, REFERENCE, CANDIDATE)
    assert found == [
        '"model.0..11.up.weight": "layers.0..11.fc1_weight": there is no reference parameter "model.0..11.up.weight"; '
        'did you mean "layers.0..11.up.weight" (32, 8)?',
        '"model.0..11.down.weight": "layers.0..11.fc2_weight": there is no reference parameter '
        '"model.0..11.down.weight"; did you mean "layers.0..11.down.weight" (8, 32)?',
        'reference parameter "layers.0..11.up.weight" (32, 8) is used by no entry',
        'reference parameter "layers.0..11.down.weight" (8, 32) is used by no entry',
    ]


def test_a_name_without_its_prefix_comes_with_the_whole_name():
    found = problems({"up.weight": "layers.0.fc1_weight"}, layers({"up.weight": (4,)}, [0]), {"fc1_weight": (4,)})
    assert 'there is no reference parameter "up.weight"; did you mean "layers.0.up.weight" (4,)?' in found[0]
    assert 'there is no TE parameter "layers.0.fc1_weight"; did you mean "fc1_weight" (4,)?' in found[1]


def test_layers_that_count_from_another_number_are_told_with_both_ranges():
    shapes: dict[str, Shape] = {f"h.{i + 1}.weight": (4, 6) for i in range(3)}
    weights: dict[Side, Side] = {f"h.{i + 1}.weight": f"layers.{i}.weight" for i in range(3)}
    (found,) = problems(weights, shapes, {f"layers.{i}.weight": (6, 4) for i in range(3)})
    assert found.startswith('"h.1..3.weight": "layers.0..2.weight": the left side is (4, 6), the right side (6, 4)')
    assert found.endswith("(h.1..3.weight (4, 6); layers.0..2.weight (6, 4)); is one the transpose() of the other?")


def test_layers_and_experts_are_told_with_a_range_each():
    shapes: dict[str, Shape] = {f"layers.{i}.fc1.weight{j}": (4,) for i in range(3) for j in range(8)}
    found = problems({"a": "b"}, {"a": (1,)}, {"b": (1,)} | shapes)
    assert len(found) == 1
    assert '"layers.0..2.fc1.weight0..7" (4,)' in found[0]


def test_layers_of_different_shapes_are_told_apart():
    sizes: dict[str, Shape] = {"layers.0.extra": (4,), "layers.1.extra": (8,), "layers.2.extra": (8,)}
    found = problems(RIGHT, REFERENCE | sizes, CANDIDATE)
    assert found == [
        'reference parameter "layers.0.extra" (4,) is used by no entry',
        'reference parameter "layers.1..2.extra" (8,) is used by no entry',
    ]


def test_advice_is_given_once():
    found = problems(RIGHT, REFERENCE, CANDIDATE | {"fc1_bias": (32,), "fc2_bias": (8,)})
    assert "map constant(0.0, 32) to it" in found[0]
    assert found[1:] == ['TE parameter "fc2_bias" (8,) is filled by no entry']


def test_a_pair_without_a_map_is_told_that_first():
    found = problems({}, REFERENCE, CANDIDATE)
    assert found == [
        "weights has no entry",
        'reference parameter "layers.0..11.up.weight" (32, 8) is used by no entry',
        'reference parameter "layers.0..11.down.weight" (8, 32) is used by no entry',
        'TE parameter "layers.0..11.fc1_weight" (32, 8) is filled by no entry',
        'TE parameter "layers.0..11.fc2_weight" (8, 32) is filled by no entry',
    ]


def test_of_very_many_problems_the_first_are_told_and_the_rest_counted():
    names = [f"{letter}_{other}" for letter in "abcdefgh" for other in "abcdefgh"]
    found = problems({"x": "y"}, {"x": (1,), **dict.fromkeys(names, (4,))}, {"y": (1,)})
    assert len(found) == MOST_LINES + 1
    assert found[-1] == f"and {len(names) - MOST_LINES} more problems like these"


def test_of_an_entry_with_very_many_names_the_ends_are_told():
    names = [f"experts.{i}.w1.weight" for i in range(64)]
    weights: dict[Side, Side] = {experts(*names): "fc1.weight"}
    (found,) = problems(weights, dict.fromkeys(names, (4, 8)), {"fc1.weight": (64, 8, 4)})
    assert found.startswith('experts("experts.0.w1.weight", "experts.1.w1.weight", ')
    assert found.endswith("; fc1.weight (64, 8, 4)); rearrange() gives the same elements another shape")
    assert len(found) < MOST_LETTERS + 10


def test_unknown_names_within_one_entry_are_told_once():
    wrong = experts(*(f"experts.{i}.w1" for i in range(8)))
    shapes: dict[str, Shape] = {f"experts.{i}.w1.weight": (4, 8) for i in range(8)}
    found = problems({wrong: "fc1.weight"}, shapes, {"fc1.weight": (8, 4, 8)})
    assert len(found) == 2
    assert 'there is no reference parameter "experts.0..7.w1"; did you mean "experts.0..7.w1.weight"' in found[0]
