"""Test that a pair is compared as if its file were alone in the process, whatever other files and tests have left."""

from __future__ import annotations

import os
import textwrap

import forked
import pytest

from parity.report import record

NORMED = """
import parity, torch
from torch import nn
{beside}

def declare(name, eps, call=None):
    def pair(te):
        return parity.Pair(
            reference=nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64, bias=False)),
            candidate=te.LayerNormLinear(64, 64, eps=eps, normalization="RMSNorm", bias=False),
            weights={{"0.weight": "layer_norm_weight", "1.weight": "weight"}},
            inputs=lambda rng: rng.normal(32, 64),
            call_candidate=call,
        )
    parity.pair(name, precisions=["bf16"])(pair)
"""
# A repair of TE that makes every eps the reference's, as a port may have one.
REPAIR = """
import transformer_engine.pytorch.module.layernorm_linear as layer
norm = layer.apply_normalization
layer.apply_normalization = lambda *a, **k: norm(*[1e-6 if isinstance(x, float) and x == 1e-5 else x for x in a], **k)
"""
LEAVES = """
def test_leaves() -> None:
    torch.set_default_dtype(torch.float64)
    torch.autograd.backward = lambda *args, **kwargs: None
    nn.modules.module.register_module_forward_hook(lambda module, args, y: 1.01 * y)
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()

def test_is_left_what_another_test_of_this_file_has_left() -> None:
    assert torch.get_default_dtype() is torch.float64
"""
FIXTURE = "import pytest\n@pytest.fixture(scope='session')\ndef repaired():" + textwrap.indent(REPAIR, "    ")
USES_IT = "import pytest\npytestmark = pytest.mark.usefixtures('repaired')\ndef test_sets_it_up(): pass"
STAYS = """
import pytest, transformer_engine.pytorch.module.layernorm_linear as layer
@pytest.mark.usefixtures("repaired")
def test_a_fixture_lasts_beyond_a_pair() -> None:
    assert layer.apply_normalization.__name__ == "<lambda>"
"""
FILES = {
    # An earlier file repairs TE when it is imported; another one does so in a module that two files share.
    "a_repairs": NORMED.format(beside=REPAIR) + 'declare("with_own_repair", 1e-5)\n',
    "b_shares": NORMED.format(beside="import repairs") + 'declare("with_shared_repair", 1e-5)\n',
    "c_shares": NORMED.format(beside="import repairs") + 'declare("with_shared_repair_again", 1e-5)\n',
    "repairs": REPAIR,
    "test_d": NORMED.format(beside="") + LEAVES + 'declare("right", 1e-6)\ndeclare("wrong", 1e-5)\n',
    "test_e": "import torch\ndef test_after_pairs():\n    assert torch.get_default_dtype() is torch.float64\n",
    "conftest": FIXTURE,
    "test_f": NORMED.format(beside=USES_IT) + 'declare("with_repair_by_a_fixture", 1e-5)\n',
    "test_g": STAYS,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Return the status of each pair of the files above, and its notes, from one run in one process."""
    folder = tmp_path_factory.mktemp("apart")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    names = [f"{name}.py" for name in FILES if name not in ("repairs", "conftest")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ("-m", "pytest", "-p", "parity.plugin", "--parity-diagnosis=no", "-p", "no:randomly")
    ran = forked.run(*command, *names, folder=folder, environment=environment)
    assert "1 failed, 10 passed" in ran.stdout, ran.stdout + ran.stderr
    found = record.read(folder / "reports/parity.jsonl").results
    return {result.case: (result.status, " ".join(result.notes)) for result in found}


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *(("with_own_repair", "passed"), ("with_shared_repair", "passed"), ("with_shared_repair_again", "passed")),
        *(("right", "passed"), ("wrong", "failed"), ("with_repair_by_a_fixture", "passed")),
    ],
)
def test_it_has_the_verdict_that_it_has_alone(results: dict[str, tuple[str, str]], name: str, status: str) -> None:
    assert results[name][0] == status, results[name]


def test_what_was_undone_is_told(results: dict[str, tuple[str, str]]) -> None:
    notes = results["right"][1]
    undone = "torch.autograd.backward", "default dtype", "forward_hooks", "torch dispatch modes", "apply_normalization"
    assert "other tests or files changed" in notes
    assert all(told in notes for told in undone), notes
