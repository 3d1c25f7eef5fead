"""What is called: one kernel on one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parity.kernel_table.bench import Bench


@dataclass(frozen=True)
class KernelCall:
    """One row, or one for each result, of the table.

    Attributes:
        family: the section that it belongs to.
        kernel: its name in ``transformer_engine_torch``.
        variant: dtypes and options, in words.
        shapes: of the inputs, in words.
        run: makes inputs on a bench and calls the kernel; results by name, plain or quantized tensors, or None.
        quantizer: the one of ``bench.QUANTIZERS`` whose format the GPU must have, or None.
    """

    family: str
    kernel: str
    variant: str
    shapes: str
    run: Callable[[Bench], Mapping[str, Any]]
    quantizer: str | None = None

    @property
    def name(self) -> str:
        """What tells the call from all others."""
        return f"{self.kernel}: {self.variant}"
