"""Parameters that one module ties and the other does not: each way is told, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

te = parity.te.kernels("cpu").te
VOCABULARY, WIDTH = 96, 64


class Model(nn.Module):
    """Looks up tokens, runs a layer, and multiplies by the head."""

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
    assert 'the candidate holds it apart, in "embedding.weight", "head.weight"' in note


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
    """Two layers after one norm."""

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
