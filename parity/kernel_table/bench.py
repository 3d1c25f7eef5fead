"""What a kernel call finds: TransformerEngine on one kind of kernels, seeded inputs, and quantizers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parity.kernel_table.tape import Tape
from parity.te import Kernels

# By their names in the table.
HALF = {"BF16": torch.bfloat16, "FP16": torch.float16}
DTYPES = {"FP32": torch.float32, **HALF}
E4M3, E5M2 = "kFloat8E4M3", "kFloat8E5M2"
_DELAYED_SCALE = 37.5  # no power of two, so that products round


@dataclass(frozen=True)
class Bench:
    """Where one kernel call is made.

    Attributes:
        te: ``transformer_engine.pytorch``.
        tex: ``transformer_engine_torch``, the kernels.
        device: where they run.
        generator: on the CPU, whatever the device is, so that inputs are the same on all.
        tape: of what was drawn.
    """

    te: ModuleType
    tex: ModuleType
    device: torch.device
    generator: torch.Generator
    tape: Tape = field(default_factory=Tape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal values with mean 0 and standard deviation ``scale``, on the device."""
        return self._drawn(lambda: (torch.randn(*shape, generator=self.generator) * scale).to(dtype))

    def wide(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values times powers of two from 2**-6 to 2**5, another each: blocks get scales of their own."""

        def draw() -> Tensor:
            exponents = torch.randint(-6, 6, shape, generator=self.generator)
            return torch.ldexp(torch.randn(*shape, generator=self.generator), exponents).to(dtype)

        return self._drawn(draw)

    def coin(self, *shape: int) -> Tensor:
        """True with probability 1/4, on the device."""
        return self._drawn(lambda: torch.rand(*shape, generator=self.generator) < 0.25)

    def integers(self, *shape: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From 0 to ``high`` - 1, on the device."""
        return self._drawn(lambda: torch.randint(high, shape, generator=self.generator).to(dtype))

    def orders(self, rows: int, count: int) -> Tensor:
        """INT64 ``[rows, count]``: the numbers from 0 to ``count`` - 1, in another order in each row, on the device."""
        return self._drawn(lambda: torch.rand(rows, count, generator=self.generator).argsort(1))

    def fixed(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """These values, on the device."""
        return self._drawn(lambda: torch.tensor(values, dtype=dtype))

    def padding(self, lengths: Sequence[int], longest: int) -> Tensor:
        """``[batch, longest]``, True from each sequence's length on."""
        return self.fixed(lengths, torch.int64)[:, None] <= torch.arange(longest, device=self.device)

    def _drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        return self.tape.next(lambda: draw().to(self.device))

    def angles(self, positions: int, features: int) -> Tensor:
        """RoPE's angles in radians, ``[positions, 1, 1, features]``, made on the CPU: no two devices need agree."""

        def draw() -> Tensor:
            half = torch.arange(0, features, 2).double()
            angle = torch.outer(torch.arange(positions).double(), torch.exp(-math.log(10000.0) * half / features))
            return torch.cat([angle, angle], dim=-1)[:, None, None].float()

        return self._drawn(draw)

    def dtype(self, dtype: torch.dtype) -> Any:
        """TE's name of a torch dtype."""
        return importlib.import_module("transformer_engine.pytorch.constants").TE_DType[dtype]

    def quantizer(self, name: str, codes: str = E4M3) -> Any:
        """A TE quantizer for both directions, by its name in ``QUANTIZERS``; ``codes`` is E4M3 or E5M2."""
        return QUANTIZERS[name].make(self, getattr(self.tex.DType, codes))

    def why_unavailable(self, quantizer: str) -> str | None:
        """TE's reason why this GPU has not the format of a quantizer, or None if it has it."""
        available, reason = getattr(self.te, QUANTIZERS[quantizer].available)(return_reason=True)
        return None if available else reason


def bench(kernels: Kernels, seed: int) -> Bench:
    """A bench on these kernels; the same seed makes the same inputs on all."""
    tex = importlib.import_module("transformer_engine_torch")
    return Bench(kernels.te, tex, kernels.device, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class QuantizerKind:
    """How a quantizer is made, for given codes, and the name of TE's function that says if the GPU has its format."""

    make: Callable[[Bench, Any], Any]
    available: str


def _delayed(bench: Bench, codes: Any) -> Any:
    scale = torch.full((1,), _DELAYED_SCALE, device=bench.device)
    return bench.te.Float8Quantizer(scale=scale, amax=torch.zeros_like(scale), fp8_dtype=codes)


def _current(bench: Bench, codes: Any, **options: Any) -> Any:
    return bench.te.Float8CurrentScalingQuantizer(codes, bench.device, **options)


def _block(bench: Bench, codes: Any, dimensions: int) -> Any:
    return bench.te.Float8BlockQuantizer(codes, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


def _hadamard(bench: Bench, codes: Any) -> Any:
    return bench.te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)


QUANTIZERS = {
    "fp8_delayed": QuantizerKind(_delayed, "is_fp8_available"),
    "fp8_current": QuantizerKind(_current, "is_fp8_available"),
    "fp8_current, power-of-two scales": QuantizerKind(
        lambda bench, codes: _current(bench, codes, force_pow_2_scales=True), "is_fp8_available"
    ),
    "fp8_block 1x128": QuantizerKind(lambda bench, codes: _block(bench, codes, 1), "is_fp8_block_scaling_available"),
    "fp8_block 128x128": QuantizerKind(lambda bench, codes: _block(bench, codes, 2), "is_fp8_block_scaling_available"),
    "mxfp8": QuantizerKind(lambda bench, codes: bench.te.MXFP8Quantizer(codes), "is_mxfp8_available"),
    "nvfp4": QuantizerKind(lambda bench, codes: bench.te.NVFP4Quantizer(), "is_nvfp4_available"),
    "nvfp4 16x16": QuantizerKind(
        lambda bench, codes: bench.te.NVFP4Quantizer(with_2d_quantization=True), "is_nvfp4_available"
    ),
    "nvfp4, Hadamard transform": QuantizerKind(_hadamard, "is_nvfp4_available"),
}
