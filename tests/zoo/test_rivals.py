"""The rules of other projects, on errors whose verdict is known."""

from __future__ import annotations

import pytest
import torch

from parity import te
from parity.lab.zoo.rivals import RULES, Compared, module_of, rejected, rejects
from parity.te import PRECISIONS

SHAPE = (64, 64)


def compared(error: float, reference_error: float, precision: str = "fp32", module: str = "Linear") -> Compared:
    """Golden ones; a candidate that is off by so much everywhere, and a low-precision reference, the other way."""
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
