"""What ``suggest_map`` could not find, or could not tell from something else, it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.suggest import Suggestion
from parity.suggest.text import explain

te = parity.te.kernels("cpu").te
HIDDEN, FFN = 64, 96


def suggested(reference: nn.Module, candidate: nn.Module, **fields) -> Suggestion:
    return parity.suggest_map(
        parity.Pair(reference, candidate, **{"inputs": lambda rng: rng.normal(2, 16, HIDDEN), **fields})
    )


class Sum(nn.Module):
    """Two layers that can be exchanged without changing the sum."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.first, self.second = layer(HIDDEN, FFN), layer(HIDDEN, FFN)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def test_alternatives_that_are_equally_good_are_told_as_tied():
    class Renamed(Sum):
        def __init__(self, layer) -> None:
            super().__init__(layer)
            self.left, self.right = self._modules.pop("first"), self._modules.pop("second")

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    suggestion = suggested(Sum(nn.Linear), Renamed(te.Linear))
    assert suggestion.fits
    assert not suggestion.settled
    assert [decision.outcome for decision in suggestion.decisions] == ["tied"]
    assert "NOT settled by running both modules" in explain(suggestion)


def test_where_no_map_fits_the_best_is_told_with_its_error_and_what_to_look_at():
    reference = parity.reference.GatedMLP(HIDDEN, FFN, "geglu")
    mlp = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False)
    suggestion = suggested(reference, mlp)
    assert not suggestion.fits
    assert not suggestion.settled
    assert suggestion.error > 10 * suggestion.expected
    assert suggestion.weights[parity.stack("gate_proj.weight", "up_proj.weight")] == "fc1_weight"
    told = explain(suggestion)
    assert f"the error is {suggestion.error:.2g}" in told
    assert "activation" in told


def test_a_parameter_without_a_counterpart_is_a_problem_that_names_it():
    suggestion = suggested(nn.Linear(HIDDEN, FFN), te.Linear(HIDDEN, FFN, bias=False))
    assert not suggestion.settled
    assert math.isnan(suggestion.error)
    (problem,) = suggestion.problems
    assert '"bias" (96,) has no place in the TE module' in problem


def test_modules_of_different_sizes_are_a_problem_that_names_both():
    suggestion = suggested(nn.Linear(HIDDEN, FFN, bias=False), te.Linear(HIDDEN, HIDDEN, bias=False))
    assert suggestion.weights == {}
    assert [name in " ".join(suggestion.problems) for name in ("(96, 64)", "(64, 64)")] == [True, True]


def test_a_candidate_that_cannot_run_leaves_a_map_by_names_and_the_reason():
    def explode(module: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    suggestion = suggested(nn.Linear(HIDDEN, HIDDEN), te.Linear(HIDDEN, HIDDEN), call_candidate=explode)
    assert suggestion.weights == {"weight": "weight", "bias": "bias"}
    assert "the candidate raised RuntimeError: no such kernel" in suggestion.problems[0]
    assert not suggestion.settled


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (lambda rng: torch.full((4, HIDDEN), math.nan), "not finite in FP64"),
        (lambda rng: torch.zeros(4, HIDDEN), "all zero on these inputs"),
    ],
)
def test_inputs_that_tell_no_map_from_another_are_a_problem(inputs, reason):
    suggestion = suggested(nn.Linear(HIDDEN, HIDDEN, bias=False), te.Linear(HIDDEN, HIDDEN, bias=False), inputs=inputs)
    assert reason in suggestion.problems[0]
    assert not suggestion.settled


def test_projections_of_one_name_whose_shapes_do_not_go_together_are_told_together():
    reference = nn.MultiheadAttention(HIDDEN, 4, batch_first=True, kdim=32, vdim=48)
    candidate = te.MultiheadAttention(HIDDEN, 4, attention_type="cross", qkv_format="bshd", attn_mask_type="no_mask")
    suggestion = suggested(
        reference, candidate, inputs=lambda rng: (rng.normal(2, 16, HIDDEN), rng.normal(2, 8, 32), rng.normal(2, 8, 48))
    )
    (problem,) = suggestion.problems
    assert '"k_proj_weight" (64, 32)' in problem
    assert '"key_value.key_weight" (64, 64)' in problem
