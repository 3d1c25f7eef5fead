"""A port that reads the padding of its inputs fails, though that is 0 and all numbers are right; others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from lab.corpus.catalogue import RIGHT
from lab.corpus.small_ports.padding import ROWS_COMPARED
from parity import comparison, te
from parity.api import compare
from parity.case.case import Case
from parity.case.validate import check_case
from parity.passes.padding import Padding, find_padding
from parity.passes.prepare import prepare

WIDTH, SEQ, IDS = 32, 16, 50
LENGTHS = torch.tensor([16, 7, 9, 12])
TOKENS = torch.arange(SEQ) < LENGTHS[:, None]


class Masked(torch.autograd.Function):
    """Hide padding in the forward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        return x * tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Pooled(nn.Module):
    """Tokens that are looked up, mixed, normed, sent to two experts and pooled; each step may read padding."""

    def __init__(self, linear: Any, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        table = torch.randn(IDS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.register_buffer("table", table.index_fill(0, torch.tensor([0]), 0.0))
        self.qkv, self.experts, self.out = (linear(WIDTH, n * WIDTH, bias=False) for n in (3, 2, 1))
        self.router = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        x = self.table[ids]
        counts = tokens[..., None].to(x.dtype)

        def seen(what: str) -> Tensor:
            return torch.ones_like(counts) if what == self.reads else counts

        query, key, value = self.qkv(x).chunk(3, -1)
        x = x + query @ ((key * seen("attention")).mT @ value) / SEQ
        size = (x.float().square() * seen("norm")).sum((0, 1), keepdim=True) / counts.sum()
        x = (x * (size + 0.1).rsqrt()).to(x.dtype)
        load = (self.router(x).square() * seen("router")).sum((0, 1)) / counts.sum()
        weights = (self.router(x) - load).softmax(-1)[..., None]
        x = x + (self.experts(x).unflatten(-1, (2, WIDTH)) * weights).sum(-2)
        inner = self.out(x)
        inner = Masked.apply(inner, counts) if self.reads == "gradient" else inner * counts
        return (x * seen("mean") + inner).sum(1) / counts.sum(1)


def pair_of(reads: str = "") -> Case:
    @parity.pair("pooled", probe=False)
    def pooled(te: Any) -> parity.Pair:
        plain, port = Pooled(nn.Linear), Pooled(te.Linear, reads)
        weights = {name: name for name, _ in plain.named_parameters()}

        def inputs(rng: parity.Rng) -> tuple[Tensor, Tensor]:
            return rng.integers(4, SEQ, low=1, high=IDS) * TOKENS, TOKENS

        return parity.Pair(plain, port, inputs=inputs, weights=weights)

    return pooled


@pytest.mark.parametrize("reads", ["attention", "norm", "router", "mean", "gradient"])
def test_a_port_that_reads_padding_of_zeros_is_right_by_its_numbers_and_fails(reads: str) -> None:
    (before,) = compare(pair_of(reads), ["bf16"], unwritten=False)
    assert before.passed
    (result,) = compare(pair_of(reads), ["bf16"])
    assert result.status == "failed"
    (found,) = result.findings
    assert (found.code, found.title) == ("PAR275", "not-invariant")
    assert "with garbage in the tokens that the input tokens marks as padding" in found.message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current", "fp8_block"])
def test_a_port_that_does_not_read_padding_passes_also_where_a_scale_couples_tokens(precision: str) -> None:
    (result,) = compare(pair_of(), [precision])
    assert result.passed, result


class Experts(nn.Module):
    """The likelier of two experts for each token, which computes as many rows as come to it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.router, self.first, self.second = nn.Linear(WIDTH, 2), linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        weights = self.router(x).softmax(-1)
        best, y = weights.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate((self.first, self.second)):
            (rows,) = (best == i).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
        return y.view(*tokens.shape, WIDTH) * tokens[..., None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_port_whose_experts_get_other_padding_passes(precision: str) -> None:
    @parity.pair("experts", probe=False)
    def experts(te: Any) -> parity.Pair:
        plain = Experts(nn.Linear)
        weights = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, Experts(te.Linear), lambda rng: (rng.normal(4, SEQ, WIDTH), TOKENS), weights)

    assert padding_of(experts) is not None
    (result,) = compare(experts, [precision])
    assert result.passed, result


def pair_with_padding_in_its_outputs() -> Case:
    @parity.pair("with_padding_in_its_outputs")
    def linear(te: Any) -> parity.Pair:
        def call(module: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
            return module(x)

        modules = nn.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
        options = dict(weights={"weight": "weight", "bias": "bias"}, call_reference=call, call_candidate=call)
        return parity.Pair(*modules, lambda rng: (rng.normal(4, SEQ, WIDTH), TOKENS), **options)

    return linear


@pytest.mark.parametrize("made", [pair_of, pair_with_padding_in_its_outputs])
def test_it_takes_no_run_beside_the_one_whose_memory_is_full_of_nan(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Case]
) -> None:
    case, runs = made(), list[Any]()
    ran_again = comparison.run_again

    def noted(*given: Any, **options: Any) -> Any:
        runs.append(given)
        return ran_again(*given, **options)

    monkeypatch.setattr(comparison, "run_again", noted)
    assert padding_of(case) is not None
    assert compare(case, ["bf16"])[0].passed
    assert len(runs) == 1


def test_a_port_that_raises_on_other_values_in_padding_fails() -> None:
    class Strict(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if bool(x.abs().max() > 20.0):
                raise ValueError("too large")
            return super().forward(x)

    @parity.pair("strict", probe=False)
    def strict(te: Any) -> parity.Pair:
        return parity.Pair(
            nn.Linear(WIDTH, WIDTH),
            Strict(WIDTH, WIDTH),
            inputs=lambda rng: dict(input=rng.normal(4, SEQ, WIDTH), tokens=TOKENS),
            weights={"weight": "weight", "bias": "bias"},
            call_reference=lambda module, input, tokens: module(input) * tokens[..., None],
            call_candidate=lambda module, input, tokens: module(input) * tokens[..., None],
        )

    (result,) = compare(strict, ["fp32"])
    assert "the candidate raises ValueError: too large" in result.findings[0].message


# What marks padding, and what the reference says of it.


def padding_of(case: Case) -> Padding | None:
    kernels = te.kernels("cpu")
    checked, *_ = check_case(case, kernels.te)
    return find_padding(prepare(case, checked, torch.float32, 0, kernels))


@pytest.mark.parametrize("host", ROWS_COMPARED, ids=lambda host: host.name)
def test_a_mask_a_bias_and_lengths_mark_padding(host: Any) -> None:
    found = padding_of(host.case())
    assert found is not None
    assert found.mark == "mask"
    rows = found.kept["output", "output"].all(-1)
    assert (rows if rows.shape == (3, 32) else rows.T).sum(1).tolist() == [32, 20, 25]


def of_module(call: Callable[..., Tensor], *inputs: Tensor) -> Case:
    """Return a pair of linear layers, called with these inputs."""

    @parity.pair("called", probe=False)
    def called(te: Any) -> parity.Pair:
        torch.manual_seed(0)
        modules = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
        return parity.Pair(*modules, lambda rng: inputs, {"weight": "weight"}, call_reference=call, call_candidate=call)

    return called


def test_room_between_packed_documents_is_padding() -> None:
    ids = torch.tensor([1, 2, 3, 0, 4, 5, 0, 0, 0])
    given = ids, torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)

    def call(module: nn.Module, ids: Tensor, borders: Tensor, padded: Tensor) -> Tensor:
        rows = [torch.arange(int(n)) + start for n, start in zip(borders.diff(), padded, strict=False)]
        return module(ids)[torch.cat(rows)]

    found = padding_of(of_module(call, *given))
    assert found is not None
    assert found.mark == "borders"
    other, *_ = found.inputs
    assert (other == ids).nonzero().flatten().tolist()[:3] == [0, 1, 2]
    assert torch.equal(other[4:6], ids[4:6])
    assert not torch.equal(other, ids)
    assert {*other.tolist()} <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("reads", [True, False])
def test_labels_that_no_loss_counts_stay_and_what_a_reference_reads_is_no_padding(reads: bool) -> None:
    labels = torch.randint(0, WIDTH, (4, SEQ)).masked_fill(~TOKENS, -100)

    def call(module: nn.Module, ids: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
        hidden = module(ids) if not reads else module(ids).cumsum(1).flip(1)
        return F.cross_entropy(hidden.flatten(0, 1), labels.flatten())

    found = padding_of(of_module(call, torch.randint(1, 9, (4, SEQ)) * TOKENS, labels, TOKENS))
    assert (found is None) == reads
    if found is not None:
        assert torch.equal(found.inputs[1], labels)
        assert not torch.equal(found.inputs[0], found.inputs[0] * TOKENS)


def test_inputs_without_padding_have_none() -> None:
    assert padding_of(RIGHT["causal_attention"]) is None
