"""Say what a recipe costs, which linear layers carry its error, and what keeping some of them in BF16 would save.

All of it comes from the rounding model, which runs the reference with the roundings of a faithful kernel. No candidate
runs. How the error divides over layers is found by rounding one operand of one layer alone, while everything else is
computed in FP32. The errors that these cause add up nearly in squares, since roundings are nearly independent. What
keeping layers unquantized saves is predicted by that sum, and then computed by one more pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
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
from parity.numerics.storing import Cast, Operand, Watch
from parity.passes.all_passes import Tensors, golden_tensors, run_model, weights_in_one_tensor
from parity.passes.prepare import Prepared, prepare
from parity.progress import Following
from parity.result import Kind
from parity.te import PRECISIONS, Kernels, Precision
from parity.te.recipes import round_alike
from parity.user_error import UserError

PARTS: tuple[OperandPart, ...] = ("inputs", "weights", "gradients")
KINDS: Mapping[str, Kind] = {"outputs": "output", "gradients": "weight gradient"}  # whose errors layers are ranked by
# Chmiel et al., "FP4 All the Way" (arXiv 2505.19115, section 4): training no longer progresses if the gradient's norm
# is smaller than this multiple of its quantization noise.
STALLS_BELOW = math.sqrt(3.0)
_SHARE_TO_REMOVE, _LAYERS_TO_KEEP = 0.5, 0.25
_UNCHANGED = (
    0.01  # of the base's error; less is that of FP32, as in the outputs of a recipe for the backward pass alone
)

Errors = dict[tuple[Kind, str], float]


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
class Layer:
    """A linear layer as TE computes it, which may be several of the reference; or attention in FP8, without weights.

    Attributes:
        weights: the names of the reference's weights.
        shares: for outputs and for gradients, its share of the squared error that all layers cause, by operand.
        zeroed: the share of an operand's elements that are not zero and become zero, by operand, counted in each GEMM
            that reads it; NaN if none reads it in a format.
        saturated: the share that exceeds the largest number of its block; NaN if that is not known.
    """

    weights: tuple[str, ...]
    shares: Mapping[str, Mapping[str, float]]
    zeroed: Mapping[str, float]
    saturated: Mapping[str, float]

    @property
    def name(self) -> str:
        """Return the names of its weights, such as ``mlp.gate_proj + up_proj``."""
        first, *others = (one.removesuffix(".weight") for one in self.weights or ("attention in FP8",))
        parent = first.rpartition(".")[0]
        return " + ".join([first, *(one.removeprefix(f"{parent}.") for one in others)])

    def share(self, by: str) -> float:
        """Return its share in a key of ``KINDS``."""
        return sum(self.shares[by].values())


@dataclass(frozen=True)
class Kept:
    """What keeping some layers unquantized saves.

    Attributes:
        layers: the names of the layers.
        before, predicted, after: the error that layers are ranked by, with all layers quantized, as it is predicted
            without these, and as it is.
        added_up: the sum in squares of what all layers cause alone and the error with none quantized, which is nearly
            ``before`` if errors add up as is assumed.
        outputs: the outputs' errors without these.
    """

    layers: tuple[str, ...]
    before: float
    predicted: float
    after: float
    added_up: float
    outputs: tuple[OutputError, ...]


@dataclass(frozen=True)
class Recipe:
    """What one precision costs.

    Attributes:
        name: the precision's; several if all of them round alike.
        outputs: the outputs' errors.
        gradients: the relative L2 error of each weight's gradient, as root mean square over seeds.
        base: the precision in which layers are that the recipe leaves alone.
        layers: the layers, by their share of the error, the largest first; none for a precision without a recipe.
        attention: attention, if it is in FP8.
        by: by whose errors layers are ranked, a key of ``KINDS``.
        kept: the layers that should stay unquantized first; None without layers.
        notes: sentences on what the numbers leave out.
    """

    name: str
    outputs: tuple[OutputError, ...]
    gradients: Mapping[str, float]
    base: str = ""
    layers: tuple[Layer, ...] = ()
    attention: Layer | None = None
    by: str = ""
    kept: Kept | None = None
    notes: tuple[str, ...] = ()

    @property
    def typical_gradient(self) -> float:
        """Return the median of the weight gradients' errors; NaN if there are none."""
        return median(self.gradients.values()) if self.gradients else math.nan

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Return the weight whose gradient has the largest error, and this error."""
        return max(self.gradients.items(), key=lambda each: each[1], default=("–", math.nan))

    @property
    def stalled(self) -> tuple[str, ...]:
        """Return the weights whose gradient's norm is below ``STALLS_BELOW`` times its noise."""
        return tuple(name for name, error in self.gradients.items() if error * STALLS_BELOW > 1.0)

    def error(self, by: str) -> float:
        """Return the root mean square of the errors of all outputs or of all gradients."""
        errors = [one.error for one in self.outputs] if by == "outputs" else self.gradients.values()
        return math.sqrt(_mean_square(errors))


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
        by: a key of ``KINDS``, to rank layers; empty for gradients if the recipe leaves outputs as they are, or if all
            outputs are single numbers, such as a loss, whose errors are mostly chance.

    Raises:
        UserError: if none of the precisions has a recipe, the pair has no linear layer of TE's, or no gradients that
            are asked for.
    """
    if all(one.recipe is None for one in precisions):
        names = ", ".join(one.name for one in precisions)
        raise UserError(f"{names} has no recipe, so nothing is quantized; name recipes, such as fp8_current or nvfp4")
    bases = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    needed = ["bf16", *(bases[one.dtype] for one in precisions)]
    alike: list[list[Precision]] = []
    for one in dict.fromkeys([*map(PRECISIONS.__getitem__, needed), *precisions]):
        group = next((some for some in alike if round_alike(some[0].rounding, one.rounding)), None)
        alike.append([one]) if group is None else group.append(one)
    found: dict[str, Recipe] = {}  # by the first precision of those that round alike
    with Following("computing", len(alike)) as following:
        for first, *others in sorted(alike, key=lambda some: some[0].recipe is not None):
            name = ", ".join(one.name for one in (first, *others))
            following.step(0, f"computing {name}")
            at_seeds = [_select_outputs(prepare(case, checked, first.dtype, seed, kernels)) for seed in seeds]
            if first.recipe is None:
                found[first.name] = _summarize_runs(name, at_seeds, _run_at_seeds(at_seeds, first.rounding))
            else:
                found[first.name] = _advise_on(name, first.rounding, at_seeds, found[bases[first.dtype]], keep, by)
                if delayed := [one.name for one in (first, *others) if one.warmup_passes]:
                    note = f"scales of {' and '.join(delayed)} are computed as if tensors did not change over steps"
                    found[first.name] = replace(found[first.name], notes=(note,))
            following.step()
    return list(found.values())


def _select_outputs(prepared: Prepared) -> Prepared:
    """Return a copy without probing inputs, in which a single number is not rounded last, which would hide all else.

    A loss of 5 that is stored in BF16 has an error of up to 0.3 %, whatever the recipe.
    """
    single = {name for name, x in prepared.golden.outputs.items() if x.numel() == 1}
    return replace(prepared, probed={}, wide=prepared.wide.union(("output", name) for name in single))


# Errors over seeds.


def _mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values if math.isfinite(value)]
    return fmean(squares) if squares else 0.0


def _measure_errors(prepared: Prepared, tensors: Tensors) -> Errors:
    """Return the relative L2 errors of outputs and weight gradients whose golden values are not all zero."""
    golden = golden_tensors(prepared)
    sizes = {key: float(golden[key].norm()) for key in tensors if key[0] in KINDS.values()}
    return {key: float((tensors[key] - golden[key]).norm()) / size for key, size in sizes.items() if size}


def _measure_bias(prepared: Prepared, tensors: Tensors, name: str) -> float:
    right = prepared.golden.outputs[name]
    return float(((tensors["output", name] - right) * right).sum() / right.square().sum())


def _run_at_seeds(at_seeds: Sequence[Prepared], rounding: Rounding, kept: Collection[str] = ()) -> list[Tensors]:
    """Return the tensors at each seed, with the linear layers of some weights unquantized."""
    return [run_model(replace(one, outside_te=one.outside_te.union(kept)), rounding, FUSED) for one in at_seeds]


def _summarize_runs(name: str, at_seeds: Sequence[Prepared], runs: Sequence[Tensors]) -> Recipe:
    errors: dict[tuple[Kind, str], list[float]] = defaultdict(list)
    for prepared, run in zip(at_seeds, runs, strict=True):
        for key, error in _measure_errors(prepared, run).items():
            errors[key].append(error)
    means = {key: math.sqrt(_mean_square(some)) for key, some in errors.items()}
    outputs = []
    for output in (name for kind, name in means if kind == "output"):
        biases = [_measure_bias(prepared, run, output) for prepared, run in zip(at_seeds, runs, strict=True)]
        spread = stats.sem(biases) * stats.t.ppf(0.975, len(biases) - 1) if len(biases) > 1 else math.nan
        outputs.append(OutputError(output, means["output", output], fmean(biases), float(spread)))
    return Recipe(name, tuple(outputs), {weight: mean for (kind, weight), mean in means.items() if kind != "output"})


# Which layers carry the error.


def _advise_on(
    name: str, rounding: Rounding, at_seeds: Sequence[Prepared], base: Recipe, keep: int | None, by: str
) -> Recipe:
    counting = _Counting()
    runs = [run_model(one, rounding, FUSED, watch=counting.watch(one)) for one in at_seeds]
    if not counting.seen:
        raise UserError(
            "the pair has no linear layer in one of TE's modules, so a recipe rounds nothing in it; give a pair whose "
            "reference multiplies by a weight that the map carries to such a module"
        )
    recipe = _summarize_runs(name, at_seeds, runs)
    if by == "gradients" and not recipe.gradients:
        raise UserError("the pair has no weight gradients to rank layers by; rank them by outputs")
    groups = {name: tuple(group) for group in weights_in_one_tensor(at_seeds[0].weights) for name in group}
    units = list(dict.fromkeys(groups.get(name, (name,)) for name in counting.seen))
    squares: dict[tuple[str, tuple[str, ...], str], float] = defaultdict(float)
    for prepared in at_seeds:
        for unit, part, errors in _run_each_alone(prepared, rounding, units):
            for each, kind in KINDS.items():
                of_kind = _mean_square(error for key, error in errors.items() if key[0] == kind)
                squares[each, unit, part] += of_kind / len(at_seeds)
    wholes = {each: sum(square for key, square in squares.items() if key[0] == each) for each in KINDS}
    changed = [each for each in KINDS if wholes[each] > (_UNCHANGED * base.error(each)) ** 2]
    are_single = all(x.numel() == 1 for x in at_seeds[0].golden.outputs.values())
    by = by or ("gradients" if recipe.gradients and (are_single or "outputs" not in changed) else "outputs")

    def make_layer(unit: tuple[str, ...], parts: Sequence[str] = PARTS) -> Layer:
        shares = {
            each: {part: squares[each, unit, part] / wholes[each] if each in changed else 0.0 for part in parts}
            for each in KINDS
        }
        return Layer(unit, shares, *(counting.list_shares(unit, count) for count in (1, 2)))

    layers = tuple(sorted(map(make_layer, units), key=lambda layer: -layer.share(by)))
    attention = None if rounding.attention == AttentionFormats() else make_layer((), ["attention"])
    recipe = replace(recipe, base=base.name.partition(",")[0], layers=layers, attention=attention, by=by)
    return replace(recipe, kept=_keep_some(recipe, rounding, at_seeds, base.error(by), wholes[by], keep))


def _keep_some(
    recipe: Recipe, rounding: Rounding, at_seeds: Sequence[Prepared], least: float, alone: float, keep: int | None
) -> Kept:
    """Say what the layers that come first save.

    Args:
        least: the error without any layer quantized.
        alone: the squared error that all layers cause alone.
    """
    shares = [layer.share(recipe.by) for layer in recipe.layers]
    if keep is None:
        most = max(1, int(_LAYERS_TO_KEEP * len(shares)))
        keep = next((n for n in range(1, most) if sum(shares[:n]) >= _SHARE_TO_REMOVE), most)
    kept, before = recipe.layers[:keep], recipe.error(recipe.by)
    left = max(before**2 - least**2, 0.0) * max(1.0 - sum(shares[:keep]), 0.0)
    weights = [name for layer in kept for name in layer.weights]
    after = _summarize_runs(recipe.name, at_seeds, _run_at_seeds(at_seeds, rounding, weights))
    predicted, added_up = math.sqrt(least**2 + left), math.sqrt(least**2 + alone)
    names = tuple(layer.name for layer in kept)
    return Kept(names, before, predicted, after.error(recipe.by), added_up, after.outputs)


# Passes in which the operands of linear layers are watched.


def _name_weights(prepared: Prepared) -> dict[int, str]:
    """Return the names of weights by their addresses in a pass of the model, which computes in FP32."""
    return {address(one): name for name, one in prepared.reference.float().named_parameters() if one.dim() > 1}


def _run_each_alone(
    prepared: Prepared, rounding: Rounding, units: Iterable[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], str, Errors]]:
    """Yield a layer, an operand, and the errors if only this operand is rounded; attention in FP8 is without a name."""
    names = _name_weights(prepared)
    for unit, part in [*product(units, PARTS), ((), "attention")]:
        if unit or rounding.attention != AttentionFormats():
            alone = replace(rounding, parts=frozenset[Part](PARTS if unit else ["attention"]))
            watch = partial(_round_one, {at for at, name in names.items() if name in unit}, part)
            yield unit, part, _measure_errors(prepared, run_model(prepared, alone, FUSED, watch=watch))


def _round_one(of_unit: Collection[int], part: str, operand: Operand, cast: Cast) -> Tensor:
    is_own = operand.part == part and operand.weights and all(at in of_unit for at in operand.weights)
    if is_own and operand.to_format is not None:
        return cast(operand.matrix, operand.dim)
    return _rotate_alike(operand)  # a rotation cancels only if the GEMM's other operand has it as well


def _rotate_alike(operand: Operand) -> Tensor:
    """Return an operand as its format rotates it, unrounded."""
    is_rotated = getattr(operand.to_format, "rotated", False)
    return hadamard(operand.matrix, operand.dim) if is_rotated else operand.matrix


@dataclass
class _Counting:
    """Counts what formats do to operands, by weight and operand: elements, zeroed ones, saturated ones."""

    seen: dict[str, None] = field(default_factory=dict)
    _counts: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def watch(self, prepared: Prepared) -> Watch:
        """Return what watches a pass."""
        return partial(self._count_elements, _name_weights(prepared))

    def _count_elements(self, names: Mapping[int, str], operand: Operand, cast: Cast) -> Tensor:
        to_format, stored, read = operand.to_format, _rotate_alike(operand), cast(operand.matrix, operand.dim)
        named = [names[at] for at in operand.weights if at in names]
        if named and to_format is not None:
            self.seen.update(dict.fromkeys(named))
            counts = self._counts.setdefault((named[0], operand.part), [0, 0, 0])
            counts[0] += read.numel()
            counts[1] += int(((read == 0) & (stored != 0)).sum())
            counts[2] += count_saturated(to_format, stored, read, operand.dim)
        return read

    def list_shares(self, unit: Iterable[str], count: int) -> dict[str, float]:
        """Return the shares of zeroed elements (1) or of saturated ones (2), by operand."""
        found = {part: [self._counts[name, part] for name in unit if (name, part) in self._counts] for part in PARTS}
        return {
            part: sum(each[count] for each in some) / sum(each[0] for each in some) if some else math.nan
            for part, some in found.items()
        }


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
    if not read.numel():  # as an expert's that no token reached
        return 0.0
    block = (to_format.across, to_format.along) if dim % 2 else (to_format.along, to_format.across)
    largest = F.max_pool2d(read.abs()[None, None], block, block, ceil_mode=True)[0, 0]
    largest = largest.repeat_interleave(block[0], 0)[: len(read)].repeat_interleave(block[1], 1)[:, : read.shape[1]]
    return int(((stored.abs() > largest) & (read.abs() == largest) & (largest > 0)).sum())
