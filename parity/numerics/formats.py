"""Round operands of GEMMs to their formats, and define which operands and results a precision rounds.

Each format is a function that rounds a matrix to the format. It takes FP32 values ``[rows, columns]`` and the dimension
that the GEMM sums over, along which blocks share a scale; it returns FP32 values of the same shape. A scale for the
whole tensor comes from its largest magnitude, or from an amax that a kernel took earlier, before it rounded the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

# Number formats of GEMM operands. Exact ties may round either way, because the rounding model predicts the size of an
# error and not its bits.


class Format(Protocol):
    """The signature of every format. Formats without a scale for the whole tensor ignore ``amax``."""

    def __call__(self, x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor: ...


# The masks of the exponents of FP32 and FP64 numbers. These bits are the power of two at or below the magnitude.
_FP32_EXPONENT = 0xFF << 23
_FP64_EXPONENT = 0x7FF << 52
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tf32(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Round FP32 values, |x| < 2^114, to nearest with 10 mantissa bits, by Veltkamp's splitting.

    Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971, section 5. A tensor
    core itself drops the low bits. That cuBLAS rounds follows from the error that PyTorch's documentation gives for an
    A100 ("TensorFloat-32 on Ampere (and later) devices"): at most 0.1747 in a product of Gaussian matrices of 10240,
    where rounding to nearest predicts 0.16, and truncation more than 0.4.
    """
    scaled = x * (2.0**13 + 1.0)
    return scaled.sub_(scaled - x)


def tf32_truncated(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Truncate FP32 values to 10 mantissa bits, like a tensor core that reads the upper bits of a word."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


@dataclass(frozen=True)
class Quantized:
    """A format in which numbers of few bits share scales, as one of TE's quantizers makes them.

    Attributes:
        numbers: what each number is rounded to.
        along: how many elements along the summed dimension share a scale; 0 for one scale a tensor.
        across: how many elements along the other dimension share it.
        power_of_two: whether a scale is rounded down to a power of two, so that nothing overflows. TE's block scaling
            rounds ``448 / amax`` down; MXFP8 (OCP Microscaling Formats v1.0) rounds ``amax / 448`` up, which is the
            same. E2M1 always has E4M3 scales for its blocks, and an FP32 scale for the tensor (arXiv 2509.25149,
            section 2).
        least_amax: a smaller amax counts as this one.
        stochastic: whether E2M1 rounds up or down at random, without bias (ibid., section 4.3).
        rotated: whether each 16 elements along the summed dimension are first rotated by a Hadamard matrix, which
            cancels in a product of two such matrices (ibid., section 4.2).
        row_scaled: whether E2M1 has an FP32 scale for each line along the summed dimension instead of one a tensor.
        largest_scale: the largest E4M3 scale of E2M1's blocks.
        four_over_six: the error by which E2M1 chooses for each block whether its amax becomes 4 or 6; empty if it is
            always 6 (arXiv 2512.02010).
    """

    numbers: Literal["E4M3", "E5M2", "E2M1"]
    along: int = 0
    across: int = 1
    power_of_two: bool = False
    least_amax: float = 0.0
    stochastic: bool = False
    rotated: bool = False
    row_scaled: bool = False
    largest_scale: float = 448.0
    four_over_six: Literal["", "MAE", "MSE"] = ""

    def __call__(self, x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded, in FP32."""
        if self.rotated:
            x, amax = hadamard(x, dim), None
        if self.numbers == "E2M1":
            of_tensor = x.abs().amax(dim, keepdim=True) if self.row_scaled else largest(x) if amax is None else amax
            return self._cast_blocks(x, dim, of_tensor)
        if self.along:
            return self._cast_blocks(x, dim)
        return self._cast_to_fp8(x, largest(x) if amax is None else amax)

    @property
    def words(self) -> str:
        """Return it as reports show it: numbers, block (across the summed dimension and along it), and what is unusual.

        How an amax is found is not part of it: delayed and current scaling are both ``E4M3, one scale``.
        """
        is_usual = self.numbers == "E2M1" or self.power_of_two == bool(self.along)
        unusual = {
            "FP32 scales" if self.along else "a power of two": not is_usual,
            "rotated": self.rotated,
            "stochastic": self.stochastic,
            "a scale a row": self.row_scaled,
            f"scales to {self.largest_scale:g}": self.largest_scale != 448.0,
            f"four over six by {self.four_over_six}": bool(self.four_over_six),
        }
        told = ", ".join(words for words, applies in unusual.items() if applies)
        block = f"{self.across}x{self.along}" if self.along else "one scale"
        return f"{self.numbers}, {block}{told and f' ({told})'}"

    @property
    def is_alike_both_ways(self) -> bool:
        """Whether a matrix is the same whichever dimension a GEMM sums over."""
        return not self.rotated and self.along in (0, self.across)

    def _cast_blocks(self, x: Tensor, dim: int, amax: Tensor | None = None) -> Tensor:
        """Cast a matrix whose blocks share a scale; ``amax`` is what E2M1's FP32 scale comes from."""
        dim %= 2
        length = (self.across, self.along) if dim else (self.along, self.across)
        (rows, columns), (high, wide) = x.shape, length
        missing = (0, -columns % wide, 0, -rows % high)

        def split(matrix: Tensor) -> Tensor:
            padded = F.pad(matrix, missing) if any(missing) else matrix
            return padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))

        blocks = split(x)
        if amax is None:
            cast = self._cast_to_fp8(blocks, blocks.abs().amax((1, 3), keepdim=True))
        else:
            cast = self._cast_to_e2m1(blocks, split(amax.expand_as(x)) if amax.dim() else amax)
        return cast.flatten(2).flatten(0, 1)[:rows, :columns]

    def _cast_to_fp8(self, x: Tensor, amax: Tensor) -> Tensor:
        dtype = torch.float8_e4m3fn if self.numbers == "E4M3" else torch.float8_e5m2
        if self.least_amax:
            amax = amax.clamp(min=self.least_amax)
        scale = torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones_like(amax))
        if not self.power_of_two:
            return nearest_fp8(x * scale, dtype).div_(scale)
        exponent, one = scale.log2().floor().clamp(max=127), torch.ones_like(scale)
        return nearest_fp8(x * torch.ldexp(one, exponent), dtype).mul_(torch.ldexp(one, -exponent))

    def _cast_to_e2m1(self, block: Tensor, amax: Tensor) -> Tensor:
        of_tensor = torch.where(amax > 0, self.largest_scale * 6.0 / amax, torch.ones_like(amax))
        to_six = block.abs().amax((1, 3), keepdim=True) / 6.0 * of_tensor
        if not self.four_over_six:
            return self._cast_with_scale(block, to_six, of_tensor)
        six, four = (self._cast_with_scale(block, scale, of_tensor) for scale in (to_six, to_six * 1.5))
        off_six, off_four = ((each - block).abs() for each in (six, four))
        if self.four_over_six == "MSE":
            off_six, off_four = off_six.square(), off_four.square()
        return torch.where(off_four.sum((1, 3), keepdim=True) < off_six.sum((1, 3), keepdim=True), four, six)

    def _cast_with_scale(self, block: Tensor, scale: Tensor, of_tensor: Tensor) -> Tensor:
        held = scale.clamp(max=448.0).to(torch.float8_e4m3fn).to(block.dtype)
        to_block = torch.where(held > 0, of_tensor / held, 0.0)
        to_e2m1 = _stochastic_e2m1 if self.stochastic else _nearest_e2m1
        return to_e2m1((block * to_block).clamp(-6.0, 6.0)) * held / of_tensor


def e4m3_blocks(length: int) -> Quantized:
    """Return float8_e4m3fn with a power-of-two scale for each ``length`` elements along the summed dimension."""
    return Quantized("E4M3", length, power_of_two=True)


e4m3, e5m2 = Quantized("E4M3"), Quantized("E5M2")
e4m3_squares = Quantized("E4M3", 128, 128, power_of_two=True)
nvfp4_blocks, nvfp4_squares = Quantized("E2M1", 16), Quantized("E2M1", 16, 16)
nvfp4_stochastic = replace(nvfp4_blocks, stochastic=True)


@dataclass(frozen=True)
class Requantized:
    """What is read of a matrix that was stored in a format for another GEMM, and then taken back to the dtype.

    Attributes:
        stored: the format, in which the matrix is summed over along its other dimension.
        then: the format to which it is cast afterwards; None if it stays in the dtype.
        dtype: what it is taken back to.
    """

    stored: Format
    then: Format | None
    dtype: torch.dtype

    def __call__(self, x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded twice, in FP32."""
        taken_back = self.stored(x, 1 - dim % 2, amax).to(self.dtype).to(x.dtype)
        return taken_back if self.then is None else self.then(taken_back, dim)

    @property
    def rotated(self) -> bool:
        """Whether the second format rotates it."""
        return getattr(self.then, "rotated", False)


# Of each attention, in the order of the forward pass: the amaxes behind the two scales by which its results are cast.
Recasts = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Recast:
    """What is read of a result that one kernel casts by a scale, and the next one by another.

    With delayed scaling each keeps a history of its own. If the scales differ by a little, all numbers are rounded the
    same way the second time, and the result leans by up to half of their distance.

    Attributes:
        to_format: the format of both, with a scale a tensor.
        gain: what the result is multiplied by if it leans.
        amaxes: what the scales come from, if it is known.
    """

    to_format: Quantized
    gain: float = 1.0
    amaxes: Recasts = ()

    def __call__(self, x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded twice, in FP32."""
        amax = largest(x) if amax is None else amax
        once = self.to_format(x, dim, amax * math.sqrt(2.0))  # one grid's numbers lie between those of the other
        return self.to_format(once.clamp(-amax, amax), dim, amax).mul_(self.gain)

    def as_leaning(self, x: Tensor, behind: int, dtype: torch.dtype) -> Recast:
        """Return the cast of a result that leans as the known scales make it lean; the same cast if none are known.

        Args:
            x: the result.
            behind: how many attentions lie behind this one.
            dtype: what it is stored in between.
        """
        own = float(largest(x))
        if not self.amaxes or not 0.0 < own < math.inf:
            return self
        first, second = self.amaxes[max(-1 - behind, -len(self.amaxes))]
        x = x * 2.0 ** round(math.log2(first / own))  # a loss scale moves numbers and scales alike
        once = self.to_format(x.clamp(-first, first), amax=x.new_tensor(first)).to(dtype).float()
        twice = self.to_format(once.clamp(-second, second), amax=x.new_tensor(second))
        return replace(self, gain=float((twice * once).sum() / once.square().sum()))


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
UNQUANTIZED = frozenset(_DTYPES.values())
"""What ``describe_format`` returns for operands that no format rounds."""


def describe_format(to_format: Format | None, dtype: torch.dtype) -> str:
    """Return a format of operands in words, such as ``E4M3, one scale``, ``E4M3, 1x128`` or ``bf16``.

    Args:
        to_format: None for an operand that stays as it is stored.
        dtype: what it is stored in.
    """
    if isinstance(to_format, Requantized):
        return describe_format(to_format.then, dtype)
    if isinstance(to_format, Recast):
        return to_format.to_format.words
    return to_format.words if isinstance(to_format, Quantized) else _DTYPES.get(dtype, str(dtype))


def is_alike_both_ways(to_format: Format | None) -> bool:
    """Return whether a rounded matrix is the same whichever dimension a GEMM sums over; False for unknown formats.

    Args:
        to_format: None for a matrix that is not rounded.
    """
    return to_format in (None, tf32, tf32_truncated) or getattr(to_format, "is_alike_both_ways", False)


def hadamard(x: Tensor, dim: int) -> Tensor:
    """Rotate each 16 elements along a dimension by the orthogonal 16 by 16 Hadamard matrix.

    A matrix whose dimension is not a multiple of 16 is returned unchanged.
    """
    rotated = x.movedim(dim, -1)
    if rotated.shape[-1] % 16:
        return x
    matrix = x.new_ones(1, 1)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks = rotated.unflatten(-1, (-1, 16)) @ (matrix / 4)
    return blocks.flatten(-2).movedim(-1, dim)


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of ``dtype`` at each element; near zero, of subnormals.

    Args:
        x: FP32 or FP64. An infinity counts as the largest finite number of this dtype.
    """
    info = torch.finfo(dtype)
    magnitude = x.abs().clamp_(info.smallest_normal, torch.finfo(x.dtype).max)
    return _powers_below(magnitude).mul_(info.eps)


def _powers_below(x: Tensor) -> Tensor:
    """Return the power of two at or below each magnitude, in FP32 or FP64."""
    as_int, exponent = (torch.int64, _FP64_EXPONENT) if x.dtype is torch.float64 else (torch.int32, _FP32_EXPONENT)
    return (x.view(as_int) & exponent).view(x.dtype)


def is_exact(x: Tensor) -> Tensor:
    """Return which numbers are whole or have at most 16 significant bits, as 1 in 256 has that was rounded to FP32.

    Positions, counts, masks and their simple fractions are such numbers, which no rounding changes.
    """
    return (x == x.round()) | (x.float().view(torch.int32) & 0xFF == 0)


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude as a scalar tensor, or 0 if there are no elements."""
    return torch.maximum(x.amax(), -x.amin()) if x.numel() else x.new_zeros(())


def nearest_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values to the nearest FP8 values, ties to even; values that are not finite become NaN.

    Adding and subtracting a number whose last place in FP32 is the dtype's last place gives the same result as casting
    to the dtype and back, in an eighth of the time (E4M3, torch 2.13 on a CPU).

    Args:
        x: FP32 or FP64, of any shape, with no value beyond the dtype's largest.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    info, own = torch.finfo(dtype), torch.finfo(x.dtype)
    last_place = _powers_below(x).clamp_(min=info.smallest_normal).mul_(1.5 * info.eps / own.eps)
    return (x + last_place).sub_(last_place)


def _nearest_e2m1(x: Tensor) -> Tensor:
    values = x.new_tensor(_E2M1_VALUES)
    midpoints = (values[1:] + values[:-1]) / 2
    return values[torch.bucketize(x.abs().contiguous(), midpoints)].copysign(x)


def _stochastic_e2m1(x: Tensor) -> Tensor:
    values = x.new_tensor(_E2M1_VALUES)
    below = (torch.bucketize(x.abs().contiguous(), values, right=True) - 1).clamp(max=len(values) - 2)
    low, high = values[below], values[below + 1]
    chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    return torch.where(chance < (x.abs() - low) / (high - low), high, low).copysign(x)


# The roundings of a precision: operands to formats, stored results to a dtype, and which of these are applied.


OperandPart = Literal["weights", "inputs", "gradients"]
Part = Literal["weights", "inputs", "gradients", "storage", "attention"]
PARTS: frozenset[Part] = frozenset(get_args(Part))


@dataclass(frozen=True)
class Operands:
    """The formats of a linear layer's operands, read along their rows or along their columns; None as stored.

    Attributes:
        inputs: read along rows for the output, along columns for the weight's gradient.
        weights: read along rows for the output, along columns for the input's gradient.
        gradients: those of outputs, read along rows for the input's gradient, along columns for the weight's.
    """

    inputs: Format | None
    weights: Format | None
    gradients: Format | None


Role = tuple[str, str]
"""Of a TE module, as its quantizers' roles say it: its type, ``linear`` or ``grouped_linear``, and its name."""

READ_ALONG_ROWS = {"inputs": "fprop", "weights": "fprop", "gradients": "dgrad"}
"""Which GEMM of a linear layer reads an operand along its rows."""

READ_ALONG_COLUMNS = {"inputs": "wgrad", "weights": "dgrad", "gradients": "wgrad"}
"""Which GEMM reads it along its columns."""

LayerFormats = Mapping[tuple[str, str], Format | None]
"""What of a linear layer is in another format than its precision has: by GEMM (``fprop``, ``dgrad``, ``wgrad``) and by
``inputs``, ``weights``, ``gradients``, which it reads, or ``product``, which is cast there and back; None as stored."""

AttentionPart = Literal["qkv", "probabilities", "context", "context_gradients", "score_gradients", "qkv_gradients"]


@dataclass(frozen=True)
class AttentionFormats:
    """The formats of attention's tensors, if it computes in FP8; None for the dtype.

    Attributes:
        qkv: of queries, keys and values, which are cast from the dtype.
        probabilities: of the product with values, and of the gradient of values; cast from FP32.
        context: of the result; its gradients are computed from this.
        context_gradients: of the result's gradients.
        score_gradients: of the products that give the gradients of queries and keys; cast from FP32.
        qkv_gradients: of the gradients of queries, keys and values.
    """

    qkv: Format | None = None
    probabilities: Format | None = None
    context: Format | None = None
    context_gradients: Format | None = None
    score_gradients: Format | None = None
    qkv_gradients: Format | None = None


@dataclass(frozen=True)
class Rounding:
    """The roundings of a precision.

    Attributes:
        storage: dtype of stored activations, gradients and GEMM results.
        inputs: format of a linear layer's inputs in its GEMMs; None for ``storage``.
        weights: format of its weights; None for ``storage``.
        gradients: format of the gradients with respect to its outputs; None for ``storage``.
        columnwise: the formats of operands that are read along their columns; None if these are the same.
        attention: the formats of attention's tensors.
        by_role: returns the rounding of a linear layer in a module; None if it is this one in all of them.
        products: the formats to which a linear layer's results are cast and back: its output, its input's gradient and
            its weight's.
        shared: whether golden rounds operands to these formats as well, so that no run draws how they are rounded.
        parts: which roundings are applied. ``weights``, ``inputs`` and ``gradients`` are those of a linear layer's
            operands. ``attention`` stands for those of the operands of attention's batched GEMMs and of its scores, and
            ``storage`` for other stored results: of linear layers, of attention, of sums, and of the module.
    """

    storage: torch.dtype
    inputs: Format | None = None
    weights: Format | None = None
    gradients: Format | None = None
    columnwise: Operands | None = None
    attention: AttentionFormats = AttentionFormats()
    by_role: Callable[[Role], Rounding] | None = None
    products: tuple[Format | None, Format | None, Format | None] = (None, None, None)
    shared: bool = False
    parts: frozenset[Part] = PARTS

    @property
    def quantizes(self) -> bool:
        """Whether it is a recipe's."""
        operands = self.inputs, self.weights, self.gradients
        return self.by_role is not None or any(isinstance(one, (Quantized, Requantized)) for one in operands)

    @property
    def of_golden(self) -> Rounding:
        """The roundings of a golden that rounds as this recipe does, with everything but operands in FP64."""
        return replace(self, storage=torch.float64, parts=PARTS - {"storage"})

    @property
    def scales_whole_weights(self) -> bool:
        """Whether a weight has one scale."""
        return isinstance(self.weights, Quantized) and not self.weights.along

    def store(self, x: Tensor) -> Tensor:
        """Return ``x`` rounded to the precision's dtype, in its own dtype. Integers and complex numbers stay."""
        return x if x.dtype == self.storage or not x.is_floating_point() else x.to(self.storage).to(x.dtype)

    def store_part(self, x: Tensor, part: Part = "storage") -> Tensor:
        """Return ``x`` as ``store`` does if this part's roundings are applied, or unchanged."""
        return self.store(x) if part in self.parts else x

    def operand_format(self, part: OperandPart, columnwise: bool = False) -> Format | None:
        """Return the format of a linear layer's operand, or None if the GEMM reads it as it is stored."""
        if part not in self.parts:
            return None
        to_format: Format | None = getattr(self.columnwise if columnwise and self.columnwise else self, part)
        return to_format

    def changed(self, formats: LayerFormats) -> Rounding:
        """Return the rounding of a layer with other formats here and there."""
        along: Any = self.columnwise or self
        rows = {part: formats.get((gemm, part), getattr(self, part)) for part, gemm in READ_ALONG_ROWS.items()}
        columns = {part: formats.get((gemm, part), getattr(along, part)) for part, gemm in READ_ALONG_COLUMNS.items()}
        output, of_inputs, of_weights = (formats.get((gemm, "product")) for gemm in ("fprop", "dgrad", "wgrad"))
        return replace(self, **rows, columnwise=Operands(**columns), products=(output, of_inputs, of_weights))
