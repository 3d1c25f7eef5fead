"""Import TransformerEngine on the CPU kernels once, and run pytest in a process of its own for each order that is read.

An order is a line of JSON on the standard input: pytest's arguments, the variables, the folder and the file for what is
said. The answer is two lines: the process's number, and its exit code when it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    from parity import te

    with te.on_cpu():
        for name in ("transformer_engine.pytorch", "pytest", "parity.lab.nvidia_tests.plugin"):
            importlib.import_module(name)
        for line in sys.stdin:
            order = json.loads(line)
            number = os.fork()
            if number == 0:
                _obey(order)
            print(number, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)


def _obey(order: dict[str, Any]) -> None:
    """Run pytest, and end this process."""
    from parity.cpu.loading import script

    nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT)
    for stream, file in enumerate((nothing, said, said)):
        os.dup2(file, stream)
    os.chdir(order["folder"])
    os.environ.update(order["variables"])
    code: Any = 1
    try:
        script.run_module("pytest", order["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))


if __name__ == "__main__":
    main()
