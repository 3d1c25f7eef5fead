"""All mistakes in a weight map are reported at once, each with its entry, parameters and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.map_check import MOST_LETTERS, MOST_LINES, OtherNames, check_map, other_names
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


def problems(
    entries: dict[Side, Side], reference: Shapes = REFERENCE, candidate: Shapes = CANDIDATE, *others: OtherNames
) -> list[str]:
    with pytest.raises(WeightMapError) as caught:
        check_map(entries, reference, candidate, *others)
    return str(caught.value).splitlines()


def problem(
    entries: dict[Side, Side], reference: Shapes = REFERENCE, candidate: Shapes = CANDIDATE, *others: OtherNames
) -> str:
    """Return the only problem, as one line."""
    (line,) = problems(entries, reference, candidate, *others)
    return line


def without(key: Side) -> dict[Side, Side]:
    return {left: right for left, right in RIGHT.items() if left != key}


def test_a_map_that_fits_raises_nothing():
    check_map(RIGHT, REFERENCE, CANDIDATE)


STACKED = stack("gate.weight", "up.weight")
FIRST_TOLD = {
    "a misspelt name comes with the closest one": (
        (without("norm.weight") | {"norm.wieght": "layer_norm_weight"},),
        '"norm.wieght": "layer_norm_weight": there is no reference parameter "norm.wieght"; '
        'did you mean "norm.weight" (8,)?',
    ),
    "so does an unknown name of TE's": (
        (without("down.weight") | {"down.weight": "fc3_weight"},),
        'there is no TE parameter "fc3_weight"; did you mean "fc2_weight" (8, 16)?',
    ),
    "a tuple of names is no term": (
        (without(STACKED) | {("gate.weight", "up.weight"): "fc1_weight"},),
        "combine several parameters with stack(...)",
    ),
    "a TE parameter is filled twice": (
        (without("down.weight") | {"down.weight": "fc2_weight", constant(0.0, 8, 16): "fc2_weight"},),
        'TE parameter "fc2_weight" is used 2 times',
    ),
}
ALONE_TOLD = {
    "a transposed weight is recognized": ((RIGHT, REFERENCE | {"down.weight": (16, 8)}), "transpose()"),
    "a shape of as many elements brings rearrange to mind": (
        (RIGHT, REFERENCE | {"norm.weight": (1, 8)}),
        "rearrange()",
    ),
    "a TE parameter left over brings copies to mind": (
        (RIGHT, REFERENCE, CANDIDATE | {"second_norm_weight": (8,)}),
        "copies(...)",
    ),
    "stacked parts must agree in their other dimensions": (
        (RIGHT, REFERENCE | {"up.weight": (16, 4)}),
        "differ in more than dimension 0",
    ),
    "copies differ in nothing": (
        ({"a": copies("x", "y")}, {"a": (4,)}, {"x": (4,), "y": (2,)}),
        "the copies (4,), (2,) differ in shape",
    ),
    "copies on the left are refused": (
        ({copies("a", "b"): "x"}, {"a": (4,), "b": (4,)}, {"x": (4,)}),
        "hold the same parameter of the reference, so it belongs on the right",
    ),
}


@pytest.mark.parametrize(("checked", "told"), FIRST_TOLD.values(), ids=FIRST_TOLD)
def test_a_mistake_is_told_first(checked, told):
    assert told in problems(*checked)[0]


@pytest.mark.parametrize(("checked", "told"), ALONE_TOLD.values(), ids=ALONE_TOLD)
def test_a_mistake_is_told_alone(checked, told):
    assert told in problem(*checked)


@pytest.mark.parametrize(
    ("checked", "told"),
    [
        (
            ({"a": stack("x", constant(0.0, 2))}, {"a": (4,)}, {"x": (2,)}),
            '"a": stack("x", constant(0.0, 2)): '
            "a constant stands for what the reference lacks, so it belongs on the left",
        ),
        (([("a", "b")],), "weights must be a dict {left: right}, not list"),
    ],
    ids=["a constant on the right", "a list"],
)
def test_nothing_else_is_said_of_what_can_be_no_map(checked, told):
    assert problems(*checked) == [told]


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


def test_shapes_that_differ_are_told_with_the_parameters_that_make_them():
    found = problems(RIGHT, candidate={**CANDIDATE, "fc1_weight": (24, 8)})
    assert found == [
        'stack("gate.weight", "up.weight"): "fc1_weight": the left side is (32, 8), the right side (24, 8) '
        "(gate.weight (16, 8), up.weight (16, 8); fc1_weight (24, 8))"
    ]


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
        (transpose("bias"), "has fewer than two dimensions"),
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


# A problem that all layers share is reported once, and so is advice that applies to several problems.


LAYERS = 12
MLP: dict[Side, Side] = {"up.weight": "fc1_weight", "down.weight": "fc2_weight"}


def layers(shapes: dict[str, Shape], which: range | list[int] = range(LAYERS)) -> dict[str, Shape]:
    return {f"layers.{i}.{name}": shape for i in which for name, shape in shapes.items()}


STACK = layers({"up.weight": (32, 8), "down.weight": (8, 32)})
TE_STACK = layers({"fc1_weight": (32, 8), "fc2_weight": (8, 32)})
RIGHT_STACK = {left: right for i in range(LAYERS) for left, right in under(MLP, f"layers.{i}.").items()}


def test_a_parameter_that_each_layer_lacks_is_told_once():
    (found,) = problems(RIGHT_STACK, STACK, TE_STACK | layers({"fc1_bias": (32,)}))
    assert found.startswith('TE parameter "layers.0..11.fc1_bias" (32,) is filled by no entry; ')


def test_layers_that_are_not_concerned_are_left_out_of_the_range():
    (found,) = problems(RIGHT_STACK, STACK, TE_STACK | layers({"fc1_bias": (32,)}, [0, 1, 2, 7]))
    assert '"layers.0..2,7.fc1_bias"' in found


def test_a_wrong_prefix_is_told_once_for_each_parameter():
    wrong = {left: right for i in range(LAYERS) for left, right in under(MLP, f"model.{i}.", f"layers.{i}.").items()}
    found = problems(wrong, STACK, TE_STACK)
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
    found = problems(RIGHT_STACK, STACK | sizes, TE_STACK)
    assert found == [
        'reference parameter "layers.0.extra" (4,) is used by no entry',
        'reference parameter "layers.1..2.extra" (8,) is used by no entry',
    ]


def test_advice_is_given_once():
    found = problems(RIGHT_STACK, STACK, TE_STACK | {"fc1_bias": (32,), "fc2_bias": (8,)})
    assert "map constant(0.0, 32) to it" in found[0]
    assert found[1:] == ['TE parameter "fc2_bias" (8,) is filled by no entry']


def test_a_pair_without_a_map_is_told_that_alone():
    assert problems({}, STACK, TE_STACK) == [
        "the pair has no weight map, so nothing says how the reference's 24 parameters fill TE's 24"
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


# A norm with a bias in only one of the modules suggests that the two norms are of different kinds.


RMS_NORM = 'normalization="RMSNorm"'


@pytest.mark.parametrize("weight", ["norm.weight", shift("norm.weight", -1.0)], ids=["plain", "centred"])
def test_a_bias_that_only_tes_norm_has_brings_an_rms_norm_to_mind_first(weight):
    shapes: Shapes = {"layer_norm_weight": (8,), "layer_norm_bias": (8,)}
    told = problem({weight: "layer_norm_weight"}, {"norm.weight": (8,)}, shapes)
    assert 'the reference\'s norm "norm.weight" has no bias and looks like an RMSNorm' in told
    assert 0 < told.index(RMS_NORM) < told.index("constant(0.0, 8)")


def test_a_norm_of_te_by_itself_is_recognized_by_its_shapes():
    told = problem({"gain": "norm.weight"}, {"gain": (8,)}, {"norm.weight": (8,), "norm.bias": (8,)})
    assert RMS_NORM in told


def test_a_linear_layer_without_a_bias_is_no_norm():
    told = problem({"up.weight": "weight"}, {"up.weight": (8, 8)}, {"weight": (8, 8), "bias": (8,)})
    assert RMS_NORM not in told


def test_a_layer_norm_without_a_bias_is_no_rms_norm():
    norm = nn.LayerNorm(8, bias=False)
    shapes: Shapes = {"layer_norm_weight": (8,), "layer_norm_bias": (8,)}
    told = problem({"weight": "layer_norm_weight"}, {"weight": (8,)}, shapes, other_names(norm))
    assert RMS_NORM not in told
    assert "constant(0.0, 8)" in told


def test_a_bias_that_only_the_references_norm_has_brings_a_layer_norm_to_mind():
    told = problem({"norm.weight": "norm.weight"}, {"norm.weight": (8,), "norm.bias": (8,)}, {"norm.weight": (8,)})
    assert told == (
        'reference parameter "norm.bias" (8,) is used by no entry; TE\'s "norm.weight" has no bias; '
        'is normalization="LayerNorm" meant?'
    )


def test_what_to_do_with_several_norms_is_told_once():
    names = ("attention_norm", "mlp_norm")
    norms: Shapes = {f"{name}.{kind}": (8,) for name in names for kind in ("weight", "bias")}
    found = problems({f"{name}.weight": f"{name}.weight" for name in names}, dict.fromkeys([*norms][::2], (8,)), norms)
    assert [RMS_NORM in line for line in found] == [True, False]


def test_a_bias_that_was_forgotten_is_not_the_kind_of_norm():
    norm: Shapes = {"norm.weight": (8,), "norm.bias": (8,)}
    assert not any("Norm" in line for line in problems({"norm.weight": "norm.weight"}, norm, norm))


# A parameter that one module ties and the other has twice is reported together with what to do.


TOKENS, HEAD = "tokens.weight", "lm_head.weight"
TWO: dict[str, Shape] = {TOKENS: (96, 64), "mid.weight": (64, 64), HEAD: (96, 64)}
ONE_NAME = {name: shape for name, shape in TWO.items() if name != HEAD}
TIED = OtherNames(tied={HEAD: TOKENS})
APART = OtherNames()
ALL: dict[Side, Side] = {name: name for name in TWO}
FIRST: dict[Side, Side] = {name: name for name in ONE_NAME}


def problem_of_ties(weights: dict[Side, Side], reference: OtherNames, candidate: OtherNames) -> str:
    shapes = (ONE_NAME if others is TIED else TWO for others in (reference, candidate))
    return problem(weights, *shapes, reference, candidate)


def test_a_head_that_the_reference_ties_comes_with_the_entry_that_fills_both_of_tes():
    told = problem_of_ties(ALL, TIED, APART)
    assert f'"{HEAD}" is not a reference parameter of its own: it is tied to "{TOKENS}", and TE has both apart' in told
    assert f'write "{TOKENS}": copies("{TOKENS}", "{HEAD}") in place of both entries' in told


def test_a_head_of_tes_that_the_reference_ties_is_no_parameter_to_be_a_constant():
    told = problem_of_ties(FIRST, TIED, APART)
    assert f'the reference ties "{HEAD}" to "{TOKENS}", and TE has both apart' in told
    assert f'write "{TOKENS}": copies("{TOKENS}", "{HEAD}")' in told
    assert "constant" not in told


def test_a_head_of_another_name_is_told_by_its_shape():
    renamed: dict[str, Shape] = {TOKENS: (96, 64), "mid.weight": (64, 64), "output.weight": (96, 64)}
    with pytest.raises(WeightMapError, match=r'copies\("tokens.weight", "output.weight"\)'):
        check_map(FIRST, ONE_NAME, renamed, TIED, APART)


def test_the_entry_that_was_told_is_right():
    entries: dict[Side, Side] = {**FIRST, TOKENS: copies(TOKENS, HEAD)}
    check_map(entries, ONE_NAME, TWO, TIED, APART)


@pytest.mark.parametrize("weights", [ALL, FIRST], ids=["with an entry", "without an entry"])
def test_a_head_that_te_alone_ties_cannot_hold_both_of_the_references(weights):
    told = problem_of_ties(weights, APART, TIED)
    assert f'"{HEAD}"' in told
    assert f'to "{TOKENS}", but the reference has two separate parameters: tie them there too, or build the TE' in told
    assert "map that" not in told


def test_a_head_that_both_tie_needs_no_entry():
    told = problem_of_ties(ALL, TIED, TIED)
    assert told == (f'"{HEAD}": "{HEAD}": both modules tie this to "{TOKENS}", which has an entry: leave this one out')


# Parameters that only the reference ties are noted; those that only the candidate ties are refused.


te = parity.te.kernels("cpu").te
VOCABULARY, WIDTH = 96, 64


class Model(nn.Module):
    """A language model of an embedding, one layer and a head."""

    def __init__(self, kind: Any, ties: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = kind.Linear(WIDTH, WIDTH, bias=False)
        self.head = kind.Linear(WIDTH, VOCABULARY, bias=False)
        if ties == "parameter":
            self.head.weight = self.embedding.weight
        elif ties == "memory":
            self.head.weight = nn.Parameter(self.embedding.weight.data)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids)))


EACH = {name: name for name in ("embedding.weight", "layer.weight", "head.weight")}
ONE = {name: name for name in ("embedding.weight", "layer.weight")}
TO_BOTH = {"embedding.weight": parity.copies("embedding.weight", "head.weight"), "layer.weight": "layer.weight"}


def compared(reference: str, candidate: str, weights: dict[Any, Any], precision: str = "fp32") -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        return parity.Pair(
            Model(nn, reference), Model(te, candidate), lambda rng: rng.integers(2, 16, high=VOCABULARY), weights
        )

    (result,) = parity.compare(parity.Case("tied", factory, sizes=({},)), [precision])
    return result


def about_ties(result: parity.Result) -> list[str]:
    return [note for note in result.notes if "drift apart" in note]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("reference", "weights", "told"),
    [
        ("parameter", TO_BOTH, '"head.weight" is tied to "embedding.weight"'),
        ("memory", EACH, '"head.weight" shares the memory of "embedding.weight"'),
    ],
)
def test_what_the_reference_alone_ties_is_a_note(reference, weights, told, precision) -> None:
    result = compared(reference, "", weights, precision)
    assert result.passed, (result.reason, result.findings)
    (note,) = about_ties(result)
    assert told in note
    assert 'the candidate holds it as separate parameters, "embedding.weight", "head.weight"' in note


@pytest.mark.parametrize(
    ("reference", "candidate", "weights"),
    [
        ("", "", EACH),
        ("parameter", "parameter", ONE),
        ("parameter", "memory", TO_BOTH),
        ("memory", "memory", EACH),
    ],
)
def test_nothing_is_said_where_both_tie_or_neither(reference, candidate, weights) -> None:
    result = compared(reference, candidate, weights)
    assert result.passed, (result.reason, result.findings)
    assert about_ties(result) == []


def test_what_the_reference_ties_cannot_be_forgotten_by_the_map() -> None:
    with pytest.raises(parity.UserError, match=r'the reference ties "head\.weight".*copies\('):
        compared("parameter", "", ONE)


@pytest.mark.parametrize("weights", [EACH, ONE], ids=["each", "one"])
def test_what_the_candidate_alone_ties_is_refused(weights) -> None:
    with pytest.raises(parity.UserError, match="tie"):
        compared("", "parameter", weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_parameters_that_the_candidate_keeps_in_one_memory_are_refused(precision) -> None:
    result = compared("", "memory", EACH, precision)
    assert result.status == "error"
    assert 'TE\'s "head.weight" shares the memory of its "embedding.weight"' in result.reason


class Parallel(nn.Module):
    """Two parallel layers after one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.first(y) + self.second(y)


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (te.LayerNormLinear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def test_one_norm_that_becomes_two_is_a_note() -> None:
    weights = {f"{name}.weight": f"{name}.weight" for name in ("first", "second")} | {
        f"norm.{kind}": parity.copies(f"first.layer_norm_{kind}", f"second.layer_norm_{kind}")
        for kind in ("weight", "bias")
    }
    pair = parity.Pair(Parallel(), TwoNorms(), lambda rng: rng.normal(32, WIDTH), weights, fill=True)
    (result,) = parity.compare(pair, ["bf16"])
    assert result.passed
    assert [note.split(",")[0] for note in about_ties(result)] == [
        f'in the reference "norm.{kind}" is one parameter' for kind in ("weight", "bias")
    ]


@pytest.mark.parametrize("candidate", ["memory", ""])
def test_modules_that_are_handed_over_keep_their_memory_in_common(candidate) -> None:
    pair = parity.Pair(
        Model(nn, "memory"), Model(te, candidate), lambda rng: rng.integers(2, 16, high=VOCABULARY), EACH
    )
    with torch.no_grad():
        for name, parameter in pair.candidate.named_parameters():
            parameter.copy_(pair.reference.get_parameter(name))
    (result,) = parity.compare(pair, ["fp32"])
    assert result.passed, (result.reason, result.findings)
    assert len(about_ties(result)) == (candidate == "")
    assert F.mse_loss(pair.reference.head.weight, pair.reference.embedding.weight) == 0.0
