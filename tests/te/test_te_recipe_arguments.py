"""Recipes whose rounding no precision has are refused; arguments that only move scales are not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from fakes import ENVIRONMENT
from fakes import result as item
from torch import nn
from transformer_engine.common.recipe import Format

import parity
from parity.report import html, markdown
from parity.report.markdown import digest
from parity.report.record import Record
from parity.te import DECLARED, PRECISIONS
from parity.te.state import fresh_quantization
from parity.user_error import UserError
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

te = parity.te.kernels("cpu").te
RECIPES = [precision.new_recipe() for precision in PRECISIONS.values() if precision.recipe is not None]


@pytest.fixture(autouse=True)
def _nothing_declared() -> Iterator[None]:
    """Forget what other files declare, such as a study's recipes, whose rounding is no longer unknown then."""
    before = dict(DECLARED)
    DECLARED.clear()
    yield
    DECLARED.update(before)


def with_another_argument(recipe: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each argument, and the recipe with another value of it if TE accepts that."""
    for each in dataclasses.fields(recipe):
        value = getattr(recipe, each.name)
        formats = Format.HYBRID if value is not Format.HYBRID else Format.E4M3
        values = {
            bool: not value,
            int: 16,
            str: "weights" if value == "all" else "all",
            Format: formats,
            type(None): "dequantized",
        }
        try:
            yield each.name, dataclasses.replace(recipe, **{each.name: values.get(type(value))})
        except (AssertionError, ValueError):
            continue


# What moves scales alone, chooses how products are added, or has no effect: modules overrule the scales' powers of two,
# and four over six is off.
ROUND_ALIKE = re.compile("margin|amax_.*|scaling_factor_.*|reduce_amax|fp8_gemm_.*|use_.*_scales|nvfp4_4over6_e.*")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_an_argument_whose_rounding_no_precision_has_is_refused(recipe: Any) -> None:
    refused = set()
    for name, other in with_another_argument(recipe):
        with emulated(cuda.BLACKWELL), fresh_quantization(), suppress(UserError):
            with te.autocast(enabled=True, recipe=other):
                pass
            continue
        refused.add(name)
    asked = {name for name, _ in with_another_argument(recipe)}
    assert refused == {name for name in asked if not ROUND_ALIKE.fullmatch(name)}
    assert refused


class Inside(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.linear, self.arguments = te.Linear(32, 32), arguments

    def forward(self, x):
        with te.autocast(enabled=True, recipe=type(RECIPES[0])(**self.arguments)):
            return self.linear(x)


@pytest.mark.parametrize(("arguments", "refused"), [({"fp8_dpa": True}, True), ({"amax_history_len": 16}, False)])
def test_a_candidate_that_enters_such_a_recipe_is_not_judged(arguments: dict[str, Any], refused: bool) -> None:
    pair = parity.Pair(
        reference=nn.Linear(32, 32),
        candidate=Inside(**arguments),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"weight": "linear.weight", "bias": "linear.bias"},
    )
    (result,) = parity.compare(pair, ["fp8_delayed"], diagnose=False)
    assert (result.status == "error") == refused
    assert (
        result.reason.startswith("DelayedScaling(fp8_dpa=True), which is entered at test_te_recipe_arguments")
        == refused
    )


# What FP8 does not touch is told as what it equals.


class Norm(nn.Module):
    """A norm with a linear layer behind it, which runs under the recipe, outside it, or not at all."""

    def __init__(self, of: Any, linear: bool, enabled: bool = True) -> None:
        super().__init__()
        self.norm, self.enabled = of.RMSNorm(32), enabled
        self.linear = of.Linear(32, 32, bias=False) if linear else nn.Identity()

    def forward(self, x):
        if self.enabled:
            return self.linear(self.norm(x))
        with te.autocast(enabled=False):
            return self.linear(self.norm(x))


PAIRS = {
    "a norm alone": ((False, True), "bf16"),
    "a linear layer in bf16": ((True, False), "bf16"),
    "a linear layer under the recipe": ((True, True), ""),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed", "fp8_current", "fp8_block"])
def test_a_pass_in_which_nothing_is_quantized_says_which_precision_it_equals(name: str, precision: str) -> None:
    (linear, enabled), equals = PAIRS[name]
    pair = parity.Pair(
        reference=Norm(nn, linear),
        candidate=Norm(te, linear, enabled),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"norm.weight": "norm.weight"} | ({"linear.weight": "linear.weight"} if linear else {}),
    )
    (result,) = parity.compare(pair, [precision], diagnose=False)
    assert result.equals == ("" if precision == "bf16" else equals)


def test_the_report_says_so_in_the_cell_and_counts_it() -> None:
    run = digest(Record(ENVIRONMENT, (item("norm", "fp8_current", equals="bf16"), item("mlp", "fp8_current"))))
    assert markdown.verdict(run).startswith("✅ 2 of 2 items passed, worst margin 0.43 at")
    assert "; 1 item = bf16, since nothing in them is quantized; " in markdown.verdict(run)
    assert "| ✅ 0.43 = bf16 |" in re.sub(" +", " ", markdown.draw(run, "x"))
    assert "</span> 0.43 = bf16</a>" in html.draw_with("", run, "x")
