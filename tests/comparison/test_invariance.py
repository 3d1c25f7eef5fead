"""Results that depend on how tokens are arranged are found, and told from what recipes, kernels and references do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lab.corpus.catalogue import RIGHT as OF_CORPUS
from lab.corpus.ranked_ports.ranks import Row
from lab.corpus.ranked_ports.ranks import case_of as case_over_ranks
from lab.studies.invariance.ports import RIGHT, WRONG
from parity import te
from parity.api import compare
from parity.case.case import Case, Pair
from parity.case.registry import pair
from parity.case.validate import check_case
from parity.invariance import Outcome, check_invariance_at, try_axes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.ranks.layout import degrees
from parity.settings import AXES
from parity.te import PRECISIONS
from parity.user_error import UserError

WIDTH = 64


def request_of(case: Case, precision: str = "bf16") -> Request:
    kernels = te.kernels("cpu")
    checked, *_ = check_case(case, kernels.te)
    return Request(case, checked, PRECISIONS[precision], 0, kernels, packaged())


def outcomes(case: Case, precision: str = "bf16", axes: Sequence[str] = AXES) -> dict[str, Outcome]:
    return {one.axis: one for one in try_axes(request_of(case, precision), axes)}


def case_of(reference: Any, candidate: Any = None, batch: int = 32, invariance: tuple[str, ...] = ()) -> Case:
    """Return a pair of modules of the same parameters that take ``[batch, 64]``; both are functions of ``te``."""

    def factory(te: Any) -> Pair:
        module = reference(te)
        return Pair(
            reference=module,
            candidate=(candidate or reference)(te),
            weights={name: name for name, _ in module.named_parameters()},
            inputs=lambda rng: rng.normal(batch, WIDTH),
        )

    return Case("arranged", factory, sizes=({},), probe=False, invariance=invariance, path=Path(__file__))


LINEAR = case_of(lambda te: nn.Linear(WIDTH, WIDTH), lambda te: te.Linear(WIDTH, WIDTH))

# Wrong ports pass an ordinary comparison, and right ones depend on nothing.

SOME = {  # one of each kind of mistake, with an axis that shows it; the study ``invariance`` tries all
    "mask=none": "padding-right",
    "mask=lengths": "padding-left",
    "where=place": "padding-left",
    "over=all": "padding-garbage",
    "norm over the batch": "batch-size",
    "one sequence": "batch-place",
    "buffer of 32 tokens": "batch-place",
    "capacity=26": "batch-size",
    "reads=none": "batch-size",
    "reads=last": "batch-size",
    "restarts=False": "batch-place",
    "positions from the end": "prefix",
    "first key lost": "decoding",
    "gradient by the batch": "micro-batches",
    "again with relu": "recompute",
}
CHOSEN = {
    f"{one.name} ({axis})": (one.case, axis) for one in WRONG for end, axis in SOME.items() if one.name.endswith(end)
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_port_that_depends_on_its_neighbours_passes_a_comparison_and_fails_on_an_axis(name: str) -> None:
    case, axis = CHOSEN[name]
    (result,) = compare(case, ["bf16"], diagnose=False)
    assert result.passed
    assert outcomes(case, axes=[axis])[axis].verdict == "depends"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_port_depends_on_nothing(name: str) -> None:
    assert {one.axis for one in outcomes(RIGHT[name]).values() if one.verdict == "depends"} == set()


def test_there_are_40_wrong_ports() -> None:
    assert len({one.name for one in WRONG}) == len(WRONG) >= 40


def test_te_takes_a_padding_mask_for_lengths() -> None:
    found = outcomes(OF_CORPUS["padded_attention"], axes=["padding-right", "padding-left", "padding-garbage"])
    assert {axis: one.verdict for axis, one in found.items()} == {
        "padding-right": "equal",
        "padding-left": "depends",
        "padding-garbage": "equal",
    }


# What explains a change.


@pytest.mark.parametrize(
    ("precision", "verdict"),
    [
        ("fp32", "equal"),
        ("bf16", "equal"),
        ("fp8_block", "equal"),
        ("fp8_current", "recipe"),
        ("fp8_delayed", "recipe"),
    ],
)
def test_one_scale_for_a_tensor_couples_its_rows_and_blocks_do_not(precision: str, verdict: str) -> None:
    (found,) = outcomes(
        case_of(lambda te: nn.Linear(WIDTH, WIDTH), lambda te: te.Linear(WIDTH, WIDTH)), precision, ["batch-size"]
    ).values()
    assert found.verdict == verdict
    assert bool(found.change) == (verdict == "recipe")


def test_a_sum_over_the_batch_in_another_order_is_what_kernels_may_do() -> None:
    found = outcomes(LINEAR, axes=["batch-place", "micro-batches"])
    assert {one.verdict for one in found.values()} <= {"equal", "kernels"}
    assert found["micro-batches"].verdict == "kernels"


class Centred(nn.Module):
    """A linear layer that subtracts the mean over the batch if that is asked for."""

    def __init__(self, over_batch: bool) -> None:
        super().__init__()
        self.over_batch, self.linear = over_batch, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y - y.mean(0) if self.over_batch else y


def test_a_reference_that_depends_on_its_batch_is_not_blamed_on_the_port() -> None:
    found = outcomes(case_of(lambda te: Centred(True)), axes=["batch-size", "batch-place", "micro-batches"])
    assert {one.verdict for one in found.values()} == {"reference"}
    assert "the reference's own" in found["batch-size"].told


def test_a_finding_says_what_changes_and_where() -> None:
    one = next(one for one in WRONG if one.name.endswith("norm over the batch"))
    found = outcomes(one.case, axes=["batch-size"])["batch-size"]
    assert found.change > 0.001
    assert "among as many others" in found.told
    assert "it departs from the reference" in found.told


class Refusing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 32:
            raise RuntimeError("only 32 rows")
        return super().forward(x)


def test_a_port_that_raises_on_another_batch_is_found() -> None:
    found = outcomes(
        case_of(lambda te: nn.Linear(WIDTH, WIDTH), lambda te: Refusing(WIDTH, WIDTH)), axes=["batch-size"]
    )
    assert found["batch-size"].verdict == "depends"
    assert "only 32 rows" in found["batch-size"].told


# Axes that do not apply are said to be so.


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("padding-left", "no argument of the inputs is a padding mask or holds lengths"),
        ("packing", "no argument of the inputs holds the borders of packed documents"),
        ("decoding", "the port is not called by parity.Decoding"),
    ],
)
def test_an_axis_that_does_not_apply_says_what_is_missing(axis: str, words: str) -> None:
    case = RIGHT["prefix"]
    found = outcomes(case, axes=[axis])[axis]
    assert found.verdict == "none"
    assert words in found.told


def test_lengths_mark_no_padding_on_the_left() -> None:
    found = outcomes(OF_CORPUS["encoder_with_lengths"], axes=["padding-right", "padding-left"])
    assert {one.verdict for one in found.values()} == {"none"}  # the reference knows 32 positions and no more
    assert "the reference cannot compute it" in found["padding-right"].told
    assert found["padding-left"].told.endswith("holds lengths, which mark no padding on the left")


def test_a_loss_that_is_a_mean_over_the_batch_has_the_gradients_of_its_micro_batches() -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    found = outcomes(case_of(lambda te: Loss(WIDTH, WIDTH)), "fp32", ["micro-batches", "batch-place", "batch-size"])
    assert {one.verdict for one in found.values()} <= {"equal", "kernels"}


# Ranks, as the pair declares them.


def over_ranks(variant: Row) -> Outcome:
    case = replace(case_over_ranks(variant.host, variant.variant), ranks=(degrees(variant.ranks),))
    return outcomes(case, "bf16", ["ranks"])["ranks"]


@pytest.mark.parametrize(
    ("host", "ranks", "verdict"),
    [
        ("column", dict(tp=2), "kernels"),  # the input's gradient is a sum over ranks
        ("mlp", dict(tp=2, sequence_parallel=True), "kernels"),
        ("row", dict(tp=2, sequence_parallel=True), "kernels"),  # as is the bias's, each part in BF16
        ("attention", dict(cp=2), "kernels"),
        ("experts", dict(ep=2), "equal"),
    ],
)
def test_two_ranks_compute_what_one_does_but_for_the_order_of_sums(host: str, ranks: Any, verdict: str) -> None:
    variant = "p2p" if host == "attention" else ""
    found = over_ranks(Row(host, variant, ranks))
    assert (found.verdict, found.told.partition(",")[0]) == (verdict, f"over {degrees(ranks).label}")


@pytest.mark.parametrize(
    ("host", "variant", "ranks", "told"),
    [
        ("row", "bias on every rank", dict(tp=2), "output changes by"),
        ("mlp", "norm gradient not reduced", dict(tp=2, sequence_parallel=True), "d norm.weight changes by"),
    ],
)
def test_a_mistake_over_ranks_is_found(host: str, variant: str, ranks: Any, told: str) -> None:
    found = over_ranks(Row(host, variant, ranks))
    assert found.verdict == "depends"
    assert told in found.told


def test_without_ranks_there_is_no_such_axis() -> None:
    found = outcomes(LINEAR, axes=["ranks"])["ranks"]
    assert (found.verdict, found.told) == ("none", "the pair is declared without ranks=[...]")


# Declared with a pair.


@functools.cache
def declared(axes: tuple[str, ...]) -> Case:
    def factory(te: Any) -> Pair:
        return next(one for one in WRONG if one.name.endswith("norm over the batch")).case.factory(te)

    return Case("declared", factory, sizes=({},), invariance=axes, path=Path(__file__))


def test_a_pair_fails_on_an_axis_that_it_declares() -> None:
    (result,) = compare(declared(("batch-size",)), ["bf16"], diagnose=False)
    assert result.status == "failed"
    (found,) = result.findings
    assert (found.code, found.title) == ("PAR275", "not-invariant")
    assert found.message.startswith("batch-size: among as many others, ")


def test_a_pair_passes_on_other_axes_with_a_note_on_what_explains_a_change() -> None:
    (result,) = compare(declared(("recompute",)), ["bf16"], diagnose=False)
    assert result.passed
    case = Case("noted", LINEAR.factory, sizes=({},), invariance=("batch-size",), path=Path(__file__))
    (result,) = compare(case, ["fp8_current"], diagnose=False)
    assert result.passed
    assert any(note.startswith("batch-size: ") and "as the recipe's scales explain" in note for note in result.notes)


def test_a_comparison_without_a_verdict_stays_as_it_is() -> None:
    request = request_of(declared(("batch-size",)))
    skipped = request.result("skipped", reason="for a test")
    assert check_invariance_at(request, skipped) is skipped


def test_an_unknown_axis_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        UserError, match=r"unknown axis 'batchsize' of invariance; there are batch-size, batch-place, .*"
    ):
        pair("unknown_axis", invariance=["batchsize"])(lambda te: None)
    with pytest.raises(UserError, match=r"invariance must be a list of names"):
        pair("unknown_axis", invariance="batch-size")(lambda te: None)


def test_a_pair_that_does_not_run_at_a_precision_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match=r"PARITY_EMULATED_GPU=blackwell"):
        try_axes(request_of(LINEAR, "mxfp8"))
