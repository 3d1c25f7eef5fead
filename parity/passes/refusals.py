"""Refuse comparisons that would prove nothing, and list what a passed comparison leaves unproven."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from parity.case.weight_map import WeightMap, names
from parity.numerics.errors import GoldenTensors, all_finite, difference, max_abs, relative_l2
from parity.result import PROBED, Kind, ProvesNothing, TensorResult
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.passes.one_pass import Pass

Tensors = dict[tuple[Kind, str], Tensor]

# On the calibrated ports, the gradient of a quantized layer has at least 0.7 times the model's error, and that of an
# unquantized layer 0.15 times.
_TOO_EXACT = 0.35
_ENOUGH_ELEMENTS = 1024
# The first number is the least error of a model that rounds to TF32. With fewer elements than the second, an error may
# be small by chance. A right port has at least half of the error that TF32 costs, and a hundredth without TF32; below
# the third number, a share of that error, a port does not use TF32.
_COSTS_OF_TF32, _NO_CHANCE, _WITHOUT_TF32 = 2.0**-15, 64, 0.1
SAME_IN_FP64 = 1e-9  # share of a tensor's norm: far below the error of any precision, far above FP64's rounding

LOOKS_UP_ELSE = (
    "not compared on probing inputs, because the candidate looks up other rows of embedding tables than the reference"
)
LOSES_ALL = (
    "loses all of these numbers, so a candidate that returns 0 would pass; nothing can be compared at this precision: "
    "scale the values, or leave out this precision"
)
WITHIN = "every tensor is within its tolerance, but the port is still wrong"


class NothingToJudge(UserError):
    """Raised if a comparison on these inputs or at this precision would pass whatever the candidate computed."""


def check_inputs_fit(drawn: Any, dtype: torch.dtype) -> None:
    """Check that the inputs survive rounding.

    Args:
        drawn: as a pair's ``inputs`` returns them.
        dtype: the dtype to which they are rounded.

    Raises:
        NothingToJudge: if an input has no values, if finite elements are beyond the dtype's range, or if all elements
            round to zero.
    """
    for path, value in tree_flatten_with_path(drawn)[0]:
        what = f"the input{keystr(path)}"
        if isinstance(value, Tensor) and value.is_meta:
            raise NothingToJudge(f"{what} is on the meta device, which holds no values; draw it with rng")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        _check_no_overflow(what, value, dtype)
        largest = max_abs(value)
        if largest > 0.0 and max_abs(value.to(dtype)) == 0.0:
            raise NothingToJudge(
                f"every element of {what} rounds to 0 in {_name_dtype(dtype)}, because the largest is only "
                f"{largest:.2g}; nothing can be compared at this precision: draw larger inputs, or leave out this "
                "precision"
            )


def check_weights_fit(weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Check that no finite weight is beyond the dtype's range.

    Args:
        weights: the candidate's weights by name, before rounding.
        dtype: the dtype to which they are rounded.

    Raises:
        NothingToJudge: if one is.
    """
    for name, tensor in weights.items():
        _check_no_overflow(f"the weights for TE's {name}", tensor, dtype)


def _check_no_overflow(what: str, value: Tensor, dtype: torch.dtype) -> None:
    if all_finite(value.to(dtype)):
        return
    lost = value.isfinite() & ~value.to(dtype).isfinite()
    if lost.any():
        raise NothingToJudge(
            f"{int(lost.sum())} of {value.numel()} elements of {what} overflow {_name_dtype(dtype)}: they reach "
            f"{value[lost].abs().max():.2g}, but its largest number is {torch.finfo(dtype).max:.6g}; nothing can be "
            "compared at this precision: scale the values down, or leave out this precision"
        )


def check_golden(golden: Pass) -> None:
    """Check that the reference computes something that a wrong candidate could get wrong.

    Raises:
        NothingToJudge: if it returns no floating-point tensor, only empty ones, or if all outputs and gradients are 0.
    """
    outputs = golden.outputs.values()
    if not outputs:
        raise NothingToJudge(
            f"the reference returns no floating-point tensor{f' but {golden.instead}' if golden.instead else ''}, so "
            "there is nothing to compare; return one from call_reference and call_candidate"
        )
    if not any(output.numel() for output in outputs):
        raise NothingToJudge(
            "every output of the reference is empty, so any candidate would pass; give inputs with at least one element"
        )
    tensors = (*outputs, *golden.input_gradients.values(), *golden.weight_gradients.values())
    if not any(max_abs(tensor) for tensor in tensors):
        raise NothingToJudge(
            "every output and gradient of the reference is 0 on these inputs, so a candidate that computes nothing "
            "would pass; give other inputs or weights"
        )


def check_reproducible(golden: Pass, again: Mapping[str, Tensor]) -> None:
    """Check that the reference's outputs do not depend on the random numbers that it draws.

    Args:
        golden: the golden pass.
        again: the reference's outputs in FP64 with other random numbers.

    Raises:
        NothingToJudge: if an output differs.
    """
    for name, moved in _find_moved_outputs(golden, again):
        raise NothingToJudge(
            f"the reference draws random numbers (PAR253 not-reproducible): with other random numbers its {name} "
            f"changes by {moved:.2g} of its norm, so nothing can be compared with it; switch off the randomness in "
            "both modules (dropout, stochastic depth, added noise), or draw the numbers once and give them to both as "
            "an input"
        )


def check_weights_stay(golden: Pass, again: Mapping[str, Tensor], written: Sequence[str]) -> None:
    """Check that the reference does not train itself in its forward pass, because each pass needs the same weights.

    Args:
        golden: the golden pass.
        again: the reference's outputs in FP64 with the weights that the golden pass left.
        written: names of the parameters that the golden pass wrote to.

    Raises:
        NothingToJudge: if an output differs.
    """
    for name, moved in _find_moved_outputs(golden, again):
        raise NothingToJudge(
            f"the reference changes its parameter {written[0]} in place, so that the next pass starts from other "
            f"weights: its {name} changes by {moved:.2g} of its norm; in each pass, let both modules train a fresh "
            "copy, such as copy.deepcopy(self.layer)"
        )


def check_state_stays(golden: Pass, again: Mapping[str, Tensor], changed: Sequence[str]) -> None:
    """Check that the reference's outputs do not depend on its earlier calls.

    Args:
        golden: the golden pass.
        again: the outputs of another pass.
        changed: names of the attributes that the golden pass changed.

    Raises:
        NothingToJudge: if an output differs.
    """
    if golden.outputs.keys() != again.keys() or list(_find_moved_outputs(golden, again)):
        raise NothingToJudge(
            f"the reference remembers its last call in {', '.join(changed)}: called again on the same inputs, it "
            "returns something else, so nothing can be compared with it; reset that at the start of each call, in "
            "call_reference and call_candidate"
        )


def _find_moved_outputs(golden: Pass, again: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield the names of the outputs that differ in another pass, and by which share of their norm."""
    for name, output in golden.outputs.items():
        moved = math.inf
        if name in again and again[name].shape == output.shape:
            by = torch.linalg.vector_norm(difference(again[name], output)).item()
            moved = relative_l2(by, torch.linalg.vector_norm(output).item())
        if moved > SAME_IN_FP64:
            yield name, moved


def judgeable_golden(golden: GoldenTensors, models: Sequence[Tensors], candidate: Tensors) -> GoldenTensors:
    """Return the golden tensors that the candidate can be judged by.

    These leave out outputs on probing inputs that the candidate lacks, or for which a faithful computation overflows:
    probing inputs are larger than the user's own, so a dtype with a small range may overflow only on them. They also
    leave out gradients of inputs that the candidate lacks, as a training step does that copies its inputs into buffers.

    Args:
        golden: the reference's tensors.
        models: the tensors of the rounding models.
        candidate: the candidate's tensors.
    """
    return {
        key: truth
        for key, truth in golden.items()
        if (key[0] != PROBED and (key in candidate or key[0] != "input gradient"))
        or (key in candidate and _can_be_judged(truth.exact, [model[key] for model in models], candidate[key]))
    }


def _can_be_judged(golden: Tensor, modelled: Sequence[Tensor], computed: Tensor) -> bool:
    """Return whether golden and a model are finite, and no model explains an overflow of the candidate."""
    if not (all_finite(golden) and any(map(all_finite, modelled))):
        return False
    return all_finite(computed) or not any(overflows_within(computed, model) for model in modelled)


def overflows_within(computed: Tensor, model: Tensor) -> bool:
    """Return whether the model is not finite wherever the computed tensor is not."""
    return not bool((model.isfinite() & ~computed.isfinite()).any())


def proves_nothing(tensors: Sequence[TensorResult]) -> bool:
    """Return whether zeros would pass for every tensor, because each tolerance on the relative L2 error is at least 1.

    Args:
        tensors: the results of a comparison that passed.
    """
    not_zero = [tensor for tensor in tensors if tensor.errors.golden_rms]
    return bool(not_zero) and len(_find_lost_tensors(tensors)) == len(not_zero)


def left_unproven(tensors: Sequence[TensorResult], differentiated: bool) -> Iterator[ProvesNothing]:
    """Yield a note for each of the two passes of which no tensor shows anything.

    Args:
        tensors: the results of a comparison.
        differentiated: whether there should be a backward pass.
    """
    lost = _find_lost_tensors(tensors)
    shown = {tensor.kind.endswith("gradient") for tensor in tensors if tensor.errors.golden_rms and tensor not in lost}
    if False not in shown:
        yield ProvesNothing("nothing is known of the forward pass: every output is empty, 0 or lost to rounding")
    if differentiated and True not in shown:
        yield ProvesNothing(
            "nothing is known of the backward pass: every gradient is empty, 0 or lost to rounding, or there is none; "
            "a pair without gradients has parity.Pair(evaluation=True)"
        )


def _find_lost_tensors(tensors: Sequence[TensorResult]) -> list[TensorResult]:
    """Return the tensors that would pass if they were all zero, though golden is not."""
    return [tensor for tensor in tensors if tensor.errors.golden_rms and tensor.tolerance_relative_l2 >= 1.0]


def remarks(
    tensors: Sequence[TensorResult],
    candidate: Tensors,
    reference: nn.Module,
    not_compared: int,
    dtype: torch.dtype,
    recipe: str | None,
    log_probs: Collection[str] = (),
) -> Iterator[str]:
    """Yield a remark on each thing that a comparison leaves unproven even if it passes.

    Args:
        tensors: the results.
        candidate: the candidate's tensors, in the reference's layout.
        reference: the reference, whose frozen parameters have no gradient to compare.
        not_compared: how many tensors the reference returns that are not floating-point.
        dtype: the precision's dtype.
        recipe: the precision's recipe, if it has one.
        log_probs: names of the outputs that are log-probabilities, which are rightly in FP32.
    """
    zero = [
        tensor.label for tensor in tensors if tensor.numel and not (tensor.errors.golden_rms or tensor.errors.max_abs)
    ]
    if zero:
        yield f"0 in both the reference and the candidate, which proves nothing: {', '.join(zero)}"
    lost = [tensor.label for tensor in _find_lost_tensors(tensors)]
    if lost:
        yield f"lost to rounding in any port, so that zeros would pass as well: {', '.join(lost)}"
    empty = [tensor.label for tensor in tensors if not tensor.numel]
    if empty:
        yield f"empty, so that only the shape was compared: {', '.join(empty)}"
    compared = {tensor.key for tensor in tensors}
    too_large = [name for kind, name in candidate if kind == PROBED and (kind, name) not in compared]
    if too_large:
        overflows = f"where a correct {_name_dtype(dtype)} computation overflows"
        yield f"not compared on probing inputs, {overflows}: {', '.join(too_large)}"
    frozen = [name for name, parameter in reference.named_parameters() if not parameter.requires_grad]
    if frozen:
        yield f"frozen in the reference, so that no gradient was compared: {', '.join(frozen)}"
    if not_compared:
        yield f"{not_compared} of the reference's outputs hold no floating-point numbers and were not compared"
    for tensor in tensors:
        returned = candidate[tensor.key].dtype
        is_loss = tensor.numel == 1 or tensor.name in log_probs
        is_loss = is_loss and returned == torch.float32  # a loss is rightly wider than the rest
        if not (tensor.kind.endswith("gradient") or is_loss) and tensor.numel and returned != dtype:
            yield (
                f"the candidate returns {tensor.label} in {_name_dtype(returned)}; the precision's dtype is "
                f"{_name_dtype(dtype)}"
            )
    if recipe:
        yield from _outside_recipe(tensors, recipe)
    elif dtype == torch.float32:
        yield from _without_tf32(tensors)


def _outside_recipe(tensors: Sequence[TensorResult], recipe: str) -> Iterator[str]:
    """Yield a remark on layers that seem not to be quantized: their numbers are right, but it may be unintended."""
    exact = [
        tensor.label
        for tensor in tensors
        if tensor.kind == "weight gradient"
        and len(tensor.shape) > 1
        and tensor.numel >= _ENOUGH_ELEMENTS
        and tensor.errors.relative_l2 < _TOO_EXACT * tensor.expected.relative_l2
    ]
    if exact:
        yield (
            f"less than {_TOO_EXACT:.0%} of the error that {recipe} costs, as if part of the candidate ran without it "
            f"(PAR308 recipe-disabled): {', '.join(exact)}"
        )


def _without_tf32(tensors: Sequence[TensorResult]) -> Iterator[str]:
    """Yield a remark on a port that is more accurate than a model that rounds to TF32, which is not a mistake."""
    in_tf32 = [
        tensor
        for tensor in tensors
        if tensor.numel >= _NO_CHANCE and tensor.finite and tensor.expected.relative_l2 >= _COSTS_OF_TF32
    ]
    if in_tf32 and all(tensor.errors.relative_l2 < _WITHOUT_TF32 * tensor.expected.relative_l2 for tensor in in_tf32):
        yield (
            f"more accurate than expected: less than {_WITHOUT_TF32:.0%} of the error that TF32 costs, as if the FP32 "
            f"GEMMs ran in true FP32 instead of TF32: {', '.join(tensor.label for tensor in in_tf32)}"
        )


def gradients_missed(unreached: tuple[str, ...], weights: WeightMap, golden: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return TE's parameters that no gradient reached although the reference's gradient is not 0.

    Args:
        unreached: TE's parameters that no gradient reached.
        weights: the pair's weight map.
        golden: the gradients of the reference's parameters, without frozen ones; 0 for one that it does not use.
    """
    used = {name for name, gradient in golden.items() if max_abs(gradient)}
    wanted = {name for left, right in weights.items() if used & set(names(left)) for name in names(right)}
    return tuple(name for name in unreached if name in wanted)


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
