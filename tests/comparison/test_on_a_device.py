"""Comparisons on a device other than the CPU: everything that parity computes is on the device of its inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import second_device

pytestmark = pytest.mark.skipif(not second_device.is_possible(), reason="this PyTorch lets Python make no device")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return forked.run(*arguments, environment={**os.environ, "PYTHONPATH": path})


def test_right_ports_pass_there_and_a_bug_is_found() -> None:
    """Compare all pairs in one process of their own, because the device cannot be removed from a process."""
    ran = run_python("-m", "compare_on_second_device")
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    wrong = [result for result in results if result["case"] in ("up_over_gate", "swapped_in_a_part")]
    right = [result for result in results if result not in wrong]
    assert {result["blocks"] for result in right} == {False, True}, "attention is written out, and in blocks"
    assert [result for result in right if result["status"] != "passed"] == []
    assert [(result["status"], result["findings"]) for result in wrong] == [("failed", ["PAR101"])] * 4


def test_what_a_gpu_would_refuse_is_refused_there() -> None:
    ran = run_python(
        "-c",
        "import second_device, torch; there = torch.ones(3, device=second_device.install()); "
        "print((there * 2).sum().item()); there + torch.arange(3)",
    )
    assert ran.stdout == "6.0\n"
    assert "Expected all tensors to be on the same device" in ran.stderr
