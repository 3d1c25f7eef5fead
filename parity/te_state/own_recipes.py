"""Recipes that a candidate turns on by itself, where it enters ``te.autocast`` inside of the precision's own.

Source: ``FP8GlobalStateManager.autocast_enter`` in ``pytorch/quantization.py`` of TE 2.20. Versions that keep their
state otherwise are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parity.te_state.quantization import state_manager
from parity.watching.raised import line_running

_STATE = ("autocast_depth", "fp8_enabled", "fp8_recipe")


@contextmanager
def own_recipes(has_recipe: bool, left_out: bool = False) -> Iterator[list[str]]:
    """Appends each recipe that differs from the one around it, and the user's line that enters it.

    Args:
        has_recipe: whether the precision has a recipe, in whose context the candidate runs.
        left_out: whether the recipe around it goes on in its place.
    """
    seen: list[str] = []
    manager = state_manager()
    state: Any = getattr(manager, "quantization_state", None)
    if manager is None or not all(hasattr(state, name) for name in _STATE):
        yield seen
        return
    entered = vars(manager)["autocast_enter"]
    signature = inspect.signature(entered.__func__)

    def enter(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        is_the_precisions = has_recipe and state.autocast_depth == 0
        if not is_the_precisions and given.get("enabled") and not _is_current(state, given.get("fp8_recipe")):
            seen.append(_told(given.get("fp8_recipe")))
            if left_out:
                given |= {"enabled": state.fp8_enabled, "fp8_recipe": state.fp8_recipe}
        entered.__func__(*bound.args, **bound.kwargs)

    manager.autocast_enter = classmethod(enter)
    try:
        yield seen
    finally:
        manager.autocast_enter = entered


def _is_current(state: Any, recipe: Any) -> bool:
    return bool(state.fp8_enabled) and type(recipe) is type(state.fp8_recipe)


def _told(recipe: Any) -> str:
    name = "TE's default recipe" if recipe is None else type(recipe).__name__
    line = line_running()
    return f"{name} at {line}" if line else name
