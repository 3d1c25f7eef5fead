"""Trainings with ``torch.compile``: its mistakes are reported, and a candidate that is not compiled is skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import parity
from lab.corpus.trained_ports.trainings import case_of, plain
from parity import Training
from parity.trainings.why_switched import compiled_otherwise


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_a_compiled_training_is_right_at_every_step(precision):
    (result,) = parity.compare(case_of("glued"), [precision], steps=3, switch="compile")
    assert (result.status, result.findings, result.notes, len(result.steps)) == ("passed", (), (), 3)
    assert result.item.endswith("-steps3-compile]")


def test_a_candidate_of_which_nothing_is_compiled_is_skipped():
    (result,) = parity.compare(case_of("mlp"), ["bf16"], steps=2, switch="compile")
    assert result.status == "skipped"
    assert "torch.compile compiles no part of this candidate" in result.reason


def test_a_pair_compiles_in_its_own_way():
    compiled = []

    def own(module: nn.Module) -> None:
        compiled.append(module)
        module.compile(backend="eager")

    case = case_of("glued", lambda te: Training(compile=own))
    (result,) = parity.compare(case, ["fp32"], steps=2, switch="compile")
    assert (result.status, len(compiled)) == ("passed", 1)


def test_what_asks_whether_it_is_compiled_is_told_from_tracing_on():
    class Asking(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 1.1 * self.linear(x) if torch.compiler.is_compiling() else self.linear(x)

    def factory(te):
        return parity.Pair(
            nn.Linear(64, 64),
            Asking(te.Linear(64, 64)),
            weights={"weight": "linear.weight", "bias": "linear.bias"},
            inputs=lambda rng: rng.normal(32, 64),
            training=plain(te),
        )

    (result,) = parity.compare(parity.Case("asking", factory, sizes=({},)), ["fp32"], steps=2, switch="compile")
    assert (result.status, [one.title for one in result.findings]) == ("failed", ["compiled-differs"])
    assert 'not with backend="eager"' in result.findings[0].message


@pytest.mark.parametrize(
    ("backends", "wrong", "told"),
    [
        (("eager", "aot_eager", "inductor"), {"aot_eager", "inductor"}, "ahead-of-time differentiation"),
        (("eager", "aot_eager", "inductor"), {"inductor"}, "generated kernels"),
        (("eager", "aot_eager"), set(), "if it is compiled now"),
        ((), {""}, "compiled as the pair does it"),
    ],
)
def test_the_first_backend_that_is_wrong_is_told(backends, wrong, told):
    assert told in compiled_otherwise(2, backends, lambda backend: backend not in wrong).message
