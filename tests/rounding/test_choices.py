"""Choices of the largest of many numbers: where the model makes a port's, and what that changes."""

import pytest
import torch
from torch import nn

import parity
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, Choices, choices_seen
from parity.numerics.rounding import rounded

FP32 = Rounding(torch.float32)
NOISE = 0.01


def chosen(scores, count=1, **choices):
    """Which numbers of each row are chosen, and which gradients they get."""
    scores = scores.clone().requires_grad_()
    with rounded(FP32, (), FUSED, choices=Choices(**choices)) as phase:
        values, places = torch.topk(scores, count, -1)
        phase.begin_backward()
        values.sum().backward()
    torch.testing.assert_close(values, scores.gather(-1, places))
    assert torch.equal(scores.grad, torch.zeros_like(scores).scatter(-1, places, 1.0))
    return places.tolist()


def rows(*first):
    """Scores whose errors are of the size of ``NOISE``, those asked for on top."""
    torch.manual_seed(0)
    scores = torch.cat([torch.tensor(first), 1.0 + torch.rand(64, len(first[0]))])
    return scores, scores + NOISE * torch.randn_like(scores)


def test_the_model_chooses_as_the_port_did_where_numbers_are_nearer_than_their_errors():
    scores, exact = rows([1.0, 0.99, 0.2], [1.0, 0.2, 0.99])
    made = scores.topk(1).indices
    made[:2] = torch.tensor([[1], [2]])
    assert chosen(scores, made=[made], exact=[exact])[:2] == [[1], [2]]


def test_a_choice_that_rounding_does_not_explain_is_not_followed():
    scores, exact = rows([1.0, 0.5, 0.2], [1.0, 0.2, 0.9])
    made = scores.topk(1).indices
    made[:2] = torch.tensor([[1], [2]])
    assert chosen(scores, made=[made], exact=[exact])[:2] == [[0], [0]]


def test_of_several_that_are_chosen_each_must_be_near():
    scores, exact = rows([1.0, 0.99, 0.98, 0.1], [1.0, 0.99, 0.98, 0.1])
    made = scores.topk(2).indices
    made[0], made[1] = torch.tensor([2, 0]), torch.tensor([2, 3])
    assert [sorted(row) for row in chosen(scores, 2, made=[made], exact=[exact])[:2]] == [[0, 2], [0, 1]]


@pytest.mark.parametrize("made", [torch.zeros(66, 2, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)])
def test_a_port_that_chooses_otherwise_many_or_of_other_rows_is_not_followed(made):
    scores, exact = rows([1.0, 0.99, 0.2], [1.0, 0.2, 0.99])
    assert chosen(scores, made=[made], exact=[exact]) == scores.topk(1).indices.tolist()


def test_numbers_that_are_hidden_are_never_chosen():
    scores, exact = rows([1.0, 0.99, -torch.inf], [1.0, -torch.inf, -torch.inf])
    made = scores.topk(1).indices
    made[:2] = torch.tensor([[1], [2]])
    assert chosen(scores, made=[made], exact=[exact])[:2] == [[1], [0]]


def test_a_ports_choices_are_those_of_its_last_pass_with_gradients_and_of_the_probing_one_after_it():
    scores = [torch.rand(4, 3, requires_grad=True) for _ in range(3)]
    with choices_seen() as seen:
        for x in scores[:2]:
            x.topk(2).values.sum().backward()
        with torch.no_grad():
            scores[2].topk(2)
    made = seen.of_port(probed=True)
    for kept, x in zip((made.compared, made.probed), scores[1:], strict=True):
        assert [places.tolist() for places in kept] == [x.topk(2).indices.tolist()]


class Mixture(nn.Module):
    """A token goes to the two likeliest of eight experts."""

    def __init__(self, linear, norm_topk=False):
        super().__init__()
        self.before, self.router = linear(64, 64), nn.Linear(64, 8, bias=False)
        self.experts = nn.ModuleList(linear(64, 64) for _ in range(8))
        self.norm_topk = norm_topk

    def forward(self, x):
        x = x + torch.tanh(self.before(x))
        weights, places = torch.topk(self.router(x).softmax(-1), 2, -1)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = outputs.gather(-2, places[..., None].expand(*places.shape, 64))
        return (picked * weights[..., None]).sum(-2)


def mixture(**wrong):
    def factory(te, **_):
        def linear(width_in, width_out, module=nn.Linear):
            return module(width_in, width_out, bias=False)

        reference = Mixture(linear)
        return parity.Pair(
            reference,
            Mixture(lambda *widths: linear(*widths, module=te.Linear), **wrong),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
        )

    return parity.Case("mixture", factory, sizes=(dict(batch=4, seq=128),))


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_right_mixtures_pass_on_every_seed_though_some_tokens_go_to_other_experts(precision):
    results = parity.compare(mixture(), [precision], seeds=range(6))
    assert [result.status for result in results] == ["passed"] * 6


def test_a_mistake_in_a_mixture_is_found_all_the_same():
    (result,) = parity.compare(mixture(norm_topk=True), ["bf16"])
    assert [finding.title for finding in result.findings][:1] == ["routing-weights"]


class RoutedInFp32(nn.Module):
    """As routers should be: no token of a right port goes to another expert than in FP64."""

    def __init__(self, linear, weighed_by=1.0):
        super().__init__()
        self.router = nn.Linear(64, 8, bias=False)
        self.experts = nn.ModuleList(linear(64, 64) for _ in range(8))
        self.weighed_by = weighed_by

    def forward(self, x):
        scores = nn.functional.linear(x.float(), self.router.weight.float()).softmax(-1)
        weights, places = scores.topk(2, -1)
        share = torch.zeros_like(scores).scatter(-1, places, weights * self.weighed_by).to(x.dtype)
        return sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


@pytest.mark.parametrize(("weighed_by", "status"), [(1.0, "passed"), (1.03, "failed")])
def test_what_other_experts_cost_is_not_expected_of_a_port_that_chooses_the_right_ones(weighed_by, status):
    def factory(te, **_):
        reference = RoutedInFp32(lambda *widths: nn.Linear(*widths, bias=False))
        return parity.Pair(
            reference,
            RoutedInFp32(lambda *widths: te.Linear(*widths, bias=False), weighed_by),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
        )

    results = parity.compare(parity.Case("mixture", factory, sizes=(dict(batch=2, seq=64),)), ["bf16"], seeds=range(4))
    (output,) = zip(*(result.tensors[:1] for result in results), strict=True)
    assert [result.status for result in results] == [status] * 4
    assert max(tensor.expected.relative_l2 for tensor in output) < 0.01
