"""A loss is one number, and in BF16 it hardly shows a mistake; gradients tell which one it is."""

from __future__ import annotations

import math

import pytest
from language_model import HIDDEN, Options, first, frequencies, result

SCALED = math.sqrt(HIDDEN)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
def test_a_right_port_passes(precision):
    assert first(result(Options(), precision)) == "passed"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize(
    ("reference", "port", "title"),
    [
        (Options(), dict(reduction="sum"), "loss-scale"),
        (Options(embedding=SCALED), dict(embedding=1.0), "factor"),
        (Options(), dict(embedding=SCALED), "factor"),
        (Options(embedding=SCALED), dict(embedding=float(HIDDEN)), "factor"),
        (Options(), dict(roped=(0,)), "rope-missing"),
        (Options(), dict(scales=(1.0, 0.5)), "softmax-scale"),
        (Options(), dict(mlp_sum=False), "residual-placement"),
        (Options(), dict(from_norm=True), "residual-placement"),
    ],
)
def test_the_mistake_is_told(reference, port, title, precision):
    assert first(result(reference, precision, **port)) == title


def test_another_base_is_told_by_gradients_alone():
    one = result(Options(), "bf16", seq=32, frequency=lambda: frequencies(500_000.0))
    assert all(tensor.passed for tensor in one.tensors if tensor.kind == "output")
    assert first(one) == "rope-base"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_norm_that_is_left_out_is_told_and_not_only_that_its_weight_gets_no_gradient(precision):
    assert first(result(Options(), precision, final_norm=False)) == "norm-missing"


def test_no_mistake_is_told_of_a_single_number_alone():
    """With gradients that nothing explains, a mistake that makes the same loss is none."""
    one = result(Options(layers=1), "fp32", shift=3, scales=(1.7,), embedding=3.0, branch=0.3)
    assert one.status == "failed"
    assert {finding.code for finding in one.findings} <= {"PAR501", "PAR502"}
