"""A report says in which format each module really computed, and a pair can ask for these formats."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ENVIRONMENT
from fakes import result as a_result
from torch import nn
from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling
from transformer_engine.pytorch.custom_recipes import quantizer_factories, quantizer_factory_zoo

import parity
from parity.case.formats import check_patterns
from parity.case.validate import of_te
from parity.judge.formats import describe_mixed, findings_of_formats
from parity.numerics.formats import Quantized, Requantized, describe_format
from parity.report import html, markdown
from parity.report.formats import format_rows
from parity.report.markdown import digest
from parity.report.record import Record, result_line, result_of
from parity.result import ModuleFormats, Result
from parity.te import PRECISIONS
from parity.te.recipes import list_roles
from parity.te.seen_formats import NAME_MARK, SeenFormats
from parity.te.state import fresh_quantization
from parity.user_error import UserError
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

KERNELS = parity.te.kernels("cpu")
te = KERNELS.te
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block")
SPARED = {"layers.0": "bf16", "layers.2": "bf16"}


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Planned(nn.Module):
    """Three of TE's layers, some of which are spared the recipe, and some of which have their own."""

    def __init__(self, spared: Collection[int], own: dict[int, str]) -> None:
        super().__init__()
        self.spared, self.own = spared, own
        self.layers = nn.ModuleList(te.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            context: Any = te.autocast(enabled=False) if i in self.spared else nullcontext()
            if i in self.own:
                context = PRECISIONS[self.own[i]].autocast(KERNELS)
            with context:
                x = x + layer(x)
        return x


def compared(
    precision: str, spared: Collection[int] = (), own: dict[int, str] | None = None, seed: int = 0, **asked: Any
) -> Result:
    pair = parity.Pair(
        reference=Reference(),
        candidate=Planned(spared, own or {}),
        inputs=lambda rng: rng.normal(32, 64),
        weights={f"layers.{{i}}.{name}": f"layers.{{i}}.{name}" for name in ("weight", "bias")},
        fill=True,
        **asked,
    )
    return parity.compare(pair, [precision], seeds=[seed])[0]


def found(result: Result) -> list[str]:
    return [finding.title for finding in result.findings]


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_is_kept_passes_and_its_limits_are_those_of_the_plan(precision: str, seed: int) -> None:
    planned = compared(precision, (0, 2), seed=seed, formats=SPARED)
    assert planned.passed
    unplanned = compared(precision, (0, 2), seed=seed)
    expected = [{each.label: each.expected.relative_l2 for each in one.tensors} for one in (planned, unplanned)]
    for name in ("d layers.0.weight", "d layers.2.weight"):
        assert expected[0][name] < 0.8 * expected[1][name]


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize(("spared", "where"), [((2,), "layers.0"), ((0, 1, 2), "layers.1")])
def test_a_plan_that_is_not_kept_fails_with_the_module_and_both_formats(
    precision: str, spared: tuple[int, ...], where: str
) -> None:
    result = compared(precision, spared, formats=SPARED)
    assert result.status == "failed"
    assert found(result) == ["other-format"]
    message = result.findings[0].message
    assert f"in {where} the fprop weight is in " in message
    seen, asked = ("E4M3", "'bf16'") if where == "layers.0" else ("'bf16'", "E4M3")
    assert message.index(seen) < message.index(asked)
    assert ("te.autocast(enabled=False)" in message) is (where == "layers.0")


def test_without_a_plan_the_modules_that_are_spared_are_a_note() -> None:
    result = compared("fp8_current", (0, 2))
    assert result.passed
    (note,) = result.notes
    assert note.startswith("layers.0, layers.2 computed without quantization, and others with it (PAR308")
    assert compared("fp8_current").notes == ()


@pytest.mark.parametrize(("asked", "passes"), [("fp8_block", True), ("fp8_current", False)])
def test_a_layer_may_be_asked_to_have_another_recipe(asked: str, passes: bool) -> None:
    result = compared("fp8_current", own={1: "fp8_block"}, formats={"layers.1": asked})
    assert (found(result) == []) is passes
    if not passes:
        assert "in layers.1 the fprop weight is in 'E4M3, 128x128' and not in 'E4M3, one scale'" in (
            result.findings[0].message
        )


def test_a_plan_says_nothing_at_precisions_without_a_recipe() -> None:
    result = compared("bf16", formats={"*": "fp8_current"})
    assert result.passed
    assert result.formats == ()


def test_the_first_pattern_that_fits_counts_and_a_pattern_stands_for_what_is_inside() -> None:
    plan = {"layers.1": "fp8_current", "layers": parity.te.PRECISIONS["bf16"]}
    assert compared("fp8_current", (0, 2), formats=plan).passed


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"layer.0": "bf16"}, "formats names 'layer.0', which fits none of TransformerEngine's modules .*'layers.0'"),
        ({"layers.0": "bf17"}, "bf17"),
        (["layers.0"], "formats must be a dict"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(formats: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compared("fp8_current", formats=formats)
    if message.startswith("formats names"):
        return
    with pytest.raises(UserError, match=message):
        parity.pair("refused", formats=formats)(lambda te: None)


def test_a_candidate_that_is_one_te_module_is_named_by_a_star() -> None:
    check_patterns({"*": "bf16"}, [""])
    with pytest.raises(UserError, match=r"in the candidate: the candidate itself \('\*'\)"):
        check_patterns({"linear": "bf16"}, [""])


# What is seen: TE's modules, operations, experts, attention, and recomputation.


E4M3, E5M2 = "E4M3, one scale", "E5M2, one scale"
PER_TENSOR = {
    "fprop weight": E4M3,
    "fprop input": E4M3,
    "dgrad weight": E4M3,
    "dgrad gradient": E5M2,
    "wgrad input": E4M3,
    "wgrad gradient": E5M2,
}
BLOCKS = {
    "nvfp4": ("E2M1, 16x16", "E2M1, 1x16", "E2M1, 1x16 (stochastic)", "E2M1, 1x16 (rotated)"),
    "mxfp8": ("E4M3, 1x32",) * 4,
    "fp8_block": ("E4M3, 128x128", "E4M3, 1x128", "E4M3, 1x128", "E4M3, 1x128"),
}


def seen(module: nn.Module, x: torch.Tensor, precision: parity.te.Precision, call: Any = None) -> dict[str, Any]:
    """Return the formats of each module's operands in one pass."""
    formats = SeenFormats()
    module = module.bfloat16()
    for name, part in of_te(module).items():
        vars(part)[NAME_MARK] = name
    with fresh_quantization(), formats.watched():
        with precision.autocast(KERNELS):
            output = call(module, x) if call else module(x)
        output.float().sum().backward()
    return {name: row.operands for row in formats.rows for name in row.modules}


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("precision", BLOCKS)
def test_blocks_and_rotations_are_told(precision: str) -> None:
    with emulated(cuda.BLACKWELL if precision != "fp8_block" else cuda.HOPPER):
        operands = seen(te.Linear(64, 64), rows(128, 64), PRECISIONS[precision])[""]
    names = ("fprop weight", "fprop input", "dgrad gradient", "wgrad input")
    assert tuple(operands[name] for name in names) == BLOCKS[precision]


@pytest.mark.parametrize(
    ("make", "call", "names"),
    [
        (lambda: te.ops.Sequential(te.ops.Linear(64, 64), te.ops.GELU(), te.ops.Linear(64, 64)), None, {"0", "2"}),
        (lambda: te.GroupedLinear(2, 64, 64), lambda module, x: module(x, [64, 64]), {""}),
        (lambda: te.LayerNormMLP(64, 64), None, {""}),
        (lambda: te.LayerNormMLP(64, 64), lambda module, x: te.checkpoint(module, x), {""}),
    ],
    ids=["operations", "experts", "two GEMMs", "recomputed"],
)
def test_every_module_of_te_is_seen_forward_and_backward(make: Any, call: Any, names: set[str]) -> None:
    operands = seen(make(), rows(128, 64), PRECISIONS["fp8_current"], call)
    assert operands == dict.fromkeys(names, PER_TENSOR)


def test_attention_in_fp8_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = te.MultiheadAttention(256, 4, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask")
    precision = parity.te.Precision("current", torch.bfloat16, lambda: Float8CurrentScaling(fp8_dpa=True))
    monkeypatch.setitem(PRECISIONS, "current", precision)  # as parity.recipe does
    with emulated(cuda.BLACKWELL):
        operands = seen(attention, rows(2, 128, 256), precision)
    assert operands["qkv"] == operands["proj"] == PER_TENSOR
    assert operands["core_attention"] == {
        "attention qkv": E4M3,
        "attention probabilities": E4M3,
        "attention context": "bf16",
        "attention context_gradients": E5M2,
        "attention score_gradients": E5M2,
        "attention qkv_gradients": "bf16",
    }


@pytest.mark.parametrize(
    ("to_format", "words"),
    [
        (None, "bf16"),
        (Quantized("E5M2", power_of_two=True), "E5M2, one scale (a power of two)"),
        (Quantized("E4M3", 128, 128), "E4M3, 128x128 (FP32 scales)"),
        (Quantized("E4M3", 32, 32, power_of_two=True), "E4M3, 32x32"),
        (
            Quantized("E2M1", 16, row_scaled=True, largest_scale=256.0, four_over_six="MSE"),
            "E2M1, 1x16 (a scale a row, scales to 256, four over six by MSE)",
        ),
        (Requantized(Quantized("E4M3"), None, torch.bfloat16), "bf16"),
        (Requantized(Quantized("E4M3"), Quantized("E5M2"), torch.bfloat16), "E5M2, one scale"),
    ],
)
def test_a_format_in_words(to_format: Any, words: str) -> None:
    assert describe_format(to_format, torch.bfloat16) == words


FACTORIES = {
    name.removesuffix("_factory"): factory
    for module in (quantizer_factories, quantizer_factory_zoo)
    for name, factory in vars(module).items()
    if name.endswith("_factory")
}
MODULES = {
    "layer": (lambda: te.LayerNormMLP(128, 128), None),
    "experts": (lambda: te.GroupedLinear(2, 128, 128), lambda module, x: module(x, [128, 128])),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("host", MODULES)
def test_what_is_seen_of_a_factory_is_what_follows_from_its_quantizers(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding model reads quantizers, and this looks at the kernels' operands: neither knows of the other."""
    precision = parity.te.Precision("custom", torch.bfloat16, lambda: CustomRecipe(qfactory=FACTORIES[name]))
    monkeypatch.setitem(PRECISIONS, "custom", precision)
    make, call = MODULES[host]
    module = make()
    with emulated(cuda.BLACKWELL):
        ((_, operands),) = seen(module, rows(256, 128), precision, call).items()
        kept = ModuleFormats(("host",), operands)
        roles = {"host": set(list_roles(module).values())}
        assert findings_of_formats([kept], {"any": "bf16"}, precision, roles) == ()
        assert describe_mixed([kept], {}, precision, roles) == ""


# What is shown.


PLAIN = dict.fromkeys(PER_TENSOR, "bf16")


def test_layers_with_the_same_formats_share_a_row() -> None:
    proj, mlp = ([f"layers.{i}.{name}" for i in range(12)] for name in ("proj", "mlp"))
    result = a_result(formats=(ModuleFormats((*proj, *mlp[1:]), PER_TENSOR), ModuleFormats((mlp[0], "head"), PLAIN)))
    (quantized, *products), (plain, *_) = format_rows([result])
    assert quantized == "layers.*.proj, layers.1.mlp, layers.2.mlp, layers.3.mlp and 8 more"
    assert products == [f"{E4M3} × {E4M3}", f"{E4M3} × {E5M2}", f"{E4M3} × {E5M2}"]
    assert plain == "layers.0.mlp, head"


def test_the_record_holds_the_formats_and_both_reports_show_them() -> None:
    result = compared("fp8_current", (0, 2))
    assert result_of(result_line(result)) == result
    run = digest(Record(ENVIRONMENT, (result,)))
    for drawn in (markdown.draw(run, "run"), html.draw_with("", run, "run")):
        assert "layers.0, layers.2" in drawn
        assert f"{E4M3} × {E5M2}" in drawn


def test_older_records_have_no_formats(tmp_path: Path) -> None:
    content = json.loads(result_line(a_result()))
    del content["result"]["formats"]
    older = result_of(json.dumps(content))
    assert older.formats == ()
    assert "Formats of operands" not in markdown.draw(digest(Record(ENVIRONMENT, (older,))), "run")
