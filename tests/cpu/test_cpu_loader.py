"""What the loader puts in the place of names that TE's source uses."""

import ast

import pytest

from parity.cpu.loading.loader import _StandIns


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("torch.compile(f)", "__parity_compile__(f)"),
        ("import triton.language as tl", "import parity.cpu.triton.stand_in as tl"),
        ("from triton import jit", "from parity.cpu.triton.stand_in import jit"),
    ],
)
def test_compilers_have_stand_ins(written, read):
    assert ast.unparse(_StandIns().visit(ast.parse(written))) == read


def test_te_s_own_package_named_triton_stays():
    source = "from .triton import permutation"
    assert ast.unparse(_StandIns().visit(ast.parse(source))) == source
