"""Whole models whose ports are wrong at a known place, by family. No rule was tuned to them, and none may be.

They judge whether the place of an error is found, so they are neither in the zoo nor in the tests' table of ports.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from lab.corpus.placed import Placed

BY_FAMILY: Mapping[str, tuple[Placed, ...]] = {
    page.name: importlib.import_module(f"{__name__}.{page.name}").PORTS for page in pkgutil.iter_modules(__path__)
}
