"""``parity throughput``: measure each workload, in a process that is replaced if a kernel kills it, and report."""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity.machine.files import claimed
from parity.machine.process import spawned
from parity.measuring.throughput import measure, record
from parity.measuring.throughput.measure import Plan, row_without
from parity.measuring.throughput.record import EMULATED, GpuState, Peak, Record, Row, Spread
from parity.measuring.throughput.workload import COMPILED, Implementation, Workload, implementations
from parity.progress import Following
from parity.report.numbers import markdown_table, short
from parity.report.templates import render
from parity.user_error import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "throughput"
_REPEATS = {"gpu": 30, "cpu": 5}


@dataclass(frozen=True)
class Settings:
    """Say what to measure.

    Attributes:
        workloads: the workloads, in the order in which they are measured.
        precisions: their names in ``parity.te``.
        backend: whose kernels are measured.
        repeats: how many passes are timed; None for 30 on a GPU and 5 on a CPU.
        compiled: precisions in which the plain module is also measured under ``torch.compile``.
        minutes: how long new measurements may be started; None for no limit.
    """

    workloads: Sequence[Workload]
    precisions: tuple[str, ...]
    backend: measure.Asked
    repeats: int | None = None
    compiled: tuple[str, ...] = ()
    minutes: float | None = None


def run(settings: Settings, folder: Path) -> Path:
    """Measure, and write ``throughput.jsonl``, ``throughput.md`` and ``throughput.png`` into the folder.

    The report is drawn again after each workload, so that an interrupted run leaves one.

    Returns:
        The report's path.

    Raises:
        UserError: if the backend is not available, the folder cannot be written to, or another run writes to it.
    """
    file = folder / f"{NAME}.jsonl"
    ends = math.inf if settings.minutes is None else time.time() + 60 * settings.minutes
    with claimed(file) as claim, _replaced_processes() as call:
        claim.begin(b"")
        formats = _list_peak_formats(settings)
        why = call(measure.begin, settings.backend, formats, len(settings.workloads), file)
        environment = record.read(file).environment
        if environment is None:
            raise UserError(str(why or "the process that measures the device's peak was ended"))
        plan = Plan(settings.repeats or _REPEATS[environment.backend], ends)
        chosen = list(implementations(settings.precisions, settings.compiled, environment.backend == "gpu"))
        rounds = list(_plan_rounds(settings.workloads, chosen))
        with Following("measuring", len(rounds)) as following:
            for workload, some in rounds:
                following.step(0, f"measuring {workload.name}")
                _measure_workload(
                    workload, some, lambda *work: call(measure.measure_one, *work, plan, settings.backend, file), file
                )
                write(record.read(file), folder / f"{NAME}.md")
                following.step()
    return folder / f"{NAME}.md"


def _plan_rounds(
    workloads: Sequence[Workload], chosen: Sequence[Implementation]
) -> Iterator[tuple[Workload, list[Implementation]]]:
    """Yield workloads with their implementations, the compiled ones last: they take longest, and time may run out."""
    for is_compiled in (False, True):
        some = [each for each in chosen if (each.kind == COMPILED) == is_compiled]
        yield from ((workload, some) for workload in workloads if some)


def _list_peak_formats(settings: Settings) -> list[str]:
    """Return the formats whose peaks are needed on a GPU."""
    chosen = implementations(settings.precisions, settings.compiled, on_gpu=True)
    return list(dict.fromkeys(each.peak_format for each in chosen if each.peak_format is not None))


def _measure_workload(
    workload: Workload, chosen: Sequence[Implementation], measure: Callable[..., object], file: Path
) -> None:
    """Measure all implementations, starting a new process whenever one was killed."""
    left = list(chosen)
    while left:
        answer = measure(workload, left)
        left = [each for each in left if (each.kind, each.precision) not in _find_measured(workload, file)]
        if left and answer is not False:
            record.append(file, row_without(workload, left.pop(0), "the process ended in this measurement"))


def _find_measured(workload: Workload, file: Path) -> set[tuple[str, str]]:
    """Return the kinds and precisions of the rows that a workload already has."""
    rows = record.read(file).rows
    of_workload = (row for row in rows if (row.workload, row.size) == (workload.case, workload.size_text))
    return {(row.implementation, row.precision) for row in of_workload}


@contextmanager
def _replaced_processes() -> Iterator[Callable[..., object]]:
    """Yield a function that calls another one in a process, which is replaced if it dies or its call returns False.

    The function returns None if the process died.
    """
    pools: list[ProcessPoolExecutor] = []

    def call(function: Callable[..., object], *arguments: object) -> object:
        if not pools:
            pools.append(spawned(1))
        try:
            answer = pools[0].submit(function, *arguments).result()
        except BrokenProcessPool:
            pools.pop().shutdown()
            return None
        if answer is False:
            pools.pop().shutdown()
        return answer

    try:
        yield call
    finally:
        for pool in pools:
            pool.shutdown()


# The plot of speed against error, which shows what each precision gains and costs, with a panel for each workload.


_COLUMNS = 3
_MARKERS = {"eager": "o", "compiled": "s", "TE": "^"}


def draw_plot(found: Record) -> Figure:
    """Draw the speed of both passes over the output's error. A workload without any errors gets no panel."""
    from matplotlib.figure import Figure  # an extra, which the rest of the report does without

    panels: dict[str, list[Row]] = {}
    for row in found.rows:
        if row.times is not None and row.error:
            panels.setdefault(f"{row.workload}\n{row.size}", []).append(row)
    columns = max(1, min(_COLUMNS, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5 * columns, 4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(axis, title, rows)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    device = "" if found.environment is None else found.environment.device
    figure.suptitle(EMULATED if found.is_emulated else f"Speed against error, {device}", fontsize="medium", wrap=True)
    return figure


def speed(row: Row) -> float:
    """Return the TFLOP/s of both passes, or passes a second if there are no matrix products."""
    assert row.times is not None
    return row.flops / row.times.both / 1e12 if row.flops else 1 / row.times.both


def _draw_panel(axis: Axes, title: str, rows: list[Row]) -> None:
    for kind, marker in _MARKERS.items():
        of_kind = [row for row in rows if row.implementation == kind]
        points = [(row.error or 0.0, speed(row)) for row in of_kind]
        axis.plot([x for x, _ in points], [y for _, y in points], marker, label=kind)
        for row, point in zip(of_kind, points, strict=True):
            axis.annotate(row.precision, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="relative error of the output")
    axis.set_ylabel("TFLOP/s, forward and backward" if any(row.flops for row in rows) else "passes a second")
    axis.set_title(title, fontsize="small")
    axis.legend(fontsize="x-small")


# The report of a measurement: what each precision gains and costs, then every row.


_BASE = ("eager", "bf16")
_ROW_HEADERS = (
    *("implementation", "forward ms", "backward ms", "TFLOP/s forward", "TFLOP/s backward", "of peak", "memory GiB"),
    *("error", "MHz", "°C", "notes"),
)


def write(found: Record, path: Path) -> None:
    """Write the report, and its plot beside it if matplotlib is installed."""
    plot = path.with_suffix(".png")
    has_plot = importlib.util.find_spec("matplotlib") is not None and any(row.error for row in found.rows)
    if has_plot:
        draw_plot(found).savefig(plot, dpi=110)
    path.write_text(draw(found, plot.name if has_plot else None), encoding="utf-8")


def draw(found: Record, plot: str | None) -> str:
    """Return the report, markdown.

    Args:
        found: what has been measured.
        plot: the file name of the plot, or None if there is none.
    """
    here = found.environment
    return render(
        "measuring/throughput/report.md.jinja",
        emulated=EMULATED if found.is_emulated else "",
        environment=markdown_table(here.facts.items(), ("environment", "")) if here is not None else "",
        summary=_tabulate_summary(found.rows),
        plot=plot,
        peaks=_tabulate_peaks(found.peaks),
        workloads={
            workload: markdown_table([(row.name, *_format_cells(row, found)) for row in rows], _ROW_HEADERS)
            for workload, rows in _by_workload(found.rows).items()
        },
    )


def _by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by workload, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"`{row.workload}`, {row.size}", []).append(row)
    return found


def _tabulate_summary(rows: Sequence[Row]) -> str:
    workloads = _by_workload(rows)
    cells = {name: {row.name: _format_speedup_and_error(row, of) for row in of} for name, of in workloads.items()}
    names = dict.fromkeys(row.name for row in rows)
    return markdown_table(
        [(name, *(cells[each].get(name, "") for each in workloads)) for name in names], ("", *workloads)
    )


def _format_speedup_and_error(row: Row, rows: Sequence[Row]) -> str:
    """Return ``1.8×, 2.3e-3``."""
    base = next((other.times for other in rows if (other.implementation, other.precision) == _BASE), None)
    speed = "–" if row.times is None or base is None else f"{short(base.both / row.times.both)}×"
    return f"{speed}, {_format_error(row)}"


def _tabulate_peaks(peaks: Sequence[Peak]) -> str:
    rows = [
        (peak.format, "–", peak.why_none)
        if peak.why_none
        else (peak.format, _format_teraflops(peak.flops), f"{peak.size}³")
        for peak in peaks
    ]
    return markdown_table(rows, ("format", "TFLOP/s", "product"))


def _format_cells(row: Row, found: Record) -> list[str]:
    if row.times is None:
        return ["–"] * (len(_ROW_HEADERS) - 2) + [f"not measured: {row.why_none}"]
    times, share = row.times, found.peak_share(row)
    return [
        _format_milliseconds(times.forward),
        _format_milliseconds(times.backward),
        _format_rate(row.flops_forward, times.forward),
        _format_rate(row.flops_backward, times.backward),
        "–" if share is None else f"{100 * share:.0f} %",
        "–" if row.memory is None else f"{row.memory / 2**30:.2f}",
        _format_error(row),
        _format_change(row.before, row.after, "sm_mhz"),
        _format_change(row.before, row.after, "celsius"),
        "; ".join(notes(row)) or "–",
    ]


def notes(row: Row) -> Iterator[str]:
    """Yield reasons not to take a row's numbers at face value."""
    if row.times is not None and row.times.launch_bound:
        yield "launch-bound: the GPU waits for the host"
    throttles = [state.throttles for state in (row.before, row.after) if state is not None]
    if any(throttles):
        yield f"throttled: {', '.join(dict.fromkeys(itertools.chain(*throttles)))}"
    if row.why_no_error:
        yield f"no error: {row.why_no_error}"


def _format_milliseconds(spread: Spread) -> str:
    """Return ``1.23 (1.20 to 1.31)``."""
    median, lower, upper = (_three_digits(1e3 * seconds) for seconds in (spread.median, spread.lower, spread.upper))
    return f"{median} ({lower} to {upper})"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _format_rate(flops: int, spread: Spread) -> str:
    return _format_teraflops(flops / spread.median) if flops else "–"


def _format_teraflops(flops: float) -> str:
    return _three_digits(flops / 1e12)


def _format_error(row: Row) -> str:
    return "–" if row.error is None else short(row.error)


def _format_change(before: GpuState | None, after: GpuState | None, name: str) -> str:
    """Return ``1980 → 1755``."""
    values = [None if state is None else getattr(state, name) for state in (before, after)]
    return "–" if values == [None, None] else " → ".join("–" if value is None else f"{value:.0f}" for value in values)
