"""All right ports, every planted bug, and which of them a run is to plant."""

from __future__ import annotations

from fnmatch import fnmatch

from parity.case.case import Case
from parity.lab.zoo.bugs import attention as attention_bugs
from parity.lab.zoo.bugs import layer as layer_bugs
from parity.lab.zoo.bugs import quantization, weights
from parity.lab.zoo.bugs import training as training_bugs
from parity.lab.zoo.hosts import attention, layer, linear, training
from parity.lab.zoo.planting import Bug
from parity.user_error import UserError

HOSTS: dict[str, Case] = {case.name: case for page in (linear, attention, layer, training) for case in page.HOSTS}

_BY_SUBJECT: dict[str, tuple[Bug, ...]] = {
    "weights": weights.BUGS,
    "norm": layer_bugs.NORM_BUGS,
    "activation": layer_bugs.ACTIVATION_BUGS,
    "rope": attention_bugs.ROPE_BUGS,
    "attention": attention_bugs.ATTENTION_BUGS,
    "layer": layer_bugs.LAYER_BUGS,
    "mixture": layer_bugs.MIXTURE_BUGS,
    "training": training_bugs.TRAINING_BUGS,
    "optimizer": training_bugs.OPTIMIZER_BUGS,
    "quantization": quantization.BUGS,
}
BUGS: dict[str, Bug] = {bug.name: bug for found in _BY_SUBJECT.values() for bug in found}


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
    """Return what the bug is about, e.g. ``rope``."""
    return next(subject for subject, bugs in _BY_SUBJECT.items() if bug in bugs)
