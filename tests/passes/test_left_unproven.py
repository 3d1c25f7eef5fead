"""Notes that a pass would have passed whatever the candidate computed, and what strict runs make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import result, tensor

from parity.judge.judge import merged
from parity.passes.refusals import left_unproven
from parity.result import ProvesNothing, TensorResult, as_printable, strictly

OUTPUT, GRADIENT = tensor(), tensor("w", "weight gradient")
FORWARD, BACKWARD = "nothing is known of the forward pass", "nothing is known of the backward pass"


def zero(one: TensorResult) -> TensorResult:
    return replace(one, errors=replace(one.errors, golden_rms=0.0))


def lost(one: TensorResult) -> TensorResult:
    return replace(one, tolerance_relative_l2=1.0)


@pytest.mark.parametrize(
    ("tensors", "differentiated", "told"),
    [
        ([OUTPUT, GRADIENT], True, []),
        ([OUTPUT, zero(GRADIENT), tensor("x", "input gradient")], True, []),
        ([OUTPUT, lost(GRADIENT), GRADIENT], True, []),
        ([OUTPUT], False, []),
        ([OUTPUT], True, [BACKWARD]),
        ([OUTPUT, zero(GRADIENT), lost(GRADIENT)], True, [BACKWARD]),
        ([zero(OUTPUT), lost(OUTPUT), GRADIENT], True, [FORWARD]),
        ([tensor(kind="probed output"), zero(OUTPUT), GRADIENT], True, []),
        ([zero(OUTPUT)], False, [FORWARD]),
    ],
)
def test_a_pass_proves_nothing_if_none_of_its_tensors_shows_anything(
    tensors: list[TensorResult], differentiated: bool, told: list[str]
) -> None:
    assert [note.partition(":")[0] for note in left_unproven(tensors, differentiated)] == told


def test_a_strict_result_is_an_error_only_where_nothing_is_proven() -> None:
    nothing, partly = ProvesNothing("nothing\x1b"), "frozen: w"
    assert strictly(result()).status == strictly(result(notes=(partly, "nothing"))).status == "passed"
    assert strictly(result(margin=2.0, notes=(nothing,))).status == "failed"
    found = strictly(as_printable(result(notes=(partly, nothing))))
    assert (found.status, found.reason.partition(" (")[0], found.tensors) == ("error", "nothing\\x1b", ())
    assert strictly(result(status="skipped", reason="no FP8", tensors=())).status == "error"
    # What proves nothing about one output may prove something about another.
    assert merged([result(notes=(partly, nothing)), result()]).notes == (partly,)
    assert strictly(merged([result(notes=(nothing,)), result(notes=(nothing,))])).status == "error"
