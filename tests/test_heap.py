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


HUGE_PAGES = """
import torch
from pathlib import Path
from parity import heap

heap.use_huge_pages()
tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
lines = Path("/proc/self/smaps").read_text().splitlines()
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


def _kernel_has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not _kernel_has_huge_pages(), reason="the kernel gives no huge pages")
@pytest.mark.parametrize(("said", "huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_large_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise(
    said: dict[str, str], huge: bool
) -> None:
    if "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text() and not huge:
        pytest.skip("the kernel gives huge pages unasked")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | said
    command = [sys.executable, "-c", HUGE_PAGES]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (int(ran.stdout) > 32 * 1024) is huge
