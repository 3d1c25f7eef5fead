"""parity as users meet it: installed, in a folder of their own, and in the examples."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest

import parity
from parity.case import registry

ROOT = Path(__file__).parents[2]


# The names of ``parity`` are loaded lazily, but can be listed at any time.


def test_every_public_name_is_listed():
    assert set(parity.__all__) <= set(dir(parity))


def test_every_listed_name_is_there():
    assert all(hasattr(parity, name) for name in dir(parity))


def test_listing_the_names_loads_no_torch():
    code = "import sys, parity; assert 'compare' in dir(parity); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# A user's own file of pairs, in a folder of its own, run on TE itself.


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


def test_pytest_runs_it_with_workers_and_no_other_set_up(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "parity.plugin", "my_pairs.py", "-n", "1"]
    options = ["--parity-precisions=bf16,fp8_current"]
    ran = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"(\d+) of \1 items passed", ran.stdout)
    assert "my_mlp" in (folder / "reports" / "parity.md").read_text()


def test_a_wrong_port_fails_and_the_printed_command_reproduces_it(folder: Path) -> None:
    silu_for_gelu = MODEL.replace('F.gelu(self.inner(x), approximate="tanh")', "F.silu(self.inner(x))", 1)
    (folder / "my_model.py").write_text(silu_for_gelu)
    plugin = ["-m", "pytest", "-p", "parity.plugin"]
    ran = forked.run(*plugin, "my_pairs.py", "-n", "0", "--parity-precisions=fp32", folder=folder)
    assert ran.returncode == 1
    (line, *_) = [line for line in ran.stdout.splitlines() if line.startswith("reproduce: pytest ")]
    again = forked.run(*plugin, *shlex.split(line.removeprefix("reproduce: pytest ")), folder=folder)
    assert again.returncode == 1
    assert "1 failed" in again.stdout


def test_a_forgotten_weight_is_one_sentence_and_exit_code_2(folder: Path) -> None:
    (folder / "my_pairs.py").write_text(PAIRS.replace('("weight", "bias")', '("weight",)'))
    ran = forked.run("-m", "parity", "run", "my_pairs.py", "-n", "0", folder=folder)
    assert ran.returncode == 2
    assert "inner.bias" in ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr


# TransformerEngine issue 407: rounding or bug?


EXAMPLE = Path(__file__).parents[2] / "examples" / "issue_407.py"


@pytest.fixture
def issue_407():
    """Yield the issue's cases at a smaller size than in its report; the built-in case has the report's size."""
    before, size = registry.cases(), dict(batch=2, seq=64, hidden=128, ffn=192)
    yield {case.name: dataclasses.replace(case, sizes=(size,)) for case in registry.load_file(EXAMPLE)}
    registry.restore(before)


def test_the_right_split_passes_in_fp32_with_the_error_of_tf32(issue_407):
    (result,) = parity.compare(issue_407["gate_over_up"], ["fp32"])
    output = result.tensors[0]
    assert result.passed
    assert 2.0**-13 < output.errors.relative_l2 < 2.0**-10, "TF32 has a unit roundoff of 2^-11"
    assert output.errors.relative_l2 == pytest.approx(output.expected.relative_l2, rel=0.1)


def test_the_swapped_split_fails_in_fp32_by_a_margin_of_more_than_100(issue_407):
    (result,) = parity.compare(issue_407["up_over_gate"], ["fp32"], diagnose=False)
    assert result.status == "failed"
    assert result.margin > 100


# The examples port unchanged layers of transformers, correctly.


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "hugging_face").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_port_of_a_layer_of_transformers_passes(file):
    pytest.importorskip("transformers", reason="te-parity[examples] is not installed")
    (case,) = registry.load_file(file)
    results = parity.compare(case, ["fp32", "bf16", "fp8_current"])
    assert [result.status for result in results] == ["passed"] * 3
