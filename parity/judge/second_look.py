"""Look at a failure a second time: could faithful kernels have computed these numbers?"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from parity.judge.directions import PRESENT, Direction, found_by_filter, share_of
from parity.judge.judge import NONE_DRAWN, Drawn
from parity.judge.statistics import SMALLEST_SLICE, is_lost
from parity.numerics.formats import Recasts, Rounding
from parity.numerics.freedom import FUSED, Freedom, KinkSides, Port
from parity.numerics.kernel_choices import RECAST_DOWN, RECAST_UP, as_scaled, biased_kernels
from parity.passes.all_passes import Tensors, golden_tensors, run_model
from parity.passes.one_pass import outputs_of
from parity.passes.prepare import Prepared, cast, cast_module
from parity.result import TensorResult
from parity.trace.trace import optimizers_recorded

# Look again at a port that exceeds a limit: could a faithful port exceed it, too, if its roundings fell differently?
# Each step below adds runs of the rounding model to those of the first look. An error as large as that of any run is
# expected, and the look ends once every tensor passes. ``docs/statistics.md`` explains this for users.
#
# 1. Plain lines. A port's own lines between TE's modules are not fused. If they call PyTorch's functions, the model
#    runs once more with the roundings of these functions (``parity.numerics.plain``).
#
# 2. Noisy kernels. A GEMM may add parts of a sum in 16 bits. The model runs once more with such sums
#    (``parity.numerics.kernel_choices``).
#
# 3. Kinks. If a function has a kink (a ReLU, a clamp, a maximum), rounding alone decides on which side of it a nearby
#    value falls, and the gradient jumps there. Two runs of the rounding model tell how often that happens, but not
#    where. So the model runs with every such value above its kink, and with every one below it
#    (``parity.numerics.freedom``).
#
# 4. Jitter. One unlucky rounding may be all that is wrong with a row or a slice. So the model runs a few times with a
#    little noise (``parity.numerics.freedom.Freedom``), each time with bad luck at other values. Noise cannot imitate a
#    mistake, whose error stays where it is.
#
# 5. Drawn roundings. If a few numbers scale everything that follows, as a loss's scores scale the gradients, their
#    roundings are too few to average out. All runs of the model round them alike and so lean alike. A port that rounds
#    them differently leans differently. The same holds for the scores of a saturated softmax, on which outputs depend
#    as well, and for the roundings of a few tokens: a port that scales tokens before a layer, where the reference does
#    so after it, rounds other numbers. So finally the model runs with roundings that are drawn independently, which
#    shows how large such errors are by chance, and how far they lean. Adam's first steps divide a gradient by its own
#    magnitude, so a rounding that decides a gradient's sign decides a whole step. So if the reference runs steps of an
#    optimizer, outputs may also err as much as these runs do.
#
# Choices among experts are not a step of their own. Once they are known, every run of the model chooses as the port did
# wherever rounding explains its choice.


BY_CHANCE = "roundings drawn at random put a right port as far off now and then"
LOOKS = 8  # runs with jitter
# Runs whose roundings are drawn. Half of them run as each kind of kernel.
DRAWS = 16
# Jitter never multiplies an error by this much: it moves single values, whose share of a tensor's error is expected.
HOPELESS_MARGIN = 10.0
# This many noisy runs tell what more of them could still do: if the errors of faithful runs differ threefold, which is
# 1.2 deviations of their logarithm, the largest of two dozen is expected to be three times the largest of four.
TELLING_LOOKS = 4
STILL_HOPELESS_MARGIN = 3.0
# The margins of these count deviations, which are small if a few scores of a saturated softmax scale all gradients.
_IN_DEVIATIONS = frozenset({"gain", "mistake"})
# One rounding may be all of a small slice's error if terms cancel, or if a format has few numbers that small. Then
# another run's error may be many times as large. Only several runs show that, and for a format only the drawn ones.
_OF_A_SLICE = frozenset({"row", "slice"})


def second_look(
    tensors: tuple[TensorResult, ...],
    models: Sequence[Tensors],
    judge: Callable[[Sequence[Tensors], Drawn], tuple[TensorResult, ...]],
    prepared: Prepared,
    rounding: Rounding,
    port: Port,
    noisy_kernels: tuple[str, ...] = (),
) -> tuple[TensorResult, ...]:
    """Return the verdicts with more models if all tensors pass then, else those that grant only the port's roundings.

    If all tensors passed at first look, those verdicts are returned.

    Args:
        tensors: the verdicts at first look.
        models: the rounding model's tensors at first look.
        judge: maps models, and which of them round independently, to verdicts.
        prepared: what is compared.
        rounding: the precision's.
        port: the port's own roundings.
        noisy_kernels: names of choices of its kernels that only add noise (``parity.numerics.kernel_choices``).
    """
    if all(tensor.passed for tensor in tensors):
        return tensors
    looked, judged, both = list(models), tensors, port.freedoms
    if port.plain:
        looked.append(run_model(prepared, rounding, both[1]))
        judged = judge(looked, NONE_DRAWN)
    if not all(math.isfinite(tensor.margin) for tensor in judged) or all(tensor.passed for tensor in judged):
        return judged
    tensors, noisy = _not_cleared(tensors, judged), 0
    if noisy_kernels and not is_hopeless(judged, noisy, False, rounding):
        other = dataclasses.replace(both[1], kernels=noisy_kernels)
        looked.append(run_model(prepared, rounding, other))
        judged = judge(looked, NONE_DRAWN)
        if all(tensor.passed for tensor in judged):
            return judged
    with optimizers_recorded() as optimizers:
        for kinks, freedom in _plan_looks(prepared, both):
            if freedom.jitter is not None and is_hopeless(judged, noisy, bool(optimizers), rounding):
                return tensors
            noisy += freedom.jitter is not None
            looked.append(run_model(prepared, rounding, freedom, kinks))
            judged = judge(looked, NONE_DRAWN)
            if all(tensor.passed for tensor in judged):
                return judged
    if is_hopeless(judged, noisy, bool(optimizers), rounding):
        return tensors
    drawn = drawn_runs(prepared, rounding, DRAWS, port)
    of_outputs = bool(optimizers) and rounding.storage is not torch.float32
    judged = judge([*looked, *drawn], Drawn(DRAWS, of_outputs))
    return judged if all(tensor.passed for tensor in judged) else tensors


def _not_cleared(first: Sequence[TensorResult], second: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return a failing port's second verdicts, but the first ones on failed tensors of few numbers, such as a loss.

    Chance may move a loss that far, but this is no excuse if something else is wrong as well and moves the loss, too.
    """
    stands = {one.label: one for one in first if not one.passed and _are_few_numbers(one)}
    return tuple(stands.get(one.label, one) for one in second) if stands else tuple(second)


def choosing_alike(prepared: Prepared, rounding: Rounding, port: Port) -> list[Tensors]:
    """Return the model's runs as both kinds of kernels, which choose as the port that ``prepared`` knows."""
    return [run_model(prepared, rounding, freedom) for freedom in Port(steps=port.steps).freedoms]


def leaning_runs(prepared: Prepared, rounding: Rounding, port: Port, recasts: Recasts = ()) -> list[Tensors]:
    """Return the model's runs as the first kind of kernels, one for each way in which kernels may lean.

    If the port's scales are known, gradients that are cast twice lean as these say, and in no other way.
    """
    first = port.freedoms[0]
    names = [name for name in biased_kernels(rounding) if not recasts or name not in (RECAST_UP, RECAST_DOWN)]
    runs = [run_model(prepared, rounding, dataclasses.replace(first, kernels=(name,))) for name in names]
    return [*runs, run_model(prepared, as_scaled(rounding, recasts), first)] if recasts else runs


def drawn_runs(prepared: Prepared, rounding: Rounding, count: int, port: Port = Port()) -> list[Tensors]:  # noqa: B008
    """Return runs of the model whose roundings are drawn, half of them as each kind of kernel."""
    dithered = _jitter_freedoms(port.freedoms, range(LOOKS, LOOKS + count), dithers=True)
    return [_run_with_dithering(prepared, rounding, freedom) for freedom in dithered]


def _run_with_dithering(prepared: Prepared, rounding: Rounding, freedom: Freedom) -> Tensors:
    """Run the model with roundings independent of other runs', and errors as large as those of rounding to nearest.

    Dithering doubles the variance of an error. Errors that are not roundings of activations, such as those of weights,
    are not doubled; other runs account for them already.
    """
    golden = golden_tensors(prepared)
    drawn = run_model(prepared, rounding, freedom)
    return {key: golden[key] + (x.double() - golden[key]) / math.sqrt(2.0) for key, x in drawn.items()}


def _jitter_freedoms(both: tuple[Freedom, Freedom], seeds: Iterable[int], dithers: bool = False) -> Iterator[Freedom]:
    """Return freedoms with noise, which alternate between the two kinds of kernels."""
    return (dataclasses.replace(both[seed % 2], jitter=seed, dithers=dithers) for seed in seeds)


def _hopeless_margin(statistic: str, noisy: int, steps: bool) -> float:
    """Return the margin beyond which no further run helps after this many noisy ones."""
    if statistic in _IN_DEVIATIONS:
        return math.inf
    if statistic in _OF_A_SLICE:
        return HOPELESS_MARGIN if noisy >= TELLING_LOOKS else math.inf
    return HOPELESS_MARGIN if steps or noisy < TELLING_LOOKS else STILL_HOPELESS_MARGIN


def is_hopeless(tensors: Sequence[TensorResult], noisy: int, steps: bool, rounding: Rounding) -> bool:
    """Return whether an error is larger than noise can make it, apart from gradients that are nothing but noise.

    A loss that is returned in FP32 is a mean in which roundings cancel: all of them in one run, none in another. So the
    ratio of two runs' errors says nothing as long as a single rounding to the dtype would be as large.
    """
    one_rounding = torch.finfo(rounding.storage).eps / 2
    judged = (
        tensor
        for tensor in tensors
        if not is_lost(tensor) and not (_are_few_numbers(tensor) and tensor.errors.relative_l2 <= one_rounding)
    )
    checks = (check for tensor in judged for check in tensor.checks)
    return any(check.margin > _hopeless_margin(check.statistic, noisy, steps) for check in checks)


def _are_few_numbers(tensor: TensorResult) -> bool:
    return not tensor.kind.endswith("gradient") and tensor.numel < SMALLEST_SLICE


def _plan_looks(prepared: Prepared, both: tuple[Freedom, Freedom]) -> Iterator[tuple[KinkSides | None, Freedom]]:
    yield from ((kinks, both[1]) for kinks in kinks_moved(prepared))
    yield from ((None, freedom) for freedom in _jitter_freedoms(both, range(LOOKS)))


def kinks_moved(prepared: Prepared) -> list[KinkSides]:
    """Return the kinks with nearby values moved above them, and with those moved below; empty if there are no kinks."""
    exact = KinkSides()
    run_model(prepared, Rounding(torch.float32), FUSED, exact)
    return exact.on_both_sides()


def remark(first: Sequence[TensorResult], second: Sequence[TensorResult], why: str) -> str:
    """Say which tensors pass only thanks to another look; return an empty text if none do.

    Args:
        first: the verdicts before it.
        second: the verdicts after it.
        why: what the other look grants.
    """
    passed = {tensor.label for tensor in second if tensor.passed}
    owed = [tensor for tensor in first if not tensor.passed and tensor.label in passed]
    if not owed:
        return ""
    labels = ", ".join(f"{tensor.label} ({_describe_worst_check(tensor)})" for tensor in owed)
    return f"exceeded a limit at first look and passed the second, because {why}: {labels}"


def _describe_worst_check(tensor: TensorResult) -> str:
    check = tensor.worst_check
    return f"{check.statistic} {check.where}".strip() if check else "not finite"


# Do a port's norms round what its reference holds in FP32?
#
# Between TE's modules, a port's own lines are expected to round what they return (see above). But it is a mistake if a
# norm rounds its mean, its root or the tensor that its weight multiplies to 16 bits and the reference does not, whoever
# computes it. Running the reference in the precision's dtype as plain PyTorch shows whether it rounds there as well: a
# layer of Hugging Face's Llama does, ``nn.RMSNorm`` does not.


_TITLES = frozenset({"norm-statistics", "norm-rounding"})


def made_by_port_alone(
    tensors: Sequence[TensorResult], prepared: Prepared, known: Sequence[Direction], dtype: torch.dtype
) -> bool:
    """Return whether a matched filter finds such a rounding in the port that the reference in the dtype does not make.

    Args:
        tensors: the verdicts at first look.
        prepared: what is compared.
        known: the directions of subtle mistakes.
        dtype: the precision's.
    """
    found = [
        (tensor.name, direction.changes[tensor.name])
        for tensor, _, direction in found_by_filter(tensors, known)
        if direction.mistake.title in _TITLES
    ]
    rounded = _outputs_in(dtype, prepared) if found else {}
    golden = prepared.golden.outputs
    return any(name in rounded and share_of(change, rounded[name], golden[name]) < PRESENT for name, change in found)


def _outputs_in(dtype: torch.dtype, prepared: Prepared) -> dict[str, Tensor]:
    """Return the reference's outputs when it computes in the dtype; empty if PyTorch cannot."""
    module = cast_module(copy.deepcopy(prepared.reference), dtype)
    try:
        with torch.no_grad():
            return outputs_of(module, prepared.call, cast(prepared.inputs, dtype))
    except (RuntimeError, TypeError, ValueError):
        return {}
