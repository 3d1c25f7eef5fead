"""Comparisons on a device other than the CPU: all that parity computes is on the device of what it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import second_device

pytestmark = pytest.mark.skipif(not second_device.is_possible(), reason="this PyTorch lets Python make no device")
HERE = Path(__file__).parent


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    ran = run_python(str(HERE / "compare_on_second_device.py"))
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("blocks", [False, True], ids=["written out", "attention in blocks"])
def test_right_ports_pass_there(results: list[dict[str, Any]], blocks: bool) -> None:
    right = [result for result in results if result["case"] != "up_over_gate" and result["blocks"] == blocks]
    assert right
    assert [result for result in right if result["status"] != "passed"] == []


def test_a_bug_is_found_there(results: list[dict[str, Any]]) -> None:
    wrong = [result for result in results if result["case"] == "up_over_gate"]
    assert [result["findings"] for result in wrong] == [["PAR101"]] * len(wrong)
    assert [result["status"] for result in wrong] == ["failed", "failed"]


def test_what_a_gpu_would_refuse_is_refused_there() -> None:
    ran = run_python(
        "-c",
        "import second_device, torch; there = torch.ones(3, device=second_device.install()); "
        "print((there * 2).sum().item()); there + torch.arange(3)",
    )
    assert ran.stdout == "6.0\n"
    assert "Expected all tensors to be on the same device" in ran.stderr
