"""Parity tests for PyTorch models that are ported to NVIDIA TransformerEngine.

The public names are loaded when they are first used, so that importing ``parity`` costs neither torch nor TE.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity import reference, te
    from parity.case import Case, Pair
    from parity.comparison import compare
    from parity.registry import pair
    from parity.result import Finding, Result, TensorResult
    from parity.suggest import Suggestion, suggest_map
    from parity.user_error import UserError
    from parity.weights.notation import (
        constant,
        copies,
        experts,
        interleaved_qkv,
        rearrange,
        reorder,
        rope_halves,
        separated_qkv,
        shift,
        stack,
        transpose,
        under,
    )

__all__ = [
    "Case",
    "Finding",
    "Pair",
    "Result",
    "Suggestion",
    "TensorResult",
    "UserError",
    "compare",
    "constant",
    "copies",
    "experts",
    "interleaved_qkv",
    "pair",
    "rearrange",
    "reference",
    "reorder",
    "rope_halves",
    "separated_qkv",
    "shift",
    "stack",
    "suggest_map",
    "te",
    "transpose",
    "under",
]

_HOME = {
    "Case": "case",
    "Finding": "result",
    "Pair": "case",
    "Result": "result",
    "Suggestion": "suggest",
    "TensorResult": "result",
    "UserError": "user_error",
    "compare": "comparison",
    "constant": "weights",
    "copies": "weights",
    "experts": "weights",
    "interleaved_qkv": "weights",
    "pair": "registry",
    "rearrange": "weights",
    "reorder": "weights",
    "rope_halves": "weights",
    "separated_qkv": "weights",
    "shift": "weights",
    "stack": "weights",
    "suggest_map": "suggest",
    "transpose": "weights",
    "under": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    if name not in _HOME:
        return importlib.import_module(f"parity.{name}")
    value = getattr(importlib.import_module(f"parity.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
