"""Parity tests for PyTorch models that are ported to NVIDIA TransformerEngine.

The public names are loaded when they are first used, so that importing ``parity`` costs neither torch nor TE.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity import reference, te
    from parity.api import compare
    from parity.case.case import Case, Pair, Training
    from parity.case.decoding import Decoding
    from parity.case.recipes import recipe
    from parity.case.registry import pair
    from parity.case.weight_map import (
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
    from parity.ranks.layout import Parallel, Pipeline, Ranks, over
    from parity.recordings.recording import recording
    from parity.report.verdicts import verdicts
    from parity.result import Finding, Result, TensorResult
    from parity.user_error import UserError
    from parity.weights.conversion import convert
    from parity.weights.suggest import Suggestion, suggest_map

__all__ = [
    "Case",
    "Decoding",
    "Finding",
    "Pair",
    "Parallel",
    "Pipeline",
    "Ranks",
    "Result",
    "Suggestion",
    "TensorResult",
    "Training",
    "UserError",
    "compare",
    "constant",
    "convert",
    "copies",
    "experts",
    "interleaved_qkv",
    "over",
    "pair",
    "rearrange",
    "recipe",
    "recording",
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
    "verdicts",
]

_HOME = {
    "Case": "case.case",
    "Decoding": "case.decoding",
    "Finding": "result",
    "Pair": "case.case",
    "Parallel": "ranks.layout",
    "Pipeline": "ranks.layout",
    "Ranks": "ranks.layout",
    "Result": "result",
    "Suggestion": "weights.suggest",
    "TensorResult": "result",
    "Training": "case.case",
    "UserError": "user_error",
    "compare": "api",
    "constant": "case.weight_map",
    "convert": "weights.conversion",
    "copies": "case.weight_map",
    "experts": "case.weight_map",
    "interleaved_qkv": "case.weight_map",
    "over": "ranks.layout",
    "pair": "case.registry",
    "rearrange": "case.weight_map",
    "recipe": "case.recipes",
    "recording": "recordings.recording",
    "reorder": "case.weight_map",
    "rope_halves": "case.weight_map",
    "separated_qkv": "case.weight_map",
    "shift": "case.weight_map",
    "stack": "case.weight_map",
    "suggest_map": "weights.suggest",
    "transpose": "case.weight_map",
    "under": "case.weight_map",
    "verdicts": "report.verdicts",
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
