"""Run a TransformerEngine script on a CPU: ``python -m te_on_cpu train.py`` or ``python -m te_on_cpu -m pytest``."""

from __future__ import annotations

import sys
from pathlib import Path

from te_on_cpu import EmulationError
from te_on_cpu.loading import script
from te_on_cpu.loading.loader import on_cpu

_USAGE = "usage: python -m te_on_cpu [-m] SCRIPT [ARGUMENT ...]"
_MISTAKE = 2


def main(arguments: list[str]) -> int:
    """Run the script that the arguments name, with its own arguments, and return the exit code."""
    is_module = arguments[:1] == ["-m"]
    name, *own = arguments[is_module:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__}\nThe device cuda then means the CPU. -m takes SCRIPT for a module's name.")
        return 0 if len(arguments) > is_module else _MISTAKE
    if not is_module and not Path(name).is_file():
        print(f"te_on_cpu: there is no script {name}", file=sys.stderr)
        return _MISTAKE
    try:
        with on_cpu():
            return script.run_program(name, own, is_module, raised=(EmulationError,))
    except EmulationError as error:
        print(f"te_on_cpu: {error}", file=sys.stderr)
        return _MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
