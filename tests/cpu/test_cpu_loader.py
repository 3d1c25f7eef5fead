"""What the loader puts in the place of names that TE's source uses."""

import ast
import os
import subprocess
import sys

import pytest

from parity.cpu.loading.loader import _StandIns


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("torch.compile(f)", "__parity_compile__(f)"),
        ("torch.baddbmm(s, q, k, beta=0.0)", "__parity_baddbmm__(s, q, k, beta=0.0)"),
        ("torch.bmm(p, v)", "__parity_bmm__(p, v)"),
        ("import triton.language as tl", "import parity.cpu.loading.triton as tl"),
        ("from triton import jit", "from parity.cpu.loading.triton import jit"),
        ("from importlib.metadata import version as v", "from parity.cpu.loading.stand_ins import version as v"),
    ],
)
def test_what_only_a_gpu_can_use_has_stand_ins(written, read):
    assert ast.unparse(_StandIns().visit(ast.parse(written))) == read


def test_te_s_own_package_named_triton_stays():
    source = "from .triton import permutation"
    assert ast.unparse(_StandIns().visit(ast.parse(source))) == source


def test_a_flash_attention_that_is_installed_is_not_called_with_tensors_on_the_cpu(tmp_path):
    installed = tmp_path / "flash_attn-2.8.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    program = (
        "from importlib.metadata import version; print(version('flash-attn'))\n"
        "from parity import te; te.kernels('cpu')\n"
        "from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils\n"
        "print(FlashAttentionUtils.is_installed)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PARITY_EMULATED_GPU": "ada"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    assert ran.stdout == "2.8.3\nFalse\n"
