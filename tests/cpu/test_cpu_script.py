"""A user's TransformerEngine script, written for a GPU, run as it is on the CPU kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TRAIN = """
    import argparse
    import sys

    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    from blocks.mlp import Block

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    rank = 0
    torch.cuda.set_device(rank)
    torch.cuda.manual_seed_all(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else None
    model = torch.nn.Sequential(Block(32), te.Linear(32, 16)).cuda(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 32, device=device), torch.randn(64, 16).to(f"cuda:{rank}")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    losses = []
    for _ in range(parser.parse_args().steps):
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) > 0
    assert x.is_cuda
    if __name__ == "__main__":
        print("losses", *losses)
        sys.exit(7)
"""
BLOCK = """
    import torch
    import transformer_engine.pytorch as te

    class Block(torch.nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.mlp = te.LayerNormMLP(hidden, 2 * hidden, device="cuda")

        def forward(self, x):
            return x + self.mlp(x)
"""


def execute(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "parity", "exec", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def write(tmp_path: Path):
    def to_file(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))

    return to_file


def test_a_training_script_for_a_gpu_trains_and_ends_with_its_own_exit_code(write, tmp_path: Path) -> None:
    write("scripts/train.py", TRAIN)
    (tmp_path / "scripts/blocks").mkdir()
    write("scripts/blocks/mlp.py", BLOCK)
    ran = execute(tmp_path, "scripts/train.py", "--steps", "5")
    assert ran.returncode == 7, ran.stderr
    losses = [float(word) for word in ran.stdout.split()[1:]]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_arguments_that_look_like_parity_s_own_are_the_script_s(write, tmp_path: Path) -> None:
    write("show.py", "import sys; print(sys.argv)")
    ran = execute(tmp_path, "show.py", "--help", "-x", "1")
    assert ran.stdout.strip() == "['show.py', '--help', '-x', '1']"


def frames(traceback: str) -> list[str]:
    """Files and lines, as ``fails.py:3``."""
    return [f"{Path(file).name}:{line}" for file, line in re.findall(r'File "(.*)", line (\d+)', traceback)]


def test_an_exception_in_the_script_shows_its_own_line_and_no_other(write, tmp_path: Path) -> None:
    write("fails.py", "x = 1\n\nraise ValueError('mine')")
    ran = execute(tmp_path, "fails.py")
    assert ran.returncode == 1
    assert frames(ran.stderr) == ["fails.py:3"]
    assert ran.stderr.strip().endswith("ValueError: mine")


def test_an_exception_in_a_module_of_the_script_s_shows_the_way_there_and_its_cause(write, tmp_path: Path) -> None:
    write("fails.py", "import broken")
    write("broken.py", "try:\n    import not_there\nexcept ImportError as error:\n    raise ValueError from error")
    assert frames(execute(tmp_path, "fails.py").stderr) == ["broken.py:2", "fails.py:1", "broken.py:4"]


def test_a_script_that_is_not_python_shows_the_line_and_nothing_of_what_parsed_it(write, tmp_path: Path) -> None:
    write("fails.py", "import broken")
    write("broken.py", "x = = 1")
    ran = execute(tmp_path, "fails.py")
    assert (ran.returncode, frames(ran.stderr)) == (1, ["fails.py:1", "broken.py:1"])
    assert ran.stderr.strip().endswith("SyntaxError: invalid syntax")


def test_a_hook_that_the_script_sets_for_exceptions_is_called(write, tmp_path: Path) -> None:
    write("fails.py", "import sys\nsys.excepthook = lambda *raised: print('seen', raised[1])\nraise ValueError('mine')")
    ran = execute(tmp_path, "fails.py")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "seen mine\n", "")


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    ran = execute(tmp_path, "nothing.py")
    assert ran.returncode == 2
    assert ran.stderr == "parity: there is no script nothing.py\n"
