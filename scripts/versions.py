"""Try parity on each Python that it supports, also with the oldest dependencies, and write reports/versions.md.

    python scripts/versions.py [--pythons VERSION ...] [--without-torch VERSION ...]

Each Python gets an environment with the newest dependencies that it can have, and one with the oldest that
pyproject.toml allows. The wheel is installed there and tried out as in ``scripts/check_package.py``, and the built-in
cases are compared. If PyTorch cannot be installed (on some machines, pip finds only builds for CUDA, of several GB),
``--without-torch 3.13`` leaves it out for Python 3.13 and tries only what works without it; the report says so. The
exit code is 1 if something fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import check_package
from packaging.requirements import Requirement

from parity.report.environment import made_by
from parity.report.numbers import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
KINDS = ("newest", "oldest")
# Pinned to the versions of `constraints.txt`, since a machine may have its own. `make te-matrix` tries versions of
# TransformerEngine.
PINNED = ("torch", "transformer-engine")
CASES = ("cases", "-q", "-p", "no:cacheprovider", "--parity-backend=cpu", "--parity-seeds=1")

# A program that imports every module that is installed. It prints how many there are, how many need torch or a package
# of an extra, and what fails for other reasons.
IMPORTS = """
import importlib, pkgutil, parity, te_on_cpu

found = [
    module.name
    for package in (parity, te_on_cpu)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
]
names = [name for name in found if not name.endswith("__main__")]
absent, wrong = 0, []
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ImportError) and str(error.name).partition(".")[0] in ("torch", "matplotlib"):
            absent += 1
        else:
            wrong.append(f"{name}: {error!r}")
print(len(names), absent, *wrong, sep="\\n")
"""


@dataclass(frozen=True)
class Tried:
    """The outcome of each step in one environment; empty if the step was not taken."""

    python: str
    dependencies: str
    torch: str = ""
    package: str = ""
    cases: str = ""
    wrong: str = ""


def requirements(wheel: Path) -> list[Requirement]:
    """Return the wheel's dependencies, without those of its extras."""
    archive = ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    declared = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [one for one in map(Requirement, declared) if "extra ==" not in str(one.marker)]


def pins() -> list[str]:
    """Return the lines of ``constraints.txt`` that pin PyTorch and TransformerEngine."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in PINNED]


def oldest(needed: Sequence[Requirement], python: str) -> list[str]:
    """Return pip's constraints for the lowest versions that the requirements allow and for which a Python has wheels.

    Raises:
        Wrong: if a requirement has no lower bound, or no versions fit.
    """
    bounded = [one for one in needed if one.name not in PINNED]
    if unbounded := [one.name for one in bounded if not any(part.operator == ">=" for part in one.specifier)]:
        raise check_package.Wrong(f"pyproject.toml gives no lower bound (>=) to {', '.join(unbounded)}")
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--resolution", "lowest-direct", "--no-build"]
    command += ["--quiet", "--no-header", "--no-annotate", "--python-version", python]
    done = subprocess.run(command, input="\n".join(map(str, bounded)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise check_package.Wrong(f"uv finds no oldest versions that fit:\n{done.stderr}")
    return done.stdout.splitlines()


def interpreter(version: str) -> Path:
    """Return the Python of this version, from pyenv or from the path."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if found := (pyenv[-1] if pyenv else shutil.which(f"python{version}")):
        return Path(found)
    raise check_package.Wrong(f"this machine has no Python {version}")


def attempt(version: str, kind: str, wheel: Path, folder: Path, with_torch: bool) -> Tried:
    """Make one environment, try out there what it allows, and return the outcome."""
    needed = [one for one in requirements(wheel) if with_torch or one.name != "torch"]
    try:
        check_package.run([interpreter(version), "-m", "venv", folder])
        python = folder / "bin" / "python"
        full = check_package.run([python, "-c", "import platform; print(platform.python_version())"]).strip()
        constraints = folder / "constraints.txt"
        lines = [*pins(), *(oldest(needed, full) if kind == "oldest" else [])]
        constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
        check_package.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, *needed])
        check_package.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel])
        (empty := folder / "empty").mkdir()
        if not with_torch:
            return Tried(full, kind, "left out", without_torch(python, empty))
        torch = check_package.run([python, "-c", "import torch; print(torch.__version__)"]).strip()
        check_package.try_out(python, empty, fresh=True)
        cases = check_package.run([python, "-m", "pytest", *CASES, f"--parity-report={empty}"], ROOT)
        return Tried(full, kind, torch, "works", summary(cases))
    except check_package.Wrong as error:
        return Tried(version, kind, wrong=str(error).strip())


def without_torch(python: Path, empty: Path) -> str:
    """Compile all modules, import those that work without torch, run ``--help``, and return how many modules worked."""
    parity = python.with_name("parity")
    check_package.expect("--resume", check_package.run([parity, "run", "--help"], empty))
    place = check_package.run([python, "-c", "import parity; print(parity.__path__[0])"], empty).strip()
    check_package.run([python, "-W", "error", "-m", "compileall", "-q", "-f", place])
    modules, absent, *wrong = check_package.run([python, "-c", IMPORTS], empty).splitlines()
    if wrong:
        raise check_package.Wrong("\n".join(wrong))
    return f"{modules} modules compile, {int(modules) - int(absent)} import without torch, `parity run --help` works"


def summary(said: str) -> str:
    """Return pytest's last line without the time that it took."""
    return re.sub(r" in [\d.]+s.*", "", said.strip().splitlines()[-1])


def draw(tried: Sequence[Tried], wheel: Path) -> str:
    """Return the report, in markdown."""
    rows = [(*astuple(one)[:-1], "yes" if one.wrong else "") for one in tried]
    bounds = [(str(one).partition(";")[0].strip(), str(one.marker or "")) for one in requirements(wheel)]
    failed = [f"### Python {one.python}, {one.dependencies}\n\n```\n{one.wrong}\n```" for one in tried if one.wrong]
    parts = [
        "# Python's versions, and the oldest dependencies",
        f"{made_by('make versions')} *newest*: what pip takes by itself. *oldest*: the lowest versions that the "
        f"package admits and that Python has wheels for. Both with {' and '.join(pins())}, as `constraints.txt` has "
        "them. *the package*: the wheel, installed, told a right port from a wrong one in a folder of its own, and "
        "`parity doctor` answered. "
        "*cases*: what pytest says of the built-in ones on the CPU kernels, one seed. What is empty was not tried: "
        "where torch was left out, since that machine's pip has only builds for CUDA, nothing was compared.",
        markdown_table(rows, ["Python", "dependencies", "torch", "the package", "cases", "failed"]),
        *(["## What failed", *failed] if failed else []),
        "## What the wheel depends on",
        markdown_table(bounds, ["requirement", "where"]),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--without-torch", nargs="+", default=(), metavar="PYTHON", help="Pythons without PyTorch here")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "versions.md")
    options = parser.parse_args(arguments)
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory() as temporary:
        _, wheel = check_package.build(Path(temporary) / "dist")
        for version in options.pythons:
            for kind in options.kinds:
                folder = Path(temporary) / f"{version}-{kind}"
                tried.append(attempt(version, kind, wheel, folder, version not in options.without_torch))
                shutil.rmtree(folder, ignore_errors=True)  # several GB, with a PyTorch for CUDA
                options.report.write_text(draw(tried, wheel), encoding="utf-8")
                print(*filter(None, astuple(tried[-1])), sep=", ", flush=True)
    print(f"report: {options.report}")
    return int(any(one.wrong for one in tried))


if __name__ == "__main__":
    sys.exit(main())
