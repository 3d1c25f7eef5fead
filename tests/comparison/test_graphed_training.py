"""Trainings that replay CUDA graphs: each step is the same as without graphs, and stale values in a graph are found."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import parity
from lab.corpus.trained_ports.optimizers import caches_reset
from lab.corpus.trained_ports.switched import Passes, WholeStep, capturing, plain_sgd
from lab.corpus.trained_ports.trainings import GRAPHED, RIGHT, Declared, case_of, plain
from parity import Training, te
from parity.case.training import Model
from parity.result import Result
from te_on_cpu import cuda

PRECISIONS = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")


def graphed(case: Any, precision: str = "fp32", steps: int = 3) -> Result:
    (result,) = parity.compare(case, [precision], steps=steps, switch="graph")
    return result


def trained(training: Declared, precision: str = "fp32", host: str = "mlp") -> Result:
    return graphed(case_of(host, training), precision)


# Right trainings.


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("host", ["mlp", "llama"])
def test_te_s_graphs_are_right_at_every_step(host, precision):
    result = trained(plain, precision, host)
    assert (result.status, result.findings, len(result.steps)) == ("passed", (), 3)
    assert result.item.endswith("-steps3-graph]")
    assert [note.split(" in a graph")[0] for note in result.notes] == (
        ["attention uses the backend unfused"] if host == "llama" and precision != "fp32" else []
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize("name", GRAPHED)
@pytest.mark.parametrize("host", ["mlp", "llama"])
def test_a_port_may_capture_its_passes_by_itself(host, name, precision):
    result = trained(RIGHT[name], precision, host)
    assert (result.status, result.findings, result.notes[1:]) == ("passed", (), ())


@pytest.mark.parametrize("training", [capturing(Passes), RIGHT["a schedule"]])
def test_amaxes_of_a_warm_up_that_are_put_back_change_nothing(training):
    assert trained(training, "fp8_delayed").status == "passed"


def test_the_optimizer_s_step_may_be_in_the_graph():
    result = trained(capturing(WholeStep, optimizer=plain_sgd))
    assert (result.status, result.findings) == ("passed", ())


@pytest.mark.parametrize(("gpu", "by"), [("hopper", "_create_transpose"), ("blackwell", "_reset_caches")])
def test_transposes_of_fp8_weights_that_a_graph_finds_made_are_right(gpu, by):
    with cuda.emulated(cuda.GPUS[gpu]):
        result = trained(lambda te: caches_reset(te, by), "fp8_delayed", "quantized in fp8_delayed")
    assert (result.status, result.findings) == ("passed", ())


class Sum(nn.Module):
    """A linear layer, optionally scaled, to whose output a second input is added."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, between: Callable[[Tensor], Any] | None = None) -> Any:
        z = scale * self.linear(x) + y
        if between is not None:
            between(z)
        return z


def sums(training: Declared = plain, call: Callable[..., Any] | None = None) -> parity.Case:
    def factory(te):
        return parity.Pair(
            Sum(nn.Linear(64, 64)),
            Sum(te.Linear(64, 64)),
            weights={"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
            inputs=lambda rng: (rng.normal(32, 64), rng.normal(32, 64)),
            call_reference=lambda module, x, y: module(x, y, 0.5),
            call_candidate=call or (lambda module, x, y: module(x, y=y, scale=0.5)),
            training=training(te),
        )

    return parity.Case("sums", factory, sizes=({},))


def test_arguments_that_are_no_tensors_are_captured_as_they_are():
    assert graphed(sums()).passed


# What a graph cannot hold, and what it keeps. The study's rows of this are tested in test_training.py with all others.


def test_the_one_input_is_named_that_is_not_copied():
    def capture(model: Model, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        fixed = x.detach().clone(), y.detach().clone()
        model.loss(*fixed).backward()
        optimizer.zero_grad()
        graph = model.cuda.CUDAGraph()
        with model.cuda.graph(graph):
            loss = model.loss(*fixed)
            loss.backward()

        def step(model: Model, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
            fixed[0].copy_(x.detach())
            graph.replay()
            optimizer.step()
            return loss

        return step

    result = graphed(sums(lambda te: Training(graph=capture)))
    assert [one.title for one in result.findings] == ["graph-stale-input"]
    assert "the input y is that of step 1" in result.findings[0].message
    assert result.reason.startswith("step 2 ")


def test_what_is_no_batch_in_the_graph_s_memory_shows_in_the_first_step():
    class Zeros(Passes):
        def fill(self, x: Tensor) -> None:
            self.static.detach().zero_()

    result = trained(capturing(Zeros))
    assert result.reason.startswith("step 1 ")
    assert "the input input is zero" in result.findings[0].message


def test_a_value_that_a_capture_reads_is_told_with_its_line_and_te_is_left_as_it_was():
    kind = te.kernels("cpu").te.Linear
    before = kind.__call__, Sum.__call__
    read = sums(call=lambda module, x, y: module(x, y=y, scale=0.5, between=lambda z: z.sum().tolist()))
    result = graphed(read)
    assert (result.status, [one.title for one in result.findings]) == ("failed", ["graph-not-captured"])
    assert "test_graphed_training.py:" in result.findings[0].message
    assert (kind.__call__, Sum.__call__, gc.isenabled(), result.notes) == (*before, True, ())
    assert graphed(sums()).passed


def test_a_training_that_is_never_twice_the_same_is_judged_by_limits_alone():
    def noisy(model: Model, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        for one in model.parameters():
            one.grad.mul_(1 + random.uniform(-1e-7, 1e-7))
        optimizer.step()
        return loss

    result = trained(lambda te: Training(candidate_step=noisy))
    assert result.status == "passed"
    assert "judged only by the limits" in result.notes[0]


def test_no_cause_is_told_of_a_graph_if_none_is_asked_for():
    (result,) = parity.compare(
        case_of("mlp", capturing(type("NotCopied", (Passes,), {"fill": lambda self, x: None}))),
        ["fp32"],
        steps=2,
        switch="graph",
        diagnose=False,
    )
    assert (result.status, result.findings) == ("failed", ())


# What TE's function cannot capture by itself.


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda module, x, y: module(x, y, 0.5), "called with a float"),
        (
            lambda module, x, y: 0.5 * module.linear(x) + y,
            "calls submodules of the candidate instead of the candidate itself",
        ),
    ],
)
def test_what_te_cannot_capture_is_an_error_that_says_what_to_do(call, told):
    result = graphed(sums(call=call))
    assert result.status == "error"
    assert told in result.reason
    assert "parity.Training(graph=...)" in result.reason
