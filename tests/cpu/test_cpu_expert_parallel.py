"""Expert parallelism on two ranks: which rows each rank receives, what is added up, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from parity import te as parity_te
from parity.ranks.launch import launch

pytestmark = pytest.mark.skipif(Version(parity_te.version()) < Version("2.20"), reason="the API is new in TE 2.20")

RANKS, EXPERTS, TOKENS, HIDDEN = 2, 4, 3, 32
CHOSEN = torch.tensor([[[0, 1], [1, 2], [3, 1]], [[0, 3], [1, -1], [2, 0]]])  # by rank and token
WEIGHTS = torch.arange(1.0, 13.0).view(RANKS, TOKENS, 2) / 16
# Which tokens (rank, place) each expert gets, in order.
OF_EXPERT = {0: [(0, 0), (1, 0), (1, 2)], 1: [(0, 0), (0, 1), (0, 2), (1, 1)], 2: [(0, 1), (1, 2)], 3: [(0, 2), (1, 0)]}


def tokens_of(rank: int) -> Tensor:
    return (torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) % 7 + 10.0 * rank + 1).bfloat16()


def begin(alignment: int, capacity: int | None, drops: bool = False, **options: Any) -> tuple[Any, int]:
    """Return TE's module with a buffer, on this rank."""
    parity_te.kernels("cpu")
    from transformer_engine.pytorch import ep

    ep.ep_bootstrap(dist.group.WORLD, EXPERTS, TOKENS, HIDDEN, 2, capacity, drop_on_overflow=drops, **options)
    ep.buffer = ep.EpBuffer(2, TOKENS, HIDDEN, EXPERTS // RANKS, capacity, alignment)  # type: ignore[attr-defined]
    return ep, dist.get_rank()


def _dispatch(alignment: int, capacity: int | None, drops: bool = False) -> dict[str, Any]:
    ep, rank = begin(alignment, capacity, drops)
    buffers = {}
    if capacity:
        buffers = {"recv_tokens": torch.full((capacity, HIDDEN), -7.0).bfloat16()}
        buffers["recv_topk_weights"] = torch.full((capacity,), -7.0)
    received = ep.ep_dispatch(ep.buffer, tokens_of(rank), CHOSEN[rank], WEIGHTS[rank], **buffers)
    rows, weights, counts = (x.tolist() for x in (received[0][:, 0].float(), *received[1:]))
    return {"rows": rows, "weights": weights, "counts": counts, "total": int(ep.buffer.total_recv_tokens)}


def expected(rank: int, alignment: int) -> tuple[list[float], list[float], list[int]]:
    rows, weights, counts = [], [], []
    for expert in range(2 * rank, 2 * rank + 2):
        found = OF_EXPERT[expert]
        padding = -len(found) % max(alignment, 1)
        rows += [float(tokens_of(r)[t, 0]) for r, t in found] + [0.0] * padding
        for r, t in found:
            weights.append(float(WEIGHTS[r, t][CHOSEN[r, t] == expert]))
        weights += [0.0] * padding
        counts.append(len(found) + padding)
    return rows, weights, counts


@pytest.mark.parametrize("alignment", [0, 4])
@pytest.mark.parametrize("capacity", [None, 12])
def test_rows_come_expert_by_expert_in_the_order_of_ranks_and_tokens(alignment: int, capacity: int | None) -> None:
    """Padding is 0 and counts; in a buffer of a fixed size, the rows behind are left as they were."""
    for rank, got in enumerate(launch(_dispatch, RANKS, (alignment, capacity))):
        rows, weights, counts = expected(rank, alignment)
        rest = [-7.0] * (0 if capacity is None else capacity - sum(counts))
        assert (got["rows"], got["counts"], got["total"]) == (rows + rest, counts, sum(counts))
        assert got["weights"] == weights + rest


def test_rows_beyond_the_capacity_are_dropped_and_the_total_says_how_many_there_were() -> None:
    first, second = launch(_dispatch, RANKS, (0, 5, True))
    rows, weights, _ = expected(0, 0)
    assert (first["rows"], first["weights"], first["counts"], first["total"]) == (rows[:5], weights[:5], [3, 2], 7)
    assert (second["counts"], second["total"]) == ([2, 2], 4)


def _refused(what: str) -> str:
    try:
        if what == "too many rows":
            _dispatch(0, 4)
        elif what == "symmetric memory":
            begin(0, 12, zero_copy=True)
        else:
            ep, rank = begin(0, None)
            ep.ep_dispatch(
                ep.buffer, tokens_of(rank).repeat(2, 1), CHOSEN[rank].repeat(2, 1), WEIGHTS[rank].repeat(2, 1)
            )
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("too many rows", "more than recv_capacity_per_rank=4"),
        ("symmetric memory", "zero_copy"),
        ("too many tokens", "6 tokens are more than max_tokens_per_rank=3"),
    ],
)
def test_what_does_not_fit_is_refused(what: str, told: str) -> None:
    assert told in launch(_refused, RANKS, (what,))[0]


def _combine() -> list[Tensor]:
    ep, rank = begin(4, None)
    tokens, weights = tokens_of(rank).requires_grad_(), WEIGHTS[rank].clone().requires_grad_()
    rows, shares, _ = ep.ep_dispatch(ep.buffer, tokens, CHOSEN[rank], weights)
    y = ep.ep_combine(ep.buffer, rows.float().mul(shares[:, None]).bfloat16(), num_local_tokens=TOKENS)
    y.backward(torch.ones_like(y))
    assert tokens.grad is not None
    assert weights.grad is not None
    return [y.detach(), tokens.grad, weights.grad]


def test_rows_are_added_without_weights_and_gradients_go_the_same_ways() -> None:
    for rank, (y, of_tokens, of_weights) in enumerate(launch(_combine, RANKS)):
        x, is_chosen = tokens_of(rank), CHOSEN[rank] >= 0
        parts = (x[:, None].float() * WEIGHTS[rank][:, :, None]).bfloat16().float() * is_chosen[:, :, None]
        torch.testing.assert_close(y, parts.sum(1).bfloat16(), rtol=2**-8, atol=0.0)
        shares = (WEIGHTS[rank] * is_chosen).bfloat16().float().sum(1, keepdim=True).expand(-1, HIDDEN)
        torch.testing.assert_close(of_tokens, shares.bfloat16(), rtol=2**-8, atol=0.0)
        torch.testing.assert_close(of_weights, x.float().sum(1, keepdim=True) * is_chosen)


def _round_on_the_way() -> Tensor:
    """Return what 1, 2**-8 and 2**-8 add up to: the first and the second are on one rank, the third on the other."""
    _, rank = begin(0, None)
    import transformer_engine_torch as tex

    chosen = torch.tensor([[0, 1, 2]])
    handle = torch.empty(tex.ep_handle_mem_size(3, 0), dtype=torch.uint8)
    counts, total = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    tex.ep_prepare(handle, chosen, counts, 3, 0, total)
    rows = torch.full((int(total), HIDDEN), 2.0**-8).bfloat16()
    if rank == 0:
        rows[:2] = 1.0  # the first expert's, for the tokens of both ranks
    result = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
    tex.ep_combine(handle, rows, result)
    return result[0, 0]


def test_a_rank_rounds_what_it_has_added_before_it_sends_it() -> None:
    """In FP32 alone, 1 + 2**-8 + 2**-8 would be 1.0078125; BF16 rounds the first two to 1."""
    assert [float(x) for x in launch(_round_on_the_way, RANKS)] == [1.0, 1.0]
