"""Which items the plugin collects, and what it says of pairs of which it can make none."""

from __future__ import annotations

import pytest
from plugin_runs import (
    AVAILABLE,
    ITEMS_OF_FAILS,
    PAIRS,
    UNAVAILABLE,
    names,
    recorded,
    run,
    run_with_workers,
    write,
)

from parity.te.precision import PRECISIONS

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")


def test_a_case_becomes_an_item_for_each_size_and_precision(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    mlp = [f"mlp[{precision}-{size}]" for size in ("2x64", "4x128") for precision in PRECISIONS]
    assert names(pytester, "my_pairs.py") == [*mlp, *ITEMS_OF_FAILS]


def test_an_id_selects_its_item(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    assert names(pytester, "my_pairs.py::mlp[bf16-2x64]") == ["mlp[bf16-2x64]"]


@pytest.mark.parametrize(
    ("item", "advice"),
    [
        ("mpl", "*there is no pair 'mpl' in my_pairs.py; did you mean my_pairs.py::mlp?*"),
        ("attention", "*there is no pair 'attention' in my_pairs.py; it declares mlp, fails*"),
        ("mlp[bf16-3x3]", "*the pair 'mlp' of my_pairs.py has no item 'mlp?bf16-3x3?'; *--collect-only*"),
    ],
)
def test_an_id_that_is_not_there_comes_with_those_that_are(pytester: pytest.Pytester, item: str, advice: str) -> None:
    write(pytester, PAIRS)
    result = run(pytester, f"my_pairs.py::{item}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([advice])


def test_keywords_and_marks_select_items(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    assert names(pytester, "my_pairs.py", "-k", "mlp and bf16 and 4x128") == ["mlp[bf16-4x128]"]
    assert names(pytester, "my_pairs.py", "-m", "fp32 and not slow_one") == ["fails[fp32-2x64]"]


def test_only_a_case_with_attention_has_an_item_for_each_backend(pytester: pytest.Pytester) -> None:
    attention = (
        "\n    @parity.pair('attention', sizes=[dict(n=2)], attention=['unfused', 'fused'])\n    def a(te, n): ...\n"
    )
    write(pytester, PAIRS + attention)
    options = ("--parity-precisions=bf16", "-k", "attention or fails")
    own, fused, everything = (
        names(pytester, "my_pairs.py", *options, *more)
        for more in ([], ["--parity-attention=fused"], ["--parity-attention=all"])
    )
    assert own == ["fails[bf16-2x64]", "attention[bf16-2-fused]", "attention[bf16-2-unfused]"]
    assert fused == ["fails[bf16-2x64]", "attention[bf16-2-fused]"]
    assert everything == ["fails[bf16-2x64]", *(f"attention[bf16-2-{name}]" for name in ("flash", "fused", "unfused"))]


def test_marks_are_registered(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py", "--strict-markers", "-W", "error", "-k", "mlp")
    result.assert_outcomes(passed=2 * len(AVAILABLE), skipped=2 * len(UNAVAILABLE), deselected=2)


def test_a_case_is_collected_only_where_it_is_declared_and_once(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    write(
        pytester,
        "from my_pairs import fails\nimport parity\nalias = fails\nmine = parity.pair('mine')(lambda te: 0)\n"
        "again = mine",
        "others",
    )
    assert names(pytester, "others.py", "--parity-precisions=fp32") == ["mine[fp32-]"]


def test_cases_that_are_declared_in_a_loop_are_all_collected(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        import parity

        for activation in ("gelu", "relu"):
            @parity.pair(f"mlp_{activation}", sizes=[dict(n=2)])
            def test_case(te, n): ...
        """,
    )
    found = names(pytester, "my_pairs.py", "--parity-precisions=fp32", "-W", "error")
    assert found == ["mlp_gelu[fp32-2]", "mlp_relu[fp32-2]"]


HELPER = """
    import parity

    def declare(name):
        def factory(te): ...
        return parity.pair(name, precisions=["fp32"])(factory)
"""


@pytest.mark.parametrize("options", [(), ("--import-mode=importlib", "-p", "no:cacheprovider")])
def test_pairs_that_a_helper_in_another_file_declares_are_collected(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    write(pytester, HELPER + "\n    declare('shared')", "helper")
    write(pytester, "from helper import declare\ndeclare('one')\n", "uses_one")
    write(pytester, "from helper import declare\ndeclare('two')\n", "uses_two")
    pytester.syspathinsert()
    found = names(pytester, "uses_one.py", "uses_two.py", "helper.py", *options)
    assert found == ["one[fp32-]", "two[fp32-]", "shared[fp32-]"]


def test_pairs_that_a_helper_declares_run_in_workers(pytester: pytest.Pytester) -> None:
    write(pytester, HELPER, "helper")
    write(pytester, "from helper import declare\nfor n in 'abc':\n    declare(n)\n")
    run_with_workers(pytester, 2, "my_pairs.py").assert_outcomes(passed=3)


def test_what_parity_did_not_expect_is_a_collection_error_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parity.case.validate.check_case", lambda case, te: 1 / 0)
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["E *ZeroDivisionError: division by zero"])


def test_a_pair_that_does_not_fit_is_reported_at_collection_without_a_traceback(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('misfits')\n    def misfits(te): ...\n")
    result = run(pytester, "my_pairs.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*ERROR collecting my_pairs.py*", "pair 'misfits': fc1.weight is 128x64, but *", "ERROR my_pairs.py::misfits*"]
    )
    assert "parity/" not in result.stdout.str().split("short test summary")[0].split("ERRORS")[1]


def test_a_duplicate_name_is_reported_at_collection_without_a_traceback(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('mlp')\n    def mlp_again(te): ...\n")
    result = run(pytester, "my_pairs.py")
    result.stdout.fnmatch_lines(["*ERROR collecting my_pairs.py*", "*'mlp' is already declared*"])
    assert "raise UserError" not in result.stdout.str()


def test_an_unknown_precision_of_a_pair_is_reported_at_collection(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity\n@parity.pair('mlp', precisions=['fp33'])\ndef mlp(te): ...")
    run(pytester, "my_pairs.py").stdout.fnmatch_lines(["*fp33*"])


def test_a_file_that_exits_while_it_is_imported_costs_no_other_file(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    write(pytester, "import parity, sys\n\nsys.exit(3)", "exits")
    result = run(pytester, "my_pairs.py", "exits.py", "-k", "fails", "--continue-on-collection-errors")
    result.assert_outcomes(failed=2, errors=1, deselected=2 * len(PRECISIONS))
    result.stdout.fnmatch_lines(["*/exits.py:3: importing the file raised SystemExit: 3"])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_could_not_be_collected_is_in_the_record_and_the_report_of_the_others(
    pytester: pytest.Pytester, workers: int
) -> None:
    write(pytester, PAIRS + "\n    @parity.pair('misfits')\n    def misfits(te): ...\n")
    write(pytester, "import parity\n\nraise ValueError('no')", "raises")
    write(pytester, "import nothing_of_parity", "test_other")
    files = ("my_pairs.py", "raises.py", "test_other.py", "--continue-on-collection-errors")
    result = run_with_workers(pytester, workers, *files)
    assert {each.node_id: each.message for each in recorded(pytester).uncollected} == {
        "my_pairs.py::misfits": "my_pairs.py::misfits: pair 'misfits': fc1.weight is 128x64, but fc1_weight is 64x128",
        "raises.py": "raises.py:3: ValueError: no",
    }
    result.stdout.fnmatch_lines(["*; 1 pair and 1 file not collected; *"])
    report = (pytester.path / "reports" / "parity.md").read_text()
    assert report.count("not collected") == 1
    assert "fc1.weight is 128x64" in report


def test_a_mark_around_a_pair_is_told_where_marks_belong(pytester: pytest.Pytester) -> None:
    write(pytester, "import parity, pytest\n@pytest.mark.skip(reason='later')\n@parity.pair('mlp')\ndef mlp(te): ...")
    run(pytester, "my_pairs.py").stdout.fnmatch_lines(["*my_pairs.py:3: pair 'mlp': marks of pytest*marks=?\"slow\"?*"])


def test_an_item_that_a_conftest_skips_is_recorded_with_the_reason(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    skip_first = "items[0].add_marker(pytest.mark.skip('too slow'))"
    pytester.makeconftest(f"import pytest\ndef pytest_collection_modifyitems(items):\n    {skip_first}")
    run(pytester, "my_pairs.py", "--parity-precisions=fp32", "-k", "mlp")
    assert [(result.status, result.reason) for result in recorded(pytester).results] == [
        ("skipped", "too slow"), ("passed", "")
    ]  # fmt: skip


def test_only_ids_that_are_not_there_are_told(pytester: pytest.Pytester) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::mlp", "my_pairs.py::mpl")
    assert [line for line in result.errlines if "pair" in line and "not found" not in line and "match" not in line] == [
        "ERROR: there is no pair 'mpl' in my_pairs.py; did you mean my_pairs.py::mlp?"
    ]


def test_a_pair_that_is_not_compared_at_the_precisions_of_the_run_is_told_with_its_own(
    pytester: pytest.Pytester,
) -> None:
    write(pytester, PAIRS)
    result = run(pytester, "my_pairs.py::fails", "--parity-precisions=fp16")
    result.stderr.fnmatch_lines(
        ["*the pair 'fails' of my_pairs.py has no item in this run; it is compared at bf16, fp32"]
    )
