"""The task that Ray runs on a node: it hands a part of a run to a process there, and that process's messages back.

Ray takes this file's code to its nodes, so that a node without parity can report that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict

_LAST_WORDS = 4_000  # bytes
_SECONDS_TO_END = 20.0


class Job(TypedDict):
    """Describe the job of a task.

    Attributes:
        start: the folder in which pytest starts; empty for the one in which Ray has put the run's files.
        files: the files that have to exist, apart from the folder.
        variables: environment variables for the process.
        arguments: pytest's arguments.
        node_ids: the ids of the items to compare; None to find out which items there are.
    """

    start: str
    files: Sequence[str]
    variables: Mapping[str, str]
    arguments: Sequence[str]
    node_ids: Sequence[str] | None


def work(job: Job) -> Iterator[list[str]]:
    """Yield the node's address, the messages of ``part`` as they come, and at last how its process ended, as JSON."""
    import ray

    yield [json.dumps({"node": ray.util.get_node_ip_address()})]
    start = Path(job["start"] or os.getcwd())
    missing = [path for path in (start, *(start / file for file in job["files"])) if not path.exists()]
    if missing:
        yield [_make_last_message(1, f"there is no {missing[0]}")]
        return
    paths = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from parity.plugin import part; sys.exit(part.main())"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=start,
            env={**os.environ, **job["variables"], "PYTHONPATH": paths},
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            asked = {"arguments": job["arguments"], "node_ids": job["node_ids"]}
            process.stdin.write(f"{json.dumps(asked)}\n".encode())
            process.stdin.flush()
            yield from _read_lines(process.stdout)
            yield [_make_last_message(process.wait(), _end_of(said))]
        except BrokenPipeError:
            yield [_make_last_message(process.wait(), _end_of(said))]
        finally:
            _end_process(process)


def _make_last_message(code: int, told: str) -> str:
    return json.dumps({"exit_code": code, "told": told})


def _read_lines(pipe: IO[bytes]) -> Iterator[list[str]]:
    """Yield complete lines as they arrive, several at once if the run does not keep up."""
    rest = b""
    while read := os.read(pipe.fileno(), 2**20):
        *lines, rest = (rest + read).split(b"\n")
        if lines:
            yield [line.decode() for line in lines]


def _end_of(said: IO[bytes]) -> str:
    """Return pytest's error messages at the end of the process's output or, if there are none, its last line."""
    said.seek(max(0, said.seek(0, os.SEEK_END) - _LAST_WORDS))
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    wrong = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "; ".join(wrong) or "".join(lines[-1:])


def _end_process(process: subprocess.Popen[Any]) -> None:
    """End the process. Everything that it has started ends with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
