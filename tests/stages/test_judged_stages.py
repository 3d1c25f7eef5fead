"""Stages: a port's values are matched with its reference's, and only what is wrong is flagged, at its place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from lab.corpus.catalogue import PORTS, RIGHT
from lab.corpus.placed_ports import BY_FAMILY
from lab.corpus.small import normal, twins
from lab.studies.ports import study
from parity import stack, te
from parity.case.case import Case
from parity.case.validate import check_case
from parity.cli.ports import declared_pairs
from parity.comparison import observe_stages
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.mistakes.catalogue import hypotheses
from parity.passes.prepare import prepare
from parity.search.located import results_of_stages
from parity.stages.judge import GAIN, measure_error, ratio_by_chance
from parity.stages.layouts import layouts
from parity.stages.locate import Stages, judge_stages
from parity.stages.suspects import Suspicion
from parity.stages.token_rows import are_left_out, find_rows
from parity.stages.weight_rows import weight_rows
from parity.te import PRECISIONS
from parity.trace.calls import Misfit

KERNELS = te.kernels("cpu")
PLACED = {f"{one.port.host}: {one.port.name}": one for rows in BY_FAMILY.values() for one in rows}


def stages_of(case: Case, precision: str = "bf16") -> Stages:
    """Judge the stages of a case's smallest size as the search for a cause does."""
    checked, *_ = check_case(case, KERNELS.te)
    prepared = prepare(case, checked, PRECISIONS[precision].dtype, 0, KERNELS)
    request = Request(case, checked, PRECISIONS[precision], 0, KERNELS, packaged())
    return observe_stages(request, prepared)


# Right ports.


@pytest.mark.parametrize(
    ("host", "precision"),
    [
        ("models.llama", "bf16"),
        ("models.gemma", "fp8_current"),
        ("models.gpt", "fp32"),
        ("llama_layer", "fp8_delayed"),
        ("interleaved_qkv_attention", "fp16"),
        ("stacked_qkv_attention", "bf16"),
        ("conv1d_rows", "bf16"),
        ("parallel_layers_that_add_in_place", "bf16"),
        ("encoder_with_padding_zeroed", "bf16"),
        ("whole_rows_in_one", "fp32"),
        ("fused_router", "bf16"),
        ("distances", "bf16"),
        ("cached_attention", "bf16"),
    ],
)
def test_no_stage_of_a_right_port_is_flagged(host: str, precision: str):
    stages = stages_of(RIGHT[host], precision)
    assert stages.all
    assert [(one.stage.end, one.ratio, one.gain) for one in stages.flagged] == []


@pytest.mark.parametrize(
    ("host", "name", "precision"),
    [
        ("rotated_attention", "all positions later", "bf16"),
        ("turned_rows_in_one", "positions run on", "bf16"),
        ("mixture_with_a_softmax_of_the_chosen", "router=normalised", "fp32"),  # picks from other numbers
    ],
)
def test_no_stage_is_flagged_of_a_right_port_that_computes_otherwise(host: str, name: str, precision: str):
    stages = stages_of(PORTS[name, host].case, precision)
    assert stages.all
    assert [(one.stage.end, one.ratio, one.gain) for one in stages.flagged] == []


@pytest.mark.parametrize("host", ["gpt_layer", "llama_layer", "encoder_with_padding_zeroed"])
def test_no_stage_of_a_right_port_is_flagged_in_evaluation(host: str):
    """TE calls its kernels in the open then, and a layer whose bias is added later hands it out beside its result."""
    case = RIGHT[host]
    evaluated = replace(case, factory=lambda *args, **size: replace(case.factory(*args, **size), evaluation=True))
    stages = stages_of(evaluated)
    assert stages.all
    assert [(one.stage.end, one.ratio, one.gain) for one in stages.flagged] == []


@pytest.mark.parametrize(
    ("model", "pair", "precision"),
    [
        ("mixtral", 1, "bf16"),  # decoded: rows of experts are others than the reference's, and equally many
        ("esm", 0, "fp8_current"),  # its queries hardly matter, so that wrong ones would agree as well
    ],
)
def test_no_stage_of_a_written_port_is_flagged(model: str, pair: int, precision: str):
    text, form, _ = study.write_port(study.Trial(model, "", precision, 0))
    with declared_pairs(text, form.kind) as cases:
        stages = stages_of(cases[pair], precision)
    assert stages.all
    assert [(one.stage.end, one.ratio, one.gain) for one in stages.flagged] == []


def test_every_linear_layer_of_a_model_ends_a_stage_matched_by_its_weight():
    stages = stages_of(RIGHT["models.llama"])
    linear = {call.site for call in stages.graph.trace.calls if call.name == "linear"}
    by_weights = {one.stage.end for one in stages.all if one.stage.evidence == "weights" and not one.stage.backward}
    assert linear <= by_weights


def test_the_rows_of_each_expert_are_found_in_a_layer_that_computes_all_of_them():
    stages = stages_of(RIGHT["fused_router"])
    calls = {
        call.site for call in stages.graph.trace.calls if call.site[0].startswith("experts.") and call.name == "linear"
    }
    for is_backward in (False, True):
        ends = {one.stage.end for one in stages.all if one.stage.backward == is_backward}
        gates_and_ups = {site for site in calls if not site[0].endswith("down")}
        assert (gates_and_ups if is_backward else calls) <= ends


@pytest.mark.parametrize(
    ("share", "is_right"),
    [(0.0, True), (0.01, True), (0.02, True), (0.03, False), (-0.01, False)],
    ids=["exact", "between", "as modelled", "beyond", "the other way"],
)
def test_whoever_leans_less_than_roundings_that_lean_is_right(share: float, is_right: bool):
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
    stage = stages_of(RIGHT["conv1d_rows"]).all[0].stage
    judged = measure_error(stage, exact * (1.0 + share), exact, [exact * 1.02], 1e-4)
    assert (abs(judged.gain) <= GAIN) == is_right


class Scored(nn.Module):
    """Scores of queries and keys that are turned or scaled first, so that both may be changed and the scores not."""

    def __init__(self, linear: Any, later: int = 0, scale: float = 1.0, queries_alone: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.out = (linear(64, 64) for _ in range(3))
        self.later, self.scale, self.queries_alone = later, scale, queries_alone

    def forward(self, x: Tensor) -> Tensor:
        keys = (0, 1.0) if self.queries_alone else (self.later, 1.0 / self.scale)
        q, k = self.turn(self.q(x), self.later, self.scale), self.turn(self.k(x), *keys)
        return self.out((q @ k.mT / 8.0).softmax(-1) @ x)

    def turn(self, x: Tensor, later: int, scale: float) -> Tensor:
        angles = (torch.arange(x.shape[-2]) + later)[:, None] * 50.0 ** (-torch.arange(32) / 32.0)
        cos, sin = (scale * part(torch.cat((angles, angles), -1)).to(x.dtype) for part in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("queries_alone", [False, True], ids=["keys as well", "queries alone"])
@pytest.mark.parametrize(("later", "scale"), [(1, 1.0), (2, 1.0), (0, 1.3)], ids=str)
def test_a_departure_counts_if_it_changes_what_follows(later: int, scale: float, queries_alone: bool):
    """The scores of keys and queries at later positions, or of one made longer and one shorter, are the same."""
    port = twins(Scored, normal((2, 24, 64))).wrong("changed", later=later, scale=scale, queries_alone=queries_alone)
    assert bool(stages_of(port.case).flagged) == queries_alone


class Experts(nn.Module):
    """Experts in a loop, of which each token takes two; ``longer`` makes the result of one of them longer."""

    def __init__(self, linear: Any, longer: bool = False) -> None:
        super().__init__()
        self.up, self.router = linear(64, 64), linear(64, 8)
        self.experts = nn.ModuleList(linear(64, 64) for _ in range(8))
        self.longer = longer

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == number)
            result = expert(x[rows]) * (1.1 if self.longer and number == 3 else 1.0)
            y = y.index_add(0, rows, result * weights[rows, at, None])
        return y


@pytest.mark.parametrize("longer", [False, True], ids=["right", "one expert's result is longer"])
def test_a_router_that_is_off_by_roundings_gives_experts_other_tokens(longer: bool):
    stages = stages_of(twins(Experts, normal((1024, 64))).wrong("gradient-scale", longer=longer).case)
    shapes = [(one.end.shape, stages.graph.trace.tensor(one.value).shape) for one in stages.found.values()]
    assert any(mine != theirs for mine, theirs in shapes)
    forward = [one.stage for one in stages.flagged if not one.stage.backward]
    assert bool(stages.flagged) == longer
    assert len(forward) == longer
    whole = [one.whole for one in results_of_stages(stages) if not one.backward]
    assert any(map(math.isnan, whole))  # golden has no such rows
    assert not all(map(math.isnan, whole))
    assert all("experts.3" in {call.module for call in one.calls} or one.end[2] == "index_add" for one in forward)


class MaskedLosses(nn.Module):
    """A layer, the loss of the tokens that count, and the mean square of their logsumexp; ``reweighed`` is wrong."""

    def __init__(self, linear: Any, reweighed: bool = False) -> None:
        super().__init__()
        self.head, self.reweighed = linear(64, 96), reweighed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(x)
        labels = torch.arange(len(x)) % 96
        counts = labels % 5 != 0
        z = y.logsumexp(-1).square()[counts].mean()
        if not self.reweighed:
            return y, nn.functional.cross_entropy(y[counts], labels[counts]) + 0.01 * z
        lost = -y.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return y, 0.9 * lost[counts].mean() + 0.01 * y.logsumexp(-1).square()[counts].mean()


def test_a_value_of_which_only_some_rows_are_taken_is_not_assumed_to_be_another_one():
    stages = stages_of(twins(MaskedLosses, normal((48, 64))).wrong("loss-scale", reweighed=True).case, "fp32")
    ends = {one.stage.end[2]: one.stage.evidence for one in stages.all if not one.stage.backward}
    assert ends["square"] == "agrees"


# Wrong ports: flagged where they are wrong.


@pytest.mark.parametrize(
    "name",
    [
        "placed_llama: window of one layer",
        "placed_gemma: scores of one layer not capped",
        "placed_cohere: one MLP in sequence",
        "placed_olmo: norms of queries and keys exchanged in one layer",
    ],
)
def test_a_mistake_in_one_layer_is_flagged_there(name: str):
    placed = PLACED[name]
    flagged = [one for one in stages_of(placed.port.case).flagged if not one.stage.backward]
    assert flagged
    assert all(any(placed.is_at(call.site) for call in one.stage.calls) for one in flagged)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Branches(nn.Module):
    """Two layers, each beside a skip; ``halved`` passes half of the second branch's gradient on."""

    def __init__(self, linear: Any, halved: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.halved = linear(64, 64), linear(64, 64), halved

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).tanh()
        return x + self.second(HalfGradient.apply(x) if self.halved else x).tanh()


def test_a_gradient_that_is_wrong_is_flagged_in_the_backward_pass_alone_where_it_comes_from_the_branch():
    stages = stages_of(twins(Branches, normal((32, 64))).wrong("gradient-scale", halved=True).case)
    assert stages.flagged
    assert all(one.stage.backward for one in stages.flagged)
    assert not any(one.stage.parameter.startswith("second") for one in stages.flagged)  # its own gradients are right


def test_a_detached_value_is_a_stage_whose_gradient_is_missing():
    detached = PLACED["placed_neox: input of one MLP detached"]
    flagged = stages_of(detached.port.case).flagged
    assert flagged
    assert all(one.stage.backward for one in flagged)


def test_a_functions_own_backward_pass_is_judged_though_its_apply_was_bound_before():
    flagged = stages_of(PLACED["placed_decoder: backward pass of another GELU"].port.case).flagged
    assert flagged
    assert all(one.stage.backward and not one.is_missing for one in flagged)


def test_a_wrong_value_is_laid_out_as_the_right_ones_are():
    """Sequences come first in TE's layer, and what is wrong is no nearer to its value in one layout than in another."""
    wrong = PORTS["output-projection-on-permuted-heads", "gpt_layer"].case
    flagged = [one.stage for one in stages_of(wrong).flagged if not one.stage.backward]
    assert [stage.end[0] for stage in flagged] == ["attention.o_proj"]


# What cannot be judged.


def test_a_reference_that_trains_itself_is_a_misfit():
    with pytest.raises(Misfit, match="stage by stage"):
        stages_of(RIGHT["trained_linear"])


@pytest.mark.parametrize("count", [1, 4, 16, 64, 1024])
def test_rounding_errors_of_few_numbers_differ_by_chance_as_far_as_is_allowed_for(count: int):
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(20_000, count, generator=generator).norm(dim=1) for _ in range(2))
    allowed = ratio_by_chance(count)
    assert int((one / other > allowed).sum()) <= 1
    assert allowed < 1.5 or count < 200


@pytest.mark.parametrize(
    ("case", "status"),
    [
        (PLACED["placed_gemma: scores of one layer not capped"].port.case, "failed"),
        (RIGHT["llama_layer"], "passed"),
        (RIGHT["trained_linear"], "passed"),  # whose stages cannot be judged
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_port_that_passes_is_judged_at_its_stages_if_that_is_asked_for(case: Case, status: str):
    smallest = replace(case, sizes=case.sizes[:1])
    ((alone,), (result,)) = (parity.compare(smallest, ["bf16"], backend="cpu", stages=asked) for asked in (False, True))
    assert alone.status == "passed"
    assert result.status == status
    if status == "failed":
        assert "it is right at its end, but 3 of 215 stages are off" in result.reason
        assert "in layers.3.attn" in result.findings[0].message


# Suspects.


def test_a_suspect_explains_the_flagged_stages_and_no_mistake_at_another_place_does():
    wrong = PLACED["placed_llama: gate and up of one layer"].port.case
    checked, *_ = check_case(wrong, KERNELS.te)
    prepared = prepare(wrong, checked, torch.bfloat16, 0, KERNELS)
    request = Request(wrong, checked, PRECISIONS["bf16"], 0, KERNELS, packaged())
    stages = judge_stages(request, prepared)
    suspicion = Suspicion(prepared, stages, lambda: False)
    known = list(hypotheses(prepared, stages.graph.trace, frozenset(), []))
    found = suspicion.explanations([one for one in known if one.scope == "one"])
    assert {one.mistake.title for one in found if one.explained == suspicion.flagged} >= {"gate-up-swapped"}
    assert sum(map(suspicion.concerns, known)) < len(known) / 2
    of_others = [one for one in known if not suspicion.concerns(one)]
    assert all(suspicion.contradiction([one]) is not None for one in of_others)
    right = next(one.mistake for one in found if one.mistake.title == "gate-up-swapped")
    assert suspicion.contradiction([right]) is None
    assert suspicion.contradiction([right, of_others[0]]) is not None


# Tokens that only one side has.


TOKENS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("candidate", "reference", "own", "theirs"),
    [
        (TOKENS[[0, 1, 4, 5, 6, 7, 8, 9, 11]], TOKENS[:12].view(3, 4, 8), range(9), [0, 1, 4, 5, 6, 7, 8, 9, 11]),
        (torch.cat([TOKENS[:9], TOKENS.new_zeros(7, 8)]), TOKENS[:12], range(9), range(9)),
        (TOKENS[:12].view(3, 4, 8), TOKENS[[0, 1, 4, 5, 6, 7, 8, 9, 11]], [0, 1, 4, 5, 6, 7, 8, 9, 11], range(9)),
        # Two experts are given some of the same tokens, in the same order: only neighbouring rows are one's.
        (torch.cat([TOKENS[:16], TOKENS[4:20]]), TOKENS[4:20], range(16, 32), range(16)),
    ],
    ids=["packed", "filled", "padded", "of an expert"],
)
def test_tokens_that_both_sides_have_are_found(candidate: Tensor, reference: Tensor, own: Any, theirs: Any):
    found = find_rows(candidate, reference, 1e-3)
    assert found is not None
    assert (found.own.tolist(), found.theirs.tolist()) == (list(own), list(theirs))
    laid_out = found(candidate)
    held = laid_out.flatten(0, -2)[found.theirs]
    assert torch.equal(held, reference.flatten(0, -2)[found.theirs])
    assert laid_out.any(-1).sum() == len(found.theirs)
    assert are_left_out(candidate, [found]) == (len(own) < int(candidate.any(-1).sum()))


def test_tokens_that_could_be_others_as_well_are_not_found():
    assert find_rows(TOKENS[:1].expand(9, 8), TOKENS[:1].expand(12, 8), 1e-3) is None
    assert find_rows(TOKENS[:9], TOKENS[12:24], 1e-3) is None


# Layouts.


@pytest.mark.parametrize(
    ("given", "wanted", "order"),
    [
        ((5, 2, 12), (2, 5, 12), lambda x: x.transpose(0, 1)),
        ((2, 5, 12), (2, 3, 5, 4), lambda x: x.unflatten(-1, (3, 4)).transpose(1, 2)),
        ((5, 2, 3, 4), (10, 12), lambda x: x.transpose(0, 1).flatten(2).flatten(0, 1)),
        ((10, 12), (2, 3, 5, 4), lambda x: x.view(2, 5, 3, 4).transpose(1, 2)),
        ((2, 5, 36), (2, 5, 12), lambda x: x[..., 12:24]),
    ],
)
def test_a_layout_is_among_those_that_are_tried(given: Any, wanted: Any, order: Any):
    x = torch.randn(given)
    assert any(torch.equal(layout(x), order(x)) for layout in layouts(given, wanted))


def test_shapes_that_hold_other_numbers_have_no_layout():
    assert layouts((2, 5, 12), (2, 5, 7)) == ()


def test_the_rows_of_a_stacked_weight_are_those_of_its_parts():
    rows = weight_rows({stack("q", "k"): "qk"}, {"qk": (6, 4)}, {"q": (4, 4), "k": (2, 4)})
    assert rows["qk"].size == 6
    assert rows["qk"].columns["q"].tolist() == [0, 1, 2, 3]
    assert rows["qk"].columns["k"].tolist() == [4, 5]
