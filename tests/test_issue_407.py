"""TransformerEngine issue 407: rounding or bug?"""

from pathlib import Path

import pytest

import parity
from parity.case import registry

EXAMPLE = Path(__file__).parents[1] / "examples" / "issue_407.py"


@pytest.fixture
def cases():
    before = registry.cases()
    yield {case.name: case for case in registry.load_file(EXAMPLE)}
    registry.restore(before)


def test_the_right_split_passes_in_fp32_with_the_error_of_tf32(cases):
    (result,) = parity.compare(cases["gate_over_up"], ["fp32"])
    output = result.tensors[0]
    assert result.passed
    assert 2.0**-13 < output.errors.relative_l2 < 2.0**-10, "TF32 has a unit roundoff of 2^-11"
    assert output.errors.relative_l2 == pytest.approx(output.expected.relative_l2, rel=0.1)


def test_the_swapped_split_fails_in_fp32_by_a_margin_of_more_than_100(cases):
    (result,) = parity.compare(cases["up_over_gate"], ["fp32"])
    assert result.status == "failed"
    assert result.margin > 100


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block"])
def test_the_swapped_split_fails_at_lower_precisions_too(cases, precision):
    (result,) = parity.compare(cases["up_over_gate"], [precision])
    assert result.margin > 2
