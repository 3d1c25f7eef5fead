"""Import TransformerEngine on the CPU kernels once, and fork a process for each program that is asked for.

Requests come from two sides. ``measure`` writes an order for pytest, a line of JSON, to the standard input, and reads
two lines: the process's number, and its exit code when it has ended. Python programs that tests start, including
ranks, ask at a socket. They get the same two lines, and keep their own standard streams. All processes are children of
this one, so that its times and those of its children are those of a test.

Run as a module without arguments, this is the host. With a program and its arguments, it asks the host to run it.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

# The variable with the address at which the host listens, for the processes that it forks and those that they start.
ADDRESS = "PARITY_NVIDIA_TESTS_HOST"
# The variables that PyTorch's and TE's modules (2.20.2) read while they are imported. All others are set later.
READ_AT_IMPORT = (
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_CPU_OFFLOAD_V1", "NVTE_FLASH_ATTN", "NVTE_TORCH_COMPILE"),
    *("OMP_NUM_THREADS", "PARITY_EMULATED_GPU", "PYTORCH_JIT"),
)


def main(*arguments: str) -> None:
    """Ask the host to run a program that a test starts or, without arguments, be the host."""
    if arguments:
        _ask_for(arguments)
    else:
        _be_the_host()


def _be_the_host() -> None:
    from parity import te
    from parity.machine.process import lasting

    with te.on_cpu(), tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        with lasting():
            for name in ("transformer_engine.pytorch", "pytest", "lab.nvidia_tests.plugin"):
                importlib.import_module(name)
        os.environ[ADDRESS] = f"{folder}/host"
        listening.bind(os.environ[ADDRESS])
        listening.listen()
        _Host(listening).serve()


class _Host:
    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._waiting = selectors.DefaultSelector()
        self._orders = os.fdopen(os.dup(0), "rb")  # forked programs get a standard input of their own
        self._is_done = False

    def serve(self) -> None:
        """Fork a process for each request, until the standard input ends."""
        self._wait_for(self._orders, self._order)
        self._wait_for(self._listening, self._ask)
        while not self._is_done:
            for key, _ in self._waiting.select():
                key.data()

    def _wait_for(self, file: Any, then: Callable[[], None]) -> None:
        self._waiting.register(file, selectors.EVENT_READ, then)

    def _order(self) -> None:
        line = self._orders.readline()
        self._is_done = not line
        if line:
            order = json.loads(line)
            nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT)
            number = self._fork(lambda: _pytest(order), (nothing, said, said), lambda code: print(code, flush=True))
            print(number, flush=True)

    def _ask(self) -> None:
        """Fork a program for the process that asks, and kill it if that process is killed."""
        asking = self._listening.accept()[0]
        streams = socket.recv_fds(asking, 1, 3)[1]
        with asking.makefile("rb") as read:
            order = json.loads(read.readline())
        if any(os.environ.get(name) != order["variables"].get(name) for name in READ_AT_IMPORT):
            asking.sendall(b"0\n")
            asking.close()
            for stream in streams:
                os.close(stream)
            return

        def ended(code: int) -> None:
            self._waiting.unregister(asking)
            with suppress(OSError):
                asking.sendall(f"{code}\n".encode())
            asking.close()

        def gone() -> None:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

        number = self._fork(lambda: _program(order), streams, ended)
        asking.sendall(f"{number}\n".encode())
        self._wait_for(asking, gone)

    def _fork(self, run: Callable[[], None], streams: Sequence[int], ended: Callable[[int], None]) -> int:
        """Fork a process that calls ``run`` with these standard streams, close them here, and return its number."""
        number = os.fork()
        if number == 0:
            self._orders.close()
            self._waiting.close()
            self._listening.close()
            _run_and_end(run, streams)
        for stream in dict.fromkeys(streams):
            os.close(stream)
        watched = os.pidfd_open(number)

        def reap() -> None:
            self._waiting.unregister(watched)
            os.close(watched)
            ended(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))

        self._wait_for(watched, reap)
        return number


def _pytest(order: Mapping[str, Any]) -> None:
    from te_on_cpu.loading import script

    os.chdir(order["folder"])
    os.environ.update(order["variables"])
    script.run_module("pytest", order["arguments"])


def _program(order: Mapping[str, Any]) -> None:
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    run_program(*order["arguments"])


def run_program(first: str, *rest: str) -> None:
    """Run ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS`` in this process, with the CPU in place of CUDA."""
    from lab.nvidia_tests import plugin
    from te_on_cpu.loading import script

    plugin.compute_as_on_a_gpu()
    is_module = first == "-m"
    name, *arguments = rest if is_module else (first, *rest)
    if code := script.run_program(name, arguments, is_module):
        sys.exit(code)


def _run_and_end(run: Callable[[], None], streams: Sequence[int]) -> None:
    for stream, file in enumerate(streams):
        os.dup2(file, stream)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1 if isinstance(code, str) else code or 0)


# The process that a test starts for a program, as ``parity exec`` runs one. If the host can fork the program, this
# process only passes signals on and waits, and so imports neither PyTorch nor TE.


def _ask_for(arguments: tuple[str, ...]) -> None:
    """Run a program so that it computes as the test's own process does, and exit as it does."""
    code = _forked_by_host(os.environ[ADDRESS], arguments) if ADDRESS in os.environ else None
    if code is None:
        from parity import te

        with te.on_cpu():
            run_program(*arguments)
    elif code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    else:
        sys.exit(code)


def _forked_by_host(address: str, arguments: tuple[str, ...]) -> int | None:
    """Return the exit code, or minus the number of a signal; None if the host imported TE under other variables."""
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(address)
        socket.send_fds(host, [b"\n"], [0, 1, 2])
        order = {"arguments": arguments, "variables": dict(os.environ), "folder": os.getcwd()}
        host.sendall(json.dumps(order).encode() + b"\n")
        with host.makefile() as said:
            number = int(said.readline())
            if not number:
                return None
            for passed_on in (signal.SIGINT, signal.SIGTERM):
                signal.signal(passed_on, lambda received, _: os.kill(number, received))
            return int(said.readline())


if __name__ == "__main__":
    main(*sys.argv[1:])
