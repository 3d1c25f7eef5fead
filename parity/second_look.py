"""Looks again at a tensor beyond its limits: would a faithful port whose roundings fell otherwise be there, too?

A port's own lines between TE's modules are no fused kernel. Where it calls PyTorch's functions by itself, the model
runs once more with what they round (``parity.plain_calls``).

Where a function has a kink (a ReLU, a clamp, a choice of experts), a value next to it falls on either side by rounding
alone, and its gradient jumps. Two runs of the rounding model tell how often that happens, not where. So before a port
fails, the model runs a few times more with jitter (``parity.freedom.Freedom``), and what any of these runs loses is
expected as well. A mistake is none that jitter makes: its error stays where it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from parity.freedom import FUSED, UNFUSED
from parity.passes import Tensors, run_model
from parity.prepare import Prepared
from parity.result import TensorResult
from parity.rounding import Rounding

LOOKS = 8
# Jitter multiplies no statistic by so much: it moves single values, whose share of a tensor's error is expected.
HOPELESS_MARGIN = 10.0


def second_look(
    tensors: tuple[TensorResult, ...],
    models: Sequence[Tensors],
    judge: Callable[[Sequence[Tensors]], tuple[TensorResult, ...]],
    prepared: Prepared,
    rounding: Rounding,
    plain: frozenset[str],
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
    if all(tensor.passed for tensor in tensors):
        return tensors
    unfused = dataclasses.replace(UNFUSED, plain=plain)
    looked = list(models)
    judged = tensors
    if plain:
        looked.append(run_model(prepared, rounding, unfused))
        judged = judge(looked)
    for seed in range(LOOKS):
        if all(tensor.passed for tensor in judged):
            return judged
        if max(tensor.margin for tensor in judged) > HOPELESS_MARGIN:
            break
        looked.append(run_model(prepared, rounding, dataclasses.replace((FUSED, unfused)[seed % 2], jitter=seed)))
        judged = judge(looked)
    return judged if all(tensor.passed for tensor in judged) else tensors


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
