"""The study ``filters``: which changes it attributes to a mistake, and when it has seen enough of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
from lab.studies.filters.study import LIMIT, Seen, Settings, Wrong, seen, write


def test_a_mistake_that_is_detected_is_not_measured() -> None:
    one = seen(Wrong("no norm", "bf16", 0, 4))
    assert one.status == "failed"
    assert one.best == ""


def test_two_formulas_of_gelu_differ_by_less_than_bf16_rounds() -> None:
    threads = torch.get_num_threads()
    one = seen(Wrong("plain GELU for tanh-GELU", "bf16", 0, 8))
    assert one.status == "passed"
    assert one.norm_ratio < 0.2
    assert one.joined >= one.ratio > 0
    assert torch.get_num_threads() == threads


def test_the_report_says_where_there_is_enough(tmp_path: Path) -> None:
    names = ("no norm", "not causal", "no RoPE", "gain plus 1")
    ratios = (0.0, LIMIT - 1, LIMIT + 1, LIMIT + 3)
    statuses = ("failed", "passed", "passed", "passed")
    found = {
        Wrong(name, "bf16", 0, 8): Seen(status, 0.9, "output y", 0.1, ratio, ratio)
        for name, status, ratio in zip(names, statuses, ratios, strict=True)
    }
    text = write(found, Settings(precisions=("bf16",)), tmp_path).read_text()
    rows = {
        line.split("|")[1].strip(): line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| ")
    }
    assert "Of 4 wrong ports, 3 pass" in text
    assert {name: rows.get(name) for name in names} == dict(zip(names, (None, "no", "hardly", "yes"), strict=True))
