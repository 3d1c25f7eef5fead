"""Mixtures whose port has TE's fused router and auxiliary loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.weight_map import stack

HIDDEN, FFN, EXPERTS, CHOSEN, TOKENS = 80, 112, 6, 2, 96


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Mixtral's, with its auxiliary loss, which reads the probabilities of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=0.5)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result = result.index_add(0, token, expert(x[token]) * weights[token, place, None])
        share = F.one_hot(chosen, EXPERTS).sum(1).to(x.dtype).mean(0) / CHOSEN
        return result, 0.02 * EXPERTS * (share * probabilities.mean(0)).sum()


def compared(precision: str, score: str = "softmax", detach: bool = False):
    def factory(te, **_):
        from transformer_engine.pytorch import router

        class Port(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
                self.fc1 = te.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, bias=False)
                self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                logits = self.router(x)
                weights, routing = router.fused_topk_with_score_function(
                    logits, CHOSEN, False, None, None, None, score, None
                )
                rows, places = te.moe_permute(x, routing, num_out_tokens=CHOSEN * len(x), map_type="mask")
                splits = routing.sum(0)
                gate, up = self.fc1(rows, splits.tolist()).chunk(2, -1)
                rows = self.fc2(F.silu(gate) * up, splits.tolist())
                result = te.moe_unpermute(rows, places, weights, restore_shape=x.shape, map_type="mask")
                _, scores = router.fused_compute_score_for_moe_aux_loss(logits, CHOSEN, "softmax")
                scores = scores.detach() if detach else scores
                loss = router.fused_moe_aux_loss(scores, splits.int(), len(x), EXPERTS, CHOSEN, 0.02)
                return result.to(x.dtype), loss

        weights = {"router.weight": "router.weight"}
        for i in range(EXPERTS):
            weights[stack(f"experts.{i}.gate.weight", f"experts.{i}.up.weight")] = f"fc1.weight{i}"
            weights[f"experts.{i}.down.weight"] = f"fc2.weight{i}"
        return parity.Pair(Mixture(), Port(), lambda rng: rng.normal(TOKENS, HIDDEN), weights)

    (result,) = parity.compare(parity.Case("fused_router", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_right_port_passes(precision):
    assert compared(precision).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_scores_of_the_choice_are_told_where_the_loss_reads_the_right_ones(precision):
    result = compared(precision, score="sigmoid")
    assert [finding.title for finding in result.findings] == ["routing-weights"]
    assert "they are scored by a sigmoid there" in result.findings[0].message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_detached_is_an_error_though_rounding_hides_its_gradients(precision):
    result = compared(precision, detach=True)
    assert result.status == "error"
    assert "output[1] of the candidate has no gradient" in result.reason
