"""Which keys a query may see by its position: causal masks and sliding windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Query i sees keys from ``i - left`` to ``i + right``.

    Attributes:
        left: infinite where earlier keys are seen without a limit.
        right: infinite where later keys are; 0 for a causal mask.
    """

    left: float = math.inf
    right: float = math.inf

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """``[queries, keys]``, True where a query must not see a key."""
        distance = distance_of(queries, keys, device)
        return (distance > self.right) | (distance < -self.left)

    def hides(self, queries: range, keys: range) -> bool:
        """Whether one of the queries must not see one of the keys; neither range is empty."""
        return keys[-1] - queries[0] > self.right or keys[0] - queries[-1] < -self.left

    def visible(self, queries: range, keys: int) -> range:
        """The keys, of so many, that some of the queries see; at least one key, which then none may see."""
        start = min(int(max(queries[0] - self.left, 0)), keys - 1)
        stop = max(int(min(queries[-1] + self.right + 1, keys)), start + 1)
        return range(start, stop)


def distance_of(queries: range, keys: range, device: torch.device) -> Tensor:
    """``[queries, keys]``: how far right of a query's position a key is."""
    rows = torch.arange(queries.start, queries.stop, device=device)
    return torch.arange(keys.start, keys.stop, device=device) - rows[:, None]
