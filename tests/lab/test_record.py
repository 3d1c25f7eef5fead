"""A campaign computes what its record lacks, nothing twice, and the record says which code its results belong to."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.studies import catalogue
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits, made

CODE = {"torch": "2"}


@dataclass(frozen=True)
class Square:
    root: int
    of: FourDigits


def square(root: int) -> Square:
    return Square(root, root**2)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign[int, Square]:
    return Campaign(tmp_path / "runs.jsonl", Square, lambda root: {"number": root}, CODE)


def test_only_what_the_record_lacks_is_made_in_the_order_of_the_jobs(campaign: Campaign[int, Square]) -> None:
    done: list[int] = []
    campaign.keep(2, square(2))
    found = campaign.complete((3, 2, 1, 3), lambda root: done.append(root) or square(root), "squaring")
    assert done == [3, 1]
    assert list(found.items()) == [(root, square(root)) for root in (3, 2, 1)]
    assert campaign.finished((4, 1)) == {1: square(1)}


def test_what_was_made_before_an_interruption_is_kept_with_the_code_that_made_it(tmp_path: Path) -> None:
    campaign: Campaign[int, Square] = Campaign(tmp_path / "runs", Square, lambda root: {"number": root}, CODE)

    def make(root: int) -> Square:
        if root == 3:
            raise KeyboardInterrupt
        return square(root)

    with pytest.raises(KeyboardInterrupt):
        campaign.complete((1, 2, 3, 4), make, "squaring")
    assert campaign.finished((1, 2, 3, 4)) == {1: square(1), 2: square(2)}
    assert record.outdated(tmp_path / "runs", CODE) is None


def test_numbers_are_kept_with_four_digits_and_nan_as_null(campaign: Campaign[int, Square], tmp_path: Path) -> None:
    for root, number in enumerate((math.pi, math.nan, math.inf)):
        campaign.keep(root, Square(root, number))
    assert [entry["of"] for entry in record.read(tmp_path / "runs.jsonl").values()] == [3.142, None, math.inf]
    found = campaign.finished(range(3))
    assert found[0].of == 3.142
    assert math.isnan(found[1].of)


def test_processes_make_every_job(tmp_path: Path) -> None:
    assert dict(made((-1, -2, -3), abs, "taking magnitudes", 2)) == {-1: 1, -2: 2, -3: 3}


# The record of a study, and the code that its results belong to.


NOW = {"torch": "2", "parity.numerics.errors": "a", "parity.te": "b"}
BEFORE = NOW | {"parity.numerics.errors": "c"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.jsonl"


def test_a_run_is_found_by_everything_that_it_depends_on(path: Path) -> None:
    record.append(path, {"seed": 0, "size": 4}, 1.5, NOW)
    assert record.read(path) == {record.key_of({"size": 4, "seed": 0}): 1.5}


def test_a_line_that_was_cut_short_is_left_out_and_spoils_none_after_it(path: Path) -> None:
    record.append(path, {"seed": 0}, 0, NOW)
    with path.open("a") as file:
        file.write('{"run": {"see')
    record.append(path, {"seed": 1}, 1, NOW)
    assert list(record.read(path).values()) == [0, 1]


def test_the_code_is_written_where_it_changes(path: Path) -> None:
    for seed, code in enumerate([NOW, NOW, BEFORE, NOW]):
        record.append(path, {"seed": seed}, seed, code)
    assert [line.startswith('{"code":') for line in path.read_text().splitlines()] == [
        *(True, False, False),
        *(True, False),
        *(True, False),
    ]
    assert len(record.read(path)) == 4


def test_code_whose_line_was_cut_short_is_written_again(path: Path) -> None:
    record.append(path, {"seed": 0}, 1.0, code={"module": "before"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"code": {"mod')
    record.append(path, {"seed": 1}, 2.0, code={"module": "now"})
    assert record.outdated(path, {"module": "now"}) == record.Outdated(1, 2, 0, ("module",))


def test_results_of_this_code_are_not_outdated(path: Path) -> None:
    assert record.outdated(path, NOW) is None
    record.append(path, {"seed": 0}, 0, NOW)
    assert record.outdated(path, NOW) is None


def test_outdated_results_come_with_what_has_changed(path: Path) -> None:
    record.append(path, {"seed": 0}, 0)
    record.append(path, {"seed": 1}, 0, BEFORE)
    record.append(path, {"seed": 2}, 0, NOW)
    assert record.outdated(path, NOW) == record.Outdated(
        results=2, of=3, unnamed=1, changed=("parity.numerics.errors",)
    )


def test_a_result_that_was_computed_again_is_outdated_no_more(path: Path) -> None:
    record.append(path, {"seed": 0}, 0, BEFORE)
    record.append(path, {"seed": 0}, 1, NOW)
    assert record.outdated(path, NOW) is None


def test_outdated_results_can_be_forgotten(path: Path) -> None:
    for seed, code in enumerate([None, BEFORE, NOW]):
        record.append(path, {"seed": seed}, seed, code)
    record.forget_outdated(path, NOW)
    assert list(record.read(path).values()) == [2]
    assert record.outdated(path, NOW) is None


@pytest.mark.parametrize("study", [name for name in catalogue.STUDIES if name != "flops"])
def test_a_study_depends_on_what_computes_and_not_on_what_draws(study: str) -> None:
    code = record.code_of(f"lab.studies.{study}.study")
    assert f"lab.studies.{study}.study" in code
    assert "torch" in code
    assert not {f"lab.studies.{study}.report", "lab.studies.reporting"} & set(code)


def test_te_s_kernels_are_among_what_te_s_results_depend_on() -> None:
    assert "te_on_cpu.gemm" in record.code_of("lab.studies.expected_error.study")


def test_a_table_beside_a_module_is_among_what_results_depend_on() -> None:
    assert "parity.mistakes.usual_numbers's table" in record.code_of("parity.mistakes.norms")


def test_a_change_of_statements_counts_and_one_of_comments_docstrings_and_layout_does_not() -> None:
    text = 'def f(x):\n    """Twice."""\n    return 2 * x\n'
    same = 'def f(x):\n    """The double."""\n    # in FP32\n    return (2*x)\n'
    other = 'def f(x):\n    """Twice."""\n    return 3 * x\n'
    first, second, third = (record.checksum(ast.parse(each)) for each in (text, same, other))
    assert first == second != third


STUDY = """
import math
from lab.studies import reporting, settings
{constant} = 3
def measured(): return settings.of(_rounded(math.pi))
def _rounded(x): return x // {step}
def write(found): return reporting.written(_table(found))
def _table(found): return _rounded(found) + {shown}
"""


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({"shown": "2 * _SHOWN"}, False),
        ({"constant": "SHOWN", "shown": "SHOWN"}, False),
        ({"step": "2"}, True),
        ({"constant": "STEP", "step": "STEP"}, True),
        ({"constant": "OTHER"}, True),  # no function needs it, so it may be used on import
    ],
)
def test_of_a_study_with_its_report_only_what_measures_counts(changed: dict[str, str], counts: bool) -> None:
    usual = {"constant": "_SHOWN", "step": "1", "shown": "_SHOWN"}
    before, after = (
        ast.unparse(record.without_report(ast.parse(STUDY.format(**each)))) for each in (usual, usual | changed)
    )
    assert (before != after) == counts
    assert "settings" in before
    assert not [name for name in ("reporting", "write", "_table", "_SHOWN") if name in before]


def test_a_module_that_is_no_study_counts_whole() -> None:
    text = "def write(found):\n    return found"
    assert ast.unparse(record.without_report(ast.parse(text))) == text
