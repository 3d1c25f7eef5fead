"""Looks again at a tensor beyond its limits: would a faithful port whose roundings fell otherwise be there, too?

A port's own lines between TE's modules are no fused kernel. Where it calls PyTorch's functions by itself, the model
runs once more with what they round (``parity.plain_calls``).

Where a function has a kink (a ReLU, a clamp, a choice of experts), a value next to it falls on either side by rounding
alone, and its gradient jumps. Two runs of the rounding model tell how often that happens, not where. So before a port
fails, the model runs with every such value above its kink that may be, with every one below (``parity.kinks``), and a
few times with jitter (``parity.freedom.Freedom``), and what any of these runs loses is expected as well. A mistake is
none that these make: its error stays where it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from parity.freedom import FUSED, UNFUSED, Freedom
from parity.kinks import Kinks
from parity.passes import Tensors, run_model
from parity.prepare import Prepared
from parity.result import TensorResult
from parity.rounding_parts import Rounding

LOOKS = 8
# Jitter multiplies no statistic by so much: it moves single values, whose share of a tensor's error is expected.
HOPELESS_MARGIN = 10.0


def second_look(
    tensors: tuple[TensorResult, ...],
    models: Sequence[Tensors],
    judge: Callable[[Sequence[Tensors]], tuple[TensorResult, ...]],
    prepared: Prepared,
    rounding: Rounding,
    plain: tuple[str, ...],
) -> tuple[TensorResult, ...]:
    """The verdicts with more models, if every tensor passes then; else, and if all passed before, the first ones.

    Args:
        tensors: the verdicts at first look.
        models: the rounding model's tensors at first look.
        judge: from models to verdicts.
        prepared: what is compared.
        rounding: the precision's.
        plain: names of PyTorch's functions that the port calls by itself.
    """
    if all(tensor.passed for tensor in tensors) or not all(math.isfinite(tensor.margin) for tensor in tensors):
        return tensors
    looked, judged = list(models), tensors
    for kinks, freedom in _looks(prepared, plain):
        if freedom.jitter is not None and max(tensor.margin for tensor in judged) > HOPELESS_MARGIN:
            break
        looked.append(run_model(prepared, rounding, freedom, kinks))
        judged = judge(looked)
        if all(tensor.passed for tensor in judged):
            return judged
    return tensors


def _looks(prepared: Prepared, plain: tuple[str, ...]) -> Iterator[tuple[Kinks | None, Freedom]]:
    unfused = dataclasses.replace(UNFUSED, plain=plain)
    if plain:
        yield None, unfused
    exact = Kinks()
    run_model(prepared, Rounding(torch.float32), FUSED, exact)
    if exact.values:
        yield from ((Kinks(side, exact.values), unfused) for side in (1.0, -1.0))
    exact.values.clear()
    for seed in range(LOOKS):
        yield None, dataclasses.replace((FUSED, unfused)[seed % 2], jitter=seed)


def remark(tensors: Sequence[TensorResult]) -> str:
    """What a port that passed at second look owes it to.

    Args:
        tensors: the verdicts at first look.
    """
    failed = ", ".join(f"{tensor.label} ({_where(tensor)})" for tensor in tensors if not tensor.passed)
    return f"beyond a limit at first look, yet no farther than chance moves a faithful computation: {failed}"


def _where(tensor: TensorResult) -> str:
    check = tensor.worst_check
    return f"{check.statistic} {check.where}".strip() if check else "not finite"
