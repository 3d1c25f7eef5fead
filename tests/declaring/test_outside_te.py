"""What a port leaves to plain PyTorch layers is told from what TE's modules hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity import te
from parity.case.case import Pair
from parity.case.validate import parameters_outside_te
from parity.numerics.formats import Rounding, e4m3, e5m2
from parity.numerics.rounding import rounded

FP8 = Rounding(torch.bfloat16, e4m3, e4m3, e5m2)


def bf16(x):
    return x.bfloat16().float()


def pair(candidate, weights):
    return Pair(reference=nn.Identity(), candidate=candidate, inputs=lambda rng: (), weights=weights)


def test_parameters_of_te_s_modules_of_their_parts_and_of_classes_derived_from_them_are_inside():
    modules = te.kernels("cpu").te

    class Derived(modules.Linear):
        """A user's own."""

    candidate = nn.ModuleDict({
        "layer": modules.TransformerLayer(32, 64, 2, fuse_qkv_params=True),
        "derived": Derived(32, 32),
        "router": nn.Linear(32, 4),
        "operation": modules.ops.Linear(32, 32),
    })  # fmt: skip
    names = ["layer.self_attention.layernorm_qkv.weight", "derived.weight", "router.weight", "operation.weight"]
    assert parameters_outside_te(pair(candidate, {name: name for name in names})) == {"router.weight"}


def test_a_weight_that_an_embedding_shares_with_te_s_head_is_inside():
    candidate = nn.ModuleDict(
        {"embedding": nn.Embedding(16, 8), "head": te.kernels("cpu").te.Linear(8, 16, bias=False)}
    )
    candidate["head"].weight = candidate["embedding"].weight
    assert parameters_outside_te(pair(candidate, {"embedding.weight": "embedding.weight"})) == set()


def test_a_weight_that_lies_partly_in_te_is_inside():
    candidate = nn.ModuleDict({"inside": te.kernels("cpu").te.Linear(8, 8), "outside": nn.Linear(8, 8)})
    weights = {parity.stack("a", "b"): parity.stack("inside.weight", "outside.weight")}
    assert parameters_outside_te(pair(candidate, weights)) == set()


def test_a_plain_layer_multiplies_what_is_stored_forward_and_backward():
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    cotangent = torch.randn(4, 16)
    with rounded(FP8, [weight], plain=[weight]) as phase:
        y = F.linear(x, weight)
        phase.begin_backward()
        of_x, of_weight = torch.autograd.grad(y, (x, weight), cotangent)
    assert torch.equal(y, bf16(bf16(x) @ bf16(weight).t()))
    assert torch.equal(of_x, bf16(bf16(cotangent) @ bf16(weight)))
    torch.testing.assert_close(of_weight, bf16(bf16(cotangent).t() @ bf16(x)), rtol=0, atol=0)


def test_a_layer_of_te_s_beside_it_is_rounded_as_before():
    x, weights = torch.randn(4, 32), [torch.randn(16, 32) for _ in range(2)]
    with rounded(FP8, weights):
        expected = F.linear(x, weights[1])
    with rounded(FP8, weights, plain=weights[:1]):
        F.linear(x, weights[0])
        assert torch.equal(F.linear(x, weights[1]), expected)
