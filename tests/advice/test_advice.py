"""Test the advice on recipes: what it says of layers is true of passes in which these are left in BF16."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformer_engine.common.recipe import CustomRecipe

import parity
from parity.advice.advice import Recipe, advise, count_saturated
from parity.advice.tables import describe
from parity.case import registry
from parity.case.recipes import name_precisions
from parity.case.validate import check_case
from parity.cli import recipes as command
from parity.numerics.formats import Quantized
from parity.te import PRECISIONS, Precision, kernels
from parity.user_error import UserError

WIDTH = 64


def advice(build, *names, seeds=(0, 1), **options):
    case = parity.Case("case", build, sizes=({},))
    te = kernels("cpu")
    (checked,) = check_case(case, te.te)
    return advise(case, checked, [PRECISIONS.get(name, name) for name in names], seeds, te, **options)


def stack_of(layers=3, outliers=None, call=None, evaluation=False):
    """Return a pair of linear layers; one of them may have outliers in channels that its inputs do not use."""

    def build(te):
        reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        if outliers is not None:
            with torch.no_grad():
                reference[outliers - 1].weight[::16] = 0.0
                reference[outliers].weight[:, ::16] = 1e4
        candidate = nn.Sequential(*(te.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        return parity.Pair(
            *(reference, candidate),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng: rng.normal(32, WIDTH),
            call_reference=call,
            call_candidate=call,
            evaluation=evaluation,
        )

    return build


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_a_layer_with_outliers_comes_first_and_in_bf16_lowers_the_error_as_predicted(recipe):
    base, found = advice(stack_of(outliers=1), recipe, keep=1)
    first, *others = found.layers
    assert first.name == "1"
    assert first.shares["outputs"]["weights"] > 0.9
    assert all(layer.shares["outputs"]["weights"] < 0.05 for layer in others)
    assert first.zeroed["weights"] > 5 * max(layer.zeroed["weights"] for layer in others)
    kept = found.kept
    assert kept.layers == ("1",)
    assert kept.after == pytest.approx(kept.predicted, rel=0.2)
    assert base.outputs[0].error < kept.after < kept.before / 2


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize("keep", [1, 3, 6])
@pytest.mark.parametrize("by", ["outputs", "gradients"])
def test_what_several_layers_save_is_predicted_from_what_each_carries_alone(recipe, keep, by):
    base, found = advice(stack_of(layers=6), recipe, keep=keep, by=by)
    assert sum(layer.share("outputs") for layer in found.layers) == pytest.approx(1.0)
    assert sum(layer.share("gradients") for layer in found.layers) == pytest.approx(1.0)
    assert found.kept.after == pytest.approx(found.kept.predicted, rel=0.2)
    assert found.kept.added_up == pytest.approx(found.kept.before, rel=0.1)
    if keep == 6:
        assert found.kept.after == pytest.approx(base.error(by), rel=0.01)


def test_a_layer_is_what_te_computes_in_one_gemm():
    case = next(case for case in registry.load_entry_points() if case.name == "transformer_layer_llama")
    size = dict(case.sizes[0], seq=16, hidden=64, ffn=64, heads=4)
    te = kernels("cpu")
    (checked,) = check_case(replace(case, sizes=(size,)), te.te)
    _, found = advise(case, checked, [PRECISIONS["fp8_current"]], [0], te)
    assert sorted(layer.name for layer in found.layers) == [
        "attention.o_proj",
        "attention.q_proj + k_proj + v_proj",
        "mlp.down_proj",
        "mlp.gate_proj + up_proj",
    ]


def test_recipes_that_round_alike_are_told_together_after_bf16():
    found = advice(stack_of(1), "fp8_delayed", "fp16", "fp8_current", seeds=[0])
    assert [one.name for one in found] == ["bf16", "fp16", "fp8_delayed, fp8_current"]
    assert found[2].notes == ("scales of fp8_delayed are computed as if tensors did not change over steps",)
    assert math.isnan(found[2].outputs[0].confidence)  # of a single seed


def test_layers_under_a_loss_are_ranked_by_gradients_and_the_loss_is_not_rounded_at_last():
    def mean_square(module, x):
        return module(x).square().mean()

    build = stack_of(call=mean_square)
    base, found = advice(build, "fp8_current", seeds=[0])
    assert found.by == "gradients"
    assert base.outputs[0].error < torch.finfo(torch.bfloat16).eps / 8
    assert "That of output goes from" in describe([base, found])
    assert advice(build, "fp8_current", seeds=[0], by="outputs")[1].by == "outputs"


def test_layers_are_ranked_by_gradients_if_a_recipe_is_for_the_backward_pass_alone():
    def make():
        from transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo import high_precision_fwd_mxfp8_bwd_factory

        return CustomRecipe(qfactory=high_precision_fwd_mxfp8_bwd_factory)

    base, found = advice(stack_of(2), Precision("backward", torch.bfloat16, make))
    assert found.by == "gradients"
    assert found.outputs[0].error == pytest.approx(base.outputs[0].error)
    assert [layer.share("outputs") for layer in found.layers] == [0.0, 0.0]


def test_gradients_below_their_noise_are_flagged():
    found = Recipe("some", (), {"lost": 0.6, "kept": 0.5})
    assert found.stalled == ("lost",)
    assert "some: gradients are below √3 times their noise, so that training may stall, in lost." in describe([found])


def test_elements_that_vanish_are_counted_by_operand():
    def build(te):
        return parity.Pair(
            *(nn.Linear(WIDTH, WIDTH, bias=False), te.Linear(WIDTH, WIDTH, bias=False)),
            weights={"weight": "weight"},
            inputs=lambda rng: rng.normal(32, WIDTH) * torch.cat([torch.ones(48), torch.full((16,), 1e-9)]),
        )

    _, found = advice(build, "fp8_current", seeds=[0])
    (layer,) = found.layers
    assert layer.zeroed["inputs"] == pytest.approx(0.25, abs=0.01)
    assert layer.zeroed["weights"] < 0.01
    assert layer.saturated["inputs"] == 0.0


@pytest.mark.parametrize("dim", [0, 1])
def test_what_exceeds_the_largest_number_of_its_block_counts_as_saturated(dim):
    x = torch.randn(33, 48)
    to_format = Quantized("E2M1", 16)
    read = to_format(x, dim)
    lines = x if dim else x.t()
    of_tensor = 448.0 * 6.0 / x.abs().max()
    expected = 0
    for block in lines.split(16, 1):
        scale = (block.abs().amax(1, keepdim=True) / 6.0 * of_tensor).to(torch.float8_e4m3fn).float() / of_tensor
        expected += int((block.abs() > 6.0 * scale * (1 + 1e-6)).sum())
    assert 0 < count_saturated(to_format, x, read, dim) == expected
    assert count_saturated(to_format, x[:0], read[:0], dim) == 0.0
    e4m3 = Quantized("E4M3", 16)
    assert count_saturated(e4m3, x, e4m3(x, dim), dim) == 0.0
    four_over_six = Quantized("E2M1", 16, four_over_six="MSE")
    assert math.isnan(count_saturated(four_over_six, x, four_over_six(x, dim), dim))


def norm(te):
    return parity.Pair(
        reference=nn.LayerNorm(WIDTH),
        candidate=te.LayerNorm(WIDTH),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(32, WIDTH),
    )


@pytest.mark.parametrize(
    ("build", "names", "options", "message"),
    [
        (stack_of(1), ["bf16", "fp16"], {}, "bf16, fp16 has no recipe, so nothing is quantized"),
        (stack_of(1, evaluation=True), ["nvfp4"], {"by": "gradients"}, "no weight gradients to rank layers by"),
        (norm, ["nvfp4"], {}, "no linear layer in one of TE's modules, so a recipe rounds nothing in it"),
    ],
)
def test_what_cannot_be_advised_is_refused(build, names, options, message):
    with pytest.raises(UserError, match=message):
        advice(build, *names, seeds=[0], **options)


FILE = """
import parity
from torch import nn
from transformer_engine.common.recipe import NVFP4BlockScaling

parity.recipe("exact_backward", lambda: NVFP4BlockScaling(backward_override="high_precision"))

@parity.pair("two")
def two(te):
    return parity.Pair(
        reference=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
        candidate=nn.Sequential(te.Linear(32, 32), nn.Linear(32, 32)),
        weights={name: name for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        inputs=lambda rng: rng.normal(16, 32),
    )
"""


def test_a_written_pair_and_a_recipe_of_ones_own_become_a_page_a_plot_and_json(tmp_path):
    file = tmp_path / "my_pairs.py"
    file.write_text(FILE, encoding="utf-8")
    names = name_precisions([f"{file}::exact_backward"], "-p")
    folder = tmp_path / "report"
    found = json.loads(command.advise(f"{file}::two", names, "0", [0, 1], None, "", folder, True, "cpu"))
    base, own = found["recipes"]
    assert [base["name"], own["name"]] == ["bf16", "exact_backward"]
    (layer,) = own["layers"]  # the other one is not TE's, and so is in BF16 anyway
    assert layer["weights"] == ["0.weight"]
    assert layer["zeroed"]["gradients"] is None  # read as they are stored
    assert json.loads((folder / "recipes.json").read_text(encoding="utf-8")) == found
    page = (folder / "recipes.md").read_text(encoding="utf-8")
    assert "nothing here was measured on a GPU" in page
    assert "With 1 of 1 linear layer in BF16, the error of outputs goes from" in page
    assert "exact_backward: share of the error of outputs" in (folder / "recipes.html").read_text(encoding="utf-8")


def test_a_port_with_the_layer_in_bf16_has_the_error_that_the_advice_says():
    te, build, recipe = kernels("cpu"), stack_of(outliers=1), PRECISIONS["fp8_current"]
    _, found = advice(build, "fp8_current", seeds=range(3), keep=1)
    torch.manual_seed(0)
    pair, x = build(te.te), torch.randn(32, WIDTH).bfloat16()
    pair.reference.bfloat16().double()
    golden = pair.reference(x.double()).detach()
    port = pair.candidate.bfloat16()
    port.load_state_dict(pair.reference.state_dict(), strict=False)
    errors = []
    for kept in ((), found.kept.layers):
        y = x
        for name, layer in port.named_children():
            with te.te.autocast(enabled=name not in kept, recipe=recipe.new_recipe()):
                y = layer(y)
        errors.append(float((y.detach().double() - golden).norm() / golden.norm()))
    assert errors == pytest.approx([found.kept.before, found.kept.after], rel=0.2)
