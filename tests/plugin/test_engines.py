"""Engines that installed packages bring: how they are found, and what is told if there is none of that name."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import fakes
import pytest

from parity.plugin import engines, options
from parity.plugin.ray_engine import RayEngine
from parity.report import record
from parity.user_error import UserError

pytest_plugins = ["pytester"]

ENGINE = f"""
    import sys
    sys.path.insert(0, {str(Path(fakes.__file__).parent)!r})
    import fakes, pytest
    from parity import UserError
    from parity.report import environment, record
    from parity.report.earlier import Asked

    class Engine:
        def __init__(self, config, options, most, finished):
            if options.address == "nowhere":
                raise UserError("no queue answers at nowhere")
            self.finished, self.most = finished, most

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self, session):
            session.testscollected = 2
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session):
            for name in ("one", "two"):
                result = fakes.result(name, "bf16", size_label="2", path="pairs.py")
                place = f"pairs.py::{{name}}[bf16-2]", ("pairs.py", 1, name)
                report = pytest.TestReport(*place, {{}}, "passed", None, "call")
                here = environment.measure("cpu", (0,), 2, asked=Asked({{}}, "items", {{}}))
                report.parity_lines = {{
                    "results": [record.result_line(result)], "environment": record.environment_line(here)
                }}
                session.config.hook.pytest_runtest_logreport(report=report)
            return True
"""


@pytest.fixture
def announce(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution ``parity-queue`` with the engines ``queue`` and, whose code is not there, ``gone``."""
    pytester.makepyfile(parity_queue=textwrap.dedent(ENGINE), pairs="import parity")
    metadata = pytester.mkdir("parity_queue-1.0.dist-info")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-queue\nVersion: 1.0\n")
    entries = "queue = parity_queue:Engine\ngone = parity_queue:Gone\nray = parity_queue:Engine\n"
    (metadata / "entry_points.txt").write_text(f"[{engines.ENTRY_POINT_GROUP}]\n{entries}")
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.delitem(sys.modules, "parity_queue", raising=False)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "parity.plugin", "-p", "no:hypothesispytest", *arguments)


def test_ray_is_an_engine_whatever_is_installed() -> None:
    assert engines.load_engine("ray") is RayEngine


@pytest.mark.usefixtures("announce")
def test_an_engine_of_a_package_compares_the_run(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--parity-engine=queue")
    assert result.ret == 0
    result.assert_outcomes(passed=2)
    assert [each.case for each in record.read(pytester.path / "reports/parity.jsonl").results] == ["one", "two"]


@pytest.mark.usefixtures("announce")
def test_a_package_does_not_replace_parity_s_own_engine() -> None:
    assert engines.load_engine("ray") is RayEngine


@pytest.mark.usefixtures("announce")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parity-engine=queue", "--parity-address=nowhere"], "no queue answers at nowhere"),
        (["--parity-engine=queue", "--pdb"], "leave out the engine queue"),
        (
            ["--parity-engine=gone"],
            "*parity-queue announces the engine gone as *:Gone, but importing that raised A*",
        ),
        (["--parity-engine=dask"], "*--parity-engine is 'dask', but must be one of local, gone, queue, ray; others*"),
    ],
)
def test_an_engine_that_cannot_compare_ends_the_run(pytester: pytest.Pytester, arguments: list[str], told: str) -> None:
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{told}*"])


def test_parity_run_tells_an_unknown_engine_too() -> None:
    with pytest.raises(UserError, match=r"--engine is 'slurm', but must be one of local,.* ray; others come with"):
        options.parse_engine("slurm")
