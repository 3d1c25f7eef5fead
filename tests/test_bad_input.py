"""What leaves nothing to compare is told on the command line and in the report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAIRS = """
import parity
import torch
from torch import nn

def declare(name, **fields):
    @parity.pair(name, precisions=["fp32"])
    def case(te):
        pair = dict(reference=nn.Linear(16, 16, bias=False), candidate=te.Linear(16, 16, bias=False),
                    inputs=lambda rng: rng.normal(8, 16), weights={"weight": "weight"})
        return parity.Pair(**(pair | fields))

def same(call):
    return dict(call_reference=call, call_candidate=call)

declare("empty", inputs=lambda rng: rng.normal(0, 16))
declare("nothing", **same(lambda module, x: None))
declare("not_finite", inputs=lambda rng: torch.full((8, 16), float("nan")))
declare("detached", **same(lambda module, x: module(x.detach())))
"""


def test_the_command_line_and_the_report_state_each_without_a_traceback(tmp_path: Path):
    (tmp_path / "bad_pairs.py").write_text(PAIRS)
    command = [sys.executable, "-m", "parity", "run", "bad_pairs.py", "-n", "0"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "1 passed, 3 failed" in ran.stdout or "3 failed, 1 passed" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    report = (tmp_path / "reports" / "parity.md").read_text()
    for words in ("every output of the reference is empty", "no floating-point tensor", "PAR002"):
        assert words in ran.stdout
        assert words in report
    assert "0 in the reference and in the candidate, which proves nothing about it: d input (`detached" in report
