"""`parity train`: a table, a report, and the band that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.cli.suite import train
from parity.user_error import UserError

PAIR = """
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
    path.write_text(PAIR.replace("linear", tmp_path.name))  # a name is declared once in a process
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
