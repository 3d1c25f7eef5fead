"""Built-in cases on an emulated RTX Blackwell (sm_120): each precision passes, or TE says why it does not run there."""

from __future__ import annotations

import pytest
from packaging.version import Version

import parity
from parity.cases import attention, linear, mlp, norm
from parity.settings import PRECISION_NAMES
from te_on_cpu import cuda, versions

CASES = [linear.linear, norm.rmsnorm_zero_centered, mlp.swiglu, attention.causal_gqa]
MXFP8_REFUSED = "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet"


@pytest.mark.parametrize("precision", PRECISION_NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_precision_passes_or_has_te_s_reason(case: parity.case.case.Case, precision: str) -> None:
    if precision == "nvfp4" and not versions.has_software_stochastic_rounding(versions.installed_version()):
        pytest.skip("this TE has no stochastic rounding there")
    with cuda.emulated(cuda.RTX_BLACKWELL):
        (result,) = parity.compare(case, precisions=[precision], backend="cpu")
    if precision == "mxfp8":
        assert result.status == "skipped"
        assert result.reason.startswith(MXFP8_REFUSED)
    else:
        assert result.status == "passed", result.reason


def test_an_older_te_has_no_stochastic_rounding_to_fp4_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: Version("2.19.0"))
    with cuda.emulated(cuda.RTX_BLACKWELL):
        (result,) = parity.compare(linear.linear, precisions=["nvfp4"], backend="cpu")
    assert result.status == "error"
    assert "2.19.0 has no stochastic rounding to FP4 for compute capability 12.0" in result.reason


def test_attention_in_fp8_is_refused() -> None:
    with cuda.emulated(cuda.RTX_BLACKWELL):
        (result,) = parity.compare(attention.causal_fp8, precisions=["fp8_delayed_dpa"], backend="cpu")
    assert result.status == "error"
    assert "No dot product attention backend is available" in result.reason
