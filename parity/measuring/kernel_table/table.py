"""``parity kernels``: make the calls on both kinds of kernels, and report how far the CPU's are from the compiled ones.

Run as a module, this makes the calls on one kind of kernels, in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import data_files, te
from parity.data_files import NotReadableError
from parity.machine import files
from parity.machine.devices import CUDA_VISIBLE_DEVICES
from parity.machine.process import ended_with_this
from parity.measuring.kernel_table import calls_of_attention, calls_of_gemms, calls_of_layers
from parity.measuring.kernel_table.bench import Bench, KernelCall, bench, unpack
from parity.numerics.errors import relative_l2
from parity.progress import Following
from parity.report import environment
from parity.report.environment import Environment, to_json
from parity.report.numbers import markdown_table, short
from parity.report.templates import render
from parity.shown import one_line
from parity.te import Backend
from parity.te.devices import cuda_works
from parity.user_error import UserError
from te_on_cpu import cuda, expert_parallel

# CPU kernels that no call in the table uses, each with the reason.


_QUERIES = "it computes nothing: it only describes the machine or allocates memory"
_RANDOM = "its random bits come from another generator"
_GROUPED = "it takes TE's grouped tensors, which need another cuBLAS or a Blackwell; not in the table yet"
_BLACKWELL = "it serves formats that need a Blackwell; not in the table yet"
_RANKS = "it exchanges tokens between ranks, and the table has one process"
NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(expert_parallel.__all__, _RANKS),
    **dict.fromkeys(("dropout_fwd", "dropout_bwd"), _RANDOM),
    **dict.fromkeys(
        (
            "create_empty_quantized_tensor",
            "device_supports_multicast",
            "get_cublasLt_version",
            "get_cudnn_version",
            "get_grouped_gemm_setup_workspace_size",
            "get_num_cublas_streams",
            "get_stream_priority_range",
            "nvte_built_with_cublasmp",
            "ubuf_built_with_mpi",
        ),
        _QUERIES,
    ),
    **dict.fromkeys(
        (
            "bgrad_group_quantize",
            "group_dequantize",
            "group_quantize",
            "group_requantize_inplace",
            "nvfp4_group_quantize_with_amax",
            "splits_to_offsets",
            "splits_to_offsets_multi",
            "te_general_grouped_gemm_for_discrete_in",
            "te_general_grouped_gemm_for_discrete_out",
            "te_general_grouped_gemm_for_grouped_tensor",
        ),
        _GROUPED,
    ),
    **dict.fromkeys(
        (
            "grouped_swizzle_for_gemm",
            "multi_tensor_compute_scale_inv_e8m0",
            "multi_tensor_swizzle_scales_for_gemm_",
            "multi_tensor_swizzle_scales_for_gemm_unchecked_",
            "multi_tensor_transpose_to_bhsd",
            "mxfp8_scaling_compute_partial_amax",
            "mxfp8_scaling_partial_cast",
            "nvfp4_2d_multi_tensor_transpose",
            "nvfp4_2d_scale_transpose",
            "nvfp4_compute_global_scale",
            "nvfp4_data_transpose",
            "nvfp4_multi_tensor_2d_partial_cast",
            "nvfp4_multi_tensor_compute_partial_amax",
            "nvfp4_multi_tensor_fused_scale",
            "nvfp4_quantize_with_amax",
            "swizzle_scales_for_gemm_",
        ),
        _BLACKWELL,
    ),
    "fused_topk_with_score_function_qb_fwd": "quantile balancing, new in TE 2.20; not in the table yet",
    "multi_tensor_adam_fp8": "Adam on FP8 parameters; not in the table yet",
}


# All calls of the table, in its order, and the selection of some.


CALLS: tuple[KernelCall, ...] = (
    *calls_of_gemms.gemms(),
    *calls_of_layers.norms(),
    *calls_of_layers.activations(),
    *calls_of_attention.softmaxes_and_rope(),
    *calls_of_attention.attention(),
    *calls_of_gemms.casts(),
    *calls_of_gemms.casts_of_shards(),
    *calls_of_gemms.grouped_products(),
    *calls_of_layers.mixtures(),
    *calls_of_attention.layouts(),
    *calls_of_layers.optimizers(),
    *calls_of_layers.losses(),
    *calls_of_layers.hyper_connections(),
)


def select(keyword: str) -> tuple[KernelCall, ...]:
    """Return the calls whose names contain the keyword. An empty keyword selects all.

    Raises:
        UserError: if no name contains it.
    """
    chosen = tuple(call for call in CALLS if keyword in call.name)
    if not chosen:
        raise UserError(f"no kernel call has {keyword!r} in its name; one name is {CALLS[0].name!r}")
    return chosen


# The calls on one kind of kernels, in a process of their own. Each outcome is written to its own file at once, so that
# a kernel that kills the process loses only its own result.


GPU_LOST = 3  # exit code
_TIMED = 5
_SLEEP_CYCLES = 4_000_000  # about 2 ms


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call.

    Attributes:
        buffers: the plain tensors of its results, on the CPU, by name.
        error: why there are none, in one line, or None.
        seconds: the GPU's time for the call; None on the CPU.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None
    seconds: float | None = None


def make_call(call: KernelCall, kernels: te.Kernels, seed: int) -> Outcome:
    """Make the call and return its outcome, even if it raises. Inputs depend only on the seed and the call's name."""
    where = bench(kernels, zlib.crc32(call.name.encode()) ^ seed)
    reason = where.why_unavailable(call.quantizer) if call.quantizer is not None else None
    if reason is not None:
        return Outcome(error=reason)
    try:
        outcome = Outcome(unpack(call.run(where)))
        return dataclasses.replace(outcome, seconds=gpu_seconds(call, where))
    except Exception as error:
        return Outcome(error=one_line(error))


def gpu_seconds(call: KernelCall, where: Bench) -> float | None:
    """Return the GPU's median time for the call, made again on the same inputs, or None on the CPU.

    The GPU sleeps until the host has launched the call, so that small kernels follow each other without gaps.
    """
    if where.device.type != "cuda":
        return None
    seconds = []
    for _ in range(_TIMED):
        where.tape.rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        call.run(where)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def make_all(calls: Sequence[KernelCall], first: int, kernels: te.Kernels, seed: int, folder: Path) -> bool:
    """Make the calls from an index on, and write each outcome into the folder, until the GPU is lost.

    Returns:
        Whether all calls were made. After an illegal access, the GPU fails every further call of the process.
    """
    for index in range(first, len(calls)):
        outcome = make_call(calls[index], kernels, seed)
        keep(outcome, index, folder)
        if outcome.error is not None and not cuda_works():
            return False
    return True


def outcome_file(index: int, folder: Path) -> Path:
    """Return the file for the outcome of the call with this index."""
    return folder / f"{index}.pt"


def keep(outcome: Outcome, index: int, folder: Path) -> None:
    """Write an outcome completely or not at all, even if the process is killed."""
    draft = folder / "draft"
    torch.save(vars(outcome), draft)
    draft.replace(outcome_file(index, folder))


def kept(index: int, folder: Path) -> Outcome | None:
    """Return the outcome of the call with this index, or None if there is none."""
    if not outcome_file(index, folder).exists():
        return None
    return Outcome(**torch.load(outcome_file(index, folder), weights_only=True))


# All calls on one kind of kernels, by processes of which each replaces one that a kernel has killed or that has lost
# the GPU.


ENDED = Outcome(error="the process ended in this call")
TIME_OVER = Outcome(error="the time limit for all calls was reached")
_NEVER_BEGUN = Outcome(error="no process came to this call")
_MOST_IN_VAIN = 3  # how many processes in succession may die in their first call
# Seconds without a new outcome after which a kernel is taken to hang. They must allow for the import of TE before the
# first outcome, and for compiling Triton kernels.
LONGEST_CALL = 120.0


def outcomes_of(start: Callable[[int], int | None], count: int, folder: Path) -> list[Outcome]:
    """Return the outcome of each call.

    Args:
        start: ``start(first)`` runs a process that makes the calls from this index on, writes each outcome into the
            folder, and returns its exit code: ``GPU_LOST`` if the GPU fails every call after the last one, or None
            if the time limit for all calls is reached.
        count: the number of calls.
        folder: the folder of the outcomes.
    """
    first = in_vain = 0
    missing = _NEVER_BEGUN
    while first < count and in_vain < _MOST_IN_VAIN:
        code = start(first)
        if code is None:
            missing = TIME_OVER
            break
        reached = next((i for i in range(first, count) if not outcome_file(i, folder).exists()), count)
        in_vain = in_vain + 1 if reached == first else 0
        if reached < count and code != GPU_LOST:
            keep(ENDED, reached, folder)
            reached += 1
        first = reached
    return [kept(i, folder) or missing for i in range(count)]


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, ends: float, longest: float = LONGEST_CALL
) -> int | None:
    """Run one process, and return its exit code, or None if the time limit for all calls was reached first.

    Args:
        command: the command of the process.
        environment: the environment of the process.
        folder: the folder of the outcomes that it writes.
        ends: the ``time.monotonic()`` at which it is stopped.
        longest: seconds without a new outcome after which it is stopped.
    """
    with subprocess.Popen(command, env=environment) as process, ended_with_this(process):
        made, since = _count_outcomes(folder), time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=max(0.0, min(1.0, ends - time.monotonic())))
            now, before = time.monotonic(), made
            made = _count_outcomes(folder)
            since = now if made != before else since
            if now >= ends or now - since >= longest:
                process.kill()
                code = process.wait()
                return None if now >= ends else code


def _count_outcomes(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


# How far two tensors of one dtype are apart: differing elements, representable numbers in between, and the norm.


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distance:
    """The distance between two tensors.

    Attributes:
        elements: the number of elements of either tensor.
        different: how many of them differ in any bit.
        max_ulps: the largest distance of two elements, counted in representable numbers: neighbours are 1 apart, both
            zeros are one number, and so are all NaNs. Infinite where one element is NaN and the other is not.
        relative: the Euclidean norm of the difference over that of the first tensor, where both are finite; 0 for equal
            tensors, infinite if only the first is all zero, NaN for integers, which may be codes and not amounts.
    """

    elements: int
    different: int
    max_ulps: float
    relative: float


def distance_of(x: Tensor, y: Tensor) -> Distance:
    """Return the distance of two tensors of the same shape and dtype: any floating-point one, or integers.

    Raises:
        ValueError: if shapes or dtypes differ.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"{x.dtype} {list(x.shape)} cannot be compared with {y.dtype} {list(y.shape)}")
    different = int((_view_bits(x) != _view_bits(y)).sum())
    relative = _compute_relative_distance(x, y)
    x_nan, y_nan = _is_nan(x), _is_nan(y)
    steps = (ordinal(x) - ordinal(y)).abs().masked_fill(x_nan & y_nan, 0)
    if bool((x_nan != y_nan).any()):
        return Distance(x.numel(), different, math.inf, relative)
    return Distance(x.numel(), different, float(steps.max()) if x.numel() else 0.0, relative)


def _compute_relative_distance(x: Tensor, y: Tensor) -> float:
    if not x.dtype.is_floating_point:
        return math.nan
    exact, other = (values.float().double() if values.element_size() < 8 else values for values in (x, y))
    finite = exact.isfinite() & other.isfinite()
    return relative_l2(float((other - exact)[finite].norm()), float(exact[finite].norm()))


def ordinal(values: Tensor) -> Tensor:
    """Return INT64: each number's place among those of its dtype, with 0 for zeros and 1 for the smallest positive."""
    bits = _view_bits(values).long()
    if values.dtype is torch.float8_e8m0fnu or not values.dtype.is_floating_point:
        return bits
    sign = 1 << (8 * values.element_size() - 1)
    return torch.where((bits & sign) != 0, -(bits & (sign - 1)), bits)


def _view_bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()]) if values.dtype.is_floating_point else values


def _is_nan(values: Tensor) -> Tensor:
    if not values.dtype.is_floating_point:
        return torch.zeros(values.shape, dtype=torch.bool)
    return values.float().isnan()


# The table as JSON lines, with a line for each result, for further computations.


Entry = dict[str, Any]


def lines_of(comparisons: Iterable[Comparison], environment: Environment, emulated_gpu: str) -> str:
    """Return the record: the environment's line, then a line for each result, or for a call without results.

    Args:
        comparisons: the table.
        environment: the environment of the process with the reference's kernels.
        emulated_gpu: the GPU that the CPU kernels emulated.
    """
    lines: list[Entry] = [{"environment": to_json(environment), "emulated_gpu": emulated_gpu}]
    lines += [line for comparison in comparisons for line in _list_entries(comparison)]
    return "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines)


def read_lines(file: Path) -> list[Entry]:
    """Return the results' lines, with None for a distance that is infinite or NaN.

    Raises:
        UserError: if the file cannot be read, or if any of its lines does not belong to such a table.
    """
    found = data_files.lines(file, _check_entry)
    if found.left_out:
        raise UserError(data_files.warnings_for(file, found.left_out)[0])
    return [line for line in found.contents if "kernel" in line]


def _check_entry(line: Any) -> Entry:
    if not isinstance(line, dict):
        raise NotReadableError("it is not an object")
    if "kernel" in line:
        verdict([line])  # raises if anything that is read from the line is missing
    return line


def verdict(entries: Sequence[Entry]) -> str:
    """Return how many results are bit-equal, the farthest of the others, and what could not be compared."""
    compared = [entry for entry in entries if entry["why_none"] is None]
    equal = sum(entry["different"] == 0 for entry in compared)
    parts = [f"{equal} of {len(compared)} results equal to the bit"]
    apart = [entry for entry in compared if entry["relative"]]
    if apart:
        farthest = max(apart, key=lambda entry: entry["relative"])
        name = f"{farthest['kernel']} ({farthest['variant']}, {farthest['result']})"
        parts.append(f"the farthest is {short(farthest['relative'])} away: {name}")
    if len(entries) > len(compared):
        parts.append(f"{len(entries) - len(compared)} could not be compared")
    return "; ".join(parts)


def _list_entries(comparison: Comparison) -> Iterator[Entry]:
    call = comparison.call
    named = {"family": call.family, "kernel": call.kernel, "variant": call.variant, "shapes": call.shapes}
    nothing = {"elements": None, "different": None, "max_ulps": None, "relative": None}
    if comparison.why_none is not None:
        yield {**named, "result": None, **nothing, "gpu_seconds": None, "why_none": comparison.why_none}
    for name, distance in comparison.distances.items():
        figures = nothing if isinstance(distance, str) else _describe_distance(distance)
        why = distance if isinstance(distance, str) else None
        yield {**named, "result": name, **figures, "gpu_seconds": comparison.seconds, "why_none": why}


def _describe_distance(distance: Distance) -> Entry:
    return {
        "elements": distance.elements,
        "different": distance.different,
        "max_ulps": distance.max_ulps if math.isfinite(distance.max_ulps) else None,
        "relative": distance.relative if math.isfinite(distance.relative) else None,
    }


# The report: for each result of each call, how far the CPU kernels are from the real ones.


_HEADERS = ("kernel", "variant", "shapes", "result", "equal to the bit", "max ulps", "relative", "GPU µs")


@dataclass(frozen=True)
class Comparison:
    """One call on both kinds of kernels.

    Attributes:
        distances: for each buffer, by name, how far the two are apart, or why they cannot be compared.
        why_none: why there are no distances at all, or None.
        seconds: the GPU's time for the call, or None.
    """

    call: KernelCall
    distances: dict[str, Distance | str]
    why_none: str | None = None
    seconds: float | None = None


def compare(call: KernelCall, real: Outcome, emulated: Outcome) -> Comparison:
    """Return the distances of two outcomes of one call."""
    for side, outcome in (("GPU", real), ("CPU", emulated)):
        if outcome.error is not None:
            return Comparison(call, {}, f"{side}: {outcome.error}")
    names = list(dict.fromkeys([*real.buffers, *emulated.buffers]))
    return Comparison(call, {name: _compare_buffers(name, real, emulated) for name in names}, seconds=real.seconds)


def _compare_buffers(name: str, real: Outcome, emulated: Outcome) -> Distance | str:
    if name not in emulated.buffers:
        return "on the GPU only"
    if name not in real.buffers:
        return "on the CPU only"
    try:
        return distance_of(real.buffers[name], emulated.buffers[name])
    except ValueError as error:
        return str(error)


def draw(comparisons: Iterable[Comparison], environment: Environment, emulated_gpu: str) -> str:
    """Return the report, markdown.

    Args:
        environment: the environment of the process with the real kernels.
        emulated_gpu: the GPU that the CPU kernels emulated.
    """
    made = list(comparisons)
    facts = {**environment.facts, "emulated GPU": emulated_gpu}
    families = itertools.groupby(made, lambda comparison: comparison.call.family)
    missing = [(c.call.kernel, c.call.variant, c.why_none) for c in made if c.why_none is not None]
    return render(
        "measuring/kernel_table/report.md.jinja",
        real=environment.backend == "gpu",
        environment=markdown_table(facts.items(), ("environment", "")),
        families=[
            (family, markdown_table([row for comparison in group for row in _format_rows(comparison)], _HEADERS))
            for family, group in families
        ],
        missing=markdown_table(missing, ("kernel", "variant", "why")) if missing else "None.",
        not_called=markdown_table(NOT_CALLED.items(), ("kernel", "why")),
    )


def _format_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    call = comparison.call
    for name, distance in comparison.distances.items():
        if isinstance(distance, str):
            yield call.kernel, call.variant, call.shapes, name, distance, "-", "-", "-"
            continue
        figures = fraction(distance), ulps(distance), short(distance.relative)
        time = "-" if comparison.seconds is None else f"{1e6 * comparison.seconds:.1f}"
        yield call.kernel, call.variant, call.shapes, name, *figures, time


def fraction(distance: Distance) -> str:
    """Return the fraction of equal elements in percent, which is 100 only if all are equal."""
    if distance.different == 0:
        return "100 %"
    percent = 100 * (1 - distance.different / distance.elements)
    return f"{math.floor(1000 * percent) / 1000:.3f} %"


def ulps(distance: Distance) -> str:
    return "NaN on one side" if math.isinf(distance.max_ulps) else f"{distance.max_ulps:.0f}"


# ``parity kernels``: make the whole table, with one process for each kind of kernels.


def make_table(keyword: str, seed: int, report: Path, reference: Backend = "gpu", minutes: float | None = None) -> None:
    """Compare the CPU kernels with the reference's in the selected calls, and write the report and its record.

    Args:
        keyword: selects the calls, see ``select``.
        seed: the seed of the inputs.
        report: the report, markdown; the record has the same name with ``.jsonl``.
        reference: ``gpu``, or ``cpu`` to try the table without a GPU, with the CPU kernels on both sides.
        minutes: the time after which no more calls are made, and the others are left out; None for no limit.

    Raises:
        UserError: if there are no compiled kernels or no GPU here, no call is selected, the report cannot be written,
            or another run writes it.
    """
    reason = te.why_no_gpu() if reference == "gpu" else None
    if reason is not None:
        raise UserError(
            f"the table of CPU kernels against real ones is missing, and cannot be made here: {reason}; run "
            "`parity kernels` on a machine with an NVIDIA GPU and TransformerEngine's compiled kernels, or try it "
            "with --reference cpu"
        )
    gpu = nearest_gpu(*torch.cuda.get_device_capability()) if reference == "gpu" else "hopper"
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    try:
        with files.claimed(report.with_suffix(".jsonl")) as claim:
            comparisons = compare_backends(reference, gpu, keyword, seed, ends)
            measured = environment.measure(reference, [seed], len(comparisons))
            claim.replace(lines_of(comparisons, measured, cuda.GPUS[gpu].name).encode())
            files.replace(report, draw(comparisons, measured, cuda.GPUS[gpu].name))
    except OSError as error:
        raise UserError(f"cannot write {report}: {error.strerror}") from None


def nearest_gpu(major: int, minor: int) -> str:
    """Return the newest GPU in ``cuda.GPUS`` of at most this compute capability, or the oldest if all are newer."""
    by_age = sorted(cuda.GPUS, key=_get_capability)
    older = [name for name in by_age if _get_capability(name) <= (major, minor)]
    return older[-1] if older else by_age[0]


def _get_capability(name: str) -> tuple[int, int]:
    return cuda.GPUS[name].major, cuda.GPUS[name].minor


def compare_backends(
    reference: Backend, emulated_gpu: str, keyword: str, seed: int, ends: float = math.inf
) -> list[Comparison]:
    """Make the calls on the reference's kernels and on the CPU's, and compare them.

    Args:
        reference: ``gpu``; ``cpu`` compares the CPU kernels with themselves in another process.
        emulated_gpu: a name in ``cuda.GPUS``.
        keyword: selects the calls, see ``select``.
        seed: the seed of the inputs.
        ends: the ``time.monotonic()`` after which no more calls are made.
    """
    calls = select(keyword)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("reference", "candidate")]
        for place in places:
            place.mkdir()

        def outcomes_on(backend: Backend, place: Path) -> list[Outcome]:
            return outcomes_of(
                lambda first: _run_process(backend, emulated_gpu, keyword, seed, place, first, ends), len(calls), place
            )

        with ThreadPoolExecutor() as threads:  # both kinds of kernels run side by side
            made = [threads.submit(outcomes_on, *one) for one in zip((reference, "cpu"), places, strict=True)]
            with Following("calling kernels", 2 * len(calls)) as following:
                while wait(made, timeout=1.0).not_done:
                    following.at(sum(len(list(place.glob("*.pt"))) for place in places), 2 * len(calls))
            outcomes = [one.result() for one in made]
    return [compare(call, *pair) for call, pair in zip(calls, zip(*outcomes, strict=True), strict=True)]


def _run_process(
    backend: str, emulated_gpu: str, keyword: str, seed: int, place: Path, first: int, ends: float
) -> int | None:
    """Run a process that makes the calls from ``first`` on, see ``run``."""
    command = [sys.executable, "-m", __name__, backend, keyword, str(seed), str(place), str(first)]
    environment = {**os.environ, cuda.GPU_VARIABLE: emulated_gpu}
    if backend == "cpu":
        environment[CUDA_VISIBLE_DEVICES] = ""  # the GPU and its memory belong to the other process
    return run(command, environment, place, ends)


def _make_calls(backend: str, keyword: str, seed: str, folder: str, first: str) -> int:
    kernels = te.kernels("gpu" if backend == "gpu" else "cpu")
    return 0 if make_all(select(keyword), int(first), kernels, int(seed), Path(folder)) else GPU_LOST


if __name__ == "__main__":
    sys.exit(_make_calls(*sys.argv[1:]))
