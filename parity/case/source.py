"""Hand a case to another process: by the file that declares it, or pickled."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from parity.case import registry
from parity.case.case import Case
from parity.user_error import UserError


@dataclass(frozen=True)
class FromFile:
    """A case that another process finds in the file that declares it.

    Attributes:
        path: the file.
        name: the case's name.
    """

    path: Path
    name: str

    def case(self) -> Case:
        """Import the file in this process, and return the case."""
        return registry.load_case(self.path, self.name)


@dataclass(frozen=True, eq=False)
class AsItIs:
    """A case that can be pickled and sent to another process."""

    itself: Case

    def case(self) -> Case:
        """Return the case."""
        return self.itself


def source_of(case: Case) -> AsItIs | FromFile:
    """Return the form in which another process gets a case.

    Raises:
        UserError: if the case can neither be imported nor pickled.
    """
    if case.path.is_file() and any(declared.factory is case.factory for declared in registry.cases()):
        return FromFile(case.path, case.name)
    try:
        pickle.dumps(case)
        return AsItIs(case)
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    raise UserError(
        "a pair over ranks is built on each rank, which must be able to import it: declare it with @parity.pair in its "
        "own file"
    )
