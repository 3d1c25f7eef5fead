"""Golden and what is computed of it: once for a case, size, dtype and seed, and let go when another case begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import te
from parity.case.case import Case, Pair
from parity.case.validate import check_case
from parity.comparison import compare_at
from parity.judge import directions
from parity.judge.limits import packaged
from parity.machine import devices
from parity.passes import all_passes, prepare
from parity.te.precision import PRECISIONS

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


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    prepare.forget()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each was computed."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name.strip("_")] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(prepare, "_prepared")
    count(directions, "_directions")
    count(all_passes, "run_model")
    return counts


def run(case: Case, *precisions: str) -> None:
    for checked in check_case(case, KERNELS.te):
        for precision in precisions:
            for seed in SEEDS:
                assert compare_at(case, checked, PRECISIONS[precision], seed, KERNELS, packaged()).passed


def keep(case: Case, seeds: Iterable[int]) -> list[prepare.Prepared]:
    (checked,) = check_case(case, KERNELS.te)
    return [prepare.prepare(case, checked, torch.bfloat16, seed, KERNELS) for seed in seeds]


def test_golden_and_the_directions_are_computed_once_a_seed_for_all_precisions_of_a_dtype(
    computed: Counter[str],
) -> None:
    run(norm_case(16), "bf16", "fp8_delayed", "fp8_current")
    assert computed["prepared"] == computed["directions"] == len(SEEDS)


def test_a_dtype_that_comes_between_does_not_make_them_computed_again(computed: Counter[str]) -> None:
    run(norm_case(16), "fp32", "bf16", "fp16", "fp8_delayed")
    assert computed["prepared"] == computed["directions"] == 3 * len(SEEDS)


def test_models_are_computed_once_a_seed_for_precisions_that_round_alike(computed: Counter[str]) -> None:
    ways_to_round = 2
    run(norm_case(16), "fp8_delayed", "fp8_current")
    assert computed["run_model"] == len(SEEDS) * ways_to_round


def test_nothing_of_another_size_is_kept() -> None:
    run(norm_case(16, 32), "bf16")
    assert {key.checked.label for key in prepare._KEPT} == {"8x32"}


def test_of_three_dtypes_the_first_is_let_go() -> None:
    run(norm_case(16), "fp32", "bf16", "fp16")
    assert {key.dtype for key in prepare._KEPT} == {torch.bfloat16, torch.float16}


def test_the_oldest_are_let_go_where_memory_is_short_but_for_the_last_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free", lambda: 0)
    run(norm_case(16), "bf16")
    assert [key.seed for key in prepare._KEPT] == [1, 2]


@pytest.mark.parametrize(("workers", "kept"), [(1, 4), (2, 2)])
def test_workers_share_the_memory_that_is_free(workers: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = keep(norm_case(16), [0])
    monkeypatch.setattr(devices, "free", lambda: 3.5 * sum(one.held.values()) * 8)  # of which an eighth may be kept
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    keep(norm_case(16), range(6))
    assert len(prepare._KEPT) == kept


def test_what_is_kept_counts_with_its_bytes() -> None:
    run(norm_case(16), "bf16")
    output = 8 * 16 * 8
    for one in prepare._KEPT.values():
        changes = output * len(directions.directions(one))  # and their squares, in FP32
        models = one.cache.group("models", PRECISIONS["bf16"].rounding).bytes
        assert models > 2 * output
        assert one.cache.bytes >= changes + models
        assert one.bytes > one.cache.bytes + 2 * output
