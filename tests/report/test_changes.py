"""Small changes that no limit rejects show in the bytes of results, and unchanged code shows no change."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ENVIRONMENT, result, tensor
from torch import Tensor, nn

import parity
from parity.case.case import Case
from parity.report import changes, earlier
from parity.report.changes import Comparison, Kind
from parity.report.earlier import Asked
from parity.report.environment import Environment
from parity.report.record import Record
from parity.result import Determinism, Result
from parity.te import Backend

HERE = replace(ENVIRONMENT, asked=Asked({}, code={earlier.PARITY: "one", "my_pairs.py": "one"}), threads=2)
CHANGED = replace(HERE, asked=Asked({}, code={earlier.PARITY: "one", "my_pairs.py": "two"}))


@dataclass(frozen=True)
class Plant:
    """A small mistake: what it does to the input and to the output."""

    name: str
    of_input: Callable[[Tensor], Tensor] = lambda x: x
    of_output: Callable[[Tensor], Tensor] = lambda y: y


def _at(x: Tensor, index: Any, factor: float) -> Tensor:
    factors = torch.ones_like(x)
    factors[index] = factor
    return x * factors


def _noise(y: Tensor) -> Tensor:
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    return y * (1 + 0.002 * drawn).to(y.dtype)


PLANTS = (
    Plant("one output column times 1.005", of_output=lambda y: _at(y, (..., 3), 1.005)),
    Plant("one output row times 1.004", of_output=lambda y: _at(y, 3, 1.004)),
    Plant("one input column times 1.004", of_input=lambda x: _at(x, (..., 3), 1.004)),
    Plant("one input row times 0.996", of_input=lambda x: _at(x, 3, 0.996)),
    Plant("outputs with noise of 0.2 %", of_output=_noise),
    Plant("outputs moved by 0.05 % of their deviation", of_output=lambda y: y + 0.0005 * y.detach().std()),
    Plant("outputs times 1.0015", of_output=lambda y: 1.0015 * y),
    Plant("inputs rounded once more", of_input=lambda x: x + (x.detach().half().to(x.dtype) - x.detach())),
    Plant("outputs clamped", of_output=lambda y: y.clamp(max=float(y.detach().max()) * 0.995)),
    Plant("gradients alone times 1.004", of_output=lambda y: 1.004 * y - 0.004 * y.detach()),
)


class Planted(nn.Module):
    """A correct module with a small mistake around it."""

    def __init__(self, module: nn.Module, plant: Plant) -> None:
        super().__init__()
        self.module = module
        self.plant = plant

    def forward(self, x: Tensor) -> Tensor:
        return self.plant.of_output(self.module(self.plant.of_input(x)))


def _norm_linear(te: Any) -> tuple[nn.Module, nn.Module, dict[str, str]]:
    reference = nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 64, bias=False))
    candidate = te.LayerNormLinear(64, 64, normalization="RMSNorm", bias=False)
    return reference, candidate, {"0.weight": "module.layer_norm_weight", "1.weight": "module.weight"}


def _mlp(te: Any) -> tuple[nn.Module, nn.Module, dict[str, str]]:
    reference = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(approximate="tanh"), nn.Linear(128, 64))
    names = {"0": "layer_norm_", "1": "fc1_", "3": "fc2_"}
    weights = {f"{old}.{kind}": f"module.{new}{kind}" for old, new in names.items() for kind in ("weight", "bias")}
    return reference, te.LayerNormMLP(64, 128), weights


@cache
def _run(precision: str, plant: Plant) -> tuple[Result, ...]:
    """Return the results of both ports with this mistake."""
    found = []
    for made in (_norm_linear, _mlp):

        def pair(te: Any, made: Any = made) -> parity.Pair:
            reference, candidate, weights = made(te)
            return parity.Pair(
                reference=reference,
                candidate=Planted(candidate, plant),
                weights=weights,
                inputs=lambda rng: rng.normal(32, 64),
            )

        case = Case(made.__name__.strip("_"), pair, sizes=({},), path=Path(__file__))
        found += parity.compare(case, precisions=[precision], backend="cpu", diagnose=False)
    return tuple(found)


RIGHT = Plant("none")


PRECISIONS = ("fp32", "bf16", "fp8_current")


def against(before: Sequence[Result], after: Sequence[Result], now: Environment = CHANGED) -> Comparison:
    return Comparison(Record(HERE, tuple(before)), Record(now, tuple(after)), ("old", "new"))


def kinds(runs: Comparison) -> list[Kind]:
    return [change.kind(runs.noise) for change in runs.all]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_small_mistake_is_told_unless_it_changes_no_byte(plant: Plant, precision: str) -> None:
    assert "within noise" not in kinds(against(_run(precision, RIGHT), _run(precision, plant)))


def test_most_of_them_show_in_bytes_alone() -> None:
    """Limits and growth laws allow the differences between correct kernels, and these mistakes are no larger."""
    found = Counter(
        kind
        for precision, plant in itertools.product(PRECISIONS, PLANTS)
        for kind in kinds(against(_run(precision, RIGHT), _run(precision, plant)))
    )
    assert found["other bytes"] > found["regressed"] > 0


def test_other_bytes_are_told_with_the_statistic_that_grew_most() -> None:
    plant = next(plant for plant in PLANTS if plant.name == "one input row times 0.996")
    runs = against(_run("bf16", RIGHT), _run("bf16", plant))
    assert changes.verdict(runs) == "✅ nothing regressed, 2 changed by the code, within noise"
    [told] = [line for line in changes.lines(runs) if line.startswith("changed by the code: norm_linear")]
    assert re.fullmatch(
        r"changed by the code: norm_linear\[bf16-32x64\], other bytes in 5 of 5 tensors \(output, .*\); "
        r".* \(seed 0\): \w+ [\d.]+, now [\d.]+; noise: [\d.]+ .*",
        told,
    )
    assert "## Changed by the code" in changes.draw(runs)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_code_gives_the_same_bytes(precision: str) -> None:
    again = _run.__wrapped__(precision, RIGHT)
    assert kinds(against(_run(precision, RIGHT), again)) == ["same bytes", "same bytes"]


# When two runs are known to have used the same kernels.


def gpu(environment: Environment, **fields: Any) -> Environment:
    return replace(environment, backend="gpu", device="NVIDIA H200", cuda="13.0", threads=0, **fields)


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (CHANGED, True),
        (replace(HERE, torch="2.14.0"), False),
        (replace(HERE, cpu="another"), False),
        (replace(HERE, threads=4), False),
        (replace(HERE, asked=Asked({}, code={earlier.PARITY: "two"})), False),
        (replace(HERE, asked=Asked({})), False),
        (replace(HERE, asked=None), False),
        (replace(HERE, seeds=(0, 1)), True),
    ],
)
def test_cpu_kernels_are_the_same_where_nothing_of_theirs_differs(now: Environment, same: bool) -> None:
    assert earlier.kernels_are_the_same(HERE, now) is same


@pytest.mark.parametrize(
    ("fields", "same"), [({}, True), ({"cpu": "another"}, True), ({"driver": "999.0"}, False), ({"cublas": "1"}, False)]
)
def test_a_gpus_kernels_are_the_same_whatever_the_host(fields: dict[str, str], same: bool) -> None:
    assert earlier.kernels_are_the_same(gpu(HERE), gpu(HERE, **fields)) is same


@pytest.mark.parametrize(
    ("backend", "before", "after", "kind"),
    [
        ("cpu", None, None, "other bytes"),
        ("cpu", None, Determinism(("output",)), "within noise"),  # the candidate does not reproduce its own results
        ("gpu", None, None, "within noise"),  # some of a GPU's kernels race, and nobody has checked these
        ("gpu", Determinism(), None, "within noise"),
        ("gpu", Determinism(), Determinism(), "other bytes"),
        ("gpu", Determinism(), Determinism(("output",)), "within noise"),
        ("gpu", Determinism(), Determinism(("d input",)), "other bytes"),
    ],
)
def test_bytes_tell_where_kernels_are_known_to_reproduce_them(
    backend: Backend, before: Determinism | None, after: Determinism | None, kind: Kind
) -> None:
    results = [
        [result(backend=backend, tensors=(replace(tensor(), digest=digest),), determinism=seen)]
        for digest, seen in (("one", before), ("two", after))
    ]
    assert kinds(against(*results)) == [kind]
