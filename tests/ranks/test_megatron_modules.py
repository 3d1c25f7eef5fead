"""Megatron-Core's layers on TE can be the candidate of a pair over ranks like any other module."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity
from parity.case.registry import load_case
from parity.ranks.layout import degrees

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron" / "mlp.py"
WRONG = """

@parity.pair("forgets", ranks=[dict(tp=2, sequence_parallel=True)])
def forgets(te, ranks):
    return mlp(ranks, adds_up=False)
"""


@pytest.fixture(autouse=True)
def needs_megatron():
    pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core")


@pytest.mark.parametrize("ranks", [dict(tp=2), dict(tp=2, sequence_parallel=True)], ids=lambda x: degrees(x).label)
def test_the_example_passes(ranks):
    (result,) = parity.compare(load_case(EXAMPLE, "megatron_mlp"), ["bf16"], ranks=ranks)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())


def test_what_megatron_s_trainer_would_add_up_is_named_if_nobody_does(tmp_path):
    (tmp_path / "wrong.py").write_text(EXAMPLE.read_text(encoding="utf-8") + WRONG, encoding="utf-8")
    case = load_case(tmp_path / "wrong.py", "forgets")
    (result,) = parity.compare(case, ["bf16"], ranks=case.ranks[0])
    assert [one.title for one in result.findings] == ["reduction-missing"]
    assert "up.layer_norm_weight" in result.findings[0].message
