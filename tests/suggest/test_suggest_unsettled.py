"""What ``suggest_map`` could not find, or could not tell from something else, it says."""

from __future__ import annotations

import math
import textwrap

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.case import registry
from parity.cli import reports
from parity.suggest import Suggestion
from parity.suggest.suggestion import explain

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


@pytest.mark.parametrize("layers", [1, 3])
def test_an_rms_norm_that_became_a_layer_norm_is_hinted_at_once(layers):
    def mlp(normalization: str) -> nn.Module:
        return te.LayerNormMLP(HIDDEN, FFN, normalization=normalization, activation="swiglu", bias=False)

    def reference() -> nn.Module:
        return nn.Sequential(*(parity.reference.SwiGLUMLP(HIDDEN, FFN) for _ in range(layers)))

    wrong, right = (
        suggested(reference(), nn.Sequential(*(mlp(normalization) for _ in range(layers))))
        for normalization in ("LayerNorm", "RMSNorm")
    )
    assert not wrong.fits
    (hint,) = wrong.hints
    assert "looks like an RMSNorm" in hint
    assert 'is normalization="RMSNorm" meant?' in hint
    assert right.fits
    assert right.hints == ()


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_hint_is_printed_before_the_map(tmp_path, capsys):
    text = """
        import parity
        from torch import nn

        @parity.pair("hinted")
        def hinted(te):
            return parity.Pair(nn.RMSNorm(64), te.LayerNorm(64), lambda rng: rng.normal(16, 64))
    """
    (tmp_path / "hinted_pairs.py").write_text(textwrap.dedent(text))
    declared = registry.cases()
    settled = reports.suggest(str(tmp_path / "hinted_pairs.py"), 0, 0, "cpu", keep=True, max_runs=10)
    registry.restore(declared)
    told = capsys.readouterr().out
    assert not settled
    assert 0 < told.index('normalization="RMSNorm"') < told.index("weights={")


def test_a_layer_norm_that_became_an_rms_norm_is_told_with_the_option():
    suggestion = suggested(Normed(nn.LayerNorm(HIDDEN)), Normed(te.RMSNorm(HIDDEN)))
    (problem,) = suggestion.problems
    assert '"norm.bias" (64,) has no place in the TE module; build that with it (normalization="LayerNorm"' in problem


class Tied(nn.Module):
    """An embedding and a head, maybe one parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.lm_head = nn.Embedding(FFN, HIDDEN), nn.Linear(HIDDEN, FFN, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.tokens(ids))


def test_a_head_that_te_alone_ties_is_told_with_what_it_is_tied_to():
    suggestion = suggested(Tied(tied=False), Tied(tied=True), inputs=lambda rng: rng.integers(2, 16, high=FFN))
    (problem,) = suggestion.problems
    assert 'which ties its "lm_head.weight" to "tokens.weight", and the reference has two parameters' in problem


def test_a_tied_name_in_an_entry_that_stays_is_told_as_tied():
    with pytest.raises(parity.UserError, match=r'it is tied to "tokens\.weight"'):
        suggested(
            Tied(tied=True),
            Tied(tied=False),
            inputs=lambda rng: rng.integers(2, 16, high=FFN),
            weights={"lm_head.weight": "lm_head.weight"},
        )
