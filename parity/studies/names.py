"""Names that a study's settings may hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from parity.user_error import UserError


def check_names(field: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Make sure that all names of a field are known.

    Raises:
        UserError: for one that is not; lists those that are.
    """
    for name in chosen:
        if name not in known:
            raise UserError(f"{field}: there is no {name!r}; there are {', '.join(known)}")
