"""Trainings over ranks: right ones pass, and mistakes between ranks and steps are named."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import parity
from lab.corpus.ranked_ports.ranks import DP, SP, TP, TP_DP, add_up
from lab.corpus.ranked_ports.trained_over_ranks import RIGHT, STEPS, SWITCHES, WRONG, case_of
from parity.ranks.layout import degrees


def named(entry):
    return f"{entry.host}, {entry.variant or 'right'}, {degrees(entry.ranks).label}"


@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_a_right_training_passes(right):
    precision = "bf16" if right.exists_at("bf16") else right.precisions[0]
    way = dict(steps=STEPS, switch=SWITCHES.get(right.host, ""))
    (result,) = parity.compare(case_of(right.host, right.variant), [precision], ranks=right.ranks, **way)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())
    assert len(result.steps) == STEPS


@pytest.mark.parametrize("wrong", WRONG, ids=named)
def test_a_mistake_is_named(wrong):
    precision = "bf16" if wrong.exists_at("bf16") else wrong.precisions[0]
    way = dict(steps=STEPS, switch=SWITCHES.get(wrong.host, ""))
    (result,) = parity.compare(case_of(wrong.host, wrong.variant), [precision], ranks=wrong.ranks, **way)
    assert (result.status, result.findings[0].title in wrong.titles) == ("failed", True)
    assert "rank" in result.findings[0].message


def test_gradients_that_one_rank_does_not_share_are_told_with_the_step_and_the_rank():
    (result,) = parity.compare(case_of("trained", "own gradients at step 2"), ["bf16"], ranks=DP, steps=STEPS)
    assert result.findings[0].message.startswith("in step 2 ranks 0 and 1 hold the same part")
    assert "those of rank 0 are right, and those of rank 1 are wrong" in result.findings[0].message


@pytest.mark.parametrize(
    ("host", "ranks", "precision", "switch"),
    [
        ("trained", DP, "fp8_delayed", "resume"),
        ("trained mlp", SP, "fp8_delayed", "recompute"),
        ("trained mlp", TP, "fp8_current", "rollback"),
        ("trained mlp", TP_DP, "fp8_delayed", "resume-dcp"),
        ("fully sharded", DP, "bf16", "resume"),
        ("fully sharded", DP, "fp8_delayed", "resume-dcp"),
        ("fully sharded", DP, "fp8_current", "resume-safetensors"),
        ("ZeroRedundancyOptimizer", DP, "fp32", "resume-dcp"),
    ],
)
def test_a_right_training_is_resumed_or_recomputed_over_ranks(host, ranks, precision, switch):
    (result,) = parity.compare(case_of(host), [precision], ranks=ranks, steps=2, switch=switch)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())
    assert result.size_label.endswith(f"-steps2-{switch}-{degrees(ranks).label}")


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("no extra state", "on ranks 0, 1, step 2.*not restored: FP8 scales"),
        ("no moments of rank 1", "on rank 1, step 2.*not restored: the optimizer's exp_avg"),
        ("moments of rank 0 on all ranks", "on rank 1, step 2"),
    ],
)
def test_what_ranks_lose_in_a_checkpoint_is_told_with_their_numbers(mistake, told):
    (result,) = parity.compare(case_of("saved", mistake), ["fp8_delayed"], ranks=TP, steps=2, switch="resume")
    assert (result.status, result.findings[0].title) == ("failed", "state-not-saved")
    assert re.search(told, result.findings[0].message)


def test_copies_that_an_optimizer_steps_and_does_not_save_are_told():
    (result,) = parity.compare(case_of("divided optimizer"), ["bf16"], ranks=DP, steps=2, switch="resume")
    assert result.findings[0].title == "state-not-saved"
    assert "not restored: the copies of weights that the optimizer steps" in result.findings[0].message


def test_what_ranks_cannot_do_together_is_refused():
    with pytest.raises(parity.UserError, match=r"knows resume, .*recompute, and not 'graph'"):
        parity.compare(case_of("trained"), ["bf16"], ranks=DP, steps=3, switch="graph")


class Counting(torch.nn.Module):
    """Divides its result by the number of its calls."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls.to(x.dtype)


def counted(te: Any, ranks: Any) -> parity.Pair:
    """Return a pair of a layer that counts its calls, trained by data-parallel ranks."""
    along = {"input": [parity.over("dp")], "output": [parity.over("dp")]}

    def finish(module: torch.nn.Module) -> None:
        add_up(list(module.parameters()), ranks.dp.group)

    return parity.Pair(
        Counting(torch.nn.Linear(64, 64)),
        Counting(te.Linear(64, 64)),
        inputs=lambda rng: rng.normal(32, 64),
        weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        parallel=parity.Parallel(along, finish=finish),
    )


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_buffers_that_a_forward_pass_changes_alike_on_all_ranks_are_the_reference_s(precision):
    (result,) = parity.compare(parity.Case("counted", counted, sizes=({},)), [precision], ranks=DP, steps=3)
    assert (result.status, result.reason, result.findings) == ("passed", "", ())


CLIP = 0.1


def clipped(te: Any, ranks: Any, is_early: bool, by_hand: bool) -> parity.Pair:
    """Return a pair of a layer that data-parallel ranks train, clipping gradients before or after they add them up."""
    along = {"input": [parity.over("dp")], "output": [parity.over("dp")]}

    def clip(parameters: list[torch.Tensor]) -> None:
        gradients = [one.grad for one in parameters if one.grad is not None]
        if not by_hand:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            return
        norm = torch.stack([x.float().square().sum() for x in gradients]).sum().sqrt()
        for x in gradients:
            x.mul_((CLIP / norm).clamp(max=1.0))

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model.loss(x)
        loss.backward()
        if is_early:
            clip(model.parameters())
        add_up(model.parameters(), ranks.dp.group)
        if not is_early:
            clip(model.parameters())
        optimizer.step()
        return loss

    return parity.Pair(
        torch.nn.Linear(64, 64),
        te.Linear(64, 64),
        inputs=lambda rng: rng.normal(32, 64),
        weights={"weight": "weight", "bias": "bias"},
        parallel=parity.Parallel(along),
        training=parity.Training(clip=CLIP, candidate_step=step),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_gradients_are_clipped_after_ranks_have_added_them_up(is_early, by_hand, precision):
    case = parity.Case("clipped", partial(clipped, is_early=is_early, by_hand=by_hand), sizes=({},))
    (result,) = parity.compare(case, [precision], ranks=DP, steps=2)
    assert [one.title for one in result.findings] == ["gradient-clipping"] * is_early, result.reason
    assert not is_early or "ranks clip their own gradients before these are reduced" in result.findings[0].message


def test_small_weights_in_fp16_are_rounded_to_its_even_grid():
    """FP32 parts of an optimizer are compared with weights below FP16's normal numbers, whose ulps do not shrink."""
    (result,) = parity.compare(case_of("divided optimizer"), ["fp16"], ranks=DP, steps=STEPS)
    assert (result.status, result.findings) == ("passed", ())
