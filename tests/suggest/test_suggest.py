"""``suggest_map`` finds the weight map of a pair that has none, and reports what it could not find."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_models import FalconLayer, FusedMixtralBlock, GPT2Layer, LlamaLayer, MixtralBlock
from torch import Tensor, nn

import parity
from parity.case import transfer
from parity.cli import reports, suite
from parity.weights.suggest import Suggestion
from parity.weights.suggest.proposal import explain, python

te = parity.te.kernels("cpu").te
CASES = Path(__file__).parents[2] / "cases"
HIDDEN, FFN, HEADS, GROUPS = 64, 96, 4, 2
NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
LLAMA = dict(num_gqa_groups=GROUPS, normalization="RMSNorm", activation="swiglu", bias=False)
FUSED = dict(fuse_qkv_params=True)


def te_layer(**options):
    return te.TransformerLayer(HIDDEN, FFN, HEADS, **NO_DROPOUT, **options)


def with_rope(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, rotary_pos_emb=te.RotaryPositionEmbedding(HIDDEN // HEADS)(x.shape[1]))


def pair_of(reference: nn.Module, candidate: nn.Module, **fields) -> parity.Pair:
    return parity.Pair(reference, candidate, **{"inputs": lambda rng: rng.normal(2, 16, HIDDEN), **fields})


def suggested(reference: nn.Module, candidate: nn.Module, **fields) -> Suggestion:
    return parity.suggest_map(pair_of(reference, candidate, **fields))


def assert_settled(suggestion: Suggestion) -> None:
    assert suggestion.settled, explain(suggestion)
    assert suggestion.error <= suggestion.limit


def effect(weight_map: Mapping, pair: parity.Pair) -> dict[str, Tensor]:
    """Return the candidate's parameters that a map makes from parameters whose elements are all different."""
    numbered: dict[str, Tensor] = {}
    for name, parameter in pair.reference.named_parameters():
        start = sum(tensor.numel() for tensor in numbered.values())
        values = torch.arange(start + 2, start + 2 + parameter.numel(), dtype=torch.float64)
        numbered[name] = values.view(parameter.shape)
    shapes = {name: tuple(parameter.shape) for name, parameter in pair.candidate.named_parameters()}
    return transfer.to_candidate(weight_map, numbered, shapes)


# The default suite


@pytest.mark.parametrize("case", suite.cases([str(CASES)]), ids=lambda case: case.name)
def test_a_case_that_lost_its_map_gets_it_back(case):
    size = {
        key: min(number, {"seq": 32, "batch": 1}.get(key, number)) if isinstance(number, int) else number
        for key, number in case.sizes[0].items()
    }
    suggestion = parity.suggest_map(case, size, keep=False)
    assert_settled(suggestion)
    pair = case.build(te, size)
    declared, found = effect(pair.weights, pair), effect(suggestion.weights, pair)
    assert declared.keys() == found.keys()
    assert all(torch.equal(declared[name], found[name]) for name in declared)


# Names and layouts of well-known models


@pytest.mark.parametrize(
    ("reference", "options", "entry"),
    [
        (
            lambda: GPT2Layer(HIDDEN, FFN, HEADS),
            FUSED,
            'parity.transpose("attn.c_attn.weight"): '
            'parity.separated_qkv("self_attention.layernorm_qkv.weight", groups=4, head_dim=16)',
        ),
        (
            lambda: GPT2Layer(HIDDEN, FFN, HEADS),
            {},
            'parity.transpose("attn.c_attn.weight"): parity.stack("self_attention.layernorm_qkv.query_weight", '
            '"self_attention.layernorm_qkv.key_weight", "self_attention.layernorm_qkv.value_weight")',
        ),
        (
            lambda: FalconLayer(HIDDEN, FFN, HEADS, groups=HEADS),
            FUSED,
            '"attention.query_key_value.weight": "self_attention.layernorm_qkv.weight"',
        ),
        (
            lambda: FalconLayer(HIDDEN, FFN, HEADS, GROUPS),
            dict(num_gqa_groups=GROUPS),
            '"attention.query_key_value.weight": parity.interleaved_qkv("self_attention.layernorm_qkv.query_weight", '
            '"self_attention.layernorm_qkv.key_weight", "self_attention.layernorm_qkv.value_weight", '
            "groups=2, head_dim=16)",
        ),
    ],
    ids=["GPT-2 to fused", "GPT-2 to separate", "GPT-NeoX", "Falcon"],
)
def test_a_layer_without_rope_is_mapped(reference, options, entry):
    suggestion = suggested(reference(), te_layer(**options))
    assert_settled(suggestion)
    assert f"    {entry},\n" in python(suggestion.weights)


@pytest.mark.parametrize(
    ("reference", "options", "entry"),
    [
        (
            dict(),
            {},
            'parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight"',
        ),
        (
            dict(),
            FUSED,
            'parity.interleaved_qkv("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", '
            'groups=2, head_dim=16): "self_attention.layernorm_qkv.weight"',
        ),
        (
            dict(),
            dict(zero_centered_gamma=True),
            'parity.shift("input_layernorm.weight", by=-1.0): "self_attention.layernorm_qkv.layer_norm_weight"',
        ),
        (dict(fused=True), {}, '"mlp.gate_up_proj.weight": "layernorm_mlp.fc1_weight"'),
        (
            dict(fused=True),
            FUSED,
            '"self_attn.qkv_proj.weight": '
            'parity.separated_qkv("self_attention.layernorm_qkv.weight", groups=2, head_dim=16)',
        ),
        (
            dict(meta=True),
            {},
            'parity.rope_halves("attention.wk.weight", head_dim=16, rotary_dim=16): '
            '"self_attention.layernorm_qkv.key_weight"',
        ),
    ],
    ids=["Llama", "Llama to fused", "zero-centred", "Phi-3", "Phi-3 to fused", "Meta's Llama"],
)
def test_a_llama_is_mapped(reference, options, entry):
    layer = LlamaLayer(HIDDEN, FFN, HEADS, GROUPS, **reference)
    suggestion = suggested(layer, te_layer(**LLAMA, **options), call_candidate=with_rope)
    assert_settled(suggestion)
    assert f"    {entry},\n" in python(suggestion.weights)


class Layers(nn.Module):
    def __init__(self, name: str, layers: list[nn.Module]) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(layers))
        self.name = name

    def forward(self, x: Tensor, **arguments) -> Tensor:
        for layer in self.get_submodule(self.name):
            x = layer(x, **arguments)
        return x


def test_layers_that_repeat_are_decided_once_and_named_in_the_order_of_the_candidate():
    suggestion = suggested(
        Layers("h", [LlamaLayer(HIDDEN, FFN, HEADS, GROUPS) for _ in range(2)]),
        Layers("blocks", [te_layer(layer_number=i + 1, **LLAMA) for i in range(2)]),
        call_candidate=with_rope,
    )
    assert_settled(suggestion)
    assert {decision.repeats for decision in suggestion.decisions} == {2}
    assert [right.split(".")[1] for right in suggestion.weights.values()] == ["0"] * 8 + ["1"] * 8


class GroupedMixture(nn.Module):
    """The same mixture as ``MixtralBlock``, on te.GroupedLinear."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = te.Linear(HIDDEN, experts, bias=False)
        self.fc1 = te.GroupedLinear(experts, HIDDEN, 2 * FFN, bias=False)
        self.fc2 = te.GroupedLinear(experts, FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = [len(x)] * self.experts
        gate, up = self.fc1(x.repeat(self.experts, 1), split).chunk(2, -1)
        outputs = self.fc2(F.silu(gate) * up, split).unflatten(0, (self.experts, -1))
        return torch.einsum("eth,te->th", outputs, self.router(x).softmax(-1))


@pytest.mark.parametrize(
    ("block", "entry"),
    [
        (MixtralBlock, 'parity.stack("experts.2.w1.weight", "experts.2.w3.weight"): "fc1.weight2"'),
        (FusedMixtralBlock, '"experts.down_proj": parity.experts("fc2.weight0", "fc2.weight1", "fc2.weight2")'),
    ],
)
def test_experts_are_mapped_one_by_one_or_all_at_once(block, entry):
    suggestion = suggested(block(HIDDEN, FFN, 3), GroupedMixture(3), inputs=lambda rng: rng.normal(32, HIDDEN))
    assert_settled(suggestion)
    assert f"    {entry},\n" in python(suggestion.weights)


# Names that reveal nothing


class Anonymous(nn.Module):
    """A gated MLP whose layers have numbers as names."""

    def __init__(self, up_first: bool) -> None:
        super().__init__()
        self.up_first = up_first
        self.zero, self.one = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.two = nn.Linear(FFN, HIDDEN, bias=False)
        self.three = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (HIDDEN,), self.three, eps=1e-5)
        gate, up = (self.one, self.zero) if self.up_first else (self.zero, self.one)
        return self.two(F.silu(gate(h)) * up(h))


@pytest.mark.parametrize("up_first", [False, True])
def test_equal_halves_without_telling_names_are_settled_by_running(up_first):
    mlp = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False)
    suggestion = suggested(Anonymous(up_first), mlp)
    assert_settled(suggestion)
    gate, up = ("one", "zero") if up_first else ("zero", "one")
    assert suggestion.weights[parity.stack(f"{gate}.weight", f"{up}.weight")] == "fc1_weight"


class Chain(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.names = list(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def test_square_matrices_in_another_order_are_settled_by_running():
    reference = Chain(**{name: nn.Linear(HIDDEN, HIDDEN) for name in ("a", "b", "c")})
    candidate = Chain(**{name: te.Linear(HIDDEN, HIDDEN) for name in ("x", "y", "z")})
    candidate.names = ["z", "x", "y"]
    suggestion = suggested(reference, candidate)
    assert_settled(suggestion)
    assert suggestion.weights == {
        f"{left}.{kind}": f"{right}.{kind}"
        for right, left in zip("xyz", "bca", strict=True)
        for kind in ("weight", "bias")
    }


def test_one_transposed_square_matrix_among_others_is_settled_by_running():
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    reference = Chain(up_proj=nn.Linear(HIDDEN, HIDDEN), down_proj=Transposed(HIDDEN, HIDDEN))
    candidate = Chain(fc1=te.Linear(HIDDEN, HIDDEN), fc2=te.Linear(HIDDEN, HIDDEN))
    suggestion = suggested(reference, candidate)
    assert_settled(suggestion)
    assert suggestion.weights[parity.transpose("down_proj.weight")] == "fc2.weight"
    assert suggestion.weights["up_proj.weight"] == "fc1.weight"


# Parameters that the reference lacks, and objects of the user's own


def test_biases_that_the_reference_lacks_are_constant_zero():
    suggestion = suggested(nn.Linear(HIDDEN, FFN, bias=False), te.Linear(HIDDEN, FFN))
    assert_settled(suggestion)
    assert 'parity.constant(0.0, 96): "bias"' in python(suggestion.weights)


def test_a_bias_of_query_alone_is_fused_with_constants():
    class OnlyQueryBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN, bias=i == 0) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            qkv = torch.stack(
                [layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj)]
            )
            return qkv.permute(1, 2, 3, 0, 4).flatten(2)

    class Fused(nn.Module):
        """A plain te.Linear with the number of heads in an attribute, as in a user's own attention."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = HEADS
            self.qkv = te.Linear(HIDDEN, 3 * HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.qkv(x)

    suggestion = suggested(OnlyQueryBias(), Fused())
    assert_settled(suggestion)
    assert "parity.constant(0.0, 64), parity.constant(0.0, 64), groups=4, head_dim=16" in python(suggestion.weights)


def test_a_bias_of_query_and_value_alone_in_both_is_mapped():
    class Projections(nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (layer(HIDDEN, HIDDEN, bias=bias) for bias in (True, False, True))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    suggestion = suggested(Projections(nn.Linear), Projections(te.Linear))
    assert_settled(suggestion)
    assert all(left == right for left, right in suggestion.weights.items())
    assert len(suggestion.weights) == 5


def test_a_layer_with_a_bias_goes_to_the_layer_with_a_bias():
    reference = Chain(a=nn.Linear(HIDDEN, HIDDEN), b=nn.Linear(HIDDEN, HIDDEN, bias=False))
    candidate = Chain(y=te.Linear(HIDDEN, HIDDEN, bias=False), x=te.Linear(HIDDEN, HIDDEN))
    candidate.names = ["x", "y"]
    suggestion = suggested(reference, candidate)
    assert_settled(suggestion)
    assert suggestion.weights == {"a.weight": "x.weight", "a.bias": "x.bias", "b.weight": "y.weight"}


def test_entries_that_the_pair_has_stay_and_the_rest_is_completed():
    mlp = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False)
    swapped = {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"}
    pair = pair_of(parity.reference.SwiGLUMLP(HIDDEN, FFN), mlp, weights=swapped)
    kept, afresh = parity.suggest_map(pair), parity.suggest_map(pair, keep=False)
    assert set(kept.weights.values()) == {"layer_norm_weight", "fc1_weight", "fc2_weight"}
    assert swapped.items() <= kept.weights.items()
    assert not kept.fits
    assert afresh.settled


def test_an_entry_that_stays_but_does_not_fit_is_the_users_mistake():
    pair = pair_of(nn.Linear(HIDDEN, FFN), te.Linear(HIDDEN, FFN), weights={"wieght": "weight"})
    with pytest.raises(parity.UserError, match='did you mean "weight"'):
        parity.suggest_map(pair)


def test_the_users_modules_stay_as_they_are():
    pair = pair_of(nn.LayerNorm(HIDDEN), te.LayerNorm(HIDDEN))
    parity.suggest_map(pair)
    assert bool((pair.reference.weight == 1).all())
    assert bool((pair.candidate.weight == 1).all())


def test_the_number_of_runs_is_bounded():
    names = [f"l{i}" for i in range(12)]
    reference = Chain(**{name: nn.Linear(HIDDEN, HIDDEN) for name in names})
    candidate = Chain(**{name: te.Linear(HIDDEN, HIDDEN) for name in reversed(names)})
    pair = dataclasses.replace(pair_of(reference, candidate))
    assert parity.suggest_map(pair, max_runs=20).runs <= 20


# ``suggest_map`` reports what it could not find, or could not tell from something else.


class Sum(nn.Module):
    """Two layers that can be exchanged without changing the sum."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.first, self.second = layer(HIDDEN, FFN), layer(HIDDEN, FFN)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def test_alternatives_that_are_equally_good_are_told_as_tied():
    class Renamed(Sum):
        def __init__(self, layer) -> None:
            super().__init__(layer)
            self.left, self.right = self._modules.pop("first"), self._modules.pop("second")

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    suggestion = suggested(Sum(nn.Linear), Renamed(te.Linear))
    assert suggestion.fits
    assert not suggestion.settled
    assert [decision.outcome for decision in suggestion.decisions] == ["tied"]
    assert "NOT decided, since running both modules" in explain(suggestion)


def test_where_no_map_fits_the_best_is_told_with_its_error_and_what_to_look_at():
    reference = parity.reference.GatedMLP(HIDDEN, FFN, "geglu")
    mlp = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False)
    suggestion = suggested(reference, mlp)
    assert not suggestion.fits
    assert not suggestion.settled
    assert suggestion.error > 10 * suggestion.expected
    assert suggestion.weights[parity.stack("gate_proj.weight", "up_proj.weight")] == "fc1_weight"
    told = explain(suggestion)
    assert f"the error is {suggestion.error:.2g}" in told
    assert "activation" in told


def test_a_parameter_without_a_counterpart_is_a_problem_that_names_it():
    suggestion = suggested(nn.Linear(HIDDEN, FFN), te.Linear(HIDDEN, FFN, bias=False))
    assert not suggestion.settled
    assert math.isnan(suggestion.error)
    (problem,) = suggestion.problems
    assert '"bias" (96,) has no counterpart in the TE module' in problem


def test_modules_of_different_sizes_are_a_problem_that_names_both():
    suggestion = suggested(nn.Linear(HIDDEN, FFN, bias=False), te.Linear(HIDDEN, HIDDEN, bias=False))
    assert suggestion.weights == {}
    assert [name in " ".join(suggestion.problems) for name in ("(96, 64)", "(64, 64)")] == [True, True]


def test_a_candidate_that_cannot_run_leaves_a_map_by_names_and_the_reason():
    def explode(module: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    suggestion = suggested(nn.Linear(HIDDEN, HIDDEN), te.Linear(HIDDEN, HIDDEN), call_candidate=explode)
    assert suggestion.weights == {"weight": "weight", "bias": "bias"}
    assert "the candidate raised RuntimeError: no such kernel" in suggestion.problems[0]
    assert not suggestion.settled


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (lambda rng: torch.full((4, HIDDEN), math.nan), "not finite in FP64"),
        (lambda rng: torch.zeros(4, HIDDEN), "all zero on these inputs"),
    ],
)
def test_inputs_that_tell_no_map_from_another_are_a_problem(inputs, reason):
    suggestion = suggested(nn.Linear(HIDDEN, HIDDEN, bias=False), te.Linear(HIDDEN, HIDDEN, bias=False), inputs=inputs)
    assert reason in suggestion.problems[0]
    assert not suggestion.settled


def test_projections_of_one_name_whose_shapes_do_not_go_together_are_told_together():
    reference = nn.MultiheadAttention(HIDDEN, 4, batch_first=True, kdim=32, vdim=48)
    candidate = te.MultiheadAttention(HIDDEN, 4, attention_type="cross", qkv_format="bshd", attn_mask_type="no_mask")
    suggestion = suggested(
        reference, candidate, inputs=lambda rng: (rng.normal(2, 16, HIDDEN), rng.normal(2, 8, 32), rng.normal(2, 8, 48))
    )
    (problem,) = suggestion.problems
    assert '"k_proj_weight" (64, 32)' in problem
    assert '"key_value.key_weight" (64, 64)' in problem


@pytest.mark.parametrize("layers", [1, 3])
def test_an_rms_norm_that_became_a_layer_norm_is_hinted_at_once(layers):
    def mlp(normalization: str) -> nn.Module:
        return te.LayerNormMLP(HIDDEN, FFN, normalization=normalization, activation="swiglu", bias=False)

    def reference() -> nn.Module:
        return nn.Sequential(*(parity.reference.SwiGLUMLP(HIDDEN, FFN) for _ in range(layers)))

    wrong, right = (
        suggested(reference(), nn.Sequential(*(mlp(normalization) for _ in range(layers))))
        for normalization in ("LayerNorm", "RMSNorm")
    )
    assert not wrong.fits
    (hint,) = wrong.hints
    assert "looks like an RMSNorm" in hint
    assert 'is normalization="RMSNorm" meant?' in hint
    assert right.fits
    assert right.hints == ()


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_hint_is_printed_before_the_map(tmp_path, capsys):
    text = """
        import parity
        from torch import nn

        @parity.pair("hinted")
        def hinted(te):
            return parity.Pair(nn.RMSNorm(64), te.LayerNorm(64), lambda rng: rng.normal(16, 64))
    """
    (tmp_path / "hinted_pairs.py").write_text(textwrap.dedent(text))
    settled = reports.suggest(str(tmp_path / "hinted_pairs.py"), 0, 0, "cpu", keep=True, max_runs=10)
    told = capsys.readouterr().out
    assert not settled
    assert 0 < told.index('normalization="RMSNorm"') < told.index("weights={")


def test_a_layer_norm_that_became_an_rms_norm_is_told_with_the_option():
    suggestion = suggested(Normed(nn.LayerNorm(HIDDEN)), Normed(te.RMSNorm(HIDDEN)))
    (problem,) = suggestion.problems
    assert '"norm.bias" (64,) has no counterpart in the TE module; build that with it' in problem
    assert '(normalization="LayerNorm"' in problem


class Tied(nn.Module):
    """An embedding and a head, which may share one parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.lm_head = nn.Embedding(FFN, HIDDEN), nn.Linear(HIDDEN, FFN, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.tokens(ids))


def test_a_head_that_te_alone_ties_is_told_with_what_it_is_tied_to():
    suggestion = suggested(Tied(tied=False), Tied(tied=True), inputs=lambda rng: rng.integers(2, 16, high=FFN))
    (problem,) = suggestion.problems
    assert (
        'which ties its "lm_head.weight" to "tokens.weight", but the reference has two separate parameters' in problem
    )


def test_a_tied_name_in_an_entry_that_stays_is_told_as_tied():
    with pytest.raises(parity.UserError, match=r'it is tied to "tokens\.weight"'):
        suggested(
            Tied(tied=True),
            Tied(tied=False),
            inputs=lambda rng: rng.integers(2, 16, high=FFN),
            weights={"lm_head.weight": "lm_head.weight"},
        )
