"""Every planted bug, and which of them a run is to plant."""

from __future__ import annotations

from fnmatch import fnmatch

from parity.lab.zoo.bugs import (
    activation,
    attention,
    layer,
    mixture,
    norm,
    optimizer,
    quantization,
    rope,
    training,
    weights,
)
from parity.lab.zoo.planting import Bug
from parity.user_error import UserError

_SUBJECTS = (weights, norm, activation, rope, attention, layer, mixture, training, optimizer, quantization)

BUGS: dict[str, Bug] = {bug.name: bug for module in _SUBJECTS for bug in module.BUGS}


def chosen(pattern: str) -> tuple[Bug, ...]:
    """Return the bugs whose names match a shell pattern such as ``rope-*``.

    Raises:
        UserError: if none does.
    """
    found = tuple(bug for name, bug in BUGS.items() if fnmatch(name, pattern))
    if not found:
        raise UserError(f"no bug is called {pattern!r}; there are {', '.join(BUGS)}")
    return found


def subject(bug: Bug) -> str:
    """Return the file that has it, e.g. ``rope``."""
    return next(module.__name__.rpartition(".")[2] for module in _SUBJECTS if bug in module.BUGS)
