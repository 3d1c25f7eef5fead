"""Windows where queries are the last of more keys, as after a prompt: they are counted from each query's own key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity

HEADS, HEAD_DIM, QUERIES, KEYS = 4, 32, 8, 24


class Last(nn.Module):
    """Attention of the last queries, each of which sees so many keys before its own, or all."""

    def __init__(self, before: int | None) -> None:
        super().__init__()
        own = torch.arange(QUERIES)[:, None] + KEYS - QUERIES
        distance = own - torch.arange(KEYS)
        visible = distance >= 0
        self.visible = visible if before is None else visible & (distance <= before)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = (query @ key.transpose(-2, -1) / HEAD_DIM**0.5).masked_fill(~self.visible, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def result(before: int | None, window: tuple[int, int], precision: str):
    def factory(te, **_):
        core = te.DotProductAttention(
            HEADS, HEAD_DIM, qkv_format="bshd", attn_mask_type="causal_bottom_right", window_size=window
        )

        def inputs(rng):
            return tuple(rng.normal(2, count, HEADS, HEAD_DIM) for count in (QUERIES, KEYS, KEYS))

        return parity.Pair(Last(before), core, inputs)

    (one,) = parity.compare(parity.Case("last", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("before", "window", "right", "seen"),
    [
        (None, (11, 0), -1, "11"),
        (None, (3, 0), -1, "3"),
        (9, (10, 0), 9, "10"),
        (9, (-1, 0), 9, "all"),
        (9, (4, 0), 9, "4"),
    ],
)
def test_another_window_is_told(before, window, right, seen, precision):
    (finding,) = result(before, window, precision).findings
    assert finding.title == "window"
    assert f"window_size=({right}, 0)" in finding.message
    assert finding.message.endswith(f"it sees {seen}")


@pytest.mark.parametrize(("before", "window"), [(None, (-1, 0)), (9, (9, 0))])
def test_the_same_window_passes(before, window):
    assert result(before, window, "bf16").passed
