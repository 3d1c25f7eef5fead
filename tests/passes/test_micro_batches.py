"""The factors by which losses of micro-batches are multiplied are derived from the reference itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import parity
from lab.corpus.trained_ports.trainings import case_of
from parity import Pair, Training, te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.passes.prepare import prepare
from parity.trainings.micro_batches import _choose_count, micro_batches
from parity.trainings.steps import step_case
from parity.user_error import UserError

WIDTH = 16


class Scores(nn.Linear):
    """A layer whose outputs are scores of classes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class Mixing(Scores):
    """A layer that subtracts the mean of the batch, so that every token depends on all others."""

    def forward(self, x):
        return super().forward(x - x.mean((0, 1)))


def labels(rng, counts=(8, 4, 4, 0)):
    """Return labels for 4 rows of 8 tokens, of which ``counts`` count in each row."""
    drawn = rng.integers(4, 8, high=WIDTH)
    for row, count in zip(drawn, counts, strict=True):
        row[count:] = -100
    return drawn


def over_tokens(reduction):
    return lambda y, x, labels: cross_entropy(y.flatten(0, -2).float(), labels.flatten(), reduction=reduction)


BATCHES = {
    "a sum": (over_tokens("sum"), lambda rng: (rng.normal(4, 8, WIDTH), labels(rng)), (1.0, 1.0, 1.0, 0.0)),
    "a mean over the tokens that count": (
        over_tokens("mean"),
        lambda rng: (rng.normal(4, 8, WIDTH), labels(rng, (8, 4, 2, 2))),
        (1 / 2, 1 / 4, 1 / 8, 1 / 8),
    ),
    "a mean over all": (lambda y, x: y.square().mean(), lambda rng: (rng.normal(4, 8, WIDTH),), (1 / 4,) * 4),
    "rows that do not divide": (
        lambda y, x: y.square().mean(),
        lambda rng: (rng.normal(6, 8, WIDTH),),
        (1 / 3, 1 / 3, 1 / 6, 1 / 6),
    ),
    "a single row": (lambda y, x: y.square().mean(), lambda rng: (rng.normal(1, 2, WIDTH),), (1 / 2, 1 / 2)),
}


def first_step(loss, inputs, reference=Scores):
    kernels = te.kernels("cpu")
    case = Case(
        "scores",
        lambda te: Pair(
            reference(),
            te.Linear(WIDTH, WIDTH, bias=False),
            inputs=inputs,
            weights={"weight": "weight"},
            call_reference=lambda module, x, *_: module(x),
            call_candidate=lambda module, x, *_: module(x),
            training=Training(loss=loss),
        ),
        sizes=({},),
    )
    (checked,) = check_case(case, kernels.te)
    return prepare(step_case(case, 1, None, 0), checked, torch.float32, 0, kernels)


@pytest.mark.parametrize(("loss", "inputs", "shares"), BATCHES.values(), ids=BATCHES)
def test_shares_are_what_makes_the_gradients_of_the_parts_those_of_the_whole(loss, inputs, shares):
    prepared = first_step(loss, inputs)
    parts = micro_batches(prepared)(prepared.inputs)
    assert [part.share for part in parts] == pytest.approx(shares, abs=1e-8)


@pytest.mark.parametrize(
    ("batch", "dim", "count"),
    [
        (torch.empty(4, 32, 64), 0, 4),
        (torch.empty(32, 64), 0, 2),  # FP8 takes 16 tokens, and no 8
        (torch.empty(96, 64), 0, 3),  # MXFP8 takes 32
        (torch.empty(1, 64, 64), 1, 2),
        (torch.empty(16, 16, dtype=torch.long), 0, 4),
        (torch.empty(6, 5), 0, 4),  # no part fits
    ],
)
def test_a_batch_is_split_into_parts_that_fp8_takes(batch, dim, count):
    assert _choose_count(batch, dim, is_quantized=True) == count
    assert _choose_count(batch, dim, is_quantized=False) == 4


def test_a_loss_that_depends_on_the_whole_batch_is_refused():
    with pytest.raises(UserError, match="not a weighted sum of the losses of its micro-batches"):
        micro_batches(first_step(*BATCHES["a mean over all"][:2], reference=Mixing))


def called_by(first_of_them):
    """Return a pair that itself says which of its calls is the first micro-batch of a step of four."""

    def factory(te):
        pair, calls = case_of("mlp").factory(te), iter(range(10**6))
        return dataclasses.replace(
            pair, call_candidate=lambda module, x: module(x, is_first_microbatch=next(calls) % 4 == first_of_them)
        )

    return Case("mlp", factory, sizes=({},))


@pytest.mark.parametrize(
    ("first", "status"), [(0, "passed"), (1, "failed")], ids=["the first", "the second is said to be the first"]
)
def test_fp8_weights_that_are_kept_over_an_update_by_one_micro_batch_fail(first, status):
    (result,) = parity.compare(called_by(first), ["fp8_current"], steps=3, switch="micro-batches")
    assert result.status == status


def test_te_is_told_which_micro_batch_is_the_first():
    told = []

    def factory(te):
        class Told(te.LayerNormMLP):
            def forward(self, x, is_first_microbatch=None):
                told.append(is_first_microbatch)
                return super().forward(x, is_first_microbatch=is_first_microbatch)

        pair = case_of("mlp").factory(te)
        pair.candidate.__class__ = Told
        return pair

    (result,) = parity.compare(Case("mlp", factory, sizes=({},)), ["bf16"], steps=2, switch="micro-batches")
    assert (result.status, told) == ("passed", [True, False, False, False] * 2)


def test_a_pair_with_a_step_of_its_own_splits_its_batches_itself():
    case = case_of("mlp", lambda te: Training(candidate_step=lambda model, optimizer, x: None))
    (result,) = parity.compare(case, ["bf16"], steps=2, switch="micro-batches")
    assert result.status == "error"
    assert "split the batch there" in result.reason
