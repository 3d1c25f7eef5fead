"""Compare the results of a refactoring: ``python -m lab same`` finds every value in which two versions differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes import ENVIRONMENT, result
from hypothesis import given
from hypothesis import strategies as st

from lab import same
from lab.__main__ import app
from parity.cli import main
from parity.report import record
from parity.user_error import UserError

RUN = {"case": "linear", "seed": 0}
RESULT = {"error": 0.1, "zero": 0.0, "count": 1, "status": "passed", "none": None, "findings": [], "rows": [[1.0, 2.0]]}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def differences(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    files = (write(tmp_path / name, {"run": RUN, "result": each}) for name, each in (("old", old), ("new", new)))
    return [(each.place, each.old, each.new) for each in same.compare(*files).differences]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"seconds": 3.0}, [], id="a time"),
        pytest.param({"peak_bytes": 3}, [], id="a peak of memory"),
        pytest.param({"error": math.nextafter(0.1, 1)}, [("error", 0.1, 0.10000000000000002)], id="the last digit"),
        pytest.param({"zero": -0.0}, [("zero", 0.0, -0.0)], id="the sign of a zero"),
        pytest.param({"count": 1.0}, [("count", 1, 1.0)], id="an int that becomes a float"),
        pytest.param({"count": True}, [("count", 1, True)], id="an int that becomes a bool"),
        pytest.param({"status": "Passed"}, [("status", "passed", "Passed")], id="a letter"),
        pytest.param({"findings": ["x"]}, [("findings", [], None), ("findings.0", None, "x")], id="a finding"),
        pytest.param({"rows": [[1.0]]}, [("rows.0.1", 2.0, None)], id="a shorter list"),
        pytest.param({"more": None}, [("more", None, None)], id="a new field that holds nothing"),
    ],
)
def test_a_changed_value_is_found(tmp_path: Path, change: dict[str, Any], found: list[tuple[str, Any, Any]]) -> None:
    of_result = [(f"result.{place}", old, new) for place, old, new in found]
    assert differences(tmp_path, RESULT, {**RESULT, **change}) == of_result


def test_not_a_number_is_the_same_as_itself(tmp_path: Path) -> None:
    assert differences(tmp_path, {"error": math.nan}, {"error": math.nan}) == []


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=2)
contents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=3)
)


@given(contents, contents)
def test_two_contents_have_the_same_values_if_and_only_if_they_are_the_same_json(one: Any, other: Any) -> None:
    values = [{place: repr(value) for place, value in same._values(each, "")} for each in (one, other)]
    texts = [json.dumps(each, sort_keys=True) for each in (one, other)]
    assert (values[0] == values[1]) == (texts[0] == texts[1])


def test_runs_in_another_order_and_what_is_told_of_the_code_are_no_difference(tmp_path: Path) -> None:
    lines = [{"run": {"seed": seed}, "result": seed} for seed in range(3)]
    old = write(tmp_path / "old", {"code": "a"}, *lines)
    new = write(tmp_path / "new", *reversed(lines), {"code": "b"})
    assert same.compare(old, new) == same.Comparison(files=1, runs=3, values=6, differences=())


def test_a_run_that_one_side_lacks_is_a_difference(tmp_path: Path) -> None:
    lines = [{"run": {"seed": seed}, "result": seed} for seed in range(2)]
    (lacking,) = same.compare(write(tmp_path / "old", *lines), write(tmp_path / "new", lines[0])).differences
    assert (lacking.run, lacking.old, lacking.new) == ('{"seed": 1}', "a result", None)


def test_a_record_that_one_folder_lacks_is_a_difference(tmp_path: Path) -> None:
    for name in ("old/zoo.jsonl", "old/hopper.jsonl", "new/zoo.jsonl"):
        write(tmp_path / name, {"run": RUN, "result": RESULT})
    comparison = same.compare(tmp_path / "old", tmp_path / "new")
    assert comparison.files == 1
    assert [(each.file, each.new) for each in comparison.differences] == [("hopper.jsonl", None)]


def test_records_of_parity_run_are_compared_item_by_item(tmp_path: Path) -> None:
    paths = []
    for name, margins in (("old", (0.5, 0.6)), ("new", (0.6, 0.7))):
        path = tmp_path / f"{name}.jsonl"
        record.start(path, record.environment_line(ENVIRONMENT))
        for case, margin in zip(("linear", "mlp"), margins, strict=True):
            record.append(path, record.result_line(result(case=case, margin=margin)))
        paths.append(path)
    changed = {each.run: (each.old, each.new) for each in same.compare(*paths).differences if "margin" in each.place}
    assert sorted(changed.values()) == [(0.25, 0.3), (0.3, 0.35)]  # the margins that ``fakes.result`` makes of them


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        pytest.param("nowhere", "full", "there is no record or folder", id="a path that does not exist"),
        pytest.param("full", "full/a.jsonl", "two records or two folders", id="a folder and a record"),
        pytest.param("empty", "empty", "no record of the same name", id="folders without records"),
        pytest.param("blank/a.jsonl", "blank/a.jsonl", "holds no result", id="a record without results"),
        pytest.param("broken/a.jsonl", "full/a.jsonl", "line 1: not JSON", id="a line that is not JSON"),
    ],
)
def test_what_cannot_be_compared_is_an_error(tmp_path: Path, old: str, new: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "full/a.jsonl", {"run": RUN, "result": RESULT})
    write(tmp_path / "blank/a.jsonl", {"code": "a"})
    write(tmp_path / "broken/a.jsonl").write_text("{")
    with pytest.raises(UserError, match=why):
        same.compare(tmp_path / old, tmp_path / new)


@pytest.mark.parametrize(("error", "code", "says"), [(0.1, 0, "the same: "), (0.2, 1, "+1.0e+00")])
def test_the_command_says_by_how_much_and_exits_with_1_if_something_differs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: float,
    code: int,
    says: str,
) -> None:
    old = write(tmp_path / "old.jsonl", {"run": RUN, "result": RESULT})
    new = write(tmp_path / "new.jsonl", {"run": RUN, "result": {**RESULT, "error": error}})
    monkeypatch.setattr("sys.argv", ["lab", "same", str(old), str(new)])
    with pytest.raises(SystemExit) as ended:
        main(commands=app)
    assert ended.value.code == code
    assert says in capsys.readouterr().out
