"""Build a pair's modules, weights and inputs at one seed, before anything runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case import transfer
from parity.case.case import Case, Pair, Rng, draw_inputs
from parity.case.validate import CheckedSize
from parity.case.weight_map import linear_part, names
from parity.passes.draws import draws_of
from parity.passes.refusals import check_inputs_fit, check_weights_fit
from parity.te import Kernels
from parity.te.state import dequantized_tensor, is_quantized, moved, over_quantization
from parity.trace.digests import switched_off
from parity.trace.effects import RandomState
from parity.user_error import UserError

# The weights that a candidate already holds: which of them are what the map says, and which are not.


# An error of quantization is partly chance: a value between two of the format's may be held as either of them.
_QUANTIZATIONS = 1.5
_ROUNDED_TWICE = 1.01  # from FP32 to BF16, and from there to FP16
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Held:
    """The parameters that a candidate holds, by name.

    Attributes:
        alike: those that are what the map says, up to rounding; without quantized ones.
        unlike: those that are not.
    """

    alike: dict[str, Tensor] = field(default_factory=dict)
    unlike: dict[str, Tensor] = field(default_factory=dict)


def held_weights(pair: Pair) -> Held:
    """Compare the candidate's weights with what the map makes of the reference's.

    A port may hold in BF16 what its reference holds in FP32, or the reverse. If one parameter of an entry of the map
    differs by more than such a rounding, that parameter is unlike, and none of its entry is alike.

    Args:
        pair: its reference is in FP64, with the weights that it was given; its candidate is as it was given.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in pair.candidate.named_parameters()}
    shapes = transfer.parameter_shapes(pair.candidate)
    expected = transfer.to_candidate(pair.weights, reference, shapes)
    # A loader may round a gain before it takes 1 from it.
    linear = {linear_part(left): right for left, right in pair.weights.items()}
    unshifted = transfer.to_candidate(linear, reference, shapes)
    precise = _holds(reference.values())
    held_in = {
        dtype: _holds(x for x in parameters.values() if x.dtype is dtype and not is_quantized(x))
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


def _holds(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the 16-bit dtype that holds all of their values; FP32 if neither does, or if all are constants."""
    some = [x for x in tensors if x.numel() and bool((x != x.flatten()[0]).any())]
    fitting = (dtype for dtype in _NARROW if some and all(torch.equal(x.to(dtype).to(x.dtype), x) for x in some))
    return next(fitting, torch.float32)


def _is_rounded(held: Tensor, expected: Tensor, unshifted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether each element is off by no more than its own rounding, and that of the number it
    was shifted from, if any.
    """
    info = torch.finfo(dtype)
    before_shift = unshifted.abs() * (unshifted != expected)
    size = (expected.abs() + before_shift).clamp_min(info.tiny)
    return bool(((held.double() - expected).abs() <= _ROUNDED_TWICE * info.eps / 2 * size).all())


# Trees of tensors and modules in another dtype or on another device, and how much memory they take.


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
    """Return the inputs with floating-point tensors in ``dtype``, and all on the device, if one is given."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), inputs)


def on_device(tensors: Any, device: torch.device) -> Any:
    """Return the same tree with every tensor on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device), tensors)


# A pair with its modules, weights and inputs at one seed, before anything runs.


# The noise on parameters whose elements are all equal; a tenth keeps a norm's gain of 1 well-conditioned.
CONSTANT_NOISE = 0.1


def build(case: Case, checked: CheckedSize, seed: int, kernels: Kernels) -> Pair:
    """Return the pair, its modules initialised from the seed, on the kernels' device, in training mode or, if it says
    so, in evaluation mode; without dropout, if it says that it has some.

    Raises:
        UserError: if one of them has no values.
    """
    pair, _ = build_as_declared(case, checked, seed, kernels)
    if pair.parallel.dropout:
        for part in (pair.reference, pair.candidate):
            switched_off(part)
    return pair


def build_as_declared(case: Case, checked: CheckedSize, seed: int, kernels: Kernels) -> tuple[Pair, RandomState]:
    """Return the pair with the dropout that it has, and the state in which its function left the random numbers.

    Raises:
        UserError: as ``build``.
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
    return pair, left


def _check_has_values(role: str, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"the {role}'s {name} is on the meta device, where it has no values; build the {role} on the CPU or "
                "the GPU"
            )


def part_that_raised(error: BaseException) -> str:
    """Return which part of a pair raised before any of its modules ran; empty if none did."""
    running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    parts = {Case.build: "the factory", draw_inputs: "inputs", build: "moving the pair's modules to the device"}
    return next((part for function, part in parts.items() if function.__code__ in running), "")


def vary_constants(reference: nn.Module, rng: Rng) -> None:
    """Add noise to parameters whose elements are all equal, so that one that was never copied shows."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(rng.normal(*parameter.shape, std=CONSTANT_NOISE).to(parameter.device))


def share_rounded_weights(
    pair: Pair, dtype: torch.dtype, held: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Round the weights in the candidate's layout, and give the reference, in FP64, the same numbers.

    Args:
        pair: its reference is in FP64.
        dtype: the dtype to which they are rounded.
        held: parameters of the candidate that take the place of what the map makes of the reference's; the values of
            quantized ones are not rounded.

    Returns:
        The candidate's parameters by name, in the dtype or quantized; the candidate itself is left as it is.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    candidate_shapes = transfer.parameter_shapes(pair.candidate)
    reference_shapes = transfer.parameter_shapes(pair.reference)
    candidate: dict[str, Tensor] = {}
    for left, right in pair.weights.items():  # one after the other, since all in FP64 are the most that a case holds
        entry = {left: right}
        mapped = transfer.to_candidate(entry, reference, candidate_shapes)
        check_weights_fit(mapped, dtype)
        rounded = {name: _rounded(held.get(name, tensor), dtype) for name, tensor in mapped.items()}
        candidate |= rounded
        doubled = {name: dequantized_tensor(tensor, torch.float32).double() for name, tensor in rounded.items()}
        with torch.no_grad():
            for name, tensor in transfer.to_reference(entry, doubled, reference_shapes).items():
                reference[name].copy_(tensor)
    return candidate


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if is_quantized(weight) else weight.to(dtype)


def rounded_inputs(pair: Pair, checked: CheckedSize, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """Return the pair's inputs of this seed, in the dtype, on the device."""
    drawn = draw_inputs(pair, checked.size, Rng(seed))
    check_inputs_fit(drawn, dtype)
    return cast(tree_map_only(Tensor, lambda x: x.to(device), drawn), dtype)
