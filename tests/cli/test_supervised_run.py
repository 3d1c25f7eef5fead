"""``parity run`` without workers: a case cannot end it as if all had passed, and who debugs it finds one process."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from parity.cli import suite
from parity.report import record

PAIRS = """
import ctypes
from torch import nn
import parity

class Ending(nn.Linear):
    def forward(self, x):
        ctypes.CDLL(None)._exit(0)

{pairs}
"""
PAIR = """
@parity.pair("{name}", precisions=["fp32"])
def {name}(te):
    weights = {{"weight": "weight", "bias": "bias"}}
    return parity.Pair({module}(16, 16), te.Linear(16, 16), inputs=lambda rng: rng.normal(8, 16), weights=weights)
"""
SOUND, ENDING = PAIR.format(name="sound", module="nn.Linear"), PAIR.format(name="ending", module="Ending")


@pytest.mark.parametrize(
    ("pairs", "code", "told"),
    [
        (SOUND, 0, ""),
        (SOUND + ENDING, 1, "ended with exit code 0 before the run was over, perhaps because C code called _exit"),
        (SOUND + "ctypes.CDLL(None)._exit(0)", 1, "ended with exit code 0 before the run was over"),
        (SOUND + "1 / 0", 2, "division by zero"),
    ],
)
def test_it_ends_with_0_only_if_it_says_so(tmp_path: Path, pairs: str, code: int, told: str) -> None:
    (tmp_path / "my_pairs.py").write_text(PAIRS.format(pairs=pairs))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = ("-m", "parity", "run", "my_pairs.py", "-n", "0")
    ended = forked.run(*command, folder=tmp_path, environment=environment)
    assert ended.returncode == code
    assert told in ended.stderr
    assert ("before the run was over" in ended.stderr) == (code == 1)
    if ENDING in pairs:
        results = record.read(tmp_path / "reports" / "parity.jsonl").results
        assert [(each.case, each.status) for each in results] == [("sound", "passed"), ("ending", "error")]


@pytest.mark.parametrize(
    ("processes", "environment", "is_supervised"),
    [
        ("0", {}, True),
        ("00", {}, True),
        ("auto", {"PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}, True),
        ("0", {"PYTEST_ADDOPTS": "-x --tb=short"}, True),
        ("auto", {}, False),
        ("auto", {"PYTEST_XDIST_AUTO_NUM_WORKERS": "2"}, False),
        ("2", {}, False),
        ("0", {"PYTEST_ADDOPTS": "-x --pdb"}, False),
        ("0", {"PYTEST_ADDOPTS": "--trace"}, False),
    ],
)
def test_a_run_is_supervised_that_has_neither_workers_nor_a_debugger(
    monkeypatch: pytest.MonkeyPatch, processes: str, environment: dict[str, str], is_supervised: bool
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr("parity.machine.process.possible", lambda: True)
    monkeypatch.setattr("parity.machine.process.supervised", lambda: begun.append(True))
    monkeypatch.setattr(suite, "run", lambda files, arguments: 7)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_AUTO_NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert suite.run_in_this_process([], [], processes) == 7
    assert bool(begun) == is_supervised
