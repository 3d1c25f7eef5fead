"""Measure how far right ports stray from the rounding model, and fit the laws of ``parity.judge.limits`` to that.

``docs/statistics.md`` explains the method. The last part of this module measures how much right kernels of the same
port differ, for the laws of ``parity.judge.noise``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import stats

from parity import te
from parity.case.case import Case
from parity.case.recipes import find_precision
from parity.case.validate import CheckedSize, check_case
from parity.judge import limits, noise
from parity.judge.directions import directions
from parity.judge.judge import observe
from parity.judge.limits import (
    FALSE_ALARMS_A_RUN,
    FEWEST_TENSORS,
    STATISTICS_A_RUN,
    TIMES,
    Difference,
    Key,
    Law,
    OfPrecision,
    Table,
    fit,
    packaged,
    too_few,
)
from parity.judge.second_look import kinks_moved
from parity.measuring import right_ports
from parity.measuring.record import made
from parity.measuring.right_ports import drawn
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.passes.all_passes import Tensors, golden_truths, model_tensors, run_candidate, run_model
from parity.passes.prepare import forget, prepare
from parity.report import environment, record
from parity.report.changes import Change, between
from parity.report.numbers import markdown_table, plural, short
from parity.report.record import Record
from parity.report.templates import render
from parity.result import Kind
from parity.shown import few_of, one_line
from parity.te import Backend, Kernels, Precision, why_unavailable
from parity.user_error import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # an extra, which only the report needs

# ``parity calibrate``: draw samples from many cases in parallel, fit laws to them, and write a table and its report.


@dataclass(frozen=True)
class Settings:
    """Say what to measure.

    Attributes:
        files: files of pairs that are known to agree, or ``right_ports.ZOO``.
        precisions: their names, or ``FILE::NAME``; those that this machine cannot run are left out.
        seeds: seeds of weights and inputs.
        draws: how many random kernels are drawn for each case, precision and seed.
        backend: whose kernels run the TE modules.
    """

    files: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    draws: int
    backend: Backend | Literal["auto"]


def make_table(
    settings: Settings, workers: int | None, output: Path, report_file: Path | None, accept_wider: bool = False
) -> None:
    """Measure, and write the table. Laws of other precisions that the file already has are kept.

    Args:
        settings: what to measure.
        workers: how many processes to use; None for this one.
        output: the table.
        report_file: a markdown file that shows the fit; None for none.
        accept_wider: whether limits far outside of the packaged ones are written, too.

    Raises:
        UserError: if nothing or too few tensors could be measured, or the file is not a table, or limits lie far
            outside of the packaged ones and are not accepted. Nothing is written then.
    """
    before = limits.load(output) if output.exists() else Table({}, {})
    _check_enough(settings)
    measured = measure(settings, workers)
    for port in measured.left_out:
        print(f"left out: {port}", file=sys.stderr)
    samples = measured.samples
    if not samples:
        why = "every port raised" if measured.left_out else "no precision of these cases runs on this machine"
        raise UserError(f"nothing was measured: {why}")
    precisions = sorted({sample.precision for sample in samples})
    kept = {key: law for key, law in before.laws.items() if key[0] not in precisions}
    provenance = {**before.provenance, **dict.fromkeys(precisions, _describe_provenance(settings))}
    fitted = laws(samples)
    strays = limits.far_outside(fitted)
    if strays and not accept_wider:
        raise UserError(refusal(strays, samples, fitted, output))
    for key, law in fitted.items():
        why = limits.why_no_limit(key, law)
        if why:
            raise UserError(f"{why}; add more pairs, or remove those whose errors scatter this much")
    for precision in {key[0] for key in strays}:
        of_precision = [each for key, each in strays.items() if key[0] == precision]
        provenance[precision] = {**provenance[precision], "accepted": describe_strays(of_precision)}
    made = Table(kept | fitted, provenance)
    for line in summary(made, precisions):
        print(line)
    output.parent.mkdir(parents=True, exist_ok=True)
    limits.save(made, output)
    if report_file is not None:
        write_report(made, measured, report_file)


def _list_available_precisions(settings: Settings, kernels: te.Kernels) -> list[Precision]:
    precisions = map(find_precision, settings.precisions)
    return [precision for precision in precisions if why_unavailable(precision, kernels) is None]


def measure(settings: Settings, workers: int | None) -> Measured:
    """Return all samples of all cases, even if some of them raise."""
    measured = Measured()
    jobs = [(file, case.name) for file in settings.files for case in right_ports.fitted(file)]
    for _, of_case in made(jobs, functools.partial(_measure_case, settings), "calibrating", workers):
        measured.add(of_case)
    return measured


def _measure_case(settings: Settings, job: tuple[str, str]) -> Measured:
    """Return all samples of one case, at its own sizes and at one drawn for each seed. May run in another process."""
    file, name = job
    kernels = te.kernels(settings.backend)
    case = right_ports.case(file, name)
    precisions = [
        precision for precision in _list_available_precisions(settings, kernels) if case.runs_at(precision.name)
    ]
    measured = Measured()
    for seed in settings.seeds:
        for precision in precisions:
            sized = dataclasses.replace(case, sizes=(*case.sizes, drawn(case, precision, seed)))
            for checked in check_case(sized, kernels.te):
                try:
                    measured.samples.extend(draw(case, checked, precision, seed, kernels, settings.draws))
                except Exception as error:  # raised by the case's modules, e.g. if a recipe does not support the size
                    forget()  # the pass may have left the reference half-changed
                    measured.left_out.append(LeftOut(name, checked.label, precision.name, seed, one_line(error)))
    return measured


def _describe_provenance(settings: Settings) -> dict[str, Any]:
    here = environment.measure(te.kernels(settings.backend).backend, settings.seeds, 0)
    return {
        "kernels": here.kernels,
        "device": here.device,
        "transformer_engine": here.transformer_engine,
        "torch": here.torch,
        "date": here.date,
        "seeds": list(settings.seeds),
        "draws": settings.draws,
        "files": [Path(file).name for file in settings.files],
    }


# Check that the cases have enough tensors for a law, as far as that is known before anything runs.


def _check_enough(settings: Settings) -> None:
    """Check that there are enough gradients to fit laws to. Outputs can only be counted by running the modules.

    Raises:
        UserError: if too few different inputs or weights get gradients, or as for ``check_case``.
    """
    kernels = te.kernels(settings.backend)
    cases = [case for file in settings.files for case in right_ports.fitted(file)]
    for precision in _list_available_precisions(settings, kernels):
        found: Counter[Kind] = Counter()
        for case in cases:
            if found and min(found.values()) >= FEWEST_TENSORS:
                break
            if case.runs_at(precision.name):
                found += _count_gradients(case, precision, settings.seeds, kernels.te)
        for kind, count in found.items():
            if count < FEWEST_TENSORS:
                raise UserError(f"{kind}s in {precision.name}: {too_few(count)}")


def _count_gradients(case: Case, precision: Precision, seeds: Sequence[int], te: ModuleType) -> Counter[Kind]:
    """Count the gradients of all different sizes."""
    sized = dataclasses.replace(case, sizes=(*case.sizes, *(drawn(case, precision, seed) for seed in seeds)))
    by_label = {checked.label: checked for checked in check_case(sized, te)}.values()
    found: Counter[Kind] = Counter()
    found["input gradient"] = sum(checked.inputs for checked in by_label)
    found["weight gradient"] = sum(checked.trained for checked in by_label)
    return +found


# The samples that laws are fitted to: how faithful ports compare with the rounding model.
#
# Two kinds of port are known to be right. One is the reference itself under the rounding model, with every freedom that
# a kernel has drawn at random. The other is the TransformerEngine modules of the cases, so these must be pairs that
# certainly agree, such as those of the default suite.
#
# When rounding puts a value on the other side of a kink, the error is not small, and no law covers it. A comparison
# allows for that in its second look. Here it is allowed for from the beginning.


@dataclass(frozen=True)
class Sample:
    """One statistic of one tensor of one faithful port.

    Attributes:
        case: the case's name and size.
        precision: the precision's name.
        kind: the tensor's kind.
        tensor: the tensor's name.
        port: ``model`` or ``te``.
        seed: the seed of weights and inputs.
        statistic: the statistic's name.
        value: its value, as ``parity.judge.statistics`` defines it.
    """

    case: str
    precision: str
    kind: str
    tensor: str
    port: str
    seed: int
    statistic: str
    value: float

    @property
    def key(self) -> Key:
        """Return the key of the law that this is a sample for."""
        return self.precision, self.kind, self.statistic


@dataclass(frozen=True)
class LeftOut:
    """A port that could not run.

    Attributes:
        case, precision: their names.
        size: the size's label.
        seed: the seed of weights and inputs.
        reason: what it raised, in one line.
    """

    case: str
    size: str
    precision: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return f"{self.case} at {self.size} in {self.precision}, seed {self.seed}: {self.reason}"


@dataclass(frozen=True)
class Measured:
    """Hold the results of a measurement.

    Attributes:
        samples: the samples of all ports.
        left_out: the ports that could not run.
    """

    samples: list[Sample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.samples.extend(other.samples)
        self.left_out.extend(other.left_out)


def draw(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    draws: int,
) -> Iterator[Sample]:
    """Yield samples of one case at one size, precision and seed.

    Args:
        case, checked, precision, seed, kernels: what to run.
        draws: how many random kernels are drawn.
    """
    prepared = prepare(case, checked, precision.dtype, seed, kernels)
    known = directions(prepared)
    golden = golden_truths(prepared)
    models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    models += [run_model(prepared, precision.rounding, UNFUSED, kinks) for kinks in kinks_moved(prepared)]
    rng = random.Random(f"{case.name} {checked.label} {precision.name} {seed}")
    ports: list[tuple[str, Tensors]] = [
        ("model", run_model(prepared, precision.rounding, Freedom.draw(rng))) for _ in range(draws)
    ]
    ports.append(("te", run_candidate(case, checked, prepared, precision, seed, kernels)[0]))
    for port, tensors in ports:
        for key in golden:
            for found in observe(key, golden, models, tensors, precision.dtype, known):
                yield Sample(f"{case.name} {checked.label}", precision.name, *key, port, seed, found.name, found.value)


def laws(samples: Iterable[Sample]) -> dict[Key, Law]:
    """Return the law of every precision, kind of tensor and statistic that was sampled."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.key].append(sample)
    return {key: _fit_law(key, group) for key, group in grouped.items()}


def _fit_law(key: Key, group: Sequence[Sample]) -> Law:
    tensors = [f"{sample.case} {sample.tensor}" for sample in group]
    return fit([sample.value for sample in group], tensors, key[2])


# The messages about limits that differ from the packaged ones when a table is made.


# How many limits and pairs a message names at most.
_MOST_NAMED = 3


def refusal(strays: Mapping[Key, Difference], samples: Sequence[Sample], laws: Mapping[Key, Law], output: Path) -> str:
    """Say why limits are not written, which pairs widen them, and what to do.

    Args:
        strays: the limits that lie far outside of the packaged ones, the widest first.
        samples: everything that was measured.
        laws: the laws that were fitted to the samples.
        output: where the table would have been written.
    """
    limits = [f"{_name_law(key)} {short(each.limit)} instead of {short(each.packaged)}" for key, each in strays.items()]
    pairs = [
        f"{pair} ({_name_law(key, tensor=tensor)} is {short(abs(value))}, where {short(packaged().limit(*key))} passes)"
        for pair, (key, tensor, value) in _find_farthest_values(strays, samples).items()
    ]
    kept = "it stays as it is" if output.exists() else "it is not written"
    which, worst = few_of(limits, _MOST_NAMED), few_of(pairs, _MOST_NAMED)
    return (
        f"{len(strays)} of {plural(len(laws), 'limit')} would lie far outside of the packaged ones: {which}"
        f"; farthest off {'is' if len(pairs) == 1 else 'are'} {worst}; a wrong port would look the same, "
        "and would pass with these limits, so compare each pair with the packaged limits (parity run), and remove "
        "those that fail; if all are right, and these kernels really round this way, pass --accept-wider; "
        f"{output}: {kept}"
    )


def describe_strays(strays: Sequence[Difference]) -> str:
    """Say, for the table itself, which limits of one precision were accepted though far outside, the widest first."""
    worst = strays[0]
    return (
        f"{plural(len(strays), 'limit')} far outside of the packaged ones, up to {short(worst.ratio)} times "
        f"({worst.statistic} of {_pluralize_kind(worst.kind)}: {short(worst.limit)} instead of {short(worst.packaged)})"
    )


def summary(table: Table, precisions: Sequence[str]) -> Iterator[str]:
    """Yield, for each of these precisions, a line on how the table's limits compare with the packaged ones."""
    for found in limits.compared(table):
        if found.precision in precisions:
            yield f"{found.precision}: {'; '.join(_describe_differences(found))}"


def _describe_differences(found: OfPrecision) -> Iterator[str]:
    if found.widest is not None and found.tightest is not None:
        low, high = short(found.tightest.ratio), short(found.widest.ratio)
        yield f"{plural(found.shared, 'limit')}, {low} to {high} times the packaged ones"
    if found.wider:
        yield f"{found.wider} more than {TIMES:g} times as wide"
    if found.tighter:
        yield f"{found.tighter} less than 1/{TIMES:g} as wide: what passes by the packaged ones may fail"
    if found.unknown:
        yield f"{plural(found.unknown, 'limit')} that the packaged table has no law for, compared with nothing"
    if found.accepted:
        yield f"accepted: {found.accepted}"


def _find_farthest_values(
    strays: Mapping[Key, Difference], samples: Sequence[Sample]
) -> dict[str, tuple[Key, str, float]]:
    """Return for each pair the value farthest beyond its packaged limit at any size, the farthest pair first."""
    beyond: dict[str, list[tuple[float, Key, str, float]]] = defaultdict(list)
    for sample in samples:
        key = sample.key
        if key in strays:
            ratio = abs(sample.value) / packaged().limit(*key)
            beyond[sample.case.partition(" ")[0]].append((ratio, key, sample.tensor, sample.value))
    worst = {pair: max(found, key=lambda each: each[0]) for pair, found in beyond.items()}
    ordered = sorted(worst.items(), key=lambda entry: -entry[1][0])
    return {pair: found[1:] for pair, found in ordered if found[0] > 1.0}


def _name_law(key: Key, tensor: str = "") -> str:
    """Return ``norm of outputs in bf16``, or with a tensor's name instead of the kind if there is one."""
    return f"{key[2]} of {tensor or _pluralize_kind(key[1])} in {key[0]}"


def _pluralize_kind(kind: str) -> str:
    return f"{kind}s"


# The report: a calibration table, and how well its laws fit.


def write_report(table: Table, measured: Measured, path: Path) -> None:
    """Write the report, and its plot beside it.

    Args:
        table: the laws.
        measured: the samples that the laws of their precisions were fitted to.
        path: the markdown file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _draw_plot(table, measured.samples).savefig(path.with_suffix(".png"), dpi=110)
    report = render(
        "measuring/calibration.md.jinja",
        false_alarms_a_run=FALSE_ALARMS_A_RUN,
        statistics_a_run=STATISTICS_A_RUN,
        provenance=_tabulate_provenance(table.provenance),
        left_out=_tabulate_left_out(measured.left_out),
        plot=path.with_suffix(".png").name,
        samples=len(measured.samples),
        beyond=sum(abs(sample.value) > table.limit(*sample.key) for sample in measured.samples),
        laws=_tabulate_laws(table),
        made_by=environment.made_by("parity calibrate"),
    )
    path.write_text(report, encoding="utf-8")


def _tabulate_provenance(provenance: Mapping[str, Mapping[str, object]]) -> str:
    columns = list(dict.fromkeys(column for entry in provenance.values() for column in entry))
    rows = [
        [precision, *(_format_value(entry.get(column, "")) for column in columns)]
        for precision, entry in provenance.items()
    ]
    return markdown_table(rows, ["precision", *columns])


def _tabulate_left_out(ports: Sequence[LeftOut]) -> str:
    """Return a table of the cases that could not run, a row for each precision, with the first reason, or ``""``."""
    reasons = {(port.case, port.precision): port.reason for port in reversed(ports)}
    counts = Counter((port.case, port.precision) for port in ports)
    rows = [[*key, count, reasons[key]] for key, count in counts.items()]
    return markdown_table(rows, ["case", "precision", "ports", "what"]) if rows else ""


def _format_value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tabulate_laws(table: Table) -> str:
    rows = [
        [*key, f"{law.center:.3f}", f"{law.spread:.3f}", law.tensors, law.samples, short(law.largest), short(limit)]
        for key, law in sorted(table.laws.items())
        for limit in [table.limit(*key)]
    ]
    headers = ["precision", "kind", "statistic", "center", "spread", "tensors", "samples", "largest", "limit"]
    return markdown_table(rows, headers, left=3)


def _draw_plot(table: Table, samples: Sequence[Sample]) -> Figure:
    from matplotlib.figure import Figure

    precisions = list(dict.fromkeys(sample.precision for sample in samples))
    columns = min(4, len(precisions))
    figure = Figure(figsize=(3.6 * columns, 3.4 * math.ceil(len(precisions) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(precisions) / columns), columns, squeeze=False, sharex=True, sharey=True)
    required = stats.norm.isf(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN)
    for axis, precision in zip(axes.flat, precisions, strict=False):
        for statistic, values in _standardize_samples(table, samples, precision).items():
            ranks = (np.arange(len(values)) + 0.5) / len(values)
            axis.plot(stats.norm.ppf(ranks), np.sort(values), ".", markersize=2, label=statistic)
        axis.axline((0, 0), slope=1, color="black", linewidth=0.8)
        axis.axhline(required, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=precision, xlabel="normal quantile", ylabel="measured", xlim=(-1, 6), ylim=(-3, 7))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, markerscale=6)
    return figure


def _standardize_samples(table: Table, samples: Sequence[Sample], precision: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.precision == precision:
            law = table.laws[sample.key]
            found[sample.statistic].append(law.deviations(sample.value, sample.statistic))
    return found


# How much right kernels of the same port differ, from records of runs of the same right ports.


def measure_noise(others: Sequence[Path], alike: Sequence[Path], output: Path) -> int:
    """Write the laws of growth between every two runs, and return how many growths were measured.

    Args:
        others: records of runs of the same pairs, which are known to be right, under kernels that round differently.
        alike: records of the same pairs under kernels that round alike.
        output: the table.

    Raises:
        UserError: if no two of the runs share an item that both computed from the same numbers.
    """
    groups: dict[noise.Kernels, list[Record]] = {
        "others": [record.read(file) for file in others],
        "alike": [record.read(file) for file in alike],
    }
    found = [
        growth
        for kernels, runs in groups.items()
        for number, (before, after) in enumerate(itertools.combinations(runs, 2))
        for change in between(before.results, after.results)
        for growth in _extract_growths(kernels, f"{number}", change)
    ]
    missing = set(groups) - {each.kernels for each in found}
    if missing:
        raise UserError(f"no two runs of kernels {' and '.join(missing)} share an item computed from the same numbers")
    told = {kernels: [_describe_run(run) for run in runs] for kernels, runs in groups.items()}
    noise.save(found, {"runs": told}, output)
    return len(found)


def _extract_growths(kernels: noise.Kernels, runs: str, change: Change) -> Iterator[noise.Growth]:
    for each in change.statistics:
        name = f"{change.item.name} {each.tensor}"
        yield noise.Growth(kernels, runs, each.precision, each.after.statistic, name, each.growth)


def _describe_run(run: Record) -> str:
    here = run.environment
    return f"{here.device}, TransformerEngine {here.transformer_engine}, PyTorch {here.torch}, seeds {here.seeds}"
