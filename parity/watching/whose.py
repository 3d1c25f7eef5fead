"""Whose code runs: Python's, PyTorch's, TransformerEngine's, parity's or a user's.

It is told by the module whose code it is, and where that module was loaded from, never by a name in a path: a user's
file is a user's in a folder named ``transformer_engine_port`` as well, and so are a script, a notebook's cell and what
``exec`` runs, which have no module that was found anywhere.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from types import FrameType
from typing import Any


class Owner(Enum):
    """Who has written code; what is none of the others' is a user's."""

    PYTHON = ""
    TORCH = "torch"
    TE = "transformer_engine"
    PARITY = "parity"
    USER = "user"


PORTS = ("parity.cases", "parity.reference", "parity.lab.zoo.hosts", "parity.lab.calibration.drawn_models")
"""Parity's own modules and packages that hold pairs as a user writes them: their code counts as a user's."""

_LIBRARIES = {owner.value: owner for owner in (Owner.TORCH, Owner.TE, Owner.PARITY)}
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(_PYTHON + folder for folder in ("site-packages", "dist-packages"))


def whose(frame: FrameType) -> Owner:
    """Return who has written the code that runs in this frame."""
    spec = frame.f_globals.get("__spec__")
    return Owner.USER if spec is None else _owner(spec)


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code runs in this frame; empty where it is no module that was found."""
    return str(getattr(frame.f_globals.get("__spec__"), "name", ""))


def is_of_te(kind: type) -> bool:
    """Return whether TransformerEngine has written this class; one that is derived from it may be a user's."""
    spec = getattr(sys.modules.get(kind.__module__), "__spec__", None)
    return spec is not None and _owner(spec) is Owner.TE


def _owner(spec: Any) -> Owner:
    name, origin = spec.name, spec.origin or ""
    owner = _LIBRARIES.get(name.partition(".")[0])
    if owner is not None and _lies_in(origin, sys.modules.get(owner.value)):
        return Owner.USER if owner is Owner.PARITY and _is_port(name) else owner
    is_pythons = origin in ("frozen", "built-in") or (origin.startswith(_PYTHON) and not origin.startswith(_INSTALLED))
    return Owner.PYTHON if is_pythons else Owner.USER


def _lies_in(origin: str, package: Any) -> bool:
    """Return whether a file lies in the folders that the package is imported from, whatever else has a like name."""
    return any(origin.startswith(folder + os.sep) for folder in getattr(package, "__path__", ()))


def _is_port(name: str) -> bool:
    return any(name == port or name.startswith(port + ".") for port in PORTS)
