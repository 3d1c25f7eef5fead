"""How much memory a machine has to give, from what Linux tells of it and of the container around the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.machine import host


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = dict(proc__meminfo="MemTotal:  64000 kB\nMemFree:  100 kB\nMemAvailable:  32000 kB\n")


def test_the_machine_gives_what_is_available(tmp_path: Path) -> None:
    assert host.free_memory(write(tmp_path, **MACHINE)) == 32000 * 1024


@pytest.mark.parametrize(
    "files",
    [
        dict(memoryDOTmax="9000000\n", memoryDOTcurrent="5000000\n", memoryDOTstat="anon 1\ninactive_file 1000000\n"),
        dict(
            memory__memoryDOTlimit_in_bytes="9000000",
            memory__memoryDOTusage_in_bytes="5000000",
            memory__memoryDOTstat="cache 1\ntotal_inactive_file 1000000\n",
        ),
    ],
)
def test_a_container_gives_no_more_than_its_limit_leaves(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, **MACHINE, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    assert host.free_memory(tmp_path) == 5000000


def test_a_container_without_a_limit_gives_what_the_machine_has(tmp_path: Path) -> None:
    write(tmp_path, **MACHINE, sys__fs__cgroup__memoryDOTmax="max\n", sys__fs__cgroup__memoryDOTcurrent="5000000\n")
    assert host.free_memory(tmp_path) == 32000 * 1024


def test_a_system_that_does_not_tell_leaves_it_unknown(tmp_path: Path) -> None:
    assert host.free_memory(tmp_path) is None
