"""An exception in a user's module is told with the line of their code, wherever PyTorch or TE raised it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import parity
from parity.report import failure
from parity.report.items import Item
from parity.trace.whose import submodule, users_line, way_there

MODELS = """\
import torch
from torch import nn

class Typo(nn.Linear):
    def forward(self, x):
        return super().forward(x) + no_such_name

class Misfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
    def forward(self, x):
        return self.inner(x[:, 1:])
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in a folder of the user's."""
    (tmp_path / "models_of_a_user.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("models_of_a_user", tmp_path / "models_of_a_user.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models_of_a_user", module)
    spec.loader.exec_module(module)
    return module


def raised_by(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_part_of_a_module_that_raises_is_told_by_its_name(models):
    error = raised_by(lambda: models.Misfit()(torch.ones(2, 4)))
    assert submodule(error) == "inner.0"
    assert submodule(raised_by(lambda: models.Typo(4, 4)(torch.ones(2, 4)))) == ""
    assert submodule(raised_by(lambda: int("x"))) == ""


def test_shapes_that_fp8_does_not_take_are_told_with_the_layer_and_what_to_do():
    def factory(te, **_):
        layers = (torch.nn.Sequential(linear(64, 64), linear(64, 64)) for linear in (torch.nn.Linear, te.Linear))
        reference, candidate = layers
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.normal(30, 64), names)

    (one,) = parity.compare(parity.Case("layers", factory, sizes=({},)), ["fp8_current"])
    assert one.status == "error"
    assert "; in 0; pad the tokens, give a size that fits, or leave FP8 out for this pair" in one.reason


def test_a_mistake_in_a_modules_forward_is_told_with_its_line(models):
    error = raised_by(lambda: models.Typo(4, 4)(torch.ones(2, 4)))
    assert users_line(error) == "models_of_a_user.py:6 in forward"


def test_where_pytorch_raises_the_users_line_that_called_it_is_told(models):
    error = raised_by(lambda: models.Misfit()(torch.ones(2, 4)))
    assert users_line(error) == "models_of_a_user.py:13 in forward"


def test_where_no_users_code_was_running_no_line_is_told():
    error = RuntimeError("from nowhere")
    assert users_line(error) == ""


def test_the_way_there_begins_in_the_users_code_and_names_no_folder_above(models, tmp_path):
    told = way_there(raised_by(lambda: models.Misfit()(torch.ones(2, 4))))
    assert told.startswith("Traceback")
    assert "return self.inner(x[:, 1:])" in told
    assert told.splitlines()[-1].startswith("RuntimeError: mat1 and mat2 shapes")
    assert str(tmp_path) not in told


def test_a_comparison_says_the_line_and_keeps_the_traceback_for_the_report(models):
    te = parity.te.kernels("cpu").te
    pair = parity.Pair(
        models.Typo(16, 16),
        te.Linear(16, 16),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(8, 16),
    )
    (result,) = parity.compare(pair, ["fp32"])
    told = "the reference in FP64 raised NameError: name 'no_such_name' is not defined"
    assert result.reason == f"{told}; at models_of_a_user.py:6 in forward"
    assert "Traceback" not in failure.message(Item((result,)))
    assert "line 6, in forward" in failure.message(Item((result,)), details=True)


def test_modules_without_values_are_named_as_such():
    def on_meta(te):
        return parity.Pair(
            torch.nn.Linear(16, 16),
            te.Linear(16, 16, device="meta"),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(8, 16),
        )

    case = parity.Case("on_meta", on_meta, ({},))
    (result,) = parity.compare(case, ["fp32"])
    assert result.status == "error"
    assert "the candidate's weight is on the device meta" in result.reason


@pytest.mark.parametrize("ends", [lambda: sys.exit(3), lambda: pytest.skip("not today")], ids=["exit", "skip"])
def test_what_would_end_the_run_is_a_result_like_any_exception(ends):
    def call(module, x):
        ends()

    pair = parity.Pair(torch.nn.Identity(), torch.nn.Identity(), lambda rng: rng.normal(4), call_candidate=call)
    (result,) = parity.compare(pair, ["fp32"])
    assert result.status == "error"
    assert "in <lambda>" in result.reason


def test_only_the_first_paragraph_of_what_pytorch_says_is_told():
    pair = parity.Pair(torch.nn.Identity(), torch.nn.Identity(), lambda rng: rng.normal(4).to_sparse())
    (result,) = parity.compare(pair, ["fp32"])
    assert "SparseCPU" in result.reason
    assert "\n" not in result.reason
