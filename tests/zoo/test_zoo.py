"""The zoo: its bugs are real mistakes, and rules find them in its hosts."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lab.corpus.catalogue import PLANTED, PORTS, RIGHT, choose_ports, group_of
from lab.corpus.port import Port
from lab.zoo import rivals, trial
from lab.zoo.rivals import RULES, Compared, module_of, rejected, rejects
from lab.zoo.trial import CLEAN, LEAST_SEEDS, Trial, Verdict, filter_ratio, judge, measure, measure_added
from parity import te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.measuring.hosts import HOSTS
from parity.measuring.hosts.host import SIZES
from parity.passes.prepare import Prepared, prepare
from parity.te import PRECISIONS, Precision
from parity.user_error import UserError
from te_on_cpu import tensor_cores

# Each planted bug is a real mistake, in a port that is correct without it.


# Far above the effect of another order of FP32 sums, far below the weakest bug: another eps on inputs of variance 1.
LEAST_EFFECT = 1e-6
# The most that a host may lose to FP32 sums and functions, including gradients that nearly cancel.
LARGEST_ERROR = 2e-5
LEAST_BUGS = 60


def prepared_and_candidate(case: Case, precision: Precision) -> tuple[Prepared, rivals.Tensors]:
    """Return both at the small size, without TF32."""
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


BUGS = [port for ports in PLANTED.values() for port in ports]


def test_there_are_enough_bugs():
    assert len({bug.name for bug in BUGS}) >= LEAST_BUGS
    assert all(group_of(bug) in PLANTED for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name} in {bug.host}")
def test_a_bug_says_what_it_is_and_changes_the_result(bug: Port):
    assert bug.summary.endswith(".")
    assert set(bug.precisions or ()) <= set(PRECISIONS)
    precision = (bug.precisions or ("fp32",))[0]
    right = right_candidate(bug.host, precision)
    mistaken = candidate(bug.case, PRECISIONS[precision])
    assert max(relative_change(right[tensor], mistaken[tensor]) for tensor in right) > LEAST_EFFECT


@pytest.mark.parametrize("host", HOSTS.values(), ids=lambda host: host.name)
def test_a_host_computes_what_its_reference_does_where_nothing_rounds_below_fp32(host: Case):
    prepared, tensors = prepared_and_candidate(host, PRECISIONS["fp32"])
    # A phase of 4,096 radians in FP32 is off by up to 2.4e-4.
    bound = 5e-4 if host.name == "long_context_attention" else LARGEST_ERROR
    golden = rivals.golden(prepared)
    golden.pop("d attention.k_proj.bias", None)  # it is 0 except for rounding, since a softmax ignores shifts
    errors = {name: relative_change(truth, tensors[name]) for name, truth in golden.items()}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("host", HOSTS.values(), ids=lambda host: host.name)
def test_a_host_runs_at_its_precisions(host: Case, precision: str):
    if precision in (host.precisions or PRECISIONS):
        assert all(tensor.isfinite().all() for tensor in right_candidate(host.name, precision).values())


def test_a_pattern_chooses_bugs():
    assert {bug.name for bug in choose_ports("window-one-*")} == {"window-one-too-wide", "window-one-too-narrow"}


def test_a_pattern_that_no_bug_matches_is_told():
    with pytest.raises(UserError, match="no port, host or group is called 'gate'; there are the groups weights, norm"):
        choose_ports("gate")


# Trials, their record, and resuming after an interruption.


def plan(*bugs, precisions=("fp32",)):
    return trial.Plan(tuple(port for port in BUGS if port.name in bugs), precisions, {"small": 1})


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
    """A cap of 30 changes only the largest of these outputs, and removes almost nothing of the error."""
    case, kernels = PORTS["product-accumulated-in-bf16", "square_linear"].case, te.kernels("cpu")
    checked, _ = check_case(case, kernels.te)
    judged = judge_at(case, checked, PRECISIONS["bf16"], seed, kernels, packaged(), other_kernels=False)
    assert explain_at(judged, 0.0).findings[0].title == "accumulation-precision"


@pytest.mark.parametrize(("version", "status"), [("2.19.0", "passed"), ("2.20.2", "failed")])
def test_sums_in_bf16_are_what_gemms_of_an_older_te_may_compute(version, status, monkeypatch):
    """cuBLASLt may add the parts of a sum in the output's type (split-k-in-output-type), unless TE forbids it."""
    monkeypatch.setattr("parity.comparison.version", lambda: version)
    assert verdict("product-accumulated-in-bf16", "square_linear", "bf16", 1).status == status


def test_a_port_that_raises_is_an_error_and_spoils_no_other_trial(monkeypatch):
    def raises(te, **size):
        raise RuntimeError("no such luck")

    broken = HOSTS["linear"].__class__("broken", raises, sizes=HOSTS["linear"].sizes)
    monkeypatch.setitem(RIGHT, "broken", broken)
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


# A bug's strength against noise.


EFFECT = torch.tensor([3.0, 4.0])


def test_noise_across_the_effect_is_not_seen_by_the_filter():
    signal = measure(EFFECT, torch.tensor([-4.0, 3.0]))
    assert signal.norm_ratio == 1.0
    assert signal.coefficient == 0.0


def test_noise_along_the_effect_reads_as_its_share():
    assert measure(EFFECT, 0.5 * EFFECT).coefficient == pytest.approx(0.5)


def test_a_bug_without_effect_has_no_strength():
    signal = measure(torch.zeros(2), EFFECT)
    assert signal.norm_ratio == 0.0
    assert math.isnan(signal.coefficient)


def test_the_filter_averages_white_noise_out():
    generator = torch.Generator().manual_seed(0)
    effect = 0.1 * torch.randn(10_000, generator=generator)
    coefficients = [measure(effect, torch.randn(10_000, generator=generator)).coefficient for _ in range(40)]
    assert filter_ratio(coefficients) == pytest.approx(0.1 * math.sqrt(10_000), rel=0.3)


def test_few_seeds_do_not_tell_how_a_filter_scatters():
    assert math.isnan(filter_ratio([0.1] * (LEAST_SEEDS - 1)))


@given(st.lists(st.floats(0.01, 100.0), min_size=LEAST_SEEDS, max_size=8), st.floats(0.01, 100.0))
def test_twice_the_scatter_is_half_the_ratio(coefficients, factor):
    scaled = [factor * coefficient for coefficient in coefficients]
    assert filter_ratio(scaled) == pytest.approx(filter_ratio(coefficients) / factor)


def test_a_bug_of_rounding_counts_by_what_it_adds_to_the_noise_or_takes_away():
    noise = torch.tensor([0.0, 3.0])
    assert measure_added(torch.tensor([5.0, 0.0]), noise).norm_ratio == pytest.approx(4.0 / 3.0)
    assert measure_added(torch.tensor([3.0, 0.0]), noise).norm_ratio == 0.0
    assert measure_added(torch.zeros(2), noise).norm_ratio == 1.0


# The rules of other projects, on errors with known verdicts.


SHAPE = (64, 64)


def compared(error: float, reference_error: float, precision: str = "fp32", module: str = "Linear") -> Compared:
    """Return golden ones, a candidate that is off by ``error``, and a low-precision reference off the other way."""
    dtype = PRECISIONS[precision].dtype
    golden = torch.ones(SHAPE, dtype=torch.float64)
    return Compared(
        {"output": (golden + error).to(dtype)},
        {"output": golden},
        {"output": (golden - reference_error).to(dtype)},
        PRECISIONS[precision],
        module,
    )


def verdicts(case: Compared) -> dict[str, bool]:
    return {name: rejects(rule, case) for name, rule in RULES.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_rule_accepts_what_is_exact(precision):
    assert not any(verdicts(compared(0.0, 0.0, precision)).values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_rule_rejects_nan(precision):
    assert all(verdicts(compared(float("nan"), 0.0, precision)).values())


def test_an_error_of_tf32_passes_the_tests_of_te_alone():
    assert verdicts(compared(5e-4, 1e-7)) == {
        "assert_close": True,
        "TE's tests": False,
        "2x error": True,
        "RMSE": True,
    }


@pytest.mark.parametrize(("error", "wrong"), [(0.0195, False), (0.0205, True)])
def test_the_twofold_rule_allows_twice_the_error_of_pytorch(error, wrong):
    assert verdicts(compared(error, 0.01))["2x error"] is wrong


@pytest.mark.parametrize(("error", "wrong"), [(0.25, False), (0.5, True)])
def test_the_twofold_rule_allows_40_times_the_error_under_a_recipe(error, wrong):
    assert verdicts(compared(error, 2.0**-7, "fp8_current"))["2x error"] is wrong


@pytest.mark.parametrize(("precision", "factor"), [("fp32", 2), ("bf16", 3)])
def test_the_rmse_rule_allows_two_or_three_times_the_error_of_pytorch(precision, factor):
    unit = 2.0**-6
    assert not verdicts(compared(factor * unit, unit, precision))["RMSE"]
    assert verdicts(compared((factor + 1) * unit, unit, precision))["RMSE"]


@pytest.mark.parametrize(("module", "wrong"), [("LayerNormMLP", False), ("LayerNormLinear", True)])
def test_tolerances_of_te_go_by_the_module(module, wrong):
    assert verdicts(compared(1e-2, 0.0, module=module))["TE's tests"] is wrong


def test_gradients_have_other_tolerances_than_outputs():
    case = compared(0.04, 0.0, module="MultiheadAttention")
    named_as_gradient = {
        field: {f"d {name}": tensor for name, tensor in getattr(case, field).items()}
        for field in ("candidate", "golden", "low_precision")
    }
    gradient = Compared(**named_as_gradient, precision=case.precision, module=case.module)
    assert rejects(RULES["TE's tests"], case)
    assert not rejects(RULES["TE's tests"], gradient)


def test_a_rejected_tensor_is_named():
    assert rejected(RULES["assert_close"], compared(1.0, 0.0)) == ("output",)


def test_the_largest_module_gives_the_tolerances():
    modules = te.kernels("cpu").te
    assert module_of(modules.MultiheadAttention(64, 4)) == "MultiheadAttention"
    with pytest.raises(ValueError, match="no test of TE's"):
        module_of(torch.nn.Identity())
