"""Test the freedom of faithful kernels: beside kinks, at ties, and in choices of a GPU's kernels."""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity import te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.cases import attention, layer, linear, mlp
from parity.comparison import judge_at
from parity.judge.limits import packaged
from parity.measuring.hosts import HOSTS
from parity.numerics import kernel_choices as choices_of_gpus
from parity.numerics.formats import Rounding, e4m3, tf32, tf32_truncated
from parity.numerics.freedom import FUSED, WIDTH, Choices, KinkSides, choices_seen
from parity.numerics.kernel_choices import (
    CHOICES,
    as_read,
    biased_kernels,
    in_stored_parts,
    lost_in_sums,
    may_split_k,
    noisy_sums,
)
from parity.numerics.rounding import rounded
from parity.passes.all_passes import jittered
from parity.report import environment
from parity.te import PRECISIONS
from te_on_cpu import cuda, tensor_cores
from te_on_cpu import kernel_choices as names
from te_on_cpu.kernel_choices import NAMES, VARIABLE, kernel_choices

# Values beside kinks: where they are moved, and what that changes.


NOISE = 0.01
FP32 = Rounding(torch.float32)


def gradients(function, x, kinks):
    moved = x.clone().requires_grad_()
    with rounded(FP32, (), FUSED, kinks=kinks) as phase:
        y = function(moved)
        phase.begin_backward()
        y.sum().backward()
    return y.detach(), moved.grad


FUNCTIONS = {
    "relu": (F.relu, [0.0]),
    "relu_in_place": (lambda x: F.relu_(1.0 * x), [0.0]),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.0), [0.5]),
    "leaky_relu": (F.leaky_relu, [0.0]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [-0.5, 0.5]),
    "clamp_to_tensors": (lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(0.5)), [-0.5, 0.5]),
    "hardtanh": (F.hardtanh, [-1.0, 1.0]),
    "relu6": (F.relu6, [0.0, 6.0]),
    "hardswish": (F.hardswish, [-3.0, 3.0]),
    "hardsigmoid": (F.hardsigmoid, [-3.0, 3.0]),
    "softshrink": (lambda x: F.softshrink(x, 0.5), [-0.5, 0.5]),
    "abs": (torch.abs, [0.0]),
    "maximum": (lambda x: torch.maximum(x, 0.25 - x), [0.125]),
    "minimum": (lambda x: torch.minimum(x, 0.25 - x), [0.125]),
    "where": (lambda x: torch.where(x > 0.5, x, 0.1 * x + 0.45), [0.5]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_value_nearer_to_a_kink_than_its_error_has_the_gradient_of_the_other_side(name, side):
    function, kinks = FUNCTIONS[name]
    offsets = torch.tensor([-0.4, -0.02, 0.02, 0.4]) * 0.5
    x = (torch.tensor(kinks)[:, None] + offsets).flatten()
    noted = KinkSides()
    gradients(function, x - NOISE, noted)
    _, moved = gradients(function, x, KinkSides(side, noted.values))
    _, beyond = gradients(function, x + side * 0.02, None)
    torch.testing.assert_close(moved, beyond, atol=0.02, rtol=0.0)
    _, still = gradients(function, x, None)
    assert ((moved - still).abs() > 0.05).sum() == len(kinks)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "where"])
def test_what_a_function_returns_stays_where_it_is(name):
    function, kinks = FUNCTIONS[name]
    x = torch.tensor(kinks) + 1e-3
    noted = KinkSides()
    gradients(function, x - NOISE, noted)
    assert torch.equal(gradients(function, x, KinkSides(1.0, noted.values))[0], function(x))


@pytest.mark.parametrize("function", [lambda x: x.amax(1), lambda x: x.max(1).values, lambda x: x.amax(1, True)])
def test_the_next_to_the_largest_is_chosen_where_it_is_as_near(function):
    x = torch.tensor([[1.0, 0.98, 0.5], [1.0, 0.5, 0.4]])
    noted = KinkSides()
    gradients(function, x - NOISE, noted)
    y, moved = gradients(function, x, KinkSides(1.0, noted.values))
    assert moved.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(y.flatten(), torch.tensor([0.98, 1.0]))


def test_numbers_that_are_larger_than_most_may_be_farther_off():
    """The largest of many numbers may be: here they are ten times as large as usual, and so are their errors."""
    x = torch.cat([torch.ones(2, 998), torch.tensor([[10.2, 10.0], [1.2, 1.0]])], 1)
    noted = KinkSides()
    gradients(lambda x: x.amax(1), x - NOISE, noted)
    _, moved = gradients(lambda x: x.amax(1), x, KinkSides(1.0, noted.values))
    assert moved[:, -2:].tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_the_largest_of_truths_is_left_alone():
    x = torch.tensor([[1.0, -1.0]])

    def function(x):
        return x * (x > 0).amax(1, keepdim=True)

    noted = KinkSides()
    gradients(function, x - NOISE, noted)
    assert torch.equal(gradients(function, x, KinkSides(1.0, noted.values))[0], x)


def test_each_call_has_the_error_that_is_measured_there():
    """Both tensors are 0.02 below 0, a coarse one and a fine one; only values of the coarse one may be above."""
    x = torch.full((2, 64), -0.02)

    def function(x):
        coarse, fine = x.unbind(0)
        return F.relu(coarse) + F.relu(fine)

    noted = KinkSides()
    gradients(function, x + torch.tensor([[NOISE], [1e-4]]), noted)
    _, moved = gradients(function, x, KinkSides(1.0, noted.values))
    assert 1e-4 * WIDTH < 0.02 < NOISE * WIDTH
    assert moved.tolist() == [[1.0] * 64, [0.0] * 64]


class Kinked(nn.Module):
    """Two linear layers with a kinked function after each."""

    def __init__(self, linear, function):
        super().__init__()
        self.first, self.second, self.function = linear(128, 256), linear(256, 128), function

    def forward(self, x):
        return self.function(self.second(self.function(self.first(x))))


def kinked(function, scale=1.0):
    def factory(te, **_):
        reference = Kinked(nn.Linear, function)
        return parity.Pair(
            reference,
            Kinked(te.Linear, function),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 64, 128),
            call_candidate=lambda module, x: scale * module(x),
        )

    return parity.Case("kinked", factory, sizes=(dict(batch=4),))


@pytest.mark.parametrize("name", ["clamp", "hardtanh", "hardswish", "softshrink", "abs", "maximum"])
def test_right_ports_with_kinks_pass(name):
    results = parity.compare(kinked(FUNCTIONS[name][0]), ["fp32", "bf16", "fp16"], seeds=range(2))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("name", ["clamp", "abs"])
def test_a_wrong_factor_is_told_in_spite_of_kinks(name):
    (result,) = parity.compare(kinked(FUNCTIONS[name][0], scale=1.001), ["fp16"], diagnose=False)
    assert result.status == "failed"


def test_another_bound_of_a_clamp_is_told():
    def factory(te, **_):
        modules = [Kinked(kind, lambda x, b=b: x.clamp(-b, b)) for kind, b in ((nn.Linear, 0.5), (te.Linear, 0.501))]
        return parity.Pair(
            *modules,
            weights={name: name for name, _ in modules[0].named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 64, 128),
        )

    (result,) = parity.compare(parity.Case("clamped", factory, sizes=(dict(batch=4),)), ["fp16"], diagnose=False)
    assert result.status == "failed"


# Choices, which rounding may decide: where the model follows the port's choice, and what that changes.


def in_model(function, x, made=(), exact=()):
    """Return what the model computes, and what it would choose by itself."""
    choices = Choices(made, exact)
    with rounded(FP32, (), FUSED, choices=choices):
        return function(x.clone()), choices.own


def followed(function, x, exact, ported, by_port=None):
    """Return what the model computes of numbers with an error if the port computes ``by_port`` of other numbers."""
    _, unrounded = in_model(function, exact)
    with choices_seen(unrounded) as made:
        (by_port or function)(ported.clone())
    return in_model(function, x, made, unrounded)[0]


def with_errors(x, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return x + 0.1 * NOISE * torch.randn(x.shape, generator=generator)


SEGMENTS = torch.linspace(-2.0, 2.0, 9)
# Ways to choose, and wrong ones of which the port's choice looks the same but is another.
CHOOSING = {
    "max": (lambda x: x.max(-1).indices, lambda x: x.min(-1).indices),
    "max along the first dimension": (lambda x: x.max(0, keepdim=True).indices, lambda x: x.min(0).indices),
    "min": (lambda x: x.min(1)[1], lambda x: x.max(1)[1]),
    "argmax": (lambda x: x.argmax(1), lambda x: x.argmin(1)),
    "argmax of all": (lambda x: x.argmax(), lambda x: x.argmin()),
    "argmin": (lambda x: x.argmin(1), lambda x: x.argmax(1)),
    "topk": (lambda x: x.topk(3).indices, lambda x: x.topk(3, largest=False).indices),
    "topk along tokens": (lambda x: x.topk(8, 0).indices, lambda x: x.topk(8, 0, False).indices),
    "sort": (lambda x: x.sort(0).indices, lambda x: x.sort(0, True).indices),
    "argsort": (lambda x: x.argsort(descending=True), lambda x: x.argsort()),
    "kthvalue": (lambda x: x.kthvalue(3).indices, lambda x: x.kthvalue(4).indices),
    "median": (lambda x: x.median(1).indices, lambda x: x.kthvalue(6).indices),
    "cummax": (lambda x: x.cummax(1).indices, lambda x: x.cummin(1).indices),
    "greater": (lambda x: x > 0.5, lambda x: x > 0.7),
    "less or equal": (lambda x: x <= 0.5, lambda x: x < 0.3),
    "compared with each other": (lambda x: x[:, :4] >= x[:, 4:], lambda x: x[:, :4] <= x[:, 4:]),
    "equal to the largest": (lambda x: x == x.amax(1, keepdim=True), lambda x: x == x.amin(1, keepdim=True)),
    "sign bit": (torch.signbit, lambda x: torch.signbit(x - 0.2)),
    "where": (lambda x: torch.where(x > 0.5, 1, 0), lambda x: torch.where(x > 0.7, 1, 0)),
    "floor": (torch.floor, torch.ceil),
    "ceil": (lambda x: (4.0 * x).ceil(), lambda x: (4.0 * x).floor()),
    "round": (torch.round, lambda x: torch.round(x + 0.2)),
    "trunc": (torch.trunc, torch.floor),
    "in place": (lambda x: (2.0 * x).floor_(), lambda x: (2.0 * x).ceil_()),
    "to an integer": (lambda x: x.long(), lambda x: x.floor().long()),
    "floor division": (lambda x: x // 0.5, lambda x: (x - 0.1) // 0.5),
    "division that rounds": (
        lambda x: torch.div(x, 0.5, rounding_mode="floor"),
        lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
    ),
    "bucketize": (lambda x: torch.bucketize(x, SEGMENTS), lambda x: torch.bucketize(x + 0.2, SEGMENTS)),
    "searchsorted": (lambda x: torch.searchsorted(SEGMENTS, x), lambda x: torch.searchsorted(SEGMENTS - 0.2, x)),
    "sign": (torch.sign, lambda x: torch.sign(x - 0.2)),
    "heaviside": (lambda x: torch.heaviside(x, x.new_zeros(1)), lambda x: torch.heaviside(x - 0.2, x.new_zeros(1))),
    "hardshrink": (lambda x: F.hardshrink(x, 0.5) != 0, lambda x: F.hardshrink(x, 0.7) != 0),
    "threshold": (lambda x: F.threshold(x, 0.5, -9.0) == -9.0, lambda x: F.threshold(x, 0.7, -9.0) == -9.0),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_the_model_chooses_as_the_port_did_where_numbers_are_nearer_than_their_errors(name):
    function, _ = CHOOSING[name]
    x = torch.rand(2048, 8, generator=torch.Generator().manual_seed(1)) * 4.0 - 2.0
    model, ported = with_errors(x, 2), with_errors(x, 3)
    assert name == "argmax of all" or not torch.equal(function(model), function(ported))
    assert torch.equal(followed(function, model, x, ported), function(ported))


@pytest.mark.parametrize("name", CHOOSING)
def test_a_choice_that_rounding_does_not_explain_is_not_followed(name):
    function, wrong = CHOOSING[name]
    x = torch.rand(2048, 8, generator=torch.Generator().manual_seed(1)) * 4.0 - 2.0
    right = function(x)
    missed = (function(x).view(right.shape) != wrong(x).view(right.shape)).float().mean()
    after = (followed(function, with_errors(x, 2), x, with_errors(x, 3), wrong) != wrong(x).view(right.shape)).float()
    assert after.mean() > 0.8 * missed > 0.0


@pytest.mark.parametrize("name", CHOOSING)
def test_no_rounding_explains_a_choice_between_numbers_that_it_has_not_changed(name):
    """Positions, counts and masks are whole, and all runs hold them exactly."""
    function, _ = CHOOSING[name]
    x = torch.randint(-16, 16, (512, 8), generator=torch.Generator().manual_seed(1)) / 8.0
    own = function(x)
    if own.dtype is not torch.int64 or own.shape == x.shape:  # of equal numbers, either may be chosen
        assert torch.equal(followed(function, x, x, x + torch.where(x == 0.5, -0.125, 0.125)), own)


def test_the_numbers_that_a_choice_returns_are_the_models_and_get_its_gradients():
    x = torch.rand(512, 8, generator=torch.Generator().manual_seed(1))
    ported = with_errors(x)

    def both(x):
        return x.topk(2)

    _, unrounded = in_model(both, x)
    with choices_seen(unrounded) as made:
        both(ported)
    leaf = with_errors(x, 2).requires_grad_()
    with rounded(FP32, (), FUSED, choices=Choices(made, unrounded)) as phase:
        values, places = both(leaf)
        phase.begin_backward()
        values.sum().backward()
    assert torch.equal(places, ported.topk(2).indices)
    torch.testing.assert_close(values, leaf.gather(1, places))
    assert torch.equal(leaf.grad, torch.zeros_like(leaf).scatter(1, places, 1.0))


def test_a_choice_that_the_port_makes_in_another_place_or_not_at_all_is_passed_over():
    x = torch.rand(512, 8, generator=torch.Generator().manual_seed(1))
    model, ported = with_errors(x, 2), with_errors(x, 3)

    def function(x):
        return torch.cat([x.topk(2).indices, x.argmax(-1, keepdim=True), (-x).argmax(-1, keepdim=True)], 1)

    def other(x):
        return x.topk(3).indices, (-x).argmax(-1), x.argmax(-1)

    after = followed(function, model, x, ported, other)
    assert torch.equal(after[:, :2], model.topk(2).indices)
    assert torch.equal(after[:, 2:], function(ported)[:, 2:])


def test_numbers_that_are_hidden_are_never_chosen():
    x = torch.rand(64, 3, generator=torch.Generator().manual_seed(1))
    x[0, 1] = -torch.inf
    ported = x.clone()
    ported[0] = torch.tensor([0.0, 1.0, 0.0])
    own = with_errors(x)
    assert torch.equal(followed(lambda x: x.argmax(-1), own, x, ported)[0], own.argmax(-1)[0])


@pytest.mark.parametrize("differ", [False, True])
def test_of_a_ports_passes_the_latest_is_followed_that_is_about_the_same_numbers(differ):
    """A port may settle its scales in earlier passes, and probing inputs may follow."""
    x, others = (torch.rand(512, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    settling, ported, model = (with_errors(x, seed) for seed in (3, 4, 5))

    def passes(_):
        for one in (settling, ported, *([others] if differ else [])):
            one.argmax(-1)

    assert torch.equal(followed(lambda x: x.argmax(-1), model, x, x, passes), ported.argmax(-1))


class Mixture(nn.Module):
    """A mixture that sends each token to the two likeliest of eight experts."""

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


class Choosing(nn.Module):
    """A module whose results hang on choices by numbers that it computes."""

    def __init__(self, linear, share):
        super().__init__()
        self.before, self.after, self.router = linear(64, 64), linear(64, 64), nn.Linear(64, 8, bias=False)
        self.experts, self.share = nn.ModuleList(linear(64, 64) for _ in range(8)), share

    def forward(self, x):
        x = x + torch.tanh(self.before(x))
        share = self.share(self.router(x))
        return self.after(x) + sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def share_of_best(scores):
    best, place = scores.max(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, place, best.sigmoid())


def share_of_best_tokens(scores):
    best, places = scores.topk(48, 1)
    return torch.zeros_like(scores).scatter(1, places, best)


# Ways to share tokens among experts, and wrong ones.
SHARES = {
    "max": (share_of_best, lambda scores: share_of_best(-scores)),
    "tokens": (share_of_best_tokens, lambda scores: torch.zeros_like(scores).scatter(1, *reversed(scores.topk(52, 1)))),
    "threshold": (lambda scores: scores * (scores.sigmoid() > 0.5), lambda scores: scores * (scores.sigmoid() > 0.52)),
    "branch": (
        lambda scores: torch.stack([one if one.mean() > 0.0 else -one for one in scores]),
        lambda scores: torch.stack([one if one.mean() < 0.0 else -one for one in scores]),
    ),
    "largest": (
        lambda scores: scores * (scores == scores.amax(-1, keepdim=True)),
        lambda scores: scores * (scores > scores.amax(-1, keepdim=True)),
    ),
    "at least the second": (
        lambda scores: scores * (scores >= scores.topk(2).values[..., 1:]),
        lambda scores: scores * (scores > scores.topk(2).values[..., 1:]),
    ),
    "round": (lambda scores: torch.round(4.0 * scores) / 4.0, lambda scores: torch.round(4.0 * scores + 0.05) / 4.0),
    "bucket": (
        lambda scores: torch.bucketize(scores, SEGMENTS).to(scores.dtype),
        lambda scores: torch.bucketize(scores, SEGMENTS, right=True).to(scores.dtype) - (scores > 0.5).to(scores.dtype),
    ),
}


def choosing(share, by_port):
    def factory(te, **_):
        reference = Choosing(lambda *widths: nn.Linear(*widths, bias=False), share)
        return parity.Pair(
            reference,
            Choosing(lambda *widths: te.Linear(*widths, bias=False), by_port),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
        )

    return parity.Case("choosing", factory, sizes=(dict(batch=2, seq=64),))


@pytest.mark.parametrize("name", SHARES)
def test_right_ports_pass_whose_results_hang_on_choices(name):
    results = parity.compare(choosing(SHARES[name][0], SHARES[name][0]), ["bf16"], seeds=range(2), diagnose=False)
    assert [result.status for result in results] == ["passed"] * 2


@pytest.mark.parametrize("name", SHARES)
def test_wrong_choices_fail(name):
    (result,) = parity.compare(choosing(*SHARES[name]), ["bf16"], diagnose=False)
    assert result.status == "failed"


class Scaled(nn.Module):
    """A factor that grows every eighth token, as one of Llama 4's attention does."""

    def __init__(self, linear, first=1):
        super().__init__()
        self.before, self.after, self.first = linear(64, 64), linear(64, 64), first

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=x.dtype)
        factor = 1.0 + 0.01 * torch.floor((positions + self.first) / 8)
        return self.after(((self.before(x) + 1.0) / 2) * factor[:, None])


@pytest.mark.parametrize(("first", "status"), [(1, "passed"), (0, "failed")])
def test_no_jitter_moves_a_position(first, status):
    def factory(te, **_):
        reference = Scaled(nn.Linear)
        return parity.Pair(
            reference,
            Scaled(te.Linear, first),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
        )

    case = parity.Case("scaled", factory, sizes=(dict(batch=2, seq=64),))
    results = parity.compare(case, ["fp32"], seeds=range(2), diagnose=False)
    assert [result.status for result in results] == [status] * 2


class RoutedInFp32(nn.Module):
    """A mixture with its router in FP32, so that no token of a correct port goes to another expert than in FP64."""

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

    case = parity.Case("mixture", factory, sizes=(dict(batch=2, seq=64),))
    results = parity.compare(case, ["bf16"], seeds=range(4), diagnose=False)
    (output,) = zip(*(result.tensors[:1] for result in results), strict=True)
    assert [result.status for result in results] == [status] * 4
    assert max(tensor.expected.relative_l2 for tensor in output) < 0.01


# The noise of the inputs in a jittered pass.


IN_FP32, JITTER = Rounding(torch.float32), dataclasses.replace(FUSED, jitter=1)


def test_numbers_move_by_up_to_two_roundoffs_of_fp32():
    x = torch.randn(256, 64)
    moved = (jittered({"x": x}, IN_FP32, JITTER)["x"] / x - 1.0).abs()
    assert 0.0 < moved.mean() < moved.max() <= 2.0 * torch.finfo(torch.float32).eps


def test_whole_numbers_flags_and_infinities_stay():
    kept = torch.tensor([0.0, 1.0, -3.0, float("-inf")]), torch.arange(4), torch.tensor([True, False])
    for left, right in zip(jittered(kept, IN_FP32, JITTER), kept, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("rounding", "freedom"), [(IN_FP32, FUSED), (Rounding(torch.bfloat16), JITTER)])
def test_inputs_stay_in_other_passes(rounding, freedom):
    x = torch.randn(8)
    assert jittered(x, rounding, freedom) is x


# The rounding model of GEMM kernels agrees with the CPU kernels' emulation, which is independent code.


def matrices(inner: int, mean: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inner)
    left, right = (torch.randn(48, inner, generator=generator) + mean for _ in range(2))
    return e4m3(left), e4m3(right)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("inner", "mean"), [(1024, 3.0), (4096, 1.0), (1000, 2.0)])
def test_lost_in_sums_is_what_tensor_cores_lose(inner, mean, backward):
    left, right = matrices(inner, mean)
    codes = [(x * (448.0 / x.abs().max())).to(torch.float8_e4m3fn).float() for x in (left, right)]
    factors = [tensor_cores.Factor(x, torch.float8_e4m3fn) for x in codes]
    summed = tensor_cores.product(tensor_cores.HOPPER, factors[1], factors[0], split=backward)
    scale = (left.abs().max() / 448.0) * (right.abs().max() / 448.0)
    expected = (codes[0].double() @ codes[1].double().t() - summed.double()) * scale
    lost = lost_in_sums(left, right.t(), (names.FP8_14_BIT,), backward, torch.bfloat16)
    assert lost is not None
    torch.testing.assert_close(lost.double(), expected, rtol=0.02, atol=1e-4 * expected.abs().max().item())


def test_terms_of_both_signs_lose_next_to_nothing():
    left, right = matrices(1024, 0.0)
    assert lost_in_sums(left, right.t(), (names.FP8_14_BIT,), False, torch.bfloat16) is None


def test_kernels_of_fp32_sums_lose_nothing():
    left, right = matrices(1024, 3.0)
    assert lost_in_sums(left, right.t(), (names.TF32_TRUNCATED,), False, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lost_in_sums_is_what_is_cut_to_fp32(dtype):
    left, right = (torch.randn(48, 8192, generator=torch.Generator().manual_seed(seed)) + 3.0 for seed in (0, 1))
    left, right = (tf32(x) if dtype is torch.float32 else x.half().float() for x in (left, right))
    summed = tensor_cores.cut_product(right.to(dtype), left.to(dtype))
    exact = left.double() @ right.double().t()
    lost = lost_in_sums(left, right.t(), (names.SUMS_25_BIT,), False, dtype)
    assert lost is not None
    torch.testing.assert_close(lost.double(), exact - summed.double(), rtol=1e-6, atol=0)
    assert (lost > 1e-5 * exact).all()
    short = slice(0, 128)
    assert lost_in_sums(left[:, short], right[:, short].t(), (names.SUMS_25_BIT,), False, dtype) is None


def test_truncation_cuts_toward_zero():
    x = torch.tensor([1.0 + 2.0**-11, -(1.0 + 2.0**-10 + 2.0**-12), 3.0, 0.0])
    assert tf32_truncated(x).tolist() == [1.0, -(1.0 + 2.0**-10), 3.0, 0.0]


def test_operands_are_read_as_the_kernels_read_them():
    rounding = PRECISIONS["fp32"].rounding
    assert as_read(rounding, (names.TF32_TRUNCATED,)).weights is tf32_truncated
    assert as_read(rounding, ()).weights is tf32
    assert as_read(PRECISIONS["bf16"].rounding, (names.TF32_TRUNCATED,)) == PRECISIONS["bf16"].rounding


def test_parts_of_a_sum_are_stored():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(8, 256, generator=generator), torch.randn(256, 8, generator=generator)
    store = lambda x: x.bfloat16().float()  # noqa: E731
    stored = in_stored_parts(left, right, store)
    assert stored is not None
    assert torch.equal(stored, store(stored))
    once, exact = store(left @ right), left.double() @ right.double()
    assert 1.2 < (stored - exact).norm() / (once - exact).norm() < 2.6  # 1.8 on average
    assert in_stored_parts(left[:, :32], right[:32], store) is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_model_knows_each_choice_of_the_table_that_matters(precision):
    """A choice that makes an error smaller, or at most a thousandth larger, needs no room."""
    needs_none = {names.FP32_EXACT, names.TF32_TIES_AWAY, names.MX_25_BIT}
    of_table = {choice.name for choice in CHOICES if precision in choice.precisions} - needs_none
    rounding = PRECISIONS[precision].rounding
    assert {*biased_kernels(rounding), *noisy_sums(rounding, splits_k=True)} == of_table


# No correct port is rejected under anything that faithful kernels do: each choice alone, or all compatible ones.


on_the_cpu_kernels = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU kernels alone have these options")


def cases_of(*modules: ModuleType) -> list[Case]:
    return [value for module in modules for value in vars(module).values() if isinstance(value, Case)]


# Norms multiply no matrices, so no choice affects them.
CASES = cases_of(attention, layer, linear, mlp)
# A layer, which contains linear layers, a gated MLP and attention, and an MLP whose sums are of one sign. The zoo's
# study of kernels' freedoms covers all cases.
FEW = ("layernorm_mlp_relu", "transformer_layer_llama")
SHOWS_IN = {
    names.TF32_TRUNCATED: "fp32",
    names.TF32_TIES_AWAY: "fp32",
    names.FP32_EXACT: "fp32",
    names.FP8_14_BIT: "fp8_current",
    names.FP8_BLOCK_14_BIT: "fp8_block",
    names.SPLIT_K_IN_OUTPUT_TYPE: "bf16",
    names.ATTENTION_16_BIT_SUMS: "fp16",
    names.SUMS_25_BIT: "fp32",
}
ON_HOPPER = [choice.name for choice in CHOICES if "hopper" in choice.gpus]
TOGETHER = tuple(name for name in ON_HOPPER if name not in (names.FP32_EXACT, names.TF32_TIES_AWAY))


def rejected(precision: str, case: Case, backend: str = "auto") -> list[str]:
    results = parity.compare(case, precisions=[precision], attention=backend)
    wrong = [one for one in results if one.status in ("failed", "error")]
    return [f"{one.item}: {one.status} {one.margin:.2f} {one.reason}" for one in wrong]


def concerned(name: str) -> list[Case]:
    """Return the cases with a kernel that reads the choice."""
    if name == names.ATTENTION_16_BIT_SUMS:
        return cases_of(attention)
    return [case for case in CASES if case.name in FEW]


@pytest.fixture
def te_before_2_20(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grant what the GEMMs of an older TE may do."""
    monkeypatch.setattr("parity.comparison.version", lambda: "2.19.0")


@on_the_cpu_kernels
@pytest.mark.usefixtures("te_before_2_20")
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.name}") for name in SHOWS_IN for case in concerned(name)],
)
def test_right_port_passes_under_each_choice(name, case):
    backend = "unfused" if name == names.ATTENTION_16_BIT_SUMS else "auto"
    with kernel_choices(name):
        assert rejected(SHOWS_IN[name], case, backend) == []


@on_the_cpu_kernels
@pytest.mark.usefixtures("te_before_2_20")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block"])
def test_right_port_passes_under_all_of_a_hopper_together(precision):
    """Compare a whole layer, whose parts are also compared under each choice."""
    (case,) = (case for case in CASES if case.name == "transformer_layer_llama")
    smaller = dataclasses.replace(case, sizes=(case.sizes[0] | dict(batch=1, seq=64),))
    with kernel_choices(*TOGETHER):
        assert rejected(precision, smaller) == []


def test_only_pytorch_s_products_and_an_older_te_s_split_k() -> None:
    assert may_split_k("2.19.0")
    assert not may_split_k("2.20")
    assert not may_split_k("2.21", ["add", "_softmax"])
    assert may_split_k("2.21", ["add", "addmm"])


@on_the_cpu_kernels
@pytest.mark.parametrize(("version", "is_granted"), [("2.19.0", True), ("2.20.2", False)])
def test_a_gemm_of_a_newer_te_that_splits_k_is_a_bug(
    version: str, is_granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parity.comparison.version", lambda: version)

    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            reference=nn.Linear(4096, 64, bias=False),
            candidate=te.Linear(4096, 64, bias=False),
            weights={"weight": "weight"},
            inputs=lambda rng: rng.normal(64, 4096),
        )

    case = parity.pair("splits_k", probe=False)(build)
    with kernel_choices(names.SPLIT_K_IN_OUTPUT_TYPE):
        results = parity.compare(case, ["bf16"], seeds=range(3), diagnose=False)
    assert all(result.passed for result in results) == is_granted


ONE_SIGN = {
    "relu inputs, weights with a mean": lambda x, w: (x.relu(), w + 0.3),
    "inputs and weights with a mean": lambda x, w: (x + 3.0, w + 0.3),
    "all positive": lambda x, w: (x.abs(), w.abs()),
}


def one_sign(kind: str, inner: int, factor: float = 1.0) -> parity.Pair:
    """Return a pair of Linears whose sums lean to one sign; a port that multiplies by another factor is wrong."""
    reference = nn.Linear(inner, 48, bias=False)
    with torch.no_grad():
        _, weight = ONE_SIGN[kind](torch.zeros(1), torch.randn(48, inner, generator=torch.Generator().manual_seed(0)))
        reference.weight.copy_(weight / inner**0.5)
    return parity.Pair(
        reference=reference,
        candidate=te.kernels("auto").te.Linear(inner, 48, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng: ONE_SIGN[kind](rng.normal(48, inner), torch.zeros(1))[0],
        call_candidate=lambda module, x: module(x) * factor,
    )


def leaning_case(kind: str, inner: int, factor: float = 1.0) -> Case:
    return parity.pair("leaning", probe=False)(lambda te: one_sign(kind, inner, factor))


@on_the_cpu_kernels
@pytest.mark.parametrize(
    ("kind", "inner", "precision"),
    [
        *itertools.product(ONE_SIGN, [1024], ["fp8_delayed", "fp8_current", "fp8_block"]),
        *itertools.product(ONE_SIGN, [4096], ["fp8_current", "fp8_block"]),
        ("all positive", 4096, "fp8_delayed"),
    ],
)
def test_sums_of_one_sign_may_lose_bits(kind, inner, precision):
    case = leaning_case(kind, inner)
    with kernel_choices(names.FP8_14_BIT, names.FP8_BLOCK_14_BIT):
        (result,) = parity.compare(case, precisions=[precision])
    assert result.passed, result.worst
    (on_fp32_sums,) = parity.compare(case, precisions=[precision])
    assert on_fp32_sums.passed


@on_the_cpu_kernels
@pytest.mark.parametrize(
    ("kind", "inner", "precision", "rejected_without"),
    [
        ("all positive", 1024, "fp32", True),
        ("inputs and weights with a mean", 2048, "fp32", True),
        ("all positive", 8192, "fp16", True),
        ("all positive", 8192, "bf16", False),
    ],
)
def test_sums_of_one_sign_may_be_cut_to_fp32_as_they_grow(kind, inner, precision, rejected_without):
    case = leaning_case(kind, inner)
    with kernel_choices(names.SUMS_25_BIT):
        (result,) = parity.compare(case, precisions=[precision])
        (checked,) = check_case(case, te.kernels("cpu").te)
        plain = judge_at(
            *(case, checked, PRECISIONS[precision], 0, te.kernels("cpu"), packaged(), None), other_kernels=False
        )
        (wrong,) = parity.compare(leaning_case(kind, inner, factor=1.02), [precision], diagnose=False)
    assert result.passed, result.worst
    assert (plain.result.status == "failed") == rejected_without
    assert wrong.status == "failed"


@on_the_cpu_kernels
@pytest.mark.parametrize("chosen", [(), (names.TF32_TRUNCATED,), (names.FP8_14_BIT,)])
@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
def test_wrong_factor_is_no_freedom_of_a_kernel(precision, chosen):
    """A factor of 1.2 is beyond the loss of short sums in a sum of 1,024 terms, 1.5 %, and far beyond TF32's 0.07 %."""
    with kernel_choices(*chosen):
        (result,) = parity.compare(leaning_case("all positive", 1024, factor=1.2), [precision], diagnose=False)
    assert result.status == "failed"


@on_the_cpu_kernels
def test_what_is_granted_is_noted():
    with kernel_choices(names.TF32_TRUNCATED):
        (result, *_) = parity.compare(linear.linear, precisions=["fp32"])
    assert result.passed
    assert any(names.TF32_TRUNCATED in note for note in result.notes)


@on_the_cpu_kernels
@pytest.mark.parametrize("name", [names.FP32_EXACT, names.TF32_TRUNCATED])
def test_one_rounding_of_a_loss_that_scales_all_gradients_may_be_missing(name):
    """The model rounds few scores, which scales all gradients by a factor that more accurate kernels lack."""
    (host,) = [host for host in HOSTS.values() if host.name == "model_with_loss"]
    with kernel_choices(name):
        assert rejected("fp32", dataclasses.replace(host, sizes=host.sizes[:1])) == []


# The table of differences that TE's kernels may have on each GPU, and where a report names them.


def test_every_option_of_the_cpu_kernels_has_a_row_with_its_source() -> None:
    assert tuple(choice.name for choice in choices_of_gpus.CHOICES) == NAMES
    for choice in choices_of_gpus.CHOICES:
        assert choice.does.endswith(".")
        assert choice.source
        assert choice.measured
        assert set(choice.gpus) <= set(cuda.GPUS)


@pytest.mark.parametrize(
    ("gpu", "precision", "expected"),
    [
        ("ada", "fp32", {"tf32-truncated", "tf32-ties-away", "fp32-exact"}),
        ("hopper", "fp32", {"tf32-truncated", "tf32-ties-away", "fp32-exact", "sums-25-bit"}),
        ("ada", "fp8_delayed", {"fp8-14-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
        ("hopper", "fp8_block", {"fp8-block-14-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
        ("hopper", "bf16", {"split-k-in-output-type", "attention-16-bit-sums"}),
        ("blackwell", "fp8_current", {"split-k-in-output-type", "attention-16-bit-sums"}),
        ("blackwell", "nvfp4", {"mx-25-bit", "split-k-in-output-type", "attention-16-bit-sums"}),
        ("rtx_blackwell", "fp8_current", {"split-k-in-output-type", "attention-16-bit-sums"}),
    ],
)
def test_a_gpu_has_its_own_at_each_precision(gpu: str, precision: str, expected: set[str]) -> None:
    assert {choice.name for choice in choices_of_gpus.of(gpu, precision)} == expected


@pytest.mark.parametrize(("gpu", "precision"), [("volta", "fp32"), ("hopper", "fp64")])
def test_what_has_no_kernels_here_is_refused_with_what_has(gpu: str, precision: str) -> None:
    with pytest.raises(ValueError, match=r"GPUs are ada, hopper, blackwell, rtx_blackwell, precisions fp32, bf16"):
        choices_of_gpus.of(gpu, precision)


def test_a_report_names_the_choices_that_were_on_and_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = environment.measure("cpu", (0,), 1).device
    assert "choices" not in plain
    with kernel_choices("tf32-truncated", "fp8-14-bit"):
        assert (
            environment.measure("cpu", (0,), 1).device == f"{plain} with the kernel choices fp8-14-bit, tf32-truncated"
        )
    monkeypatch.setenv(VARIABLE, "mx-25-bit")
    assert environment.measure("cpu", (0,), 1).device == f"{plain} with the kernel choices mx-25-bit"
