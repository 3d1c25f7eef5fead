"""``suggest_map`` for weights stored in another shape, under a bare name, once for two uses, or for all experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.case import Rng
from parity.weights.suggest import Suggestion
from parity.weights.suggest.proposal import explain, python

# ``suggest_map`` if the reference stores a weight in another shape, under a bare name, or once for two uses.


te = parity.te.kernels("cpu").te
HIDDEN, FFN, HEADS, PATCH = 64, 96, 4, 4


def assert_entries(reference: nn.Module, candidate: nn.Module, inputs, *entries: str) -> Suggestion:
    suggestion = parity.suggest_map(parity.Pair(reference, candidate, inputs))
    assert suggestion.settled, explain(suggestion)
    written = python(suggestion.weights)
    assert [entry for entry in entries if f"    {entry},\n" not in written] == []
    return suggestion


class Patches(nn.Module):
    """A convolution over the patches of an image, with a learned position for each patch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, stride=PATCH, bias=bias)
        self.pos = nn.Parameter(torch.randn(1, 4, HIDDEN))

    def forward(self, image: Tensor) -> Tensor:
        return self.patches(image).flatten(2).mT + self.pos


class LinearPatches(nn.Module):
    """A linear layer of patches; ``order`` permutes a patch's channels (3), rows (4) and columns (5)."""

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
    """An MLP whose parameters are its own, with names of a letter or two."""

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
    """A gated MLP as in diffusers: the gate is the second half of a layer whose name does not say so."""

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
    """Projections whose weights have a dimension for the heads, as in models from JAX."""

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


# ``suggest_map`` for mixtures of experts: stacked weights, lists of modules and te.GroupedLinear, in any layout.


EXPERTS = 3


def tokens(rng: Rng) -> Tensor:
    return rng.normal(32, HIDDEN)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.15 * torch.randn(*shape))


def mixed(outputs: Tensor, scores: Tensor) -> Tensor:
    """Return the sum of the experts' outputs, weighted by the router's softmax."""
    return torch.einsum("eth,te->th", outputs, scores.softmax(-1))


class Shared(nn.Module):
    """An expert for all tokens, with its own norm and names that reveal nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.sg, self.su = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.sd = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        return self.sd(F.silu(self.sg(x)) * self.su(x))


class Stacked(nn.Module):
    """All experts' weights in one, ``[experts, out, in]``, or ``[experts, in, out]`` with gate and up alternating."""

    def __init__(self, layout: str, shared: bool = False) -> None:
        super().__init__()
        self.layout = layout
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        if layout == "in turn":
            self.gu, self.gu_bias = weight(EXPERTS, HIDDEN, 2 * FFN), weight(EXPERTS, 2 * FFN)
            self.dn, self.dn_bias = weight(EXPERTS, FFN, HIDDEN), weight(EXPERTS, HIDDEN)
        elif layout == "w1 and b1":
            self.w1, self.b1 = weight(EXPERTS, 2 * FFN, HIDDEN), weight(EXPERTS, 2 * FFN)
            self.w2, self.b2 = weight(EXPERTS, HIDDEN, FFN), weight(EXPERTS, HIDDEN)
        elif layout == "apart":
            self.wg, self.wu = weight(EXPERTS, FFN, HIDDEN), weight(EXPERTS, FFN, HIDDEN)
            self.wd = weight(EXPERTS, HIDDEN, FFN)
        else:
            self.gu, self.dn = (
                weight(EXPERTS, 2 * FFN, HIDDEN),
                weight(EXPERTS, HIDDEN, FFN),
            )
        self.shared = Shared() if shared else None

    def expert(self, x: Tensor, i: int) -> Tensor:
        if self.layout == "in turn":
            both = x @ self.gu[i] + self.gu_bias[i]
            return (F.silu(both[:, ::2]) * both[:, 1::2]) @ self.dn[i] + self.dn_bias[i]
        if self.layout == "w1 and b1":
            gate, up = F.linear(x, self.w1[i], self.b1[i]).chunk(2, -1)
            return F.linear(F.silu(gate) * up, self.w2[i], self.b2[i])
        if self.layout == "apart":
            return F.linear(F.silu(F.linear(x, self.wg[i])) * F.linear(x, self.wu[i]), self.wd[i])
        gate, up = F.linear(x, self.gu[i]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.dn[i])

    def forward(self, x: Tensor) -> Tensor:
        out = mixed(torch.stack([self.expert(x, i) for i in range(EXPERTS)]), self.gate(x))
        return out if self.shared is None else out + self.shared(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Listed(nn.Module):
    """A mixture whose experts are a list of modules."""

    def __init__(self, name: str, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.name = name
        setattr(self, name, nn.ModuleList(Expert() for _ in range(EXPERTS)))
        self.shared = Shared() if shared else None

    def forward(self, x: Tensor) -> Tensor:
        out = mixed(torch.stack([expert(x) for expert in getattr(self, self.name)]), self.gate(x))
        return out if self.shared is None else out + self.shared(x)


class Grouped(nn.Module):
    def __init__(self, fused: bool = True, bias: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.router = te.Linear(HIDDEN, EXPERTS, bias=False)
        widths = [2 * FFN] if fused else [FFN, FFN]
        self.first = nn.ModuleList(te.GroupedLinear(EXPERTS, HIDDEN, width, bias=bias) for width in widths)
        self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=bias)
        self.mlp = (
            te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", bias=False) if shared else None
        )

    def forward(self, x: Tensor) -> Tensor:
        split = [len(x)] * EXPERTS
        gate, up = torch.cat([fc1(x.repeat(EXPERTS, 1), split) for fc1 in self.first], -1).chunk(2, -1)
        outputs = self.fc2(F.silu(gate) * up, split).unflatten(0, (EXPERTS, -1))
        out = mixed(outputs, self.router(x))
        return out if self.mlp is None else out + self.mlp(x)


def each(name: str) -> str:
    return f"parity.experts({', '.join(f'{chr(34)}{name}{i}{chr(34)}' for i in range(EXPERTS))})"


FIRST, SECOND = each("first.0.weight"), each("fc2.weight")
SHARED = 'parity.stack("shared.sg.weight", "shared.su.weight"): "mlp.fc1_weight"'
IN_TURN = f'parity.rearrange(parity.transpose("gu"), "e (f two) d -> e (two f) d", two=2): {FIRST}'


@pytest.mark.parametrize(
    ("reference", "candidate", "entries"),
    [
        (lambda: Stacked("plain"), Grouped, [f'"gu": {FIRST}', f'"dn": {SECOND}', '"gate.weight": "router.weight"']),
        (lambda: Stacked("plain", True), lambda: Grouped(shared=True), [f'"gu": {FIRST}', f'"dn": {SECOND}', SHARED]),
        (lambda: Stacked("in turn"), lambda: Grouped(bias=True), [IN_TURN, f'parity.transpose("dn"): {SECOND}']),
        (lambda: Stacked("w1 and b1"), lambda: Grouped(bias=True), [f'"w1": {FIRST}', f'"b2": {each("fc2.bias")}']),
        (lambda: Stacked("apart"), Grouped, [f'parity.stack("wg", "wu", dim=1): {FIRST}', f'"wd": {SECOND}']),
        (lambda: Stacked("apart", True), lambda: Grouped(False, shared=True), [f'"wg": {FIRST}', SHARED]),
    ],
    ids=["stacked", "with a shared expert", "gate and up in turn", "w1 and b1", "gate and up apart", "two layers"],
)
def test_stacked_experts_go_to_the_layers_of_each_expert(reference, candidate, entries):
    assert_entries(reference(), candidate(), tokens, *entries)


@pytest.mark.parametrize("name", ["experts", "ffns"])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_in_a_list_go_to_the_layers_of_each_expert_whatever_the_list_is_called(name, shared):
    entry = f'parity.stack("{name}.1.gate_proj.weight", "{name}.1.up_proj.weight"): "first.0.weight1"'
    assert_entries(Listed(name, shared), Grouped(shared=shared), tokens, entry, *[SHARED] * shared)
