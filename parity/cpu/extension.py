"""Builds the module that TransformerEngine imports as ``transformer_engine_torch``, from the CPU kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from packaging.version import Version

from parity.cpu import activations, cuda, dropout, enums, info, kernel_choices, mixture, norm, optimizers, versions
from parity.cpu.attention import fused, kv_cache, rope, unfused
from parity.cpu.products import gemm, grouped_gemm
from parity.cpu.quantized import grouped, partial_cast, quantize, recipe

NAME = "transformer_engine_torch"
KERNEL_FAMILIES = (
    activations,
    optimizers,
    mixture,
    fused,
    dropout,
    fused,
    gemm,
    grouped,
    grouped_gemm,
    grouped_gemm,
    info,
    kv_cache,
    optimizers,
    norm,
    mixture,
    partial_cast,
    mixture,
    quantize,
    recipe,
    rope,
    mixture,
    activations,
    optimizers,
    unfused,
    recipe,
)


class _Extension(ModuleType):
    """A module in which each kernel that is missing says so when it is called."""

    version: Version

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _missing_kernel(name, self.version)


def _missing_kernel(name: str, version: Version) -> Callable[..., NoReturn]:
    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        asked_by = sys._getframe(1).f_globals.get("__name__", "unknown module")
        raise NotImplementedError(
            f"the CPU kernels have no {NAME}.{name}, which {asked_by} of TransformerEngine {version} asked for"
        )

    missing.__name__ = name
    return missing


def build(version: Version) -> ModuleType:
    """Return the module ``transformer_engine_torch`` as this version of TE expects it.

    Each kernel is a function of one of ``KERNEL_FAMILIES`` that stands in its ``__all__``, under the name and with the
    parameters that TE's ``csrc/extensions/pybind.cpp`` gives it.
    """
    # What the environment asks for is refused when TE is loaded, not in the middle of a model.
    cuda.emulated_gpu(), cuda.cublaslt_version(), kernel_choices.current()
    extension = _Extension(NAME)
    extension.version = version
    for family in KERNEL_FAMILIES:
        for name in family.__all__:
            setattr(extension, name, getattr(family, name))
    for name, value in vars(enums).items():
        if isinstance(value, type) and value.__module__ == enums.__name__:
            setattr(extension, name, value)
    versions.adapt_extension(extension, version)
    return extension
