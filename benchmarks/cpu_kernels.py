"""Measure what TransformerEngine on the CPU kernels costs next to plain PyTorch.

    python benchmarks/cpu_kernels.py [--precisions bf16 nvfp4 ...] [--out benchmarks/results/cpu_kernels.json]

A llama-like layer (hidden 1024, seq 512, batch 2) runs forward and backward, as TE's ``TransformerLayer`` in each
precision and as the plain layer of ``parity.reference`` in the same dtype. The two alternate, and the ratio of their
median times is reported; and for BF16, the ratio of the memory that a pass adds at its peak. A process emulates one
GPU, so each has its own: a precision runs on the first of ``GPUS`` that has it. Memory is measured in processes of its
own, too.

FP16 runs only when it is asked for. PyTorch multiplies FP16 on a CPU up to 60 times slower than FP32, so the plain
layer takes half a minute a pass, and the ratio says nothing about the kernels.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measuring import Measure, machine, parser, report

from parity import reference, te
from parity.cpu import cuda
from parity.te import PRECISIONS, Precision, why_unavailable

BATCH, SEQ, HIDDEN, FFN, HEADS, GROUPS = 2, 512, 1024, 2816, 16, 4
GPUS = ("hopper", "blackwell")
DEFAULT = [name for name in PRECISIONS if name != "fp16"]
# Of the time; other precisions are quantized.
LIMITS = {"fp32": 1.5, "bf16": 1.5, "fp16": None}
QUANTIZED_LIMIT = 4.0
MEMORY_LIMIT = 1.5


def plain_pass(dtype: torch.dtype) -> Callable[[], None]:
    """Return a forward and backward pass of the plain layer."""
    layer = reference.LlamaLayer(HIDDEN, FFN, HEADS, GROUPS).to(dtype)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    return lambda: layer(x).backward(x.detach())


def te_pass(precision: Precision) -> Callable[[], None]:
    """Return a forward and backward pass of TE's layer under the precision's recipe."""
    kernels = te.kernels("cpu")
    layer = kernels.te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
    ).to(precision.dtype)
    frequencies = kernels.te.RotaryPositionEmbedding(HIDDEN // HEADS)(SEQ)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=precision.dtype, requires_grad=True)

    def forward_and_backward() -> None:
        with precision.autocast(kernels):
            y = layer(x, rotary_pos_emb=frequencies)
        y.backward(x.detach())

    return forward_and_backward


def ratio_of_times(precision: Precision, repeats: int) -> tuple[float, float]:
    """Median seconds of TE's pass and of the plain pass, alternating."""
    passes = te_pass(precision), plain_pass(precision.dtype)
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for work, seconds in zip(passes, times, strict=True):
            began = time.perf_counter()
            work()
            if repeat:  # the first is warm-up
                seconds.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def ratios_on(gpu: str, names: Sequence[str], repeats: int) -> dict[str, tuple[float, float]]:
    """``ratio_of_times`` of those precisions that TE offers on an emulated GPU; the process is fresh."""
    os.environ[cuda.GPU_VARIABLE] = gpu
    kernels = te.kernels("cpu")
    offered = [PRECISIONS[name] for name in names if why_unavailable(PRECISIONS[name], kernels) is None]
    return {precision.name: ratio_of_times(precision, repeats) for precision in offered}


def added_memory(name: str) -> int:
    """Bytes that the process's peak grows by during three passes of ``te`` or ``plain`` in BF16."""
    work = te_pass(PRECISIONS["bf16"]) if name == "te" else plain_pass(torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from now on
    before = _peak()
    for _ in range(3):
        work()
    return _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--precisions", nargs="+", default=DEFAULT, choices=list(PRECISIONS), metavar="PRECISION")
    arguments = made.parse_args()
    rows, measures, missing = [], [], list(arguments.precisions)
    for gpu in GPUS:
        measured = in_new_process(ratios_on, gpu, missing, arguments.repeats)
        missing = [name for name in missing if name not in measured]
        for name, (ours, plain) in measured.items():
            rows.append((name, gpu, f"{ours:.3f}", f"{plain:.3f}"))
            measures.append(
                Measure(f"TE's pass over the plain one, {name}", ours / plain, LIMITS.get(name, QUANTIZED_LIMIT))
            )
    ours, plain = (in_new_process(added_memory, name) / 2**20 for name in ("te", "plain"))
    memory = f"peak memory of a pass, bf16: TE's {ours:.0f} MiB over the plain one's {plain:.0f} MiB"
    measures.append(Measure(memory, ours / plain, MEMORY_LIMIT))
    headers = ("precision", "emulated GPU", "TE (s)", "plain (s)")
    report(__doc__, measures, headers, rows, arguments.out, machine(torch.get_num_threads(), "cpu"))


if __name__ == "__main__":
    main()
