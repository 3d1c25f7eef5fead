"""Each planted bug is a mistake indeed, in a port that is right without it."""

from __future__ import annotations

import pytest
import torch

from parity import te
from parity.cpu.products import tf32
from parity.precision import PRECISIONS
from parity.prepare import prepare
from parity.user_error import UserError
from parity.validate import check_case
from parity.zoo import passes
from parity.zoo.bug import Bug, planted
from parity.zoo.catalogue import BUGS, chosen, subject
from parity.zoo.hosts.case import SIZES
from parity.zoo.hosts.catalogue import HOSTS
from parity.zoo.trial import CLEAN, Trial, judge

# Far above what another order of FP32 sums changes, far below the weakest bug: another eps on inputs of variance 1.
LEAST_EFFECT = 1e-6
LEAST_BUGS = 60


def candidate(case, precision):
    kernels = te.kernels("cpu")
    checked = check_case(case, kernels.te)[SIZES.index("small")]
    prepared = prepare(case, checked, precision.dtype, 0, kernels)
    with tf32.left_out():
        return passes.candidate(case, checked, prepared, precision, 0, kernels)


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
    precision = PRECISIONS[(bug.precisions or ("fp32",))[0]]
    for name in bug.hosts:
        host = HOSTS[name]
        right, mistaken = candidate(host, precision), candidate(planted(bug, host), precision)
        changes = [relative_change(right[tensor], mistaken[tensor]) for tensor in right]
        assert max(changes) > LEAST_EFFECT, f"{bug.name} leaves {name} as it is"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_is_a_right_port(host: str, precision: str):
    if precision not in (HOSTS[host].precisions or PRECISIONS):
        pytest.skip(f"no recipe quantizes {host}")
    verdict = judge(Trial(CLEAN, host, "small", precision, 0), te.kernels("cpu"))
    assert verdict.status == "passed", verdict


def test_a_pattern_chooses_bugs():
    assert {bug.name for bug in chosen("window-*")} == {
        "window-one-too-wide",
        "window-one-too-narrow",
        "window-missing",
    }


def test_a_pattern_that_no_bug_matches_is_told():
    with pytest.raises(UserError, match="no bug is called 'gate'; there are gate-up-swapped"):
        chosen("gate")
