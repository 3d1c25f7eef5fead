"""An operand is cast once, however many GEMMs read it, as long as it stays what it was."""

import pytest
import torch

from parity.numerics.operands import OperandsRead


class Reader:
    """Reads matrices and counts the casts, each of which doubles."""

    def __init__(self):
        self.casts = 0
        self._read = OperandsRead()

    def __call__(self, matrix, dim=1, is_cast_along_dim=False, will_be_read_later=True):
        def cast(matrix, dim):
            self.casts += 1
            return 2 * matrix

        found = self._read.read(matrix, matrix._version, dim, cast, is_cast_along_dim, will_be_read_later)
        assert torch.equal(found, 2 * matrix)
        return found


@pytest.fixture
def read():
    return Reader()


def test_a_matrix_and_its_transposed_view_are_cast_once(read):
    x = torch.randn(3, 5)
    assert read(x, 1).shape == (3, 5)
    assert read(x.t(), 1).shape == (5, 3)
    assert read.casts == 1


def test_a_cast_in_blocks_is_made_once_for_each_of_the_matrixs_own_dimensions(read):
    x = torch.randn(3, 5)
    for matrix, dim in ((x, 0), (x.t(), 1), (x, 1), (x.t(), 0)):
        read(matrix, dim, is_cast_along_dim=True)
    assert read.casts == 2


def test_a_matrix_that_was_written_to_is_cast_again(read):
    x = torch.randn(3, 5)
    read(x)
    x.add_(1.0)
    read(x)
    assert read.casts == 2


def test_parts_of_one_tensor_are_not_taken_for_each_other(read):
    x = torch.randn(6, 5)
    read(x[:3])
    read(x[3:])
    read(x[:, :3])
    assert read.casts == 3


def test_what_only_the_next_gemm_reads_is_kept_until_something_else_is_cast(read):
    gradient, weight = torch.randn(3, 5), torch.randn(4, 5)
    read(weight)
    read(gradient, will_be_read_later=False)
    read(weight)
    read(gradient, will_be_read_later=False)
    assert read.casts == 2
    read(torch.randn(2, 2))
    read(gradient, will_be_read_later=False)
    assert read.casts == 4


def test_memory_that_is_given_out_again_is_not_taken_for_what_lay_there(read):
    for _ in range(20):
        read(torch.randn(64, 64), will_be_read_later=False)
    assert read.casts == 20


def test_what_is_kept_counts_with_its_bytes_but_for_casts_that_copy_nothing():
    read = OperandsRead()
    x, y = torch.randn(6, 5), torch.randn(4, 5)
    read.read(x, x._version, 1, lambda matrix, dim: 2 * matrix, False, True)
    read.read(y, y._version, 1, lambda matrix, dim: matrix, False, True)
    assert read.held == x.nbytes
