"""Matched filters: the mistakes and tensors for which they exist, and that correct ports match none of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.corpus.models import Mistake, port
from parity import te
from parity.case.validate import check_case
from parity.comparison import judge_at
from parity.judge.directions import Direction, directions
from parity.judge.limits import packaged
from parity.judge.statistics import resemblance
from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import Mistake as OfPort
from parity.numerics.errors import CachedTensor
from parity.passes.prepare import Prepared, prepare
from parity.result import Result
from parity.te import PRECISIONS


def prepared_of(host: str) -> Prepared:
    kernels, case = te.kernels("cpu"), port(host, None)
    (checked,) = check_case(case, kernels.te)
    return prepare(case, checked, torch.bfloat16, 0, kernels)


def compared(host: str, precision: str, mistake: Mistake | None = None, seed: int = 0) -> Result:
    kernels, case = te.kernels("cpu"), port(host, mistake)
    (checked,) = check_case(case, kernels.te)
    return judge_at(case, checked, PRECISIONS[precision], seed, kernels, packaged()).result


# Which mistakes are looked for, and where.


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("attention", "softmax scale 0.275"),
        ("attention", "rope base=11000"),
        ("scaled_rope_attention", "rope scaling by 8.8"),
        ("experts", "routing weights not normalised"),
        ("gelu_mlp", "norm variance over n - 1, not n"),
    ],
)
def test_a_mistake_that_its_operation_allows_has_a_direction(host: str, name: str) -> None:
    assert name in [direction.mistake.name for direction in directions(prepared_of(host))]


def test_eps_that_no_filter_tells_apart_share_a_direction() -> None:
    """From 1e-5, the steps to 1e-6, 1e-8 and 1e-12 differ by a tenth."""
    names = [one.mistake.name for one in directions(prepared_of("norm_mlp"))]
    assert [name for name in names if name.startswith("norm eps")] == ["norm eps=1e-06"]


def test_the_number_next_to_the_references_own_has_the_direction_or_else_the_likeliest() -> None:
    def subtle(own: list[float], usual: tuple[float, ...]) -> list[float]:
        made = numbers(
            lambda value: OfPort[Any]("title", "name", "repair", lambda x: (), value=value), own, usual, True
        )
        return [one.value for one in made if one.subtle and one.value is not None]

    assert subtle([4.0], (2.0, 8.0)) == [pytest.approx(4.4)]
    assert subtle([0.0], (2.0, 8.0)) == [2.0]
    assert subtle([], ()) == []


# How small a mistake is found, and that correct ports have none.


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def judged(error: torch.Tensor) -> float:
    """Return the margin of an error along four directions; two models have errors of the same size elsewhere."""
    limit = packaged().limit("bf16", "output", "mistake")
    known: Any = [
        Direction(SimpleNamespace(name=str(i)), {"x": CachedTensor(drawn(1000 + i))})  # type: ignore[arg-type]
        for i in range(4)
    ]
    models, golden = [CachedTensor(drawn(2000)), CachedTensor(drawn(2001))], CachedTensor(100 * drawn(2002))
    found = resemblance("x", CachedTensor(error), models, golden, models[0].norm, known)
    assert found is not None
    return abs(found.value) / limit


def test_a_mistake_of_a_fifth_of_the_noise_is_found_by_its_direction() -> None:
    """The mistake adds 2 % to the norm of the error, which no other statistic sees."""
    for seed in range(20):
        assert judged(drawn(seed) + 0.2 * drawn(1001)) > 1.0


def test_noise_alone_is_never_taken_for_a_mistake() -> None:
    assert max(judged(drawn(seed)) for seed in range(100)) < 1.0


@pytest.mark.parametrize("host", ["norm_mlp", "gelu_mlp", "attention", "scaled_rope_attention", "experts", "loss"])
@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_right_port_shows_no_mistake_at_any_seed(host: str, precision: str) -> None:
    for seed in range(4):
        result = compared(host, precision, seed=seed)
        assert result.status == "passed"


@pytest.mark.parametrize(
    ("host", "mistake"),
    [
        ("norm_mlp", Mistake(dict(eps=2e-5))),
        ("attention", Mistake(dict(base=11_600.0))),
        ("experts", Mistake(dict(renormalised=False))),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_mistake_below_fp8s_noise_is_detected(host: str, mistake: Mistake) -> None:
    assert compared(host, "fp8_current", mistake).status == "failed"
