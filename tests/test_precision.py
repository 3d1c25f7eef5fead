"""What the names of precisions mean."""

import dataclasses

import pytest
import torch

from parity import te
from parity.settings import PRECISION_NAMES
from parity.te.precision import PRECISIONS, why_unavailable

RECIPES = [precision for precision in PRECISIONS.values() if precision.recipe is not None]


@pytest.fixture(scope="module")
def kernels():
    return te.kernels()


@pytest.mark.parametrize("precision", RECIPES, ids=lambda precision: precision.name)
def test_a_recipe_is_the_one_that_te_uses_in_the_context(precision, kernels):
    if why_unavailable(precision, kernels) is not None:
        pytest.skip("the GPU at hand does not run it")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with precision.autocast(kernels):
        assert type(FP8GlobalStateManager.get_fp8_recipe()).__name__ == precision.recipe
    assert not FP8GlobalStateManager.is_fp8_enabled()


def test_without_a_recipe_te_computes_in_the_dtype(kernels):
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with PRECISIONS["bf16"].autocast(kernels):
        assert not FP8GlobalStateManager.is_fp8_enabled()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_a_hopper_cannot_run_has_te_s_reason(name, kernels):
    if kernels.backend == "gpu":
        pytest.skip("describes the emulated Hopper")
    assert "10.0 or higher" in why_unavailable(PRECISIONS[name], kernels)


def test_bf16_needs_an_ampere(kernels):
    def no_bf16():
        return False

    old = dataclasses.replace(kernels, te=type("te", (), {"is_bf16_available": staticmethod(no_bf16)}))
    assert "8.0" in why_unavailable(PRECISIONS["bf16"], old)
    assert why_unavailable(PRECISIONS["fp16"], old) is None


def test_every_precision_stores_in_its_own_dtype():
    for precision in PRECISIONS.values():
        assert precision.rounding.storage == precision.dtype
        assert precision.dtype in (torch.float32, torch.bfloat16, torch.float16)


def test_the_names_are_known_without_the_precisions():
    assert tuple(PRECISIONS) == PRECISION_NAMES
