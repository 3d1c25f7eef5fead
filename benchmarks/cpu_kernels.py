"""What TransformerEngine on the CPU kernels costs next to plain PyTorch.

    python benchmarks/cpu_kernels.py [--repeats 5]

A llama-like layer (hidden 1024, seq 512, batch 2) runs forward and backward, as TE's ``TransformerLayer`` in each
precision and as the plain layer of ``parity.reference`` in the same dtype. The two alternate, and the ratio of their
median times is printed; then, for BF16, the ratio of the memory that a pass adds at its peak, each in a process of its
own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tabulate import tabulate

from parity import reference, te
from parity.precision import PRECISIONS, Precision, why_unavailable

BATCH, SEQ, HIDDEN, FFN, HEADS, GROUPS = 2, 512, 1024, 2816, 16, 4


def plain_pass(dtype: torch.dtype) -> Callable[[], None]:
    """A forward and backward pass of the plain layer."""
    layer = reference.LlamaLayer(HIDDEN, FFN, HEADS, GROUPS).to(dtype)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    return lambda: layer(x).backward(x.detach())


def te_pass(precision: Precision) -> Callable[[], None]:
    """A forward and backward pass of TE's layer under the precision's recipe."""
    kernels = te.kernels()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    kernels = te.kernels()
    rows = []
    for precision in PRECISIONS.values():
        if why_unavailable(precision, kernels) is None:
            ours, plain = ratio_of_times(precision, repeats)
            rows.append((precision.name, f"{ours:.3f}", f"{plain:.3f}", f"{ours / plain:.2f}"))
    print(tabulate(rows, ["precision", "TE (s)", "plain (s)", "ratio"], disable_numparse=True))
    spawn = multiprocessing.get_context("spawn")
    memory = []
    for name in ("te", "plain"):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            memory.append(pool.submit(added_memory, name).result())
    ours, plain = (size / 2**20 for size in memory)
    print(f"\nbf16, peak memory of a pass: TE {ours:.0f} MiB, plain {plain:.0f} MiB, ratio {ours / plain:.2f}")
    print(
        f"{kernels.backend} kernels, TransformerEngine {te.version()}, torch {torch.__version__}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
