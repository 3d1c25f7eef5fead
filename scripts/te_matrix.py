"""Test the CPU kernels on several versions of TransformerEngine, and write reports/te-matrix.md.

    python scripts/te_matrix.py [VERSION ...]

Run it with the Python of an environment that has parity and what it needs. Each version of TransformerEngine (pure
Python, about 1 MB) is installed into its own environment, which takes all other packages from the first one. The exit
code is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from parity.report.environment import made_by
from parity.report.numbers import markdown_table

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.14.1", "2.16.1", "2.18.0", "2.19.0", "2.20.2")
GROUPS = {
    "kernels": ("tests/cpu",),
    "TE's modules": ("tests/te/modules",),
    "loading TE": ("tests/te/test_te.py",),
    "cases": ("cases", "--parity-backend=cpu", "--parity-seeds=1"),
}
_LONGEST_RUN = 1800  # seconds
_LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class GroupRun:
    """The outcome of one group of tests on one version.

    Attributes:
        passed: the number of tests that passed.
        failed: the names of tests that failed, each with the first line of its error.
        skipped: the reasons why tests were skipped, each with their number.
        broken: why pytest did not finish, or None.
    """

    passed: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    broken: str | None = None

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failed and self.broken is None

    def __str__(self) -> str:
        if self.broken is not None:
            return "broken"
        return f"{self.passed} / {len(self.failed)} / {sum(count for _, count in self.skipped)}"


def make_environment(folder: Path, version: str) -> Path:
    """Return the Python of an environment with this version of TransformerEngine and all packages of this environment.

    Raises:
        SystemExit: if the version cannot be installed, or another one would be imported.
    """
    python = layer(folder)
    if installed_version(python) != version:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
        done = subprocess.run([*command, site_packages(folder), f"transformer-engine=={version}"], check=False)
        if done.returncode:
            raise SystemExit(f"te-matrix: pip could not install transformer-engine=={version}; what it said is above")
    if (found := installed_version(python)) != version:
        raise SystemExit(f"te-matrix: {python} sees TransformerEngine {found} and not {version}; delete {folder}")
    return python


def layer(folder: Path) -> Path:
    """Return the Python of an environment that finds its own packages first and then this environment's.

    A venv of a venv sees only the packages of the Python below both, so the folders are named in a ``.pth`` file. It
    uses ``addsitedir``, which also reads the ``.pth`` files in those folders, because editable installations need that.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in behind]
    (site_packages(folder) / "behind.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return python


def site_packages(folder: Path) -> Path:
    """Return the folder in which an environment keeps its own packages."""
    return next(folder.glob("[Ll]ib/**/site-packages"))


def installed_version(python: Path) -> str | None:
    """Return the version of TransformerEngine that this Python would import, or None."""
    code = "from importlib import metadata; print(metadata.version('transformer-engine'))"
    asked = subprocess.run([python, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def environment() -> dict[str, str]:
    """Return this process's variables, without those that would add other packages or options of pytest."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    return {"OMP_NUM_THREADS": "1", **kept}


def run_group(python: Path, arguments: Sequence[str], folder: Path, workers: str, keyword: str) -> GroupRun:
    """Run one group of tests with one Python, and return its outcome; the record and report go to ``folder``."""
    results = folder / f"{Path(arguments[0]).stem}.xml"
    results.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider", "-n", workers]
    command += ["-k", keyword, f"--junit-xml={results}", f"--parity-report={folder}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=_LONGEST_RUN, check=False
        )
    except subprocess.TimeoutExpired:
        return GroupRun(broken=f"not finished after {_LONGEST_RUN} s")
    run = read_results(results) if results.exists() else GroupRun()
    if run.failed or (done.returncode == 0 and run.passed):
        return run
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return GroupRun(broken=f"pytest ended with code {done.returncode}: {first_line(last)}")


def read_results(results: Path) -> GroupRun:
    """Return the outcome that a JUnit file of pytest describes."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ET.parse(results).iter("testcase"):
        outcome = next(
            (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        if outcome is None:
            passed += 1
        elif outcome.tag == "skipped":
            skipped[first_line(outcome.get("message", ""))] += 1
        else:
            name = f"{case.get('classname')}::{case.get('name')}"
            failed.append((name, first_line(outcome.get("message") or outcome.text or "")))
    return GroupRun(passed, tuple(failed), tuple(sorted(skipped.items())))


def first_line(text: str) -> str:
    """Return the first line, short enough for a table, without the path of this checkout."""
    line = text.strip().partition("\n")[0].replace(f"{ROOT}{os.sep}", "")
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} ..."


Runs = dict[str, dict[str, GroupRun]]


def draw(runs: Runs) -> str:
    """Return the report in markdown; ``runs`` are by version, then by group."""
    rows = [[version, *(groups.get(group, "-") for group in GROUPS)] for version, groups in runs.items()]
    machine = f"Python {platform.python_version()}, torch {metadata.version('torch')}, {platform.system()}"
    return (
        "\n\n".join(
            (
                "# The CPU kernels on versions of TransformerEngine",
                f"{made_by('make te-matrix')} {machine}. Passed / failed / skipped tests:",
                markdown_table(rows, ["TE", *GROUPS]),
                *section("Skipped", skips(runs), ["why", *runs]),
                *section("Failed", failures(runs), ["TE", "test", "what is wrong"]),
            )
        )
        + "\n"
    )


def section(title: str, rows: Sequence[Sequence[object]], headers: Sequence[str]) -> list[str]:
    """Return a heading and its table, or ``None.`` in place of a table without rows."""
    return [f"## {title}", markdown_table(rows, headers) if rows else "None."]


def skips(runs: Runs) -> list[list[object]]:
    """Return the reasons why tests were skipped, each with the number of these tests on each version."""
    counts = {version: Counter[str]() for version in runs}
    for version, groups in runs.items():
        for group in groups.values():
            counts[version].update(dict(group.skipped))
    reasons = sorted({reason for count in counts.values() for reason in count})
    return [[reason, *(counts[version][reason] or "" for version in runs)] for reason in reasons]


def failures(runs: Runs) -> list[list[object]]:
    return [
        [version, name, message]
        for version, groups in runs.items()
        for group, run in groups.items()
        for name, message in (*run.failed, *(((group, run.broken),) if run.broken else ()))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"default: {' '.join(VERSIONS)}"
    )
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), help="default: all")
    parser.add_argument("-n", dest="workers", default="auto", help="processes [auto, one a core]")
    parser.add_argument("-k", dest="keyword", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--environments", type=Path, default=Path(sys.prefix) / "te-matrix", help="where they are kept")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "te-matrix.md")
    options = parser.parse_args(arguments)
    runs: Runs = {}
    for version in options.versions:
        folder = options.environments.resolve() / version
        python = make_environment(folder, version)
        runs[version] = {}
        for group in options.groups:
            result = run_group(python, GROUPS[group], folder, options.workers, options.keyword)
            runs[version][group] = result
            options.report.write_text(draw(runs), encoding="utf-8")
            print(f"TE {version}, {group}: {result} {result.broken or ''}", flush=True)
    print(f"report: {options.report}")
    return int(not all(run.good for groups in runs.values() for run in groups.values()))


if __name__ == "__main__":
    sys.exit(main())
