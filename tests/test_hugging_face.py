"""The examples port layers of transformers as they are, and rightly."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity
from parity.case import registry

EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "hugging_face").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_port_of_a_layer_of_transformers_passes(file):
    pytest.importorskip("transformers", reason="te-parity[examples] is not installed")
    (case,) = registry.load_file(file)
    results = parity.compare(case, ["fp32", "bf16", "fp8_current"])
    assert [result.status for result in results] == ["passed"] * 3
