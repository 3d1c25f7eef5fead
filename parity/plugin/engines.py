"""Find the engines that compare a run's items on other machines: te-parity's own, and those of installed packages."""

from __future__ import annotations

from collections.abc import Collection
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

from parity.shown import one_line
from parity.user_error import UserError

if TYPE_CHECKING:
    import pytest

    from parity.plugin.options import Options

ENTRY_POINT_GROUP = "parity.engines"
LOCAL = "local"  # no engine: pytest itself collects and compares, in this process or in its workers
# A checkout has these whatever is installed, and no package can replace them.
_OWN = (metadata.EntryPoint("ray", "parity.plugin.ray_engine:RayEngine", ENTRY_POINT_GROUP),)


class Engine(Protocol):
    """What an entry point of the group names, such as ``RayEngine``.

    The plugin that it returns takes the place of pytest's own collection and loop by two hooks, both with
    ``tryfirst=True`` and both returning True. ``pytest_collection(session)`` finds the items that are not finished, and
    sets ``session.testscollected`` to their number. ``pytest_runtestloop(session)`` has them compared by
    ``parity.plugin.part``, passes each report to ``session.config.hook.pytest_runtest_logreport``, and ends if
    ``session.shouldfail`` or ``session.shouldstop`` is set. The recorder takes results from these reports.
    """

    def __call__(self, config: pytest.Config, options: Options, most: int | None, finished: Collection[str]) -> object:
        """Return a pytest plugin that collects the run's items and compares them.

        Args:
            config: the run's configuration.
            options: the run's options.
            most: how many parts of the run may be compared at the same time; None if the user leaves that open.
            finished: ids in the record of the items that the resumed run had finished.

        Raises:
            UserError: if it cannot compare anything; its message ends the run.
        """


def list_engines() -> dict[str, metadata.EntryPoint]:
    """Return the engines that are installed, by name."""
    return {entry.name: entry for entry in (*metadata.entry_points(group=ENTRY_POINT_GROUP), *_OWN)}


def load_engine(name: str) -> Engine:
    """Return an installed engine.

    Raises:
        UserError: if importing its code raises something; names the package.
    """
    entry = list_engines()[name]
    try:
        engine: Engine = entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist else "te-parity"
        raise UserError(
            f"the package {package} announces the engine {name} as {entry.value}, but importing that raised "
            f"{one_line(error)}"
        ) from error
    return engine
