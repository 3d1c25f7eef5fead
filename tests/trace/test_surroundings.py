"""Test that changes of a pair's code to its process are undone and named, and that draws do not depend on the past."""

from __future__ import annotations

import builtins
import math
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_input import assert_says, linear, result_of, te
from torch import Tensor, library, nn
from torch._dynamo import mutation_guard
from torch.nn.modules import rnn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch.module import layernorm_linear

import parity
from parity.result import to_json
from parity.trace.effects import _find_known_entries, _read_umask, undisturbed


def set_to(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


class Other(nn.Module): ...


class FunctionMode(TorchFunctionMode): ...


class DispatchMode(TorchDispatchMode): ...


KEPT: list[Any] = []


def entered(context: Callable[[], Any]) -> Callable[[], None]:
    def enter() -> None:
        KEPT.append(context())
        KEPT[-1].__enter__()

    return enter


def with_kernel() -> None:
    KEPT.append(library.Library("aten", "IMPL"))
    KEPT[-1].impl("rsqrt", torch.exp, "CPU")


def halved_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))


MISCHIEFS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "torch's default dtype (from torch.float32 to torch.float64)": (
        lambda: torch.set_default_dtype(torch.float64),
        torch.get_default_dtype,
    ),
    "torch's default device (from None to meta)": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.zeros(1).device,
    ),
    "hooks of all modules (forward_hooks)": (
        lambda: register_module_forward_hook(lambda module, given, y: 2 * y),
        lambda: nn.Identity()(torch.ones(1)).item(),
    ),
    "torch.nn.functional.linear": (set_to(F, "linear", F.conv1d), lambda: F.linear),
    "torch.nn.Linear": (set_to(nn, "Linear", Other), lambda: nn.Linear),
    "torch.nn.modules.linear.Linear.forward": (
        set_to(nn.Linear, "forward", nn.Identity.forward),
        lambda: nn.Linear.forward,
    ),
    "torch.nn.modules.linear.Linear.apply": (
        set_to(nn.Linear, "apply", nn.Module.requires_grad_),
        lambda: nn.Linear.apply,
    ),
    "torch._tensor.Tensor.__matmul__": (set_to(Tensor, "__matmul__", Tensor.__mul__), lambda: Tensor.__matmul__),
    "torch.autograd.backward": (set_to(torch.autograd, "backward", print), lambda: torch.autograd.backward),
    "torch.autograd.function.Function.apply": (
        set_to(torch.autograd.Function, "apply", classmethod(print)),
        lambda: torch.autograd.Function.apply,
    ),
    "torch.nn.functional.silu": (lambda: delattr(F, "silu"), lambda: hasattr(F, "silu")),
    "torch.nn.functional.len": (set_to(F, "len", print), lambda: hasattr(F, "len")),  # it hides Python's own
    "torch.nn.modules.rnn._rnn_impls.RNN_TANH": (
        lambda: rnn._rnn_impls.update(RNN_TANH=print),
        lambda: rnn._rnn_impls["RNN_TANH"],
    ),
    "transformer_engine.pytorch.module.layernorm_linear.apply_normalization": (
        set_to(layernorm_linear, "apply_normalization", print),
        lambda: layernorm_linear.apply_normalization,
    ),
    "numpy.linalg.norm": (set_to(np.linalg, "norm", print), lambda: np.linalg.norm),
    "math.fsum": (set_to(math, "fsum", print), lambda: math.fsum),
    "builtins.any": (set_to(builtins, "any", lambda found: False), lambda: any),
    "torch function modes": (entered(FunctionMode), torch._C._len_torch_function_stack),
    "torch dispatch modes": (entered(DispatchMode), torch._C._len_torch_dispatch_stack),
    "torch's default device (from None to cpu)": (
        entered(lambda: torch.device("cpu")),
        torch._C._len_torch_function_stack,
    ),
    "hooks of saved tensors": (
        entered(lambda: torch.autograd.graph.saved_tensors_hooks(torch.abs, torch.abs)),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    ),
    "the kernel of aten/rsqrt/CPU": (with_kernel, lambda: torch.rsqrt(torch.ones(())).item()),
    "torch's multithreading_enabled": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "the limit RLIMIT_NOFILE": (halved_files, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "sys.meta_path": (lambda: sys.meta_path.clear(), lambda: list(sys.meta_path)),
    "transformer_engine.pytorch.Linear": (set_to(te, "Linear", Other), lambda: te.Linear),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch's cudnn_benchmark": (
        set_to(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "fp32_precision of cuda matmul": (
        lambda: torch.set_float32_matmul_precision("high"),
        torch.get_float32_matmul_precision,
    ),
    "the number of threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "whether denormal numbers are flushed to 0": (
        lambda: torch.set_flush_denormal(True),
        lambda: (torch.tensor(1e-310, dtype=torch.float64) * 1).item() == 0.0,
    ),
    "the grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast on cpu": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "the environment variable NVTE_OF_A_PAIR": (
        lambda: os.environ.update(NVTE_OF_A_PAIR="1"),
        lambda: "NVTE_OF_A_PAIR" in os.environ,
    ),
    "the environment variable OMP_NUM_THREADS": (
        lambda: os.environ.pop("OMP_NUM_THREADS"),
        lambda: os.environ.get("OMP_NUM_THREADS"),
    ),
    "the filters of warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "the current folder": (lambda: os.chdir("/"), os.getcwd),
    "sys.path": (lambda: sys.path.append("/of/a/pair"), lambda: list(sys.path)),
    "sys.stdout": (set_to(sys, "stdout", None), lambda: sys.stdout),
    "what NumPy does with overflow and the like": (lambda: np.seterr(all="raise"), np.geterr),
    "the mask of new files": (lambda: os.umask(0o777), _read_umask),
    "the handler of SIGINT": (
        lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGINT),
    ),
    "the handler of SIGTERM": (
        lambda: signal.signal(signal.SIGTERM, lambda number, frame: None),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "an alarm that rings later": (lambda: signal.alarm(1000), lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0),
    "the detection of anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "the recursion limit": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
}


@pytest.mark.parametrize("name", MISCHIEFS)
def test_it_is_put_back_and_named(name: str) -> None:
    act, state = MISCHIEFS[name]
    before = state()
    with undisturbed() as disturbed:
        act()
        assert state() != before
    assert state() == before
    assert any(told.startswith(name) for told in disturbed.changed), disturbed
    assert disturbed.kept == []


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_standard_stream_that_is_closed_stays_open_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, name, file)
        with undisturbed() as outer, undisturbed() as disturbed:
            file.close()
            assert not file.closed
        assert disturbed.changed == [f"sys.{name} (closed)"]
        assert outer.changed == []
        file.close()
        assert file.closed


def test_finders_that_a_library_adds_while_it_is_imported_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    _find_known_entries()
    finders = type("Finder", (), {"find_spec": lambda *_: None}), type("Other", (), {"find_spec": lambda *_: None})
    sys.meta_path.append(finders[0])
    with undisturbed() as disturbed:
        sys.meta_path.append(finders[1])
    assert sys.meta_path[-2:] == list(finders)
    assert disturbed.changed == []
    with undisturbed() as disturbed:
        sys.meta_path.remove(finders[0])
    assert finders[0] in sys.meta_path
    assert disturbed.changed == ["sys.meta_path"]


@pytest.mark.parametrize("package", ["torch.nn", "torch.autograd", "transformer_engine", "te_on_cpu", "numpy.linalg"])
def test_a_function_of_any_module_and_method_of_any_class_is_put_back(package: str) -> None:
    places = [one for one in _find_known_entries()[0][0].read.__self__._all if f"{one.name}.".startswith(f"{package}.")]
    functions = [
        (one, name, value)
        for one in places
        for name, value in one.held.items()
        if type(value) is FunctionType and not str(name).startswith("__")
    ][::7]
    with undisturbed() as disturbed:
        for one, name, _ in functions:
            one.set(name, print)
    assert functions
    assert disturbed.changed == [f"{one.name}.{name}" for one, name, _ in functions]
    assert all(one.held[name] is value for one, name, value in functions)


def test_what_stays_as_it_is_is_not_told() -> None:
    with undisturbed() as disturbed:
        linear().candidate(torch.ones(16, 32))
    assert (disturbed.note, disturbed.problem) == ("", "")


def test_a_method_that_a_library_adds_to_all_modules_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with undisturbed() as disturbed:
        monkeypatch.setattr(nn.Module, "apply_of_a_library", nn.Module.apply, raising=False)
    assert (disturbed.note, disturbed.problem) == ("", "")


def test_methods_that_pytorchs_compiler_replaces_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    with undisturbed() as disturbed:
        mutation_guard.install_generation_tagging_init()
    assert (disturbed.note, disturbed.problem) == ("", "")
    assert nn.Module.__init__.__name__ == "patched_init"


def test_values_of_the_environment_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_A_USER", "secret")
    with undisturbed() as disturbed:
        os.environ["OF_A_USER"] = "very secret"
    assert "OF_A_USER" in disturbed.note
    assert "secret" not in disturbed.note


def test_what_runs_in_it_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    def drawn(seed: int) -> list[float]:
        with undisturbed(seed):
            return [torch.rand(()).item(), random.random(), np.random.rand()]

    first = drawn(1)
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)
    assert drawn(1) == first != drawn(2)
    assert drawn(1)[0] != drawn(2)[0]


def test_what_it_draws_moves_no_generator_outside() -> None:
    states = torch.get_rng_state(), random.getstate()
    with undisturbed():
        torch.manual_seed(5)
        random.random()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# Within comparisons.


def test_a_pair_that_changes_its_process_passes_with_a_note_and_the_next_pair_gets_the_same_result_as_before() -> None:
    def disturb(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        torch.set_default_dtype(torch.float64)
        os.environ["NVTE_OF_A_PAIR"] = "1"
        torch.manual_seed(0)
        return y

    def noisy(module: nn.Module, x: Tensor) -> Tensor:
        return module(x) + 0.1 * torch.rand(1)

    def of_the_next() -> dict[str, Any]:
        torch.manual_seed(7)
        return to_json(result_of(linear(call_candidate=noisy), diagnose=False)) | {"seconds": 0.0}

    before = of_the_next()
    result = result_of(linear(call_candidate=disturb))
    told = "torch's default dtype (from torch.float32 to torch.float64), the environment variable NVTE_OF_A_PAIR"
    assert_says(result, "passed", f"the pair's code changed {told} for the whole process; parity undid this")
    assert of_the_next() == before


def test_a_factory_that_changes_its_process_is_undone_when_pairs_are_checked_too() -> None:
    @parity.pair("of_a_disturbing_factory")
    def disturbing(te: Any) -> parity.Pair:
        torch.set_default_dtype(torch.float64)
        return linear(reference=nn.Linear(32, 32, dtype=torch.float32))

    (result,) = parity.compare(disturbing, ["fp32"], diagnose=False)
    assert_says(result, "passed", "the pair's code changed torch's default dtype")
    assert torch.get_default_dtype() is torch.float32


def test_the_note_stays_beside_the_findings_of_a_failure() -> None:
    def wrong(module: nn.Module, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return 2 * module(x)

    assert_says(
        result_of(linear(call_candidate=wrong)),
        "failed",
        "multiplies it by 2",
        "the pair's code changed torch's default dtype",
    )


def test_a_pair_that_changes_what_cannot_be_put_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)

    def leave(module: nn.Module, x: Tensor) -> Tensor:
        os.chdir(tmp_path)
        if gone.exists():
            gone.rmdir()
        return module(x)

    told = "so later results of this process cannot be trusted: the current folder: FileNotFoundError"
    assert_says(result_of(linear(call_candidate=leave)), "error", told)
