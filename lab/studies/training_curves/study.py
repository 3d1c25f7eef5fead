"""Test whether TE models train like the plain models: compare loss curves, recipe by recipe, within rounding.

A small GPT and a small llama train in plain FP32 PyTorch and on TE's layers, from the same weights on the same
batches. Their losses differ, because TE rounds. How far they may differ is found without TE: the plain model also
trains under several realisations of the precision's rounding model (``parity.rounding``, with dither). The differences
between those losses and plain FP32's are draws from the effect of rounding on this loss curve. The difference of a
faithful TE model is one more such draw, so it lies in their prediction band (``prediction_band``), except for the
stated share of runs.

The draws must share TE's weights and batches, because how far training amplifies a small error differs tenfold from one
seed to the next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from lab.studies import reporting, training
from lab.studies.settings import check_names
from lab.studies.training import (
    ARCHITECTURES,
    VOCABULARY,
    LanguageModel,
    Pass,
    Schedule,
    Size,
    batches,
    initial_weights,
    load,
    load_candidate,
    plain_pass,
    rounded_pass,
    te_pass,
    train,
)
from parity import te
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.numerics.formats import Format, Operands, Rounding
from parity.report.environment import KERNELS
from parity.report.numbers import markdown_table, short
from parity.report.record import FAILED, PASSED
from parity.te import PRECISIONS, Kernels, why_unavailable
from parity.user_error import UserError
from te_on_cpu import cuda

# Realisations of a rounding model: errors of the same size as the model's, but with different signs and values.
#
# A faithful port rounds what the model rounds, but not always to the same neighbour, because its scales, the order of
# its sums and the places of its roundings differ a little. Subtractive dither makes such errors: with d up to half the
# distance between neighbours, ``round(x + d) - d`` has errors of the same size as ``round(x)``, but independent of them
# (L. Schuchman, "Dither signals and their effect on quantization noise", IEEE Trans. Commun. Technol. 12(4), 1964). A
# realisation has one d for each position in a tensor of each shape, so a weight that does not change is rounded the
# same way in each step, as with any rounding.


_EXPONENT_FIELD = 0x7F800000


@dataclass(frozen=True)
class DitheredRounding(Rounding):
    """A realisation of a rounding model.

    Attributes:
        seed: the seed of the realisation.
    """

    seed: int = 0

    def store(self, x: Tensor) -> Tensor:
        """Return ``x`` after a dithered rounding to the dtype of storage, or unchanged if it already has that dtype."""
        if x.dtype == self.storage:
            return x
        dither = _dither(x, torch.finfo(self.storage).eps / 2, self.seed)
        return (x + dither).to(self.storage).to(x.dtype) - dither


def dithered(rounding: Rounding, seed: int) -> DitheredRounding:
    """Return the realisation of the model that belongs to a seed."""
    both = rounding.columnwise
    return DitheredRounding(
        storage=rounding.storage,
        inputs=_dithered_format(rounding.inputs, seed),
        weights=_dithered_format(rounding.weights, seed),
        gradients=_dithered_format(rounding.gradients, seed),
        columnwise=both and Operands(*(_dithered_format(x, seed) for x in (both.inputs, both.weights, both.gradients))),
        parts=rounding.parts,
        seed=seed,
    )


def unit_roundoff(to_format: Format) -> float:
    """Return a format's largest relative rounding error from 1 to 2, in blocks whose scale a larger value sets."""
    values = torch.linspace(1.0, 2.0, 128 * 128).view(128, 128)
    values[:, ::16] = 6.0
    return ((to_format(values, 1) - values) / values).abs().max().item()


def _dithered_format(to_format: Format | None, seed: int) -> Format | None:
    if to_format is None:
        return None
    half_distance = unit_roundoff(to_format)

    def dithered_format(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        dither = _dither(x, half_distance, seed)
        return to_format(x + dither, dim) - dither

    return dithered_format


def _dither(x: Tensor, half_distance: float, seed: int) -> Tensor:
    """Return FP32 noise of either sign, up to ``half_distance`` times the power of two below each value."""
    powers = (x.contiguous().view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    return powers * _pattern(tuple(x.shape), seed) * half_distance


@functools.lru_cache(maxsize=128)
def _pattern(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers between -1 and 1, the same for all tensors of a shape in a realisation."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# Prediction of a new draw from a distribution of which some draws are known.


@dataclass(frozen=True)
class Band:
    """An interval at each of several points.

    Attributes:
        low: lower ends.
        high: upper ends.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def margin(self, curve: Sequence[float]) -> float:
        """Return a curve's largest distance from the band's middle, in half widths: up to 1, it is inside everywhere.

        The margin is infinite if the curve is NaN somewhere, or outside a band of width 0.
        """
        low, high, values = (np.asarray(x, dtype=np.float64) for x in (self.low, self.high, curve))
        distance, half = np.abs(values - (low + high) / 2), (high - low) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(distance == 0, 0.0, distance / half)
        return math.inf if np.isnan(ratio).any() else float(ratio.max())


def prediction_band(draws: Sequence[Sequence[float]], false_alarms: float) -> Band:
    """Return the band that contains one more curve at all of its points, except a share ``false_alarms`` of curves.

    At each point, n normal draws with mean m and standard deviation s (n - 1 degrees of freedom) bound the next one by
    ``m ± t s sqrt(1 + 1/n)``, with t the quantile of Student's distribution (Hahn and Meeker, "Statistical Intervals",
    1991, section 4.7). The false alarms are split equally among the points (Bonferroni), so points need not be
    independent.

    Args:
        draws: at least two curves of equal length.
        false_alarms: share of whole curves, between 0 and 1.
    """
    values = np.asarray(draws, dtype=np.float64)
    count, points = values.shape
    quantile = stats.t.ppf(1 - false_alarms / (2 * points), count - 1)
    half = quantile * values.std(axis=0, ddof=1) * math.sqrt(1 + 1 / count)
    mean = values.mean(axis=0)
    return Band(tuple((mean - half).tolist()), tuple((mean + half).tolist()))


Kind = Literal["plain", "rounded", "te"]
RECORD = "training_curves.jsonl"
# The precisions that can train: BF16 and the recipes that compute in it.
TRAINED = {name: precision for name, precision in PRECISIONS.items() if precision.dtype == torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        models: names in ``training.ARCHITECTURES``.
        precisions: names in ``TRAINED``.
        steps: number of training steps.
        draws: number of realisations of the rounding model, which set the expected band.
        seed: the seed of weights and batches.
        batch: sequences per step.
        seq: bytes per sequence.
        hidden, layers, heads, groups: sizes of the models; only the llama uses ``groups``.
        learning_rate: AdamW's learning rate.
        warmup: steps until the learning rate is reached.
        final: number of last steps whose mean is the final loss.
        false_alarms: share of faithful curves that leave their band somewhere.
    """

    models: tuple[str, ...] = tuple(ARCHITECTURES)
    precisions: tuple[str, ...] = tuple(TRAINED)
    steps: int = 50
    draws: int = 8
    seed: int = 0
    batch: int = 4
    seq: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    groups: int = 2
    learning_rate: float = 1e-3
    warmup: int = 10
    final: int = 10
    false_alarms: float = 0.01


FULL = Settings()
QUICK = Settings(precisions=("bf16", "fp8_current"), steps=12, draws=4, final=4, seq=32, hidden=64, heads=2, groups=1)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: the name of an architecture.
        kind: plain FP32, the plain model under a rounding model, or TE.
        precision: a name in ``TRAINED``; empty for plain FP32.
        draw: the number of the rounding model's realisation, from 1; 0 for other kinds.
    """

    model: str
    kind: Kind
    precision: str = ""
    draw: int = 0


# Each run's entry in the record, with its losses and TE's GPU; None if the run has not been made.
Results = Mapping[Run, Mapping[str, Any] | None]


@dataclass(frozen=True)
class Outcome:
    """Hold a TE model's training next to its expectation.

    Attributes:
        run: TE's run.
        gpu: the real or emulated GPU that TE ran on.
        plain: losses of the plain FP32 model.
        te: losses of TE's model.
        band: the expected band of their differences.
        final_band: the expected interval of the final losses' difference, as a band with one point.
        final: difference of the final losses, TE's minus plain.
    """

    run: Run
    gpu: str
    plain: tuple[float, ...]
    te: tuple[float, ...]
    band: Band
    final_band: Band
    final: float

    @property
    def differences(self) -> tuple[float, ...]:
        """TE's losses minus plain FP32's."""
        return _difference(self.te, self.plain)

    @property
    def margin(self) -> float:
        """The largest distance from the band's middle in half widths. Up to 1, the curve follows the plain model's."""
        return self.band.margin(self.differences)

    @property
    def final_margin(self) -> float:
        """The distance of the final losses' difference from the middle of its interval, in half widths."""
        return self.final_band.margin([self.final])


def measured(settings: Settings, folder: Path) -> tuple[Sequence[Outcome], Mapping[str, str], Settings, Kernels]:
    """Train what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a model or precision is unknown, or there are fewer than two draws.
    """
    _check(settings)
    kernels = te.kernels()
    found = results(settings, folder, kernels)
    return outcomes(settings, found), _untrained(settings, found, kernels), settings, kernels


def results(settings: Settings, folder: Path, kernels: Kernels) -> Results:
    """Make the missing runs that these kernels can make, and return all runs in the folder's record."""
    campaign: Campaign[Run, dict[str, Any]] = Campaign(
        folder / RECORD,
        dict[str, Any],
        functools.partial(_identity, settings=settings, kernels=kernels),
        record.code_of(__name__),
    )

    def train(entry: Run) -> dict[str, Any]:
        losses = [round(loss, 6) for loss in losses_of(entry, settings, kernels)]
        return {"losses": losses, "gpu": _gpu(kernels) if entry.kind == "te" else ""}

    entries = list(_runs(settings))
    able = [
        entry for entry in entries if entry.kind != "te" or why_unavailable(TRAINED[entry.precision], kernels) is None
    ]
    campaign.complete(able, train, "training")
    found = campaign.finished(entries)
    return {entry: found.get(entry) for entry in entries}


def _untrained(settings: Settings, found: Results, kernels: Kernels) -> dict[str, str]:
    """Return the precisions without a TE run, each with the reason."""
    trained = {entry.precision for entry, result in found.items() if entry.kind == "te" and result is not None}
    reasons = {name: why_unavailable(TRAINED[name], kernels) for name in settings.precisions if name not in trained}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _check(settings: Settings) -> None:
    check_names("models", settings.models, ARCHITECTURES)
    check_names("precisions", settings.precisions, TRAINED)
    if settings.draws < 2:
        raise UserError(f"draws: must be at least 2 to estimate a spread, not {settings.draws}")
    if settings.false_alarms >= 1:
        raise UserError(f"false_alarms: must be below 1, not {settings.false_alarms:g}")
    for name in settings.models:
        size = size_of(name, settings)
        training.check(size, settings.batch, [TRAINED[each] for each in settings.precisions])


def losses_of(entry: Run, settings: Settings, kernels: Kernels) -> list[float]:
    """Train one model, and return its loss at each step in nats per byte."""
    torch.manual_seed(settings.seed + entry.draw)  # for stochastic rounding
    model, forward_backward, dtype = _prepared(entry, settings, kernels)
    data = batches(settings.seed, settings.steps, settings.batch, settings.seq)
    if entry.kind == "te":
        # Delayed scaling needs a history before the first step counts, as in all of parity's comparisons.
        for _ in range(TRAINED[entry.precision].warmup_passes):
            forward_backward(model, data[0])
    return train(model, Schedule(settings.learning_rate, settings.warmup), data, forward_backward, dtype)


def _prepared(entry: Run, settings: Settings, kernels: Kernels) -> tuple[LanguageModel, Pass, torch.dtype]:
    """Return the model at step 0, its pass, and the dtype that weights and gradients are rounded to."""
    architecture, size = ARCHITECTURES[entry.model], size_of(entry.model, settings)
    initial = initial_weights(architecture, size, settings.seed, torch.bfloat16)
    if entry.kind == "te":
        precision = TRAINED[entry.precision]
        model = architecture.candidate(size, kernels).to(precision.dtype)
        load_candidate(model, architecture, size, initial)
        return model, te_pass(precision, kernels), precision.dtype
    model = architecture.reference(size)
    load(model, initial)
    if entry.kind == "plain":
        return model, plain_pass, torch.float32
    precision = TRAINED[entry.precision]
    return model, rounded_pass(dithered(precision.rounding, entry.draw)), precision.dtype


def outcomes(settings: Settings, found: Results) -> list[Outcome]:
    """Return TE's runs next to their expectations, without those that did not run."""
    return [
        _outcome(entry, settings, found)
        for entry in _runs(settings)
        if entry.kind == "te" and found.get(entry) is not None
    ]


def _outcome(entry: Run, settings: Settings, found: Results) -> Outcome:
    def losses(of: Run) -> tuple[float, ...]:
        result = found[of]
        assert result is not None, "every run but TE's can run anywhere"
        return tuple(result["losses"])

    plain, candidate = losses(Run(entry.model, "plain")), losses(entry)
    shared = _rounds_alike(entry.precision)
    draws = [_difference(losses(draw), plain) for draw in _draws(entry.model, shared, settings)]
    return Outcome(
        run=entry,
        gpu=(found[entry] or {})["gpu"],
        plain=plain,
        te=candidate,
        band=prediction_band(draws, settings.false_alarms),
        final_band=prediction_band([[_final(draw, settings)] for draw in draws], settings.false_alarms),
        final=_final(candidate, settings) - _final(plain, settings),
    )


def _difference(losses: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(losses, others, strict=True))


def _final(losses: Sequence[float], settings: Settings) -> float:
    last = losses[-settings.final :]
    return sum(last) / len(last)


def size_of(model: str, settings: Settings) -> Size:
    """Return the size of one of the study's models."""
    ffn = settings.hidden * ARCHITECTURES[model].widening
    return Size(VOCABULARY, settings.seq, settings.hidden, settings.layers, settings.heads, settings.groups, ffn)


def _runs(settings: Settings) -> Iterator[Run]:
    for model in settings.models:
        yield Run(model, "plain")
        yield from (Run(model, "te", precision) for precision in settings.precisions)
        for precision in dict.fromkeys(map(_rounds_alike, settings.precisions)):
            yield from _draws(model, precision, settings)


def _draws(model: str, precision: str, settings: Settings) -> Iterator[Run]:
    return (Run(model, "rounded", precision, draw) for draw in range(1, 1 + settings.draws))


def _rounds_alike(precision: str) -> str:
    """Return the first precision with the same rounding model. Recipes that only scale at other times share one."""
    return next(name for name, known in TRAINED.items() if known.rounding == TRAINED[precision].rounding)


def _identity(entry: Run, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a run's losses depend on, which excludes the choice of other runs."""
    selection = {"models", "precisions", "draws", "final", "false_alarms"}
    identity = {name: value for name, value in dataclasses.asdict(settings).items() if name not in selection}
    identity |= dataclasses.asdict(entry) | {"start": _fingerprint(entry.model, settings)}
    return identity | ({"kernels": kernels.backend, "te": te.version()} if entry.kind == "te" else {})


@functools.lru_cache(maxsize=256)
def _fingerprint(model: str, settings: Settings) -> int:
    """Return the fingerprint of the initial weights and batches."""
    initial = initial_weights(ARCHITECTURES[model], size_of(model, settings), settings.seed, torch.bfloat16)
    data = batches(settings.seed, settings.steps, settings.batch, settings.seq)
    return record.fingerprint([*initial.values(), *data])


def _gpu(kernels: Kernels) -> str:
    return torch.cuda.get_device_name() if kernels.backend == "gpu" else cuda.emulated_gpu().name


# The report: curves with their bands.


_OTHER_GPU = """\
Another emulated GPU may run them: `PARITY_EMULATED_GPU=blackwell python -m lab study training_curves` adds its runs
to the record and draws this report again."""

_METHOD = """\
- **Models**: a GPT (LayerNorm, GELU, learned positions, biases) and a llama (RMSNorm, RoPE, grouped-query attention,
  SwiGLU), in plain PyTorch and from `te.TransformerLayer` with `te.LayerNormLinear` as the head. The recipe covers the
  whole TE model, head included; embeddings are PyTorch's, the loss is computed in FP32. The text is
  `lab/studies/training.py`, read byte by byte.
- **Weights**: AdamW holds FP32 masters. TE's parameters and gradients are BF16 and take the masters' rounding after
  each step, as in Megatron-LM. Every run starts from the same BF16-exact weights and reads the same batches.
  Delayed scaling, which needs a history of amaxes, makes its warm-up passes on the first batch, without a step, before
  training.
- **Expectation**: on the same weights and batches, the plain model also trains under {draws} realisations of the
  precision's rounding model (`parity/rounding/`, dithered by `lab/studies/training_curves/study.py`; neither
  shares code with TE or the kernels), with BF16 parameters and gradients as above. The difference of each of those
  losses from plain FP32's is a draw from what rounding does to this curve. The band is where one more draw lies at
  all steps together, but for
  {percent} % of draws: `mean ± t s sqrt(1 + 1/n)` at each step, with t from Student's distribution and the share split
  over the steps (Bonferroni). Nothing in it is tuned, and TE has no part in it.
- **Final loss**: the mean of the last {final} steps. Its expected interval is made from the same draws in the same
  way, as a single point.
- **Margin**: the largest distance from the middle of the band in half widths; up to 1 is inside.
- **What it cannot see**: a loss curve is a blunt instrument. On a small llama, exchanged keys and values leave the
  band at each precision, but an exchanged gate and up in BF16 alone; FP8's rounding hides them
  (`tests/studies/test_training_curves.py`): young weights are small, and either order trains. `parity run` compares
  tensors, and sees both."""


def write(
    outcomes: Sequence[Outcome], missing: Mapping[str, str], settings: Settings, kernels: Kernels, folder: Path
) -> Path:
    """Write ``training_curves.md`` and a plot for each model into the folder, and return the report's path.

    Args:
        outcomes: the outcomes of TE's runs.
        missing: precisions without a run, each with the reason.
        settings: the study's settings.
        kernels: the kernels that TE ran on.
        folder: an existing folder.
    """
    shown = [model for model in settings.models if any(outcome.run.model == model for outcome in outcomes)]
    for model in shown:
        of_model = [outcome for outcome in outcomes if outcome.run.model == model]
        _plot(of_model).savefig(folder / _picture(model), dpi=100)
    return reporting.written(folder / "training_curves.md", _sections(outcomes, missing, settings, kernels, shown))


def _sections(
    outcomes: Sequence[Outcome], missing: Mapping[str, str], settings: Settings, kernels: Kernels, shown: Sequence[str]
) -> Iterator[str]:
    followed = sum(outcome.margin <= 1 and outcome.final_margin <= 1 for outcome in outcomes)
    yield "# Do TransformerEngine's models train like the plain models?"
    yield f"**{followed} of {len(outcomes)} runs follow the plain model** within the expected effect of rounding."
    yield (
        f"Kernels: {KERNELS[kernels.backend]}. TransformerEngine {te.version()}, torch {torch.__version__}. "
        f"{settings.steps} steps of {settings.batch} x {settings.seq} bytes; {settings.layers} layers, hidden "
        f"{settings.hidden}, {settings.heads} heads; seed {settings.seed}."
    )
    yield _table(outcomes)
    for name, reason in missing.items():
        yield f"- `{name}` did not run: {reason}"
    if missing and kernels.backend == "cpu":
        yield _OTHER_GPU
    for model in shown:
        yield f"## {model}"
        yield (
            "Above, the losses. Below, TE's loss minus the plain FP32 model's at each step, and the band in which a "
            "faithful port's difference is expected."
        )
        yield f"![Loss curves of the {model}]({_picture(model)})"
    yield "## How it was done"
    yield _METHOD.format(
        draws=settings.draws,
        percent=f"{100 * settings.false_alarms:g}",
        final=settings.final,
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        followed = outcome.margin <= 1 and outcome.final_margin <= 1
        (low,), (high,) = outcome.final_band.low, outcome.final_band.high
        rows.append(
            [
                PASSED if followed else FAILED,
                outcome.run.model,
                outcome.run.precision,
                outcome.gpu,
                f"{outcome.plain[-1]:.3f}",
                f"{outcome.final:+.4f}",
                f"{low:+.4f} to {high:+.4f}",
                short(outcome.final_margin),
                short(max(map(abs, outcome.differences))),
                short(outcome.margin),
            ]
        )
    headers = [
        "",
        "model",
        "precision",
        "GPU",
        "last loss, plain",
        "final loss, TE - plain",
        "expected",
        "final margin",
        "largest difference",
        "margin",
    ]
    return markdown_table(rows, headers)


def _picture(model: str) -> str:
    return f"training_curves_{model}.png"


def _plot(outcomes: Sequence[Outcome]) -> Figure:
    figure = Figure(figsize=(3.4 * len(outcomes), 5.6), layout="constrained")
    axes = figure.subplots(2, len(outcomes), squeeze=False, sharex=True, sharey="row")
    for (above, below), outcome in zip(axes.T, outcomes, strict=True):
        steps = range(1, len(outcome.plain) + 1)
        above.plot(steps, outcome.plain, label="plain PyTorch, FP32", color="black", linewidth=1)
        above.plot(steps, outcome.te, label="TE", color="tab:orange", linestyle="--")
        above.set_title(f"{outcome.run.precision}\n{outcome.gpu}", fontsize="medium")
        below.fill_between(steps, outcome.band.low, outcome.band.high, alpha=0.25, label="expected")
        below.plot(steps, outcome.differences, color="tab:orange", label="TE - plain")
        below.axhline(0, color="black", linewidth=0.5)
        below.set_xlabel("step")
    axes[0][0].set_ylabel("loss, nats a byte")
    axes[1][0].set_ylabel("difference, nats a byte")
    axes[0][0].legend(fontsize="small")
    axes[1][0].legend(fontsize="small")
    return figure
