"""The GPU that TE believes to run on, and what TE says is available there."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from packaging.version import Version

from parity import te
from parity.cpu import cuda, extension, misc
from parity.cpu.enums import DType


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    cuda.environment_gpu.cache_clear()
    yield
    cuda.environment_gpu.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(("name", "capability"), [("ada", (8, 9)), ("hopper", (9, 0)), ("Blackwell", (10, 0))])
def test_the_environment_names_the_gpu(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", name)
    assert cuda.get_device_capability() == capability
    assert name.lower() in cuda.get_device_name().lower()
    properties = cuda.get_device_properties()
    assert (properties.major, properties.minor) == capability


@pytest.mark.usefixtures("fresh_choice")
def test_the_gpu_is_a_hopper_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARITY_EMULATED_GPU", raising=False)
    assert cuda.get_device_properties() is cuda.HOPPER


@pytest.mark.usefixtures("fresh_choice")
def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", "ada")
    assert cuda.get_device_capability() == (8, 9)
    monkeypatch.setenv("PARITY_EMULATED_GPU", "blackwell")
    assert cuda.get_device_capability() == (8, 9)


@pytest.mark.usefixtures("fresh_choice")
def test_an_unknown_gpu_is_refused_with_the_known_ones_when_te_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", "volta")
    with pytest.raises(ValueError, match=r"PARITY_EMULATED_GPU='volta'.*ada, hopper, blackwell"):
        extension.build(Version(te.version()))


@pytest.fixture
def fresh_cublaslt() -> Iterator[None]:
    cuda.cublaslt_version.cache_clear()
    yield
    cuda.cublaslt_version.cache_clear()


@pytest.mark.usefixtures("fresh_cublaslt")
@pytest.mark.parametrize(("value", "version"), [(None, 130200), ("130600", 130600)])
def test_the_environment_sets_cublaslt(value: str | None, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARITY_EMULATED_CUBLASLT", raising=False)
    if value is not None:
        monkeypatch.setenv("PARITY_EMULATED_CUBLASLT", value)
    assert misc.get_cublasLt_version() == version


@pytest.mark.usefixtures("fresh_cublaslt")
def test_what_is_no_version_of_cublaslt_is_refused_when_te_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_CUBLASLT", "13.6")
    with pytest.raises(ValueError, match=r"'13\.6' is no version of cuBLASLt; 13\.6\.0, say, is 130600"):
        extension.build(Version(te.version()))


AVAILABLE = {
    "is_fp8_available": {cuda.ADA, cuda.HOPPER, cuda.BLACKWELL},
    "is_fp8_block_scaling_available": {cuda.HOPPER, cuda.BLACKWELL},
    "is_mxfp8_available": {cuda.BLACKWELL},
    "is_nvfp4_available": {cuda.BLACKWELL},
}


@pytest.mark.parametrize("question", AVAILABLE)
@pytest.mark.parametrize("gpu", cuda.GPUS.values(), ids=cuda.GPUS)
def test_te_offers_what_the_gpu_has(question: str, gpu: cuda.DeviceProperties) -> None:
    with emulated(gpu) as te_module:
        assert getattr(te_module, question)() == (gpu in AVAILABLE[question])


def test_te_refuses_a_recipe_that_the_gpu_lacks() -> None:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    with emulated(cuda.HOPPER) as te_module:
        module = te_module.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16)
        with (
            pytest.raises((RuntimeError, AssertionError), match=r"compute capability 10\.0 or higher"),
            te_module.autocast(enabled=True, recipe=MXFP8BlockScaling()),
        ):
            module(torch.ones(32, 32, dtype=torch.bfloat16))


def float8_tensor(te_module: ModuleType, **usages: bool) -> Any:
    quantizer = te_module.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3, **usages)
    return quantizer(torch.arange(32.0).view(2, 16))


def test_a_hopper_keeps_a_transpose_of_per_tensor_fp8_and_a_blackwell_does_not() -> None:
    with emulated(cuda.HOPPER) as te_module:
        tensor = float8_tensor(te_module, rowwise=True, columnwise=True)
        assert torch.equal(tensor._transpose, tensor._data.t())
    with emulated(cuda.BLACKWELL) as te_module:
        tensor = float8_tensor(te_module, rowwise=True, columnwise=True)
        assert tensor._transpose is None
        tensor = float8_tensor(te_module, rowwise=False, columnwise=True)
        assert tensor._data is not None


@pytest.mark.parametrize("recipe_name", ["DelayedScaling", "Float8CurrentScaling"])
def test_per_tensor_fp8_is_the_same_on_a_hopper_and_on_a_blackwell(recipe_name: str) -> None:
    from transformer_engine.common import recipe

    results = []
    for gpu in (cuda.HOPPER, cuda.BLACKWELL):
        with emulated(gpu) as te_module:
            torch.manual_seed(0)
            module = te_module.LayerNormMLP(64, 128, device="cpu", params_dtype=torch.bfloat16)
            x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            with te_module.autocast(enabled=True, recipe=getattr(recipe, recipe_name)()):
                y = module(x)
            y.backward(torch.randn_like(y))
            results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(hopper, blackwell) for hopper, blackwell in zip(*results, strict=True))
