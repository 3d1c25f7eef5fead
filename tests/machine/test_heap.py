"""Freed memory is kept for the next tensors, and given back when asked for; pages are large. Each in its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

MEBIBYTE = 2**20
TENSOR = 64 * MEBIBYTE

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

PROGRAM = f"""
import torch
from pathlib import Path
from parity.machine import process

def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * {os.sysconf("SC_PAGE_SIZE")}

print(int(process.keep_freed()))
before = resident()
torch.ones({TENSOR}, dtype=torch.uint8)
print(resident() - before)
process.give_back()
print(resident() - before)
"""


def grown(**environment: str) -> tuple[bool, int, int]:
    """Whether memory is kept; bytes by which the process grew by a tensor that it freed, and after giving back."""
    kept, freed, given_back = printed(PROGRAM, {**os.environ, **environment})
    return bool(kept), freed, given_back


def printed(program: str, environment: dict[str, str]) -> list[int]:
    """The numbers that a program prints in a process of its own."""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(number) for number in ran.stdout.split()]


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


HUGE_PAGES = """
import torch
from pathlib import Path
from parity.machine import process

process.use_huge_pages()
tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
lines = Path("/proc/self/smaps").read_text().splitlines()
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HOW = SETTING.read_text() if SETTING.exists() else "[never]"


@pytest.mark.skipif("[never]" in HOW, reason="the kernel gives no huge pages")
@pytest.mark.parametrize(("said", "huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_large_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise(
    said: dict[str, str], huge: bool
) -> None:
    if "[always]" in HOW and not huge:
        pytest.skip("the kernel gives huge pages unasked")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | said
    (kibibytes,) = printed(HUGE_PAGES, environment)
    assert (kibibytes > 32 * 1024) is huge
