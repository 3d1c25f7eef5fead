"""Each planted bug is a mistake indeed, in a port that is right without it."""

from __future__ import annotations

import functools

import pytest
import torch

from parity import te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.cpu import tensor_cores
from parity.lab.zoo import rivals
from parity.lab.zoo.catalogue import BUGS, HOSTS, chosen, subject
from parity.lab.zoo.planting import SIZES, Bug, planted
from parity.passes.prepare import Prepared, prepare
from parity.te import PRECISIONS, Precision
from parity.user_error import UserError

# Far above what another order of FP32 sums changes, far below the weakest bug: another eps on inputs of variance 1.
LEAST_EFFECT = 1e-6
# What a host may lose to FP32 sums and functions, gradients that nearly cancel included.
LARGEST_ERROR = 2e-5
LEAST_BUGS = 60


def prepared_and_candidate(case: Case, precision: Precision) -> tuple[Prepared, rivals.Tensors]:
    """At the small size, without TF32."""
    kernels = te.kernels("cpu")
    checked = check_case(case, kernels.te)[SIZES.index("small")]
    prepared = prepare(case, checked, precision.dtype, 0, kernels)
    with tensor_cores.left_out():
        return prepared, rivals.candidate(case, checked, prepared, precision, 0, kernels)


def candidate(case: Case, precision: Precision) -> rivals.Tensors:
    return prepared_and_candidate(case, precision)[1]


@functools.cache
def right_candidate(host: str, precision: str) -> rivals.Tensors:
    return candidate(HOSTS[host], PRECISIONS[precision])


def relative_change(right: torch.Tensor, mistaken: torch.Tensor) -> float:
    right, mistaken = right.double(), mistaken.double()
    return ((mistaken - right).norm() / right.norm()).item()


def test_there_are_enough_bugs_and_no_two_of_a_name():
    assert len(BUGS) >= LEAST_BUGS
    assert all(name == bug.name for name, bug in BUGS.items())
    assert all(subject(bug) for bug in BUGS.values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_a_bug_says_what_where_and_how_it_is_found(bug: Bug):
    assert bug.summary.endswith(".")
    assert bug.finding
    assert bug.hosts
    assert set(bug.hosts) <= set(HOSTS)
    assert set(bug.precisions or ()) <= set(PRECISIONS)


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_a_bug_changes_the_result_in_each_of_its_hosts(bug: Bug):
    precision = (bug.precisions or ("fp32",))[0]
    for name in bug.hosts:
        right = right_candidate(name, precision)
        mistaken = candidate(planted(bug, HOSTS[name]), PRECISIONS[precision])
        changes = [relative_change(right[tensor], mistaken[tensor]) for tensor in right]
        assert max(changes) > LEAST_EFFECT, f"{bug.name} leaves {name} as it is"


@pytest.mark.parametrize("host", HOSTS.values(), ids=lambda host: host.name)
def test_a_host_computes_what_its_reference_does_where_nothing_rounds_below_fp32(host: Case):
    prepared, tensors = prepared_and_candidate(host, PRECISIONS["fp32"])
    # A phase of 4,096 radians in FP32 is off by up to 2.4e-4.
    bound = 5e-4 if host.name == "long_context_attention" else LARGEST_ERROR
    golden = rivals.golden(prepared)
    golden.pop("d attention.k_proj.bias", None)  # 0 but for rounding: a softmax does not see a shift of its scores
    errors = {name: relative_change(truth, tensors[name]) for name, truth in golden.items()}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("host", HOSTS.values(), ids=lambda host: host.name)
def test_a_host_runs_at_its_precisions(host: Case, precision: str):
    if precision in (host.precisions or PRECISIONS):
        assert all(tensor.isfinite().all() for tensor in right_candidate(host.name, precision).values())


def test_a_pattern_chooses_bugs():
    assert {bug.name for bug in chosen("window-one-*")} == {"window-one-too-wide", "window-one-too-narrow"}


def test_a_pattern_that_no_bug_matches_is_told():
    with pytest.raises(UserError, match="no bug is called 'gate'; there are gate-up-swapped"):
        chosen("gate")
