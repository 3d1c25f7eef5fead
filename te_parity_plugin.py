"""Load parity's plugin for pytest, unless another package called ``parity`` hides it.

``python -m pytest`` puts the current folder first on ``sys.path``, so a folder of that name in it hides te-parity's.
Its tests then run as if te-parity were not installed.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_found = find_spec("parity")
_folders = [Path(folder).resolve() for folder in (_found and _found.submodule_search_locations) or ()]

if _folders == [Path(__file__).resolve().with_name("parity")]:
    sys.modules[__name__] = import_module("parity.plugin")
else:

    def pytest_report_header() -> str:
        """Say at the top of pytest's output why pairs are not compared."""
        hidden_by = ", ".join(map(str, _folders)) or "another module"
        return f"te-parity: left out, because {hidden_by} has its name; rename that, or start pytest by its own command"
