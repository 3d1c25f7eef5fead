"""Bugs of the zoo that no other file plants: in recipes, products and weights, and numbers that rounding decides."""

from __future__ import annotations

import dataclasses

import pytest
from ports import compared, tells, tells_only
from torch import nn

import parity
from lab.zoo.bugs import BUGS
from lab.zoo.planting import planted
from parity.measuring.hosts import HOSTS


@pytest.mark.parametrize(
    ("precision", "host", "bug", "title"),
    [
        ("fp32", "linear", "bias-added-twice", "bias-added-twice"),
        ("fp32", "norm_linear", "norm-weight-not-copied", "weight-not-copied"),
        ("bf16", "rmsnorm", "norm-rounds-before-weight", "norm-rounding"),
        (
            "bf16",
            "rmsnorm",
            "layernorm-for-rmsnorm",
            "norm-kind",
        ),  # though LayerNorm loses the rows that probes set to one value
        ("fp32", "tied_model", "embeddings-not-tied", "embeddings-not-tied"),
        ("fp32", "causal_attention", "attention-in-tf32", "tf32"),
        ("fp32", "square_linear", "product-accumulated-in-bf16", "accumulation-precision"),
        ("bf16", "stepped_linear", "master-weights-missing", "accumulation-precision"),
        ("fp8_delayed", "square_linear", "fp8-scale-never-updated", "fp8-scale-stale"),
        ("fp8_delayed", "swiglu_mlp", "fp8-scale-never-updated", "fp8-scale-stale"),  # shows only in small rows
        ("fp8_delayed", "averaged_linear", "fp8-gradient-not-scaled", "fp8-gradient-scale"),
        ("fp8_delayed", "square_linear", "fp8-margin-negative", "fp8-margin"),
    ],
)
def test_a_bug_of_the_zoo_is_told(precision, host, bug, title):
    smallest = dataclasses.replace(HOSTS[host], sizes=HOSTS[host].sizes[:1])
    (result,) = parity.compare(planted(BUGS[bug], smallest), [precision], seeds=[1])
    tells(result, title)


def test_numbers_that_rounding_decides_are_said_to_be_so():
    """Compare LayerNorms of constant rows, which subtract the mean and divide by what rounding left."""
    constant = lambda rng: rng.normal(8, 1).expand(8, 64).clone()  # noqa: E731
    result = compared(lambda: nn.LayerNorm(64), lambda te: te.LayerNorm(64), constant, "fp32")
    tells_only(result, "ill-conditioned")
