"""No right port is rejected whatever faithful kernels do: each choice alone, and all that can hold together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import parity
from parity import te
from parity.case.case import Case
from parity.cases import attention, layer, linear, mlp, norm
from parity.cpu import kernel_choices as names
from parity.cpu.kernel_choices import kernel_choices
from parity.lab.zoo.catalogue import HOSTS
from parity.numerics.kernel_choices import CHOICES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU kernels alone have these options")

CASES = [value for module in (attention, layer, linear, mlp, norm) for value in vars(module).values()]
CASES = [case for case in CASES if isinstance(case, Case)]
# The tensor cores' sums are emulated term by term, which takes long: a case of each kind of module.
FEW = ("linear_no_bias", "layernorm_mlp_relu", "layernorm_mlp_swiglu", "transformer_layer_llama")
SHOWS_IN = {
    names.TF32_TRUNCATED: "fp32",
    names.TF32_TIES_AWAY: "fp32",
    names.FP32_EXACT: "fp32",
    names.FP8_14_BIT: "fp8_current",
    names.FP8_BLOCK_14_BIT: "fp8_block",
    names.SPLIT_K_IN_OUTPUT_TYPE: "bf16",
    names.ATTENTION_16_BIT_SUMS: "fp16",
}
ON_HOPPER = [choice.name for choice in CHOICES if "hopper" in choice.gpus]
TOGETHER = tuple(name for name in ON_HOPPER if name not in (names.FP32_EXACT, names.TF32_TIES_AWAY))


def rejected(precision: str, case: Case, backend: str = "auto") -> list[str]:
    results = parity.compare(case, precisions=[precision], attention=backend)
    wrong = [one for one in results if one.status in ("failed", "error")]
    return [f"{one.item}: {one.status} {one.margin:.2f} {one.reason}" for one in wrong]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", SHOWS_IN)
def test_right_port_passes_under_each_choice(name, case):
    if name.startswith("fp8") and case.name not in FEW:
        pytest.skip("one of few is enough")
    backend = "unfused" if name == names.ATTENTION_16_BIT_SUMS else "auto"
    with kernel_choices(name):
        assert rejected(SHOWS_IN[name], case, backend) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FEW], ids=lambda case: case.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block"])
def test_right_port_passes_under_all_of_a_hopper_together(precision, case):
    with kernel_choices(*TOGETHER):
        assert rejected(precision, case) == []


ONE_SIGN = {
    "relu inputs, weights with a mean": lambda x, w: (x.relu(), w + 0.3),
    "inputs and weights with a mean": lambda x, w: (x + 3.0, w + 0.3),
    "all positive": lambda x, w: (x.abs(), w.abs()),
}


def one_sign(kind: str, inner: int, factor: float = 1.0) -> parity.Pair:
    """Return a Linear whose sums lean; a port that multiplies by another factor is wrong."""
    reference = nn.Linear(inner, 48, bias=False)
    with torch.no_grad():
        _, weight = ONE_SIGN[kind](torch.zeros(1), torch.randn(48, inner, generator=torch.Generator().manual_seed(0)))
        reference.weight.copy_(weight / inner**0.5)
    return parity.Pair(
        reference=reference,
        candidate=te.kernels("auto").te.Linear(inner, 48, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng: ONE_SIGN[kind](rng.normal(48, inner), torch.zeros(1))[0],
        call_candidate=lambda module, x: module(x) * factor,
    )


def leaning_case(kind: str, inner: int, factor: float = 1.0) -> Case:
    return parity.pair("leaning", probe=False)(lambda te: one_sign(kind, inner, factor))


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("inner", [1024, 4096])
@pytest.mark.parametrize("kind", ONE_SIGN)
def test_sums_of_one_sign_may_lose_bits(kind, inner, precision):
    case = leaning_case(kind, inner)
    with kernel_choices(names.FP8_14_BIT, names.FP8_BLOCK_14_BIT):
        (result,) = parity.compare(case, precisions=[precision])
    assert result.passed, result.worst
    (on_fp32_sums,) = parity.compare(case, precisions=[precision])
    assert on_fp32_sums.passed


@pytest.mark.parametrize("chosen", [(), (names.TF32_TRUNCATED,), (names.FP8_14_BIT,)])
@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
def test_wrong_factor_is_no_freedom_of_a_kernel(precision, chosen):
    """A factor of 1.2 is beyond what short sums lose of a sum of 1,024 terms, 1.5 %, and far beyond TF32's 0.07 %."""
    with kernel_choices(*chosen):
        (result,) = parity.compare(leaning_case("all positive", 1024, factor=1.2), precisions=[precision])
    assert result.status == "failed"


def test_what_is_granted_is_noted():
    with kernel_choices(names.TF32_TRUNCATED):
        (result, *_) = parity.compare(linear.linear, precisions=["fp32"])
    assert result.passed
    assert any(names.TF32_TRUNCATED in note for note in result.notes)


@pytest.mark.parametrize("name", [names.FP32_EXACT, names.TF32_TRUNCATED])
def test_one_rounding_of_a_loss_that_scales_all_gradients_may_be_missing(name):
    """The model's own rounding of few scores is a factor of all gradients, which more accurate kernels lack."""
    (host,) = [host for host in HOSTS.values() if host.name == "model_with_loss"]
    with kernel_choices(name):
        assert rejected("fp32", dataclasses.replace(host, sizes=host.sizes[:1])) == []
