"""Which two mistakes together are likeliest, from what each does alone.

To first order two mistakes do what each does, one beside the other. So of all pairs those are tried whose effects,
together, are most like the candidate's error: as they are, or each by some multiple of its own, since one mistake may
amplify another, and a constant need not be the known one. All pairs of some thousand effects are a few products of
matrices, on a sample of the tensors' elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from parity.diagnosis.hypothesis import Hypothesis

_ELEMENTS = 4096  # of a sample
_MOST_EFFECTS = 2000  # the largest
_SMALLEST, _LARGEST = 1e-3, 1e3  # of the error's norm: an effect below does nothing, one beyond is not in it
_SAME = 1e-4  # of the error's square: pairs that leave as much do the same
_LISTED = 4096  # pairs, before those that do the same are left out
_ONE_DIRECTION = 1e-6  # of the product of two effects' squares: they have one direction


@dataclass(frozen=True)
class LikelyPairs:
    """Pairs of mistakes, the likeliest first.

    Attributes:
        as_they_are: whose effects together are most like the error.
        by_multiples: of whose effects some multiples are.
    """

    as_they_are: list[tuple[Hypothesis, Hypothesis]]
    by_multiples: list[tuple[Hypothesis, Hypothesis]]


@dataclass(eq=False)
class Effects:
    """What single mistakes do to a candidate's outputs or gradients.

    Attributes:
        error: the candidate's, ``[elements]``.
        known: each mistake's effect, as a sample of as many elements.
    """

    error: Tensor
    known: dict[Hypothesis, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(errors: Sequence[Tensor]) -> Effects:
        """None known yet; ``errors`` are those of each tensor, of all its elements."""
        return Effects(_sample(errors))

    def note(self, one: Hypothesis, effects: Sequence[Tensor]) -> None:
        """What one does to each tensor, of all its elements."""
        self.known[one] = _sample(effects)

    def likely_pairs(
        self, known: Sequence[Hypothesis], most: int, go_together: Callable[[Hypothesis, Hypothesis], bool]
    ) -> LikelyPairs:
        """Pairs none of which does what another one does, as far as these effects tell; the likeliest first.

        Args:
            known: the likeliest mistakes first: of pairs that do the same, the first is told.
            most: how many of each sort.
            go_together: tells of two whether both can hold at once.
        """
        some = self._large(known)
        if len(some) < 2:
            return LikelyPairs([], [])
        size = torch.linalg.vector_norm(self.error)  # of which all is counted in parts, so that no square overflows
        effects = torch.stack([self.known[one] for one in some]) / size
        products, along = effects @ effects.T, effects @ (self.error / size)
        squares = products.diagonal()
        as_they_are = 2.0 * (along[:, None] + along) - squares[:, None] - squares - 2.0 * products
        both = squares[:, None] * squares - products**2
        by_multiples = along[:, None] ** 2 * squares + along**2 * squares[:, None]
        by_multiples = by_multiples - 2.0 * along[:, None] * along * products
        by_multiples = torch.where(both > _ONE_DIRECTION * squares[:, None] * squares, by_multiples / both, 0.0)
        return LikelyPairs(
            self._distinct(some, as_they_are, most, go_together), self._distinct(some, by_multiples, most, go_together)
        )

    def _large(self, known: Sequence[Hypothesis]) -> list[Hypothesis]:
        """The mistakes that do most, in the order in which they are known, and single calls last."""
        sizes = {one: torch.linalg.vector_norm(effect).item() for one, effect in self.known.items()}
        size_of_error = torch.linalg.vector_norm(self.error).item()
        some = [one for one, size in sizes.items() if _SMALLEST * size_of_error < size < _LARGEST * size_of_error]
        largest = sorted(some, key=sizes.__getitem__, reverse=True)[:_MOST_EFFECTS]
        order = {one: position for position, one in enumerate(known)}
        return sorted(largest, key=lambda one: (one.scope == "call", order.get(one, len(order))))

    def _distinct(
        self,
        some: list[Hypothesis],
        explained: Tensor,
        most: int,
        go_together: Callable[[Hypothesis, Hypothesis], bool],
    ) -> list[tuple[Hypothesis, Hypothesis]]:
        """The pairs whose effects explain most of the error's square; ``some`` has the likeliest mistakes first."""
        upper = explained.triu(1)
        listed = upper.flatten().topk(min(_LISTED, upper.numel()))
        alike: dict[int, list[tuple[int, int]]] = {}
        for value, index in zip(listed.values.tolist(), listed.indices.tolist(), strict=True):
            if 0.0 < value < math.inf:
                alike.setdefault(round(value / _SAME), []).append(divmod(index, len(some)))
        found = []
        for pairs in alike.values():
            # Neither of the two is far down the list: the second of a pair is the later one.
            in_order = ((some[i], some[j]) for i, j in sorted(pairs, key=lambda pair: pair[::-1]))
            found += list(islice((pair for pair in in_order if go_together(*pair)), 1))
            if len(found) == most:
                break
        return found


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """The same elements whenever tensors of these sizes are given, each about as large as before, in FP32.

    They are drawn at random, since regular ones may be of one column.
    """
    return torch.cat([_some(x, _ELEMENTS // len(tensors) + 1).float() for x in tensors])


def _some(x: Tensor, count: int) -> Tensor:
    if x.numel() <= count:
        return x.flatten()
    elements = torch.randint(x.numel(), (count,), generator=torch.Generator().manual_seed(0))
    return x.flatten()[elements.to(x.device)] * math.sqrt(x.numel() / count)
