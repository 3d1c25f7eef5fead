"""``parity.compare`` tells a wrong argument; a call that compares nothing is one, since nothing in it could fail."""

from __future__ import annotations

import numpy as np
import pytest
from bad_input import linear
from torch import nn

import parity


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"pair": nn.Linear(2, 2)}, "a parity.Pair, not Linear"),
        ({"pair": lambda te: linear()}, "a parity.Pair, not function"),
        ({"precisions": "bf16"}, "precisions is a list of names"),
        ({"precisions": []}, "precisions is empty"),
        ({"precisions": ["bf61"]}, "unknown precision 'bf61'; there are fp32"),
        ({"seeds": 3}, r"such as range\(3\), not 3"),
        ({"seeds": "3"}, r"such as range\(3\), not '3'"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [-1]}, r"from 0 to 2\*\*63 - 1, not -1"),
        ({"seeds": [0.5]}, "not 0.5"),
        ({"seeds": [2**63]}, "not 9223372036854775808"),
        ({"backend": "cuda"}, "the backend is 'cuda', but must be one of auto, gpu, cpu"),
        ({"attention": "flsh"}, "the attention backend is 'flsh'"),
        ({"determinism": "no"}, "determinism must be True or False"),
        ({"diagnose": "no"}, "diagnose must be True or False, not 'no'"),
        ({"diagnosis_seconds": -1}, "a number of seconds, 0 for no limit, not -1"),
        ({"diagnosis_seconds": float("nan")}, "0 for no limit, not nan"),
        ({"diagnosis_seconds": "30"}, "0 for no limit, not '30'"),
        ({"diagnosis_seconds": True}, "0 for no limit, not True"),
        ({"calibration": "table.json"}, "calibration is a table"),
    ],
)
def test_a_wrong_argument_is_told(arguments, complaint):
    with pytest.raises(parity.UserError, match=complaint):
        parity.compare(**{"pair": linear(), "precisions": ["fp32"], **arguments})


def test_precisions_and_seeds_may_be_generators_and_seeds_numpys():
    results = parity.compare(linear(), (name for name in ["fp32", "bf16"]), np.arange(2))
    assert [(result.precision, result.seed) for result in results] == [
        ("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1)
    ]  # fmt: skip


def test_a_pair_of_modules_that_cannot_be_copied_is_told_to_be_built_anew():
    reference = nn.Linear(2, 2)
    reference.log = open(__file__)  # noqa: SIM115
    with reference.log, pytest.raises(parity.UserError, match=r"cannot be copied.*@parity\.pair"):
        parity.compare(linear(reference=reference))


def test_a_mistake_in_a_pair_that_no_file_declares_is_told_without_a_place():
    with pytest.raises(parity.UserError, match=r"^the pair: inputs must be a function, not int"):
        parity.compare(linear(inputs=3))
