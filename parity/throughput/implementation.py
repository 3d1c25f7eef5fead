"""Who computes a workload: the plain module, eager or compiled, and TE in each precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parity.precision import PRECISIONS
from parity.te import Kernels
from parity.throughput.peak import allow_tf32

EAGER, COMPILED, TE = "eager", "compiled", "TE"
# The order in which dtypes are measured: where time ends, what most people train in is there.
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Implementation:
    """
    Attributes:
        kind: ``eager``, ``compiled`` or ``TE``.
        precision: see ``Row.precision``.
    """

    kind: str
    precision: str

    @property
    def peak_format(self) -> str | None:
        """The format whose peak bounds it, see ``Peak``; None where no peak is measured.

        TE computes FP32 products in TF32 (``common/gemm/cublaslt_gemm.cu`` of 2.20.2).
        """
        if self.precision.startswith(("fp8", "mxfp8")):
            return "fp8"
        if self.precision == "nvfp4":
            return None
        return "tf32" if (self.kind, self.precision) == (TE, "fp32") else self.precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "tf32" else PRECISIONS[self.precision].dtype

    def forward_context(self, kernels: Kernels) -> contextlib.AbstractContextManager[None]:
        """A new context of a forward pass."""
        if self.kind == TE:
            return PRECISIONS[self.precision].autocast(kernels)
        return contextlib.nullcontext()

    def passes_context(self) -> contextlib.AbstractContextManager[None]:
        """The context of all passes, the backward ones too."""
        return allow_tf32(True) if self.precision == "tf32" else contextlib.nullcontext()

    @property
    def warmup(self) -> int:
        """Passes before the timed ones."""
        return 3 + (PRECISIONS[self.precision].warmup_passes if self.kind == TE else 0)


def implementations(precisions: Sequence[str], compiled: Sequence[str], on_gpu: bool) -> Iterator[Implementation]:
    """Those of the precisions, by dtype.

    The plain FP32 module is measured in PyTorch's default, where products are in FP32, and on a GPU also in TF32, which
    is what TE computes.

    Args:
        precisions: names of ``parity.precision``.
        compiled: those of them in which the plain module is also compiled; ``fp32`` stands for ``tf32`` too.
        on_gpu: whether they run on a GPU.
    """
    for dtype in DTYPES:
        of_dtype = [name for name in precisions if PRECISIONS[name].dtype is dtype]
        plain = [name for name in of_dtype if PRECISIONS[name].recipe is None]
        if "fp32" in plain and on_gpu:
            plain.append("tf32")
        yield from (Implementation(EAGER, name) for name in plain)
        yield from (Implementation(TE, name) for name in of_dtype)
        yield from (Implementation(COMPILED, name) for name in plain if name.replace("tf32", "fp32") in compiled)


def compile_afresh(module: nn.Module) -> nn.Module:
    """The module under ``torch.compile``, which forgets what it compiled before, so that no limit is reached."""
    torch._dynamo.reset()
    return torch.compile(module)  # type: ignore[return-value]
