"""Which of TransformerEngine's functions that launch Triton kernels are replaced, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from parity.cpu import versions
from parity.cpu.triton import cross_entropy, cross_entropy_before_2_19, permutation

_WRAPPERS = "transformer_engine.pytorch.triton"
_FAMILIES: dict[str, ModuleType] = {
    f"{_WRAPPERS}.cross_entropy": cross_entropy,
    f"{_WRAPPERS}.grouped_dbias_dscales": permutation,
    f"{_WRAPPERS}.pad": permutation,
    f"{_WRAPPERS}.permutation": permutation,
}


def replacements(module: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of TE's ``module`` to replace, by name; none for most modules."""
    family = _FAMILIES.get(module)
    if family is None:
        return {}
    version = versions.installed_version()
    if family is cross_entropy and versions.has_cross_entropy_gradient_in_forward(version):
        gradient_in_fp32 = versions.has_cross_entropy_gradient_in_fp32(version)
        return {
            "cross_entropy_forward": cross_entropy_before_2_19.forward(gradient_in_fp32),
            "cross_entropy_backward": cross_entropy_before_2_19.cross_entropy_backward,
        }
    return {name: getattr(family, name) for name in family.__all__}
