"""Test which products the rounding model treats as linear layers' GEMMs, and when it casts each operand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.numerics.freedom import FUSED
from parity.numerics.plain import are_patches, backward, forward, from_rows, rows_of
from parity.numerics.rounding import rounded
from parity.numerics.storing import OperandsRead
from parity.te import PRECISIONS

# An operand is cast once, however many GEMMs read it, as long as it does not change.


class Reader:
    """Reads matrices through a cast that doubles them, and counts the casts."""

    def __init__(self):
        self.casts = 0
        self._read = OperandsRead()

    def __call__(self, matrix, dim=1, is_cast_along_dim=False, will_be_read_later=True):
        def cast(matrix, dim):
            self.casts += 1
            return 2 * matrix

        found = self._read.read(matrix, matrix._version, dim, cast, is_cast_along_dim, will_be_read_later)
        assert torch.equal(found, 2 * matrix)
        return found


@pytest.fixture
def read():
    return Reader()


def test_a_matrix_and_its_transposed_view_are_cast_once(read):
    x = torch.randn(3, 5)
    assert read(x, 1).shape == (3, 5)
    assert read(x.t(), 1).shape == (5, 3)
    assert read.casts == 1


def test_a_cast_in_blocks_is_made_once_for_each_of_the_matrixs_own_dimensions(read):
    x = torch.randn(3, 5)
    for matrix, dim in ((x, 0), (x.t(), 1), (x, 1), (x.t(), 0)):
        read(matrix, dim, is_cast_along_dim=True)
    assert read.casts == 2


def test_a_matrix_that_was_written_to_is_cast_again(read):
    x = torch.randn(3, 5)
    read(x)
    x.add_(1.0)
    read(x)
    assert read.casts == 2


def test_parts_of_one_tensor_are_not_taken_for_each_other(read):
    x = torch.randn(6, 5)
    read(x[:3])
    read(x[3:])
    read(x[:, :3])
    assert read.casts == 3


def test_what_only_the_next_gemm_reads_is_kept_until_something_else_is_cast(read):
    gradient, weight = torch.randn(3, 5), torch.randn(4, 5)
    read(weight)
    read(gradient, will_be_read_later=False)
    read(weight)
    read(gradient, will_be_read_later=False)
    assert read.casts == 2
    read(torch.randn(2, 2))
    read(gradient, will_be_read_later=False)
    assert read.casts == 4


def test_memory_that_is_given_out_again_is_not_taken_for_what_lay_there(read):
    for _ in range(20):
        read(torch.randn(64, 64), will_be_read_later=False)
    assert read.casts == 20


def test_what_is_kept_counts_with_its_bytes_but_for_casts_that_copy_nothing():
    read = OperandsRead()
    x, y = torch.randn(6, 5), torch.randn(4, 5)
    read.read(x, x._version, 1, lambda matrix, dim: 2 * matrix, False, True)
    read.read(y, y._version, 1, lambda matrix, dim: matrix, False, True)
    assert read.held == x.nbytes


# Products of two activations are not linear layers, and computed weights are weights.


class Similarity(nn.Module):
    """InfoNCE, in which each row of the first half should find its partner in the second half."""

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
    (result,) = parity.compare(similarity(scale=1.02), [precision], diagnose=False)
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
    """Return, for a product and each of its gradients, whether the operands stay exact under FP8's rounding."""
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


# Convolutions of patches that do not overlap are linear layers, also for the rounding model.


SHAPES = [
    ((2, 3, 8), (4,)),
    ((2, 3, 8, 12), (4, 2)),
    ((2, 3, 9, 11), (4, 5)),
    ((2, 2, 4, 4, 6), (2, 4, 3)),
    ((2, 5, 7), (1,)),
]
CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left @ right if bias is None else left @ right + bias


@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_rows_of_patches_and_back_give_the_pixels_that_patches_hold(shape, kernel):
    x = torch.randn(shape)
    covered = (..., *(slice(size // width * width) for size, width in zip(shape[2:], kernel, strict=True)))
    expected = torch.zeros_like(x)
    expected[covered] = x[covered]
    assert torch.equal(from_rows(rows_of(x, kernel), shape, kernel), expected)


@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_results_and_gradients_are_those_of_the_convolution(shape, kernel):
    x, weight, bias = torch.randn(shape), torch.randn(6, shape[1], *kernel), torch.randn(6)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    right = CONVOLUTIONS[len(kernel)](x, weight, bias, stride=kernel)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    with torch.no_grad():
        patches = rows_of(x, kernel)
        torch.testing.assert_close(forward(x, weight, bias, patches, product), right)
        gradients = backward(gradient, x, weight, patches, (True, True, True), product)
    for found, tensor in zip(gradients, (x, weight, bias), strict=True):
        torch.testing.assert_close(found, tensor.grad)


def test_a_convolution_that_reads_a_pixel_twice_or_not_at_all_has_no_patches():
    weight = torch.randn(6, 3, 2, 2)
    usual = ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert are_patches(weight, *usual)
    for place, other in ((0, [1, 1]), (1, [1, 1]), (2, [2, 2]), (3, True), (5, 3)):
        assert not are_patches(weight, *usual[:place], other, *usual[place + 1 :])


class Embedding(nn.Module):
    """Embed patches, as in ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).transpose(1, 2)


class LinearEmbedding(nn.Module):
    """The same embedding with TE's linear layer."""

    def __init__(self, te) -> None:
        super().__init__()
        self.patches = te.Linear(3 * 8 * 8, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).permute(0, 2, 4, 1, 3, 5)
        return self.patches(x.flatten(3).flatten(1, 2))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current", "fp8_block"])
def test_a_right_port_to_a_linear_layer_passes_on_every_seed(precision):
    def factory(te, **_):
        weights = {parity.rearrange("patches.weight", "o c p q -> o (c p q)"): "patches.weight"}
        return parity.Pair(
            reference=Embedding(),
            candidate=LinearEmbedding(te),
            inputs=lambda rng, batch: rng.normal(batch, 3, 32, 32),
            weights=weights | {"patches.bias": "patches.bias"},
        )

    results = parity.compare(parity.Case("patches", factory, sizes=(dict(batch=4),)), [precision], seeds=range(4))
    assert {result.status for result in results} == {"passed"}


# A watch is told to which layer each operand belongs, and decides what its GEMMs read.


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return self.key(x) * self.value(x)


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_watch_is_told_the_layer_of_every_gemm_also_among_layers_that_read_the_same_inputs(has_gradient):
    module, told = Heads(), []
    names = {weight.untyped_storage().data_ptr(): name for name, weight in module.named_parameters()}

    def watch(operand, cast):
        told.append(("".join(sorted(names[at] for at in operand.weights)), operand.part))
        return cast(operand.matrix, operand.dim)

    with rounded(PRECISIONS["fp8_current"].rounding, module.parameters(), FUSED, watch=watch) as phase:
        y = module(torch.randn(8, 16, requires_grad=has_gradient))
        phase.begin_backward()
        y.sum().backward()
    forward = [(f"{name}.weight", part) for name in ("first", "key", "value") for part in ("inputs", "weights")]
    assert told[:6] == forward
    for name in ("first", "key", "value"):
        of_layer = [part for each, part in told[6:] if each == f"{name}.weight"]
        parts = ["gradients", "inputs"] + ["gradients", "weights"] * (has_gradient or name != "first")
        assert sorted(of_layer) == sorted(parts)


def test_what_a_watch_returns_is_what_gemms_read():
    layer, x = nn.Linear(16, 8, bias=False), torch.randn(4, 16)
    with rounded(
        PRECISIONS["bf16"].rounding, layer.parameters(), FUSED, watch=lambda operand, cast: operand.matrix * 2
    ):
        y = layer(x)
    torch.testing.assert_close(y, (4 * layer(x)).bfloat16().float())


@pytest.mark.parametrize("plain", ["key", "value"])
def test_a_layer_outside_of_te_leaves_the_gradient_of_one_with_the_same_inputs_and_channels_rounded(plain):
    module, x, cotangent = Heads(), torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)

    def gradients(outside):
        module.zero_grad()
        outside = [getattr(module, name).weight for name in outside]
        with rounded(PRECISIONS["fp8_current"].rounding, module.parameters(), FUSED, plain=outside) as phase:
            y = module.key(x) + module.value(x)
            phase.begin_backward()
            y.backward(cotangent)
        return {name: getattr(module, name).weight.grad.clone() for name in ("key", "value")}

    found, of_plain, of_te = (gradients(outside) for outside in ([plain], ["key", "value"], []))
    for name, gradient in found.items():
        right, wrong = (of_plain, of_te) if name == plain else (of_te, of_plain)
        assert torch.equal(gradient, right[name])
        assert not torch.equal(gradient, wrong[name])
