"""The formats that a pair asks its candidate's modules to compute in, such as a plan of what stays in BF16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from parity.settings import check_precisions
from parity.shown import few_of
from parity.te import precision_named
from parity.user_error import UserError


def checked_formats(formats: Any) -> dict[str, str]:
    """Return names of precisions by pattern.

    Raises:
        UserError: if it is no such dict, or a precision is unknown.
    """
    if not isinstance(formats, Mapping) or not all(isinstance(pattern, str) for pattern in formats):
        raise UserError(f'formats must be a dict such as {{"layers.0.*": "bf16"}}, not {formats!r}')
    named = {pattern: str(getattr(one, "name", one)) for pattern, one in formats.items()}  # parity.recipe gives objects
    check_precisions(tuple(named.values()), "formats")
    return named


def checked_recipes(recipes: Any) -> dict[int, str]:
    """Return the names of precisions by the steps of a training from which they are used.

    Raises:
        UserError: if it is no such dict, or a precision is unknown.
    """
    if not isinstance(recipes, Mapping) or not all(type(step) is int and step > 1 for step in recipes):
        raise UserError(
            f'recipes of a training must be a dict such as {{3: "bf16"}} with steps after the first, not {recipes!r}'
        )
    named = {step: str(getattr(one, "name", one)) for step, one in recipes.items()}
    check_precisions(tuple(named.values()), "recipes of a training")
    return named


def check_patterns(formats: Mapping[str, str], modules: Iterable[str]) -> None:
    """Check that each pattern fits one of TE's modules.

    Args:
        formats: as ``checked_formats`` returns them.
        modules: the names of the candidate's modules that are TE's.

    Raises:
        UserError: if one does not; lists the modules.
    """
    names = list(modules)
    for pattern in formats:
        if not any(_fits_module(pattern, name) for name in names):
            known = few_of([repr(name) if name else "the candidate itself ('*')" for name in names], 12) or "none"
            raise UserError(
                f"formats names {pattern!r}, which fits none of TransformerEngine's modules in the candidate: {known}"
            )


def asked_format(formats: Mapping[str, str], module: str) -> str | None:
    """Return the precision whose formats a module should have, by the first pattern that fits; None if none does."""
    return next((precision for pattern, precision in formats.items() if _fits_module(pattern, module)), None)


def keeps_unquantized(formats: Mapping[str, str], module: str) -> bool:
    """Return whether a module should quantize nothing."""
    asked = asked_format(formats, module)
    return asked is not None and precision_named(asked).recipe is None


def _fits_module(pattern: str, module: str) -> bool:
    """Return whether a pattern fits a module's name, or that of a module around it."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
