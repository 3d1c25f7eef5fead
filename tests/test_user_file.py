"""A user's own file of pairs, on TE itself, in a folder of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn

class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.outer(F.gelu(self.inner(x), approximate="tanh"))

class Ported(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = te.Linear(width, 2 * width)
        self.outer = te.Linear(2 * width, width)

    def forward(self, x):
        return self.outer(F.gelu(self.inner(x), approximate="tanh"))
"""

PAIRS = """
import parity
from my_model import Plain, Ported

@parity.pair("my_mlp", sizes=[dict(batch=16, width=32), dict(batch=16, width=64)])
def my_mlp(te, width, **_):
    names = [f"{layer}.{kind}" for layer in ("inner", "outer") for kind in ("weight", "bias")]
    return parity.Pair(
        reference=Plain(width),
        candidate=Ported(width),
        weights=dict(zip(names, names)),
        inputs=lambda rng, batch: rng.normal(batch, width),
    )
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "my_pairs.py").write_text(PAIRS)
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=300)


def test_pytest_runs_it_with_workers_and_no_other_set_up(folder: Path) -> None:
    ran = run(folder, "pytest", "-p", "parity.plugin", "my_pairs.py", "-n", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"(\d+) of \1 items passed", ran.stdout)
    assert "my_mlp" in (folder / "reports" / "parity.md").read_text()


def test_a_wrong_port_fails_and_the_printed_command_reproduces_it(folder: Path) -> None:
    silu_for_gelu = MODEL.replace('F.gelu(self.inner(x), approximate="tanh")', "F.silu(self.inner(x))", 1)
    (folder / "my_model.py").write_text(silu_for_gelu)
    ran = run(folder, "pytest", "-p", "parity.plugin", "my_pairs.py", "-n", "0", "--parity-precisions=fp32")
    assert ran.returncode == 1
    (line, *_) = [line for line in ran.stdout.splitlines() if line.startswith("reproduce: pytest ")]
    again = subprocess.run(
        f"{sys.executable} -m {line.removeprefix('reproduce: ')} -p parity.plugin",
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.returncode == 1
    assert "1 failed" in again.stdout


def test_a_forgotten_weight_is_one_sentence_and_exit_code_2(folder: Path) -> None:
    (folder / "my_pairs.py").write_text(PAIRS.replace('("weight", "bias")', '("weight",)'))
    ran = run(folder, "parity", "run", "my_pairs.py", "-n", "0")
    assert ran.returncode == 2
    assert "inner.bias" in ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
