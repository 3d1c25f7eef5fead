"""``parity run`` and ``parity train`` in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from parity.cli import suite
from parity.cli.suite import train
from parity.report import record
from parity.user_error import UserError

# ``parity run`` without workers: a case cannot end it as if all had passed, and a debugger finds only one process.


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


# ``parity train``: a table, a report, and the band that the user asks for.


TRAINED = """
from torch import nn

import parity


@parity.pair("linear")
def linear(te):
    return parity.Pair(
        nn.Linear(16, 16), te.Linear(16, 16), lambda rng: rng.normal(32, 16), dict(weight="weight", bias="bias")
    )
"""


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "pair_to_train.py"
    path.write_text(TRAINED.replace("linear", tmp_path.name))  # a name is declared once in a process
    return str(path)


@pytest.mark.parametrize("drawn", [0, 3])
def test_pairs_are_trained_with_a_band_and_without(drawn, pair, tmp_path, capsys):
    out = tmp_path / "report.md"
    assert train([pair], 2, ["fp32"], [0, 1], "cpu", out, drawn)
    printed, text = capsys.readouterr().out, out.read_text()
    assert "[fp32-32x16-steps2]" in printed
    assert ("mean deviation" in printed, "| high" in text) == (drawn > 0, drawn > 0)


@pytest.mark.parametrize("drawn", [-1, 1])
def test_a_band_is_drawn_from_two_trainings_or_more(drawn, pair, tmp_path):
    with pytest.raises(UserError, match="--band must be the number of trainings"):
        train([pair], 2, ["fp32"], [0], "cpu", tmp_path / "report.md", drawn)
