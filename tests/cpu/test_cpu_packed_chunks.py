"""The kernels for packed sequences of which each rank has chunks, against loops over sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from te_on_cpu import context_parallel

STARTS = [0, 8, 8, 24, 28]  # one sequence is empty
CU_SEQLENS = torch.tensor(STARTS, dtype=torch.int32)
SEQUENCES = list(itertools.pairwise(STARTS))
HALVES = [
    [token for start, end in SEQUENCES for token in range(start, (start + end) // 2)],
    [token for start, end in SEQUENCES for token in range((start + end) // 2, end)],
]


def _tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, 2, 8).to(dtype)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_a_half_of_each_sequence_is_read(half: int, leading: tuple[int, ...]) -> None:
    x = _tokens(*leading, 28)
    read = context_parallel.thd_read_half_tensor(x, CU_SEQLENS, half)
    assert torch.equal(read, x[..., HALVES[half], :, :])


@pytest.mark.parametrize("first", ["add", "copy", "zero", "none"])
@pytest.mark.parametrize("second", ["add", "copy", "zero", "none"])
def test_gradients_of_halves_are_added_copied_or_cleared(first: str, second: str) -> None:
    gradient = _tokens(28)
    both = {first, second} == {"add", "copy"}
    step = _tokens(28 if both else 14)
    expected = gradient.clone()
    for tokens, what in zip(HALVES, (first, second), strict=True):
        of_step = step[tokens] if both else step
        expected[tokens] = {
            "add": expected[tokens] + of_step,
            "copy": of_step,
            "zero": torch.zeros_like(of_step),
            "none": expected[tokens],
        }[what]
    if {first, second} in ({"add", "copy"}, {"add", "none"}, {"copy", "none"}, {"copy", "zero"}):
        context_parallel.thd_grad_correction(gradient, step, CU_SEQLENS, first, second)
        assert torch.equal(gradient, expected)
    else:
        with pytest.raises(ValueError, match="Unsupported Functor"):
            context_parallel.thd_grad_correction(gradient, step, CU_SEQLENS, first, second)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("only_second_half", [True, False])
@pytest.mark.parametrize("merges", ["step by step", "by final sums"])
def test_outputs_are_merged_by_their_shares_of_the_softmax(packed: bool, only_second_half: bool, merges: str) -> None:
    tokens = HALVES[1] if only_second_half else list(range(28))
    out, step = _tokens(28, dtype=torch.float32), _tokens(len(tokens), dtype=torch.float32)
    old, of_step = torch.randn(2, 28), torch.randn(2, len(tokens))
    new = old.clone()
    new[:, tokens] = torch.logaddexp(old[:, tokens], of_step)
    expected = out.double()
    if merges == "step by step":
        expected *= torch.exp(old.double() - new.double()).T[..., None]
    expected[tokens] += step.double() * torch.exp(of_step.double() - new[:, tokens].double()).T[..., None]
    sums = [_by_sequence(x, len(x[0]) < 28) if not packed else x for x in (old, new, of_step)]
    arguments = (CU_SEQLENS, only_second_half, packed)
    if merges == "step by step":
        context_parallel.thd_out_correction(out, step, *sums, *arguments)
    else:
        context_parallel.thd_out_correction_by_final_sums(out, step, *sums[1:], *arguments)
    changed = tokens if merges == "step by step" and only_second_half else range(28)
    torch.testing.assert_close(out[list(changed)].double(), expected[list(changed)], rtol=1e-5, atol=1e-6)


def _by_sequence(sums: Tensor, halves: bool) -> Tensor:
    """Return packed sums ``[h, t]`` as ``[b, h, s]``."""
    divisor = 2 if halves else 1
    longest = max(end - start for start, end in SEQUENCES) // divisor
    result = torch.full((len(SEQUENCES), 2, longest), float("nan"))
    for number, (start, end) in enumerate(SEQUENCES):
        result[number, :, : (end - start) // divisor] = sums[:, start // divisor : end // divisor]
    return result


@pytest.mark.parametrize("packed", [True, False])
def test_sums_of_second_halves_are_read_and_added_to(packed: bool) -> None:
    whole, step = torch.randn(2, 28), torch.randn(2, 14)
    given = [whole.clone(), step] if packed else [_by_sequence(whole, False), _by_sequence(step, True)]
    read = context_parallel.thd_read_second_half_lse(given[0], CU_SEQLENS, packed, given[1].shape[-1])
    expected = whole[:, HALVES[1]] if packed else _by_sequence(whole[:, HALVES[1]], True).nan_to_num()
    assert torch.equal(read, expected)
    context_parallel.thd_second_half_lse_correction(*given, CU_SEQLENS, packed)
    whole[:, HALVES[1]] = torch.logaddexp(whole[:, HALVES[1]], step)
    torch.testing.assert_close(given[0], whole if packed else _by_sequence(whole, False), equal_nan=True)


def test_ranks_have_two_chunks_of_each_sequence() -> None:
    """Use TE's own example: sequences of 8, 8, 8 and 16 tokens on 4 ranks."""
    starts = torch.tensor([0, 8, 16, 24, 40], dtype=torch.int32)
    within = torch.cat([torch.arange(8)] * 3 + [torch.arange(16)])
    expected = [
        *(0, 7, 0, 7, 0, 7, 0, 1, 14, 15),
        *(1, 6, 1, 6, 1, 6, 2, 3, 12, 13),
        *(2, 5, 2, 5, 2, 5, 4, 5, 10, 11),
        *(3, 4, 3, 4, 3, 4, 6, 7, 8, 9),
    ]
    x = within[:, None].expand(40, 4).float().contiguous()
    by_rank = context_parallel.thd_sequence_order_to_cp_rank_order(x, starts, 4, 40)
    assert by_rank[:, 0].tolist() == expected
    assert torch.equal(context_parallel.thd_cp_rank_order_to_sequence_order(by_rank, starts, 4, 40), x)
    second = context_parallel.thd_get_partitioned_indices(starts, 40, 4, 1)
    assert (second.dtype, within[second.long()].tolist()) == (torch.int32, expected[10:20])


def test_padding_is_not_copied() -> None:
    out, inp = torch.zeros(10, 4), torch.ones(10, 4)
    padded, valid = (torch.tensor(x, dtype=torch.int32) for x in ([2, 6, 10], [0, 3, 5]))
    context_parallel.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, padded, valid)
    assert out[:, 0].tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]


def test_a_token_that_16_bytes_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a token has 12 bytes"):
        context_parallel.thd_read_half_tensor(torch.zeros(28, 1, 6).bfloat16(), CU_SEQLENS, 0)
