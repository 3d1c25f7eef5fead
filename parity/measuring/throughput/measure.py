"""Measure workloads, a row for each implementation, in a separate process, since a kernel may kill it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from parity import te
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.measuring import flops
from parity.measuring.flops import linear
from parity.measuring.throughput import record
from parity.measuring.throughput.record import GpuState, Peak, Row, Spread, Times
from parity.measuring.throughput.workload import (
    COMPILED,
    TE,
    Implementation,
    Passes,
    Subject,
    Workload,
    allow_tf32,
    candidate,
    compile_afresh,
    passes,
    subject,
)
from parity.passes import memory
from parity.report import environment
from parity.shown import one_line
from parity.te import Backend, BackendUnavailable, Kernels, precision_named, why_unavailable
from parity.te.devices import cuda_works

# How passes are timed: by CUDA events on a GPU, and by the host's clock on a CPU.


Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Clock(Generic[Mark]):
    """Measure time on a device.

    Attributes:
        mark: marks a moment in the device's work.
        seconds: returns the seconds between two marks, once ``finish`` has been called.
        finish: waits until the device has done all its work.
        is_asynchronous: whether the host goes on while the device works.
    """

    mark: Callable[[], Mark]
    seconds: Callable[[Mark, Mark], float]
    finish: Callable[[], None]
    is_asynchronous: bool


def clock_of(device: torch.device) -> Clock[Any]:
    """Return the clock for a device."""
    if device.type == "cuda":
        return Clock(_cuda_mark, _cuda_seconds, torch.cuda.synchronize, is_asynchronous=True)
    return Clock(time.perf_counter, lambda start, end: end - start, lambda: None, is_asynchronous=False)


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


def time_passes(passes: Passes, warmup: int, repeats: int, clock: Clock[Mark]) -> Times:
    """Time forward and backward over repeated passes.

    The host does not wait for the device between the passes, so that launching a pass overlaps with the work of the one
    before, as in training.

    Args:
        passes: what to time.
        warmup: untimed passes before, at least 1; the first ones compile, choose algorithms and fill FP8 scales.
        repeats: timed passes, at least 1.
        clock: the device's clock.
    """
    for i in range(warmup):
        passes.run(i)
    clock.finish()
    marks = []
    for i in range(warmup, warmup + repeats):
        passes.clear()
        start = clock.mark()
        outputs = passes.forward(i)
        middle = clock.mark()
        passes.backward(outputs, i)
        marks.append((start, middle, clock.mark()))
        del outputs
    clock.finish()
    return Times(
        forward=Spread.of([clock.seconds(start, middle) for start, middle, _ in marks]),
        backward=Spread.of([clock.seconds(middle, end) for _, middle, end in marks]),
        repeats=repeats,
        host=_host_seconds(passes, clock) if clock.is_asynchronous else None,
    )


def _host_seconds(passes: Passes, clock: Clock[Mark]) -> float:
    """Return the shortest time that the host takes to launch both passes on an idle device."""
    seconds = []
    for i in range(3):
        clock.finish()
        began = time.perf_counter()
        passes.run(i)
        seconds.append(time.perf_counter() - began)
    clock.finish()
    return min(seconds)


# The device's measured peak: how fast large square matrix products run in each format.


PEAK_SIZES = {"cuda": (4096, 8192), "cpu": (256, 1024)}
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_REPEATS = {"cuda": 10, "cpu": 3}


def measure_peak(format: str, device: torch.device, clock: Clock[Mark]) -> Peak:
    """Return the best median over the device's sizes, or the reason why the format cannot be multiplied here.

    FP8 is E4M3 with one scale per tensor, multiplied by ``torch._scaled_mm`` with fast accumulation on a GPU.
    """
    if format == "tf32" and device.type != "cuda":
        return Peak(format, float("nan"), why_none="a CPU has no TF32")
    best = Peak(format, 0.0)
    for size in PEAK_SIZES[device.type]:
        try:
            with allow_tf32(format == "tf32"):
                seconds = _time_product(_make_product(format, size, device), _REPEATS[device.type], clock)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return Peak(format, float("nan"), why_none=one_line(error))
        best = max(best, Peak(format, linear(size, size, size).forward / seconds, size), key=lambda peak: peak.flops)
    return best


def _make_product(format: str, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a product of random operands. With zeros it would draw less power and so run faster."""
    a, b = (torch.randn(size, size, device=device).to(_DTYPES[format]) for _ in range(2))
    if format != "fp8":
        return lambda: a @ b
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda"
    )


def _time_product(product: Callable[[], Tensor], repeats: int, clock: Clock[Mark]) -> float:
    product()
    marks = [clock.mark()]
    for _ in range(repeats):
        product()
        marks.append(clock.mark())
    clock.finish()
    return Spread.of([clock.seconds(start, end) for start, end in itertools.pairwise(marks)]).median


# Measuring one workload: a row for each implementation, even if others fail.


_LOADED_SECONDS = 0.5  # how much work is queued before the driver is asked for the clocks


@dataclass(frozen=True)
class Plan:
    """Say how to measure workloads.

    Attributes:
        repeats: how many passes are timed.
        ends: the ``time.time()`` after which no new measurement is started; infinite for no limit.
    """

    repeats: int
    ends: float = math.inf


@dataclass(frozen=True)
class _Bench:
    """Hold what all implementations of a workload share."""

    workload: Workload
    case: Case
    checked: CheckedSize
    kernels: Kernels
    plan: Plan
    clock: Clock[Any]


def measure(
    workload: Workload,
    chosen: Sequence[Implementation],
    plan: Plan,
    kernels: Kernels,
    clock: Clock[Any] | None = None,
) -> Iterator[Row]:
    """Yield one row for each implementation as soon as it is measured, with the reason in ``why_none`` if it cannot be.

    Args:
        workload: what is computed.
        chosen: the implementations that compute it.
        plan: how to measure.
        kernels: TE's kernels.
        clock: how to measure time; by default the clock of the kernels' device.
    """
    try:
        case = workload.load()
        (checked,) = check_case(dataclasses.replace(case, sizes=[workload.size]), kernels.te)
    except Exception as error:
        yield from (row_without(workload, each, one_line(error)) for each in chosen)
        return
    bench = _Bench(workload, case, checked, kernels, plan, clock or clock_of(kernels.device))
    for dtype in dict.fromkeys(each.dtype for each in chosen):
        yield from _of_dtype(bench, dtype, [each for each in chosen if each.dtype is dtype])


def row_without(workload: Workload, implementation: Implementation, why: str) -> Row:
    """Return the row of an implementation that could not be measured."""
    kind, precision, peak_format = implementation.kind, implementation.precision, implementation.peak_format
    return Row(workload.case, workload.size_text, kind, precision, peak_format, why_none=why)


def _of_dtype(bench: _Bench, dtype: torch.dtype, chosen: Sequence[Implementation]) -> Iterator[Row]:
    """Yield rows of the implementations in one dtype, which share rounded weights, inputs and golden."""
    shared: Subject | None = None
    counted: tuple[int, int] | None = None
    for implementation in chosen:
        why = _why_not(bench, implementation)
        if why is None:
            try:
                shared = shared or subject(bench.case, bench.checked, dtype, bench.kernels)
                counted = counted or count_flops(shared)
                row = row_without(bench.workload, implementation, "")
                row = dataclasses.replace(row, flops_forward=counted[0], flops_backward=counted[1])
                yield _measure_implementation(bench, shared, implementation, row)
                continue
            except Exception as error:
                why = one_line(error)
        yield row_without(bench.workload, implementation, why)
        memory.release()


def _why_not(bench: _Bench, implementation: Implementation) -> str | None:
    if time.time() >= bench.plan.ends:
        return "the time for all measurements was over"
    if implementation.kind != TE:
        return None
    if not bench.case.runs_at(implementation.precision):
        return "the case leaves this precision out"
    return why_unavailable(precision_named(implementation.precision), bench.kernels)


def _measure_implementation(bench: _Bench, shared: Subject, implementation: Implementation, row: Row) -> Row:
    module, call = _build_module(bench, shared, implementation)
    own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    repeated = passes(module, call, shared.inputs, lambda: implementation.forward_context(bench.kernels))
    device = bench.kernels.device
    with implementation.passes_context():
        before = _read_gpu_state(device)
        taken = _restart_peak(device)
        times = time_passes(repeated, implementation.warmup, bench.plan.repeats, bench.clock)
        memory = None if taken is None else own + _memory_above(taken, repeated, device)
        after = _loaded_state(repeated, times, device)
        error, why = _measure_error(repeated, shared)
    row = dataclasses.replace(row, times=times, memory=memory, error=error, why_no_error=why)
    return dataclasses.replace(row, before=before, after=after)


def _build_module(
    bench: _Bench, shared: Subject, implementation: Implementation
) -> tuple[nn.Module, Callable[..., object] | None]:
    if implementation.kind == TE:
        pair = candidate(bench.case, bench.checked, shared, bench.kernels)
        return pair.candidate, pair.call_candidate
    plain = shared.plain()
    module = compile_afresh(plain) if implementation.kind == COMPILED else plain
    return module, shared.pair.call_reference


def _measure_error(repeated: Passes, shared: Subject) -> tuple[float | None, str]:
    """Return the error of a pass over the first inputs, or why there is none."""
    if not shared.golden:
        return None, shared.why_no_golden
    try:
        return shared.worst_error(repeated.forward(0)), ""
    except (RuntimeError, ValueError) as error:
        return None, one_line(error)


def count_flops(shared: Subject) -> tuple[int, int]:
    """Count the FLOPs of the plain module's matrix products, forward and backward.

    Pairs of a query and a key that a causal mask or a window hides are left out for all implementations, since none has
    to compute them. Modules that ``parity.measuring.flops`` does not know are counted by
    ``torch.utils.flop_counter``, which leaves nothing out.
    """
    reference, inputs = shared.pair.reference, shared.inputs[0]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    try:
        components = flops.components(reference, *tensors, skips_hidden=True)
    except TypeError:
        return _watched_flops(passes(shared.plain(), shared.pair.call_reference, shared.inputs, contextlib.nullcontext))
    products = flops.in_products(components).values()
    return sum(product.forward for product in products), sum(product.backward for product in products)


def _watched_flops(plain: Passes) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        outputs = plain.forward(0)
        forward = counter.get_total_flops()
        plain.backward(outputs, 0)
        return forward, counter.get_total_flops() - forward


def _restart_peak(device: torch.device) -> int | None:
    """Reset the GPU's peak of memory, and return the bytes that are allocated now, or None on a CPU."""
    if device.type != "cuda":
        return None
    memory.release()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _memory_above(begin: int, repeated: Passes, device: torch.device) -> int:
    """Return the bytes that the passes took at their peak, less those of the gradients that rotate."""
    return torch.cuda.max_memory_allocated(device) - begin - repeated.rotating_bytes()


def _read_gpu_state(device: torch.device) -> GpuState | None:
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else record.gpu_state(str(uuid))


def _loaded_state(repeated: Passes, times: Times, device: torch.device) -> GpuState | None:
    """Return the GPU's state while it works: many passes are launched, and the driver is asked before they are done."""
    if device.type != "cuda":
        return None
    for i in range(max(1, math.ceil(_LOADED_SECONDS / times.both))):
        repeated.run(i)
    return _read_gpu_state(device)


# The functions that the process is asked to call. Each writes its results to the record as soon as they exist.


Asked = Backend | Literal["auto"]


def begin(backend: Asked, formats: Sequence[str], workloads: int, file: Path) -> str | None:
    """Write the environment and the device's peaks in these formats, or return why the backend is not available."""
    try:
        kernels = te.kernels(backend)
    except BackendUnavailable as error:
        return str(error)
    record.append(file, environment.measure(kernels.backend, [0], workloads))
    for format in formats:
        record.append(file, measure_peak(format, kernels.device, clock_of(kernels.device)))
    return None


def measure_one(workload: Workload, chosen: Sequence[Implementation], plan: Plan, backend: Asked, file: Path) -> bool:
    """Write the workload's rows, and return whether this process can go on: not if its CUDA context is broken."""
    kernels = te.kernels(backend)
    for row in measure(workload, chosen, plan, kernels):
        record.append(file, row)
        if not cuda_works():
            return False
    return True
