"""How a finding expresses doubt, and which of several explanations is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter

import parity
from parity.mistakes.alternatives import is_written, written_near
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.freedom import FUSED, UNFUSED
from parity.result import Code
from parity.search import in_full
from parity.search.explanation import _told
from parity.search.in_full import Explanation
from parity.search.search import _best_of_its_place, _Search
from parity.te import PRECISIONS

# A finding is certain if everything is right once it is repaired, nothing else explains as much, and its number is
# one that people write.


def explanation(title: str, left: float | None = None, value: float | None = None, misfit: float = 1.0) -> Explanation:
    made = partial(Hypothesis, title, title, f"repair {title}")
    one = made(value=value, tuned=None if value is None else lambda other: made(value=other))
    tensor: Any = None if left is None else SimpleNamespace(label="d weight", margin=left)
    return Explanation((one,), tensor, misfit, "output", 0.1, 0.003, ())


@pytest.mark.parametrize(
    ("explained", "doubts"),
    [
        ([explanation("norm-eps")], [""]),
        ([explanation("norm-eps", value=5e-6)], [""]),
        ([explanation("norm-eps", value=4.2e-6)], ["4.2e-06 is an unusual value"]),
        ([explanation("norm-eps", left=3.0)], ["d weight is still 3 times its limit then"]),
        ([explanation("norm-eps", left=float("inf"))], ["d weight is still not finite then"]),
        (
            [explanation("norm-eps", misfit=1.3)],
            ["the error of all tensors together is still 1.3 times the normal one"],
        ),
        (
            [explanation("norm-eps"), explanation("factor")],
            ["PAR256 factor explains it equally well", "norm-eps explains it equally well"],
        ),
        ([explanation("norm-eps"), explanation("factor", left=2.0)], ["", "d weight is still 2 times its limit then"]),
    ],
)
def test_a_finding_says_what_speaks_against_it(explained, doubts):
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden, results=())
    told = list(_told(explained, failure))
    assert [one.sure for one in told] == [not doubt for doubt in doubts]
    for one, doubt in zip(told, doubts, strict=True):
        assert doubt in one.message
        assert one.name.endswith("(perhaps)") == bool(doubt)


@pytest.mark.parametrize(
    ("changed", "after", "is_sure"),
    [({}, 0.003, True), ({}, 0.098, False), ({"subtle": True}, 0.098, True), ({"value": 1e-6}, 0.098, True)],
)
def test_a_large_mistake_that_changes_hardly_anything_is_doubted(changed, after, is_sure):
    one = replace(explanation("post-norm").hypotheses[0], **changed)
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden, results=())
    (told,) = _told([replace(explanation("post-norm"), hypotheses=(one,), before=0.1, after=after)], failure)
    assert told.sure == is_sure
    assert ("other mistakes may look the same" in told.message) != is_sure


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [
        ({"read": lambda weights: weights, "code": Code(('"a": "b"',), ('"a": "c"',))}, True),
        ({"read": lambda weights: weights}, False),
        ({"code": Code(("eps=1",), ("eps=2",))}, False),
    ],
)
def test_another_entry_of_the_map_has_the_effect_of_code_that_exchanges_what_it_gives(changed, is_told):
    one = replace(explanation("key-value-swapped").hypotheses[0], **changed)
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden, results=())
    (told,) = _told([replace(explanation("key-value-swapped"), hypotheses=(one,))], failure)
    assert told.sure
    assert ("if the map says what you mean, the port's code uses" in told.message) == is_told


@pytest.mark.parametrize(("numel", "error", "is_sure"), [(4096, 0.03, True), (4096, 0.019, False), (1, 0.3, False)])
def test_two_mistakes_are_doubted_where_no_tensor_of_many_numbers_is_far_off(numel, error, is_sure):
    both = tuple(explanation(title).hypotheses[0] for title in ("norm-missing", "norm-eps"))
    failed = SimpleNamespace(
        numel=numel, passed=False, errors=SimpleNamespace(relative_l2=error), tolerance_relative_l2=0.01
    )
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden, results=[failed])
    told = _told([replace(explanation("norm-missing"), hypotheses=both)], failure)
    assert [one.sure for one in told] == [is_sure, is_sure]


@pytest.mark.parametrize(
    ("misfits", "told"),
    [
        ({"first": 1.12, "second": 1.0}, ["second", "first"]),
        ({"first": 1.0, "second": 1.12}, ["first"]),
        ({"first": 1.12, "elsewhere": 1.0, "second": 1.0}, ["first"]),  # the mistake in another call comes later
    ],
)
def test_of_the_mistakes_in_one_call_the_one_that_fits_best_comes_first(misfits, told):
    def made(name: str) -> Explanation:
        site = "another" if name == "elsewhere" else "call"
        one = Hypothesis("operation", name, name, (cast(Any, SimpleNamespace(site=site)),))
        return replace(explanation("norm-eps", misfit=misfits[name]), hypotheses=(one,))

    first, *others = (made(name) for name in misfits)
    by_name = {one.hypotheses[0].name: one for one in others}
    search: Any = SimpleNamespace(explanation=lambda combination: by_name[combination[0].name])
    entries = [(0.1 * one.misfit, one.hypotheses) for one in others]
    found = _best_of_its_place(search, first, (0.1 * first.misfit, first.hypotheses), entries)
    assert [one.hypotheses[0].name for one in found] == told


@pytest.mark.parametrize(("left", "is_told"), [(0.02, True), (0.05, False), (0.06, False)])
def test_a_second_mistake_is_told_only_if_it_explains_what_the_first_one_leaves(left, is_told):
    """Check the tensor that the first leaves wrong. With both, rounding may be so large that everything passes."""

    def judged(error: float) -> Any:
        return SimpleNamespace(key=("output", "y"), probed=False, errors=SimpleNamespace(relative_l2=error))

    first, second = (explanation(title).hypotheses[0] for title in ("norm-missing", "norm-eps"))
    almost = replace(explanation("norm-missing"), left=judged(0.05))
    both = replace(almost, hypotheses=(first, second), left=None, results=(judged(left),))
    unused: Any = None
    search = _Search(unused, unused, lambda combination: both, unused, [almost])
    assert (search.explanation((first, second)) is both) == is_told


def judged_gradient(error: float, margin: float) -> Any:
    """Return a gradient's result with a tolerance of 0.01, with the fields that judging a hypothesis reads."""
    errors = SimpleNamespace(relative_l2=error)
    fields = dict(kind="weight gradient", key=("weight gradient", "w"), numel=4096, finite=True, expected=errors)
    check = SimpleNamespace(statistic="norm", margin=margin)
    passed = margin <= 1.0
    return SimpleNamespace(
        errors=errors, margin=margin, passed=passed, tolerance_relative_l2=0.01, checks=[check], **fields
    )


def passes_in_the_end(before: Any, judge: Callable[..., list[Any]]) -> bool:
    """Return whether a gradient passes under a hypothesis."""
    precision, freedoms = PRECISIONS["bf16"], (FUSED, UNFUSED)
    failure: Any = SimpleNamespace(judge=judge, precision=precision, freedoms=freedoms, prepared=None, results=[before])
    (result,) = in_full._judged(failure, (), {}, [{}])
    passed: bool = result.passed
    return passed


@pytest.mark.parametrize(
    ("error", "margin", "looks", "passes"),
    [(0.2, 20.0, 3, True), (0.2, 20.0, 99, False), (0.2, 4.0, 3, False), (0.014, 20.0, 3, False)],
)
def test_what_a_mistake_leaves_by_bad_luck_is_looked_at_again_where_it_is_little(
    monkeypatch, error, margin, looks, passes
):
    def judge(golden: Any, models: Any, candidate: Any = None, granted: Any = ()) -> list[Any]:
        left = 0.9 if len(models) > looks else 1.3
        return [judged_gradient(0.01 * left, left)]

    monkeypatch.setattr(in_full, "tensors_with", lambda *args, **kwargs: {})
    monkeypatch.setattr(in_full, "_beside_kinks", lambda *args: [])
    assert passes_in_the_end(judged_gradient(error, margin), judge) == passes


@pytest.mark.parametrize(("error", "passes"), [(1.0, True), (0.5, False)])
def test_the_side_of_a_kink_may_move_a_gradient_far_but_not_by_what_was_wrong_with_it(monkeypatch, error, passes):
    monkeypatch.setattr(in_full, "tensors_with", lambda *args, **kwargs: {})
    monkeypatch.setattr(in_full, "_beside_kinks", lambda *args: [{}])
    judge = lambda golden, models, *rest: [judged_gradient(0.08, 0.9 if len(models) > 1 else 8.0)]  # noqa: E731
    assert passes_in_the_end(judged_gradient(error, 100.0 * error), judge) == passes


@pytest.mark.parametrize("number", [5e-6, 2e-5, 1e-12, 20_000.0, 5e5, 0.375, 2**-23, 8192.0, 0.044, 48**-0.5, 1 / 3])
def test_people_write_such_numbers(number):
    assert is_written(number)
    assert written_near(1.0004 * number) == pytest.approx(number)


@pytest.mark.parametrize("number", [4.2e-6, 0.00694, 1.37e-3, 0.3714, 13_370.0])
def test_nobody_writes_such_numbers(number):
    assert not is_written(number)


def test_a_finding_of_a_record_without_doubts_is_read_as_a_fact():
    finding = TypeAdapter(parity.Finding).validate_python(dict(code="PAR241", title="bias-dropped", message="add it"))
    assert finding.sure
    assert replace(finding, sure=False).name == "PAR241 bias-dropped (perhaps)"
