"""The modules and small models that studies measure."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lab.studies.settings import gpu_with, why_nowhere
from lab.studies.te_modules import MODULES, Shape, placed
from lab.studies.training import (
    ARCHITECTURES,
    TEXT,
    VOCABULARY,
    Size,
    batches,
    initial_weights,
    load,
    load_candidate,
)
from parity.case.map_check import check_map
from parity.comparison import compare_at
from parity.judge.limits import packaged
from parity.te import PRECISIONS, Kernels, why_unavailable
from te_on_cpu import cuda

# TE's modules as studies measure them: at any size, several in sequence, on a GPU that has the precision.


@pytest.mark.parametrize("name", MODULES)
def test_each_module_is_a_faithful_port_at_another_size_and_in_a_row(name: str, kernels: Kernels) -> None:
    for depth in (1, 2) if MODULES[name].stackable else (1,):
        result = compare_at(
            *placed(name, Shape(hidden=128, seq=32, depth=depth)), PRECISIONS["fp32"], 0, kernels, packaged()
        )
        assert result.passed, result.reason


def test_modules_in_a_row_have_weights_of_their_own(kernels: Kernels) -> None:
    case, checked = placed("layernorm_mlp_swiglu", Shape(128, 32, depth=2))
    pair = case.build(kernels.te, checked.size)
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        for module in (pair.reference, pair.candidate)
    ]
    check_map(pair.weights, *shapes)
    assert "1.norm.weight" in shapes[0]
    assert shapes[1]["1.fc1_weight"] == (2 * 3 * 128, 128)


def test_the_same_module_at_the_same_shape_is_the_same_case() -> None:
    assert placed("linear", Shape(128, 32)) is placed("linear", Shape(128, 32))


@pytest.mark.parametrize(
    ("name", "gpu"), [("bf16", cuda.HOPPER), ("fp8_block", cuda.HOPPER), ("nvfp4", cuda.BLACKWELL)]
)
def test_a_precision_runs_on_the_emulated_gpu_that_has_it(
    name: str, gpu: cuda.DeviceProperties, kernels: Kernels
) -> None:
    precision = PRECISIONS[name]
    assert why_nowhere(precision, kernels) is None
    with gpu_with(precision, kernels) as found:
        assert found == gpu.name == cuda.get_device_name()
        assert why_unavailable(precision, kernels) is None
    assert cuda.get_device_name() == cuda.environment_gpu().name


def test_a_precision_that_no_gpu_has_is_told(kernels: Kernels) -> None:
    unheard_of = dataclasses.replace(PRECISIONS["mxfp8"], name="fp2")
    real = dataclasses.replace(kernels, backend="gpu")  # whose only GPU is the environment's Hopper here
    assert "10.0 or higher" in (why_nowhere(unheard_of, real) or "")
    with pytest.raises(ValueError, match="no GPU here runs fp2"), gpu_with(unheard_of, real):
        pass


# The plain and the TE form of each small model compute the same.


SIZE = Size(VOCABULARY, seq=32, hidden=64, layers=2, heads=4, groups=2, ffn=192)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_te_s_model_computes_what_the_plain_one_does(name: str, kernels: Kernels) -> None:
    architecture = ARCHITECTURES[name]
    initial = initial_weights(architecture, SIZE, 3, torch.bfloat16)
    reference, candidate = architecture.reference(SIZE), architecture.candidate(SIZE, kernels)
    load(reference, initial)
    load_candidate(candidate, architecture, SIZE, initial)
    tokens = batches(0, 1, 2, SIZE.seq)[0][:, :-1]
    plain, ported = reference(tokens), candidate(tokens)
    assert ((plain - ported).norm() / plain.norm()).item() < 2e-3  # TF32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_byte_does_not_see_what_comes_after_it(name: str) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].reference(SIZE)
    tokens = batches(0, 1, 1, SIZE.seq)[0][:, :-1]
    changed = tokens.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(tokens)[:, :20], model(changed)[:, :20])


def test_initial_weights_are_exact_in_bf16_and_follow_the_seed() -> None:
    first, again, other = (initial_weights(ARCHITECTURES["llama"], SIZE, seed, torch.bfloat16) for seed in (0, 0, 1))
    for name, weight in first.items():
        assert torch.equal(weight, weight.bfloat16().float())
        assert torch.equal(weight, again[name])
        assert weight.dim() == 1 or not torch.equal(weight, other[name])


def test_batches_are_windows_of_the_text_with_the_next_byte_as_target() -> None:
    for batch in batches(seed=5, steps=3, batch=2, seq=16):
        assert batch.shape == (2, 17)
        for window in batch:
            assert bytes(window.tolist()).decode() in TEXT
