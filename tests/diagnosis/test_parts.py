"""Mistakes that a port makes in only a part of a call, and how a finding expresses doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from ports import in_turn, normal, tells_only, twins
from pydantic import TypeAdapter
from torch import Tensor, nn

import parity
from parity.mistakes.alternatives import is_written, written_near
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.freedom import FUSED, UNFUSED
from parity.search import in_full
from parity.search.explanation import _told
from parity.search.in_full import Explanation
from parity.search.search import _best_of_its_place, _Search
from parity.te import PRECISIONS

BATCH, SEQ, HEADS, GROUPS, HEAD_DIM = 3, 24, 8, 4, 16
HIDDEN = HEADS * HEAD_DIM


def rotated(x: Tensor, base: float = 10_000.0) -> Tensor:
    frequency = base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = (torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def attended(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)


def mixed(right: Tensor, wrong: Tensor, dim: int, indices: tuple[int, ...]) -> Tensor:
    """Return the right tensor with wrong values at some indices of a dimension."""
    inside = torch.zeros(right.shape[dim], dtype=torch.bool)
    inside[list(indices)] = True
    return torch.where(inside.view(-1, *[1] * (right.dim() - dim - 1)), wrong, right)


class Attention(nn.Module):
    """Grouped attention with rotated queries and keys, wrong in some groups of heads, sequences or positions."""

    def __init__(self, linear: Any, wrong: str = "", dim: int = 1, indices: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.query = linear(HIDDEN, HIDDEN, bias=False)
        self.key = linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.value = linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.out = linear(HIDDEN, HIDDEN, bias=False)
        self.wrong, self.dim, self.indices = wrong, dim, indices

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        turned = [self._turned(query, HEADS // GROUPS), self._turned(key, 1)]
        context = attended(*turned, value)
        others = {"mask": dict(causal=False), "scale": dict(scale=0.5)}
        if self.wrong in others:
            context = mixed(context, attended(*turned, value, **others[self.wrong]), self.dim, self.indices)
        return self.out(context.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor, each: int) -> Tensor:
        """Return the rotated heads; each group has ``each`` of them."""
        if self.wrong in ("late query", "query's base") and each > 1:
            late = {"late query": rotated(F.pad(x, (0, 0, 5, 0)))[:, :, 5:], "query's base": rotated(x, 40_000.0)}
            return mixed(rotated(x), late[self.wrong], self.dim, self.indices)
        others = {"unrotated": x, "base": rotated(x, 40_000.0)}
        heads = tuple(group * each + head for group in self.indices for head in range(each))
        return mixed(rotated(x), others[self.wrong], 1, heads) if self.wrong in others else rotated(x)


@in_turn(
    ("wrong", "dim", "indices", "title", "part"),
    [
        ("unrotated", 1, (2, 3), "rope-missing", "nothing is rotated, in heads 4 to 7 of 8."),
        ("base", 1, (3,), "rope-base", "base 40000, in heads 6 to 7 of 8."),
        ("scale", 1, (5,), "softmax-scale", "the port's is 0.5, in head 5."),
        ("scale", 1, (0, 1, 2, 4, 5, 6, 7), "softmax-scale", "the port's is 0.5, in all heads but 3."),
        ("scale", 1, (1, 3, 5, 7), "softmax-scale", "the port's is 0.5, in every second head from 1 on."),
        ("late query", 2, (17,), "rope-position", "or the query's by +5, in position 17."),
        ("query's base", 1, (2,), "rope-base", "base 40000, in the query, in head 2."),
        ("mask", 0, (1,), "mask", "the port attends to later keys, in sequence 1."),
        ("mask", 2, (4,), "mask", "the port attends to later keys, in position 4."),
        ("", 1, (), "passed", ""),
    ],
)
def test_a_mistake_in_a_part_is_told_with_the_part(wrong, dim, indices, title, part, precision):
    made = dict(wrong=wrong, dim=dim, indices=indices)
    tells_only(twins(Attention, made, normal((BATCH, SEQ, HIDDEN)), precision), title, part)


class Layers(nn.Module):
    """A norm and parallel layers, in which some channels lack a bias or a gain, or one layer has a factor."""

    def __init__(self, linear: Any, wrong: str = "", channels: slice = slice(0), factor: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.layers = nn.ModuleList(linear(64, 64) for _ in range(3))
        self.down = nn.ModuleList(linear(64, 64, bias=False) for _ in range(3))
        self.wrong, self.channels, self.factor = wrong, channels, factor

    def forward(self, x: Tensor) -> Tensor:
        gain, normed = self._but_for("gain", self.gain), F.rms_norm(x, (64,))
        inner = [F.gelu(layer(normed * gain) + self._missing(layer.bias)) for layer in self.layers]
        outer = [down(y) for down, y in zip(self.down, inner, strict=True)]
        outer[2] = outer[2] if self.factor == 1.0 else self.factor * outer[2]
        return x + outer[0] + outer[1] + outer[2]

    def _but_for(self, what: str, x: Tensor) -> Tensor:
        channels = torch.zeros(64, dtype=torch.bool)
        channels[self.channels] = self.wrong == what
        return torch.where(channels, 1.0, x).to(x.dtype)

    def _missing(self, bias: Tensor) -> Tensor:
        """Return the tensor that cancels a bias in the channels that lack it."""
        channels = torch.zeros(64, dtype=torch.bool)
        channels[self.channels] = self.wrong == "bias"
        return torch.where(channels, -bias, 0.0).to(bias.dtype)


@in_turn(
    ("made", "title", "part"),
    [
        (dict(wrong="bias", channels=slice(1, None, 2)), "bias-dropped", "in every second channel from 1 on."),
        (dict(wrong="bias", channels=slice(40, None)), "bias-dropped", "in channels 40 to 63 of 64."),
        (dict(wrong="gain", channels=slice(0, 20)), "weight-not-copied", "in channels 0 to 19 of 64."),
        (dict(factor=2.0), "factor", "down.2 unscaled, as the reference does; the port multiplies it by 2."),
        (dict(factor=3.0), "factor", "down.2 unscaled, as the reference does; the port multiplies it by 3."),
        (dict(factor=0.5), "factor", "down.2 unscaled, as the reference does; the port multiplies it by 0.5."),
        (dict(), "passed", ""),
    ],
)
def test_a_mistake_in_parts_whose_effects_overlap_is_told(made, title, part, precision):
    tells_only(twins(Layers, made, normal((4, 16, 64)), precision), title, part)


class Norms(nn.Module):
    """A stack of norms and linear layers, in which the norms of some layers have another eps."""

    def __init__(self, linear: Any, eps: float = 1e-6, layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(64, 64, bias=False) for _ in range(12))
        self.eps = [eps if layer in layers else 1e-6 for layer in range(12)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, eps in zip(self.layers, self.eps, strict=True):
            x = x + layer(F.rms_norm(0.05 * x, (64,), eps=eps))
        return x


@in_turn(("eps", "layers"), [(1e-3, (0,)), (3e-3, (4,)), (3e-3, (1, 9))])
def test_another_constant_of_some_layers_is_told(eps, layers, precision):
    tells_only(twins(Norms, dict(eps=eps, layers=layers), normal((4, 16, 64)), precision), "norm-eps", f"{eps:g}")


# A finding is certain if everything is right once it is repaired, nothing else explains as much, and its number is
# one that people write.


def explanation(title: str, left: float | None = None, value: float | None = None, misfit: float = 1.0) -> Explanation:
    made = partial(Hypothesis, title, title, f"repair {title}")
    one = made(value=value, tuned=None if value is None else lambda other: made(value=other))
    tensor: Any = None if left is None else SimpleNamespace(label="d weight", margin=left)
    return Explanation((one,), tensor, misfit, "output", 0.1, 0.003, ())


@pytest.mark.parametrize(
    ("explained", "doubts"),
    [
        ([explanation("norm-eps")], [""]),
        ([explanation("norm-eps", value=5e-6)], [""]),
        ([explanation("norm-eps", value=4.2e-6)], ["4.2e-06 is an unusual value"]),
        ([explanation("norm-eps", left=3.0)], ["d weight is still 3 times its limit then"]),
        ([explanation("norm-eps", left=float("inf"))], ["d weight is still not finite then"]),
        ([explanation("norm-eps", misfit=1.3)], ["1.3 times the normal error of bf16 is left"]),
        (
            [explanation("norm-eps"), explanation("factor")],
            ["PAR256 factor explains it equally well", "norm-eps explains it equally well"],
        ),
        ([explanation("norm-eps"), explanation("factor", left=2.0)], ["", "d weight is still 2 times its limit then"]),
    ],
)
def test_a_finding_says_what_speaks_against_it(explained, doubts):
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden)
    told = list(_told(explained, failure))
    assert [one.sure for one in told] == [not doubt for doubt in doubts]
    for one, doubt in zip(told, doubts, strict=True):
        assert doubt in one.message
        assert one.name.endswith("(perhaps)") == bool(doubt)


@pytest.mark.parametrize(("numel", "error", "is_sure"), [(4096, 0.03, True), (4096, 0.019, False), (1, 0.3, False)])
def test_two_mistakes_are_doubted_where_no_tensor_of_many_numbers_is_far_off(numel, error, is_sure):
    both = tuple(explanation(title).hypotheses[0] for title in ("norm-missing", "norm-eps"))
    failed = SimpleNamespace(
        numel=numel, passed=False, errors=SimpleNamespace(relative_l2=error), tolerance_relative_l2=0.01
    )
    golden = {("output", "output"): torch.zeros(4, 64)}
    failure: Any = SimpleNamespace(precision=SimpleNamespace(name="bf16"), golden=golden, results=[failed])
    told = _told([replace(explanation("norm-missing"), hypotheses=both)], failure)
    assert [one.sure for one in told] == [is_sure, is_sure]


@pytest.mark.parametrize(
    ("misfits", "told"),
    [
        ({"first": 1.12, "second": 1.0}, ["second", "first"]),
        ({"first": 1.0, "second": 1.12}, ["first"]),
        ({"first": 1.12, "elsewhere": 1.0, "second": 1.0}, ["first"]),  # the mistake in another call comes later
    ],
)
def test_of_the_mistakes_in_one_call_the_one_that_fits_best_comes_first(misfits, told):
    def made(name: str) -> Explanation:
        site = "another" if name == "elsewhere" else "call"
        one = Hypothesis("operation", name, name, (cast(Any, SimpleNamespace(site=site)),))
        return replace(explanation("norm-eps", misfit=misfits[name]), hypotheses=(one,))

    first, *others = (made(name) for name in misfits)
    by_name = {one.hypotheses[0].name: one for one in others}
    search: Any = SimpleNamespace(explanation=lambda combination: by_name[combination[0].name])
    entries = [(0.1 * one.misfit, one.hypotheses) for one in others]
    found = _best_of_its_place(search, first, (0.1 * first.misfit, first.hypotheses), entries)
    assert [one.hypotheses[0].name for one in found] == told


@pytest.mark.parametrize(("left", "is_told"), [(0.02, True), (0.05, False), (0.06, False)])
def test_a_second_mistake_is_told_only_if_it_explains_what_the_first_one_leaves(left, is_told):
    """Check the tensor that the first leaves wrong. With both, rounding may be so large that everything passes."""

    def judged(error: float) -> Any:
        return SimpleNamespace(key=("output", "y"), probed=False, errors=SimpleNamespace(relative_l2=error))

    first, second = (explanation(title).hypotheses[0] for title in ("norm-missing", "norm-eps"))
    almost = replace(explanation("norm-missing"), left=judged(0.05))
    both = replace(almost, hypotheses=(first, second), left=None, results=(judged(left),))
    unused: Any = None
    search = _Search(unused, unused, lambda combination: both, unused, [almost])
    assert (search.explanation((first, second)) is both) == is_told


def judged_gradient(error: float, margin: float) -> Any:
    """Return a gradient's result with a tolerance of 0.01, with the fields that judging a hypothesis reads."""
    errors = SimpleNamespace(relative_l2=error)
    fields = dict(kind="weight gradient", key=("weight gradient", "w"), numel=4096, finite=True, expected=errors)
    check = SimpleNamespace(statistic="norm", margin=margin)
    passed = margin <= 1.0
    return SimpleNamespace(
        errors=errors, margin=margin, passed=passed, tolerance_relative_l2=0.01, checks=[check], **fields
    )


def passes_in_the_end(before: Any, judge: Callable[..., list[Any]]) -> bool:
    """Return whether a gradient passes under a hypothesis."""
    precision, freedoms = PRECISIONS["bf16"], (FUSED, UNFUSED)
    failure: Any = SimpleNamespace(judge=judge, precision=precision, freedoms=freedoms, prepared=None, results=[before])
    (result,) = in_full._judged(failure, (), {}, [{}])
    passed: bool = result.passed
    return passed


@pytest.mark.parametrize(
    ("error", "margin", "looks", "passes"),
    [(0.2, 20.0, 3, True), (0.2, 20.0, 99, False), (0.2, 4.0, 3, False), (0.014, 20.0, 3, False)],
)
def test_what_a_mistake_leaves_by_bad_luck_is_looked_at_again_where_it_is_little(
    monkeypatch, error, margin, looks, passes
):
    def judge(golden: Any, models: Any, candidate: Any = None, granted: Any = ()) -> list[Any]:
        left = 0.9 if len(models) > looks else 1.3
        return [judged_gradient(0.01 * left, left)]

    monkeypatch.setattr(in_full, "tensors_under", lambda *args, **kwargs: {})
    monkeypatch.setattr(in_full, "_beside_kinks", lambda *args: [])
    assert passes_in_the_end(judged_gradient(error, margin), judge) == passes


@pytest.mark.parametrize(("error", "passes"), [(1.0, True), (0.5, False)])
def test_the_side_of_a_kink_may_move_a_gradient_far_but_not_by_what_was_wrong_with_it(monkeypatch, error, passes):
    monkeypatch.setattr(in_full, "tensors_under", lambda *args, **kwargs: {})
    monkeypatch.setattr(in_full, "_beside_kinks", lambda *args: [{}])
    judge = lambda golden, models, *rest: [judged_gradient(0.08, 0.9 if len(models) > 1 else 8.0)]  # noqa: E731
    assert passes_in_the_end(judged_gradient(error, 100.0 * error), judge) == passes


@pytest.mark.parametrize("number", [5e-6, 2e-5, 1e-12, 20_000.0, 5e5, 0.375, 2**-23, 8192.0, 0.044, 48**-0.5, 1 / 3])
def test_people_write_such_numbers(number):
    assert is_written(number)
    assert written_near(1.0004 * number) == pytest.approx(number)


@pytest.mark.parametrize("number", [4.2e-6, 0.00694, 1.37e-3, 0.3714, 13_370.0])
def test_nobody_writes_such_numbers(number):
    assert not is_written(number)


def test_a_finding_of_a_record_without_doubts_is_read_as_a_fact():
    finding = TypeAdapter(parity.Finding).validate_python(dict(code="PAR241", title="bias-dropped", message="add it"))
    assert finding.sure
    assert replace(finding, sure=False).name == "PAR241 bias-dropped (perhaps)"
