"""``parity calibrate``: samples from many cases in parallel, laws from samples, a table and its report."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parity import te
from parity.case.validate import check_case
from parity.judge import limits
from parity.judge import limits as table
from parity.judge.limits import TIMES, Difference, Key, Law, OfPrecision, Table, packaged
from parity.lab.calibration import right_ports
from parity.lab.calibration.measure import LeftOut, Measured, Sample, check_enough, draw, laws
from parity.lab.calibration.right_ports import drawn
from parity.lab.campaign import made
from parity.passes.prepare import forget
from parity.report import environment
from parity.report.numbers import plural, short
from parity.shown import one_line
from parity.te import PRECISIONS, Backend, Precision, why_unavailable
from parity.user_error import UserError

# What is said of limits that differ from the packaged ones, when a table is made.


# How many limits and pairs are named.
_MOST = 3


def refusal(strays: Mapping[Key, Difference], samples: Sequence[Sample], laws: Mapping[Key, Law], output: Path) -> str:
    """Say why limits are not written, which pairs widen them, and what to do.

    Args:
        strays: the limits that lie far outside of the packaged ones, the widest first.
        samples: all that was measured.
        laws: what was fitted to them.
        output: where the table would be.
    """
    limits = [f"{_key(key)} {short(each.limit)} instead of {short(each.packaged)}" for key, each in strays.items()]
    pairs = [
        f"{pair} ({_key(key, tensor=tensor)} is {short(abs(value))}, where {short(packaged().limit(*key))} passes)"
        for pair, (key, tensor, value) in _farthest(strays, samples).items()
    ]
    kept = "it stays as it is" if output.exists() else "it is not written"
    return (
        f"{len(strays)} of {plural(len(laws), 'limit')} would lie far outside of the packaged ones: {_few(limits)}; "
        f"farthest off {'is' if len(pairs) == 1 else 'are'} {_few(pairs)}; a wrong port would look the same, and pass "
        "by these limits, so compare each with the packaged ones (parity run), and leave out what fails; if all are "
        f"right, and these kernels round so, say --accept-wider; {output}: {kept}"
    )


def told(strays: Sequence[Difference]) -> str:
    """Say in a table what of its limits at one precision was far outside, and accepted; the widest comes first."""
    worst = strays[0]
    return (
        f"{plural(len(strays), 'limit')} far outside of the packaged ones, up to {short(worst.ratio)} times "
        f"({worst.statistic} of {_plural(worst.kind)}: {short(worst.limit)} instead of {short(worst.packaged)})"
    )


def summary(table: Table, precisions: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of these precisions of a table: how its limits compare with the packaged ones."""
    for found in limits.compared(table):
        if found.precision in precisions:
            yield f"{found.precision}: {'; '.join(_facts(found))}"


def _facts(found: OfPrecision) -> Iterator[str]:
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


def _farthest(strays: Mapping[Key, Difference], samples: Sequence[Sample]) -> dict[str, tuple[Key, str, float]]:
    """Return of each pair, at whichever size, what lies farthest beyond its packaged limit; the farthest pair first."""
    beyond: dict[str, list[tuple[float, Key, str, float]]] = defaultdict(list)
    for sample in samples:
        key = sample.precision, sample.kind, sample.statistic
        if key in strays:
            ratio = abs(sample.value) / packaged().limit(*key)
            beyond[sample.case.partition(" ")[0]].append((ratio, key, sample.tensor, sample.value))
    worst = {pair: max(found, key=lambda each: each[0]) for pair, found in beyond.items()}
    ordered = sorted(worst.items(), key=lambda entry: -entry[1][0])
    return {pair: found[1:] for pair, found in ordered if found[0] > 1.0}


def _key(key: Key, tensor: str = "") -> str:
    """Return ``norm of output in bf16``; of a certain tensor, if there is one."""
    return f"{key[2]} of {tensor or _plural(key[1])} in {key[0]}"


def _plural(kind: str) -> str:
    return f"{kind}s"


def _few(entries: Sequence[str]) -> str:
    others = len(entries) - _MOST
    return ", ".join([*entries[:_MOST], *([f"and {others} more"] if others > 0 else [])])


# ``parity calibrate``: samples from many cases in parallel, laws from samples, a table and its report.


@dataclass(frozen=True)
class Settings:
    """Hold what is measured.

    Attributes:
        files: of pairs that are known to agree, or ``right_ports.ZOO``.
        precisions: names; those that this machine cannot run are left out.
        seeds: of weights and inputs.
        draws: random kernels a case, precision and seed.
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
    """Measure, and write the table; laws of other precisions that the file has already stay.

    Args:
        settings: what is measured.
        workers: processes; None for this one.
        output: the table.
        report_file: markdown that shows the fit; None for none.
        accept_wider: whether limits far outside of the packaged ones are written, too.

    Raises:
        UserError: if nothing could be measured, too few tensors are, or the file is no table; or if limits lie far
            outside of the packaged ones, and are not to be accepted. Nothing is written then.
    """
    before = table.load(output) if output.exists() else Table({}, {})
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
    provenance = {**before.provenance, **dict.fromkeys(precisions, _provenance(settings))}
    fitted = laws(samples)
    strays = limits.far_outside(fitted)
    if strays and not accept_wider:
        raise UserError(refusal(strays, samples, fitted, output))
    for key, law in fitted.items():
        why = table.why_no_limit(key, law)
        if why:
            raise UserError(f"{why}; give more pairs, or leave out those whose errors scatter so far")
    for precision in {key[0] for key in strays}:
        of_precision = [each for key, each in strays.items() if key[0] == precision]
        provenance[precision] = {**provenance[precision], "accepted": told(of_precision)}
    made = Table(kept | fitted, provenance)
    for line in summary(made, precisions):
        print(line)
    output.parent.mkdir(parents=True, exist_ok=True)
    table.save(made, output)
    if report_file is not None:
        from parity.lab.calibration import report

        report.write(made, measured, report_file)


def _check_enough(settings: Settings) -> None:
    kernels = te.kernels(settings.backend)
    cases = [case for file in settings.files for case in right_ports.fitted(file)]
    check_enough(cases, _available(settings, kernels), settings.seeds, kernels.te)


def _available(settings: Settings, kernels: te.Kernels) -> list[Precision]:
    precisions = map(PRECISIONS.__getitem__, settings.precisions)
    return [precision for precision in precisions if why_unavailable(precision, kernels) is None]


def measure(settings: Settings, workers: int | None) -> Measured:
    """Return all samples of all cases, whatever becomes of single ones."""
    measured = Measured()
    jobs = [(file, case.name) for file in settings.files for case in right_ports.fitted(file)]
    for _, of_case in made(jobs, functools.partial(_measure_case, settings), "calibrating", workers):
        measured.add(of_case)
    return measured


def _measure_case(settings: Settings, job: tuple[str, str]) -> Measured:
    """Return all samples of one case, at its own sizes and at one drawn for each seed; in a process of its own."""
    file, name = job
    kernels = te.kernels(settings.backend)
    case = right_ports.case(file, name)
    precisions = [precision for precision in _available(settings, kernels) if case.runs_at(precision.name)]
    measured = Measured()
    for seed in settings.seeds:
        for precision in precisions:
            sized = dataclasses.replace(case, sizes=(*case.sizes, drawn(case, precision, seed)))
            for checked in check_case(sized, kernels.te):
                try:
                    measured.samples.extend(draw(case, checked, precision, seed, kernels, settings.draws))
                except Exception as error:  # of the case's modules, as where a recipe takes no matrix of its size
                    forget()  # the pass may have left the reference half changed
                    measured.left_out.append(LeftOut(name, checked.label, precision.name, seed, one_line(error)))
    return measured


def _provenance(settings: Settings) -> dict[str, Any]:
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
