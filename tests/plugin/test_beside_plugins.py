"""Pairs beside fixtures and beside other plugins of pytest."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from plugin_runs import CASE, recorded, run, run_in_a_process, write

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("stand_ins")
FIXTURES = """
import pytest, parity
pytestmark = pytest.mark.usefixtures("named")
done = []
@pytest.fixture(autouse=True, scope="session")
def session(): done.append("session"); yield; print("done", *done)
@pytest.fixture(autouse=True, scope="module")
def module(): done.append("module"); yield; done.append("-module")
@pytest.fixture(autouse=True)
def item(request): done.append(request.node.name); yield; done.append("-item")
@pytest.fixture
def named(monkeypatch, tmp_path): done.append("named")
def setup_module(): done.append("xunit")
"""


def test_fixtures_that_are_not_arguments_are_set_up_around_each_pair(pytester: pytest.Pytester) -> None:
    write(pytester, FIXTURES + CASE.format(name="one") + CASE.format(name="fails"))
    result = run(pytester, "my_pairs.py", "-s")
    result.assert_outcomes(passed=1, failed=1)
    told = "session xunit module one[[]fp32-2[]] named -item fails[[]fp32-2[]] named -item -module"
    result.stdout.fnmatch_lines([f"*done {told}"])


@pytest.mark.parametrize(
    ("line", "said", "status"),
    [
        ("pytestmark = pytest.mark.usefixtures('no_such')", "*fixture 'no_such' not found*", "error"),
        ("pytest.fixture(autouse=True)(lambda: 1 / 0)", "*ZeroDivisionError*", "error"),
        ("pytest.fixture(autouse=True)(lambda: pytest.skip('not here'))", "*not here*", "skipped"),
        ("pytest.fixture(autouse=True, params=[1])(lambda request: 0)", "*no parameter defined*", "error"),
    ],
)
def test_a_fixture_that_cannot_be_set_up_is_the_items_error(
    pytester: pytest.Pytester, line: str, said: str, status: str
) -> None:
    line = line if "mark" in line else f"it = {line}"
    write(pytester, f"import pytest, parity\n{line}\n{CASE.format(name='one')}")
    result = run(pytester, "my_pairs.py", "-rs")
    result.stdout.fnmatch_lines([said])
    assert result.ret != 0
    assert [each.status for each in recorded(pytester).results] == [status]


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_pytest_timeout_ends_a_comparison_as_the_plugins_own_limit_does(tmp_path: Path, method: str) -> None:
    pytest.importorskip("pytest_timeout")
    options = "--timeout=2", f"--timeout-method={method}", "--parity-seeds=2"
    code, _, (hangs, *right) = run_in_a_process(tmp_path, ["hangs", "right"], *options)
    assert code == 1
    assert hangs.reason.startswith("ran longer than 2 s (pytest-timeout); it was interrupted ")
    assert [each.status for each in right] == ["passed", "passed"]


def test_pairs_are_not_compared_in_forked_processes(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_forked")
    write(pytester, "import parity\n" + CASE.format(name="one"))
    result = run(pytester, "my_pairs.py", "--forked")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pairs cannot be compared with --forked: *"])
    write(pytester, "import parity\n" + CASE.format(name="two").replace("sizes=", "marks=['forked'], sizes="), "marked")
    run(pytester, "marked.py").stdout.fnmatch_lines(["*marked.py:3: pair 'two' has the mark forked, but *"])


@pytest.mark.parametrize("start", [".", "a/b", "elsewhere"])
def test_the_reproducing_command_works_where_the_run_was_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    folder = pytester.path / "a/pairs of mine"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "my_pairs.py").write_text("import parity\n" + CASE.format(name="fails"))
    (there := pytester.path / start).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(there)
    result = run(pytester, str(folder / "my_pairs.py"), "--parity-report=out")
    command = next(line for line in result.outlines if line.startswith("reproduce: pytest "))
    again = run(pytester, *shlex.split(command.removeprefix("reproduce: pytest ")))
    again.assert_outcomes(failed=1)


def test_escape_sequences_do_not_reach_the_terminal_from_what_is_not_collected(pytester: pytest.Pytester) -> None:
    escape = "\\x1b]0;pwned\\x07"
    pairs = f"import parity\n@parity.pair('one', sizes=[{{'{escape}': 1}}])\ndef one(te): ..."
    Path(pytester.path, "one.py").write_text(pairs)
    Path(pytester.path, "two.py").write_text(f"import parity\nraise ValueError('{escape}')")
    result = run(pytester, "one.py", "two.py", "--continue-on-collection-errors")
    assert result.ret != 0
    assert "pwned" in result.stdout.str()
    assert "\x1b]" not in result.stdout.str() + result.stderr.str()
