"""Passes over the same numbers: one pass, preparation for all, the modes around them, their time and memory."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bad_input import linear, mlp, result_of
from torch import Tensor, nn

import parity
from parity import te
from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize, check_case
from parity.comparison import compare_at
from parity.judge import directions
from parity.judge.limits import packaged
from parity.machine import devices
from parity.passes import all_passes, memory, modes
from parity.passes import prepare as prepare_page
from parity.passes.nominal_clock import Clock, OutOfTime, Work, work_of
from parity.passes.one_pass import positional_names
from parity.passes.one_pass import run as run_with_names
from parity.passes.prepare import cast_module, prepare
from parity.te import PRECISIONS
from parity.trace.effects import FP32_SETTINGS

# One forward and backward pass, as named tensors.


def ones_like_outputs(outputs):
    return {name: torch.ones_like(output) for name, output in outputs.items()}


def run_once(module, call, inputs, cotangents):
    return run_with_names(module, call, inputs, positional_names(module, call, inputs), cotangents)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.tensor(3.0))

    def forward(self, x, *, y, index=None):
        return x * self.used, {"sum": (x + y).sum(), "index": index}


def test_every_floating_point_output_input_and_parameter_is_named():
    inputs = {"x": torch.ones(3), "y": torch.ones(3), "index": torch.arange(3)}
    ran = run_once(TwoInputs(), None, inputs, ones_like_outputs)
    assert list(ran.outputs) == ["output[0]", "output[1]"]
    assert list(ran.input_gradients) == ["x", "y"]
    assert list(ran.weight_gradients) == ["used", "unused"]
    assert ran.weight_gradients["used"] == 3.0


def test_a_parameter_without_a_gradient_is_named_and_counts_as_zero():
    ran = run_once(TwoInputs(), None, {"x": torch.ones(3), "y": torch.ones(3)}, ones_like_outputs)
    assert ran.unreached == ("unused",)
    assert ran.weight_gradients["unused"] == 0.0


def test_gradients_of_an_earlier_pass_are_cleared():
    layer = nn.Linear(3, 2)
    first = run_once(layer, None, torch.ones(4, 3), ones_like_outputs)
    second = run_once(layer, None, torch.ones(4, 3), ones_like_outputs)
    assert torch.equal(first.weight_gradients["weight"], second.weight_gradients["weight"])


def test_the_caller_says_how_the_module_is_called_and_names_the_inputs():
    ran = run_once(
        nn.Linear(3, 2, bias=False),
        lambda module, x, scale: module(x) * scale,
        (torch.ones(1, 3), torch.tensor(2.0)),
        ones_like_outputs,
    )
    assert list(ran.input_gradients) == ["x", "scale"]


def test_the_users_tensors_are_left_alone():
    x = torch.ones(4, 3)
    run_once(nn.Linear(3, 2), None, x, ones_like_outputs)
    assert x.grad is None
    assert not x.requires_grad


def test_a_single_input_is_called_input_and_unnamed_ones_are_counted():
    layer = nn.Linear(3, 2)
    assert positional_names(layer, None, torch.ones(3)) == ("input",)
    assert positional_names(layer, lambda module, *rest: rest, (1, 2)) == ("input[0]", "input[1]")


def test_tensors_within_dicts_and_named_tuples_are_inputs_by_their_own_names():
    Rotary = namedtuple("Rotary", "cos sin")
    inputs = ({"x": torch.ones(3)}, Rotary(torch.ones(3), torch.ones(3)))
    ran = run_once(
        nn.Linear(3, 2),
        lambda module, tensors, rotary: module(tensors["x"] * rotary.cos + rotary.sin),
        inputs,
        ones_like_outputs,
    )
    assert list(ran.input_gradients) == ["tensors['x']", "rotary.cos", "rotary.sin"]
    assert not inputs[0]["x"].requires_grad


# Modules in another dtype.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cast_of_a_module_leaves_its_complex_buffers_alone(dtype):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", torch.tensor([1.0 + 2.0j]))
    assert cast_module(module, dtype) is module
    assert module.weight.dtype is dtype
    assert module.table.tolist() == [1.0 + 2.0j]


# Golden, and all that is made from it, is computed once for a case, size, dtype and seed, and freed with the next case.


KERNELS = te.kernels("cpu")
SEEDS = range(3)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def norm_case(*widths: int) -> Case:
    return Case(
        "norm",
        lambda te, width: Pair(
            Norm(width),
            te.RMSNorm(width, eps=1e-5),
            inputs=lambda rng, width: rng.normal(8, width),
            weights={"weight": "weight"},
        ),
        sizes=tuple(dict(width=width) for width in widths),
        path=Path("pairs.py"),
    )


@pytest.fixture
def nothing_kept() -> None:
    prepare_page.forget()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of how often golden, directions and models were computed."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name.strip("_")] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(prepare_page, "_prepare_case")
    count(directions, "_find_directions")
    count(all_passes, "run_model")
    return counts


def run(case: Case, *precisions: str) -> None:
    for checked in check_case(case, KERNELS.te):
        for precision in precisions:
            for seed in SEEDS:
                assert compare_at(case, checked, PRECISIONS[precision], seed, KERNELS, packaged()).passed


def keep(case: Case, seeds: Iterable[int]) -> list[prepare_page.Prepared]:
    (checked,) = check_case(case, KERNELS.te)
    return [prepare_page.prepare(case, checked, torch.bfloat16, seed, KERNELS) for seed in seeds]


@pytest.mark.usefixtures("nothing_kept")
def test_golden_and_the_directions_are_computed_once_a_seed_for_all_precisions_of_a_dtype(
    computed: Counter[str],
) -> None:
    run(norm_case(16), "bf16", "fp8_delayed", "fp8_current")
    assert computed["prepare_case"] == computed["find_directions"] == len(SEEDS)


@pytest.mark.usefixtures("nothing_kept")
def test_a_dtype_that_comes_between_does_not_make_them_computed_again(computed: Counter[str]) -> None:
    run(norm_case(16), "fp32", "bf16", "fp16", "fp8_delayed")
    assert computed["prepare_case"] == computed["find_directions"] == 3 * len(SEEDS)


@pytest.mark.usefixtures("nothing_kept")
def test_models_are_computed_once_a_seed_for_precisions_that_round_alike(computed: Counter[str]) -> None:
    ways_to_round = 2
    run(norm_case(16), "fp8_delayed", "fp8_current")
    assert computed["run_model"] == len(SEEDS) * ways_to_round


@pytest.mark.usefixtures("nothing_kept")
def test_nothing_of_another_size_is_kept() -> None:
    run(norm_case(16, 32), "bf16")
    assert {key.checked.label for key in prepare_page._KEPT} == {"8x32"}


@pytest.mark.usefixtures("nothing_kept")
def test_of_three_dtypes_the_first_is_let_go() -> None:
    run(norm_case(16), "fp32", "bf16", "fp16")
    assert {key.dtype for key in prepare_page._KEPT} == {torch.bfloat16, torch.float16}


@pytest.mark.usefixtures("nothing_kept")
def test_the_oldest_are_let_go_where_memory_is_short_but_for_the_last_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free", lambda: 0)
    run(norm_case(16), "bf16")
    assert [key.seed for key in prepare_page._KEPT] == [1, 2]


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("workers", "kept"), [(1, 4), (2, 2)])
def test_workers_share_the_memory_that_is_free(workers: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = keep(norm_case(16), [0])
    monkeypatch.setattr(devices, "free", lambda: 3.5 * one.bytes * 8)  # of which an eighth may be kept
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    keep(norm_case(16), range(6))
    assert len(prepare_page._KEPT) == kept


@pytest.mark.usefixtures("nothing_kept")
def test_what_is_kept_counts_with_its_bytes() -> None:
    run(norm_case(16), "bf16")
    output = 8 * 16 * 8
    for one in prepare_page._KEPT.values():
        changes = output * len(directions.directions(one))  # and their squares, in FP32
        models = one.cache.group("models", PRECISIONS["bf16"].rounding).bytes
        assert models > 2 * output
        assert one.cache.bytes >= changes + models
        assert one.bytes > one.cache.bytes + 2 * output


# A comparison does not depend on PyTorch's modes around it, or on modes that a module leaves behind.


ROWS, COLUMNS = 16, 32


def matmul_setting(backend: str, setting: str) -> None:
    torch._C._set_fp32_precision_setter(backend, "matmul", setting)


# Settings of users, by older functions and newer attributes. Reading one kind after setting the other may raise.
REDUCED: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "all of PyTorch": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "oneDNN": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "older, then newer": lambda: (torch.set_float32_matmul_precision("medium"), matmul_setting("mkldnn", "tf32"))[0],
    "nothing": lambda: None,
}


@pytest.fixture
def products_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for place in FP32_SETTINGS:
        torch._C._set_fp32_precision_setter(
            *place, "tf32" if place[1] in ("conv", "rnn") and place[0] == "cuda" else "none"
        )


def flags() -> list[str]:
    """Return every flag of FP32 products, convolutions and recurrent layers, or a note that it cannot be read."""

    def read(flag: Callable[[], object]) -> str:
        try:
            return str(flag())
        except RuntimeError:
            return "cannot be read"

    older = (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    )
    return [read(flag) for flag in older] + [torch._C._get_fp32_precision_getter(*place) for place in FP32_SETTINGS]


@pytest.mark.usefixtures("products_as_before")
@pytest.mark.parametrize("name", REDUCED)
def test_fp32_is_fp32_within_a_comparison_and_afterwards_what_it_was(name: str):
    seen = []

    def call(module, x):
        seen.append(flags())
        return module(x)

    REDUCED[name]()
    before = flags()
    assert result_of(linear(call_reference=call)).passed
    assert flags() == before
    assert seen
    assert all(one == ["highest", "False", "False"] + ["ieee"] * len(FP32_SETTINGS) for one in seen)


@pytest.mark.usefixtures("products_as_before")
@pytest.mark.parametrize("name", ["high", "medium", "oneDNN"])
def test_reduced_products_around_it_change_no_number(name: str):
    """Expect no change: BF16 products, which some CPUs have, would make golden's FP32 neighbours 1000 times worse."""
    torch.manual_seed(0)
    pair = mlp(lambda rng: rng.normal(ROWS, COLUMNS))
    expected = result_of(pair)
    REDUCED[name]()
    found = result_of(pair)
    assert (found.tensors, found.notes) == (expected.tensors, expected.notes)


@pytest.mark.usefixtures("products_as_before")
def test_the_flags_are_put_back_after_an_exception():
    REDUCED["medium"]()
    before = flags()
    with pytest.raises(KeyError), modes.usual_modes():
        raise KeyError
    assert flags() == before


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.parametrize(
    "mode",
    [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_a_mode_around_it_changes_no_number(mode: AbstractContextManager[None], precision: str):
    torch.manual_seed(0)
    pair = mlp(lambda rng: rng.normal(ROWS, COLUMNS))
    expected = result_of(pair, precision)
    assert expected.passed
    with mode:
        found = result_of(pair, precision)
    assert (found.tensors, found.notes) == (expected.tensors, expected.notes)


def test_a_candidate_that_turns_gradients_off_fails_and_leaves_them_on():
    def call(module, x):
        torch.set_grad_enabled(False)
        return module(x)

    result = result_of(linear(call_candidate=call))
    assert result.status == "failed"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)], ids=["inference", "cast"]
)
def test_a_map_is_suggested_as_usual_inside_a_mode(mode: AbstractContextManager[None]):
    torch.manual_seed(0)
    pair = dataclasses.replace(mlp(lambda rng: rng.normal(ROWS, COLUMNS)), weights={})
    with mode:
        suggestion = parity.suggest_map(pair)
    assert suggestion.settled


# The cost of a computation on the nominal machine is counted.


TOKENS, WIDTH, OUT = 6, 8, 5


def test_products_and_what_they_return_are_counted():
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(OUT, WIDTH)
    work = work_of(lambda: torch.mm(x, weight.T).relu())
    assert (work.flops, work.elements) == (2 * TOKENS * WIDTH * OUT, 2 * TOKENS * OUT)


def test_convolutions_are_counted():
    image, kernel = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert work_of(lambda: F.conv2d(image, kernel)).flops == 2 * 4 * 6 * 6 * 3 * 3 * 3


def test_a_view_is_an_operation_without_elements_of_its_own():
    x = torch.randn(TOKENS, WIDTH)
    assert work_of(lambda: x.t()[:3]) == Work(operations=2)


def test_a_part_of_the_batch_takes_less_but_as_many_operations():
    work = Work(operations=100, flops=10**9, elements=10**6)
    assert work.seconds(0.0) < work.seconds(0.25) < work.seconds(1.0)
    assert Work(operations=100).seconds(0.0) == Work(operations=100).seconds(1.0)


def test_a_clock_advances_by_passes_and_by_what_else_is_computed():
    forward, other = Work(operations=10, flops=10**9), Work(flops=10**8)
    clock = Clock(forward=forward)
    clock.advance(3.0)
    clock.spend(other)
    assert clock.seconds == 3.0 * forward.seconds() + other.seconds()


def test_a_limit_of_real_time_lets_no_pass_begin_that_comes_after_it():
    clock = Clock(forward=Work(operations=10))
    with clock.limited_to(1e-9):
        with pytest.raises(OutOfTime):
            clock.advance(1.0)
        assert clock.ended
    assert clock.seconds == 0.0


def test_a_limit_of_real_time_ends_with_its_context_and_0_is_none():
    clock = Clock(forward=Work(operations=10))
    with clock.limited_to(1e-9):
        assert clock.is_over()
    for seconds in (0.0, 1e9):
        with clock.limited_to(seconds):
            clock.advance(1.0)
            assert not clock.ended


# The memory that a comparison needs, as far as it can be estimated before, and the memory that is given back.


TE = ModuleType("transformer_engine.pytorch")


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


def estimate(reference: Callable[[int], nn.Module], batch: int, hidden: int) -> int | None:
    case = Case(
        "case",
        lambda te, batch, hidden: Pair(
            reference(hidden), nn.Identity(), inputs=lambda rng, batch, hidden: rng.normal(batch, hidden)
        ),
        sizes=(),
        path=Path("pairs.py"),
    )
    return memory.estimate(case, CheckedSize(dict(batch=batch, hidden=hidden), ""), TE)


def test_it_covers_weights_gradients_and_what_the_backward_pass_needs() -> None:
    weights, passed, between = 8 * 512**2, 2 * 64 * 512, 64 * 4 * 512
    assert (estimate(MLP, 64, 512) or 0) > 8 * (2 * weights + passed + 2 * between)


def test_it_grows_with_the_batch_alone_and_linearly() -> None:
    small, larger, largest = (estimate(MLP, batch, 32) or 0 for batch in (1000, 2000, 3000))
    assert small < larger
    assert largest - larger == larger - small


def test_a_size_that_no_machine_holds_is_estimated_without_memory() -> None:
    assert (estimate(MLP, 1, 2**20) or 0) > 2**46


def test_it_is_unknown_where_the_reference_reads_values() -> None:
    assert estimate(lambda hidden: ReadsValues(), 2, 2) is None


def test_nothing_of_a_comparison_is_kept_once_memory_is_released() -> None:
    kernels, precision = te.kernels("cpu"), PRECISIONS["bf16"]
    case = Case(
        "linear",
        lambda te, width: Pair(
            nn.Linear(width, width),
            te.Linear(width, width),
            inputs=lambda rng, width: rng.normal(4, width),
            weights={"weight": "weight", "bias": "bias"},
        ),
        sizes=(dict(width=32),),
    )
    (checked,) = check_case(case, kernels.te)
    assert compare_at(case, checked, precision, 0, kernels, packaged()).passed
    kept = weakref.ref(prepare(case, checked, precision.dtype, 0, kernels))
    assert kept() is not None
    memory.release()
    assert kept() is None


def test_releasing_memory_of_a_broken_context_hides_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    memory.release()
