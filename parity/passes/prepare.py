"""Build a pair's modules, weights and inputs from a seed, and run the golden pass.

All precisions of one dtype share the rounded weights and inputs and the golden pass. They are kept for all seeds,
together with what is computed from them, until a comparison of another case or size begins, because pytest runs a
case's precisions one after another, each with all seeds.
"""

from __future__ import annotations

import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case import transfer
from parity.case.case import Case, Pair, Rng, draw_inputs
from parity.case.formats import checked_formats
from parity.case.map_check import untied
from parity.case.validate import (
    CheckedSize,
    parameters_kept_unquantized,
    parameters_outside_te,
    roles_of_parameters,
)
from parity.case.weight_map import WeightMap, linear_part, names
from parity.case.weight_map import names as names_in
from parity.machine import devices
from parity.numerics.formats import LayerFormats, Role
from parity.numerics.freedom import Made
from parity.numerics.golden import golden_device, in_fp64
from parity.numerics.storing import PastAmaxes
from parity.passes.draws import Lookups, ScaledLookups, draws_of, forget_draws, probe, reweigh
from parity.passes.nominal_clock import Clock
from parity.passes.one_pass import Pass, outputs_of, positional_names, run
from parity.passes.refusals import (
    check_golden,
    check_inputs_fit,
    check_reproducible,
    check_state_stays,
    check_weights_fit,
    check_weights_stay,
)
from parity.result import Kind
from parity.te.state import dequantized_tensor, is_quantized, moved, over_quantization
from parity.trace.calls import Products, tracing
from parity.trace.digests import switched_off
from parity.trace.effects import RandomState, attributes_of, changed_attributes, other_numbers
from parity.trace.private_functions import clips_recorded
from parity.trace.trace import Trace, optimizers_recorded
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Kernels

# Compare the weights that a candidate already holds with those that the weight map gives.


# The quantization error is partly chance, because a value between two of the format's may be rounded to either.
_QUANTIZATIONS = 1.5
_ROUNDED_TWICE = 1.01  # from FP32 to BF16, and from there to FP16
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Held:
    """The parameters that a candidate holds, by name.

    Attributes:
        alike: those that agree with the map up to rounding, without quantized ones.
        unlike: those that do not.
    """

    alike: dict[str, Tensor] = field(default_factory=dict)
    unlike: dict[str, Tensor] = field(default_factory=dict)


def held_weights(pair: Pair) -> Held:
    """Compare the candidate's weights with those that the map makes of the reference's weights.

    A port may hold in BF16 what its reference holds in FP32, or the reverse. If one parameter of an entry of the map
    differs by more than such a rounding, that parameter is unlike, and no parameter of the entry is alike.

    Args:
        pair: the pair as it was given, but with the reference's weights cast to FP64.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in pair.candidate.named_parameters()}
    shapes = transfer.parameter_shapes(pair.candidate)
    expected = transfer.to_candidate(pair.weights, reference, shapes)
    # A loader may round a gain before it subtracts 1.
    linear = {linear_part(left): right for left, right in pair.weights.items()}
    unshifted = transfer.to_candidate(linear, reference, shapes)
    precise = _find_lossless_dtype(reference.values())
    held_in = {
        dtype: _find_lossless_dtype(x for x in parameters.values() if x.dtype is dtype and not is_quantized(x))
        for dtype in {x.dtype for x in parameters.values()}
    }

    def fits(name: str) -> bool:
        held = parameters[name]
        if is_quantized(held):
            return over_quantization(held, expected[name]) <= _QUANTIZATIONS
        dtype = max(precise, held_in[held.dtype], key=lambda dtype: torch.finfo(dtype).eps)
        return _is_rounded(held, expected[name], unshifted[name], dtype)

    alike: dict[str, Tensor] = {}
    unlike: dict[str, Tensor] = {}
    for right in pair.weights.values():
        of_entry = list(names(right))
        differing = [name for name in of_entry if not fits(name)]
        unlike.update((name, dequantized_tensor(parameters[name]).clone()) for name in differing)
        if not differing:
            alike.update((name, parameters[name]) for name in of_entry if not is_quantized(parameters[name]))
    return Held(alike, unlike)


def _find_lossless_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the 16-bit dtype that holds all of the tensors' values, or FP32 if neither does or all are constant."""
    some = [x for x in tensors if x.numel() and bool((x != x.flatten()[0]).any())]
    fitting = (dtype for dtype in _NARROW if some and all(torch.equal(x.to(dtype).to(x.dtype), x) for x in some))
    return next(fitting, torch.float32)


def _is_rounded(held: Tensor, expected: Tensor, unshifted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether each element's error is at most its own rounding plus that of the number before the shift."""
    info = torch.finfo(dtype)
    before_shift = unshifted.abs() * (unshifted != expected)
    size = (expected.abs() + before_shift).clamp_min(info.tiny)
    return bool(((held.double() - expected).abs() <= _ROUNDED_TWICE * info.eps / 2 * size).all())


# Cast and move trees of tensors and modules, and measure their memory.


def size_in_bytes(tree: Any) -> int:
    """Return the memory that the tree's tensors take together."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the module itself, with its floating-point tensors in another dtype.

    Complex buffers stay as they are: ``module.to(dtype)`` would drop their imaginary part.
    """
    casts: dict[torch.dtype, Callable[[], nn.Module]] = {
        torch.float64: module.double,
        torch.float32: module.float,
        torch.bfloat16: module.bfloat16,
        torch.float16: module.half,
    }
    return casts[dtype]()


def cast(inputs: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Return the inputs with floating-point tensors in ``dtype``, and all tensors on the device if one is given."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), inputs)


def on_device(tensors: Any, device: torch.device) -> Any:
    """Return the same tree with every tensor on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device), tensors)


# Build a pair's modules, weights and inputs from one seed, before anything runs.


# The size of the noise on parameters whose elements are all equal; 0.1 keeps a norm's gain of 1 well-conditioned.
CONSTANT_NOISE = 0.1


def build(case: Case, checked: CheckedSize, seed: int, kernels: Kernels) -> Pair:
    """Return the pair with modules that are initialised from the seed, on the kernels' device.

    The modules are in training mode unless the pair asks for evaluation mode. Declared dropout is switched off.

    Raises:
        UserError: if one of the modules has no values.
    """
    pair, _ = build_as_declared(case, checked, seed, kernels)
    if pair.parallel.dropout:
        for part in (pair.reference, pair.candidate):
            switched_off(part)
    return pair


def build_as_declared(case: Case, checked: CheckedSize, seed: int, kernels: Kernels) -> tuple[Pair, RandomState]:
    """Return the pair with its dropout on, and the state of the random generators after its function.

    Raises:
        UserError: as for ``build``.
    """
    on_gpu = kernels.device.type == "cuda"
    with torch.random.fork_rng(devices=[kernels.device] if on_gpu else []):
        # Without a GPU, PyTorch would record each seed, with the stack, in case a GPU appears later.
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        with draws_of((case.whole, checked), seed, kernels).repeated():
            pair = case.build(kernels.te, checked.size)
        left = RandomState.now(kernels.device)
    _check_has_values("reference", pair.reference)
    _check_has_values("candidate", pair.candidate)
    pair.reference.to(kernels.device).train(not pair.evaluation)
    moved(pair.candidate, device=kernels.device).train(not pair.evaluation)
    for part in (*pair.reference.modules(), *pair.candidate.modules()):
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False  # a dense gradient has the same numbers
    return (replace(pair, evaluation=True) if case.reweighed else pair), left


@lru_cache(maxsize=8)
def reweighed(case: Case, checked: CheckedSize, kernels: Kernels) -> Case | None:
    """Return the case with probing weights in place of those that it draws, or None if it draws none.

    Weights that another seed leaves as they are have been loaded, or mean something, so they stay. If there are none of
    these, constants such as a norm's ones change as well.
    """
    if not (case.probe and case.vary_constants) or case.is_step or case.ranks or case.cotangents:
        return None
    pair = build(case, checked, 0, kernels)
    others = dict(build(case, checked, 1, kernels).reference.named_parameters())
    drawn, constant, fixed = set[str](), set[str](), set[str]()
    for name, x in pair.reference.named_parameters():
        if x.numel() > 1 and x.is_floating_point():
            is_drawn = name in others and not torch.equal(x, others[name])
            (drawn if is_drawn else constant if bool((x == x.flatten()[0]).all()) else fixed).add(name)
    if pair.fill is False or not drawn:
        return None
    return replace(case, probe=False, part_of=case, reweighed=frozenset(drawn if fixed else drawn | constant))


def _check_has_values(role: str, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"the {role}'s {name} is on the meta device, which holds no values; build the {role} on the CPU or the "
                "GPU"
            )


def part_that_raised(error: BaseException) -> str:
    """Return the part of a pair that raised before any of its modules ran, or an empty string if none did."""
    running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    parts = {Case.build: "the factory", draw_inputs: "inputs", build: "moving the modules to the device"}
    return next((part for function, part in parts.items() if function.__code__ in running), "")


def vary_constants(reference: nn.Module, rng: Rng) -> None:
    """Add noise to parameters whose elements are all equal, to expose any that is never copied to the candidate."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(rng.normal(*parameter.shape, std=CONSTANT_NOISE).to(parameter.device))


def share_rounded_weights(
    pair: Pair, dtype: torch.dtype, held: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Round the weights in the candidate's layout, and give the reference the same numbers in FP64.

    Args:
        pair: its reference is in FP64.
        dtype: the dtype to which the weights are rounded.
        held: parameters of the candidate to use instead of the mapped ones; the values of quantized ones are not
            rounded.

    Returns:
        The candidate's parameters by name, in the dtype or quantized. The candidate itself is not changed.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    candidate_shapes = transfer.parameter_shapes(pair.candidate)
    reference_shapes = transfer.parameter_shapes(pair.reference)
    candidate: dict[str, Tensor] = {}
    for left, right in pair.weights.items():  # one at a time, because all in FP64 would be the peak of a case's memory
        entry = {left: right}
        mapped = transfer.to_candidate(entry, reference, candidate_shapes)
        check_weights_fit(mapped, dtype)
        rounded = {name: _round_weight(held.get(name, tensor), dtype) for name, tensor in mapped.items()}
        candidate |= rounded
        doubled = {name: dequantized_tensor(tensor, torch.float32).double() for name, tensor in rounded.items()}
        with torch.no_grad():
            for name, tensor in transfer.to_reference(entry, doubled, reference_shapes).items():
                reference[name].copy_(tensor)
    return candidate


def _round_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if is_quantized(weight) else weight.to(dtype)


def rounded_inputs(pair: Pair, checked: CheckedSize, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """Return the pair's inputs for this seed, in the dtype and on the device."""
    drawn = draw_inputs(pair, checked.size, Rng(seed))
    check_inputs_fit(drawn, dtype)
    return cast(tree_map_only(Tensor, lambda x: x.to(device), drawn), dtype)


# Keep results that are needed again, and know how much memory they take.


Value = TypeVar("Value")


@dataclass
class _Entry:
    value: Any
    size: Callable[[Any], int]


@dataclass
class Cache:
    """A cache that computes each value when it is first requested."""

    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    _subject: Hashable = None

    def get(self, key: Hashable, compute: Callable[[], Value], size: Callable[[Value], int] = lambda _: 0) -> Value:
        """Return the value for this key, and compute it if it is not kept.

        Args:
            key: identifies the value.
            compute: returns the value.
            size: returns its size in bytes; called whenever the cache's memory is requested, because a value may grow.
        """
        if key not in self._entries:
            self._entries[key] = _Entry(compute(), size)
        value: Value = self._entries[key].value
        return value

    def take(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value for this key and remove it, or compute it if it is not kept."""
        return self._entries.pop(key).value if key in self._entries else compute()

    def group(self, name: str, subject: Hashable) -> Cache:
        """Return the cache for one subject, such as a rounding, and drop that for another subject under this name."""
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
        """The memory that all values take, by their ``size`` functions."""
        return sum(entry.size(entry.value) for entry in self._entries.values())


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of golden's forward pass, in FP64.

    Attributes:
        trace: all calls of the reference.
        products: its GEMMs.
    """

    trace: Trace
    products: Products

    @staticmethod
    @contextmanager
    def recorded(reference: nn.Module, into: list[Calls]) -> Iterator[None]:
        """Record one forward pass within the context, and append its calls afterwards."""
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
        call: how to call the reference, or None to call it directly.
        inputs: the inputs as the pair returns them, rounded, in the dtype and on the device.
        input_names: names of the positional inputs, as the reference names them.
        weights: the pair's weight map.
        candidate_weights: the candidate's parameters by name, in the dtype, as the map gives them.
        cotangents: the gradient with respect to each output, by the output's name, in FP64, rounded to the dtype.
        golden: the reference's pass in FP64.
        probe: the probing inputs, like ``inputs``, for ``probe_call``; None if the case has no probe, or if they would
            equal the inputs.
        probed: golden outputs for ``probe``, in FP64.
        lookups: the lookups in embedding tables on the probing inputs.
        outside_te: names of the reference's parameters that the candidate holds in plain PyTorch modules.
        roles: the roles of TE's modules that hold the others, by name, if TE knows roles.
        unquantized: names of the reference's parameters in TE modules that the pair asks to quantize nothing.
        changed: by weights of the candidate's, what debug features changed of their layers' formats when it ran last.
        formats: the formats that the pair asks for, by patterns of modules' names.
        unlike: the candidate's parameters that differ from what the map gives, by name.
        apart: remarks on parameters that training will move apart: those that are tied in the reference but not in the
            candidate, and those that the reference lacks.
        evaluation: whether both modules are in evaluation mode, so that no pass has gradients.
        cache: results that are computed from this and needed again. At first it holds two things that are removed when
            they are used: the ``calls`` of golden's pass, if it ran on the kernels' device, which hold everything that
            the pass computed; and the ``pair``, whose candidate has not run.
        clock: counts the work of a search for a cause.
        past: the amaxes of earlier steps, if this is a step of a training with delayed scaling.
        wide: kinds and names of the outputs that the candidate returns in a wider dtype, such as a loss in FP32.
        scales_lookups: whether ``call`` scales the rows of embedding tables, as on the probing inputs.
        made: the choices that the port was seen to make, which the model follows.
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
    roles: Mapping[str, Role] = field(default_factory=dict)
    unquantized: frozenset[str] = frozenset()
    changed: dict[str, LayerFormats] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    unlike: dict[str, Tensor] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    evaluation: bool = False
    cache: Cache = field(default_factory=Cache)
    clock: Clock = field(default_factory=Clock)
    wide: frozenset[tuple[Kind, str]] = frozenset()
    past: PastAmaxes = field(default_factory=PastAmaxes)
    scales_lookups: bool = False
    made: tuple[Made, ...] = ()

    def note_changed(self, formats: Mapping[str, LayerFormats]) -> None:
        """Note what debug features changed of the candidate, and forget what was modelled without that."""
        if formats != self.changed:
            self.changed.clear()
            self.changed.update(formats)
            for kept in ("models", "weights read"):
                self.cache.group(kept, None)

    @property
    def quantized(self) -> Iterator[str]:
        """Yield the names of the reference's parameters that the candidate holds quantized, with the same values."""
        for left, right in self.weights.items():
            if all(is_quantized(self.candidate_weights[name]) for name in names_in(right)):
                yield from names_in(left)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which the port holds weights and activations."""
        return next((tensor.dtype for tensor in self.candidate_weights.values()), torch.float32)

    @property
    def bytes(self) -> int:
        """The memory that this takes, including its cache."""
        own = [list(self.reference.parameters()), *vars(self).values(), vars(self.golden)]
        return size_in_bytes(own) + self.cache.bytes

    @property
    def probe_call(self) -> Callable[..., Any] | None:
        """Return how to call the reference on the probing inputs, or None."""
        return ScaledLookups(self.dtype, self.evaluation).around(self.call) if self.lookups else self.call

    def on_probes(self) -> Prepared:
        """Return a copy that has the probing inputs as its inputs, and only their outputs as golden tensors."""
        golden, scales = Pass(self.probed, {}, {}, ()), bool(self.lookups)
        return replace(self, inputs=self.probe, call=self.probe_call, golden=golden, scales_lookups=scales)


def calls_of(prepared: Prepared) -> Calls:
    """Return the calls of the reference's forward pass in FP64, which is repeated to record them."""
    prepared.reference.double()
    calls: list[Calls] = []

    def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Only the module's own calls are recorded, not the copies that a pass makes of its inputs.
        with Calls.recorded(module, calls):
            return (prepared.call or nn.Module.__call__)(module, *args, **kwargs)

    with torch.no_grad(), in_fp64():
        outputs_of(prepared.reference, recorded, cast(prepared.inputs, torch.float64))
    return calls[0]


def kept_calls(prepared: Prepared) -> Calls:
    """Return the same, which the cache holds until ``judge.directions`` takes them."""
    return prepared.cache.get("calls", lambda: calls_of(prepared), lambda one: size_in_bytes(one.trace.tensors))


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
    the map does arithmetic (for example a gamma that is stored minus 1).

    Raises:
        NothingToJudge: if a comparison would pass whatever the candidate computed.
    """
    key = _Key(case, checked, dtype, seed, kernels)
    if key not in _KEPT:
        _make_room(key)
        _KEPT[key] = _prepare_case(*key)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def release(case: Case, checked: CheckedSize, dtype: torch.dtype, seed: int, kernels: Kernels) -> None:
    """Drop what ``prepare`` keeps for these arguments."""
    _KEPT.pop(_Key(case, checked, dtype, seed, kernels), None)


def forget() -> None:
    """Drop everything that is kept."""
    _KEPT.clear()
    forget_draws()


def _make_room(coming: _Key) -> None:
    """Drop other cases and sizes, a third dtype, and then the oldest entries if they take too much memory.

    Two dtypes are kept, because FP16 comes between BF16 and FP8, whose dtype is BF16 as well.
    """
    last = next((key.dtype for key in reversed(_KEPT) if key.dtype is not coming.dtype), None)
    for key in list(_KEPT):
        other = key.case.whole is not coming.case.whole or key.checked != coming.checked
        if other or key.dtype not in (coming.dtype, last):
            del _KEPT[key]
    free = devices.free()
    if free is None:
        return
    while len(_KEPT) > 1 and sum(one.bytes for one in _KEPT.values()) > devices.share_to_keep(free):
        _KEPT.popitem(last=False)


def _prepare_case(case: Case, checked: CheckedSize, dtype: torch.dtype, seed: int, kernels: Kernels) -> Prepared:
    pair = build(case, checked, seed, kernels)
    apart = untied(pair.weights, pair.reference, pair.candidate)
    pair.reference.double()
    held = Held()
    if pair.fill is False:
        held = held_weights(pair)
    else:
        reweigh(pair.reference, case.reweighed, Rng(seed, "probing weights"))
        if case.vary_constants:
            vary_constants(pair.reference, Rng(seed, "weights"))
    candidate_weights = share_rounded_weights(pair, dtype, {**held.alike, **case.held})
    drawn = draws_of((case.whole, checked), seed, kernels)
    with drawn.repeated():
        inputs = rounded_inputs(pair, checked, dtype, seed, kernels.device)
    cotangents: dict[str, Tensor] = {}

    def draw_cotangents(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rng = Rng(seed, "cotangents")
        with drawn.repeated(), torch._C.DisableTorchFunction():  # in golden's pass, torch.empty would return FP64
            for name, output in outputs.items():
                if case.cotangents:
                    cotangents[name] = case.cotangents[name].to(output.device).double()
                    continue
                drawn_like = torch.ones(output.shape) if case.is_step else rng.normal(*output.shape)
                cotangents[name] = drawn_like.to(output.device, dtype).double()
        return cotangents

    calls: list[Calls] = []
    names = positional_names(pair.reference, pair.call_reference, inputs)
    faster = golden_device(kernels.device).device
    pair.reference.to(faster)
    with in_fp64():
        exact = cast(inputs, torch.float64, faster)
        is_filtered = faster == kernels.device and not case.is_step  # a step's only output is its loss, one number
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
        _check_golden_pass(golden, again, faster if drew else None, written, changed_attributes(pair.reference, state))
    probing, probed, lookups = (
        _probe_reference(pair, inputs, dtype, seed, faster) if case.probe else (None, {}, Counter())
    )
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
        roles_of_parameters(pair),
        parameters_kept_unquantized(pair),
        {},
        checked_formats(pair.formats),
        held.unlike,
        apart,
        evaluation=pair.evaluation,
        cache=cache,
    )


def _probe_reference(
    pair: Pair, inputs: Any, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[Any, dict[str, Tensor], Lookups]:
    """Return the probing inputs, their golden outputs and lookups, or nothing if they would equal the inputs."""
    probing = cast(probe(cast(inputs, torch.float32), Rng(seed, "probe")), dtype)
    scaled = ScaledLookups(dtype, pair.evaluation)
    with torch.no_grad(), in_fp64():
        probed = outputs_of(pair.reference, scaled.around(pair.call_reference), cast(probing, torch.float64, device))
    if not scaled.seen and all(map(_is_same_leaf, tree_leaves(probing), tree_leaves(inputs))):
        return None, {}, Counter()
    return probing, probed, scaled.seen


def _is_same_leaf(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or torch.equal(one, other)


def _check_complete(reference: nn.Module, known: Container[str]) -> None:
    """Raise an error if the first call created parameters, because these were not given mapped weights."""
    new = [name for name, _ in reference.named_parameters() if name not in known]
    if new:
        raise UserError(
            f"the reference creates its parameter {new[0]} in its first call, which is too late for the weight map; "
            "create it in the constructor, or call the reference once in the factory"
        )


def _check_golden_pass(
    golden: Pass,
    again: Callable[[], dict[str, Tensor]],
    drew_on: torch.device | None,
    written: Sequence[str],
    changed: Sequence[str],
) -> None:
    """Check that there is something to judge, and that another pass of the reference would be the same.

    Args:
        golden: the golden pass.
        again: runs another pass and returns its outputs.
        drew_on: the device on which the golden pass drew random numbers; None if it drew none.
        written: names of the parameters that it wrote to.
        changed: names of the modules' attributes that it changed.

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
