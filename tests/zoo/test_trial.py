"""Trials, their record, and going on after an interruption."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from parity import te
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.lab.zoo import trial
from parity.lab.zoo.catalogue import BUGS, HOSTS
from parity.lab.zoo.planting import planted
from parity.lab.zoo.trial import CLEAN, Trial, Verdict, judge
from parity.te import PRECISIONS


def plan(*bugs, precisions=("fp32",)):
    planted = tuple(BUGS[name] for name in bugs)
    return trial.Plan(planted, trial.hosts_of(planted), precisions, {"small": 1})


def verdict(bug, host, precision="fp32", seed=0):
    return judge(Trial(bug, host, "small", precision, seed), te.kernels("cpu"))


def test_a_plan_has_every_right_port_and_every_bug_in_each_host():
    trials = plan("gate-up-swapped").trials()
    assert [(trial.bug, trial.host) for trial in trials] == [
        (CLEAN, "swiglu_mlp"),
        (CLEAN, "llama_layer"),
        ("gate-up-swapped", "swiglu_mlp"),
        ("gate-up-swapped", "llama_layer"),
    ]


def test_a_plan_leaves_out_precisions_at_which_a_bug_or_host_is_the_same():
    assert not plan("fp8-scale-inverted", precisions=("bf16",)).trials()[2:]
    assert not plan("window-missing", precisions=("fp8_current",)).trials()


@pytest.mark.parametrize(("precision", "unit_roundoff"), [("fp32", 2**-11), ("bf16", 2**-9), ("fp8_current", 2**-4)])
def test_a_strong_bug_is_detected_and_as_strong_as_noise_is_weak(precision, unit_roundoff):
    swapped = verdict("gate-up-swapped", "swiglu_mlp", precision)
    assert swapped.detected
    assert swapped.findings[0] == "gate-up-swapped"
    # Swapped halves change every tensor by about its own size.
    assert 0.1 < max(signal.norm_ratio for signal in swapped.signals.values()) * unit_roundoff < 10


@pytest.mark.parametrize("bug", ["fp8-scale-inverted", "fp8-weight-cache-stale", "fp8-transpose-cache-stale"])
def test_a_bug_of_the_quantized_state_is_detected(bug):
    assert verdict(bug, "square_linear", "fp8_current").detected


@pytest.mark.parametrize("host", ["square_linear", "swiglu_mlp"])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_a_cached_weight_whose_scale_is_inverted_is_told_as_that_and_not_as_an_old_one(host, precision):
    assert verdict("fp8-scale-inverted", host, precision).findings[0] == "fp8-scale-inverted"
    assert verdict("fp8-weight-cache-stale", host, precision).findings[0] == "weight-cache-stale"


@pytest.mark.parametrize("seed", [1, 9, 11])
def test_sums_in_bf16_are_not_told_as_a_cap_that_changes_one_element_enough(seed):
    """A cap of 30 moves the largest of these outputs below its limit, and takes next to nothing of the error."""
    case, kernels = planted(BUGS["product-accumulated-in-bf16"], HOSTS["square_linear"]), te.kernels("cpu")
    checked, _ = check_case(case, kernels.te)
    judged = judge_at(case, checked, PRECISIONS["bf16"], seed, kernels, packaged(), other_kernels=False)
    assert explain_at(judged, 0.0).findings[0].title == "accumulation-precision"


def test_sums_in_bf16_are_what_a_faithful_kernel_may_compute():
    """cuBLASLt may add the parts of a sum in the output's type (split-k-in-output-type)."""
    assert verdict("product-accumulated-in-bf16", "square_linear", "bf16", 1).status == "passed"


def test_a_port_that_raises_is_an_error_and_spoils_no_other_trial(monkeypatch):
    def raises(te, **size):
        raise RuntimeError("no such luck")

    broken = HOSTS["linear"].__class__("broken", raises, sizes=HOSTS["linear"].sizes)
    monkeypatch.setitem(HOSTS, "broken", broken)
    failed = verdict(CLEAN, "broken", "fp8_delayed")
    assert failed.status == "error"
    assert "no such luck" in failed.reason
    assert verdict(CLEAN, "linear", "fp8_delayed").status == "passed"


@pytest.mark.parametrize(("bug", "host"), [(CLEAN, "rmsnorm"), ("eps-1e-06-for-1e-05", "rmsnorm")])
def test_a_verdict_survives_its_record(bug, host):
    judged = verdict(bug, host)
    types = TypeAdapter(Verdict)
    assert types.validate_python(json.loads(json.dumps(types.dump_python(judged)))) == judged


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    record = tmp_path / "zoo.jsonl"
    first = trial.run(plan("eps-1e-06-for-1e-05"), record, workers=1)
    lines = record.read_text().splitlines()
    assert len(lines) == len(first)
    record.write_text("\n".join(lines[:-1]) + '\n{"run": {"bug"')
    judged = []
    monkeypatch.setattr(trial, "judge", lambda trial, kernels: judged.append(trial) or judge(trial, kernels))
    again = trial.run(plan("eps-1e-06-for-1e-05"), record, workers=1)
    assert len(judged) == 1
    assert set(again) == set(first)
