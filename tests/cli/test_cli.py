"""The command line: what it prints and the codes it exits with.

Most commands run in this process. Tests about processes, and of the commands that users run most, start new ones.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import fakes
import forked
import pytest
import typer
from fakes import ENVIRONMENT, result

from parity import cli
from parity.case import registry
from parity.cli import app, suite
from parity.cli.suite import ItemsFollowed
from parity.judge import limits
from parity.plugin import collecting
from parity.plugin.options import Options
from parity.report import record
from parity.report.record import Uncollected
from parity.result import Result
from parity.user_error import UserError

FITS = """
    import parity
    from torch import nn

    @parity.pair("my_linear", sizes=[dict(batch=2, hidden=16)], precisions=["fp32", "bf16"])
    def my_linear(te, hidden, **_):
        return parity.Pair(
            reference=nn.Linear(hidden, 32),
            candidate=te.Linear(hidden, 32),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng, batch, hidden: rng.normal(batch, hidden),
        )
"""
MISFITS = FITS.replace("candidate=te.Linear(hidden, 32)", "candidate=te.Linear(hidden, 48)")


@dataclass(frozen=True)
class Ended:
    returncode: int | str | None
    stdout: str
    stderr: str


Command = Callable[..., Ended]


def in_a_process(folder: Path, *arguments: str, is_new: bool = True) -> Ended:
    """Run the command as a user does, in a process of its own: one that is new, or forked from a server."""
    root = Path(suite.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTEST_ADDOPTS": ""}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = ["-m", "parity", *arguments]
    if is_new:
        new = [sys.executable, *command]
        done = subprocess.run(new, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    else:
        done = forked.run(*command, folder=folder, environment=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run ``parity`` in this process, in a folder of the test's own, and forget the files of pairs in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    monkeypatch.setattr("execnet.gateway_io.Popen2IOMaster.__init__", forked.begin_worker)
    declared, modules = registry.cases(), set(sys.modules)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["parity", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main(own_process=False)
        _forget(tmp_path, modules)
        return Ended(ended.value.code, *capsys.readouterr())

    yield run
    registry.restore(declared)


def _forget(folder: Path, modules: set[str]) -> None:
    for name in sys.modules.keys() - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@pytest.fixture
def report(command: Command) -> Command:
    return partial(command, "report")


def write(folder: Path, text: str, name: str = "my_pairs.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


class Here:
    """A runner of pairs in this process, with a stand-in for the comparison and a file name that only one test has."""

    def __init__(self, folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.file, self._capsys = folder, file, capsys

    def write(self, text: str) -> None:
        write(self.folder, text, self.file)

    def run(self, *arguments: str) -> int:
        code = suite.run([self.file], ["-p", "no:hypothesispytest", *arguments])
        self.stdout, self.stderr = self.read()
        return code

    def read(self) -> tuple[str, str]:
        """Return what has been printed since the last time."""
        return tuple(self._capsys.readouterr())


@pytest.fixture
def here(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Here]:
    fakes.install(monkeypatch)
    monkeypatch.setattr("execnet.gateway_io.Popen2IOMaster.__init__", forked.begin_worker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    declared = registry.cases()
    yield Here(tmp_path, re.sub(r"\W", "_", f"pairs_of_{request.node.name}") + ".py", capsys)
    registry.restore(declared)


def assert_mistake(done: Ended, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_help_imports_neither_torch_nor_te(tmp_path: Path) -> None:
    code = (
        "import sys, parity.cli\ntry: parity.cli.app(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformer_engine', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert all(command in done.stdout for command in ("run", "list", "report", "doctor"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fly",), ("fly",)),
        (("run", "--speed", "9"), ("--speed",)),
        (("run", "missing.py"), ("there is no file or folder missing.py",)),
        (("run", "-n", "many", "my_pairs.py"), ("'many'", "a number of processes or auto")),
        (("run", "-p", "bf15", "my_pairs.py"), ("'bf15' in --precision; did you mean bf16? There are fp32",)),
        (("run", "--seeds", "none", "my_pairs.py"), ("--seeds is 'none'",)),
        (("run", "--timeout", "soon", "my_pairs.py"), ("--timeout is 'soon'",)),
        (("run", "--timeout", 14 * "9", "my_pairs.py"), ("--timeout is '999", "up to 1e+09")),
        (("run", "--diagnosis", "soon", "my_pairs.py"), ("--diagnosis is 'soon'", "yes, no, or a number of seconds")),
        (("run", "--diagnosis", "-1", "my_pairs.py"), ("--diagnosis is '-1'",)),
        (("run", "--seeds", 20 * "9", "my_pairs.py"), ("--seeds is '999", "at most 1,000,000 seeds")),
        (("run", "--attention", "flsh", "my_pairs.py"), ("--attention:", "'flsh'", "one of auto, flash")),
        (("run", "--calibration", "no.json", "my_pairs.py"), ("--calibration: there is no calibration table no.json",)),
        (
            ("run", "--calibration", "notes.txt", "my_pairs.py"),
            ("notes.txt is not a calibration table: not JSON: column 1",),
        ),
        (
            ("run", "--calibration", "nan.json", "my_pairs.py"),
            ("--calibration: nan.json has a law", "in fp32 has the ce"),
        ),
        (("run", "--backend", "tpu", "my_pairs.py"), ("'tpu', but must be one of auto, gpu, cpu",)),
        (("suggest-map", "--backend", "tpu", "my_pairs.py"), ("'tpu', but must be one of auto, gpu, cpu",)),
        (("run", "--name", 300 * "x", "my_pairs.py"), ("--name is 'xxx", "a file name of up to 100")),
        (("run", "notes.txt"), ("notes.txt: a file of pairs is a Python file",)),
        (("suggest-map", "."), ("this is a folder; name one of the files",)),
        (("run", "--report", "my_pairs.py", "my_pairs.py"), ("--report is", "a file, but should be a folder")),
        (("throughput", "my_pairs.py", "--precisions", "bf15"), ("'bf15' in --precisions;",)),
        (("throughput", "my_pairs.py", "-p", "fp32", "-p", "bf15"), ("'bf15' in --precisions;",)),
        (("run", "my_pairs.py", "--precisions", "fp32,bf15"), ("'bf15' in --precision;",)),
        (("false-alarms", "my_pairs.py", "--seeds", "none"), ("--seeds is 'none'",)),
        (("calibrate", "my_pairs.py", "-o", "my_pairs.py/table.json"), ("-o is", "a file, but should be a folder")),
        (("calibrate", "my_pairs.py", "-p", "fp32", "-n", "1"), ("input gradients in fp32", "5 different tensors")),
        (("report", "missing.jsonl"), ("cannot read missing.jsonl",)),
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_bad_arguments_end_in_a_sentence_and_code_2(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    write(tmp_path, FITS)
    write(tmp_path, "", "notes.txt")
    nowhere = {key: replace(law, center=math.nan) for key, law in limits.packaged().laws.items() if key[0] == "fp32"}
    limits.save(limits.Table(nowhere, {}), tmp_path / "nan.json")
    assert_mistake(command(*arguments), *words)


@pytest.mark.parametrize("name", ["run", "suggest-map", "throughput", "gpu-report"])
def test_an_unknown_backend_in_the_environment_ends_in_a_sentence_and_code_2(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PARITY_BACKEND", "tpu")
    write(tmp_path, FITS)
    done = command(name, "my_pairs.py")
    assert_mistake(done, "--backend (or PARITY_BACKEND) is 'tpu', but must be one of auto, gpu, cpu")


def test_run_has_an_option_for_each_of_the_plugin() -> None:
    of_plugin = {
        name for name in vars(Options(None, "auto", (0,), Path(), "")) if name not in ("precisions", "folder", "start")
    }
    of_run = {parameter.name for parameter in typer.main.get_command(app).commands["run"].params}
    assert of_plugin | {"precision", "report"} <= of_run


def test_a_keyword_that_selects_nothing_is_told_with_code_2(here: Here) -> None:
    here.write(FITS)
    assert here.run("-k", "no_such", "-n", "2") == 2
    told = f"no pair in {here.file} matches -k 'no_such'; `parity list` shows the pairs' names"
    assert here.stderr == f"parity: nothing to compare: {told}\n"
    assert here.stdout == ""  # no worker has been started


def test_a_keyword_that_matches_what_a_file_computes_selects_it(here: Here) -> None:
    here.write(FITS.replace('"my_linear"', '"my_" + "raenil"[::-1]'))
    assert here.run("-k", "my_linear") == 0


@pytest.mark.parametrize(
    ("keyword", "may"),
    [
        ("my_lin", True),
        ("MY_LINEAR", True),
        ("gone", False),
        ("gone or missing", False),
        ("gone or my_linear", True),
        ("not gone", True),
        ("fp8_block", True),  # every precision is a name of items
        ("pairs", True),  # the file's name
        ("4x16", True),  # a size is computed
        ("(gone)", False),
        ("", True),
    ],
)
def test_the_text_of_a_file_tells_whether_a_keyword_may_match(tmp_path: Path, keyword: str, may: bool) -> None:
    file = write(tmp_path, FITS, "some_pairs.py")
    assert collecting.may_match(keyword, [str(file)]) is may
    assert collecting.may_match(keyword, [f"{file}::my_linear[bf16-2x16]"]) is may


def test_a_bad_option_of_the_plugin_ends_in_a_sentence_and_code_2(here: Here) -> None:
    here.write(FITS)
    assert here.run("--parity-seeds=none") == 2
    assert "'none', but must be a count" in here.stderr


def test_a_file_that_cannot_be_imported_ends_in_a_sentence_and_code_2(here: Here) -> None:
    here.write("import parity\nimport no_such_module")
    assert here.run() == 2
    assert here.stderr == f"parity: {here.file}:2: ModuleNotFoundError: No module named 'no_such_module'\n"
    assert "Traceback" not in here.stdout


def test_workers_report_a_broken_file_once(here: Here) -> None:
    here.write("import parity\nimport no_such_module")
    assert here.run("-n", "2") == 2
    assert here.stderr.count("No module named 'no_such_module'") == 1


def test_a_file_that_skips_itself_is_told_with_its_reason(here: Here) -> None:
    here.write("import parity, pytest\npytest.importorskip('no_such_module')")
    assert here.run() == 2
    assert f"nothing to compare: {here.file} skips itself: Skipped: could not import 'no_such_module'" in here.stderr


def test_a_file_without_pairs_ends_in_a_sentence_and_code_2(here: Here) -> None:
    here.write("import parity")
    assert here.run() == 2
    assert here.stderr == f"parity: nothing to compare: there is no pair in {here.file}\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_unknown_pair_comes_with_the_nearest_names(command: Command, tmp_path: Path, workers: str) -> None:
    write(tmp_path, FITS)
    done = command("run", "my_pairs.py::my_linar", "-n", workers)
    assert_mistake(done, "no pair 'my_linar' in my_pairs.py; did you mean my_pairs.py::my_linear?")


def test_failed_parity_is_code_1(here: Here) -> None:
    here.write(FITS.replace("my_linear", "fails"))
    assert here.run() == 1
    assert here.stderr == ""


def test_verdicts_as_json_are_all_that_standard_output_gets(here: Here) -> None:
    here.write(FITS.replace("my_linear", "fails") + FITS)
    with suite.verdicts_on_stdout(True) as further:
        code = suite.run([here.file], ["-p", "no:hypothesispytest", *further])
    out, err = here.read()
    assert code == 1
    verdicts = json.loads(out)["verdicts"]
    assert {verdict["pair"]: verdict["status"] for verdict in verdicts} == {"fails": "failed", "my_linear": "passed"}
    assert "2 of 4 items failed" in err


def test_the_end_of_a_run_is_one_screen_with_a_line_for_each_failure(here: Here) -> None:
    here.write(FITS.replace("my_linear", "fails") + FITS)
    assert here.run() == 1
    head, end = re.split("=+ parity =+\n", here.stdout)
    verdict, *failures, page, report, record, _ = end.splitlines()
    assert verdict.startswith("❌ 2 of 4 items failed, worst margin 100 at `fails[")
    told = "PAR101 gate-up-swapped: margin 100 at output (seed 0)"
    assert sorted(failures) == [f"  fails[{precision}-2x16]: {told}" for precision in ("bf16", "fp32")]
    drawn = {"report": report, "page": page, "record": record}
    ends = {"report": "md", "page": "html", "record": "jsonl"}
    assert drawn == {name: f"{name}: {Path.cwd()}/reports/parity.{end}" for name, end in ends.items()}
    assert f"{here.file} " not in head.partition("FAILURES")[0]  # pytest's line of dots
    assert "short test summary" not in here.stdout
    assert "\x1b" not in here.stdout + here.stderr


def test_a_run_tells_a_file_its_progress_by_lines(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.progress._BETWEEN_LINES", 0.0)
    here.write(FITS.replace("my_linear", "fails") + FITS)
    here.run()
    told = [re.sub(" after.*", "", line) for line in here.stderr.splitlines()]
    assert [re.sub(", . failed", "", line) for line in told] == [f"comparing: {done} of 4" for done in range(1, 5)]
    assert told[-1] == "comparing, 2 failed: 4 of 4"


def test_a_run_with_workers_counts_what_they_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.progress._BETWEEN_LINES", 0.0)
    file = io.StringIO()
    followed = ItemsFollowed(file)
    for _ in range(2):  # each worker collects all items
        followed.pytest_xdist_node_collection_finished(["a", "b", "c"])
    for name, when, outcome in (
        ("a", "setup", "passed"),
        ("a", "call", "passed"),
        ("a", "teardown", "passed"),
        ("b", "setup", "failed"),
        ("b", "teardown", "failed"),  # an item counts once
    ):
        followed.pytest_runtest_logreport(pytest.TestReport(name, ("", None, ""), {}, outcome, None, when))
    told = [re.sub(" after.*", "", line) for line in file.getvalue().splitlines()]
    assert told == ["comparing: 1 of 3", "comparing, 1 failed: 2 of 3"]


def test_a_pair_that_does_not_fit_costs_no_other_and_ends_in_code_2(here: Here) -> None:
    here.write(FITS + FITS.replace("my_linear", "misfits") + FITS.replace("my_linear", "another"))
    assert here.run("--parity-precisions=fp32") == 2
    assert "2 passed, 1 error" in here.stdout
    assert "pair 'misfits'" in here.stderr


def test_a_terminal_that_lacks_a_character_gets_its_code(report: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record("night.jsonl", result())
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert report("night.jsonl").returncode == 0
    assert rb"\u2705 1 of 1 item passed" in printed.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_a_full_disk_behind_the_output_ends_in_a_sentence_and_code_2() -> None:
    """Use a process of its own, because Python flushes the rest of its output when the process ends."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "parity", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "parity: No space left on device: the output ends here\n")


def test_guide_prints_the_skill_that_is_installed(command: Command) -> None:
    done = command("guide")
    assert (done.returncode, done.stdout) == (0, (Path(cli.__file__).parents[1] / "SKILL.md").read_text())


@pytest.mark.parametrize("name", ["PAR101", "par101", "gate-up-swapped", "stacked-in-another-order"])
def test_a_finding_is_explained_by_its_code_or_title(command: Command, name: str) -> None:
    done = command("explain", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("PAR101 gate-up-swapped, stacked-in-another-order\n\nA stacked weight has")
    assert "PAR102" not in done.stdout


def test_an_unknown_finding_comes_with_the_nearest(command: Command) -> None:
    done = command("explain", "norm-epsilon")
    assert (done.returncode, done.stderr) == (
        2, "parity: no finding has the code or the title 'norm-epsilon'; did you mean norm-eps?\n"
    )  # fmt: skip


def test_list_shows_cases_without_te(tmp_path: Path) -> None:
    write(
        tmp_path,
        FITS + "\n    import sys, atexit\n    atexit.register(lambda: print('transformer_engine' in sys.modules))",
    )
    done = in_a_process(tmp_path, "list", "my_pairs.py")
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("my_linear"))
    assert row.split() == ["my_linear", "batch=2", "hidden=16", "fp32,", "bf16", "my_pairs.py:5"]
    assert done.stdout.endswith("False\n")


def test_a_folder_stands_for_those_of_its_files_that_import_parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pairs/b.py", "pairs/deep/a.py", "pairs/.hidden/c.py"):
        write(tmp_path, FITS, name)
    write(tmp_path, "print('no pairs here')", "pairs/setup.py")
    assert suite.files(["pairs", "pairs/b.py::my_linear[fp32-2x16]"]) == [
        "pairs/b.py", "pairs/deep/a.py", "pairs/b.py::my_linear[fp32-2x16]"
    ]  # fmt: skip


def test_a_file_whose_helper_imports_parity_counts_as_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import os, parity\ndef declare(name): parity.pair(name)(lambda te: 0)", "pairs/declaring.py")
    write(tmp_path, "from declaring import declare\ndeclare('helped')", "pairs/helped.py")
    write(tmp_path, "import os", "pairs/setup.py")
    assert suite.files(["pairs"]) == ["pairs/declaring.py", "pairs/helped.py"]
    assert [case.name for case in suite.cases(["pairs"])] == ["helped"]


def test_a_folder_without_pairs_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no Python file in .* imports parity"):
        suite.files([str(tmp_path)])


def test_without_paths_the_default_suite_is_compared() -> None:
    assert {Path(name).name for name in suite.files(None)} >= {"linear.py", "norm.py", "mlp.py", "attention.py"}


def test_installed_packages_add_to_the_default_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "their_pairs/__init__.py")
    theirs = write(tmp_path, FITS, "their_pairs/linear.py")
    metadata = tmp_path / "theirs-1.0.dist-info"
    write(tmp_path, "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", f"{metadata.name}/METADATA")
    write(tmp_path, "[parity.pairs]\ntheirs = their_pairs\n", f"{metadata.name}/entry_points.txt")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(theirs) in suite.files(None)


def test_a_faithful_port_passes_with_code_0_and_a_report(tmp_path: Path) -> None:
    write(tmp_path, FITS)
    done = in_a_process(
        tmp_path, "run", "my_pairs.py", "-n", "0", "--seeds", "2", "--report", "out", "--name", "mine", is_new=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"report: {tmp_path / 'out' / 'mine.md'}" in done.stdout
    results = record.read(tmp_path / "out" / "mine.jsonl").results
    assert [(each.item, each.seed, each.status, each.path) for each in results] == [
        (f"my_linear[{precision}-2x16]", seed, "passed", "my_pairs.py")
        for precision in ("fp32", "bf16")
        for seed in (0, 1)
    ]
    assert {tensor.label for tensor in results[0].tensors} >= {"output", "d weight", "d bias"}


def test_a_run_trains_what_declares_no_steps_and_says_what_it_cannot_decode(command: Command, tmp_path: Path) -> None:
    write(tmp_path, FITS)
    done = command("run", "my_pairs.py", "-p", "bf16", "--training", "--decoding", "-n", "0", "--json")
    told = {verdict["id"].partition("[")[2]: verdict["status"] for verdict in json.loads(done.stdout)["verdicts"]}
    assert (done.returncode, told) == (
        0, {"bf16-2x16]": "passed", "bf16-2x16-steps3]": "passed", "bf16-2x16-decoding]": "skipped"}
    )  # fmt: skip
    assert "skipped 1 item: not decoded, since neither Linear.forward nor call_candidate has an argument" in done.stderr


def test_limits_may_come_from_a_table_and_the_last_failures_run_again_alone(command: Command, tmp_path: Path) -> None:
    packaged = limits.packaged()
    strict = {key: replace(law, center=-9.0) if key[0] == "fp32" else law for key, law in packaged.laws.items()}
    limits.save(limits.Table(strict, {}), tmp_path / "strict.json")
    write(tmp_path, FITS)
    strictly = command("run", "my_pairs.py", "-n", "0", "--calibration", "strict.json")
    assert strictly.returncode == 1
    assert "--parity-calibration=strict.json -n 0" in strictly.stdout
    assert record.read(tmp_path / "reports" / "parity.jsonl").environment.limits == "strict.json"
    told = "limits of strict.json (none is wider than the packaged ones, and "
    assert told in strictly.stdout
    assert told in (tmp_path / "reports" / "parity.md").read_text()
    again = command("report", "reports/parity.jsonl", "-o", "again.md")
    assert told in again.stdout
    assert told in (tmp_path / "again.md").read_text()
    assert command("run", "my_pairs.py", "-n", "0", "--lf").returncode == 0
    assert [each.precision for each in record.read(tmp_path / "reports" / "parity.jsonl").results] == ["fp32"]


def test_a_pair_that_does_not_fit_ends_in_a_sentence_and_code_2(command: Command, tmp_path: Path) -> None:
    write(tmp_path, MISFITS)
    assert_mistake(command("run", "my_pairs.py", "-n", "0"), "my_pairs.py:5: pair 'my_linear'", "(48, 16)")


@pytest.mark.parametrize("command", ["calibrate", "false-alarms"])
def test_a_backend_that_is_not_there_ends_in_a_sentence_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write(tmp_path, FITS)
    done = in_a_process(tmp_path, command, "my_pairs.py", "--backend", "gpu", "-p", "fp32", "-n", "1", is_new=False)
    assert_mistake(done, "no real TransformerEngine kernels here: PyTorch sees no CUDA device")


@pytest.mark.parametrize("name", ["calibrate", "false-alarms"])
def test_a_command_needs_a_process(command: Command, name: str) -> None:
    assert_mistake(command(name, "-n", "0"), "'-n'", "greater than or equal to 1")


def test_a_pytest_id_lists_its_case_alone(command: Command, tmp_path: Path) -> None:
    write(tmp_path, FITS + FITS.replace("my_linear", "another"))
    done = command("list", "my_pairs.py::another[fp32-2x16]")
    assert "another" in done.stdout
    assert "my_linear" not in done.stdout


# parity suggest-map

FORGOTTEN = FITS.replace('{"weight": "weight", "bias": "bias"}', "{}")


def test_a_file_without_a_map_is_told_of_suggest_map_whose_map_then_passes(command: Command, tmp_path: Path) -> None:
    pairs = write(tmp_path, FORGOTTEN)
    assert_mistake(command("run", "my_pairs.py", "-n", "0"), "`parity suggest-map my_pairs.py::my_linear`")
    suggested = command("suggest-map", "my_pairs.py::my_linear")
    assert suggested.returncode == 0, suggested.stderr
    _, _, printed = suggested.stdout.partition("weights={")
    entries, _, told = printed.partition("},")
    assert "the map fits" in told
    pairs.write_text(pairs.read_text().replace("weights={}", f"weights={{{entries}}}"))
    assert command("run", "my_pairs.py", "-p", "fp32", "-n", "0").returncode == 0


def test_suggest_map_of_modules_that_do_not_go_together_says_so_with_code_1(command: Command, tmp_path: Path) -> None:
    write(tmp_path, MISFITS)
    done = command("suggest-map", "my_pairs.py", "--afresh")
    assert done.returncode == 1, done.stderr
    assert "(32, 16)" in done.stdout
    assert "(48, 16)" in done.stdout


def test_suggest_map_needs_one_pair_that_exists(command: Command, tmp_path: Path) -> None:
    write(tmp_path, FITS)
    assert_mistake(command("suggest-map", "my_pairs.py::other"), "'other'", "my_pairs.py::my_linear")


# parity trace

SCALED = FITS.replace("inputs=", "call_candidate=lambda module, x: 1.01 * module(x),\n            inputs=")
TRAINS = (
    FITS.replace("from torch import nn", "import torch\n    from torch import nn")
    .replace("inputs=", "call_reference=trained,\n            call_candidate=trained,\n            inputs=")
    .replace(
        "    @parity",
        """    def trained(module, x):
        with torch.enable_grad():
            module(x).square().mean().backward()
        return x + module.bias.grad.sum()

    @parity""",
    )
)


@pytest.mark.parametrize(("pair", "code", "off"), [(FITS, 0, 0), (SCALED, 1, 1)])
def test_trace_lists_what_each_stage_adds(command: Command, tmp_path: Path, pair: str, code: int, off: int) -> None:
    write(tmp_path, pair)
    done = command("trace", "my_pairs.py", "-p", "fp32")
    assert done.returncode == code, done.stderr
    header, stage, *_ = done.stdout.splitlines()
    assert header.split()[:4] == ["stage,", "up", "to", "matched"]
    assert "1st 'linear' of the module" in stage
    assert stage.startswith("✗") == bool(off)
    assert f"forward pass: {off} of 1 stages have a larger error than rounding explains" in done.stdout
    assert ("the candidate departs from the reference" in done.stdout) == bool(off)


def test_trace_lists_gradients_that_are_right_if_asked(command: Command, tmp_path: Path) -> None:
    write(tmp_path, FITS)
    assert "d weight" not in command("trace", "my_pairs.py").stdout
    assert "d weight" in command("trace", "my_pairs.py", "--gradients").stdout


def test_trace_says_what_it_cannot_judge(command: Command, tmp_path: Path) -> None:
    write(tmp_path, TRAINS)
    assert_mistake(command("trace", "my_pairs.py"), "my_linear", "computes gradients itself", "parity run")
    assert_mistake(command("trace", "my_pairs.py", "-p", "fp7"), "'fp7'")
    assert_mistake(command("trace", "my_pairs.py", "-p", "mxfp8"), "PARITY_EMULATED_GPU=blackwell")


# ``parity coverage``: which mistakes a comparison would have passed.

CAPPED = """
    import parity
    import torch
    from torch import nn

    class Capped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 32)

        def forward(self, x):
            return torch.tanh(self.linear(x) / 50.0) * 50.0

    @parity.pair("capped", precisions=["bf16"], probe=False, accepts=[])
    def capped(te):
        return parity.Pair(
            reference=Capped(),
            candidate=Capped(),
            weights={"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
            inputs=lambda rng: rng.normal(64, 16),
        )
"""


@pytest.mark.parametrize(
    ("pair", "code", "last"),
    [
        (CAPPED, 1, "this run could not have shown: cap missing"),
        (CAPPED.replace("accepts=[]", 'accepts=["softcap"]'), 0, "the pair accepts all others by their titles"),
        (CAPPED.replace("50.0", "0.5"), 0, "would have failed here"),
    ],
)
def test_coverage_lists_mistakes_that_pass(command: Command, tmp_path: Path, pair: str, code: int, last: str) -> None:
    write(tmp_path, pair)
    done = command("coverage", "my_pairs.py", "--strict")
    assert done.returncode == code, done.stderr
    assert last in done.stdout.splitlines()[-1]
    assert ("PAR218 softcap" in done.stdout) == ("50.0" in pair)
    assert command("coverage", "my_pairs.py").returncode == 0


def test_coverage_says_what_it_cannot_judge(command: Command, tmp_path: Path) -> None:
    write(tmp_path, CAPPED.replace("accepts=[]", 'accepts=["softcaps"]'))
    assert_mistake(command("coverage", "my_pairs.py"), "softcaps", "capped")
    write(tmp_path, FITS, "fits.py")
    assert_mistake(command("coverage", "fits.py", "-p", "mxfp8"), "PARITY_EMULATED_GPU=blackwell")


# ``parity invariance``: on what results depend.

ARRANGED = """
    import parity
    from torch import nn

    class Centred(nn.Linear):
        over_batch = False

        def forward(self, x):
            y = super().forward(x)
            return y - y.mean(1, keepdim=True) if x.shape[0] == 1 or not self.over_batch else y - y.mean((0, 1))

    class Wrong(Centred):
        over_batch = {wrong}

    @parity.pair("arranged", probe=False, invariance=["batch-place"])
    def arranged(te):
        return parity.Pair(
            reference=Centred(64, 64),
            candidate=Wrong(64, 64),
            weights={{"weight": "weight", "bias": "bias"}},
            inputs=lambda rng: rng.normal(1, 32, 64),
        )
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_invariance_shows_axes_by_precision(command: Command, tmp_path: Path, wrong: bool) -> None:
    write(tmp_path, ARRANGED.format(wrong=wrong))
    done = command("invariance", "my_pairs.py", "-p", "fp32,bf16")
    assert done.returncode == wrong, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["fp32", "bf16"]
    cells = {row.split()[0]: row.split()[1:] for row in rows[: rows.index("")]}
    assert cells["batch-place"][0] == ("DEPENDS" if wrong else "equal")
    assert cells["packing"] == ["-", "-"]
    assert "padding-left: no argument of the inputs is a padding mask or holds lengths" in rows
    assert command("run", "my_pairs.py", "-p", "fp32").returncode == wrong


def test_invariance_says_what_it_cannot_run(command: Command, tmp_path: Path) -> None:
    write(tmp_path, ARRANGED.format(wrong=False).replace("batch-place", "batchplace"))
    assert_mistake(command("invariance", "my_pairs.py"), "unknown axis 'batchplace'", "batch-size, batch-place")
    write(tmp_path, FITS, "fits.py")
    assert_mistake(command("invariance", "fits.py", "-p", "mxfp8"), "PARITY_EMULATED_GPU=blackwell")


# parity recipes


def test_recipes_says_what_recipes_cost_and_what_it_cannot_advise(command: Command, tmp_path: Path) -> None:
    write(tmp_path, FITS)
    done = command("recipes", "my_pairs.py", "-p", "fp8_current", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "nothing here was measured on a GPU" in done.stdout
    assert "With 1 of 1 linear layer in BF16, the error of outputs goes from" in done.stdout
    assert_mistake(command("recipes", "my_pairs.py", "-p", "bf16"), "my_linear", "bf16 has no recipe")
    assert_mistake(command("recipes", "my_pairs.py", "--by", "loss"), "--by", "outputs, gradients")


# ``parity report``: what it draws, prints and exits with.


def write_record(name: str, *results: Result, planned: int = 1) -> Path:
    path = Path(name)
    record.start(path, record.environment_line(replace(ENVIRONMENT, items=planned)))
    for each in results:
        record.append(path, record.result_line(each))
    return path


def test_a_record_is_drawn_again_beside_it(report: Command) -> None:
    write_record("night.jsonl", result(notes=("no TE",)))
    done = report("night.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 1 item passed" in done.stdout
    assert "note of 1 item: no TE" in done.stdout
    assert Path("night.md").read_text().startswith("# Parity report: night\n")


def test_the_verdicts_of_a_record_are_printed_as_json(report: Command) -> None:
    write_record("night.jsonl", result())
    done = report("night.jsonl", "--json")
    assert json.loads(done.stdout)["passed"] is True
    assert_mistake(
        report("night.jsonl", "--json", "-o", "x.md"),
        "--json prints the verdicts of one run; leave out -o and --against",
    )


def test_a_record_of_a_run_that_failed_ends_with_code_1_as_the_run_did(report: Command) -> None:
    write_record("night.jsonl", result(margin=9.0))
    assert report("night.jsonl").returncode == 1


def test_a_record_that_lacks_items_of_its_run_ends_with_code_1(report: Command) -> None:
    write_record("night.jsonl", result(), planned=2)
    assert report("night.jsonl").returncode == 1


def test_a_record_of_a_run_that_could_not_collect_a_pair_ends_with_code_1(report: Command) -> None:
    path = write_record("night.jsonl", result())
    record.append(path, record.uncollected_line(Uncollected("my_pairs.py::misfits", "fc1.weight is 128x64")))
    done = report("night.jsonl")
    assert done.returncode == 1
    assert done.stdout.startswith("⚠️ 1 of 1 item passed")
    assert "; 1 pair not collected; " in done.stdout


def test_lines_that_are_damaged_are_told_with_the_number_of_results_that_were_read_and_code_2(report: Command) -> None:
    path = write_record("night.jsonl", result(), result(seed=1))
    path.write_text(path.read_text()[:-40])
    done = report("night.jsonl")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("parity: night.jsonl:3: not JSON: column ")
    assert second == "parity: night.jsonl: 1 line left out, 1 result read"
    assert "; 1 line of the record left out; " in done.stdout
    path.write_text(path.read_text() + "\n\0")
    assert "night.jsonl: 2 lines left out, 1 result read" in report("night.jsonl").stderr


def test_the_folder_of_the_report_is_made(report: Command) -> None:
    write_record("night.jsonl", result())
    assert report("night.jsonl", "-o", "new/folder/drawn.md").returncode == 0
    assert "1 of 1 item passed" in Path("new/folder/drawn.md").read_text()


def test_a_report_that_cannot_be_written_ends_in_a_sentence_and_code_2(report: Command) -> None:
    write_record("night.jsonl", result())
    done = report("night.jsonl", "-o", "night.jsonl/drawn.md")
    assert done.returncode == 2
    assert "that is a file, but should be a folder" in done.stderr


@pytest.mark.parametrize("target", ["old.jsonl", "new.jsonl"])
def test_a_report_never_replaces_a_record_that_it_is_drawn_from(report: Command, target: str) -> None:
    write_record("old.jsonl", result())
    write_record("new.jsonl", result())
    done = report("new.jsonl", "--against", "old.jsonl", "-o", target)
    assert done.returncode == 2
    assert f"would replace its record {target}" in done.stderr
    assert len(record.read(Path(target)).results) == 1


def test_a_report_is_a_page_or_markdown_by_its_name(report: Command) -> None:
    write_record("night.jsonl", result())
    assert report("night.jsonl").returncode == 0
    assert Path("night.html").read_text().startswith("<!DOCTYPE html>")
    assert Path("night.md").read_text().startswith("# Parity report: night")
    assert report("night.jsonl", "-o", "alone/night.html").stdout.endswith("page: alone/night.html\n")
    assert [file.name for file in Path("alone").iterdir()] == ["night.html"]
    done = report("night.jsonl", "-o", "night.pdf")
    assert done.returncode == 2
    assert "a report is HTML or markdown, and night.pdf says that it is neither; name it night.html" in done.stderr
    assert not Path("night.pdf").exists()


def test_runs_without_a_common_item_prove_nothing_and_end_with_code_2(report: Command) -> None:
    write_record("old.jsonl", result("norm"))
    write_record("new.jsonl", result("mlp"))
    done = report("new.jsonl", "--against", "old.jsonl")
    assert done.returncode == 2
    assert "new.jsonl and old.jsonl have no item in common, so nothing was compared" in done.stderr


def test_an_item_that_newly_fails_ends_with_code_1(report: Command) -> None:
    write_record("old.jsonl", result())
    write_record("new.jsonl", result(margin=9.0))
    done = report("new.jsonl", "--against", "old.jsonl")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "❌ 1 item newly failing\nreport: new_against_old.md\n"
    assert Path("new_against_old.md").read_text().startswith("# Parity report: new.jsonl against old.jsonl\n")


def test_an_item_that_failed_before_as_well_ends_with_code_0(report: Command) -> None:
    write_record("old.jsonl", result(margin=9.0))
    write_record("new.jsonl", result(margin=9.0))
    assert report("new.jsonl", "--against", "old.jsonl").returncode == 0


def test_a_baseline_and_an_earlier_run_have_names(report: Command) -> None:
    for file in ("new", ".parity/baselines/good", "reports/runs/parity-0003"):
        write_record(f"{file}.jsonl", result())
    assert "nothing regressed" in report("new.jsonl", "--against", "good").stdout
    assert "nothing regressed" in report("3", "--against", "good").stdout
    assert report("3").stdout.endswith("report: reports/runs/parity-0003.md\n")
    assert Path("reports/runs/parity-0003_against_good.md").exists()


def test_an_unknown_baseline_is_told_with_those_that_there_are(report: Command) -> None:
    write_record("new.jsonl", result())
    write_record(".parity/baselines/good.jsonl", result())
    done = report("new.jsonl", "--against", "god")
    assert done.returncode == 2
    assert "--against is 'god', which is no file, no baseline in .parity/baselines (good; " in done.stderr


# Commands that messages and documents tell a person to run.


ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TEXTS = [*(ROOT / "parity").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_every_option_with_which_it_is_told(command):
    told = re.compile(rf"parity {command}\b([^`\"'\n;)]*)")
    arguments = [found for text in TEXTS for found in told.findall(text.read_text(encoding="utf-8"))]
    options = {option for found in arguments for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", found)}
    below = getattr(COMMANDS[command], "commands", {}).values()
    parameters = [parameter for each in (COMMANDS[command], *below) for parameter in each.params]
    known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    assert options <= {"--help"} | known
