"""TE's global state of quantization, a fresh one for each candidate.

TE keeps the amax buffers of every module that ever ran with delayed scaling, and goes over them all after each pass, so
that the hundredth candidate of a process pays for those before it. What a pass leaves that raised inside of a recipe's
context stays as well. Source: ``FP8GlobalStateManager`` in ``pytorch/quantization.py`` of TE 2.14 to 2.20.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

_Ran = TypeVar("_Ran")

# Powers of two by which a scale may be less than a pass asks for: a floating-point format's numbers reach as far down
# then, but for one of its own.
_TOO_SMALL = 1.0
# By which it may be more, or else what saturates is off by more than rounding: E4M3's largest number is 448, and 464 is
# as near to it as to the next one. E5M2's reaches farther.
_TOO_LARGE = math.log2(464 / 448)


@contextmanager
def fresh() -> Iterator[None]:
    """Within the context TE knows of no module that ran before; afterwards its state is what it was."""
    manager = state_manager()
    if manager is None:
        yield
        return
    before = {
        name: value
        for name, value in vars(manager).items()
        if not name.startswith("__") and not isinstance(value, (classmethod, staticmethod))
    }
    manager.reset()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(manager, name, value)


def settled(run: Callable[[], _Ran], warmup_passes: int) -> _Ran:
    """The result of the first pass after the warm-up whose scales are those that its own numbers ask for.

    With delayed scaling a tensor's scale comes from passes before, and is 1 at first. A gradient that is smaller than
    the format's least number then becomes 0, and so do all that are computed from it, of which no scale can be had:
    each pass settles the scales of one more layer, from the loss backwards.

    Args:
        run: one pass forward, or forward and backward.
        warmup_passes: at the least; where there are none, no scale comes from a pass before.
    """
    ran = run()
    # A pass settles one tensor at the least, unless what it computes is another thing each time: by other numbers, or
    # with modules that each pass makes anew, whose scales TE keeps as well.
    most = warmup_passes + len(_scales()) if warmup_passes else 0
    for passes in range(1, most + 1):
        before = _scales()
        ran = run()
        if passes >= warmup_passes and _fit(before, _scales()):
            break
    return ran


def _scales() -> list[Tensor]:
    """Of each group of tensors that TE keeps a history of, copied."""
    manager = state_manager()
    if manager is None:
        return []
    buffers = getattr(manager, "quantization_state", manager).global_scale_buffer  # older ones hold it themselves
    return [scale.clone() for scales in buffers.values() for scale in scales]


def _fit(used: list[Tensor], asked_for: list[Tensor]) -> bool:
    """Whether a pass used scales like those that its own numbers ask for."""
    if len(used) != len(asked_for):
        return False
    moves = [(x / y).log2() for x, y in zip(used, asked_for, strict=True)]
    return all(bool(((move >= -_TOO_SMALL) & (move <= _TOO_LARGE)).all()) for move in moves)


def state_manager() -> Any:
    """TE's class that holds the state; None where TE is not imported."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    return None if quantization is None else quantization.FP8GlobalStateManager
