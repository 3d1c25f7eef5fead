"""Test what a run's page contains, before a browser draws it."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from dataclasses import replace

import pytest
from fakes import ENVIRONMENT, result, tensor

from lab.torture import HOSTILE, foreign
from parity.report import html, record
from parity.report.changes import Comparison
from parity.report.html import MOST_ROWS, ItemView, Page, page, shade
from parity.report.markdown import Digest, digest
from parity.report.record import Record, Uncollected
from parity.result import Finding, Histogram, Picture, Profile, Result, StageResult, Step, TensorResult

EPS = Finding(
    *("PAR201", "norm-eps", "the error falls"),
    repair="give it eps, 1e-06; it computes with eps=1e-05",
    now=("eps=1e-05",),
    then=("eps=1e-06",),
)
PICTURE = Picture(
    unit=1e-3,
    profiles=(
        Profile(0, 1, (1e-3, 9e-3), (1e-3, 1e-3)),
        Profile(1, 16, (1e-3, 1e-3, 5e-2, 1e-3), (1e-3, 1e-3, 1e-3, 0.0), (0, 2, 0, 0)),
    ),
    histogram=Histogram(-1.0, 1.0, (60, 40, 24, 0), (124, 0, 0, 0), (4, 4)),
)


def digest_of(*results: Result) -> Digest:
    found = digest(Record(ENVIRONMENT, results))
    found.environment = replace(ENVIRONMENT, items=found.counts.total())
    return found


def page_of(*results: Result) -> Page:
    return page(digest_of(*results), "run")


def items_of(found: Page) -> list[ItemView]:
    return [item for case in found.cases for item in case.items]


def pictured(**fields: object) -> TensorResult:
    return replace(tensor(margin=140.0), picture=PICTURE, **fields)  # type: ignore[arg-type]


# The matrix.


def test_a_cell_is_the_worst_item_of_its_case_and_precision_and_links_to_it() -> None:
    sizes = [result(size_label=label, margin=margin) for label, margin in (("1x64", 0.3), ("2x64", 7.0), ("4x64", 3.0))]
    found = page_of(*sizes, result(precision="fp32"), result("norm", "fp32"))
    assert found.columns == ("fp32", "bf16")
    (mlp, norm) = found.rows
    assert [cell and cell.worst.item.name for cell in mlp.cells] == ["mlp[fp32-2x64]", "mlp[bf16-2x64]"]
    assert [cell is None for cell in norm.cells] == [False, True]
    worst = mlp.cells[1]
    assert worst is not None
    assert (worst.worst.mark, worst.worst.margin, len(worst.items)) == ("✕", "7", 3)
    assert worst.words == "mlp at bf16: failed, margin 7, the worst of 3 items"
    assert f'href="#{worst.worst.id}"' in html.draw_with("", digest_of(*sizes), "run")


def test_a_case_has_a_row_for_each_number_of_ranks() -> None:
    found = page_of(result(), result(size_label="2x64-tp2", ranks="tp2"))
    assert [(row.case, row.ranks) for row in found.rows] == [("mlp", ""), ("mlp", "tp2")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(margin=0.01), 0.01),
        (dict(margin=0.5), 0.5),
        (dict(margin=1.0), 1.0),
        (dict(margin=10.0), 0.33),
        (dict(margin=1000.0), 1.0),
        (dict(margin=math.inf), 1.0),
        (dict(status="error", tensors=(), reason="broken"), 1.0),
        (dict(status="skipped", tensors=(), reason="no FP8"), 0.0),
    ],
)
def test_a_cell_is_stronger_the_nearer_to_a_limit_or_the_farther_beyond(fields: dict, expected: float) -> None:
    (item,) = digest_of(result(**fields)).items
    assert shade(item) == expected


def test_the_outcome_of_every_status_has_a_mark_and_a_word() -> None:
    found = page_of(
        result("a"),
        result("b", margin=2.0),
        result("c", status="error", tensors=(), reason="broken"),
        result("d", status="skipped", tensors=(), reason="no FP8"),
    )
    assert {(item.mark, item.word) for item in items_of(found)} == {
        ("✓", "passed"),
        ("✕", "failed"),
        ("!", "could not be compared"),
        ("–", "skipped"),
    }
    assert [(word, count) for word, count, _ in found.tiles] == [
        ("failed", 1),
        ("could not be compared", 1),
        ("passed", 1),
        ("skipped", 1),
    ]
    order = sorted(items_of(found), key=lambda item: -item.sort)
    assert [item.item.case for item in order] == ["c", "b", "a", "d"]


def test_items_whose_names_are_alike_as_ids_have_ids_of_their_own() -> None:
    names = ("a b", "a-b", "a/b", "ä", "ö")
    found = page_of(*(result(name) for name in names))
    ids = [item.id for item in items_of(found)] + [case.id for case in found.cases]
    assert len(set(ids)) == 2 * len(names)
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_x") for each in ids)


# An item.


def test_a_finding_has_its_repair_as_lines() -> None:
    (item,) = items_of(page_of(result(margin=140.0, findings=(EPS,))))
    (found,) = item.findings
    assert found.repair is not None
    assert (found.repair.now, found.repair.then) == (("eps=1e-05",), ("eps=1e-06",))
    assert item.codes == "PAR201 norm-eps"
    assert "--parity-seeds=0" in item.command


def test_a_finding_of_an_older_record_has_none() -> None:
    (item,) = items_of(page_of(result(margin=140.0)))
    assert [each.repair for each in item.findings] == [None]


def test_a_record_without_pictures_says_so() -> None:
    line = record.result_line(result(margin=140.0))
    content = json.loads(line)
    for each in content["result"]["tensors"]:
        del each["picture"]
    for each in content["result"]["findings"]:
        del each["repair"]
    old = record.result_of(json.dumps(content))
    assert "The record has no profile of this item" in html.draw_with("", digest_of(old), "run")
    new = result(tensors=(pictured(),))
    assert "The record has no profile of this item" not in html.draw_with("", digest_of(new), "run")


def test_beyond_many_tensors_an_item_that_passed_shows_its_worst() -> None:
    tensors = tuple(tensor(f"output[{i}]", margin=(i + 1) / MOST_ROWS) for i in range(MOST_ROWS - 1))
    passed, fails = items_of(page_of(result("passes", tensors=tensors), result("fails", margin=140.0)))[::-1]
    assert [row[0] for row in passed.tensors] == [f"output[{MOST_ROWS - 2}]"]
    assert (passed.left_out, fails.left_out) == (MOST_ROWS - 2, 0)
    (alone,) = items_of(page_of(result("passes", tensors=tensors)))
    assert alone.left_out == 0


# Plots.


def plot_of(kind: str, *tensors: TensorResult, **fields: object) -> list[html.Plot]:
    (item,) = items_of(page_of(result(margin=140.0, tensors=tensors, **fields)))
    found = [*item.courses, *(plot for each in item.pictured for plot in each.plots)]
    return [plot for plot in found if plot.kind == kind]


def test_a_profile_says_where_the_error_is_largest_and_how_many_times_the_expected_one() -> None:
    first, last = plot_of("profile", pictured())
    assert first.title == "along axis 0 (batch, 2)"
    assert first.words == "The error is largest at 1; it is 1 to 9 times the expected one."
    assert last.title == "along the last axis, channels (hidden, 64)"
    assert last.words == (
        "The error is largest at 32 to 47; it is 1 to 50 times the expected one. NaN or Inf in 1 part of 4."
    )
    assert last.numbers["at"] == [0, 16, 32, 48]


@pytest.mark.parametrize(
    ("name", "axis", "heads"),
    [
        ("attention.q_proj.weight", 0, 4),
        ("attention.k_proj.weight", 0, 2),
        ("attention.o_proj.weight", 1, 4),
        ("attention.q_proj.weight", 1, 0),
        ("attention.o_proj.weight", 0, 0),
        ("mlp.up_proj.weight", 0, 0),
    ],
)
def test_heads_part_the_rows_or_columns_of_attentions_weights(name: str, axis: int, heads: int) -> None:
    one = pictured(name=name, kind="weight gradient", shape=(64, 64))
    found = plot_of("profile", one, size={"hidden": 64, "heads": 4, "groups": 2})
    assert found[axis].numbers["parted"] == heads
    assert found[axis].title == ("along rows, output features", "along columns, input features")[axis] + " (hidden, 64)"


def test_a_distribution_says_how_many_elements_are_far_beyond_the_expected_error() -> None:
    (found,) = plot_of("histogram", pictured())
    assert found.words == (
        "19 % of the elements have errors of more than 10 times the expected RMS error. "
        "3.1 % have no error at all; 3.1 % are expected to have none."
    )
    assert found.numbers["at"] == [-0.5, 0.5, 1.5]
    assert sum(found.numbers["error"]) == pytest.approx(124 / 128)


def test_errors_are_drawn_against_depth_where_names_tell_it() -> None:
    layers = [
        tensor(f"model.layers.{i}.{kind}.weight", "weight gradient", margin=3.0 if i == 2 else 0.5)
        for kind in ("q_proj", "norm")
        for i in range(4)
    ]
    (found,) = plot_of("depth", tensor(), *layers, tensor("head.weight", "weight gradient"))
    lines = found.numbers["lines"]
    assert {line["name"] for line in lines} == {"model.layers.#.q_proj.weight", "model.layers.#.norm.weight"}
    assert [line["at"] for line in lines] == [[0, 1, 2, 3]] * 2
    assert lines[0]["margin"] == [0.5, 0.5, 3.0, 0.5]
    assert found.words == "2 kinds of parameters in layers 0 to 3. Beyond a limit: layers 2."
    assert plot_of("depth", tensor(), tensor("fc1.weight", "weight gradient")) == []


def test_a_training_is_drawn_against_steps() -> None:
    steps = (Step(1, 5.0, 5.01, 0.4), Step(2, math.nan, 4.0, math.inf))
    (found,) = plot_of("steps", tensor(), steps=steps)
    assert found.words == "2 steps; the largest margin is ∞, at step 2."
    assert found.numbers["loss"] == [5.0, None]
    assert found.numbers["margin"] == [0.4, None]


def test_the_error_is_drawn_against_stages_if_they_were_asked_for() -> None:
    linear = StageResult("1st 'linear' of fc1", False, 0.002, 0.002, 0.002, 0.1, False)
    gelu = StageResult("1st 'gelu' of fc1", False, 0.2, 0.2, 0.002, 40.0, True)
    gradient = StageResult("d fc1.weight", True, math.nan, math.inf, 0.002, 0.0, True)
    (found,) = plot_of("stages", tensor(), stages=(linear, gelu, gradient))
    assert found.words == (
        "2 stages of the forward pass. More error than rounding explains: 1st 'gelu' of fc1, d fc1.weight."
    )
    assert found.numbers["added"] == [0.002, 0.2]
    assert plot_of("stages", tensor()) == []


# The page as a whole.


def test_changes_since_a_baseline_are_on_the_page() -> None:
    before, after = (Record(ENVIRONMENT, (result(margin=margin), result("norm"))) for margin in (0.4, 140.0))
    runs = Comparison(before, after, ("monday.jsonl", "tuesday.jsonl"))
    found = page(digest(after), "tuesday", runs)
    (change,) = found.changes
    assert (change.kind, change.before, change.now) == ("newly failing", "✓ passed 0.4", "✕ failed 140")
    text = html.draw_with("", digest(after), "tuesday", runs)
    assert "What changed since <code>monday.jsonl</code>" in text
    assert f'<a href="#{change.href}">' in text
    assert "What changed since" not in html.draw_with("", digest(after), "tuesday")


def test_nothing_of_a_record_is_more_than_text_on_the_page() -> None:
    hostile = f"{HOSTILE}</script><img src=x onerror=alert(1)>\u202e\ud800"
    one = pictured(name=f"layers.0.{hostile}", kind="weight gradient")
    bad = result(
        case=hostile,
        margin=140.0,
        size_label=hostile,
        path=hostile,
        size={hostile: 64},
        reason=hostile,
        notes=(hostile,),
        traceback=hostile,
        attention=hostile,
        findings=(Finding(hostile, hostile, hostile, repair=f"pass x={hostile}; it has x=2"),),
        tensors=(one, replace(one, name=f"layers.1.{hostile}")),
    )
    run = digest_of(bad, result(precision=hostile))
    run.uncollected = {hostile: Uncollected(hostile, hostile)}
    run.environment = replace(run.environment, cpu=hostile, limits=hostile)
    text = html.draw_with("/* no plots */", run, hostile)
    assert list(foreign(text)) == []
    assert not any(sign in text for sign in ("\x1b", "\x07", "\u202e", "\ud800", "<img", "<script>alert"))
    assert "alert(1)" in text


def test_the_page_has_plotly_once_and_names_no_address_to_fetch() -> None:
    text = html.draw(digest_of(result(tensors=(pictured(),))), "run")
    (packed,) = re.findall(r'id="library">([^<]+)<', text)
    assert gzip.decompress(base64.b64decode(packed)).decode() == html.plotly()
    assert len(text) < 2_500_000
    plain = html.draw(digest_of(result()), "run")
    assert len(plain) < 100_000  # nothing to plot
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in text
    own = html.draw_with("", digest_of(result(tensors=(pictured(),))), "run")
    assert "http:" not in own
    assert "https:" not in own
