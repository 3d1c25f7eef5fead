"""A pair with its modules, weights and inputs, as they are at one seed, before anything runs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.case import Case, Pair, draw_inputs
from parity.cast import cast
from parity.declaring.validate import CheckedSize
from parity.draws import draws_of
from parity.inputs import Rng
from parity.judgeable import check_inputs_fit, check_weights_fit
from parity.te import Kernels
from parity.te_state.quantized_parameters import moved
from parity.user_error import UserError
from parity.weights import transfer

# Noise on parameters whose elements are all equal; a tenth keeps a norm's gain of 1 well-conditioned.
CONSTANT_NOISE = 0.1


def build(case: Case, checked: CheckedSize, seed: int, kernels: Kernels) -> Pair:
    """The pair, its modules initialised from the seed, on the kernels' device, in training mode.

    Raises:
        UserError: if one of them has no values.
    """
    on_gpu = kernels.device.type == "cuda"
    with torch.random.fork_rng(devices=[kernels.device] if on_gpu else []):
        # Without a GPU PyTorch would note each seed, and the stack, for the time that there is one.
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        with draws_of((case.whole, checked), seed, kernels).repeated():
            pair = case.build(kernels.te, checked.size)
    _check_has_values("reference", pair.reference)
    _check_has_values("candidate", pair.candidate)
    pair.reference.to(kernels.device).train()
    moved(pair.candidate, device=kernels.device).train()
    for part in (*pair.reference.modules(), *pair.candidate.modules()):
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False  # how a gradient is stored changes none of its numbers
    return pair


def _check_has_values(role: str, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"the {role}'s {name} is on the device meta, where it has no values; build the {role} on the CPU or "
                "the GPU"
            )


def part_that_raised(error: BaseException) -> str:
    """Which part of a pair raised before any of its modules ran; empty if none did."""
    running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    parts = {Case.build: "the factory", draw_inputs: "inputs", build: "moving the pair's modules to the device"}
    return next((part for function, part in parts.items() if function.__code__ in running), "")


def vary_constants(reference: nn.Module, rng: Rng) -> None:
    """Add noise to the parameters whose elements are all equal, so that one that was never copied shows."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(rng.normal(*parameter.shape, std=CONSTANT_NOISE).to(parameter.device))


def share_rounded_weights(
    pair: Pair, dtype: torch.dtype, held: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Round the weights in the candidate's layout, and give the reference, in FP64, what they stand for there.

    Args:
        pair: its reference in FP64.
        dtype: to which they are rounded.
        held: parameters of the candidate that stand in the place of what the map makes of the reference's.

    Returns:
        The candidate's parameters by name, in the dtype; the candidate itself is left as it is.
    """
    reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
    shapes = transfer.parameter_shapes(pair.candidate)
    mapped = transfer.to_candidate(pair.weights, reference, shapes)
    check_weights_fit(mapped, dtype)
    candidate = {name: held.get(name, tensor).to(dtype) for name, tensor in mapped.items()}
    shared = transfer.to_reference(
        pair.weights,
        {name: tensor.double() for name, tensor in candidate.items()},
        {name: tuple(tensor.shape) for name, tensor in reference.items()},
    )
    with torch.no_grad():
        for name, tensor in shared.items():
            reference[name].copy_(tensor)
    return candidate


def rounded_inputs(pair: Pair, checked: CheckedSize, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """The pair's inputs of this seed, in the dtype, on the device."""
    drawn = draw_inputs(pair, checked.size, Rng(seed))
    check_inputs_fit(drawn, dtype)
    return cast(tree_map_only(Tensor, lambda x: x.to(device), drawn), dtype)
