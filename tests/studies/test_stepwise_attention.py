"""Baseline and flash attention, step by step: equal in exact arithmetic, rounded where asked, and their gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lab.studies import stepwise
from lab.studies.flash_stability.study import draw, staircase
from lab.studies.stepwise import (
    ALGORITHMS,
    FORMATS,
    STEPS,
    Algorithm,
    Arithmetic,
    Attended,
    Steps,
    StepwiseCore,
    Tiles,
    as_kernels,
    baseline,
    everywhere,
    flash,
    golden,
)
from parity.numerics.rounding import rounded
from parity.reference import Attention, CoreAttention
from parity.te import PRECISIONS

# Baseline and flash attention, step by step: equal in exact arithmetic, and rounded where they are asked to round.


TILES = Tiles(16, 16)


def attend(algorithm: str, query: Tensor, key: Tensor, value: Tensor, steps: Steps, causal: bool = False) -> Attended:
    if algorithm == "baseline":
        return baseline(query, key, value, steps, causal)
    return flash(query, key, value, steps, TILES, causal)


def random(queries: int, keys: int, features: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, queries, features), (2, keys, features), (2, keys, features)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


@settings(max_examples=40)
@given(
    queries=st.integers(1, 40),
    more_keys=st.integers(0, 20),
    rows=st.integers(1, 48),
    columns=st.integers(1, 48),
    outer=st.sampled_from(["queries", "keys"]),
    causal=st.booleans(),
)
def test_flash_in_fp64_is_pytorch_s_attention_for_any_tiles(
    queries: int, more_keys: int, rows: int, columns: int, outer: Any, causal: bool
) -> None:
    tensors = random(queries, queries + more_keys)
    expected = scaled_dot_product_attention(*tensors, is_causal=causal)
    found = flash(*tensors, everywhere("fp64"), Tiles(rows, columns, outer), causal)
    torch.testing.assert_close(found.output, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_baseline_and_golden_in_fp64_are_pytorch_s_attention(causal: bool) -> None:
    tensors = random(50, 50)
    expected = scaled_dot_product_attention(*tensors, is_causal=causal)
    for found in (baseline(*tensors, everywhere("fp64"), causal).output, golden(*tensors, causal)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_log_sum_exp_is_that_of_the_scores(algorithm: str) -> None:
    query, key, value = random(20, 30)
    expected = (query @ key.mT / math.sqrt(8)).logsumexp(-1, keepdim=True)
    torch.testing.assert_close(attend(algorithm, query, key, value, everywhere("fp64")).lse, expected)


@pytest.mark.parametrize("backend", [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION])
def test_in_fp32_both_deviate_as_pytorch_s_attention_does(backend: Any) -> None:
    tensors = draw("normal", 0, 256, 256, 64, "fp32")
    query, key, value = tensors.query, tensors.key, tensors.value
    exact = golden(query, key, value)
    with torch.nn.attention.sdpa_kernel(backend):
        theirs = scaled_dot_product_attention(*(x[None, None] for x in (query, key, value)))[0, 0]
    for algorithm in ALGORITHMS:
        ours = attend(algorithm, query, key, value, everywhere("fp32")).output
        assert (ours - exact).norm() < 2 * (theirs - exact).norm()


def test_as_kernels_round_flash_deviates_as_pytorch_s_flash_kernel_in_bf16() -> None:
    tensors = draw("normal", 0, 512, 512, 64, "bf16")
    query, key, value = tensors.query, tensors.key, tensors.value
    exact = golden(query, key, value)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = scaled_dot_product_attention(*(x[None, None].bfloat16() for x in (query, key, value)))[0, 0]
    ours = flash(query, key, value, as_kernels("flash", "bf16"), Tiles(64, 64)).output
    assert ((ours - exact).norm() / (theirs - exact).norm()).item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_rounded_alone_changes_what_the_algorithm_has_of_it(algorithm: str, step: str) -> None:
    inputs = staircase("uniform", 0, 64, 8, "fp32", 16, 3)
    steps = dataclasses.replace(everywhere("fp32"), **{step: "e5m2"})
    plain = attend(algorithm, inputs.query, inputs.key, inputs.value, everywhere("fp32"))
    rounded = attend(algorithm, inputs.query, inputs.key, inputs.value, steps)
    only_flash_has = step in ("rescaling", "accumulator")
    assert torch.equal(plain.output, rounded.output) == (only_flash_has and algorithm == "baseline")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_output_has_the_format_of_its_step(algorithm: str) -> None:
    for name in FORMATS:
        output = attend(algorithm, *random(20, 20), everywhere(name)).output
        assert torch.equal(FORMATS[name].round(output), output)


def test_kernels_keep_flash_s_state_in_fp32_and_store_baseline_s_matrices() -> None:
    flash_steps, baseline_steps = as_kernels("flash", "bf16"), as_kernels("baseline", "bf16")
    assert {step for step in STEPS if getattr(flash_steps, step) == "bf16"} == {"probabilities", "output"}
    assert {step for step in STEPS if getattr(baseline_steps, step) == "bf16"} == {"scores", "probabilities", "output"}
    assert as_kernels("flash", "fp64") == everywhere("fp64")


@pytest.mark.parametrize("causal", [False, True])
def test_swapped_loops_and_other_heights_of_tiles_change_nothing(causal: bool) -> None:
    query, key, value = (x.float() for x in random(64, 64))
    outputs = [
        flash(query, key, value, everywhere("bf16"), tiles, causal).output
        for tiles in (Tiles(16, 16), Tiles(16, 16, "keys"), Tiles(32, 16), Tiles(64, 16, "keys"))
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("rises", [0, 1, 2, 3])
def test_a_staircase_of_keys_makes_the_maximum_rise_as_often_as_asked(rises: int) -> None:
    inputs = staircase("normal", 0, 64, 16, "bf16", 16, rises)
    tensors = (inputs.query, inputs.key, inputs.value)
    assert flash(*tensors, everywhere("bf16"), TILES).rescalings == rises
    assert flash(*tensors, everywhere("bf16"), TILES, maximum_known=True).rescalings == 0


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_the_order_of_a_staircase_leaves_the_golden_output(distribution: str) -> None:
    first, *others = [staircase(distribution, 0, 64, 16, "bf16", 16, rises) for rises in range(4)]
    exact = golden(first.query, first.key, first.value)
    for other in others:
        assert not torch.equal(other.key, first.key)
        torch.testing.assert_close(golden(other.query, other.key, other.value), exact, rtol=0, atol=1e-14)


class _Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "golden"])
def test_no_tensor_grows_with_the_square_of_the_length(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, limit = 512, 4096
    monkeypatch.setattr(stepwise, "SCORES_AT_ONCE", limit)
    query, key, value = (x[0].float() for x in random(length, length))
    with _Largest() as largest:
        if algorithm == "golden":
            golden(query, key, value)
        else:
            attend(algorithm, query, key, value, everywhere("bf16"))
    assert largest.numel <= max(limit, query.numel()) < length**2 / 16


# Gradients of both algorithms, and both algorithms in a model.


CASES = list(itertools.product(ALGORITHMS, (False, True)))


def passed(core: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and gradients of grouped-query attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 37, heads, 16, generator=generator, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    output = core(query, key, value)
    output.backward(torch.randn(output.shape, generator=generator, dtype=dtype))
    return [output.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


@pytest.mark.parametrize(("algorithm", "everywhere"), CASES)
def test_in_fp64_output_and_gradients_are_autograd_s_of_plain_attention(algorithm: Algorithm, everywhere: bool) -> None:
    expected = passed(CoreAttention(causal=True), torch.float64)
    found = passed(StepwiseCore(Arithmetic(algorithm, "fp64", everywhere, tile=8)), torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "everywhere"), CASES)
def test_in_bf16_they_deviate_by_its_roundings(algorithm: Algorithm, everywhere: bool) -> None:
    expected = passed(CoreAttention(causal=True), torch.float32)
    found = passed(StepwiseCore(Arithmetic(algorithm, "bf16", everywhere, tile=8)), torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert 2**-10 < ((ours - theirs).norm() / theirs.norm()).item() < 2**-6


def test_a_rounding_model_around_a_network_leaves_the_attention_s_inside_alone() -> None:
    attention = Attention(32, 2, 2, rope=False)
    attention.core = StepwiseCore(Arithmetic("flash", "fp32"))  # type: ignore[assignment]
    seen: list[Tensor] = []
    attention.core.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with rounded(PRECISIONS["bf16"].rounding, attention.parameters()):
        attention(torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(seen[0], seen[0].bfloat16().float())
