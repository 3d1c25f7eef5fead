"""Find out what this process may use of its machine: cores, and free memory."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = (  # limit, use, and the statistics' entry for the part of it that is a file cache, which yields
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers() -> int:
    """Return how many processes of pytest-xdist share the machine; 1 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_to_keep(free: int) -> int:
    """Return how many of so many free bytes this process may keep just for speed: an eighth, shared by the workers."""
    return free // (8 * workers())


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that can be had without swapping, within a container's limit; None if the system does not tell.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    told = [_of_machine(root), *(_of_container(root, *files) for files in _CGROUPS)]
    return min((free for free in told if free is not None), default=None)


def _of_machine(root: Path) -> int | None:
    text = _text(root / "proc/meminfo")
    kibibytes = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def _of_container(root: Path, limit: str, use: str, cached: str) -> int | None:
    folder = root / "sys/fs/cgroup"
    allowed, used = _text(folder / limit).strip(), _text(folder / use).strip()
    if not (allowed.isdecimal() and used.isdecimal()):  # "max" where there is no limit
        return None
    statistics = _text((folder / limit).with_name("memory.stat"))
    yields = [int(line.split()[1]) for line in statistics.splitlines() if line.split()[:1] == [cached]]
    return max(int(allowed) - int(used) + sum(yields), 0)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
