"""The study ``search``: every way is there, and a port that only one way names is not named without it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from lab.corpus.judging import Judgement
from lab.studies.search.study import WAYS, Found, Settings, judged_without, watching, write


def test_each_way_is_a_function_of_the_search_and_is_put_back():
    before = {name: way.calls for name, way in WAYS.items()}
    with watching("order_findings") as found:
        assert list(WAYS["order_findings"].calls(None)) == []
        assert found == []
    assert {name: way.calls for name, way in WAYS.items()} == before


def test_a_way_is_needed_if_the_mistake_is_not_named_without_it(tmp_path: Path):
    one = Judgement("a third", "loss_mean", "bf16", 0)
    found = judged_without(one)
    assert found.outcome == "named"
    assert found.without["whole_scale_findings"] == "unnamed"
    text = write({one: found}, Settings(("losses",), ("bf16",)), tmp_path).read_text()
    assert "losses: a third" in text


def test_a_way_is_not_needed_if_another_one_names_the_mistake(tmp_path: Path):
    one = Judgement("a third", "loss_mean", "bf16", 0)
    seen = Found("named", ("by_stages", "order_findings"), {"order_findings": "named"}, 0.1)
    assert "losses: a third" not in write({one: seen}, Settings(("losses",), ("bf16",)), tmp_path).read_text()
