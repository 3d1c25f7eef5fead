"""Products of two activations are no linear layers, and computed weights are weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity.numerics.freedom import FUSED
from parity.numerics.rounding import rounded
from parity.te.precision import PRECISIONS


class Similarity(nn.Module):
    """InfoNCE: each of the first half's rows is to find its partner in the second half."""

    def __init__(self, linear, scale=1.0):
        super().__init__()
        self.linear, self.scale = linear(64, 64), scale

    def forward(self, x):
        embeddings = F.normalize(self.linear(x), dim=-1)
        left, right = embeddings.chunk(2)
        scores = left @ right.T / (0.1 * self.scale)
        return F.cross_entropy(scores, torch.arange(len(scores)))


def similarity(scale=1.0):
    def factory(te, **_):
        return parity.Pair(
            Similarity(nn.Linear),
            Similarity(te.Linear, scale),
            weights={"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
            inputs=lambda rng, rows: rng.normal(rows, 64),
        )

    return parity.Case("similarity", factory, sizes=(dict(rows=64),))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current", "fp8_block"])
def test_a_right_contrastive_loss_passes(precision):
    results = parity.compare(similarity(), [precision], seeds=range(4))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_another_temperature_is_told(precision):
    (result,) = parity.compare(similarity(scale=1.02), [precision])
    assert result.status == "failed"


def test_attention_of_one_head_and_one_sequence_passes():
    def factory(te, **_):
        return parity.Pair(
            Core(),
            te.DotProductAttention(1, 64, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="no_mask"),
            inputs=lambda rng, seq: tuple(rng.normal(1, seq, 1, 64) for _ in range(3)),
        )

    results = parity.compare(parity.Case("one_head", factory, sizes=(dict(seq=64),)), ["fp32", "bf16", "fp8_current"])
    assert {result.status for result in results} == {"passed"}


class Core(nn.Module):
    def forward(self, q, k, v):
        scores = q[0, :, 0] @ k[0, :, 0].T / 8.0
        return (scores.softmax(-1) @ v[0, :, 0])[None]


def operands_that_stay(product, parameters=("w",)):
    """Whether a product reads its operands as they are in FP32, and its gradients do, under FP8's rounding."""
    torch.manual_seed(0)
    leaves = {name: torch.randn(32, 32).bfloat16().float().requires_grad_() for name in ("x", "y", "w", "v")}
    with rounded(PRECISIONS["fp8_current"].rounding, [leaves[name] for name in parameters], FUSED) as phase:
        y = product(**leaves)
        phase.begin_backward()
        y.sum().backward()
    results = [y.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    golden = product(**exact)
    golden.sum().backward()
    truth = [golden.detach(), *(leaf.grad for leaf in exact.values() if leaf.grad is not None)]
    errors = [((result - true).norm() / true.norm()).item() for result, true in zip(results, truth, strict=True)]
    return [error < 0.005 for error in errors]


def test_a_product_of_two_activations_and_its_gradients_read_the_dtype_alone():
    assert all(operands_that_stay(lambda x, y, **_: x @ y))
    assert all(operands_that_stay(lambda x, **_: x @ x.T))


@pytest.mark.parametrize(
    "weight",
    [
        lambda w, v: w,
        lambda w, v: 0.5 * w,
        lambda w, v: w * torch.full((32, 1), 0.5),
        lambda w, v: w + 0.1 * (v @ w),
        lambda w, v: torch.cat([w[:16], v[16:]]),
        lambda w, v: w[torch.arange(31, -1, -1)],
    ],
    ids=["itself", "scaled", "by_a_constant", "low_rank_sum", "joined", "permuted"],
)
def test_a_weight_that_is_computed_of_weights_is_a_linear_layers(weight):
    output, of_x, *_ = operands_that_stay(lambda x, w, v, **_: x @ weight(w, v), parameters=("w", "v"))
    assert not output
    assert not of_x


def test_a_weight_that_an_update_is_added_to_is_a_linear_layers():
    output, of_x, *_ = operands_that_stay(lambda x, y, w, **_: x @ (w - 0.01 * y))
    assert not output
    assert not of_x


def test_what_an_embedding_returns_is_an_activation():
    ids = torch.arange(32)
    assert all(operands_that_stay(lambda w, v, **_: F.embedding(ids, w) @ F.embedding(ids, v).T, parameters=("w", "v")))
