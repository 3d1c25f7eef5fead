"""The built-in cases show every known mistake of their references at BF16, but for those that they accept by title."""

from __future__ import annotations

import importlib

import pytest

from parity import te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.coverage import missed, try_mistakes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.te import PRECISIONS

KERNELS = te.kernels("cpu")
MODULES = (importlib.import_module(f"parity.cases.{name}") for name in ("attention", "layer", "linear", "mlp", "norm"))
CASES = {
    one.name: one
    for module in MODULES
    for one in vars(module).values()
    if isinstance(one, Case) and one.runs_at("bf16") and one.name != "issue_407"  # which is layernorm_mlp_swiglu
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_a_case_accepts_could_not_be_shown(name: str) -> None:
    case = CASES[name]
    checked = check_case(case, KERNELS.te)[0]
    request = Request(case, checked, PRECISIONS["bf16"], 0, KERNELS, packaged(), probe_weights=True)
    assert {one.mistake.title for one in missed(try_mistakes(request))} <= set(case.accepts)
