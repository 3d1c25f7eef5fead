"""The table that keeps the laws, its file, and the one that comes with parity."""

import json

import pytest

from parity.judge import limits
from parity.judge.limits import Law, Table
from parity.te.precision import PRECISIONS
from parity.user_error import UserError

LAW = Law(center=0.1, spread=0.2, tensors=40, samples=160, largest=1.8)


def test_a_table_comes_back_from_its_file_as_it_was(tmp_path):
    stored = Table({("bf16", "output", "norm"): LAW, ("bf16", "output", "gain"): LAW}, {"bf16": {"device": "CPU"}})
    limits.save(stored, tmp_path / "table.json")
    loaded = limits.load(tmp_path / "table.json")
    assert (loaded.laws, loaded.provenance) == (stored.laws, stored.provenance)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99, "laws": []}', '{"format": 1, "laws": [1]}'])
def test_a_file_that_is_no_table_is_named(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"table\.json.*parity calibrate"):
        limits.load(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spread": float("nan")}, "has the spread nan, which is not a number"),
        ({"center": float("inf")}, "has the center inf, which is not a number"),
        ({"center": "0.1"}, "has the center '0.1', which is not a number"),
        ({"spread": -0.2}, "has the spread -0.2, which is below 0"),
        ({"largest": -1.0}, "has the largest -1, which is below 0"),
        ({"tensors": 1}, "was measured on 1 tensors"),
        ({"tensors": -40}, "has the tensors -40, which is below 0"),
        ({"center": 50.0}, "would be .*, where everything would pass"),
        ({"center": 1e5}, "would be inf, where everything would pass"),
        ({"center": -1e5}, "would be 0, where nothing passes"),
    ],
)
def test_a_law_that_gives_no_limit_is_named_with_its_place(tmp_path, changes, words):
    limits.save(Table({("bf16", "output", "norm"): LAW}, {}), tmp_path / "table.json")
    record = json.loads((tmp_path / "table.json").read_text())
    record["laws"][0].update(changes)
    (tmp_path / "table.json").write_text(json.dumps(record))
    with pytest.raises(
        UserError, match=rf"table\.json has a law .*'norm' of the kind 'output' in bf16 {words}"
    ) as told:
        limits.load(tmp_path / "table.json")
    assert "\n" not in str(told.value)


def test_a_missing_table_and_a_missing_law_say_how_to_make_them(tmp_path):
    with pytest.raises(UserError, match="parity calibrate --out"):
        limits.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="parity calibrate --precision nvfp4"):
        Table({}, {}).limit("nvfp4", "output", "norm")


def test_the_packaged_table_has_a_law_for_every_statistic_at_every_precision():
    packaged = limits.packaged()
    for precision in PRECISIONS:
        there = {(kind, name) for p, kind, name in packaged.laws if p == precision}
        for kind in ("output", "probed output", "input gradient", "weight gradient"):
            assert {name for k, name in there if k == kind} >= {"norm", "largest", "gain", "slice", "shift"}
        assert ("output", "mistake") in there
        assert packaged.provenance[precision]["kernels"].startswith(("emulated", "real"))


def test_packaged_limits_are_above_what_faithful_ports_showed_and_not_absurd():
    for (precision, kind, statistic), law in limits.packaged().laws.items():
        limit = limits.packaged().limit(precision, kind, statistic)
        assert law.largest < limit < 100, (precision, kind, statistic)


def test_a_tables_json_has_a_law_a_line(tmp_path):
    limits.save(Table({("bf16", "output", "norm"): LAW}, {}), tmp_path / "table.json")
    text = (tmp_path / "table.json").read_text()
    assert json.loads(text)["laws"][0]["statistic"] == "norm"
    assert sum('"statistic"' in line for line in text.splitlines()) == 1
