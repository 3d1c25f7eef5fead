"""A port is judged, and its lines are reported, the same way whatever its file and folders are called."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch
import transformer_engine.pytorch.utils as te_utils

import parity
from parity.comparison import _advise_on
from parity.numerics.plain import plain_calls
from parity.report import failure
from parity.report.record import Item
from parity.trace.whose import PORTS, Owner, is_of_te, module_of, submodule, users_line, way_there, whose

ROOT = Path(parity.__file__).parents[1]
PORT = '''\
import sys
import torch
from torch import nn
import parity

def frame():
    return sys._getframe()

class Between(nn.Module):
    """A norm and lines of PyTorch's behind it, each of which rounds."""
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        x = self.layer(x)
        return torch.tanh(10 * x) + 0.25

class Optimizer(torch.optim.SGD):
    pass

def raises(x):
    return Between(nn.Linear(3, 3))(x)

def factory(te, **_):
    return parity.Pair(
        reference=Between(nn.LayerNorm(64)),
        candidate=Between(te.LayerNorm(64)),
        inputs=lambda rng: rng.normal(2, 32, 64),
        weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
    )
'''
RAISES, FORWARD = (
    1 + PORT.splitlines().index(line)
    for line in ("    return Between(nn.Linear(3, 3))(x)", "        x = self.layer(x)")
)


def imported(path: Path) -> dict:
    """Import the port's file as a user does, wherever it lies, and return its names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PORT)
    spec = importlib.util.spec_from_file_location("port_of_a_user", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def beside(folder: str) -> dict:
    """Return the port's names as if it were imported from a folder beside parity's own, where no test writes."""
    path = ROOT / folder / "x.py"
    module = ModuleType("x")
    module.__spec__ = ModuleSpec("x", None, origin=str(path))
    exec(compile(PORT, str(path), "exec"), vars(module))
    return vars(module)


def executed(name: str | None, file: str = "<string>") -> dict:
    """Run the port as exec, a notebook or an interpreter does, in no module, under any name, and return its names."""
    space = {} if name is None else {"__name__": name}
    exec(compile(PORT, file, "exec"), space)
    return space


PLACES = {
    "a folder of the user's": lambda folder: imported(folder / "my_port" / "x.py"),
    "transformer_engine_port": lambda folder: imported(folder / "transformer_engine_port" / "x.py"),
    "a fork of TE above": lambda folder: imported(folder / "transformer_engine" / "pytorch" / "x.py"),
    "torch above": lambda folder: imported(folder / "torch" / "nn" / "x.py"),
    "parity above": lambda folder: imported(folder / "parity" / "watching" / "x.py"),
    "site-packages": lambda folder: imported(folder / "site-packages" / "torch_port" / "x.py"),
    "named as a module of Python's": lambda folder: imported(folder / "code.py"),
    "named as TE's unfused attention": lambda folder: imported(
        folder / "pytorch" / "attention" / "dot_product_attention" / "backends.py"
    ),
    "parity_models beside parity": lambda folder: beside("parity_models"),
    "executed": lambda folder: executed(None),
    "executed as PyTorch's": lambda folder: executed("torch.nn.modules.linear"),
    "a main program": lambda folder: executed("__main__", str(folder / "train.py")),
    "a cell of a notebook": lambda folder: executed("__main__", "<ipython-input-3-0123456789ab>"),
    "run as a module": lambda folder: run_as_module(folder),
}


def run_as_module(folder: Path) -> dict:
    (folder / "torch_runs").mkdir()
    (folder / "torch_runs" / "x.py").write_text(PORT)
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_module("torch_runs.x", run_name="__main__")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def port(request: pytest.FixtureRequest, tmp_path: Path) -> dict:
    return request.param(tmp_path)


def judged(port: dict) -> list:
    results = parity.compare(parity.Case("port", port["factory"], sizes=({},)), ["bf16", "fp16"], seeds=range(2))
    return [(result.status, result.tensors, result.notes) for result in results]


@pytest.fixture(scope="module")
def of_my_port(tmp_path_factory: pytest.TempPathFactory) -> list:
    return judged(imported(tmp_path_factory.mktemp("one") / "my_port" / "x.py"))


def test_a_right_port_passes_alike_wherever_its_file_lies(port, of_my_port):
    assert {status for status, *_ in of_my_port} == {"passed"}
    assert judged(port) == of_my_port


def test_its_own_lines_are_known_as_its_own(port):
    assert whose(port["frame"]()) is Owner.USER
    module = port["Between"](torch.nn.Identity())
    with plain_calls(torch.bfloat16) as names:
        module(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True))
    assert names >= {"mul", "tanh", "add"}
    assert not is_of_te(port["Optimizer"])


def test_where_it_raises_its_innermost_line_is_told(port):
    with pytest.raises(RuntimeError) as caught:
        port["raises"](torch.ones(2, 4))
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this function's line
    assert users_line(error).endswith(f":{FORWARD} in forward")
    assert submodule(error) == "layer"
    frames = [line for line in way_there(error).splitlines() if line.startswith("  File")]
    assert f"line {RAISES}, in raises" in frames[0]
    assert f"line {FORWARD}, in forward" in "".join(frames)


def running_in(function, *args) -> list[FrameType]:
    """Return the frames that a function enters, in order."""
    seen: list[FrameType] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize(
    ("function", "owner"),
    [
        (lambda: torch.nn.functional.relu(torch.ones(1)), Owner.TORCH),
        (lambda: te_utils.get_default_init_method(), Owner.TE),
        (lambda: parity.Case("x", lambda te: None, ({},)), Owner.PARITY),
        (lambda: os.path.join("a", "b"), Owner.PYTHON),
        (lambda: contextlib.nullcontext().__enter__(), Owner.PYTHON),
    ],
    ids=["torch", "TE", "parity", "a frozen module", "contextlib"],
)
def test_what_a_library_runs_is_its_own(function, owner):
    assert owner in {whose(frame) for frame in running_in(function)}


@pytest.mark.parametrize("name", PORTS)
def test_what_parity_has_in_a_users_place_is_declared_by_name(name):
    module = importlib.import_module(name) if name != "parity.cases" else None
    spec = ModuleSpec(name, None, origin=str(ROOT.joinpath(*name.split("."), "x.py")))
    space = {} if module is None else vars(module)
    exec("import sys\ndef frame(): return sys._getframe()", own := {**space, "__spec__": space.get("__spec__", spec)})
    assert whose(own["frame"]()) is Owner.USER
    assert module_of(own["frame"]()) == name


# An exception in a user's module is reported with the line of their code, wherever PyTorch or TE raised it.


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
    """Return a module in a user's folder."""
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


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("FP8 execution requires the product of all dimensions but the last to be divisible by 8", "pad the tokens"),
        ("MXFP8 requires tensor dims that are divisible by 32 (got shape=(16, 64))", "pad the tokens"),
        ("NVFP4 needs tensors whose last dimension is\ndivisible by 16", "pad the tokens"),
        ("hidden size must be divisible by the heads", ""),
    ],
)
def test_shapes_that_a_quantized_format_does_not_take_get_the_same_advice(said, told):
    assert _advise_on(RuntimeError(said)).startswith(told)
    assert bool(_advise_on(RuntimeError(said))) == bool(told)


def test_shapes_that_fp8_does_not_take_are_told_with_the_layer_and_what_to_do():
    def factory(te, **_):
        layers = (torch.nn.Sequential(linear(64, 64), linear(64, 64)) for linear in (torch.nn.Linear, te.Linear))
        reference, candidate = layers
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.normal(30, 64), names)

    (one,) = parity.compare(parity.Case("layers", factory, sizes=({},)), ["fp8_current"])
    assert one.status == "error"
    assert "; in 0; pad the tokens, give a size that fits, or leave this precision out" in one.reason


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
    assert "the candidate's weight is on the meta device" in result.reason


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
