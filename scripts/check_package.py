"""Build parity's sdist and wheel, and try the installed wheel as a user would, outside of the checkout.

    python scripts/check_package.py [--fresh] [--constraints FILE] [--keep FOLDER]

Run it with the Python of an environment that has parity's extra ``dev``. The wheel is built from the sdist. It must
contain the checkout's packages and no other file, and must tell a right port from a wrong one. By default, it is
installed on top of the packages of the environment that runs this script, which takes seconds. With ``--fresh``, it is
installed into an empty environment, with everything that it depends on. The exit code is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from te_matrix import environment, layer

ROOT = Path(__file__).resolve().parents[1]
# The folders of the packages in a checkout, and in an installation.
FOLDERS = {"parity": "parity", "cases": "parity/cases", "te_on_cpu": "te_on_cpu"}
MODULE = "te_parity_plugin.py"  # outside of them

PAIRS = """
from torch import nn

import parity


def norm_linear(te, eps):
    return parity.Pair(
        reference=nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64, bias=False)),
        candidate=te.LayerNormLinear(64, 64, eps=eps, normalization="RMSNorm", bias=False),
        weights={"0.weight": "layer_norm_weight", "1.weight": "weight"},
        inputs=lambda rng: rng.normal(32, 64),
    )


@parity.pair("right")
def right(te):
    return norm_linear(te, 1e-6)


@parity.pair("wrong")
def wrong(te):
    return norm_linear(te, 1e-5)
"""


class Wrong(Exception):
    """Raised if something is wrong with the package; the message includes what the command printed."""


def build(folder: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Build the sdist, build the wheel from it, and return both."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root])
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    return sdist, wheel


def differences(wheel: Path, root: Path = ROOT) -> list[str]:
    """Return a sentence for each file that the wheel lacks, or that the checkout's packages do not have."""
    declared = {
        f"{installed}/{file.relative_to(root / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    } | {file.name for file in root.glob(MODULE)}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    lacks, has = sorted(declared - held), sorted(held - declared)
    return [
        *(f"the wheel lacks {name}: name its package or its data in pyproject.toml" for name in lacks),
        *(f"the wheel has {name}, which the checkout's packages do not have" for name in has),
    ]


def install(wheel: Path, folder: Path, fresh: bool, constraints: Path | None = None) -> Path:
    """Install the wheel in a new environment, and return the environment's Python."""
    command = [sys.executable, "-m", "pip", "--python"]
    if not fresh:
        python = layer(folder)
        run([*command, python, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel])
        return python
    venv.create(folder, with_pip=True)
    python = next(folder.glob("[bS]*/python*"))
    run([*command, python, "install", "--quiet", *(["-c", constraints] if constraints else []), wheel])
    run([*command, python, "check"])
    return python


def try_out(python: Path, folder: Path, fresh: bool) -> None:
    """Use the installed package as a user does, in a folder that contains only a file of pairs."""
    (folder / "my_pairs.py").write_text(PAIRS, encoding="utf-8")
    parity = python.with_name("parity")
    where = run([python, "-c", "import parity; print(parity.__file__)"], folder)
    if not Path(where.strip()).is_relative_to(python.parents[1]):
        raise Wrong(f"parity is imported from {where.strip()} and not from the environment in {python.parents[1]}")
    expect("attention", run([parity, "list"], folder))
    if fresh:  # slow, because it asks the libraries that were installed
        expect("The CPU kernels emulate each", run([parity, "doctor"], folder))
    run([parity, "run", "my_pairs.py", "-k", "right", "-p", "bf16,mxfp8", "-n", "0"], folder)
    wrong = [python, "-m", "pytest", "my_pairs.py", "-k", "wrong", "--parity-precisions=bf16", "-p", "no:cacheprovider"]
    expect("PAR201 norm-eps", run(wrong, folder, code=1))
    expect("PAR201", (folder / "reports" / "parity.md").read_text(encoding="utf-8"))


def run(command: Iterable[object], folder: Path | None = None, code: int = 0) -> str:
    """Run a command and return what it printed.

    Raises:
        Wrong: if it ends with another exit code.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != code:
        said = f"{done.stdout}\n{done.stderr}".strip()
        raise Wrong(f"`{' '.join(words)}` ended with code {done.returncode} and not {code}:\n{said}")
    return done.stdout


def expect(words: str, text: str) -> None:
    """Raise ``Wrong`` unless a command's output contains the words."""
    if words not in text:
        raise Wrong(f"expected {words!r} in:\n{text}")


def check(folder: Path, fresh: bool, constraints: Path | None) -> None:
    """Build, check, install and try out the package, and print each step when it is done."""
    (packages := folder / "dist").mkdir(parents=True)
    (empty := folder / "empty").mkdir()
    sdist, wheel = build(packages)
    print(f"built {sdist.name} ({sdist.stat().st_size:,} bytes) and {wheel.name} ({wheel.stat().st_size:,} bytes)")
    if wrong := differences(wheel):
        raise Wrong("\n".join(wrong))
    print("the wheel holds the checkout's packages and nothing else")
    python = install(wheel, folder / "environment", fresh, constraints)
    print("installed " + ("with all that it depends on" if fresh else "over the packages of this environment"))
    try_out(python, empty, fresh)
    print("outside of the checkout, a right port passes and a wrong one is told by name")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="install into an empty environment; needs an index")
    parser.add_argument("--constraints", type=Path, help="versions for --fresh, as pip's -c")
    parser.add_argument("--keep", type=Path, help="a new folder for packages and environment, which is kept")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            check((options.keep or Path(temporary)).resolve(), options.fresh, options.constraints)
        except Wrong as error:
            print(f"check_package: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
