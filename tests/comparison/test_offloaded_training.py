"""Trainings that offload activations: each step is the same as without offloading, and differences are reported."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import parity
from lab.corpus.trained_ports import switched
from lab.corpus.trained_ports.trainings import (
    OF_QUANTIZED,
    OFFLOADED,
    RIGHT,
    WRONG,
    Declared,
    case_of,
    plain,
    stepping,
    summed,
)
from parity import Training
from parity.result import Result
from parity.trainings.switches import Journal

pytestmark = pytest.mark.filterwarnings("ignore:Offloading num_layers == model_layers - 1")  # TE's, about two layers

PRECISIONS = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")


def offloaded(case: Any, precision: str = "fp32", steps: int = 3, **options: Any) -> Result:
    (result,) = parity.compare(case, [precision], steps=steps, switch="offload", **options)
    return result


def trained(training: Declared, precision: str = "fp32", host: str = "mlp") -> Result:
    return offloaded(case_of(host, training), precision)


@pytest.fixture
def journals(monkeypatch):
    """Return the list to which the journal of each new candidate is added."""
    found: list[Journal] = []
    original = Journal.__init__

    def begun(self: Journal, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Journal, "__init__", begun)
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("host", ["mlp", "llama", "glued"])
def test_te_s_offloading_changes_no_bit_of_any_step(host, precision, journals):
    result = trained(plain, precision, host)
    assert (result.status, result.findings, result.notes, len(result.steps)) == ("passed", (), (), 3)
    assert result.item.endswith("-steps3-offload]")
    assert sorted(one.offloaded > 0 for one in journals) == [False, True]  # small tensors, too, in only one training


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("name", OF_QUANTIZED)
def test_activations_beside_quantized_weights_are_offloaded(name, precision):
    assert trained(RIGHT[name], precision, f"quantized in {precision}").status == "passed"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed"])
@pytest.mark.parametrize(
    ("training", "host"),
    [
        (RIGHT["micro-batches"], "llama"),
        (switched.looping(), "glued"),
        *((RIGHT[name], host) for name in OFFLOADED for host in ("mlp", "llama")),
    ],
)
def test_a_port_may_offload_in_its_own_way(training, host, precision):
    result = trained(training, precision, host)
    assert (result.status, result.findings) == ("passed", ())


@pytest.mark.parametrize("row", [row for row in WRONG if row.switch == "offload"], ids=lambda row: row.name)
def test_what_goes_wrong_in_bf16_is_told(row):
    result = trained(row.training, "bf16", row.host)
    assert [one.title in row.titles and row.told in one.message for one in result.findings] == [True]


@pytest.mark.parametrize(("diagnose", "told"), [(True, ["offload-differs"]), (False, [])])
def test_what_is_read_back_otherwise_for_no_known_reason_fails_all_the_same(diagnose, told):
    class Noisy(switched.Host):
        def copy(self, x: Tensor) -> Tensor:
            return super().copy(x) * (1 + 1e-7 if x.is_floating_point() else 1)

    result = offloaded(case_of("mlp", switched.hosted(Noisy)), diagnose=diagnose)
    assert result.status == "failed"
    assert [one.title for one in result.findings] == told


def test_a_mistake_that_both_trainings_have_is_told_as_such():
    result = trained(stepping(summed))
    assert [one.title for one in result.findings] == ["loss-scale"]


def test_a_candidate_of_which_te_offloads_nothing_is_skipped():
    def factory(te):
        linear = lambda: nn.Linear(16, 16)  # noqa: E731
        names = {"weight": "weight", "bias": "bias"}
        return parity.Pair(linear(), linear(), lambda rng: rng.normal(8, 16), weights=names, fill=True)

    result = offloaded(parity.Case("plain", factory, sizes=({},)), steps=2)
    assert result.status == "skipped"
    assert "offloads nothing" in result.reason


def test_an_error_of_the_port_s_own_is_one():
    def refusing(module: nn.Module) -> None:
        raise ValueError("no memory on the host")

    result = trained(lambda te: Training(offload=refusing))
    assert result.status == "error"
    assert "no memory on the host" in result.reason
