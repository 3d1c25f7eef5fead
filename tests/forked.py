"""Processes that start with PyTorch, TE and parity imported, because they are forked from a server that imported them.

A new process takes seconds for these imports. Tests that are not about the imports themselves can save this time.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVER = "PARITY_TESTS_FORK_SERVER"  # the path of its socket
STARTER = "PARITY_TESTS_STARTER"  # the id of the process that asked for this one, which is not its parent
_started: list[subprocess.Popen[bytes]] = []  # the server, which ends with this process, because its input does

# The client.


def is_running(pid: int) -> bool:
    """Return whether a process is running; one that has ended but was not waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Process:
    """A process like ``subprocess.Popen([sys.executable, *arguments])`` with these file descriptors as its streams."""

    def __init__(
        self,
        arguments: Sequence[str],
        streams: Sequence[int],
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_socket())
        order = json.dumps([arguments, str(folder or Path.cwd()), {**environment, STARTER: str(os.getpid())}]).encode()
        socket.send_fds(self._server, [len(order).to_bytes(8, "big")], streams)
        self._server.sendall(order)
        self.pid = _number(self._server)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = _number(self._server)
            self._server.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def begun(command: Sequence[str], folder: Path, output: str, **environment: str) -> Process:
    """Start a process outside of pytest, and write all its output to a file in its folder."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with (folder / output).open("wb") as file, open(os.devnull, "rb") as nothing:
        return Process(command, [nothing.fileno(), file.fileno(), file.fileno()], folder, outside | environment)


def run(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and return what it printed, as ``subprocess.run`` does."""
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        open(os.devnull) as nothing,
    ):
        streams = [nothing.fileno(), output.fileno(), errors.fileno()]
        process = Process(arguments, streams, folder, environment)
        try:
            code = process.wait(300)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def begin_worker(self: Any, arguments: Sequence[str], execmodel: Any) -> None:
    """Start a worker of pytest-xdist, in place of ``execnet.gateway_io.Popen2IOMaster.__init__``."""
    from execnet.gateway_base import Popen2IO

    (read, to_worker), (from_worker, write) = os.pipe(), os.pipe()
    self.popen = Process(arguments[1:], [read, write, 2])
    os.close(read)
    os.close(write)
    Popen2IO.__init__(self, os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"), execmodel=execmodel)


def _socket() -> str:
    """Return the server's address. The first process that asks for it starts the server, which ends with it."""
    if _SERVER not in os.environ:
        address = str(Path(tempfile.mkdtemp()) / "server")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PARITY_")}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            command, descriptor = [sys.executable, __file__, str(listener.fileno())], listener.fileno()
            _started.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[descriptor]))
        os.environ[_SERVER] = address
    return os.environ[_SERVER]


def _number(server: socket.socket) -> int:
    return int.from_bytes(_bytes(server, 8), "big", signed=True)


def _bytes(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError("the server of forked processes ended")
        received += part
    return received


# The server.


def _serve(listener: socket.socket) -> None:
    """Fork a process for each order, until the process that started the server ends."""
    import execnet.gateway_io
    import fakes  # noqa: F401 - imports PyTorch, and the comparison
    import xdist.remote  # noqa: F401

    import parity.cli
    import parity.report.changes
    import parity.report.ci
    import parity.report.failure
    import parity.report.html
    import parity.search.explanation  # noqa: F401
    from parity import te

    te.kernels("cpu")
    execnet.gateway_io.Popen2IOMaster.__init__ = begin_worker  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        order, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _watch(order)
            os._exit(0)
        order.close()
    shutil.rmtree(Path(listener.getsockname()).parent)


def _watch(order: socket.socket) -> None:
    """Fork the ordered process, and report its id and how it ends."""
    length, streams, *_ = socket.recv_fds(order, 8, 3)
    arguments, folder, environment = json.loads(_bytes(order, int.from_bytes(length, "big")))
    process = os.fork()
    if process == 0:
        order.close()
        _become(arguments, folder, environment, streams)
    for stream in streams:
        os.close(stream)
    order.sendall(process.to_bytes(8, "big"))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    order.sendall(code.to_bytes(8, "big", signed=True))


def _become(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Run Python's ``-m`` or ``-c`` in this process, and end the process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1, closefd=False) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background processes ignore it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    code: Any = 0
    try:
        kind, what, *sys.argv[1:] = [argument for argument in arguments if argument != "-u"]
        if kind == "-c":
            exec(what, sys.modules["__main__"].__dict__)
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own:
        _serve(own)
