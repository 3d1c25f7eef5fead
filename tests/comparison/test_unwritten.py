"""A port that reads memory which nothing has written fails, whatever that memory holds, and right ones do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.api import compare
from parity.judge.candidate import unwritten_reads
from parity.trace.effects import RandomState

HIDDEN, ROWS = 32, 32
CPU = torch.device("cpu")

Step = Callable[[Tensor, Any], Tensor]


class Layers(nn.Module):
    """Two linear layers with a step between them, which gets the module and changes nothing if it is right."""

    def __init__(self, linear: Any, step: Step | None = None) -> None:
        super().__init__()
        self.first, self.second = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.step = step
        self.workspace = torch.empty(ROWS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(F.relu(hidden if self.step is None else self.step(hidden, self)))


def judged(step: Step | None, precision: str = "bf16", reference: Step | None = None, **options: Any) -> parity.Result:
    """Compare layers with this step."""

    @parity.pair("layers", sizes=[{}])
    def layers(te: Any) -> parity.Pair:
        plain, port = Layers(nn.Linear, reference), Layers(te.Linear, step)
        weights = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, inputs=lambda rng: rng.normal(ROWS, HIDDEN), weights=weights)

    (result,) = compare(layers, precisions=[precision], **options)
    return result


# Wrong ports.


def partly_written(x: Tensor, of: Any) -> Tensor:
    out = torch.empty_like(x)
    out[:-1] = x[:-1]
    return out


def added_to_unwritten(x: Tensor, of: Any) -> Tensor:
    return x.new_empty(x.shape).add_(x)


def dropped_tokens(x: Tensor, of: Any) -> Tensor:
    """Combine the tokens of a mixture, in which no expert had the first."""
    kept = torch.arange(1, len(x))
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).index_copy(0, kept, x[kept])


def made_larger(x: Tensor, of: Any) -> Tensor:
    return x + torch.zeros(0, dtype=x.dtype).resize_(x.numel()).view_as(x)


def unwritten_mask(x: Tensor, of: Any) -> Tensor:
    return x.masked_fill(torch.empty(x.shape, dtype=torch.bool), 0.0)


def unwritten_positions(x: Tensor, of: Any) -> Tensor:
    return x + torch.empty(len(x), 1, dtype=torch.long).to(x.dtype)


def larger_of_both(x: Tensor, of: Any) -> Tensor:
    """Take the larger number, and not NaN."""
    return torch.fmax(x, torch.empty_like(x))


def padding_rows(x: Tensor, of: Any) -> Tensor:
    """Pad tokens by rows whose results are cut off, but which a norm over all tokens reads."""
    padded = torch.cat((x, x.new_empty(8, HIDDEN)))
    return (padded + 0.0 * padded.mean(0))[: len(x)]


def rest_of_cache(x: Tensor, of: Any) -> Tensor:
    """Attend to a whole cache, whose empty slots have scores of minus infinity, and so weights of 0."""
    cache = x.new_empty(2 * len(x), HIDDEN)
    cache[: len(x)] = x
    return torch.eye(len(x), 2 * len(x), dtype=x.dtype).log().softmax(-1) @ cache


def workspace(x: Tensor, of: Any) -> Tensor:
    """Use what the module has allocated once, of which a call writes all rows but one."""
    of.workspace[1:] = 0.0
    return x + of.workspace.to(x.dtype)


class HalfABackward(torch.autograd.Function):
    """An identity whose backward pass leaves some rows as they were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        out = torch.empty_like(gradients[0])
        out[:-4] = gradients[0][:-4]
        return out


def half_a_backward(x: Tensor, of: Any) -> Tensor:
    return HalfABackward.apply(x)


def unwritten_sum(x: Tensor, of: Any) -> Tensor:
    """Give TE a buffer to which it adds a weight's gradient, and which nobody has cleared."""
    of.second.weight.main_grad = torch.empty(HIDDEN, HIDDEN)
    of.second.weight.grad_added_to_main_grad = False
    of.second.fuse_wgrad_accumulation = True
    return x


WRONG = (
    (partly_written, "in partly_written"),
    (added_to_unwritten, "in added_to_unwritten"),
    (dropped_tokens, "in dropped_tokens"),
    (made_larger, "in made_larger"),
    (unwritten_mask, "in unwritten_mask"),
    (unwritten_positions, "in unwritten_positions"),
    (larger_of_both, "in larger_of_both"),
    (padding_rows, "in padding_rows"),
    (rest_of_cache, "in rest_of_cache"),
    (workspace, "in __init__"),
    (half_a_backward, "in backward"),
    (unwritten_sum, "in unwritten_sum"),
)
PRECISIONS = itertools.cycle(("fp32", "bf16", "fp8_current"))


@pytest.mark.parametrize(
    ("step", "where", "precision"),
    [pytest.param(*row, precision, id=row[0].__name__) for row, precision in zip(WRONG, PRECISIONS, strict=False)],
)
def test_a_read_of_memory_that_nothing_has_written_is_told_with_the_line_that_allocated_it(step, where, precision):
    result = judged(step, precision)
    assert result.status == "failed"
    (finding,) = result.findings
    assert (finding.code, finding.title) == ("PAR276", "unwritten-memory")
    assert "test_unwritten.py:" in finding.message
    assert where in finding.message


# Ports that are not to blame.


def written_later(x: Tensor, of: Any) -> Tensor:
    out = torch.empty_like(x)
    return out.copy_(x)


def read_in_part(x: Tensor, of: Any) -> Tensor:
    longer = torch.empty(2 * len(x), HIDDEN, dtype=x.dtype)
    return x + 0.0 * longer.zero_()[: len(x)] + torch.where(x == x, 0.0, torch.empty_like(x))


@pytest.mark.parametrize("step", [None, written_later, read_in_part])
def test_memory_that_is_written_or_not_used_is_no_matter(step):
    assert judged(step).passed


def dropped(x: Tensor, of: Any) -> Tensor:
    return F.dropout(x, 0.2)


def test_a_port_that_draws_random_numbers_does_not_read_unwritten_memory():
    assert [one.title for one in judged(dropped).findings] == ["not-reproducible"]


def test_a_pass_that_differs_every_time_is_not_blamed_on_memory():
    calls = itertools.count()
    runs = unwritten_reads(
        lambda change: {("output", "output"): torch.empty(4).fill_(next(calls))},
        {("output", "output"): torch.full((4,), -1.0)},
        RandomState.now(CPU),
        CPU,
    )
    assert runs == ()


def test_it_is_not_looked_for_if_that_is_switched_off():
    titles = [one.title for one in judged(larger_of_both, unwritten=False).findings]
    assert "unwritten-memory" not in titles


# References that differ from themselves.


class NoisyBackward(torch.autograd.Function):
    """An identity with noise in its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1.0 + torch.rand_like(gradients[0]))


def noisy_backward(x: Tensor, of: Any) -> Tensor:
    return NoisyBackward.apply(x)


COUNT = itertools.count()


def counted(x: Tensor, of: Any) -> Tensor:
    return x * (1.0 + next(COUNT))


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            partly_written,
            "the reference reads memory that nothing has written (PAR276 unwritten-memory): if",
        ),
        (
            noisy_backward,
            "the reference draws random numbers (PAR253 not-reproducible): with other random",
        ),
        (counted, "the reference differs from itself (PAR253 not-reproducible): run twice, its output changes by"),
    ],
)
def test_before_a_port_is_blamed_a_reference_that_differs_from_itself_is_told(step, told):
    result = judged(lambda x, of: 2.0 * x, reference=step)
    assert result.status == "error"
    assert result.reason.startswith(told)
    assert ("in partly_written" in result.reason) == (step is partly_written)


def test_a_right_port_of_a_reference_whose_unused_memory_is_unwritten_passes():
    assert judged(None, reference=read_in_part).passed
