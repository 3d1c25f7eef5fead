"""Runs that are killed at random moments lose nothing and count nothing twice; `make torture` kills more of them."""

from __future__ import annotations

from pathlib import Path

import kills


def test_killed_runs_go_on_to_what_they_would_have_been(tmp_path: Path) -> None:
    tally, runs = kills.Tally(), kills.Runs(tmp_path)
    for seed in range(4):
        runs.trial(seed, tally)
    assert tally.wrong == []
    assert sum(tally.kills.values()) >= 4
