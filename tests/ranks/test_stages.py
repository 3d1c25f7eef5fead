"""Pairs over the stages of a pipeline: right ones pass, wrong ones fail with the mistake's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parity
from lab.corpus.ranked_ports.staged import PP, RIGHT, WRONG, case_of
from parity.case import registry
from parity.case.case import Case
from parity.ranks.layout import Axis, Pipeline, Stage, degrees


def named(entry):
    return f"{entry.variant or 'right'}, {degrees(entry.ranks).label}"


@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_a_right_port_passes(right):
    (result,) = parity.compare(case_of(right.host, right.variant), ["bf16"], ranks=right.ranks)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())


@pytest.mark.parametrize("wrong", WRONG, ids=named)
def test_a_mistake_is_named(wrong):
    (result,) = parity.compare(case_of(wrong.host, wrong.variant), ["bf16"], ranks=wrong.ranks)
    assert (result.status, result.findings[0].title in wrong.titles) == ("failed", True)


def two_layers(te, ranks, pipeline=Pipeline(micro_batches=3)):  # noqa: B008
    layers = {name: te.Linear(32, 32, bias=False) for name in "ab"}
    own = [name for at, name in enumerate("ab") if ranks.pp.size == 1 or at == ranks.pp.rank]
    candidate = nn.Sequential()
    for name in own:
        candidate.add_module(name, layers[name])
    reference = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    return parity.Pair(
        reference=reference,
        candidate=candidate,
        inputs=lambda rng: rng.normal(24, 32),
        weights={"0.weight": "a.weight", "1.weight": "b.weight"},
        parallel=parity.Parallel(pipeline=pipeline),
    )


def uneven(te, ranks):
    return two_layers(te, ranks, Pipeline(micro_batches=5))


def of_another_model(te, ranks):
    return two_layers(te, ranks, Pipeline(names=lambda name: f"model.{name}"))


@pytest.mark.parametrize(
    ("factory", "status", "told"),
    [
        (two_layers, "passed", ""),
        (uneven, "error", "dimension 0 of (24, 32) does not divide into 5 micro-batches"),
        (of_another_model, "error", "that the candidate in one process lacks"),
    ],
)
def test_stages_are_put_together_by_their_names_with_the_gradients_of_inputs(factory, status, told):
    (result,) = parity.compare(Case("two layers", factory, sizes=({},)), ["bf16"], ranks=PP)
    assert (result.status, told in result.reason) == (status, True)
    assert status != "passed" or {one.kind for one in result.tensors} >= {"output", "input gradient"}


def test_the_example_s_model_is_right_in_two_stages():
    declared = registry.cases()
    registry.restore([])
    try:
        case = registry.load_case(Path(__file__).parents[2] / "examples" / "pipeline.py", "model_in_stages")
        (result,) = parity.compare(case, ["bf16"], ranks=dict(tp=2, pp=2))
    finally:
        registry.restore(declared)
    assert (result.status, result.reason, result.ranks) == ("passed", "", "tp2xpp2")


def test_a_training_over_stages_is_refused():
    (result,) = parity.compare(Case("two layers", two_layers, sizes=({},)), ["bf16"], ranks=PP, steps=2)
    assert (result.status, "trainings over the stages" in result.reason) == ("error", True)


def test_no_tensor_is_divided_over_stages():
    with pytest.raises(parity.UserError, match="unknown axis 'pp'; tensors are divided over tp, cp, ep, dp"):
        parity.over("pp")


def test_one_stage_of_several_micro_batches_is_the_whole_pass():
    layer, x = nn.Linear(4, 4), torch.randn(6, 4)
    stage = Stage(Pipeline(micro_batches=3), Axis())
    assert torch.equal(stage.forward(None, layer, x), layer(x))
    stage.backward()


@pytest.mark.parametrize(
    ("dim", "shapes"),
    [(0, {"x": [2, 4], "mask": [2], "scale": []}), (1, {"x": [6, 2], "mask": [6], "scale": []})],
)
def test_each_tensor_that_has_the_dimension_is_divided(dim, shapes):
    inputs = {"x": torch.zeros(6, 4), "mask": torch.zeros(6), "scale": torch.zeros(()), "causal": True}
    parts = Pipeline(micro_batches=3 if dim == 0 else 2, dim=dim).parts(inputs)
    assert {name: list(x.shape) for name, x in parts[0].items() if isinstance(x, Tensor)} == shapes
    assert [one["causal"] for one in parts] == [True] * len(parts)
