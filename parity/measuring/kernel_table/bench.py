"""Make one call of a kernel, on one kind of kernels and seeded inputs, and return its results as plain tensors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parity.te import Kernels
from te_on_cpu import float8, formats

# A call: one kernel on one set of inputs.


@dataclass(frozen=True)
class KernelCall:
    """A kernel call, which gives one row of the table for each result.

    Attributes:
        family: the section of the table that it belongs to.
        kernel: the kernel's name in ``transformer_engine_torch``.
        variant: dtypes and options, in words.
        shapes: the inputs' shapes, in words.
        run: makes inputs on a bench, calls the kernel and returns its results by name: plain or quantized tensors, or
            None.
        quantizer: the one of ``bench.QUANTIZERS`` whose format the GPU must support, or None.
    """

    family: str
    kernel: str
    variant: str
    shapes: str
    run: Callable[[Bench], Mapping[str, Any]]
    quantizer: str | None = None

    @property
    def name(self) -> str:
        """Return a name that distinguishes the call from all others."""
        return f"{self.kernel}: {self.variant}"


# The plain tensors that a kernel's results consist of, on the CPU, each with the dtype of the numbers in it.


_SCALE_DTYPES = {"MXFP8Tensor": torch.float8_e8m0fnu, "NVFP4Tensor": torch.float8_e4m3fn}


def unpack(results: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return every buffer of every result, by name.

    FP8 codes and scales have their own dtypes. FP4 codes, which torch's kernels do not support, become int8 numbers
    from -7 to 7, one for each value and in the order of the values that they stand for.

    Args:
        results: plain tensors, TE quantized tensors, or None, by name.
    """
    buffers = (
        (f"{name} {part}".strip(), buffer) for name, value in results.items() for part, buffer in _list_buffers(value)
    )
    return {name: buffer.detach().cpu().contiguous() for name, buffer in buffers}


def _list_buffers(value: Any) -> Iterator[tuple[str, Tensor]]:
    if value is None:
        return
    entry = formats.of_tensor(value)
    if entry is not None:
        yield from _block_scaled(entry, value)
    elif float8.is_float8_tensor(value):
        codes = float8.fp8_dtype(value)
        if value._data is not None:
            yield "codes", value._data.view(codes)
        if value._transpose is not None and not value._transpose_invalid:
            yield "transpose", value._transpose.view(codes)
        yield "scale_inv", value._scale_inv
    else:
        yield "", value


def _block_scaled(entry: formats.Format, value: Any) -> Iterator[tuple[str, Tensor]]:
    for name in entry.buffers:
        buffer = getattr(value, f"_{name}")
        if buffer is None:
            continue
        if name.endswith("data"):
            is_fp4 = entry.tensor == "NVFP4Tensor"
            yield name.replace("data", "codes"), _unpack_fp4(buffer) if is_fp4 else buffer.view(float8.fp8_dtype(value))
        elif name.endswith("scale_inv") and entry.tensor in _SCALE_DTYPES:
            yield name, buffer.view(_SCALE_DTYPES[entry.tensor])
        else:
            yield name, buffer


def _unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack two codes from each byte, the lower half first: a sign, and 3 bits that grow with the magnitude."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    return torch.where(codes < 8, codes, 8 - codes)


# A call's inputs, kept so that the call can be timed on them without drawing them again.


@dataclass
class Tape:
    """The tensors that a call drew, in their order.

    Attributes:
        kept: copies of the tensors that were drawn.
        again: the tensors that the next call gets instead of drawing; None while drawing.
    """

    kept: list[Tensor] = field(default_factory=list)
    again: list[Tensor] | None = None

    def next(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that the call may write to: a new one, or a copy of the one drawn in this place before."""
        if self.again is not None:
            return self.again.pop(0)
        drawn = draw()
        self.kept.append(drawn.clone())
        return drawn

    def rewind(self) -> None:
        """Give the next call copies of all tensors that were drawn."""
        self.again = [tensor.clone() for tensor in self.kept]


# The bench of a kernel call: TransformerEngine on one kind of kernels, seeded inputs, and quantizers.


# Dtypes by their names in the table.
HALF = {"BF16": torch.bfloat16, "FP16": torch.float16}
DTYPES = {"FP32": torch.float32, **HALF}
E4M3, E5M2 = "kFloat8E4M3", "kFloat8E5M2"
_DELAYED_SCALE = 37.5  # not a power of two, so that products are rounded


@dataclass(frozen=True)
class Bench:
    """The surroundings of one kernel call.

    Attributes:
        te: ``transformer_engine.pytorch``.
        tex: ``transformer_engine_torch``, the kernels.
        device: the device on which they run.
        generator: a generator on the CPU, whatever the device is, so that inputs are the same on all.
        tape: the tensors that were drawn.
    """

    te: ModuleType
    tex: ModuleType
    device: torch.device
    generator: torch.Generator
    tape: Tape = field(default_factory=Tape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Draw normal values with mean 0 and standard deviation ``scale``, on the device."""
        return self._draw_tensor(lambda: (torch.randn(*shape, generator=self.generator) * scale).to(dtype))

    def wide(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw normal values, each times its own power of two from 2**-6 to 2**5, so that scales of blocks differ."""

        def draw() -> Tensor:
            exponents = torch.randint(-6, 6, shape, generator=self.generator)
            return torch.ldexp(torch.randn(*shape, generator=self.generator), exponents).to(dtype)

        return self._draw_tensor(draw)

    def coin(self, *shape: int) -> Tensor:
        """Draw booleans that are True with probability 1/4, on the device."""
        return self._draw_tensor(lambda: torch.rand(*shape, generator=self.generator) < 0.25)

    def integers(self, *shape: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers from 0 to ``high`` - 1, on the device."""
        return self._draw_tensor(lambda: torch.randint(high, shape, generator=self.generator).to(dtype))

    def orders(self, rows: int, count: int) -> Tensor:
        """Return INT64 ``[rows, count]``: 0 to ``count`` - 1 in a random order in each row, on the device."""
        return self._draw_tensor(lambda: torch.rand(rows, count, generator=self.generator).argsort(1))

    def fixed(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return these values, on the device."""
        return self._draw_tensor(lambda: torch.tensor(values, dtype=dtype))

    def padding(self, lengths: Sequence[int], longest: int) -> Tensor:
        """Return ``[batch, longest]``, True from each sequence's length on."""
        return self.fixed(lengths, torch.int64)[:, None] <= torch.arange(longest, device=self.device)

    def _draw_tensor(self, draw: Callable[[], Tensor]) -> Tensor:
        return self.tape.next(lambda: draw().to(self.device))

    def angles(self, positions: int, features: int) -> Tensor:
        """Return RoPE's angles, ``[positions, 1, 1, features]``, computed on the CPU because devices may differ."""

        def draw() -> Tensor:
            half = torch.arange(0, features, 2).double()
            angle = torch.outer(torch.arange(positions).double(), torch.exp(-math.log(10000.0) * half / features))
            return torch.cat([angle, angle], dim=-1)[:, None, None].float()

        return self._draw_tensor(draw)

    def dtype(self, dtype: torch.dtype) -> Any:
        """Return TE's name for a torch dtype."""
        return importlib.import_module("transformer_engine.pytorch.constants").TE_DType[dtype]

    def quantizer(self, name: str, codes: str = E4M3) -> Any:
        """Return a TE quantizer for both directions, by its name in ``QUANTIZERS``; ``codes`` is E4M3 or E5M2."""
        return QUANTIZERS[name].make(self, getattr(self.tex.DType, codes))

    def why_unavailable(self, quantizer: str) -> str | None:
        """Return TE's reason why this GPU does not support a quantizer's format, or None if it does."""
        available, reason = getattr(self.te, QUANTIZERS[quantizer].available)(return_reason=True)
        return None if available else reason


def bench(kernels: Kernels, seed: int) -> Bench:
    """Return a bench on these kernels. The same seed gives the same inputs on all kernels."""
    tex = importlib.import_module("transformer_engine_torch")
    return Bench(kernels.te, tex, kernels.device, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class QuantizerKind:
    """How to make a quantizer for given codes, and TE's function that says if the GPU supports its format."""

    make: Callable[[Bench, Any], Any]
    available: str


def _make_delayed_quantizer(bench: Bench, codes: Any) -> Any:
    scale = torch.full((1,), _DELAYED_SCALE, device=bench.device)
    return bench.te.Float8Quantizer(scale=scale, amax=torch.zeros_like(scale), fp8_dtype=codes)


def _make_current_quantizer(bench: Bench, codes: Any, **options: Any) -> Any:
    return bench.te.Float8CurrentScalingQuantizer(codes, bench.device, **options)


def _make_block_quantizer(bench: Bench, codes: Any, dimensions: int) -> Any:
    return bench.te.Float8BlockQuantizer(codes, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


def _make_hadamard_quantizer(bench: Bench, codes: Any) -> Any:
    return bench.te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)


QUANTIZERS = {
    "fp8_delayed": QuantizerKind(_make_delayed_quantizer, "is_fp8_available"),
    "fp8_current": QuantizerKind(_make_current_quantizer, "is_fp8_available"),
    "fp8_current, power-of-two scales": QuantizerKind(
        lambda bench, codes: _make_current_quantizer(bench, codes, force_pow_2_scales=True), "is_fp8_available"
    ),
    "fp8_block 1x128": QuantizerKind(
        lambda bench, codes: _make_block_quantizer(bench, codes, 1), "is_fp8_block_scaling_available"
    ),
    "fp8_block 128x128": QuantizerKind(
        lambda bench, codes: _make_block_quantizer(bench, codes, 2), "is_fp8_block_scaling_available"
    ),
    "mxfp8": QuantizerKind(lambda bench, codes: bench.te.MXFP8Quantizer(codes), "is_mxfp8_available"),
    "nvfp4": QuantizerKind(lambda bench, codes: bench.te.NVFP4Quantizer(), "is_nvfp4_available"),
    "nvfp4 16x16": QuantizerKind(
        lambda bench, codes: bench.te.NVFP4Quantizer(with_2d_quantization=True), "is_nvfp4_available"
    ),
    "nvfp4, Hadamard transform": QuantizerKind(_make_hadamard_quantizer, "is_nvfp4_available"),
}
