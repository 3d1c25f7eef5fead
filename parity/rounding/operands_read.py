"""What GEMMs have read of their operands in one pass, so that the next to read the same tensor need not cast it again.

A linear layer's input and weight are read in the forward pass and again in the backward pass, the gradient of its
output by two GEMMs of the backward pass, and the input of a query's projection by those of key and value.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Casts a matrix, where a GEMM sums over this dimension of it.
Cast = Callable[[Tensor, int], Tensor]


class OperandsRead:
    """Cast operands by the tensor that they were cast from. Each is kept, and its source with it."""

    def __init__(self) -> None:
        # A source that lives keeps its address to itself.
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._latest: tuple[object, ...] | None = None

    @property
    def held(self) -> int:
        """Bytes that the casts take, beside what they were cast from."""
        return sum(read.nbytes for base, read in self._kept.values() if read.data_ptr() != base.data_ptr())

    def read(
        self, matrix: Tensor, version: int, dim: int, cast: Cast, is_cast_along_dim: bool, will_be_read_later: bool
    ) -> Tensor:
        """The matrix as a GEMM reads it.

        Args:
            matrix: FP32 ``[rows, columns]``, with any strides: a transposed view is known by its base.
            version: of the tensor, which counts what was written to it; views made below autograd have none of it.
            dim: that the GEMM sums over.
            cast: the same for all who read this tensor.
            is_cast_along_dim: whether the values depend on the dimension.
            will_be_read_later: or else only by the next GEMM, if at all.
        """
        is_transposed = matrix.stride(0) < matrix.stride(1)
        base = matrix.t() if is_transposed else matrix
        base_dim = 1 - dim if is_transposed else dim
        key = (base.data_ptr(), base.shape, base.stride(), version, base_dim if is_cast_along_dim else None)
        if key not in self._kept:
            self._forget_latest()
            read = cast(matrix, dim)
            self._kept[key] = (base, read.t() if is_transposed else read)
            self._latest = None if will_be_read_later else key
        read = self._kept[key][1]
        return read.t() if is_transposed else read

    def _forget_latest(self) -> None:
        if self._latest is not None:
            del self._kept[self._latest]
            self._latest = None
