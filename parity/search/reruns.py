"""Explain failures by running the candidate again with one thing changed: state, buffers, rows or random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.case.transfer import counterparts
from parity.mistakes.codes import CODES, repairable
from parity.mistakes.replay import tensors_with
from parity.numerics.errors import TINY, difference, norm_of, relative_l2
from parity.passes.all_passes import Tensors
from parity.passes.one_pass import named_inputs
from parity.passes.padding import hidden_tokens, rows_in
from parity.result import Finding, Kind, TensorResult
from parity.search.failure import Failure
from parity.shown import written
from parity.te.attention_backend import attention_modules
from parity.te.state import own_recipes
from parity.trace.digests import switched_off
from parity.trace.effects import other_numbers
from parity.trace.trace import grouped

if TYPE_CHECKING:
    from parity.te import Precision

# Mistakes in how a candidate is run, found by running it again without them.


_NEARLY = 3.0  # tolerances
_OF_BEFORE = 0.2  # share of the margin by which the comparison failed


class _NothingToChange(Exception):
    """Raised to skip a run that would only repeat the first one."""


def run_changed(failure: Failure, change: Callable[[nn.Module], Iterable[str]]) -> tuple[Tensors, list[str]] | None:
    """Return the tensors that the candidate computes after a change to it.

    Args:
        failure: the failure of the candidate.
        change: changes a candidate, and returns the names of what it has changed.

    Returns:
        Its tensors and the names; None if there was nothing to change, or it cannot run again.
    """
    changed: list[str] = []

    def to_candidate(module: nn.Module) -> None:
        changed.extend(change(module))
        if not changed:
            raise _NothingToChange

    try:
        tensors = failure.rerun(to_candidate)
    except _NothingToChange:
        return None
    return (tensors, changed) if changed else None  # results of several ranks are not computed again


def dropout_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if the failed tensors agree without dropout; the candidate runs again only if it has dropout."""
    ran = run_changed(failure, lambda module: [f"{one.name}={one.value:g}" for one in switched_off(module)])
    if ran is not None and agree(failure, ran[0], _telling(failure)):
        yield repairable(
            "dropout",
            "the candidate agrees without dropout",
            f"switch off {', '.join(sorted(set(ran[1])))} (hidden_dropout=0.0, attention_dropout=0.0, "
            "drop_path_rate=0.0); modules are compared in training mode",
        )


def own_recipe_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if the failed tensors agree when the candidate turns on no recipe by itself."""
    if not failure.own_recipes:
        return
    with own_recipes(failure.precision.recipe is not None, left_out=True):
        again = failure.rerun()
    if agree(failure, again, _telling(failure)):
        yield repairable(
            "own-recipe",
            f"the candidate agrees without the te.autocast that it enters by itself: {', '.join(failure.own_recipes)}",
            "enter it around the module, in the code that trains, as parity does for a precision with a recipe; or "
            "compare only at this recipe's precision, with precisions=[...] in @parity.pair",
        )


def microbatch_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if all tensors agree when no call passes ``is_first_microbatch``.

    With this argument, TE reuses weights and adds up gradients.
    """
    said: list[str] = []
    again = failure.rerun(lambda module: _say_nothing_of_microbatches(module, said))
    if not said or not agree(failure, again, ("output", "input gradient", "weight gradient")):
        return
    failed = {result.kind for result in failure.results if not result.passed}
    where = ", ".join(sorted(set(said)))
    if failed == {"weight gradient"}:
        yield repairable(
            "gradient-accumulation",
            f"weight gradients agree without is_first_microbatch ({where})",
            "pass True, which starts a new sum, only for the first microbatch, and zero main_grad before it",
        )
    else:
        yield repairable(
            "weight-cache-stale",
            f"the candidate agrees without is_first_microbatch ({where}); with False, TE computes with the quantized "
            "weights of an earlier microbatch",
            "pass True for the first microbatch after each optimizer step",
        )


def shared_cache_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if a port that decodes agrees once each attention has a ``layer_number`` of its own.

    TE keeps keys and values of different layers apart by this number.
    """
    ran = run_changed(failure, _numbered_apart) if failure.prepared.evaluation else None
    if ran is not None and agree(failure, ran[0], _telling(failure)):
        yield repairable(
            "cache-shared",
            f"the candidate agrees if each attention has a cache of its own; {', '.join(ran[1])}",
            "give each layer a layer_number of its own",
        )


def _numbered_apart(module: nn.Module) -> Iterator[str]:
    """Give each core attention, and the module that calls it, a number of its own; yield those that shared one."""
    cores = {name: one for name, one in module.named_modules() if type(one).__name__ == "DotProductAttention"}
    alike = grouped(cores, lambda name: cores[name].layer_number)
    for number, (name, core) in enumerate(cores.items(), 1):
        owner = module.get_submodule(name.rpartition(".")[0])
        for one in (core, owner if hasattr(owner, "layer_number") else core):
            one.layer_number = number
    for number, names in alike.items():
        if len(names) > 1:
            yield f"layer_number is {number} of {' and of '.join(names[:3])}"


def _telling(failure: Failure) -> tuple[Kind, ...]:
    """Return the kinds of tensors that tell: outputs, and gradients if all outputs passed, as a loss may by chance."""
    by_gradients = all(result.passed for result in failure.outputs)
    return ("output", "input gradient", "weight gradient") if by_gradients else ("output",)


def agree(failure: Failure, again: Tensors, kinds: tuple[Kind, ...]) -> bool:
    """Return whether tensors of these kinds fail as they are, and pass when the candidate runs again.

    If they were far off, nearly within the limits is enough, since a right port may exceed one at first look.
    """
    golden, models = failure.golden, failure.models
    before, after = (
        max((one.margin for one in failure.judge(golden, models, tensors) if one.kind in kinds), default=0.0)
        for tensors in (failure.candidate, again)
    )
    return before > 1.0 and after <= min(_NEARLY, max(1.0, _OF_BEFORE * before))


def _say_nothing_of_microbatches(module: nn.Module, said: list[str]) -> None:
    def hook(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        value = kwargs.get("is_first_microbatch")
        if value is None:
            return args, kwargs
        said.append(f"{type(submodule).__name__} is called with {value}")
        return args, {**kwargs, "is_first_microbatch": None}

    for submodule in module.modules():
        submodule.register_forward_pre_hook(hook, with_kwargs=True)


# Buffers that have other values than the reference's. A weight map is only about parameters.


_FEWEST_FREQUENCIES = 4
_ROUNDING_OF_FREQUENCIES, _ROUNDING_OF_BASES = 2e-2, 5e-3  # buffers may have 16 bits


def buffer_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if the outputs agree once the candidate's buffers have the values of the reference's.

    ``counterparts`` tells which buffers belong together.
    """
    right = dict(failure.prepared.reference.named_buffers())
    bases: list[tuple[float, float] | None] = []

    def copied(module: nn.Module) -> Iterator[str]:
        own = dict(module.named_buffers())
        for name, of in counterparts(failure.prepared.weights, own, right).items():
            buffer = own[name]
            if not torch.equal(buffer, right[of].to(buffer)):
                bases.append(_bases_of_rope(buffer, right[of]))
                with torch.no_grad():
                    buffer.copy_(right[of])
                yield name if of == name else f"{name} (the reference's {of})"

    ran = run_changed(failure, copied)
    if ran is None or not agree(failure, ran[0], ("output",)):
        return
    names = ", ".join(ran[1])
    own, wanted = bases[0] or (0.0, 0.0)
    if own != wanted and len(set(bases)) == 1:
        yield repairable(
            "rope-base",
            f"the candidate agrees if it has the reference's buffers; {names} has the frequencies of base "
            f"{written(own, 6)}",
            f"give its rotary embedding the reference's base, {written(wanted, 6)}",
        )
        return
    yield repairable(
        "buffer-not-copied",
        "the candidate agrees if it has the reference's buffers, which a weight map does not copy",
        f"copy {names}",
    )


def _bases_of_rope(one: Tensor, other: Tensor) -> tuple[float, float] | None:
    """Return the bases of two buffers of inverse frequencies, ``base ** (-i / n)``; None if one is something else."""
    found = []
    for x in (one.double(), other.double()):
        if x.dim() != 1 or len(x) < _FEWEST_FREQUENCIES or not bool((x > 0.0).all()) or float(x[0]) != 1.0:
            return None
        steps = x[:-1] / x[1:]
        if not torch.allclose(steps, steps[0].expand_as(steps), rtol=_ROUNDING_OF_FREQUENCIES):
            return None
        base = float(x[0] / x[-1]) ** (len(x) / (len(x) - 1))
        rounded = (float(f"{base:.{digits}g}") for digits in range(1, 7))
        found.append(next((one for one in rounded if math.isclose(one, base, rel_tol=_ROUNDING_OF_BASES)), base))
    return found[0], found[1]


# Rows of the outputs that an input hides, as a padding mask hides tokens; a port may compute anything there.
#
# A reference computes values for padded tokens, too. TE's attention leaves zeros there, so everything that is computed
# from them differs. Nobody reads these rows except a comparison, and their output gradients spoil all other gradients.


_NEARLY_RIGHT = 2.0  # if the rows that are kept are within this many tolerances, another run is worth it
_MOST = 0.5  # share of the square of an output's error
_FAR_MORE = 4.0  # times the squared error of rows that are not hidden


def hidden_row_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if everything agrees, including gradients, once rows that an input hides are zero on both sides.

    The candidate runs again, with output gradients that are zero there, only if the other rows are right already.
    """
    for name, kept in kept_rows(failure):
        if all(_is_nearly_right(failure, output, rows) for output, rows in kept.items()) and _agrees(failure, kept):
            yield repairable(
                "hidden-rows",
                f"the candidate agrees, gradients included, except in rows that the input {name} masks, where TE's "
                "attention computes nothing that can be compared",
                "if nothing reads these rows, zero them in both outputs: give the pair a call_reference and a "
                f"call_candidate that return {_zeroed(failure, name)}",
            )
            return


def hidden_row_hints(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if most of an unexplained error is in rows that an input hides, so that the rest hardly shows."""
    for name, kept in kept_rows(failure):
        shares = [_share_outside(failure, output, rows) for output, rows in kept.items()]
        if shares and min(shares) > _MOST and all(_tells(failure, output, rows) for output, rows in kept.items()):
            yield repairable(
                "hidden-rows",
                f"{min(shares):.0%} of the outputs' error is in rows that the input {name} masks, where a port may "
                "compute anything; these rows also affect the gradients",
                "zero them in both outputs first: give the pair a call_reference and a call_candidate that return "
                f"{_zeroed(failure, name)}",
            )
            return


def _zeroed(failure: Failure, name: str) -> str:
    """Return, in words, an expression that zeroes the rows; the user knows which of the mask's values hides."""
    shape = tuple(named_inputs(failure.prepared.inputs, failure.prepared.input_names)[name].shape)
    return f"output * keep[..., None], where keep is 0 for the tokens that {name} {shape} masks and 1 for the others"


def kept_rows(failure: Failure) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each input that hides rows of a failed output, with boolean masks of the rows of outputs that it keeps.

    An input hides rows only if an attention of TE's leaves these rows zero: other inputs may look like a mask.

    Raises:
        OutOfTime: if the limit of real time is reached.
    """
    outputs = {one.name: failure.golden["output", one.name] for one in failure.outputs}
    failed = [one.name for one in failure.outputs if not one.passed]
    for name, x in named_inputs(failure.prepared.inputs, failure.prepared.input_names).items():
        for hidden in hidden_tokens(x, outputs.values()):
            kept = {output: rows for output, y in outputs.items() if (rows := rows_in(~hidden, y)) is not None}
            if any(output in kept for output in failed) and _is_left_out(failure, hidden):
                yield name, kept


def _is_left_out(failure: Failure, hidden: Tensor) -> bool:
    """Run the candidate again, and return whether an attention of TE's leaves the rows of all hidden tokens zero.

    Args:
        failure: the failed comparison.
        hidden: the tokens, ``[batch, seq]`` or ``[tokens]``; the attention's may be in another layout.
    """
    found: list[bool] = []

    def look(module: nn.Module, args: Any, result: Any) -> None:
        rows = ~tree_leaves(result)[0].any(-1)
        if rows.numel() % hidden.numel() == 0:
            layouts = (rows, rows.mT) if rows.dim() == 2 else (rows,)
            found.extend(bool(one.reshape(-1, *hidden.shape)[:, hidden].all()) for one in layouts)

    def watch(module: nn.Module) -> None:
        for one in attention_modules(module):
            one.register_forward_hook(look)

    failure.rerun(watch)
    return any(found)


def _is_nearly_right(failure: Failure, output: str, rows: Tensor) -> bool:
    result = next(one for one in failure.outputs if one.name == output)
    error, right = _error(failure, output), failure.golden["output", output]
    allowed = _NEARLY_RIGHT * result.tolerance_relative_l2 * norm_of(right)
    return norm_of(right * rows) > 0.0 and norm_of(error * rows) <= allowed


def _share_outside(failure: Failure, output: str, rows: Tensor) -> float:
    error = _error(failure, output)
    return 1.0 - (norm_of(error * rows) / max(norm_of(error), TINY)) ** 2


def _tells(failure: Failure, output: str, rows: Tensor) -> bool:
    """Return whether hidden rows have far more error each than the others, and the others are not all 0.

    An id of documents divides rows like a mask, and outputs that are 0 for padding agree there already.
    """
    share, hidden = _share_outside(failure, output, rows), 1.0 - rows.double().mean().item()
    is_far_more = share * (1.0 - hidden) > _FAR_MORE * (1.0 - share) * hidden
    return is_far_more and norm_of(failure.golden["output", output] * rows) > 0.0


def _error(failure: Failure, output: str) -> Tensor:
    return failure.candidate["output", output].double() - failure.golden["output", output]


def _agrees(failure: Failure, kept: dict[str, Tensor]) -> bool:
    """Return whether every tensor passes if output gradients and outputs are zero in the other rows."""
    cotangents = {name: x * kept[name] if name in kept else x for name, x in failure.prepared.cotangents.items()}

    def zeroed(tensors: Tensors | None) -> Tensors | None:
        if tensors is None:
            return None
        return {key: x * kept[key[1]] if key[0] == "output" and key[1] in kept else x for key, x in tensors.items()}

    golden = zeroed(tensors_with(failure.prepared, (), cotangents=cotangents))
    models = [
        zeroed(tensors_with(failure.prepared, (), failure.precision, cotangents, freedom))
        for freedom in failure.freedoms
    ]
    candidate = zeroed(failure.rerun(cotangents=cotangents))
    computed = [model for model in models if model is not None]
    if golden is None or not computed or _read_what_is_hidden(golden, kept):
        return False
    return all(result.passed for result in failure.judge(golden, computed, candidate))


def _read_what_is_hidden(golden: Tensors, kept: dict[str, Tensor]) -> bool:
    """Return whether kept rows depend on tokens that seem hidden, which means that they are not hidden."""
    shapes = {rows.squeeze(-1).shape: rows for rows in kept.values()}
    gradients = [x for (kind, _), x in golden.items() if kind == "input gradient" and x.shape[:-1] in shapes]
    return any(bool((x * ~shapes[x.shape[:-1]]).any()) for x in gradients)


# A candidate whose results depend on random numbers, found by running it again with other numbers.


_OF_THE_ERROR = 0.3  # if two passes differ by this share of the error, random numbers are its cause
_OF_A_GRADIENTS = 1.0  # the same if outputs are right; if all is random, two passes differ by sqrt(2) times the error
_OF_THE_EXPECTED = 1.5  # two passes that round stochastically differ by at most sqrt(2) times the expected error


def random_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if a tensor that failed changes with the random numbers.

    If outputs failed, only these count, since gradients that a recipe rounds stochastically differ every time.
    """
    with other_numbers(next(iter(failure.golden.values())).device):
        again = failure.rerun()
    failed = [result for result in failure.results if not result.passed and result.finite]
    outputs = [result for result in failed if result.kind == "output"]
    telling, share = (outputs, _OF_THE_ERROR) if outputs else (failed, _OF_A_GRADIENTS)
    for result in sorted(telling, key=lambda result: result.margin, reverse=True):
        key = result.key
        candidate, golden = failure.candidate[key].double(), failure.golden[key]
        moved, error = norm_of(difference(again[key], candidate)), norm_of(difference(candidate, golden))
        rounding = result.expected.relative_l2 * max(norm_of(golden), norm_of(candidate))
        if moved > max(share * error, _OF_THE_EXPECTED * rounding):
            apart = relative_l2(moved, norm_of(golden))
            yield repairable(
                "not-reproducible",
                f"the candidate draws random numbers: with other numbers {result.label} changes by {apart:.2g} of its "
                f"norm, and the error is {result.errors.relative_l2:.2g}",
                "switch off what draws them, in a module or in forward (functional dropout, stochastic depth, added "
                "noise), or draw them once and give them to both modules as an input",
            )
            return


# Arguments for which a finding uses the name that most of TE's modules have, but the port's module has another name.
#
# Signatures of TE 2.20.2: ``pytorch/transformer.py``, ``pytorch/attention/multi_head_attention.py``.


_OTHER_NAMES = {
    "attn_mask_type": "self_attn_mask_type",
    "qkv_format": "attn_input_format",
    "eps": "layernorm_epsilon",
}
_IN_ITS_PLACE = {
    "softmax_scale": "multiply the query's weight and bias by the reference's scale over its own",
}
_EPS = frozenset({CODES["norm-eps"]})  # in other findings, eps may belong to something else


class _Seen(Exception):
    """Raised to end a run as soon as its module is built."""


def with_argument_names(found: Sequence[Finding], failure: Failure) -> tuple[Finding, ...]:
    """Return the findings, with the names that the candidate's TE modules use for the arguments in them."""
    named = [[name for name in (*_OTHER_NAMES, *_IN_ITS_PLACE) if _names(one, name)] for one in found]
    if not any(named):
        return tuple(found)
    modules: dict[str, type] = {}

    def see(candidate: nn.Module) -> None:
        modules.update({type(module).__name__: type(module) for module in _outermost_of_te(candidate)})
        raise _Seen

    with contextlib.suppress(_Seen):
        failure.rerun(see)
    added = [[told for name in names for told in _told(name, modules)] for names in named]
    return tuple(
        dataclasses.replace(one, message="; ".join((one.message, *more)))
        for one, more in zip(found, added, strict=True)
    )


def _names(finding: Finding, argument: str) -> bool:
    if argument == "eps" and finding.code not in _EPS:
        return False
    return re.search(rf"\b{argument}\b", finding.message) is not None


def _told(argument: str, modules: dict[str, type]) -> Iterator[str]:
    """Yield a clause for the modules that have another name for the argument, and one for those that have none."""
    taken = {name: inspect.signature(module.__init__).parameters for name, module in modules.items()}  # type: ignore[misc]
    other = _OTHER_NAMES.get(argument)
    renamed = [name for name, parameters in taken.items() if argument not in parameters and other in parameters]
    if renamed:
        yield f"in {' and '.join(renamed)}, this argument is called {other}"
    attend = [name for name, parameters in taken.items() if "num_attention_heads" in parameters]
    lacking = [name for name in attend if argument not in taken[name]]
    if argument in _IN_ITS_PLACE and lacking:
        yield f"{' and '.join(lacking)} has no {argument}: {_IN_ITS_PLACE[argument]}"


def _outermost_of_te(module: nn.Module) -> Iterator[nn.Module]:
    """Yield TE's modules that no other module of TE contains."""
    if type(module).__module__.startswith("transformer_engine."):
        yield module
        return
    for child in module.children():
        yield from _outermost_of_te(child)


# Findings about values that cannot be judged: NaN, infinities, missing gradients.


def non_finite(failed: Sequence[TensorResult], precision: Precision) -> Iterator[Finding]:
    """Yield findings on values that are not finite, which say whose fault they are."""
    for tensor in failed:
        errors, expected = tensor.errors, tensor.expected
        where = f"{tensor.label} of shape {tensor.shape_label}, first at {list(errors.first_non_finite or ())}"
        if errors.golden_non_finite:
            yield Finding(
                "PAR002",
                "golden-not-finite",
                f"the reference itself is not finite in FP64: {errors.golden_non_finite} elements of {where}; "
                "nothing can be judged there, so check the weights and inputs",
            )
        elif errors.nans + errors.infs and expected.nans + expected.infs:
            yield Finding(
                "PAR003",
                "precision-overflows",
                f"{errors.nans} NaN and {errors.infs} Inf in {where}; a correct {precision.name} computation of the "
                f"reference has {expected.nans} NaN and {expected.infs} Inf there too, so the range of "
                f"{precision.name} is too small for these values in any implementation",
            )
        elif errors.nans + errors.infs:
            yield Finding(
                "PAR001",
                "not-finite",
                f"{errors.nans} NaN and {errors.infs} Inf in {where}, where a correct {precision.name} computation "
                "of the reference is finite",
            )
        elif not tensor.finite:
            yield Finding(
                "PAR003",
                "precision-overflows",
                f"a correct {precision.name} computation of the reference has {expected.nans} NaN and {expected.infs} "
                f"Inf in {tensor.label}, where the TE module is finite, so the range of {precision.name} is too small "
                "for these values, and the rounding error there is unknown",
            )


def unreached_parameters(unreached: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each TE parameter, by name, that the backward pass did not reach."""
    for name in unreached:
        yield Finding(
            "PAR004",
            "no-gradient",
            f"TE's {name} got no gradient in the backward pass; is it used in the forward pass, and does it require a "
            "gradient?",
        )


def unread_inputs(failed: Sequence[TensorResult], candidate: Tensors) -> Iterator[Finding]:
    """Yield a finding for each input to which nothing flows back, though it does in the reference."""
    for tensor in failed:
        if tensor.kind == "input gradient" and not candidate[tensor.key].any():
            yield Finding(
                "PAR004",
                "no-gradient",
                f"no gradient flows back to the input {tensor.name}: the candidate computes without it, or detaches "
                "it; is it passed on to TE's module (as encoder_output, say), and not something else in its place?",
            )
