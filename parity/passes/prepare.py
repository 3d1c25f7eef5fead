"""Prepare what all precisions of one dtype share: the rounded weights and inputs of a case, and its golden pass.

It is kept for all seeds, with what others compute from it, until a comparison of another case or size begins: pytest
runs a case's precisions one after another, each with all seeds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.case.case import Case, Pair, Rng
from parity.case.map_check import untied
from parity.case.validate import CheckedSize, parameters_outside_te
from parity.case.weight_map import WeightMap
from parity.case.weight_map import names as names_in
from parity.machine import devices, host
from parity.numerics.golden import golden_device, in_fp64
from parity.numerics.operands import PastAmaxes
from parity.passes.build import (
    Held,
    build,
    cast,
    held_weights,
    on_device,
    rounded_inputs,
    share_rounded_weights,
    size_in_bytes,
    vary_constants,
)
from parity.passes.draws import Lookups, ScaledLookups, draws_of, forget_draws, probe
from parity.passes.nominal_clock import Clock
from parity.passes.one_pass import Pass, outputs_of, positional_names, run
from parity.passes.refusals import check_golden, check_reproducible, check_state_stays, check_weights_stay
from parity.result import Kind
from parity.te import Kernels
from parity.te.state import is_quantized
from parity.trace.calls import tracing
from parity.trace.effects import RandomState, attributes_of, changed_attributes, other_numbers
from parity.trace.private_functions import clips_recorded
from parity.trace.products import Products
from parity.trace.trace import Trace, optimizers_recorded
from parity.user_error import UserError

# Keep what is computed of a case and asked for again, and know the memory that it takes.


Value = TypeVar("Value")


@dataclass
class _Entry:
    value: Any
    size: Callable[[Any], int]


@dataclass
class Cache:
    """Values by key, each computed when it is first asked for; nobody but the cache puts one in."""

    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    _subject: Hashable = None

    def get(self, key: Hashable, compute: Callable[[], Value], size: Callable[[Value], int] = lambda _: 0) -> Value:
        """Return the value of this key, computed now if it is not kept.

        Args:
            key: of the value.
            compute: the value.
            size: its bytes, asked for whenever the memory of all is: a value may grow.
        """
        if key not in self._entries:
            self._entries[key] = _Entry(compute(), size)
        value: Value = self._entries[key].value
        return value

    def take(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of this key and keep it no longer; it is computed if it is not kept."""
        return self._entries.pop(key).value if key in self._entries else compute()

    def group(self, name: str, subject: Hashable) -> Cache:
        """Return the values of one subject, such as a rounding; those of another subject by this name are let go."""
        found = self._entries.get(name)
        if found is None or found.value._subject != subject:
            found = self._entries[name] = _Entry(Cache(_subject=subject), lambda group: group.bytes)
        group: Cache = found.value
        return group

    def values(self) -> list[Any]:
        """Return all values that are kept."""
        return [entry.value for entry in self._entries.values()]

    @property
    def bytes(self) -> int:
        """The memory that all values take, as far as they say."""
        return sum(entry.size(entry.value) for entry in self._entries.values())


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of golden's forward pass, in FP64.

    Attributes:
        trace: all that the reference calls.
        products: its GEMMs.
    """

    trace: Trace
    products: Products

    @staticmethod
    @contextmanager
    def recorded(reference: nn.Module, into: list[Calls]) -> Iterator[None]:
        """Within the context, record one forward pass, and append its calls afterwards."""
        products = Products()
        with (
            products.recorded(),
            tracing(reference) as trace,
            optimizers_recorded() as trace.optimizers,
            clips_recorded() as trace.clips,
        ):
            yield
        into.append(Calls(trace, products))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case at one size and seed, rounded to one dtype, with its golden pass.

    Attributes:
        dtype: the dtype in which the candidate computes.
        reference: the plain module, holding the rounded weights in FP64 or FP32 (exact in both).
        call: how to call the reference, or None.
        inputs: as the pair returns them, rounded, in the dtype and on the device.
        input_names: names of the positional inputs, as the reference names them.
        weights: the pair's weight map.
        candidate_weights: the candidate's parameters by name, in the dtype, as the map says.
        cotangents: the gradient with respect to each output, by the output's name, in FP64, rounded to the dtype.
        golden: the reference's pass in FP64.
        probe: the probing inputs, like ``inputs``, for ``probe_call``; None if the case has no probe, or they would be
            the inputs.
        probed: golden outputs for ``probe``, FP64.
        lookups: the lookups in tables, on the probing inputs.
        outside_te: names of the reference's parameters that the candidate holds in plain PyTorch modules.
        unlike: the candidate's parameters by name, of those that it holds otherwise than the map says.
        apart: what to say of parameters that are one in the reference, and several in the candidate.
        evaluation: whether both modules are in evaluation mode, so that no pass has gradients.
        cache: what is computed of this and asked for again. At first it holds two things that are taken out when they
            are used: ``calls`` of golden's pass, if it ran on the kernels' device, which hold everything that the pass
            computed; and the ``pair``, whose candidate has not run.
        clock: of what a search for a cause computes.
        past: what delayed scaling has seen in the steps before, if this is a step of a training under it.
        wide: kinds and names of the outputs that the candidate returns in a wider dtype, as a loss in FP32.
    """

    dtype: torch.dtype
    reference: nn.Module
    call: Callable[..., Any] | None
    inputs: Any
    input_names: tuple[str, ...]
    weights: WeightMap
    candidate_weights: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    golden: Pass
    probe: Any
    probed: dict[str, Tensor]
    lookups: Lookups
    outside_te: frozenset[str]
    unlike: dict[str, Tensor] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    evaluation: bool = False
    cache: Cache = field(default_factory=Cache)
    clock: Clock = field(default_factory=Clock)
    wide: frozenset[tuple[Kind, str]] = frozenset()
    past: PastAmaxes = field(default_factory=PastAmaxes)

    @property
    def quantized(self) -> Iterator[str]:
        """Yield the names of the reference's parameters that the candidate holds quantized, with just these values."""
        for left, right in self.weights.items():
            if all(is_quantized(self.candidate_weights[name]) for name in names_in(right)):
                yield from names_in(left)

    @property
    def bytes(self) -> int:
        """The memory that this takes, and what is kept with it."""
        own = [list(self.reference.parameters()), *vars(self).values(), vars(self.golden)]
        return size_in_bytes(own) + self.cache.bytes

    @property
    def probe_call(self) -> Callable[..., Any] | None:
        """Return how to call the reference on the probing inputs, or None."""
        return ScaledLookups(self.dtype, self.evaluation).around(self.call) if self.lookups else self.call


class _Key(NamedTuple):
    case: Case
    checked: CheckedSize
    dtype: torch.dtype
    seed: int
    kernels: Kernels


_KEPT: OrderedDict[_Key, Prepared] = OrderedDict()  # the latest comes last


def prepare(case: Case, checked: CheckedSize, dtype: torch.dtype, seed: int, kernels: Kernels) -> Prepared:
    """Return weights, inputs and the golden pass, and keep them for the next precision of the same dtype.

    Weights are rounded in the candidate's layout and mapped back, so that both modules hold the same numbers even if
    the map does arithmetic (a gamma stored minus 1).

    Raises:
        NothingToJudge: if a comparison would pass whatever the candidate computed.
    """
    key = _Key(case, checked, dtype, seed, kernels)
    if key not in _KEPT:
        _make_room(key)
        _KEPT[key] = _prepared(*key)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def release(case: Case, checked: CheckedSize, dtype: torch.dtype, seed: int, kernels: Kernels) -> None:
    """Let go of what ``prepare`` keeps for this."""
    _KEPT.pop(_Key(case, checked, dtype, seed, kernels), None)


def forget() -> None:
    """Let go of everything that is kept."""
    _KEPT.clear()
    forget_draws()


def _make_room(coming: _Key) -> None:
    """Let go of other cases and sizes, of a third dtype, and of what takes too much memory, the oldest first.

    FP8's dtype is BF16, with FP16 between the two: so two dtypes are kept.
    """
    last = next((key.dtype for key in reversed(_KEPT) if key.dtype is not coming.dtype), None)
    for key in list(_KEPT):
        other = key.case.whole is not coming.case.whole or key.checked != coming.checked
        if other or key.dtype not in (coming.dtype, last):
            del _KEPT[key]
    free = devices.free()
    if free is None:
        return
    while len(_KEPT) > 1 and sum(one.bytes for one in _KEPT.values()) > host.share_to_keep(free):
        _KEPT.popitem(last=False)


def _prepared(case: Case, checked: CheckedSize, dtype: torch.dtype, seed: int, kernels: Kernels) -> Prepared:
    pair = build(case, checked, seed, kernels)
    apart = untied(pair.weights, pair.reference, pair.candidate)
    pair.reference.double()
    held = Held()
    if pair.fill is False:
        held = held_weights(pair)
    elif case.vary_constants:
        vary_constants(pair.reference, Rng(seed, "weights"))
    candidate_weights = share_rounded_weights(pair, dtype, {**held.alike, **case.held})
    drawn = draws_of((case.whole, checked), seed, kernels)
    with drawn.repeated():
        inputs = rounded_inputs(pair, checked, dtype, seed, kernels.device)
    cotangents: dict[str, Tensor] = {}

    def draw_cotangents(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rng = Rng(seed, "cotangents")
        with drawn.repeated(), torch._C.DisableTorchFunction():  # golden's pass in FP64 does not draw like this
            for name, output in outputs.items():
                drawn_like = torch.ones(output.shape) if case.is_step else rng.normal(*output.shape)
                cotangents[name] = drawn_like.to(output.device, dtype).double()
        return cotangents

    calls: list[Calls] = []
    names = positional_names(pair.reference, pair.call_reference, inputs)
    faster = golden_device(kernels.device).device
    pair.reference.to(faster)
    with in_fp64():
        exact = cast(inputs, torch.float64, faster)
        is_filtered = faster == kernels.device and not case.is_step  # a step returns one number, which no filter sees
        recording = Calls.recorded(pair.reference, calls) if is_filtered else None
        before = RandomState.now(faster)
        versions = {name: parameter._version for name, parameter in pair.reference.named_parameters()}
        state = attributes_of(pair.reference)
        golden = run(
            *(pair.reference, pair.call_reference, exact, names, draw_cotangents, recording),
            watch_inputs=True,
            differentiated=not pair.evaluation,
        )
        drew = not RandomState.now(faster).is_as(before)
        _check_complete(pair.reference, versions)
        written = [name for name, one in pair.reference.named_parameters() if one._version != versions[name]]
        again = partial(outputs_of, pair.reference, pair.call_reference, exact)
        _check(golden, again, faster if drew else None, written, changed_attributes(pair.reference, state))
    probing, probed, lookups = _probed(pair, inputs, dtype, seed, faster) if case.probe else (None, {}, Counter())
    pair.reference.to(kernels.device)
    cache = Cache()
    cache.get("pair", lambda: pair)
    if calls:
        cache.get("calls", lambda: calls[0], lambda one: size_in_bytes(one.trace.tensors))
    return Prepared(
        dtype,
        pair.reference,
        pair.call_reference,
        inputs,
        names,
        pair.weights,
        candidate_weights,
        on_device(cotangents, kernels.device),
        Pass(**on_device(vars(golden), kernels.device)),
        probing,
        on_device(probed, kernels.device),
        lookups,
        parameters_outside_te(pair),
        held.unlike,
        apart,
        pair.evaluation,
        cache=cache,
    )


def _probed(
    pair: Pair, inputs: Any, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[Any, dict[str, Tensor], Lookups]:
    """Return probing inputs, golden outputs for them, and what is looked up; nothing if they would be
    the inputs again.
    """
    probing = cast(probe(cast(inputs, torch.float32), Rng(seed, "probe")), dtype)
    scaled = ScaledLookups(dtype, pair.evaluation)
    with torch.no_grad(), in_fp64():
        probed = outputs_of(pair.reference, scaled.around(pair.call_reference), cast(probing, torch.float64, device))
    if not scaled.seen and all(map(_same, tree_leaves(probing), tree_leaves(inputs))):
        return None, {}, Counter()
    return probing, probed, scaled.seen


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or torch.equal(one, other)


def _check_complete(reference: nn.Module, known: Container[str]) -> None:
    """Make sure that the first call made no parameters beyond those that it was given weights for."""
    new = [name for name, _ in reference.named_parameters() if name not in known]
    if new:
        raise UserError(
            f"the reference creates its parameter {new[0]} in its first call, after weights were mapped; create it "
            "in the constructor, or call the reference once in the factory"
        )


def _check(
    golden: Pass,
    again: Callable[[], dict[str, Tensor]],
    drew_on: torch.device | None,
    written: Sequence[str],
    changed: Sequence[str],
) -> None:
    """Make sure that there is something to judge, and that another pass of the reference would be the same.

    Args:
        golden: the golden pass.
        again: the outputs of another pass.
        drew_on: the device where it drew random numbers; None if it drew none.
        written: names of the parameters that it wrote to.
        changed: names of the attributes of its modules that it changed.

    Raises:
        NothingToJudge: if not.
    """
    check_golden(golden)
    with torch.no_grad():
        if drew_on is not None:
            with other_numbers(drew_on):
                check_reproducible(golden, again())
        if written:
            check_weights_stay(golden, again(), written)
        if changed:
            check_state_stays(golden, again(), changed)
