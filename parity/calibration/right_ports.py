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
_OURS = {ZOO: HOSTS, DRAWN_MODELS: MODELS}
# What is expected of these is known only once the port is seen (``parity.comparison``), so that no limit is fitted to
# them: Adam's first steps divide gradients by their own magnitude, so that rounding may decide a whole step; and it may
# decide which expert a token goes to.
_UNFIT = ("trained_linear", "mixture")


def cases(file: str) -> list[Case]:
    """Those of a file, or the one that a pytest id names.

    Raises:
        UserError: as ``registry.load``.
    """
    return list(_OURS[file].values()) if file in _OURS else registry.load(file)


def fitted(file: str) -> list[Case]:
    """Those of ``cases`` that limits are fitted to.

    Raises:
        UserError: as ``registry.load``.
    """
    return [case for case in cases(file) if file not in _OURS or case.name not in _UNFIT]


def case(file: str, name: str) -> Case:
    """One of these, by its name.

    Raises:
        UserError: as ``registry.load_case``.
    """
    return _OURS[file][name] if file in _OURS else registry.load_case(file.partition("::")[0], name)
