"""Mistakes in how a candidate is run, found by running it again without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure, tolerance_of
from parity.errors import measure
from parity.passes import Tensors
from parity.result import Finding, Kind
from parity.te_state.own_recipes import own_recipes
from parity.tolerance import margin

_NEARLY = 3.0  # tolerances
_OF_BEFORE = 0.2  # of the margin with which the comparison failed


class _NothingToChange(Exception):
    """Saves a run that would give what the first one gave."""


def run_changed(failure: Failure, change: Callable[[nn.Module], Iterable[str]]) -> tuple[Tensors, list[str]] | None:
    """What the candidate computes with some of it changed.

    Args:
        failure: whose candidate it is.
        change: changes a candidate, and returns the names of what it has changed.

    Returns:
        Its tensors and the names; None if there was nothing to change, or it cannot run again.
    """
    if failure.rerun is None:
        return None
    changed: list[str] = []

    def to_candidate(module: nn.Module) -> None:
        changed.extend(change(module))
        if not changed:
            raise _NothingToChange

    try:
        return failure.rerun(to_candidate), changed
    except _NothingToChange:
        return None


def dropout_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if what failed agrees as soon as nothing is dropped; the candidate runs again only where it drops."""
    ran = run_changed(failure, _switched_off)
    if ran is not None and agree(failure, ran[0], _telling(failure)):
        yield finding(
            "dropout",
            f"the candidate agrees without dropout; switch off {', '.join(sorted(set(ran[1])))} "
            "(hidden_dropout=0.0, attention_dropout=0.0, drop_path_rate=0.0); modules are compared as they train",
        )


def own_recipe_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if what failed agrees as soon as the candidate turns no recipe on by itself."""
    if failure.rerun is None or not failure.own_recipes:
        return
    with own_recipes(failure.precision.recipe is not None, left_out=True):
        again = failure.rerun(lambda module: None)
    if agree(failure, again, _telling(failure)):
        yield finding(
            "own-recipe",
            f"the candidate agrees without the te.autocast that it enters by itself: {', '.join(failure.own_recipes)}. "
            "Enter it around the module, in the code that trains, as parity does for a precision with a recipe; or "
            "compare at this recipe's precision alone: precisions=[...] in @parity.pair",
        )


def microbatch_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if all agrees as soon as no call says ``is_first_microbatch``, by which TE reuses weights and sums."""
    if failure.rerun is None:
        return
    said: list[str] = []
    again = failure.rerun(lambda module: _say_nothing_of_microbatches(module, said))
    if not said or not agree(failure, again, ("output", "input gradient", "weight gradient")):
        return
    failed = {result.kind for result in failure.results if not result.passed}
    where = ", ".join(sorted(set(said)))
    if failed == {"weight gradient"}:
        yield finding(
            "gradient-accumulation",
            f"weight gradients agree without is_first_microbatch ({where}); True starts a new sum, so pass it for the "
            "first microbatch alone, and zero main_grad before",
        )
    else:
        yield finding(
            "weight-cache-stale",
            f"the candidate agrees without is_first_microbatch ({where}); with False TE computes with the quantized "
            "weights of an earlier microbatch, so pass True for the first one after each optimizer step",
        )


def _telling(failure: Failure) -> tuple[Kind, ...]:
    """Gradients may be wrong in a way of their own; they count where outputs, as a loss, are right by chance."""
    by_gradients = all(result.passed for result in failure.outputs)
    return ("output", "input gradient", "weight gradient") if by_gradients else ("output",)


def agree(failure: Failure, again: Tensors, kinds: tuple[Kind, ...]) -> bool:
    """Whether the tensors of these kinds are within their tolerances when the candidate runs again.

    Or nearly, where they were far off: a right port may be beyond a limit at first look.
    """
    enough = min(_NEARLY, max(1.0, _OF_BEFORE * max(result.margin for result in failure.results)))
    return all(
        margin(measure(again[key], truth, failure.precision.dtype), tolerance_of(failure, key)) <= enough
        for key, truth in failure.golden.items()
        if key[0] in kinds
    )


def _switched_off(module: nn.Module) -> Iterator[str]:
    """Sets every probability of dropout to 0; yields each that was not, with its value."""
    for name, submodule in module.named_modules():
        for attribute, value in list(vars(submodule).items()):
            is_probability = "drop" in attribute or (attribute == "p" and "Drop" in type(submodule).__name__)
            if is_probability and isinstance(value, float) and value > 0.0:
                setattr(submodule, attribute, 0.0)
                yield f"{name}.{attribute}={value:g}".lstrip(".")


def _say_nothing_of_microbatches(module: nn.Module, said: list[str]) -> None:
    def hook(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        value = kwargs.get("is_first_microbatch")
        if value is None:
            return args, kwargs
        said.append(f"{type(submodule).__name__} is called with {value}")
        return args, {**kwargs, "is_first_microbatch": None}

    for submodule in module.modules():
        submodule.register_forward_pre_hook(hook, with_kwargs=True)
