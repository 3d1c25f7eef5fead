"""``suggest_map`` where the reference stores a weight in another shape, under a bare name, or once for two uses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.suggest import Suggestion
from parity.suggest.suggestion import explain, python

te = parity.te.kernels("cpu").te
HIDDEN, FFN, HEADS, PATCH = 64, 96, 4, 4


def assert_entries(reference: nn.Module, candidate: nn.Module, inputs, *entries: str) -> Suggestion:
    suggestion = parity.suggest_map(parity.Pair(reference, candidate, inputs))
    assert suggestion.settled, explain(suggestion)
    written = python(suggestion.weights)
    assert [entry for entry in entries if f"    {entry},\n" not in written] == []
    return suggestion


class Patches(nn.Module):
    """A convolution over the patches of an image, and a position for each."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, stride=PATCH, bias=bias)
        self.pos = nn.Parameter(torch.randn(1, 4, HIDDEN))

    def forward(self, image: Tensor) -> Tensor:
        return self.patches(image).flatten(2).mT + self.pos


class LinearPatches(nn.Module):
    """``order`` is that of a patch's channels (3), rows (4) and columns (5) among the dimensions of the cut image."""

    def __init__(self, bias: bool, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.proj = te.Linear(3 * PATCH**2, HIDDEN, bias=bias)
        self.pos = nn.Parameter(torch.zeros(4, HIDDEN))

    def forward(self, image: Tensor) -> Tensor:
        cut = image.view(-1, 3, 2, PATCH, 2, PATCH).permute(0, 2, 4, 1, 3, 5)
        return self.proj(cut.permute(0, 1, 2, *self.order).flatten(3).flatten(1, 2)) + self.pos


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("order", "stored"), [((3, 4, 5), "c p q"), ((4, 5, 3), "p q c"), ((5, 3, 4), "q c p")], ids=str
)
def test_a_convolution_over_patches_is_a_linear_layer(bias, order, stored):
    assert_entries(
        Patches(bias),
        LinearPatches(bias, order),
        lambda rng: rng.normal(2, 3, 2 * PATCH, 2 * PATCH),
        f'parity.rearrange("patches.weight", "o c p q -> o ({stored})"): "proj.weight"',
        'parity.rearrange("pos", "1 a b -> a b"): "pos"',
        *['"patches.bias": "proj.bias"'] * bias,
    )


class PointwiseMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.c1, self.c2 = nn.Conv1d(HIDDEN, FFN, 1), nn.Conv1d(FFN, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c2(F.gelu(self.c1(self.norm(x).mT), approximate="tanh")).mT


class BareMLP(nn.Module):
    """Its parameters are the module's own, with a letter each."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
        self.w1, self.b1 = nn.Parameter(0.1 * torch.randn(FFN, HIDDEN)), nn.Parameter(torch.zeros(FFN))
        self.w2, self.b2 = nn.Parameter(0.1 * torch.randn(FFN, HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(F.layer_norm(x, (HIDDEN,), self.g, self.b), self.w1, self.b1)
        return F.gelu(hidden, approximate="tanh") @ self.w2 + self.b2


@pytest.mark.parametrize(
    ("reference", "entries"),
    [
        (PointwiseMLP, ['parity.rearrange("c1.weight", "a b 1 -> a b"): "fc1_weight"', '"c1.bias": "fc1_bias"']),
        (BareMLP, ['"b": "layer_norm_bias"', '"b1": "fc1_bias"', 'parity.transpose("w2"): "fc2_weight"']),
    ],
)
def test_an_mlp_of_convolutions_or_bare_parameters_is_mapped(reference, entries):
    assert_entries(reference(), te.LayerNormMLP(HIDDEN, FFN), lambda rng: rng.normal(2, 16, HIDDEN), *entries)


class ValueFirst(nn.Module):
    """A gated MLP as diffusers has it: the gate is the second half of a layer whose name does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.net = nn.ModuleList([nn.Linear(HIDDEN, 2 * FFN), nn.Identity(), nn.Linear(FFN, HIDDEN)])

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.net[0](self.norm(x)).chunk(2, -1)
        return self.net[2](value * F.gelu(gate, approximate="tanh"))


def test_what_tes_name_tells_of_a_layer_is_asked_of_one_whose_name_tells_nothing():
    assert_entries(
        ValueFirst(),
        te.LayerNormMLP(HIDDEN, FFN, activation="geglu"),
        lambda rng: rng.normal(2, 16, HIDDEN),
        'parity.reorder("net.0.weight", order=(1, 0)): "fc1_weight"',
    )


class PointwiseAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Conv2d(HIDDEN, 3 * HIDDEN, 1), nn.Conv2d(HIDDEN, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.to_qkv(x.mT[..., None]).view(len(x), 3, HEADS, HIDDEN // HEADS, -1)
        attended = F.scaled_dot_product_attention(*heads.permute(1, 0, 2, 4, 3))
        return self.to_out(attended.mT.reshape(len(x), HIDDEN, -1, 1))[..., 0].mT


def test_attention_of_convolutions_of_1_by_1_is_mapped():
    options = dict(attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask", fuse_qkv_params=True)
    assert_entries(
        PointwiseAttention(),
        te.MultiheadAttention(HIDDEN, HEADS, **options),
        lambda rng: rng.normal(2, 16, HIDDEN),
        'parity.rearrange("to_qkv.weight", "a b 1 1 -> a b"): '
        'parity.separated_qkv("qkv.weight", groups=4, head_dim=16)',
    )


class HeadProjections(nn.Module):
    """Its weights have a dimension for the heads, as models from JAX have."""

    def __init__(self) -> None:
        super().__init__()
        shape = (HIDDEN, HEADS, HIDDEN // HEADS)
        self.wq, self.wk, self.wv = (nn.Parameter(0.15 * torch.randn(*shape)) for _ in range(3))
        self.wo = nn.Parameter(0.15 * torch.randn(*shape[1:], HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        heads = (torch.einsum("bnd,dhk->bhnk", x, weight) for weight in (self.wq, self.wk, self.wv))
        return torch.einsum("bhnk,hkd->bnd", F.scaled_dot_product_attention(*heads), self.wo)


def test_projections_with_a_dimension_for_the_heads_are_mapped():
    options = dict(attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask", bias=False)
    assert_entries(
        HeadProjections(),
        te.MultiheadAttention(HIDDEN, HEADS, **options),
        lambda rng: rng.normal(2, 16, HIDDEN),
        'parity.rearrange("wq", "d h k -> (h k) d"): "qkv.query_weight"',
        'parity.rearrange("wo", "h k d -> d (h k)"): "proj.weight"',
    )


class LanguageModel(nn.Module):
    def __init__(self, layer: type[nn.Module], tied: bool) -> None:
        super().__init__()
        self.wte, self.layer = nn.Embedding(50, HIDDEN), layer(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, 50, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.layer(self.wte(tokens))))


def test_a_tied_embedding_fills_both_of_tes():
    assert_entries(
        LanguageModel(nn.Linear, tied=True),
        LanguageModel(te.Linear, tied=False),
        lambda rng: rng.integers(2, 16, high=50),
        '"wte.weight": parity.copies("wte.weight", "lm_head.weight")',
    )


def test_layers_of_one_name_whose_shapes_do_not_go_together_are_told_together():
    suggestion = parity.suggest_map(
        parity.Pair(
            nn.ModuleDict({"proj": nn.Linear(HIDDEN, FFN)}),
            nn.ModuleDict({"proj": te.Linear(HIDDEN, 2 * FFN)}),
            lambda rng: rng.normal(2, HIDDEN),
        )
    )
    (problem,) = suggestion.problems
    assert problem.startswith('"proj.weight" (96, 64), "proj.bias" (96,) should hold TE\'s "proj.weight" (192, 64), ')
