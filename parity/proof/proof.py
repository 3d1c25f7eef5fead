"""Prove a port on a checkpoint's own weights, block by block.

Four kinds of passes, each with one block's parameters in memory:

- the reference in FP64, and under the precision's rounding model, each on its own values. They tell what error a block
  inherits, what error is expected there, and what both mean for the logits.
- the candidate, on its own values, with the converted checkpoint's weights.
- the reference with the candidate's values put in place of what its blocks return, in FP64 and under the rounding
  model, so that it computes only what lies between the blocks, which is judged where the next one begins.

Then each block is a pair of its own, with its own weights and the candidate's values as inputs and outputs, and is
compared like any other pair. If each block adds no more error than its precision costs, and nothing is wrong between
them, the whole is right. Nothing but these verdicts decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parity.case import transfer
from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize, has_te
from parity.case.weight_map import names
from parity.comparison import explain_at, judge_at
from parity.judge.judge import judge
from parity.judge.limits import packaged
from parity.judge.request import CandidateRun
from parity.numerics.errors import GoldenTensor
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.numerics.golden import in_fp64
from parity.numerics.rounding import rounded
from parity.passes.one_pass import as_arguments
from parity.passes.prepare import cast, cast_module, forget, on_device
from parity.progress import followed
from parity.proof.blocks import Blocks, Call, Key, stream_of, with_stream
from parity.proof.logits import Logits, compare_logits
from parity.proof.matching import Matched, distance, laid_out_like, match_blocks
from parity.result import Kind, Result, TensorResult
from parity.shown import raised
from parity.te import Kernels, Precision
from parity.te.attention_backend import has_attention
from parity.te.state import fresh_caches, fresh_quantization, moved
from parity.user_error import UserError

_OUTPUT: tuple[Kind, str] = ("output", "output")


@dataclass(frozen=True)
class Proven:
    """What one block adds to the error, or what lies between two of them.

    Attributes:
        place: the reference's block, or what it lies between.
        inherited, expected_before: the relative L2 error of what it is given, and the rounding model's there.
        added: the error that it adds, beside the expected one; None if nothing could be compared.
        result: the block's comparison; None for what lies between.
    """

    place: str
    inherited: float
    expected_before: float
    added: TensorResult | None
    result: Result | None = None

    @property
    def passed(self) -> bool:
        """Whether it adds no more error than its limits allow."""
        return self.result.passed if self.result else self.added is not None and self.added.passed


@dataclass(frozen=True)
class Proof:
    """The verdicts in the reference's order, and the whole model's error.

    Attributes:
        steps: each block, and what lies between them where it computes or is wrong.
        inherited, expected: the relative L2 error of the model's output, and the rounding model's.
        logits: what both mean for the next token; None if the output is no scores of tokens.
    """

    steps: tuple[Proven, ...]
    inherited: float
    expected: float
    logits: Logits | None

    @property
    def wrong(self) -> list[Proven]:
        """What adds more error than its limits allow, in order."""
        return [step for step in self.steps if not step.passed]


def prove(
    pair: Pair,
    original: Mapping[str, Tensor],
    converted: Mapping[str, Tensor] | None,
    inputs: Any,
    case: Case,
    precision: Precision,
    kernels: Kernels,
    seconds: float,
) -> Proof:
    """Prove a port.

    Args:
        pair: both modules, with buffers, and parameters on the meta device.
        original: the reference's checkpoint, by the names of its parameters and buffers.
        converted: the candidate's; None to convert the original by the pair's map.
        inputs: what both are called with.
        case: what declares the pair.
        precision: how the candidate computes.
        kernels: TE's kernels.
        seconds: how long the search for the first wrong block's cause may take; 0 for no limit.

    Raises:
        UserError: if a module raises, or the blocks of both do not fit together.
    """
    with torch.no_grad():
        passes = _Passes(pair, original, converted, on_device(inputs, kernels.device), precision, kernels)
        steps = tuple(_list_steps(passes, case, seconds))
        (_, exact), (_, computed), (_, modelled) = passes.exact, passes.computed, passes.modelled
        computed = laid_out_like(exact, computed)
        logits = compare_logits(exact, computed, modelled, passes.ids)
        return Proof(steps, distance(computed, exact), distance(modelled, exact), logits)


# The passes.


_Pass = tuple[dict[Key, Call], Tensor]  # the calls of blocks, and the output


class _Passes:
    def __init__(
        self,
        pair: Pair,
        original: Mapping[str, Tensor],
        converted: Mapping[str, Tensor] | None,
        inputs: Any,
        precision: Precision,
        kernels: Kernels,
    ) -> None:
        self.pair, self.precision, self.kernels, self._inputs = pair, precision, kernels, inputs
        self._original, self._converted = original, converted
        self._shapes = transfer.parameter_shapes(pair.candidate)
        buffers = [dict(module.named_buffers()) for module in (pair.candidate, pair.reference)]
        alike = transfer.counterparts(pair.weights, *buffers)
        mapped = {name: original[other] for name, other in alike.items() if other in original}
        for module, given in ((pair.reference, original), (pair.candidate, converted or mapped)):
            _fill_buffers(module, given, kernels.device)
        moved(pair.candidate, dtype=precision.dtype)
        self.reference = Blocks(pair.reference, lambda wanted: original, kernels.device)
        self.candidate = Blocks(pair.candidate, self._read_candidate, kernels.device)
        self.exact = self.of_reference("in FP64")
        self.computed = self._of_candidate()
        self.modelled = self.of_reference("under the rounding model", FUSED)
        self.matched = match_blocks(pair.weights, self.reference, self.candidate, self.exact[0], self.computed[0])

    @property
    def ids(self) -> Tensor:
        """The first of the inputs, which are ids if they are whole numbers."""
        return next(x for x in tree_leaves(self._inputs) if isinstance(x, Tensor))

    def _read_candidate(self, wanted: Collection[str]) -> Mapping[str, Tensor]:
        return self._converted or self._convert_weights(wanted)

    def holds_what_the_map_says(self, path: str) -> bool:
        """Return whether the candidate's block has the weights that the map makes of the original ones."""
        mapped, held = self._convert_weights(self.candidate.names[path].values()), self._converted
        return held is None or all(torch.equal(x, held[name].to(x.dtype)) for name, x in mapped.items())

    def _convert_weights(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return the candidate's parameters of these names as the map makes them of the original ones."""
        given, found = self._original, dict[str, Tensor]()
        for left, right in self.pair.weights.items():
            if not set(wanted).isdisjoint(names(right)):
                # A map that computes rounds once, at the end; one that only renames needs no copy.
                wide = None if isinstance(left, str) and isinstance(right, str) else torch.float64
                of_entry = {name: given[name].to(given[name].device, wide) for name in names(left)}
                made = transfer.to_candidate({left: right}, of_entry, self._shapes)
                found |= {name: x.to(self.precision.dtype) for name, x in made.items()}
        return found

    def of_reference(
        self, how: str, freedom: Freedom | None = None, instead: Mapping[Key, Any] | None = None
    ) -> tuple[dict[Key, Call], Tensor]:
        """Run the reference in FP64 or, if kernels with a freedom are modelled, under the rounding model in FP32.

        Args:
            how: what is run, for messages.
            freedom: how the kernels compute; None for FP64.
            instead: what calls of blocks return without being made.

        Returns:
            The calls of its blocks, and its output.
        """
        dtype = torch.float64 if freedom is None else torch.float32
        call = partial(_call_module, self.pair.call_reference, cast(self._inputs, dtype))
        cast_module(self.pair.reference, dtype)
        with _naming_module(f"the reference {how}"):
            if freedom is None:
                with in_fp64():
                    stored = None if instead is None else self.precision.dtype
                    calls, returned = self.reference.run(call, dtype, stored, instead=instead)
                return calls, stream_of(returned)
            rounding = self.precision.rounding
            with torch.enable_grad(), rounded(rounding, (), freedom) as phase:

                @contextmanager
                def alone(parameters: Sequence[Tensor]) -> Iterator[None]:
                    with phase.suspending(), rounded(rounding, parameters, freedom):
                        yield

                calls, returned = self.reference.run(
                    call, dtype, self.precision.dtype, alone, rounding.store_part, instead
                )
            return calls, rounding.store_part(stream_of(returned).detach())

    def of_reference_given(self, instead: Mapping[Key, Any], how: str) -> tuple[_Pass, list[_Pass]]:
        """Run the reference with values in place of what calls return, in FP64 and under each rounding model."""
        rounded_to = cast(instead, torch.float32)
        modelled = [self.of_reference(how, freedom, rounded_to) for freedom in (FUSED, UNFUSED)]
        return self.of_reference(how, instead=instead), modelled

    @fresh_caches()
    @fresh_quantization()
    def _of_candidate(self) -> tuple[dict[Key, Call], Tensor]:
        dtype = self.precision.dtype
        with _naming_module("the candidate"), self.precision.autocast(self.kernels):
            call = partial(_call_module, self.pair.call_candidate, cast(self._inputs, dtype))
            calls, returned = self.candidate.run(call, dtype)
        return calls, stream_of(returned)


def _call_module(call: Callable[..., Any] | None, inputs: Any, module: nn.Module) -> Any:
    args, kwargs = as_arguments(inputs)
    return call(module, *args, **kwargs) if call else module(*args, **kwargs)


def _fill_buffers(module: nn.Module, given: Mapping[str, Tensor], device: torch.device) -> None:
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = given.get(f"{path}.{key}".removeprefix("."), buffer).to(device, copy=True)


@contextmanager
def _naming_module(who: str) -> Iterator[None]:
    """Turn what a pair's module raises in this context into a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        advice = ""
        if "meta" in str(error):
            advice = "; does it use a parameter of a module without calling this module, which would read it?"
        raise UserError(f"{who} raised {raised(error)}{advice}") from error


# The verdicts.


def _list_steps(passes: _Passes, case: Case, seconds: float | None) -> Iterator[Proven]:
    """Yield a verdict on each block, and on what lies between them where that computes."""
    (exact, _), (computed, output), (modelled, _) = passes.exact, passes.computed, passes.modelled
    written, instead = dict[Key, Tensor](), dict[Key, Any]()
    for one in passes.matched:
        returned, mine = exact[one.reference].returned, stream_of(computed[one.candidate].returned)
        written[one.reference] = laid_out_like(stream_of(returned), mine)
        instead[one.reference] = with_stream(returned, written[one.reference].double())
    how = "between the candidate's values"
    (forced, forced_output), models = passes.of_reference_given(instead, how)
    block, errors, allowed = Proven("the inputs", 0.0, 0.0, None), (0.0, 0.0), seconds
    keys = [one.reference for one in passes.matched]
    for i, one in enumerate(followed(passes.matched, "proving")):
        key = one.reference
        x = laid_out_like(exact[key].reads, computed[one.candidate].reads)
        errors = distance(x, exact[key].reads), distance(modelled[key].reads, exact[key].reads)
        alike = forced[key].reads, [calls[key].reads for calls, _ in models], x
        between = [*_judge_between(passes.precision, f"between {block.place} and {key[0]}", errors, *alike)]
        if i and not block.passed and any(not step.passed for step in between):
            together = _judge_together(passes, instead, block, keys[i - 1], key, x)
            if together.passed:
                block, between, seconds = together, [], allowed
        yield from (*([block] if i else []), *between)
        result = _compare_block(passes, one, case, forced[key], x, written[key], seconds)
        block = Proven(key[0], *errors, result.worst, result)
        seconds = seconds if result.passed else None  # the first cause is likely to be the others' too
    yield block
    alike = forced_output, [x for _, x in models], laid_out_like(forced_output, output)
    yield from _judge_between(passes.precision, f"between {block.place} and the output", errors, *alike)


def _judge_together(
    passes: _Passes, instead: Mapping[Key, Any], block: Proven, key: Key, following: Key, mine: Tensor
) -> Proven:
    """Judge a block and what lies between it and the next one as one: the port may do in the other what the model does.

    For example, Gemma's embedding scales what it returns, and a port may scale it after its own embedding.
    """
    others = {other: value for other, value in instead.items() if other != key}
    (exact, _), models = passes.of_reference_given(others, f"from {block.place} on")
    modelled = [calls[following].reads for calls, _ in models]
    judged = _judge_values(passes.precision, exact[following].reads, modelled, mine)
    return Proven(f"{block.place} and what follows it", block.inherited, block.expected_before, judged)


def _judge_between(
    precision: Precision, place: str, errors: tuple[float, float], exact: Tensor, models: Sequence[Tensor], mine: Tensor
) -> Iterator[Proven]:
    """Judge what the candidate makes of one block's values before the next one reads them."""
    if torch.equal(exact, mine.to(exact.dtype)):
        return
    if not exact.is_floating_point():
        raise UserError(f"{place}, the candidate has other whole numbers than the reference, such as other ids")
    yield Proven(place, *errors, _judge_values(precision, exact, models, mine))


def _judge_values(precision: Precision, exact: Tensor, models: Sequence[Tensor], mine: Tensor) -> TensorResult:
    golden, modelled = {_OUTPUT: GoldenTensor(exact)}, [{_OUTPUT: x} for x in models]
    (judged,) = judge(golden, modelled, {_OUTPUT: mine}, precision, packaged(), ())
    return judged


def _compare_block(
    passes: _Passes, one: Matched, case: Case, ours: Call, x: Tensor, y: Tensor, seconds: float | None
) -> Result:
    """Compare two blocks on what the candidate's was given, with the weights that it had."""
    (own, _), (other, _), theirs = one.reference, one.candidate, passes.computed[0][one.candidate]
    fill = passes.holds_what_the_map_says(other)

    def call_candidate(module: nn.Module, x: Tensor) -> Tensor:
        given = with_stream(theirs.given, laid_out_like(theirs.reads, x))
        return laid_out_like(y, stream_of(_call_again(module, given)))

    def build(te: ModuleType) -> Pair:
        return Pair(
            passes.reference.part(own),
            passes.candidate.part(other, passes.precision.dtype),
            lambda rng: x,
            one.weights,
            lambda module, x: stream_of(_call_again(module, with_stream(ours.given, x), x.dtype)),
            call_candidate,
            fill,
            evaluation=True,
        )

    part = passes.pair.candidate.get_submodule(other)
    checked = CheckedSize({}, "x".join(map(str, x.shape)), has_attention(part), has_te(part))
    block = Case(own, build, ({},), vary_constants=False, probe=False, path=case.path)
    at = block, checked, passes.precision, 0, passes.kernels, packaged()
    with torch.enable_grad():
        result = explain_at(judge_at(*at, candidate_run=CandidateRun({_OUTPUT: y})), seconds)
    forget()
    return result


def _call_again(module: nn.Module, given: Any, dtype: torch.dtype | None = None) -> Any:
    """Call a block with recorded arguments, numbers in another dtype if one is given."""
    cast_to = dtype if dtype is not None and dtype.is_floating_point else None
    fresh = tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf), given)  # such as a cache
    args, kwargs = cast(fresh, cast_to) if cast_to else fresh
    return module(*args, **kwargs)
