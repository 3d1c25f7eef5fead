"""Judge a recorded pass by a pair's reference: no candidate runs, and the recorded values begin and end each stage."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import transfer
from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize, modules_without_memory
from parity.case.weight_map import WeightMap, names
from parity.comparison import explain_at, judge_at, with_stages
from parity.judge.limits import packaged
from parity.judge.request import CandidateRun
from parity.numerics.kernel_choices import may_split_k
from parity.passes.all_passes import Tensors
from parity.passes.one_pass import named_outputs
from parity.passes.prepare import prepare
from parity.ranks.layout import Degrees
from parity.recordings.folder import DELAYED, StoredPass, Unrecorded, key_of, unpacked
from parity.recordings.joined import join_ranks
from parity.result import Result
from parity.shown import few_of
from parity.stages.locate import Stages, judge_stages
from parity.stages.watch import Watched
from parity.te import PRECISIONS, Kernels, precision_named
from parity.trace.calls import Misfit
from parity.user_error import UserError


@dataclass(frozen=True)
class JudgedPass:
    """A recorded pass and its verdict.

    Attributes:
        stored: the pass.
        precision: the precision that it was judged at.
        result: the verdict, with findings if it failed.
        stages: its stages; None if it cannot be judged stage by stage.
        notes: what could not be judged.
    """

    stored: StoredPass
    precision: str
    result: Result
    stages: Stages | None
    notes: tuple[str, ...]


def judge_pass(
    group: Sequence[StoredPass],
    made: Degrees,
    case: Case,
    checked: CheckedSize,
    kernels: Kernels,
    precision: str = "",
    seconds: float = 0.0,
) -> JudgedPass:
    """Judge a recorded pass.

    Args:
        group: the pass, on each of the ranks that computed it together.
        made: how many ranks there are along each axis, from ``find_degrees``.
        case: a pair whose reference is what the recorded model should compute, and whose map knows its parameters.
        checked: the size at which the pair has the recorded model's shapes.
        kernels: TE's kernels, on whose device the reference computes.
        precision: a key of ``PRECISIONS``; empty for the recorded one.
        seconds: real time for the search for a cause, 0 for no limit.

    Raises:
        UserError: if the pair does not fit the recording.
    """
    at = precision_named(precision or precision_of(group[0]))
    stored = join_ranks(group, made, lambda: case.build(kernels.te, checked.size), kernels, at)
    if DELAYED in stored.index.recipes.values() and stored.index.unscaled:
        raise UserError(
            f"{stored.index}: delayed scaling had no scale yet for gradients of {few_of(stored.index.unscaled)}; "
            "record a later step, since gradients vanish in the first one"
        )
    pair = modules_without_memory(case, kernels.te, checked.size)
    weights = _read_weights(stored, pair)
    notes = [*stored.index.notes, *stored.index.reasons_for_more_error]
    tensors, unreached = _read_candidate(stored, pair, notes)
    is_forward_only = all(kind == "output" for kind, _ in tensors)
    values = read_values(stored, pair.weights)
    recorded = _RecordedCall(stored)
    frozen = _find_frozen(stored, pair)
    whole = dataclasses.replace(
        case,
        factory=lambda te, **size: _with_recorded(case.factory(te, **size), weights, frozen, recorded, is_forward_only),
        vary_constants=False,
        probe=False,
        cotangents=_read_cotangents(stored, tensors),
    )
    adds_parts = stored.index.tp > 1 or may_split_k(stored.index.environment.get("transformer-engine", "0"))
    run = CandidateRun(tensors, unreached, values=values, adds_parts=adds_parts)
    comparison = judge_at(whole, checked, at, 0, kernels, packaged(), candidate_run=run)
    result, stages = explain_at(comparison, seconds), None
    if result.status in ("passed", "failed"):
        # As the search for the cause judges them, which may have done it already.
        prepared = comparison.prepared if comparison.needs_cause else prepare(whole, checked, at.dtype, 0, kernels)
        with suppress(Misfit):
            stages = judge_stages(comparison.request, prepared, comparison.port.freedoms)
            result = result if stored.index.reasons_for_more_error else with_stages(result, prepared, stages)
    return JudgedPass(stored, at.name, result, stages, tuple(notes))


def precision_of(stored: StoredPass) -> str:
    """Return the precision in which a pass was recorded: by its recipes, else by its parameters.

    Raises:
        UserError: if it has several recipes, or one that parity has no rounding model for.
    """
    index = stored.index
    recipes = {recipe for recipe in index.recipes.values() if recipe}
    if len(recipes) > 1 or (recipes and "" in index.recipes.values()):
        raise UserError(
            f"{index} mixes recipes: {_list_recipes(index.recipes)}. Name the precision to judge it by with -p; "
            "stages under another recipe will be off"
        )
    if recipes:
        (recipe,) = recipes
        found = next((one.name for one in PRECISIONS.values() if type(one.new_recipe()).__name__ == recipe), None)
        if found is None:
            raise UserError(
                f"{index} was computed under {recipe}, which is none of {', '.join(PRECISIONS)}: name one with -p"
            )
        return found
    dtype = index.autocast or max(index.dtypes, key=lambda name: index.dtypes[name])
    plain = {str(one.dtype).removeprefix("torch."): one.name for one in reversed(PRECISIONS.values()) if not one.recipe}
    if dtype not in plain:
        raise UserError(f"{index} was computed in {dtype}; name the precision to judge it by with -p")
    return plain[dtype]


def _list_recipes(recipes: Mapping[str, str]) -> str:
    by_recipe: dict[str, list[str]] = {}
    for path, recipe in recipes.items():
        by_recipe.setdefault(recipe or "none", []).append(path or "the model")
    return "; ".join(f"{recipe} in {few_of(paths)}" for recipe, paths in by_recipe.items())


# The pair, with what was recorded.


def _with_recorded(
    pair: Pair, weights: Mapping[str, Tensor], frozen: Collection[str], recorded: _RecordedCall, evaluation: bool
) -> Pair:
    transfer.fill(pair.reference, weights)
    for name in frozen:
        pair.reference.get_parameter(name).requires_grad_(False)
    return dataclasses.replace(
        pair,
        inputs=lambda rng: recorded.tensors,
        call_reference=recorded.around(pair.call_reference),
        call_candidate=recorded.around(None, every=True),
        fill=True,
        evaluation=evaluation,
    )


def _find_frozen(stored: StoredPass, pair: Pair) -> set[str]:
    """Return the reference's parameters that are not trained, since none of those that hold them is."""
    frozen = set(stored.index.frozen)
    return {name for left, right in pair.weights.items() if set(names(right)) <= frozen for name in names(left)}


def _read_weights(stored: StoredPass, pair: Pair) -> dict[str, Tensor]:
    """Return the reference's parameters, made of the recorded ones by the pair's map."""
    own = transfer.parameter_shapes(pair.candidate)
    held = {name: stored.index.tensors[key_of("weight", name)] for name in stored.index.names("weight")}
    if own.keys() != held.keys():
        only = {"the pair": sorted(own.keys() - held.keys()), "the recording": sorted(held.keys() - own.keys())}
        told = "; ".join(f"only {where} has {few_of(some)}" for where, some in only.items() if some)
        raise UserError(f"the pair's TE module is not the recorded model: {told}")
    differing = [name for name in own if own[name] != held[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"{name} is {held[name]} in the recording and {own[name]} in the pair: name the recorded "
            "model's size with --size: one of the pair's by its number, or its arguments, such as layers=3"
        )
    shapes = transfer.parameter_shapes(pair.reference)
    return transfer.to_reference(pair.weights, {name: x.double() for name, x in stored.named("weight").items()}, shapes)


class _RecordedCall:
    """How the model was called: tensors that get gradients are the pair's inputs, the rest is fixed.

    Attributes:
        tensors: the inputs, by name.
    """

    def __init__(self, stored: StoredPass) -> None:
        self._arguments = stored.index.arguments
        self._given = stored.named("argument")
        self._returned = {name: stored.index.tensors[key_of("output", name)] for name in stored.index.names("output")}
        moving = set(stored.index.names("gradient of argument"))
        self.tensors = {
            f"argument_{name}": x for name, x in self._given.items() if name in moving or not x.is_floating_point()
        }

    def around(self, call: Callable[..., Any] | None, every: bool = False) -> Callable[..., Any]:
        """Return the call of a module with the recorded arguments, those that it takes or every one.

        Of several outputs, it returns the one that was recorded: a pair may also compute a loss.
        """

        def recorded(module: nn.Module, **inputs: Tensor) -> Any:
            dtype = next((x.dtype for x in module.parameters() if x.is_floating_point()), torch.float32)

            def tensor(name: str) -> Tensor:
                if f"argument_{name}" in inputs:
                    return inputs[f"argument_{name}"]
                x = self._given[name]
                return x.to(next(module.parameters()).device, dtype if x.is_floating_point() else None)

            given = unpacked(self._arguments, tensor)
            args, kwargs = given["args"], given["kwargs"]
            if not every:
                kwargs = _without_unknown(call or module.forward, kwargs)
            return self._pick_output(call(module, *args, **kwargs) if call else module(*args, **kwargs))

        return recorded

    def _pick_output(self, returned: Any) -> Any:
        outputs = named_outputs(returned)
        if outputs.keys() == self._returned.keys():
            return returned
        alike = [x for x in outputs.values() if [tuple(x.shape)] == list(self._returned.values())]
        if len(alike) != 1:
            raise UserError(
                f"the reference returns {few_of(list(outputs))}, and the recorded model returned "
                f"{few_of(list(self._returned))}: declare a call_reference that returns the same"
            )
        return alike[0]


def _without_unknown(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what only TE's modules are told and the reference does not take, unless it is a tensor."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(kwargs)
    unknown = [name for name in kwargs if name not in parameters]
    told = [name for name in unknown if isinstance(kwargs[name], (Tensor, Unrecorded))]
    if told:
        raise UserError(
            f"the recorded model was given {few_of(told)}, which the reference does not take: declare a call_reference "
            "that takes what the recorded model was called with"
        )
    return {name: x for name, x in kwargs.items() if name in parameters}


# What the recorded model computed.


def _read_candidate(stored: StoredPass, pair: Pair, notes: list[str]) -> tuple[Tensors, tuple[str, ...]]:
    """Return the outputs and gradients in the reference's layout, and the parameters that no gradient reached."""
    tensors: Tensors = {("output", name): x for name, x in stored.named("output").items()}
    if not stored.index.names("gradient of output"):
        return tensors, ()
    own = stored.named("gradient of weight")
    missing = {name for name in stored.index.names("weight") if name not in own}
    if not own or missing - {*stored.index.unreached, *stored.index.frozen}:
        notes.append("gradients of parameters are not judged, since not all were recorded")
        return tensors, ()
    zeros = {name: torch.zeros(stored.index.tensors[key_of("weight", name)]) for name in missing}
    shapes = transfer.parameter_shapes(pair.reference)
    moved = transfer.gradients_to_reference(pair.weights, own | zeros, shapes)
    trained = {name for name, x in pair.reference.named_parameters() if x.requires_grad} - _find_frozen(stored, pair)
    tensors |= {("weight gradient", name): x for name, x in moved.items() if name in trained}
    tensors |= {("input gradient", f"argument_{name}"): x for name, x in stored.named("gradient of argument").items()}
    return tensors, stored.index.unreached


def _read_cotangents(stored: StoredPass, tensors: Tensors) -> dict[str, Tensor]:
    """Return the gradient that came to each output from outside; zeros where none came.

    What was recorded for an output that another one is computed from, such as logits beside a loss, came through that.
    """
    known = stored.named("gradient of output")
    outer = {name: x for name, x in known.items() if name not in stored.index.inner}
    given = outer or known
    return {name: given.get(name, torch.zeros_like(x)) for (kind, name), x in tensors.items() if kind == "output"}


def read_values(stored: StoredPass, weights: WeightMap) -> list[Watched]:
    """Return the recorded values, with the reference's parameters that each was computed from."""
    theirs = {name: tuple(names(left)) for left, right in weights.items() for name in names(right)}
    found: list[Watched] = []
    with stored.opened() as read:
        for place, one in enumerate(stored.index.values):
            found.append(
                Watched(
                    place,
                    one.name,
                    read(key_of("value", place)),
                    frozenset(other for name in one.lineage for other in theirs.get(name, ())),
                    one.from_input,
                    tuple(found[parent] for parent in one.parents),
                    one.weights,
                    one.is_result,
                    read(key_of("gradient of value", place)) if one.has_gradient else None,
                    one.module,
                )
            )
    return found
