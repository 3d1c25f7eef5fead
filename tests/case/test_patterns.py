"""Patterns in a weight map stand for the entries of all layers, and mean the same as the map in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import parity
from parity.case.case import Pair
from parity.case.map_check import check_map
from parity.case.patterns import collapsed, expanded, expanded_names
from parity.case.transfer import parameter_shapes
from parity.case.weight_map import WeightMap, WeightMapError, constant, copies, describe, experts, names, stack, under


def in_words(weights: WeightMap) -> list[tuple[str, str]]:
    return sorted((describe(left), describe(right)) for left, right in weights.items())


def names_of(weights: WeightMap) -> tuple[list[str], list[str]]:
    return [name for left in weights for name in names(left)], [
        name for right in weights.values() for name in names(right)
    ]


# Each short map, and the long map that it stands for. The long map also tells which parameters exist.

SHORT_AND_LONG = {
    "layers": (
        {"m.layers.{i}.w": "layers.{i}.weight", "head": "out"},
        {**{f"m.layers.{i}.w": f"layers.{i}.weight" for i in range(12)}, "head": "out"},
    ),
    "a layer's map under a prefix": (
        under({"w": "weight", stack("g", "u"): "fc1"}, "m.{i}.", "t.{i}."),
        {
            **{f"m.{i}.w": f"t.{i}.weight" for i in range(3)},
            **{stack(f"m.{i}.g", f"m.{i}.u"): f"t.{i}.fc1" for i in range(3)},
        },
    ),
    "layers of experts": (
        {"l.{i}.e.{j}.w": "l.{i}.e.{j}.weight"},
        {f"l.{i}.e.{j}.w": f"l.{i}.e.{j}.weight" for i in range(2) for j in range(3)},
    ),
    "all experts of each layer": (
        {"l.{i}.w": experts("l.{i}.fc.weight{e}")},
        {f"l.{i}.w": experts(*(f"l.{i}.fc.weight{e}" for e in range(11))) for i in range(2)},
    ),
    "all experts, of two parameters each": (
        {experts(stack("e.{e}.gate", "e.{e}.up")): "fc1"},
        {experts(*(stack(f"e.{e}.gate", f"e.{e}.up") for e in range(3))): "fc1"},
    ),
    "copies": (
        {"n.{i}.w": copies("a.{i}.norm", "b.{i}.norm")},
        {f"n.{i}.w": copies(f"a.{i}.norm", f"b.{i}.norm") for i in range(3)},
    ),
    "what the reference lacks": (
        {"l.{i}.w": "l.{i}.weight", constant(0.0, 4): "l.{i}.bias"},
        {
            **{f"l.{i}.w": f"l.{i}.weight" for i in range(3)},
            **{constant(0.0, 4): f"l.{i}.bias" for i in range(3)},
        },
    ),
    "the other side counts from 1": (
        {"m.{i}.w": "t.{i+1}.weight", stack("m.{i}.g", "m.{i}.u"): "t.{i+1}.fc1"},
        {
            **{f"m.{i}.w": f"t.{i + 1}.weight" for i in range(11)},
            **{stack(f"m.{i}.g", f"m.{i}.u"): f"t.{i + 1}.fc1" for i in range(11)},
        },
    ),
    "the reference counts from 2": (
        {"m.{i+2}.w": "t.{i}.weight", "m.0.w": "embedding"},
        {"m.0.w": "embedding", **{f"m.{i + 2}.w": f"t.{i}.weight" for i in range(3)}},
    ),
    "only some layers": (
        {"l.{i}.router": "l.{i}.gate", "l.{i}.w": "l.{i}.weight"},
        {**{f"l.{i}.router": f"l.{i}.gate" for i in (1, 3)}, **{f"l.{i}.w": f"l.{i}.weight" for i in range(4)}},
    ),
}


@pytest.mark.parametrize(("short", "full"), SHORT_AND_LONG.values(), ids=SHORT_AND_LONG)
def test_a_short_map_stands_for_the_long_one(short, full):
    assert in_words(expanded(short, *names_of(full))) == in_words(full)


@pytest.mark.parametrize(("short", "full"), SHORT_AND_LONG.values(), ids=SHORT_AND_LONG)
def test_a_long_map_is_written_as_one_that_stands_for_it(short, full):
    written = collapsed(full, *names_of(full))
    assert in_words(expanded(written, *names_of(full))) == in_words(full)
    if "experts" not in describe(next(iter(short))) + describe(next(iter(short.values()))):
        letters = [in_words({k: v}) for k, v in short.items()]
        assert len(written) == len(letters)


LAYER_ENTRIES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)


@given(
    layers=st.lists(LAYER_ENTRIES, min_size=1, max_size=5),
    left_out=st.sets(st.tuples(st.integers(0, 4), st.sampled_from("abcdef")), max_size=3),
    stacked=st.booleans(),
)
def test_any_map_of_layers_is_written_so_that_it_stands_for_itself(layers, left_out, stacked):
    def entry(i: int, kind: str):
        left = stack(f"m.{i}.{kind}", f"m.{i}.{kind}2") if stacked else f"m.{i}.{kind}"
        return left, f"t.layers.{i}.{kind}_weight"

    every = dict(entry(i, kind) for i, kinds in enumerate(layers) for kind in kinds)
    known = names_of(every)
    full = dict(entry(i, kind) for i, kinds in enumerate(layers) for kind in kinds if (i, kind) not in left_out)
    written = collapsed(full, *known)
    assert in_words(expanded(written, *known)) == in_words(full)
    if not left_out and all(set(kinds) == set(layers[0]) for kinds in layers) and len(layers) > 1:
        assert len(written) == len(layers[0])


@pytest.mark.parametrize(
    ("pattern", "known", "numbers"),
    [
        ("l.{i+1}.w", ["l.0.w", "l.1.w", "l.2.w"], [1, 2]),
        ("l.{i-1}.w", ["l.0.w", "l.1.w"], [0, 1]),
        ("l.{i}.next.{i+1}", ["l.0.next.1", "l.1.next.1", "l.3.next.4"], [0, 3]),
    ],
)
def test_a_number_that_is_counted_from_another_is_never_below_0(pattern, known, numbers):
    matched = {"l.0.next.1": 0, "l.3.next.4": 3}
    found = expanded_names({pattern: "each"}, known)
    assert [matched[name] if "next" in name else int(name.split(".")[1]) for name in found] == numbers


def of_layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def test_a_pair_of_any_number_of_layers_has_their_map():
    for count in (1, 2, 11):
        pair = Pair(
            of_layers(count), of_layers(count), lambda rng: rng.normal(4, 4), under({"weight": "weight"}, "{i}.")
        )
        assert pair.weights == {f"{i}.weight": f"{i}.weight" for i in range(count)}


WRONG = {
    "fewer layers in TE": (4, 3, "{i}.", 'there is no TE parameter "3.weight"'),
    "more layers in TE": (3, 4, "{i}.", 'TE parameter "3.weight" (4, 4) is filled by no entry'),
    "no such layers": (2, 2, "layers.{i}.", 'there is no reference parameter "layers.{i}.weight"'),
}


@pytest.mark.parametrize(("ours", "theirs", "prefix", "message"), WRONG.values(), ids=WRONG)
def test_layers_that_one_module_lacks_are_named(ours, theirs, prefix, message):
    reference, candidate = of_layers(ours), of_layers(theirs)
    pair = Pair(reference, candidate, lambda rng: rng.normal(4, 4), under({"weight": "weight"}, prefix))
    with pytest.raises(WeightMapError) as raised:
        check_map(pair.weights, parameter_shapes(reference), parameter_shapes(candidate))
    assert message in str(raised.value)


def test_how_ranks_divide_weights_is_said_of_all_layers_at_once():
    known = ["layers.0.w", "layers.1.w", "head"]
    assert expanded_names({"layers.{i}.w": 0, "head": 1, "others.{i}": 2}, known) == {
        "layers.0.w": 0,
        "layers.1.w": 0,
        "head": 1,
    }


def test_a_suggested_map_has_one_entry_for_all_layers():
    te = parity.te.kernels("cpu").te
    pair = Pair(
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))),
        nn.Sequential(*(te.Linear(16, 16) for _ in range(3))),
        lambda rng: rng.normal(16, 16),
    )
    suggestion = parity.suggest_map(pair, backend="cpu")
    assert suggestion.written == {"{i}.weight": "{i}.weight", "{i}.bias": "{i}.bias"}
    assert len(suggestion.weights) == 6
