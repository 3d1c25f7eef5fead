"""Norms of queries and keys on the wrong side of the rotation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.rope.rotation import Rotation, rotations
from parity.diagnosis.walk import RESHAPES, back
from parity.watching.trace import Edit, Trace, Value, edit


def norm_order_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Queries and keys that are rotated before their norm scales them, or after it, where the reference does otherwise.

    A rotation keeps the mean of squares, so that the two orders differ by what the gain meets alone. Of norms that
    subtract the mean this is not so; nor is there anything to tell apart without a gain.
    """
    scaled = [(norm, norm.gain) for norm in norms(trace) if norm.gain and not norm.bias and not norm.centred]
    turned = rotations(trace) if scaled else []
    pairs = [(norm, gain, rotation) for norm, gain in scaled for rotation in turned]
    norm_first = [_rotated_first(*pair) for pair in pairs if _is_given(trace, pair[2], pair[0], RESHAPES)]
    norm_last = [_rotated_last(*pair) for pair in pairs if _is_given(trace, pair[0], pair[2], RESHAPES)]
    for edits, right, wrong in ((norm_first, "before", "after"), (norm_last, "after", "before")):
        if edits:
            yield Hypothesis(
                "norm-order",
                f"query and key norms {wrong} the rotation",
                f"give TE qk_norm_before_rope={right == 'before'}; queries and keys are scaled by their norms' weights "
                f"{wrong} they are rotated, in the reference {right} that",
                module,
                tuple(chain.from_iterable(edits)),
            )


def _is_given(trace: Trace, one: Norm | Rotation, other: Norm | Rotation, names: Collection[str]) -> bool:
    """Whether one is given the other's result, after calls of these names alone."""
    return bool(back(trace, one.x, names) == back(trace, other.call.outputs[0], names))


def _rotated_first(norm: Norm, gain: Value, rotation: Rotation) -> tuple[Edit, ...]:
    """The norm leaves its gain to what the rotation returns."""

    def scaled(was: Tensor, x: Tensor, by: Tensor) -> Tensor:
        return (rotation.compute(x) * _by_head(by, rotation)).to(was.dtype)

    return (*norm.edits(gain=None), edit(rotation.call, (rotation.x, gain), scaled))


def _rotated_last(norm: Norm, gain: Value, rotation: Rotation) -> tuple[Edit, ...]:
    """What the norm returns is turned back for its gain."""
    plain = replace(norm, gain=None)

    def scaled(was: Tensor, x: Tensor, by: Tensor) -> Tensor:
        normed, turn = plain.compute(x), rotation
        if len(by) > rotation.head_dim:  # of all heads at once, [..., seq, heads * head_dim]
            normed, turn = normed.unflatten(-1, (-1, rotation.head_dim)), replace(rotation, axis=-3)
        before = replace(turn, angles=-turn.angles).compute(normed)
        return turn.compute(before * _by_head(by, turn)).reshape(was.shape).to(was.dtype)

    return (edit(norm.call, (norm.x, gain), scaled),)


def _by_head(gain: Tensor, rotation: Rotation) -> Tensor:
    """The gain of a norm over one head or over all heads, as it meets what is rotated."""
    heads = gain.unflatten(0, (-1, rotation.head_dim))
    return heads.unsqueeze(1) if rotation.axis == -2 and len(heads) > 1 else heads
