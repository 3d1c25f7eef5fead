"""Pairs whose candidate modifies attention's scores with cuDNN's graphs (``score_mod``), and their references."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import te

HEADS, FEATURES, TOKENS = 4, 32, 64
CALL = te.kernels("auto").te.DotProductAttention.forward
pytestmark = pytest.mark.skipif("score_mod" not in inspect.signature(CALL).parameters, reason="TE has no score_mod yet")


class Reference(nn.Module):
    """Attention whose scores are capped, or changed in proportion to the distance from query to key."""

    def __init__(self, cap: float = 0.0, slope: float = 0.0) -> None:
        super().__init__()
        self.cap, self.slope = cap, slope

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        scores = query @ key.mT / math.sqrt(FEATURES)
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        tokens = torch.arange(TOKENS, device=scores.device)
        scores = scores + (self.slope * (tokens - tokens[:, None])).to(scores.dtype)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Softcap:
    def forward(self, graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
        self.divided = graph.div(score, tensors["cap"])
        return graph.mul(graph.tanh(self.divided), tensors["cap"])

    def backward(self, graph: Any, gradient: Any, tensors: dict[str, Any]) -> Any:
        of_tanh = graph.tanh_backward(loss=graph.mul(gradient, tensors["cap"]), input=self.divided)
        return graph.div(of_tanh, tensors["cap"])


def add_distance(graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
    distance = graph.sub(graph.gen_index(score, 3), graph.gen_index(score, 2))
    return graph.add(score, graph.mul(distance, tensors["slope"]))


def scalar(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value)


def softcap(cap: float) -> dict[str, Any]:
    chosen, tensors = Softcap(), {"cap": scalar(cap)}
    of_backward = {"score_mod_bprop": chosen.backward, "score_mod_bprop_tensors": tensors}
    return {"score_mod": chosen.forward, "score_mod_tensors": tensors, **of_backward}


def bias(slope: float) -> dict[str, Any]:
    return {"score_mod": add_distance, "score_mod_tensors": {"slope": scalar(slope)}}


@pytest.mark.parametrize(
    ("reference", "right", "wrong", "title"),
    [
        ({"cap": 30.0}, softcap(30.0), softcap(50.0), "softcap"),
        ({"slope": 0.05}, bias(0.05), bias(-0.05), "attention-bias"),
        (
            {"cap": 2.0},
            softcap(2.0),
            {name: value for name, value in softcap(2.0).items() if "bprop" not in name},
            "unexplained",
        ),
    ],
    ids=["cap", "sign of a bias", "no gradient"],
)
def test_a_right_modification_passes_and_a_wrong_one_fails(
    reference: dict[str, float], right: dict[str, Any], wrong: dict[str, Any], title: str
) -> None:
    def pair_with(options: dict[str, Any]) -> parity.case.case.Case:
        return parity.pair("score_mod")(
            lambda te: parity.Pair(
                reference=Reference(**reference),
                candidate=te.DotProductAttention(HEADS, FEATURES, qkv_format="bshd", attn_mask_type="no_mask"),
                inputs=lambda rng: tuple(rng.normal(2, TOKENS, HEADS, FEATURES) for _ in range(3)),
                call_candidate=lambda module, *tensors: module(*tensors, **options),
            )
        )

    results = parity.compare(pair_with(right), ["bf16", "fp16"], seeds=range(3))
    assert [result.status for result in results] == ["passed"] * 6
    for result in parity.compare(pair_with(wrong), ["bf16", "fp16"], seeds=range(3)):
        assert (result.status, result.findings[0].title) == ("failed", title)
