"""Freed memory is kept for the next tensors, and given back when asked for; each in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

MEBIBYTE = 2**20
TENSOR = 64 * MEBIBYTE

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

PROGRAM = f"""
import torch
from pathlib import Path
from parity import heap

def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * {os.sysconf("SC_PAGE_SIZE")}

print(int(heap.keep_freed()))
before = resident()
torch.ones({TENSOR}, dtype=torch.uint8)
print(resident() - before)
heap.give_back()
print(resident() - before)
"""


def grown(**environment: str) -> tuple[bool, int, int]:
    """Whether memory is kept; bytes by which the process grew by a tensor that it freed, and after giving back."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    kept, freed, given_back = map(int, ran.stdout.split())
    return bool(kept), freed, given_back


def test_a_freed_tensors_memory_stays_until_it_is_given_back() -> None:
    kept, freed, given_back = grown()
    assert kept
    assert freed > TENSOR - MEBIBYTE
    assert given_back < TENSOR / 2


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_the_environment_says_of_the_heap_stays(name: str) -> None:
    kept, freed, _ = grown(**{name: str(MEBIBYTE)})
    assert not kept
    assert freed < TENSOR / 2
