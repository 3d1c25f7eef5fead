"""Named options that make the CPU kernels round or sum as some of TransformerEngine's GPU kernels do; off by default.

``PARITY_KERNEL_CHOICES=tf32-truncated,fp8-14-bit`` sets them for a process and its children. ``kernel_choices(...)``
replaces them within a context, in one thread and in backward passes that are started there. te-parity's table of them
(``parity/numerics/kernel_choices.py``) says which GPU each option stands for, and gives the source.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from te_on_cpu.cuda import BadVariable

VARIABLE = "PARITY_KERNEL_CHOICES"

TF32_TRUNCATED = "tf32-truncated"
TF32_TIES_AWAY = "tf32-ties-away"
FP32_EXACT = "fp32-exact"
FP8_14_BIT = "fp8-14-bit"
FP8_BLOCK_14_BIT = "fp8-block-14-bit"
SPLIT_K_IN_OUTPUT_TYPE = "split-k-in-output-type"
ATTENTION_16_BIT_SUMS = "attention-16-bit-sums"
MX_25_BIT = "mx-25-bit"
SUMS_25_BIT = "sums-25-bit"

NAMES = (
    TF32_TRUNCATED,
    TF32_TIES_AWAY,
    FP32_EXACT,
    FP8_14_BIT,
    FP8_BLOCK_14_BIT,
    SPLIT_K_IN_OUTPUT_TYPE,
    ATTENTION_16_BIT_SUMS,
    MX_25_BIT,
    SUMS_25_BIT,
)

# FP32 operands are read in one of these ways, or, if none is set, as TF32 rounded to nearest even.
FP32_OPERANDS = frozenset({TF32_TRUNCATED, TF32_TIES_AWAY, FP32_EXACT})

_chosen: ContextVar[frozenset[str] | None] = ContextVar("kernel_choices", default=None)


class BadChoice(BadVariable):
    """Raised for an unknown kernel choice, or for two that contradict each other."""


@contextmanager
def kernel_choices(*names: str) -> Iterator[None]:
    """Make the CPU kernels of this thread use exactly these options within the context.

    Args:
        names: options from ``NAMES``; without any, the default kernels are used, whatever the environment says.

    Raises:
        BadChoice: for an unknown name, and for names that contradict each other.
    """
    token = _chosen.set(_checked(names, "kernel_choices(...)"))
    try:
        yield
    finally:
        _chosen.reset(token)


def current() -> frozenset[str]:
    """Return the options in force in this thread: those of the context, or else of ``PARITY_KERNEL_CHOICES``.

    Raises:
        BadChoice: for an unknown name in the environment, and for names that contradict each other.
    """
    chosen = _chosen.get()
    return _of_environment(os.environ.get(VARIABLE, "")) if chosen is None else chosen


@functools.cache
def _of_environment(value: str) -> frozenset[str]:
    names = (name.strip().lower() for name in value.split(","))
    return _checked((name for name in names if name), f"{VARIABLE}={value!r}")


def _checked(names: Iterable[str], where: str) -> frozenset[str]:
    chosen = frozenset(names)
    unknown = sorted(chosen - set(NAMES))
    if unknown:
        raise BadChoice(
            f"{where} names {', '.join(map(repr, unknown))}, which {'is' if len(unknown) == 1 else 'are'} not among "
            f"the choices of kernels: {', '.join(NAMES)}"
        )
    operands = [name for name in NAMES if name in chosen & FP32_OPERANDS]
    if len(operands) > 1:
        raise BadChoice(
            f"{where} asks for {' and '.join(operands)}, which contradict each other, because each says how GEMMs "
            f"read FP32 operands; keep one of them (all choices: {', '.join(NAMES)})"
        )
    return chosen
