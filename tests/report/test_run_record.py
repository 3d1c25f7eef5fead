"""The record of a run, which is written line by line, and read back even if it is damaged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, result

from parity.judge.limits import Difference, OfPrecision
from parity.report import environment, record
from parity.report.record import Record, Uncollected
from parity.result import Result, from_json, to_json
from parity.user_error import UserError


def written(path: Path, *results: Result) -> Path:
    record.start(path, record.environment_line(ENVIRONMENT))
    for each in results:
        record.append(path, record.result_line(each))
    return path


def kept_and_left_out(path: Path) -> tuple[tuple[Result, ...], list[int]]:
    found = record.read(path)
    assert found.environment == ENVIRONMENT
    return found.results, [each.number for each in found.left_out]


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    results = (result(), result(margin=math.inf, seed=3), result(status="skipped", tensors=(), reason="no FP8"))
    assert record.read(written(tmp_path / "new" / "run.jsonl", *results)) == Record(ENVIRONMENT, results)


def test_by_how_much_limits_differ_is_read_back_and_older_records_do_not_say(tmp_path: Path) -> None:
    difference = Difference("output", "norm", 351.2, 1.728)
    compared = (
        OfPrecision("bf16", 24, 23, 0, difference, difference, 1, "accepted"),
        OfPrecision("fp32", 0, 0, 0, *2 * (None,), 3),
    )
    here = replace(ENVIRONMENT, limits="mine.json", limits_compared=compared)
    record.start(tmp_path / "run.jsonl", record.environment_line(here))
    assert record.read(tmp_path / "run.jsonl").environment == here
    older = environment.to_json(here)
    del older["limits_compared"]
    assert environment.from_json(older) == replace(here, limits_compared=None)


def test_what_could_not_be_collected_is_read_back_wherever_it_stands(tmp_path: Path) -> None:
    broken = Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64")
    path = written(tmp_path / "run.jsonl", result())
    record.append(path, record.uncollected_line(broken))
    record.append(path, record.result_line(result(seed=1)))
    assert record.read(path) == Record(ENVIRONMENT, (result(), result(seed=1)), (broken,))


def test_starting_a_record_drops_an_earlier_run(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result())
    assert record.read(written(path)).results == ()


def test_a_last_line_that_was_cut_short_is_left_out_and_told(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result(), result(seed=1))
    path.write_text(path.read_text()[:-40])
    found = record.read(path)
    assert [found.seed for found in found.results] == [0]
    assert [each.number for each in found.left_out] == [3]


def test_last_lines_of_zeros_as_a_crashed_machine_leaves_them_are_left_out_and_told(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result())
    path.write_bytes(path.read_bytes() + b"\0\0\n\0")
    assert kept_and_left_out(path) == ((result(),), [3, 4])


def test_a_last_line_that_ends_within_a_character_is_left_out_and_told(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result(), result(reason="€"))
    path.write_bytes(path.read_bytes().partition("€".encode())[0] + "€".encode()[:1])
    assert kept_and_left_out(path) == ((result(),), [3])


def test_a_text_may_hold_what_unicode_calls_a_line_break(tmp_path: Path) -> None:
    results = (result(reason="a\u2028b\x85c"),)
    assert record.read(written(tmp_path / "run.jsonl", *results)).results == results


def test_a_broken_line_before_the_last_costs_no_other_and_is_told_with_the_reason(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result(), result(seed=1))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-40], lines[2]]))
    assert kept_and_left_out(path) == ((result(seed=1),), [2])
    assert record.read(path).left_out[0].reason.startswith("not JSON: column ")


@pytest.mark.parametrize("text", ["", "hello\n", "[1]\n", "{}\n", '{"environment": {"date": ""}}\n', "\x00\n"])
def test_what_is_not_a_record_is_a_users_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"run\.jsonl is not a record"):
        record.read(path)


def test_a_number_that_was_damaged_is_told_with_its_line_and_place(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", result(), result(seed=1))
    first, second, third = path.read_text().splitlines()
    entry = json.loads(third)
    entry["result"]["tensors"][0]["errors"]["max_abs"] = "0.2x"
    path.write_text("\n".join([first, second, json.dumps(entry)]))
    assert kept_and_left_out(path) == ((result(),), [3])
    assert (
        record.read(path)
        .left_out[0]
        .reason.startswith("result.tensors.0.errors.max_abs: Input should be a valid number")
    )


def test_an_empty_record_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(UserError, match=r"run\.jsonl is not a record of parity: it is empty"):
        record.read(tmp_path / "run.jsonl")


def test_a_record_that_is_not_there_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        record.read(tmp_path / "missing.jsonl")


def test_a_record_from_before_cublas_and_driver_were_noted_is_read() -> None:
    old = {k: v for k, v in environment.to_json(ENVIRONMENT).items() if k not in ("cublas", "driver", "golden")}
    assert environment.from_json(old) == ENVIRONMENT
    line = {k: v for k, v in to_json(result()).items() if k not in ("attention", "forced_attention")}
    assert from_json(line) == result()
