"""Multiply what has a known answer three times: ``python -m parity.measuring.gpu_report.known_answers BACKEND REPORT``.

Where it is known how a GPU's kernels add, the CPU kernels predict products to the bit: FP8 GEMMs of a Hopper, whose
sums keep 13 fraction bits (``reports/h200/README.md``). Kernels that always add in the same order give the same bits
each time. So an element that differs in one of three tries is a fault of the machine, and no port's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from parity import te
from parity.measuring.kernel_table import table
from parity.measuring.kernel_table.bench import KernelCall
from parity.report import environment
from parity.report.numbers import markdown_table
from te_on_cpu.kernel_choices import VARIABLE

TRIES = 3
_HOPPER = (9, 0)
_CHOICES = "fp8-14-bit,fp8-block-14-bit"  # of a Hopper
CALLS = tuple(call for call in table.CALLS if call.kernel == "generic_gemm" and call.variant.startswith("fp8"))
_PASSES = ("equal to the prediction", "the same each time, but not as predicted", "the same each time")


@dataclass(frozen=True)
class Answer:
    """What a GPU said to one product.

    Attributes:
        call: the product's name.
        told: one of ``_PASSES``, or what was wrong.
    """

    call: str
    told: str

    @property
    def is_steady(self) -> bool:
        """Return whether all tries gave the same bits."""
        return self.told.partition(":")[0] in _PASSES


def judge(call: str, tries: Sequence[table.Outcome], predicted: table.Outcome | None) -> Answer:
    """Compare the tries of one product with each other and with the prediction, to the bit; None if there is none."""
    errors = [one.error for one in tries if one.error is not None]
    if errors:
        return Answer(call, errors[0])
    for name in tries[0].buffers:
        bits = torch.stack([_view_bytes(one.buffers[name]) for one in tries])
        usual = bits.median(0).values  # of three tries, what two of them say
        for number, (one, differing) in enumerate(zip(tries, (bits != usual).any(-1), strict=True), 1):
            if differing.any():
                first = int(differing.nonzero()[0])
                place = [int(i) for i in torch.unravel_index(torch.tensor(first), one.buffers[name].shape)]
                count = f"{int(differing.sum())} of {differing.numel()} elements differ"
                return Answer(call, f"in try {number} of {len(tries)}, {count}, first {place}")
    if predicted is None or predicted.error is not None:
        return Answer(call, _PASSES[2])
    unlike = sum(
        int((_view_bytes(x) != _view_bytes(predicted.buffers[name])).any(-1).sum())
        for name, x in tries[0].buffers.items()
    )
    return Answer(call, f"{_PASSES[1]}: {unlike} elements differ" if unlike else _PASSES[0])


def _view_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).view(x.numel(), -1)


def predict(calls: Sequence[KernelCall], folder: Path) -> list[table.Outcome | None]:
    """Return what the CPU kernels that add as a Hopper does say, from a process of its own."""
    names = "\n".join(call.name for call in calls)
    environ = {**os.environ, VARIABLE: _CHOICES, "PARITY_EMULATED_GPU": "hopper", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"{__package__}.known_answers", "predict", str(folder)]
    subprocess.run(command, input=names, text=True, env=environ, check=False)  # without outcomes, nothing is predicted
    return [table.kept(i, folder) for i in range(len(calls))]


def read(file: Path) -> str:
    """Return the report's verdict, its second paragraph."""
    return file.read_text(encoding="utf-8").split("\n\n")[1].strip("*")


def verdict(answers: Sequence[Answer]) -> str:
    """Return how many products were as predicted, and which were not the same each time."""
    unsteady = [one for one in answers if not one.is_steady]
    parts = [f"{sum(one.told == _PASSES[0] for one in answers)} of {len(answers)} products as predicted, to the bit"]
    parts += [f"{sum(one.is_steady for one in answers)} the same in {TRIES} tries"]
    parts += [f"{unsteady[0].call}: {unsteady[0].told}"] if unsteady else []
    return "; ".join(parts)


def _write_report(backend: str, report: str) -> int:
    kernels = te.kernels("gpu" if backend == "gpu" else "cpu")
    is_known = backend == "cpu" or torch.cuda.get_device_capability() == _HOPPER
    with TemporaryDirectory() as folder:
        predicted = predict(CALLS, Path(folder)) if is_known else [None] * len(CALLS)
    if backend == "cpu":  # to try the step, they add as a Hopper does
        os.environ[VARIABLE] = _CHOICES
    tries = [[table.make_call(call, kernels, seed=0) for _ in range(TRIES)] for call in CALLS]
    answers = [judge(call.name, some, one) for call, some, one in zip(CALLS, tries, predicted, strict=True)]
    parts = ["# Products with known answers", f"**{verdict(answers)}**"]
    parts += [f"Kernels: **{environment.measure(kernels.backend, [0], 1).kernels}**."]
    parts += [] if is_known else ["How this GPU adds is not known, so nothing was predicted."]
    parts += [markdown_table([(one.call, one.told) for one in answers], ("product", f"{TRIES} tries"))]
    Path(report).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return int(not all(one.is_steady for one in answers))


def _write_predictions(folder: Path) -> int:
    calls = {call.name: call for call in CALLS}
    for index, name in enumerate(sys.stdin.read().splitlines()):
        table.keep(table.make_call(calls[name], te.kernels("cpu"), seed=0), index, folder)
    return 0


if __name__ == "__main__":
    first, second = sys.argv[1:]
    sys.exit(_write_predictions(Path(second)) if first == "predict" else _write_report(first, second))
