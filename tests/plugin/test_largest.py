"""The largest case of a run is found without the run's process importing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from parity.plugin.largest import largest_need

PAIRS = """
import parity, torch
print("a file may print")

@parity.pair("linear_{n}", sizes=[dict(n=64), dict(n={n})])
def linear(te, n):
    reference = torch.nn.Linear(n, n, bias=False)
    return parity.Pair(reference, te.Linear(n, n, bias=False), weights={{"weight": "weight"}},
                       inputs=lambda rng, n: rng.normal(8, n))
"""


def test_it_is_the_most_that_a_case_of_any_file_needs_at_any_size(tmp_path: Path) -> None:
    files = [tmp_path / "small.py", tmp_path / "large.py", tmp_path / "broken.py"]
    for file, text in zip(files, (PAIRS.format(n=128), PAIRS.format(n=2**16), "import parity\nnonsense"), strict=True):
        file.write_text(text)
    weights = 8 * 2**32
    assert 5 * weights < (largest_need(files) or 0) < 50 * weights


def test_it_is_unknown_where_the_process_fails(tmp_path: Path) -> None:
    ends = tmp_path / "ends.py"
    ends.write_text("import os; os._exit(1)")
    assert largest_need([ends]) is None


def test_who_asks_imports_neither_torch_nor_te() -> None:
    program = (
        "import sys; from parity.plugin.largest import largest_need; print(largest_need([]), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert ran.stdout == "0 False\n"
