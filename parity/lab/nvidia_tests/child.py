"""Run a program that one of NVIDIA's tests starts, as ``parity exec`` does, and compute as the test's own process.

The host forks it where it can; this process then passes signals on and waits, and so imports neither PyTorch nor TE.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from parity.lab.nvidia_tests.host import ADDRESS, run_program


def main(*arguments: str) -> None:
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
    """Return the exit code, negative of a signal; None if the host has imported TE under other variables."""
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
