"""Say what a recipe costs, which linear layers carry its error, and what keeping some of them in BF16 would save.

All of it comes from the rounding model, which runs the reference with the roundings of a faithful kernel. No candidate
runs. How the error divides over layers is found by rounding one operand of one layer alone, while everything else is
computed in FP32. The errors that these cause add up nearly in squares, since roundings are nearly independent. What
keeping layers unquantized saves is predicted by that sum, and then computed by one more pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median

import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.numerics.aten import address
from parity.numerics.formats import AttentionFormats, Format, OperandPart, Part, Quantized, Rounding, hadamard
from parity.numerics.freedom import FUSED
from parity.numerics.storing import Cast, Operand
from parity.passes.all_passes import Tensors, golden_tensors, run_model, weights_in_one_tensor
from parity.passes.prepare import Prepared, prepare
from parity.progress import Following
from parity.result import Kind
from parity.te import PRECISIONS, Kernels, Precision
from parity.te.recipes import round_alike
from parity.user_error import UserError

PARTS: tuple[OperandPart, ...] = ("inputs", "weights", "gradients")
RANKINGS = ("outputs", "gradients")  # by which error layers are ranked
ATTENTION = "attention in FP8"
# Chmiel et al., "FP4 All the Way" (arXiv 2505.19115, section 4): training no longer progresses if the gradient's norm
# is smaller than this multiple of its quantization noise.
STALLS_BELOW = math.sqrt(3.0)
_SHARE_TO_REMOVE, _LAYERS_TO_KEEP = 0.5, 0.25


@dataclass(frozen=True)
class OutputError:
    """The error of an output over seeds.

    Attributes:
        name: the output's.
        error: the relative L2 error, as root mean square over seeds.
        bias: the mean of the signed error ``(x - golden)·golden / |golden|²``.
        confidence: half of the width of the bias's 95 % confidence interval, by Student's t; NaN for a single seed.
    """

    name: str
    error: float
    bias: float
    confidence: float


@dataclass(frozen=True)
class Counts:
    """What a format does to the elements of an operand, counted in each GEMM that reads it.

    Attributes:
        zeroed: the share of elements that are not zero and become zero.
        saturated: the share that exceeds the largest number of its block; NaN if that was not counted.
    """

    zeroed: float
    saturated: float


@dataclass(frozen=True)
class Layer:
    """A linear layer as TE computes it, which may be several of the reference.

    Attributes:
        weights: the names of the reference's weights.
        of_outputs: by operand, its share of the squared error that all layers cause in the outputs.
        of_gradients: the same in weight gradients.
        counts: by operand.
    """

    weights: tuple[str, ...]
    of_outputs: Mapping[str, float]
    of_gradients: Mapping[str, float]
    counts: Mapping[str, Counts]

    @property
    def name(self) -> str:
        """Return the names of its weights, such as ``mlp.gate_proj + up_proj``."""
        first, *others = (one.removesuffix(".weight") for one in self.weights)
        parent = first.rpartition(".")[0]
        return " + ".join([first, *(one.removeprefix(f"{parent}.") if parent else one for one in others)])


@dataclass(frozen=True)
class Kept:
    """What keeping some layers unquantized saves. The errors are those that layers are ranked by.

    Attributes:
        layers: the names of the layers.
        before, predicted, after: the error with all layers quantized, the predicted one and the computed one.
        outputs, gradients: the errors with these layers unquantized, as those of ``Recipe``.
    """

    layers: tuple[str, ...]
    before: float
    predicted: float
    after: float
    outputs: tuple[OutputError, ...]
    gradients: Mapping[str, float]


@dataclass(frozen=True)
class Recipe:
    """What one precision costs.

    Attributes:
        name: the precision's; several if all of them round alike.
        outputs: the outputs' errors.
        gradients: the relative L2 error of each weight's gradient, as root mean square over seeds.
        base: the precision in which layers are that the recipe leaves alone.
        layers: the layers, by their share of the error, the largest first; none for a precision without a recipe.
        attention: the share of attention in FP8.
        ranked_by: by which error layers are ranked, ``outputs`` or ``gradients``.
        kept: the layers that should stay unquantized first; None without layers.
        notes: sentences on what the numbers leave out.
    """

    name: str
    outputs: tuple[OutputError, ...]
    gradients: Mapping[str, float]
    base: str = ""
    layers: tuple[Layer, ...] = ()
    attention: float = 0.0
    ranked_by: str = "outputs"
    kept: Kept | None = None
    notes: tuple[str, ...] = ()

    @property
    def typical_gradient(self) -> float:
        """Return the median of the weight gradients' errors; NaN if there are none."""
        return median(self.gradients.values()) if self.gradients else math.nan

    @property
    def worst_gradient(self) -> str:
        """Return the name of the weight whose gradient has the largest error; empty if there is none."""
        return max(self.gradients, key=lambda name: self.gradients[name], default="")

    @property
    def stalled(self) -> tuple[str, ...]:
        """Return the weights whose gradient's norm is below ``STALLS_BELOW`` times its noise."""
        return tuple(name for name, error in self.gradients.items() if error * STALLS_BELOW > 1.0)


def advise(
    case: Case,
    checked: CheckedSize,
    precisions: Sequence[Precision],
    seeds: Sequence[int],
    kernels: Kernels,
    keep: int | None = None,
    by: str = "",
) -> list[Recipe]:
    """Return what each precision costs, after BF16 and the other ones that the recipes round from.

    Args:
        precisions: those that round alike become one.
        keep: how many layers to keep unquantized; None for the fewest that carry half of the error, but at most a
            quarter of all.
        by: by which error to rank layers: ``outputs`` or ``gradients``; empty for ``gradients`` if all outputs are
            single numbers, such as a loss, whose errors are mostly chance.

    Raises:
        UserError: if none of the precisions has a recipe, the pair has no linear layer of TE's, or no gradients that
            are asked for.
    """
    if all(one.recipe is None for one in precisions):
        names = ", ".join(one.name for one in precisions)
        raise UserError(f"{names} has no recipe, so nothing is quantized; name recipes, such as fp8_current or nvfp4")
    bases = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    needed = ["bf16", *(bases[one.dtype] for one in precisions)]
    every = {one.name: one for one in (*map(PRECISIONS.__getitem__, needed), *precisions)}
    alike: list[list[Precision]] = []
    for one in every.values():
        group = next((some for some in alike if round_alike(some[0].rounding, one.rounding)), None)
        alike.append([one]) if group is None else group.append(one)
    found: dict[str, Recipe] = {}  # by the group's first precision
    with Following("computing", len(alike)) as following:
        for some in sorted(alike, key=lambda each: each[0].recipe is not None):
            first, rounding = some[0].name, some[0].rounding
            name, dtype = ", ".join(one.name for one in some), some[0].dtype
            following.step(0, f"computing {name}")
            at_seeds = [_select_outputs(prepare(case, checked, dtype, seed, kernels)) for seed in seeds]
            if some[0].recipe is None:
                found[first] = _summarize(name, _run(at_seeds, rounding))
            else:
                found[first] = _advise_on(name, rounding, at_seeds, found[bases[dtype]], keep, by)
                if delayed := [one.name for one in some if one.warmup_passes]:
                    note = f"scales of {' and '.join(delayed)} are computed as if tensors did not change over steps"
                    found[first] = replace(found[first], notes=(note,))
            following.step()
    return list(found.values())


def _select_outputs(prepared: Prepared) -> Prepared:
    """Return a copy without probing inputs, in which a single number is not rounded at last, which would hide all else.

    A loss of 5 that is stored in BF16 has an error of up to 0.3 %, whatever the recipe.
    """
    single = frozenset[tuple[Kind, str]](
        ("output", name) for name, x in prepared.golden.outputs.items() if x.numel() == 1
    )
    return replace(prepared, probed={}, wide=prepared.wide | single)


# Errors of passes under the rounding model, at several seeds.


@dataclass(frozen=True)
class _Errors:
    """The relative L2 errors of one pass, and the signed ones, by name."""

    outputs: Mapping[str, float]
    biases: Mapping[str, float]
    gradients: Mapping[str, float]
    has_single_numbers: bool

    @property
    def of_outputs(self) -> float:
        """Return the mean of the outputs' squared errors."""
        return _mean_of_squares(self.outputs.values())

    @property
    def of_gradients(self) -> float:
        """Return the mean of the weight gradients' squared errors."""
        return _mean_of_squares(self.gradients.values())


def _mean_of_squares(values: Iterable[float]) -> float:
    squares = [value * value for value in values if math.isfinite(value)]
    return fmean(squares) if squares else 0.0


def _measure(prepared: Prepared, tensors: Tensors) -> _Errors:
    golden = golden_tensors(prepared)
    outputs: dict[str, float] = {}
    biases: dict[str, float] = {}
    gradients: dict[str, float] = {}
    for (kind, name), x in tensors.items():
        right = golden[kind, name].double()
        size = right.norm()
        if size == 0 or kind not in ("output", "weight gradient"):
            continue
        error = x.double() - right
        (outputs if kind == "output" else gradients)[name] = float(error.norm() / size)
        if kind == "output":
            biases[name] = float((error * right).sum() / size.square())
    single = all(golden[key].numel() == 1 for key in golden if key[0] == "output")
    return _Errors(outputs, biases, gradients, single)


def _run(at_seeds: Sequence[Prepared], rounding: Rounding, kept: Collection[str] = ()) -> list[_Errors]:
    """Return the errors at each seed, with the linear layers of some weights unquantized."""
    passes = (replace(one, outside_te=one.outside_te.union(kept)) for one in at_seeds)
    return [_measure(one, run_model(one, rounding, FUSED)) for one in passes]


def _summarize(name: str, runs: Sequence[_Errors]) -> Recipe:
    outputs = []
    for output in runs[0].outputs:
        biases = [run.biases[output] for run in runs if output in run.biases]
        spread = stats.sem(biases) * stats.t.ppf(0.975, len(biases) - 1) if len(biases) > 1 else math.nan
        error = math.sqrt(_mean_of_squares(run.outputs[output] for run in runs if output in run.outputs))
        outputs.append(OutputError(output, error, fmean(biases), float(spread)))
    gradients = {
        weight: math.sqrt(_mean_of_squares(run.gradients[weight] for run in runs if weight in run.gradients))
        for weight in runs[0].gradients
    }
    return Recipe(name, tuple(outputs), gradients)


# Which layers carry the error.


def _advise_on(
    name: str, rounding: Rounding, at_seeds: Sequence[Prepared], base: Recipe, keep: int | None, by: str
) -> Recipe:
    counted = _Counting()
    runs = [_measure(one, run_model(one, rounding, FUSED, watch=counted.at(one))) for one in at_seeds]
    if not counted.seen:
        raise UserError(
            "the pair has no linear layer in one of TE's modules, so a recipe rounds nothing in it; give a pair whose "
            "reference multiplies by a weight that the map carries to such a module"
        )
    units = _group_weights(at_seeds[0], counted.seen)
    of_outputs: dict[tuple[tuple[str, ...], OperandPart], float] = defaultdict(float)
    of_gradients: dict[tuple[tuple[str, ...], OperandPart], float] = defaultdict(float)
    in_attention = [0.0, 0.0]
    for prepared in at_seeds:
        for unit in units:
            for part in PARTS:
                alone = _measure(prepared, _run_alone(prepared, rounding, unit, part))
                of_outputs[unit, part] += alone.of_outputs
                of_gradients[unit, part] += alone.of_gradients
        if rounding.attention != AttentionFormats():
            alone = _measure(prepared, _run_attention_alone(prepared, rounding))
            in_attention = [in_attention[0] + alone.of_outputs, in_attention[1] + alone.of_gradients]
    by = by or ("gradients" if runs[0].has_single_numbers and runs[0].gradients else "outputs")
    if by == "gradients" and not runs[0].gradients:
        raise UserError("the pair has no weight gradients to rank layers by; rank them by outputs")
    ranked = of_outputs if by == "outputs" else of_gradients
    all_outputs, all_gradients = (
        (sum(each.values()) + own) or 1.0 for each, own in zip((of_outputs, of_gradients), in_attention, strict=True)
    )
    layers = tuple(
        Layer(
            unit,
            {part: of_outputs[unit, part] / all_outputs for part in PARTS},
            {part: of_gradients[unit, part] / all_gradients for part in PARTS},
            {part: counted.counts(unit, part) for part in PARTS},
        )
        for unit in sorted(units, key=lambda unit: -sum(ranked[unit, part] for part in PARTS))
    )
    attention = in_attention[0] / all_outputs if by == "outputs" else in_attention[1] / all_gradients
    summary = replace(_summarize(name, runs), base=base.name, layers=layers, attention=attention, ranked_by=by)
    return replace(summary, kept=_keep_some(summary, rounding, at_seeds, base, keep))


def _group_weights(prepared: Prepared, seen: Collection[str]) -> list[tuple[str, ...]]:
    """Return the weights of each GEMM that TE makes, which reads weights that it holds in one tensor together."""
    groups = {name: tuple(group) for group in weights_in_one_tensor(prepared.weights) for name in group}
    return list(dict.fromkeys(groups.get(name, (name,)) for name in seen))


def share_of(layer: Layer, ranked_by: str) -> float:
    """Return a layer's share of the squared error that layers are ranked by."""
    return sum((layer.of_outputs if ranked_by == "outputs" else layer.of_gradients).values())


def _keep_some(
    recipe: Recipe, rounding: Rounding, at_seeds: Sequence[Prepared], base: Recipe, keep: int | None
) -> Kept:
    shares = [share_of(layer, recipe.ranked_by) for layer in recipe.layers]
    if keep is None:
        most = max(1, int(_LAYERS_TO_KEEP * len(shares)))
        keep = next((n for n in range(1, most) if sum(shares[:n]) >= _SHARE_TO_REMOVE), most)
    kept = recipe.layers[:keep]
    after = _summarize(recipe.name, _run(at_seeds, rounding, [name for layer in kept for name in layer.weights]))
    whole, without = _ranking_error(recipe, recipe.ranked_by), _ranking_error(base, recipe.ranked_by)
    left = max(whole**2 - without**2, 0.0) * (1.0 - sum(shares[:keep]))
    return Kept(
        tuple(layer.name for layer in kept),
        whole,
        math.sqrt(without**2 + left),
        _ranking_error(after, recipe.ranked_by),
        after.outputs,
        after.gradients,
    )


def _ranking_error(recipe: Recipe, ranked_by: str) -> float:
    errors = [one.error for one in recipe.outputs] if ranked_by == "outputs" else recipe.gradients.values()
    return math.sqrt(_mean_of_squares(errors))


# Passes in which the operands of linear layers are watched.


def _name_weights(prepared: Prepared) -> dict[int, str]:
    return {address(one): name for name, one in prepared.reference.named_parameters() if one.dim() > 1}


def _run_alone(prepared: Prepared, rounding: Rounding, unit: Collection[str], part: OperandPart) -> Tensors:
    """Run the model in FP32, with one operand of one layer rounded to its formats."""
    prepared.reference.float()  # as the pass does, which keeps the addresses of weights
    of_unit = frozenset(at for at, name in _name_weights(prepared).items() if name in unit)

    def round_one(operand: Operand, cast: Cast) -> Tensor:
        is_own = operand.part == part and operand.weights and of_unit.issuperset(operand.weights)
        return cast(operand.matrix, operand.dim) if is_own else operand.matrix

    return run_model(prepared, replace(rounding, parts=frozenset(PARTS)), FUSED, watch=round_one)


def _run_attention_alone(prepared: Prepared, rounding: Rounding) -> Tensors:
    in_attention = replace(rounding, parts=frozenset[Part](["attention"]))
    return run_model(prepared, in_attention, FUSED, watch=lambda operand, cast: operand.matrix)


@dataclass
class _Counting:
    """Counts what formats do to operands, by weight and operand: elements, zeroed ones, saturated ones."""

    seen: dict[str, None] = field(default_factory=dict)
    _counted: dict[tuple[str, OperandPart], list[float]] = field(default_factory=dict)

    def at(self, prepared: Prepared) -> Callable[[Operand, Cast], Tensor]:
        """Return what watches a pass."""
        prepared.reference.float()
        return partial(self._count, _name_weights(prepared))

    def _count(self, names: Mapping[int, str], operand: Operand, cast: Cast) -> Tensor:
        read = cast(operand.matrix, operand.dim)
        named = [names[at] for at in operand.weights if at in names]
        if named and operand.to_format is not None:
            self.seen.update(dict.fromkeys(named))
            counted = self._counted.setdefault((named[0], operand.part), [0, 0, 0])
            stored = hadamard(operand.matrix, operand.dim) if _is_rotated(operand.to_format) else operand.matrix
            counted[0] += read.numel()
            counted[1] += int(((read == 0) & (stored != 0)).sum())
            counted[2] += count_saturated(operand.to_format, stored, read, operand.dim)
        return read

    def counts(self, unit: Iterable[str], part: OperandPart) -> Counts:
        """Return the shares of an operand of a layer; NaN if no GEMM read it in a format."""
        found = [self._counted[name, part] for name in unit if (name, part) in self._counted]
        elements, zeroed, saturated = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0, 0)
        return Counts(zeroed / elements, saturated / elements) if elements else Counts(math.nan, math.nan)


def _is_rotated(to_format: Format) -> bool:
    return getattr(to_format, "rotated", False)


def count_saturated(to_format: Format, stored: Tensor, read: Tensor, dim: int) -> float:
    """Return how many elements exceed the largest number of their block, and so were clipped to it.

    A scale of E4M3 for a block of E2M1 may be rounded down, so that the block's largest elements do not fit. All other
    scales are rounded so that they do: none of those formats' elements saturate as long as the scale is the tensor's
    own. With four over six, whose largest number is not always the same, this is not known: NaN.

    Args:
        stored, read: the matrix before and after rounding.
        dim: the dimension that the GEMM sums over, as for ``Quantized``.
    """
    if not isinstance(to_format, Quantized) or to_format.four_over_six:
        return math.nan
    if to_format.numbers != "E2M1":
        return 0.0
    across, along = to_format.across, to_format.along
    block = (across, along) if dim % 2 else (along, across)
    largest = F.max_pool2d(read.abs()[None, None], block, block, ceil_mode=True)[0, 0]
    rows, columns = read.shape
    largest = largest.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return float(((stored.abs() > largest) & (read.abs() == largest) & (largest > 0)).sum())
