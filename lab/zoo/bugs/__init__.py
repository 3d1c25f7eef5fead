"""All planted bugs, and the choice of those that a run plants."""

from __future__ import annotations

from fnmatch import fnmatch

from lab.zoo.bugs import attention, layer, training, weights
from lab.zoo.planting import Bug
from parity.user_error import UserError

_BY_SUBJECT: dict[str, tuple[Bug, ...]] = {
    "weights": weights.BUGS,
    "norm": layer.NORM_BUGS,
    "activation": layer.ACTIVATION_BUGS,
    "rope": attention.ROPE_BUGS,
    "attention": attention.ATTENTION_BUGS,
    "layer": layer.LAYER_BUGS,
    "mixture": layer.MIXTURE_BUGS,
    "training": training.TRAINING_BUGS,
    "optimizer": training.OPTIMIZER_BUGS,
    "quantization": training.QUANTIZATION_BUGS,
}
BUGS: dict[str, Bug] = {bug.name: bug for found in _BY_SUBJECT.values() for bug in found}


def chosen(pattern: str) -> tuple[Bug, ...]:
    """Return the bugs whose names match a shell pattern such as ``rope-*``.

    Raises:
        UserError: if no name does.
    """
    found = tuple(bug for name, bug in BUGS.items() if fnmatch(name, pattern))
    if not found:
        raise UserError(f"no bug is called {pattern!r}; there are {', '.join(BUGS)}")
    return found


def subject(bug: Bug) -> str:
    """Return what the bug is about, e.g. ``rope``."""
    return next(subject for subject, bugs in _BY_SUBJECT.items() if bug in bugs)
