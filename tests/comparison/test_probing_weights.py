"""Probing weights show what a fresh model's own weights leave idle; weights that were loaded are never touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import te
from parity.api import compare
from parity.case.case import Case, Pair
from parity.case.validate import check_case
from parity.passes.prepare import reweighed
from parity.result import REWEIGHED, Result

HIDDEN, HEADS = 64, 4
KERNELS = te.kernels("cpu")


class Block(nn.Module):
    """A norm, capped attention in a window, and a clamped MLP, whose weights are as small as a language model's."""

    def __init__(self, cap: float = 30.0, limit: float = 5.0, bias: bool = True) -> None:
        super().__init__()
        self.cap, self.limit, self.bias = cap, limit, bias
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.query, self.key, self.value, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(5))
        for layer in (self.query, self.key, self.value, self.up, self.down):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / 4.0
        if math.isfinite(self.cap):
            scores = self.cap * torch.tanh(scores / self.cap)
        x = x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        inner = F.linear(self.norm(x), self.up.weight, self.up.bias if self.bias else None)
        result: Tensor = self.down(F.silu(inner).clamp(max=self.limit))
        return result


def load(block: Block, state: dict[str, Tensor]) -> None:
    for name, x in block.named_parameters():
        x.data.copy_(state[name])


def case_of(weigh: Callable[[Block], object] = lambda block: None, probe: bool = True, **changes: Any) -> Case:
    def factory(te: Any) -> Pair:
        reference = Block()
        weigh(reference)
        weights = {name: name for name, _ in reference.named_parameters()}
        return Pair(reference, Block(**changes), lambda rng: rng.normal(2, 16, HIDDEN), weights)

    return Case("block", factory, sizes=({},), probe=probe, path=Path(__file__))


def result_of(case: Case | Pair, precision: str = "bf16") -> Result:
    (result,) = compare(case, [precision], diagnose=False, probe_weights=True)
    return result


def failing_kinds(result: Result) -> set[str]:
    return {tensor.kind for tensor in result.tensors if not tensor.passed}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_a_right_port_passes_with_both_sets_of_weights(precision: str) -> None:
    result = result_of(case_of(), precision)
    assert result.passed
    assert [tensor.label for tensor in result.tensors if tensor.kind == REWEIGHED] == ["reweighed output"]


@pytest.mark.parametrize("changes", [{"cap": math.inf}, {"limit": math.inf}])
def test_what_idles_with_small_weights_shows_with_probing_weights(changes: dict[str, float]) -> None:
    (usual,) = compare(case_of(**changes), ["bf16"])
    assert usual.passed
    assert result_of(case_of(probe=False, **changes)).passed
    assert failing_kinds(result_of(case_of(**changes))) == {REWEIGHED}


def test_the_cause_is_found_with_the_probing_weights() -> None:
    (result,) = compare(case_of(cap=math.inf), ["bf16"], probe_weights=True)
    assert [finding.title for finding in result.findings] == ["softcap"]
    assert failing_kinds(result) == {REWEIGHED}


def test_a_number_beside_an_output_is_compared_as_well() -> None:
    def with_loss(block: Block, x: Tensor) -> dict[str, Tensor]:
        y = block(x)
        return {"y": y, "loss": y.square().mean()}

    def factory(te: Any) -> Pair:
        reference = Block()
        weights = {name: name for name, _ in reference.named_parameters()}
        inputs = lambda rng: rng.normal(2, 16, HIDDEN)  # noqa: E731
        block = Block(math.inf)
        return Pair(reference, block, inputs, weights, call_reference=with_loss, call_candidate=with_loss)

    result = result_of(Case("scored", factory, sizes=({},), path=Path(__file__)))
    assert result.status == "failed", result.reason
    failing = {tensor.label for tensor in result.tensors if not tensor.passed}
    assert failing == {"reweighed output[y]", "reweighed output[loss]"}


def test_loaded_weights_are_never_touched() -> None:
    state = Block().state_dict()
    assert kinds(result_of(case_of(partial(load, state=state), cap=math.inf))) == {"passed"}


def test_a_pair_of_modules_keeps_the_weights_that_it_holds() -> None:
    reference, candidate = Block(), Block(cap=math.inf)
    candidate.load_state_dict(reference.state_dict())
    weights = {name: name for name, _ in reference.named_parameters()}
    pair = Pair(reference, candidate, lambda rng: rng.normal(2, 16, HIDDEN), weights)
    assert kinds(result_of(pair)) == {"passed"}


def kinds(result: Result) -> set[str]:
    """Return the result's status, and the kind of outputs with probing weights if there are any."""
    return {result.status, *(tensor.kind for tensor in result.tensors if tensor.kind == REWEIGHED)}


def names_reweighed(case: Case) -> set[str]:
    (checked,) = check_case(case, KERNELS.te)
    probing = reweighed(case, checked, KERNELS)
    return set(probing.reweighed) if probing else set()


def test_constants_change_only_if_no_weight_was_loaded() -> None:
    every = {name for name, _ in Block().named_parameters()}
    assert names_reweighed(case_of()) == every
    loaded = Block().query.weight.detach().clone()
    drawn = every - {"norm.weight", "query.weight"}
    assert names_reweighed(case_of(lambda block: block.query.weight.data.copy_(loaded))) == drawn
    assert names_reweighed(case_of(probe=False)) == set()


def test_outputs_that_cannot_be_judged_with_probing_weights_are_noted() -> None:
    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(16)))

    def factory(te: Any) -> Pair:
        reference = Deep()
        weights = {name: name for name, _ in reference.named_parameters()}
        return Pair(reference, Deep(), lambda rng: 1e33 * rng.normal(4, HIDDEN), weights)

    result = result_of(Case("deep", factory, sizes=({},), path=Path(__file__)), "fp32")
    assert result.passed
    assert any(note.startswith("not compared with probing weights: ") for note in result.notes)
