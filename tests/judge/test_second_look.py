"""Failures that jitter or chance explains, and failures that neither explains."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.case.validate import check_case
from parity.comparison import judge_at
from parity.judge.limits import packaged
from parity.judge.second_look import LOOKS, TELLING_LOOKS, second_look
from parity.judge.statistics import allowance
from parity.measuring.right_ports import MODELS
from parity.numerics.errors import CachedTensor
from parity.numerics.formats import Rounding, e4m3
from parity.numerics.freedom import FUSED, UNFUSED, Port, Steps
from parity.numerics.rounding import rounded
from parity.passes.all_passes import golden_tensors, model_tensors, run_model
from parity.passes.prepare import prepare
from parity.reference import Attention
from parity.result import Check
from parity.te import PRECISIONS

# Failures that jitter explains, and failures that it does not.


class NearKink(nn.Module):
    """ReLUs of numbers so near 0 that a few roundoffs of FP16 change their sign."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return torch.relu(self.linear(x))


def case(scale=1.0):
    def factory(te, **_):
        return parity.Pair(
            NearKink(),
            NearKink(),
            weights={"linear.weight": "linear.weight"},
            inputs=lambda rng, batch: rng.normal(batch, 64),
            call_candidate=lambda module, x: scale * module(x),
        )

    return parity.Case("near_kink", factory, sizes=(dict(batch=32),))


def test_jitter_rounds_single_values_otherwise_and_leaves_the_size_of_the_error():
    x, weight = torch.randn(64, 256), torch.randn(64, 256)
    results = []
    for jitter in (None, 0, 1):
        with rounded(Rounding(torch.float16), [weight], dataclasses.replace(FUSED, jitter=jitter)):
            results.append(nn.functional.linear(x, weight))
    exact = nn.functional.linear(x.double(), weight.double())
    differ = [(result != results[0]).float().mean().item() for result in results[1:]]
    norms = [(result - exact).norm().item() for result in results]
    assert all(0.0 < share < 0.5 for share in differ)
    assert max(norms) / min(norms) < 1.1
    assert not torch.equal(results[1], results[2])


def test_jitter_leaves_the_scale_of_a_weight_which_every_port_holds_exactly():
    weight, rounding = torch.randn(64, 64).bfloat16().float(), Rounding(torch.bfloat16, weights=e4m3)
    results = []
    for jitter in (None, *range(8)):
        with rounded(rounding, [weight], dataclasses.replace(FUSED, jitter=jitter)):
            results.append(nn.functional.linear(torch.eye(64), weight))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=torch.finfo(torch.bfloat16).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dithered_runs_round_independently_with_twice_the_variance(dtype):
    x, weight = torch.randn(1024, 256).to(dtype).float(), torch.randn(256, 256).to(dtype).float()
    exact = nn.functional.linear(x.double(), weight.double())

    def error(freedom):
        with rounded(Rounding(dtype), [weight], freedom):
            return nn.functional.linear(x, weight).double() - exact

    nearest, *dithered = map(error, [FUSED, *(dataclasses.replace(FUSED, jitter=s, dithers=True) for s in range(2))])
    assert [(x.norm() / nearest.norm()).item() ** 2 for x in dithered] == pytest.approx([2.0, 2.0], rel=0.05)
    # They are independent: given the value, the expected error of a draw is 0.
    assert abs((dithered[0] * dithered[1]).sum().item()) < 0.05 * dithered[0].norm().item() ** 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dither_leaves_numbers_that_the_dtype_has(dtype):
    x = torch.cat([torch.randn(512), 2.0 ** torch.arange(-24.0, 15.0), torch.zeros(8)]).to(dtype).float()[None]
    identity = torch.eye(x.numel())
    with rounded(Rounding(dtype), [identity], dataclasses.replace(FUSED, jitter=0, dithers=True)):
        assert torch.equal(nn.functional.linear(x, identity), x)


def test_a_weight_that_a_dithered_step_writes_is_next_to_what_the_step_computes():
    start = torch.rand(64, 64) + 1.0  # where BF16's numbers are 2^-7 apart

    def stepped():
        weight = nn.Parameter(start.clone())
        weight.grad = torch.ones_like(start)
        torch.optim.SGD([weight], lr=0.1).step()
        return weight.detach()

    holds_weights = dataclasses.replace(UNFUSED, jitter=0, dithers=True, steps=Steps(weights=torch.bfloat16))
    with rounded(Rounding(torch.bfloat16), [], holds_weights):
        written = stepped()
    distance = (written - (start - torch.tensor(0.1))).abs()
    assert torch.equal(written, written.bfloat16().float())
    assert distance.max() < 2.0**-7


@pytest.mark.parametrize("precision", ["fp32", "fp8_current", "fp8_block"])
def test_operands_of_dithered_runs_round_independently_with_twice_the_variance(precision):
    rounding = dataclasses.replace(PRECISIONS[precision].rounding, weights=None)
    x, identity = torch.randn(256, 256).to(rounding.storage).float(), torch.eye(256)

    def error(freedom):
        with rounded(dataclasses.replace(rounding, storage=torch.float32), [identity], freedom):
            return nn.functional.linear(x, identity).double() - x

    nearest, *dithered = map(error, [FUSED, *(dataclasses.replace(FUSED, jitter=s, dithers=True) for s in range(2))])
    assert [(x.norm() / nearest.norm()).item() ** 2 for x in dithered] == pytest.approx([2.0, 2.0], rel=0.1)
    assert abs((dithered[0] * dithered[1]).sum().item()) < 0.05 * dithered[0].norm().item() ** 2
    assert abs((dithered[0] * nearest).sum().item()) < 0.05 * dithered[0].norm().item() * nearest.norm().item()


class Expert(nn.Module):
    """An expert weighted by a router of few tokens; a port may scale the input of the last layer instead."""

    def __init__(self, linear, scales_first=False) -> None:
        super().__init__()
        self.up, self.down, self.router = linear(64, 128), linear(128, 64), nn.Linear(64, 4)
        self.scales_first = scales_first

    def forward(self, x):
        weight = self.router(x).softmax(-1)[:, :1]
        hidden = nn.functional.silu(self.up(x))
        return self.down(hidden * weight) if self.scales_first else self.down(hidden) * weight


@pytest.mark.parametrize("precision", ["fp32", "fp8_block"])
def test_right_ports_that_scale_before_a_layer_and_not_after_pass_on_every_seed(precision):
    def factory(te, **_):
        def linear(width_in, width_out):
            return te.Linear(width_in, width_out, bias=False)

        reference = Expert(functools.partial(nn.Linear, bias=False))
        return parity.Pair(
            reference,
            Expert(linear, scales_first=True),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, tokens: rng.normal(tokens, 64),
        )

    results = parity.compare(parity.Case("expert", factory, sizes=(dict(tokens=16),)), [precision], seeds=range(16))
    assert [result.status for result in results] == ["passed"] * 16


class Contrastive(nn.Module):
    """A contrastive loss, in which eight scores, far apart, scale every gradient."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.first, self.second = linear(64, 128), linear(128, 64)

    def forward(self, x):
        embeddings = nn.functional.normalize(self.second(torch.tanh(self.first(x))).mean(1), dim=-1)
        left, right = embeddings.chunk(2)
        scores = left @ right.T / 0.05
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def contrastive(scale=1.0):
    def factory(te, **_):
        reference = Contrastive(nn.Linear)
        return parity.Pair(
            reference,
            Contrastive(te.Linear),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 16, 64),
            call_candidate=lambda module, x: module(scale * x),
        )

    return parity.Case("contrastive", factory, sizes=(dict(batch=16),))


def test_right_ports_whose_gradients_hang_on_few_scores_pass():
    results = parity.compare(contrastive(), ["bf16", "fp16"], seeds=range(12))
    assert {result.status for result in results} == {"passed"}


def test_a_wrong_factor_before_few_scores_is_told():
    results = parity.compare(contrastive(scale=1.0625), ["bf16", "fp16"], diagnose=False)
    assert {result.status for result in results} == {"failed"}


# A failing first look is reported before the second one begins, since the process may not survive the second look.


def told_of(case, seed):
    """Return the verdict and the earlier reports: a status, or None if a failure is taken back, and if it is final."""
    kernels, told = parity.te.kernels("cpu"), []
    (checked,) = check_case(case, kernels.te)

    def note(result, decided):
        told.append((result and result.status, decided))
        assert result is None or (result.margin > 1 and not result.passed)

    judged = judge_at(case, checked, PRECISIONS["fp16"], seed, kernels, packaged(), on_progress=note)
    return judged.result, told


def test_a_failing_first_look_is_told_until_the_second_one_takes_it_back():
    found = [told_of(contrastive(), seed) for seed in range(12)]
    assert {result.status for result, _ in found} == {"passed"}
    again = [(result, told) for result, told in found if told]
    assert again
    for result, told in again:
        assert told == [("failed", False), (None, True)]
        assert any("exceeded a limit at first look and passed the second" in note for note in result.notes)
    for result, told in found:
        assert told or not any("exceeded a limit at first look" in note for note in result.notes)


def test_a_failure_that_stays_is_told_twice():
    result, told = told_of(contrastive(scale=1.0625), 0)
    assert result.status == "failed"
    assert told == [("failed", False), ("failed", True)]


def test_a_part_that_failed_stays_told_while_other_parts_are_compared():
    def factory(te, **_):
        weights = {"0.weight": "weight", "0.bias": "bias"}
        return parity.Pair(
            PairedStep(),
            te.Linear(64, 64),
            weights=weights,
            inputs=lambda rng, batch: rng.normal(batch, 64),
            call_candidate=lambda module, x: (2 * module(x), 2 * module(x).mean()),
        )

    result, told = told_of(parity.Case("beside", factory, sizes=(dict(batch=32),)), 0)
    assert result.status == "failed"
    assert told == [("failed", False), ("failed", True)]


class PairedStep(nn.Sequential):
    """A linear layer that also returns the mean of its numbers; both are compared separately."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64))

    def forward(self, x):
        y = super().forward(x)
        return y, y.mean()


def test_models_are_jittered_until_one_reaches_the_port():
    precision = PRECISIONS["fp16"]
    kernels = parity.te.kernels("cpu")
    (checked,) = check_case(case(), kernels.te)
    prepared = prepare(case(), checked, precision.dtype, 0, kernels)
    models = [run_model(prepared, precision.rounding, FUSED)]
    looks = []

    def judge(modelled, drawn):
        looks.append(len(modelled))
        return verdicts(margin=3.0 if len(modelled) < 4 else 0.5)

    judged = second_look(verdicts(margin=3.0), models, judge, prepared, precision.rounding, Port())
    assert looks == [2, 3, 4]
    assert judged[0].margin == 0.5
    assert all(key in models[0] for key in golden_tensors(prepared))


def test_the_models_of_the_first_look_are_kept_for_the_next_precision():
    failing, kernels, precision = verdicts(margin=3.0), parity.te.kernels("cpu"), PRECISIONS["fp16"]
    (checked,) = check_case(case(), kernels.te)
    prepared = prepare(case(), checked, precision.dtype, 0, kernels)
    models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    second_look(failing, models, lambda *_: failing, prepared, precision.rounding, Port())
    assert models[0] is model_tensors(prepared, precision.rounding, FUSED)
    assert models[1] is model_tensors(prepared, precision.rounding, UNFUSED)


def looks_at(margin, statistic="norm"):
    """Return the number of models in each look, with verdicts that do not change."""
    precision, kernels = PRECISIONS["fp16"], parity.te.kernels("cpu")
    (checked,) = check_case(case(), kernels.te)
    prepared = prepare(case(), checked, precision.dtype, 0, kernels)
    first, looks = verdicts(margin, statistic), []

    def judge(modelled, drawn):
        looks.append(len(modelled))
        return first

    assert second_look(first, [], judge, prepared, precision.rounding, Port()) is first
    return looks


def test_nothing_is_tried_where_all_passed_or_a_value_is_not_finite():
    assert looks_at(0.9) == looks_at(float("inf")) == []


def test_no_jitter_is_tried_where_it_could_not_help():
    of_kinks = 2
    of_all_draws = 1
    assert len(looks_at(1e3)) == of_kinks
    assert len(looks_at(5.0)) == of_kinks + TELLING_LOOKS
    assert len(looks_at(3.0)) == of_kinks + LOOKS + of_all_draws


def test_jitter_is_tried_however_many_deviations_an_error_leans_that_is_no_larger_than_expected():
    assert len(looks_at(1e3, "gain")) == len(looks_at(3.0))


class QueryKeyAttention(nn.Module):
    """Attention over few tokens, with scores so large that hardly any query is undecided between two keys."""

    def __init__(self, linear, core, heads, head_dim) -> None:
        super().__init__()
        width = heads * head_dim
        self.qkv, self.out, self.core, self.heads = linear(64, 3 * width), linear(width, 64), core, heads

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(30.0 * x).chunk(3, -1))
        return self.out(self.core(q, k, v))


def saturated(values_times=1.0, heads=2, head_dim=32):
    def causal(q, k, v):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        context = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return context.transpose(1, 2).flatten(2)

    def factory(te, **_):
        core = te.DotProductAttention(heads, head_dim, qkv_format="bshd", attention_dropout=0.0)

        def ported(q, k, v):
            return core(q, k, values_times * v, attn_mask_type="causal")

        reference = QueryKeyAttention(nn.Linear, causal, heads, head_dim)
        return parity.Pair(
            reference,
            QueryKeyAttention(te.Linear, ported, heads, head_dim),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 8, 64),
        )

    return parity.Case("saturated", factory, sizes=(dict(batch=2),))


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 32), (1, 128)])
def test_right_ports_with_a_saturated_softmax_pass_though_few_roundings_decide_their_errors(heads, head_dim):
    results = parity.compare(saturated(heads=heads, head_dim=head_dim), ["bf16"], seeds=range(16))
    assert {result.status for result in results} == {"passed"}


def test_a_right_port_passes_whose_mean_over_tokens_hides_how_much_the_undecided_ones_scatter():
    size = dict(batch=4, seq=7, hidden=128, ffn=244, heads=2, groups=1)
    result = parity.compare(dataclasses.replace(MODELS["model_020"], sizes=(size,)), ["fp16"], seeds=[401])[0]
    assert result.passed


def test_a_mistake_behind_a_saturated_softmax_is_told():
    results = parity.compare(saturated(values_times=1.05), ["bf16", "fp16"], diagnose=False)
    assert {result.status for result in results} == {"failed"}


class Kinked(nn.Module):
    """Many ReLUs, each with its own gradients."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.first, self.second = linear(64, 256), linear(256, 64)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_right_ports_with_relus_pass_on_every_seed(precision):
    def factory(te, **_):
        reference = nn.Sequential(Kinked(nn.Linear), Kinked(nn.Linear))
        return parity.Pair(
            reference,
            nn.Sequential(Kinked(te.Linear), Kinked(te.Linear)),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch: rng.normal(batch, 48, 64),
        )

    results = parity.compare(parity.Case("kinked", factory, sizes=(dict(batch=2),)), [precision], seeds=range(8))
    assert {result.status for result in results} == {"passed"}


def test_a_small_mistake_fails_at_second_look_too():
    right, wrong = (parity.compare(case(scale), ["fp16"], diagnose=False)[0] for scale in (1.0, 1.0003))
    assert right.passed
    assert wrong.status == "failed"
    assert 1 < wrong.margin < 10


def verdicts(margin, statistic="norm"):
    (result,) = parity.compare(case(), precisions=["fp16"])
    checks = (Check(statistic, margin, 1.0),)
    return tuple(dataclasses.replace(tensor, margin=margin, checks=checks) for tensor in result.tensors)


class Standardized(nn.Module):
    """Operations of the port's own before a layer whose weight is used twice."""

    def __init__(self, layer, tied=True):
        super().__init__()
        self.layer, self.tied = layer, tied

    def forward(self, x):
        y = torch.relu(self.layer((x - 0.7) / 1.3))
        weight = self.layer.weight if self.tied else self.layer.weight.detach()
        return torch.nn.functional.linear(y, weight.T) * 1.3 + 0.7, y


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_beside_a_mistake_what_the_ports_own_lines_round_is_expected_all_the_same(precision):
    def factory(te, **_):
        return parity.Pair(
            Standardized(nn.Linear(96, 64)),
            Standardized(te.Linear(96, 64), tied=False),
            lambda rng: rng.normal(40, 96),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    for result in parity.compare(parity.Case("standardized", factory, sizes=({},)), [precision], seeds=range(4)):
        assert {tensor.label for tensor in result.tensors if not tensor.passed} == {"d layer.weight"}
        assert [finding.title for finding in result.findings] == ["gradient-path-missing"]


# Gradients below the size of rounding: the size of their error is a matter of chance, which drawn runs show.


HIDDEN, HEADS = 128, 2


class Normed(nn.Module):
    """Attention behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(HIDDEN, HEADS, HEADS, bias=True, rope=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))


def decided(seq: int, values_times: float = 1.0):
    """Return a case whose biases are so large that queries hardly waver between keys, and get hardly any gradient."""

    def called(module: nn.Module, x: Tensor) -> Tensor:
        return values_times * module(x)

    def factory(te, **_):
        reference = Normed()
        for module in (reference.norm, reference.attention.q_proj, reference.attention.k_proj):
            nn.init.normal_(module.bias, std=30.0)
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        kinds = ("weight", "bias")
        return parity.Pair(
            reference,
            te.MultiheadAttention(
                HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd", input_layernorm=True
            ),
            weights={
                **{f"norm.{kind}": f"layernorm_qkv.layer_norm_{kind}" for kind in kinds},
                **{
                    f"attention.{left}.{kind}": f"layernorm_qkv.{right}_{kind}"
                    for left, right in names.items()
                    for kind in kinds
                },
                **{f"attention.o_proj.{kind}": f"proj.{kind}" for kind in kinds},
            },
            inputs=lambda rng: rng.normal(1, seq, HIDDEN).abs(),
            call_candidate=called,
        )

    return parity.Case("decided", factory, sizes=({},))


@pytest.mark.parametrize("seq", [32, 64])
def test_right_ports_pass_whose_queries_and_keys_get_nothing_but_rounding(seq):
    results = parity.compare(decided(seq), ["fp8_delayed"], seeds=range(6))
    assert {result.status for result in results} == {"passed"}
    lost = [tensor for result in results for tensor in result.tensors if tensor.expected.relative_l2 > 1.0]
    assert "d attention.q_proj.weight" in {tensor.label for tensor in lost}


def test_a_mistake_in_such_a_port_is_told():
    (result,) = parity.compare(decided(32, values_times=1.1), ["fp8_delayed"], diagnose=False)
    assert result.status == "failed"


def errors(norms, drawn=True):
    return [CachedTensor(torch.full((64,), norm / 8.0), is_drawn=drawn) for norm in norms]


SCATTERED, ALIKE = (1.0, 4.0, 2.0, 8.0, 2.0, 1.0, 3.0, 2.0), (2.0, 2.1, 1.9, 2.0, 2.1, 2.0, 1.9, 2.0)
TINY, LARGE = (CachedTensor(torch.full((64,), size)) for size in (1e-3, 10.0))


def test_a_lost_gradient_may_err_by_as_much_more_as_drawn_runs_scatter():
    assert 2.0 < allowance(TINY, errors(SCATTERED), limit=1.7) < 20.0


def test_nothing_more_is_granted_where_drawn_runs_agree_or_the_gradient_is_not_lost_or_nothing_was_drawn():
    assert allowance(TINY, errors(ALIKE), limit=1.7) == 1.0
    assert allowance(LARGE, errors(SCATTERED), limit=1.7) == 1.0
    assert allowance(TINY, errors(SCATTERED, drawn=False), limit=1.7) == 1.0


# Gradients that are 0 except for rounding are judged by the rounding errors of the others.


WIDE, MANY = 64, 4


def vanishing_case(seq: int, wrong_bias: bool = False):
    """Return a case in which queries that see one key, and their keys, get no gradient, and the key bias never does."""

    def called(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        return y + module.qkv.key_bias.sum() if wrong_bias else y

    def factory(te, **_):
        names = {"q_proj": "qkv.query", "k_proj": "qkv.key", "v_proj": "qkv.value"}
        weights = {f"{left}.{kind}": f"{right}_{kind}" for left, right in names.items() for kind in ("weight", "bias")}
        return parity.Pair(
            reference=Attention(WIDE, MANY, MANY, bias=True, rope=False),
            candidate=te.MultiheadAttention(
                WIDE, MANY, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd"
            ),
            weights={**weights, "o_proj.weight": "proj.weight", "o_proj.bias": "proj.bias"},
            inputs=lambda rng, batch: rng.normal(batch, seq, WIDE),
            call_candidate=called,
        )

    return parity.Case("attention", factory, sizes=(dict(batch=8),))


@pytest.mark.parametrize("seq", [1, 2, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_right_ports_whose_gradients_vanish_pass_on_every_seed(precision, seq):
    results = parity.compare(vanishing_case(seq), [precision], seeds=range(8))
    assert {result.status for result in results} == {"passed"}


def test_a_gradient_where_none_is_due_fails():
    (result,) = parity.compare(vanishing_case(16, wrong_bias=True), ["bf16"], diagnose=False)
    assert result.status == "failed"
    assert "d k_proj.bias" in [tensor.label for tensor in result.tensors if not tensor.passed]


# FP32 norms of few rows, which do not show how far a row's rounded root moves the whole row, and of rows whose mean
# is larger than their variation. The rounding of one number decides the error of a whole row.


FEW_ROWS = {
    f"{rows} of {channels}": (channels, lambda rng, rows=rows, channels=channels: rng.normal(rows, channels))
    for rows in (1, 3)
    for channels in (80, 256)
}
OFFSET_ROWS = {"offset": (64, lambda rng: rng.normal(96, 64).abs())}


def compared_norm(channels: int, inputs, seeds: int, eps: float = 1e-5) -> list[parity.Result]:
    def factory(te):
        return parity.Pair(
            nn.LayerNorm(channels, eps=1e-5),
            te.LayerNorm(channels, eps=eps),
            weights={"weight": "weight", "bias": "bias"},
            inputs=inputs,
        )

    return parity.compare(parity.Case("norm", factory, sizes=({},)), ["fp32"], seeds=range(seeds))


@pytest.mark.parametrize(("channels", "inputs"), (FEW_ROWS | OFFSET_ROWS).values(), ids=FEW_ROWS | OFFSET_ROWS)
def test_right_norms_of_few_or_offset_rows_pass_on_every_seed(channels, inputs):
    assert {result.status for result in compared_norm(channels, inputs, seeds=40)} == {"passed"}


@pytest.mark.parametrize("name", ["1 of 80", "3 of 80", "offset"])
def test_another_eps_of_such_a_norm_is_told_all_the_same(name):
    results = compared_norm(*(FEW_ROWS | OFFSET_ROWS)[name], seeds=12, eps=1e-6)
    assert {result.findings[0].title for result in results} == {"norm-eps"}
