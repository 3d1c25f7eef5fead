"""Test what people are asked for when they report something, and what they may cite."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(params=FORMS, ids=lambda path: path.stem)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert [path.stem for path in FORMS] == ["crash", "missed-bug", "rejected-right-port", "unexplained"]


def test_a_form_has_what_github_asks_for(form: dict[str, Any]) -> None:
    assert form["name"]
    assert form["description"]
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_a_form_asks_for_the_pair_the_record_and_the_machine(form: dict[str, Any]) -> None:
    asked = {part["id"]: part["attributes"] for part in form["body"]}
    assert {"pair", "record", "doctor"} <= set(asked)
    assert "`parity doctor`" in asked["doctor"]["label"]
    assert "reports/parity.jsonl" in asked["record"]["description"]


def test_what_is_cited_is_the_version_that_is_here() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert (citation["title"], citation["version"]) == ("te-parity", metadata.version("te-parity"))
    assert citation["license"] == metadata.metadata("te-parity")["License-Expression"]
