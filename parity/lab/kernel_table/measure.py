"""Make the calls of the table on one kind of kernels and keep what comes back; run as a module, in its own process.

Each result is a file of its own, written at once: a kernel that ends the process loses no result but its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parity import te
from parity.lab.kernel_table import calls_of_attention, calls_of_gemms, calls_of_hyper_connections, calls_of_layers
from parity.lab.kernel_table.bench import Bench, KernelCall, bench, unpack
from parity.shown import one_line
from parity.te.devices import cuda_works
from parity.user_error import UserError

# Kernels of the CPU's that no call of the table makes, each with the reason.


_QUERIES = "it computes nothing, but tells of the machine or makes room"
_RANDOM = "its random bits come from another generator"
_GROUPED = "it takes TE's grouped tensors, which need another cuBLAS or a Blackwell; not in the table yet"
_BLACKWELL = "it serves formats that need a Blackwell; not in the table yet"
NOT_CALLED: dict[str, str] = {
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


# All calls of the table, in its order, and the choice of some.


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
    *calls_of_hyper_connections.hyper_connections(),
)


def select(keyword: str) -> tuple[KernelCall, ...]:
    """Return the calls whose name contains the keyword; an empty one is in all.

    Raises:
        UserError: if it is in none.
    """
    chosen = tuple(call for call in CALLS if keyword in call.name)
    if not chosen:
        raise UserError(f"no kernel call contains {keyword!r} in its name, such as {CALLS[0].name!r}")
    return chosen


# The calls on one kind of kernels.


GPU_LOST = 3  # exit code
_TIMED = 5
_SLEEP_CYCLES = 4_000_000  # about 2 ms


@dataclass(frozen=True)
class Outcome:
    """Hold what one call made.

    Attributes:
        buffers: its results' plain tensors, on the CPU, by name.
        error: why there are none, in one line, or None.
        seconds: of the GPU for the call on its inputs; None on the CPU.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None
    seconds: float | None = None


def make(call: KernelCall, kernels: te.Kernels, seed: int) -> Outcome:
    """Make the call; an exception becomes its outcome. Inputs depend on the seed and on the call's name alone."""
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
    """Return the median time of the GPU for the call on the inputs that it had; None on the CPU.

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
    """Make the calls from an index on, and write each outcome into the folder; stops where the GPU is lost.

    Returns:
        Whether it came to the end: after an illegal access the GPU fails every call of the process.
    """
    for index in range(first, len(calls)):
        outcome = make(calls[index], kernels, seed)
        write(outcome, index, folder)
        if outcome.error is not None and not cuda_works():
            return False
    return True


def file(index: int, folder: Path) -> Path:
    """Return where the outcome of the call with this index is."""
    return folder / f"{index}.pt"


def write(outcome: Outcome, index: int, folder: Path) -> None:
    """Write an outcome whole or not at all, whenever the process is ended."""
    draft = folder / "draft"
    torch.save(vars(outcome), draft)
    draft.replace(file(index, folder))


def read(index: int, folder: Path) -> Outcome | None:
    """Return the outcome of the call with this index, or None if there is none."""
    if not file(index, folder).exists():
        return None
    return Outcome(**torch.load(file(index, folder), weights_only=True))


def _main(backend: str, keyword: str, seed: str, folder: str, first: str) -> int:
    kernels = te.kernels("gpu" if backend == "gpu" else "cpu")
    return 0 if make_all(select(keyword), int(first), kernels, int(seed), Path(folder)) else GPU_LOST


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
