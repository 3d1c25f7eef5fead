"""Small modules and their ports, a page for each subject. A page can be added or deleted without other changes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from lab.corpus.port import Port

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    page.name: importlib.import_module(f"{__name__}.{page.name}").PORTS for page in pkgutil.iter_modules(__path__)
}
