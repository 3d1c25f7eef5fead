"""Declare any of TE's recipes as a precision, and find those that a user's file declares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from parity.case import registry
from parity.case.files import place_of
from parity.settings import PRECISION_NAMES, check_precisions
from parity.te import DECLARED, PRECISIONS, Precision, precision_named
from parity.user_error import UserError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def recipe(name: str, make: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Precision:
    """Declare a precision: any of TE's recipes with any arguments, under a name of yours.

    What a faithful kernel rounds follows from the quantizers that the recipe gives TE for each operand of a GEMM. A
    precision without laws of its own is judged by those of the built-in one whose formats it has (the coarsest, if it
    has several), until ``parity calibrate`` measures it.

    Args:
        name: as reports show it; unique.
        make: makes a new object of a class of ``transformer_engine.common.recipe``, each time it is called.
        dtype: the dtype of parameters, inputs, gradients and stored activations: BF16, FP16 or FP32.

    Returns:
        What a pair's ``precisions`` may list beside names. ``parity run -p my_recipes.py::NAME`` runs it on any pair.

    Raises:
        UserError: if the name is not valid or taken, or an argument is not as above.
    """
    place = place_of(inspect.currentframe().f_back)  # type: ignore[union-attr]
    where = f"{place.path}:{place.line}: recipe {name!r}"
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise UserError(f"{where}: a name may only have letters, digits and '_'")
    if not callable(make):
        raise UserError(f"{where}: give a function that makes the recipe, such as lambda: {type(make).__name__}(...)")
    if dtype not in _DTYPES:
        raise UserError(f"{where}: dtype is {dtype!r}, but must be torch.bfloat16, torch.float16 or torch.float32")
    source = f"{place.path}::{name}"
    known = PRECISIONS.get(name) or DECLARED.get(name)
    if known is not None and known.source != source:
        raise UserError(
            f"{where}: this precision is already there{f' ({known.source})' * bool(known.source)}; rename it"
        )
    DECLARED[name] = declared = Precision(name, dtype, make, source)
    return declared


def name_precisions(given: Iterable[object], where: str) -> tuple[str, ...]:
    """Return the names of precisions that are given by name, as ``FILE::NAME``, or as ``parity.recipe`` returns them.

    Args:
        given: the precisions.
        where: the option or argument that has them, for the message.

    Raises:
        UserError: if one is unknown, or its file cannot be imported or does not declare it.
    """
    names = []
    for one in given:
        if isinstance(one, Precision) and one in (PRECISIONS.get(one.name), DECLARED.get(one.name)):
            names.append(one.name)
        elif isinstance(one, str) and "::" in one:
            names.append(_load_precision(one, where))
        else:
            check_precisions((one,), where)
            names.append(str(one))
    return tuple(names)


def find_precision(spelled: str) -> Precision:
    """Return the precision that another process spells, by ``spell_precision``."""
    (name,) = name_precisions((spelled,), "another process")
    return precision_named(name)


def spell_precision(name: str) -> str:
    """Return what another process can find a precision by: ``FILE::NAME`` if a user's file declares it."""
    return precision_named(name).source or name


def _load_precision(spelled: str, where: str) -> str:
    """Return the name in ``FILE::NAME``, after importing the file."""
    file, _, name = spelled.rpartition("::")
    path = Path(file).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"{spelled} in {where}: there is no Python file {path}")

    def declared() -> list[str]:
        return [each for each, one in DECLARED.items() if one.source.rpartition("::")[0] == str(path)]

    if name not in declared():
        registry.module_of(path)
    if name not in declared():
        others = f"it declares {', '.join(declared())}" if declared() else "it declares none"
        raise UserError(
            f"{spelled} in {where}: {path} declares no parity.recipe({name!r}, ...); {others}, and built in are "
            f"{', '.join(PRECISION_NAMES)}"
        )
    return name
