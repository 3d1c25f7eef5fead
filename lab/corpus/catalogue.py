"""All ports of the corpus, by group, for the zoo, the counts and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

from lab.corpus import model_ports, small_ports
from lab.corpus.planted_bugs import BY_SUBJECT
from lab.corpus.port import Port
from parity.case.case import Case
from parity.measuring.hosts import HOSTS
from parity.user_error import UserError

PLANTED: Mapping[str, tuple[Port, ...]] = {
    subject: tuple(port for bug in bugs for port in bug.ports()) for subject, bugs in BY_SUBJECT.items()
}
"""Bugs in TE's modules of two sizes, by subject."""
MODELS: Mapping[str, tuple[Port, ...]] = {
    "constants": model_ports.CONSTANTS,
    "partial": model_ports.PARTIAL,
    "kinds": model_ports.KINDS,
    "near": model_ports.NEAR,
}
"""Mistakes in whole models, their layers and modules."""
SMALL: Mapping[str, tuple[Port, ...]] = small_ports.BY_SUBJECT
"""Mistakes in modules of a few lines, and right ports that are written otherwise."""
GROUPS: Mapping[str, tuple[Port, ...]] = {**PLANTED, **MODELS, **SMALL}
PORTS: Mapping[tuple[str, str], Port] = {port.key: port for ports in GROUPS.values() for port in ports}
"""Each port by its name and its host's."""
RIGHT: Mapping[str, Case] = {**HOSTS, **{port.host: port.right for port in PORTS.values()}}
"""Each host's right port, by the host's name."""


def choose_ports(pattern: str) -> tuple[Port, ...]:
    """Return the ports whose names, hosts' names or groups match a shell pattern such as ``rope-*``.

    Args:
        pattern: one pattern, or several with commas between them.

    Raises:
        UserError: if none does.
    """
    patterns = pattern.split(",")
    found = tuple(
        port
        for group, ports in GROUPS.items()
        for port in ports
        if any(fnmatch(name, one) for name in (port.name, port.host, group) for one in patterns)
    )
    if not found:
        raise UserError(f"no port, host or group is called {pattern!r}; there are the groups {', '.join(GROUPS)}")
    return found


def group_of(port: Port) -> str:
    """Return the group that a port is in, e.g. ``rope``."""
    return next(group for group, ports in GROUPS.items() if port in ports)
