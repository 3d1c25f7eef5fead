"""Run pytest with the plugin on a file of pairs, with stand-ins for the comparison."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import fakes
import forked
import pytest

from parity.report import record
from parity.result import Result
from parity.te import PRECISIONS

PAIRS = """
    import parity

    @parity.pair("mlp", sizes=[dict(batch=2, hidden=64), dict(batch=4, hidden=128)], marks=["slow_one"])
    def mlp(te, batch, hidden): ...

    @parity.pair("fails", sizes=[dict(batch=2, hidden=64)], precisions=["bf16", "fp32"])
    def fails(te, batch, hidden): ...
"""
CONFTEST = """
import fakes, pytest
patch = pytest.MonkeyPatch()
fakes.install(patch)
if "PYTEST_XDIST_WORKER" not in __import__("os").environ:
    fakes.install_gpus(patch)
"""
CASE = """
@parity.pair({name!r}, sizes=[dict(n=2)], precisions=["fp32"])
def case(te, n): ...
"""
ITEMS_OF_FAILS = ["fails[fp32-2x64]", "fails[bf16-2x64]"]
AVAILABLE = [name for name, precision in PRECISIONS.items() if precision.recipe is None]
UNAVAILABLE = [name for name in PRECISIONS if name not in AVAILABLE]
COMPARED = 2 * len(AVAILABLE) + len(ITEMS_OF_FAILS)


def write(pytester: pytest.Pytester, text: str, name: str = "my_pairs") -> Path:
    return pytester.makepyfile(**{name: textwrap.dedent(text)})


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*plugin_arguments(), *arguments)


def run_with_workers(pytester: pytest.Pytester, workers: int, *arguments: str) -> pytest.RunResult:
    """Run with worker processes, in which a conftest installs the stand-ins; this process is the controller."""
    tests = str(Path(fakes.__file__).parent)
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {tests!r})\nimport fakes, pytest\nfakes.install(pytest.MonkeyPatch())"
    )
    with pytest.MonkeyPatch.context() as patch:
        fakes.install(patch)  # The conftest does this here, too; the context takes all of it back.
        patch.setattr("execnet.gateway_io.Popen2IOMaster.__init__", forked.begin_worker)
        return run(pytester, "-n", str(workers), *arguments)


def plugin_arguments() -> list[str]:
    return ["-p", "parity.plugin", "-p", "no:hypothesispytest"]


def names(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """Return the ids that pytest selects."""
    listed = run(pytester, "--collect-only", "-q", *arguments).outlines
    return [line.split("::", 1)[1] for line in listed if "::" in line]


def recorded(pytester: pytest.Pytester, name: str = "parity") -> record.Record:
    return record.read(pytester.path / "reports" / f"{name}.jsonl")


def run_in_a_process(
    folder: Path, names: list[str], *arguments: str, **environment: str
) -> tuple[int, str, list[Result]]:
    """Return the exit code, what pytest prints, and the recorded results."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "my_pairs.py").write_text("import parity\n" + "".join(CASE.format(name=name) for name in names))
    path = os.pathsep.join([str(Path(fakes.__file__).parent), *sys.path])
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    outside |= {"PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    command = ["-m", "pytest", "-p", "parity.plugin", "my_pairs.py", *arguments]
    ran = forked.run(*command, folder=folder, environment=outside | environment)
    written = folder / "reports/parity.jsonl"
    assert written.exists(), f"exit code {ran.returncode} and no record: {ran.stdout}{ran.stderr}"
    return ran.returncode, ran.stdout + ran.stderr, list(record.read(written).results)
