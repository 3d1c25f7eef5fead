"""Ports that are known to be right: what limits are fitted to, and false alarms counted on."""

from __future__ import annotations

from parity import registry
from parity.calibration.drawn_models import MODELS
from parity.case import Case
from parity.zoo.hosts.catalogue import HOSTS

# Stand, in the place of a file, for the right ports into which the zoo plants its bugs, and for models drawn at random,
# to which no limit is fitted.
ZOO = "parity.zoo.hosts"
DRAWN_MODELS = "parity.calibration.drawn_models"
# Adam's first steps divide gradients by their own magnitude, so that rounding may decide a whole step: what it is
# expected to lose is known at second look alone (``parity.judging.second_look``), and no limit is fitted to it.
_UNFIT = "trained_linear"
_OURS = {ZOO: {name: case for name, case in HOSTS.items() if name != _UNFIT}, DRAWN_MODELS: MODELS}


def cases(file: str) -> list[Case]:
    """Those of a file, or the one that a pytest id names.

    Raises:
        UserError: as ``registry.load``.
    """
    return list(_OURS[file].values()) if file in _OURS else registry.load(file)


def case(file: str, name: str) -> Case:
    """One of these, by its name.

    Raises:
        UserError: as ``registry.load_case``.
    """
    return _OURS[file][name] if file in _OURS else registry.load_case(file.partition("::")[0], name)
