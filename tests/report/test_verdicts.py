"""Verdicts as data: one JSON document, whose schema is in the docs; and a result that explains itself."""

import json
import math
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from torch import nn

import parity
from parity.report import record, verdicts
from parity.report.record import Record, Uncollected
from parity.report.verdicts import Verdicts
from parity.result import Finding, Step

SCHEMA = Path(__file__).parents[2] / "docs" / "verdicts.schema.json"
WRITE = "import json, parity.report.verdicts as v; print(json.dumps(v.Verdicts.model_json_schema(), indent=2))"


def of(*results: parity.Result, **fields: object) -> Verdicts:
    return verdicts.of_record(Record(replace(fakes.ENVIRONMENT, items=len(results)), results, **fields))


def test_the_schema_in_the_docs_is_that_of_the_document() -> None:
    assert json.loads(SCHEMA.read_text()) == Verdicts.model_json_schema(), f'python -c "{WRITE}" > {SCHEMA.name}'


def test_every_field_says_what_it_is_unless_its_name_does() -> None:
    known = (
        "pair precision size seed status reason number uncollected verdicts tensors passed margin id message seconds"
    )
    for part in Verdicts.model_json_schema()["$defs"].values():
        unsaid = {name for name, field in part["properties"].items() if "description" not in field}
        assert unsaid <= set(known.split()), part["title"]


def test_a_finding_is_a_place_a_cause_and_an_edit() -> None:
    finding = Finding(
        "PAR201", "norm-eps", "give it eps", repair="give it eps", now=("eps=1",), then=("eps=2",), place="in fc1"
    )
    (verdict,) = of(fakes.result(margin=3.0, findings=(finding,))).verdicts
    (cause,) = verdict.findings
    assert (cause.code, cause.place, cause.sure) == ("PAR201", "in fc1", True)
    assert cause.edit is not None
    assert (cause.edit.now, cause.edit.then) == (["eps=1"], ["eps=2"])
    assert verdict.id == "my_pairs.py::mlp[bf16-2x64]"
    assert verdict.reproduce.startswith("pytest 'my_pairs.py::mlp[bf16-2x64]'")
    assert [(tensor.label, tensor.passed) for tensor in verdict.tensors] == [("output", False), ("d fc1.weight", False)]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_null(number: float) -> None:
    result = fakes.result(margin=math.inf, steps=(Step(1, number, 0.5, number),))
    text = of(result).model_dump_json()
    assert json.loads(text)["verdicts"][0]["margin"] is None
    assert json.loads(text)["verdicts"][0]["steps"] == [
        {"number": 1, "loss": None, "golden": 0.5, "margin": None, "precision": ""}
    ]
    assert Verdicts.model_validate_json(text).verdicts[0].margin is None


def test_a_run_has_passed_only_if_everything_was_compared_and_passed() -> None:
    good, skipped = fakes.result(), fakes.result("other", status="skipped", reason="no GPU", tensors=())
    assert of(good, skipped).passed
    assert not of(good, fakes.result(seed=1, margin=2.0)).passed
    assert not of(skipped).passed
    assert not of(good, uncollected=(Uncollected("my_pairs.py", "it raised"),)).passed
    assert not verdicts.of_record(Record(replace(fakes.ENVIRONMENT, items=2), (good,))).passed


def test_sizes_may_hold_what_json_lacks() -> None:
    (verdict,) = of(fakes.result(size={"n": 2, "dtype": complex})).verdicts
    assert verdict.size == {"n": 2, "dtype": "<class 'complex'>"}


def a_pair(eps: float) -> parity.Pair:
    te = parity.te.kernels("cpu").te
    weights = {"weight": "weight", "bias": "bias"}
    return parity.Pair(
        nn.LayerNorm(32), te.LayerNorm(32, eps=eps), lambda rng: rng.normal(16, 32), weights=weights, fill=True
    )


def test_what_compare_returns_explains_itself_and_becomes_a_document() -> None:
    results = parity.compare(a_pair(1e-5), precisions=["fp32"]) + parity.compare(a_pair(0.01), precisions=["fp32"])
    right, wrong = results
    assert right.explain().startswith("pair[fp32-16x32]: passed\nno tensor is beyond its limits")
    told = wrong.explain()
    assert told.startswith("pair[fp32-16x32]: PAR201 norm-eps: margin")
    assert "reproduce:" not in told  # no file declares it
    page = wrong._repr_html_()
    assert "PAR201 norm-eps" in page
    assert page.count('title="') >= 2 * 16
    assert wrong.notes == ()  # what the search imports is not taken for the pair's doing
    found = parity.verdicts(results)
    assert Verdicts.model_validate(json.loads(json.dumps(found))).format == verdicts.FORMAT
    assert [each["status"] for each in found["verdicts"]] == ["passed", "failed"]
    assert found["environment"]["kernels"].startswith("emulated")


def test_a_record_that_was_written_gives_the_same_document(tmp_path: Path) -> None:
    results = (fakes.result(), fakes.result(seed=1, margin=2.0))
    file = tmp_path / "run.jsonl"
    written = [record.environment_line(replace(fakes.ENVIRONMENT, items=1)), *map(record.result_line, results)]
    file.write_text("".join(written))
    assert verdicts.of_record(record.read(file)) == verdicts.of_record(
        Record(replace(fakes.ENVIRONMENT, items=1), results)
    )
