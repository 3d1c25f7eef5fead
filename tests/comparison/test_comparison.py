"""One case at one precision: right ports pass, wrong ones fail, and wrong arguments are reported."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from bad_input import linear
from torch import nn

import parity
from parity import reference
from parity.te import PRECISIONS, why_unavailable

# Right ports pass, and wrong ones fail.


SIZE = dict(batch=2, seq=64, hidden=128, ffn=256)


def swiglu_pair(te, hidden, ffn, gate="gate_proj.weight", up="up_proj.weight", **_):
    return parity.Pair(
        reference=reference.SwiGLUMLP(hidden, ffn),
        candidate=te.LayerNormMLP(hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack(gate, up): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


def as_case(factory, **size):
    return parity.Case("case", factory, sizes=(size or SIZE,))


def linear_case(inputs=None, bias=True, **fields):
    def factory(te, **_):
        layer = nn.Linear(32, 16)
        candidate = te.Linear(32, 16, bias=bias)
        weights = {"weight": "weight", "bias": "bias"}
        draw = inputs or (lambda rng: rng.normal(8, 32))
        return parity.Pair(layer, candidate, draw, weights, **fields)

    return parity.Case("linear", factory, sizes=({},))


HERE = [name for name, precision in PRECISIONS.items() if why_unavailable(precision, parity.te.kernels()) is None]


@pytest.mark.parametrize("precision", HERE)
def test_a_right_port_passes(precision):
    (result,) = parity.compare(as_case(swiglu_pair), [precision])
    assert result.passed, result
    assert 0 < result.margin < 1


@pytest.mark.parametrize("precision", HERE)
def test_swapped_gate_and_up_fail(precision):
    def swapped(te, **size):
        return swiglu_pair(te, gate="up_proj.weight", up="gate_proj.weight", **size)

    (result,) = parity.compare(as_case(swapped), [precision], diagnose=False)
    assert result.status == "failed"
    assert result.margin > 2


def test_a_precision_that_the_gpu_cannot_run_is_skipped_with_te_s_reason_and_not_passed():
    unavailable = [name for name in PRECISIONS if name not in HERE]
    for result in parity.compare(as_case(swiglu_pair), unavailable):
        assert result.status == "skipped"
        assert not result.passed
        assert "compute capability" in result.reason


def test_outputs_gradients_and_outputs_that_probe_are_compared():
    (result,) = parity.compare(as_case(swiglu_pair), ["bf16"])
    assert [tensor.label for tensor in result.tensors] == [
        "output",
        "d input",
        "d norm.weight",
        "d gate_proj.weight",
        "d up_proj.weight",
        "d down_proj.weight",
        "probed output",
    ]


def test_a_case_whose_inputs_may_not_take_any_value_is_not_probed():
    (result,) = parity.compare(dataclasses.replace(as_case(swiglu_pair), probe=False), ["bf16"])
    assert "probed output" not in [tensor.label for tensor in result.tensors]


def rmsnorm_pair(te, eps, **_):
    return parity.Pair(
        nn.RMSNorm(256, eps=1e-6),
        te.RMSNorm(256, eps=eps),
        lambda rng: rng.normal(4, 64, 256),
        {"weight": "weight"},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("eps", [1e-5, 1e-8])
def test_a_wrong_eps_far_below_the_noise_shows_on_probing_inputs(precision, eps):
    right, wrong = (
        parity.compare(as_case(lambda te, eps=e, **_: rmsnorm_pair(te, eps)), [precision], diagnose=False)[0]
        for e in (1e-6, eps)
    )
    assert right.passed
    assert not wrong.passed
    assert next(tensor for tensor in wrong.tensors if tensor.label == "probed output").margin > 1


def test_erf_for_tanh_gelu_shows_by_its_direction_in_fp32_where_no_norm_shows_it():
    class GeluMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x):
            return self.down(nn.functional.gelu(self.up(self.norm(x))))

    names = {
        "norm.weight": "layer_norm_weight",
        "norm.bias": "layer_norm_bias",
        "up.weight": "fc1_weight",
        "up.bias": "fc1_bias",
        "down.weight": "fc2_weight",
        "down.bias": "fc2_bias",
    }
    # TransformerEngine's "gelu" is the tanh approximation.
    case = as_case(
        lambda te, **_: parity.Pair(GeluMLP(), te.LayerNormMLP(128, 256), lambda rng: rng.normal(2, 128, 128), names)
    )
    (result,) = parity.compare(dataclasses.replace(case, probe=False), ["fp32"])
    (output,) = [tensor for tensor in result.tensors if tensor.kind == "output"]
    margins = {check.statistic: check.margin for check in output.checks}
    assert output.worst_check.statistic == "mistake"
    assert output.worst_check.where == "activation gelu (tanh)"
    assert margins["norm"] < 1 < margins["mistake"]
    assert output.worst_check.coefficient == pytest.approx(1.0, abs=0.1)
    assert [finding.code for finding in result.findings] == ["PAR202"]


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    case = as_case(swiglu_pair)
    first, again, other = (parity.compare(case, ["bf16"], seeds=[seed])[0] for seed in (0, 0, 1))
    assert first.tensors == again.tensors
    assert first.tensors != other.tensors


def test_a_norm_weight_that_is_never_copied_shows():
    def forgotten(te, hidden, **_):
        return parity.Pair(
            reference=nn.RMSNorm(hidden, eps=1e-5),
            candidate=Keeping(te.RMSNorm(hidden), nn.Parameter(torch.ones(hidden))),
            weights={"weight": "copied"},
            inputs=lambda rng, batch: rng.normal(batch, hidden),
        )

    class Keeping(nn.Module):
        """A norm that takes the copied weight but does not use it."""

        def __init__(self, norm, copied):
            super().__init__()
            norm.weight.requires_grad_(False)
            self.norm = [norm]
            self.copied = copied

        def forward(self, x):
            return self.norm[0](x)

    (result,) = parity.compare(as_case(forgotten, batch=32, hidden=64), ["fp32"])
    assert not result.passed
    assert "PAR004" in [finding.code for finding in result.findings]


def test_a_nan_in_the_candidate_fails_and_is_located():
    def spoil(module, x):
        y = module(x)
        return torch.where(torch.arange(y.numel()).view_as(y) == 17, math.nan, y)

    (result,) = parity.compare(linear_case(call_candidate=spoil), ["bf16"])
    assert not result.passed
    assert result.margin == math.inf
    finding = result.findings[0]
    assert finding.code == "PAR001"
    assert "[1, 1]" in finding.message


def test_a_nan_in_the_inputs_is_the_references_own_and_still_no_pass():
    def inputs(rng):
        x = rng.normal(8, 32)
        x[3, 5] = math.nan
        return x

    (result,) = parity.compare(linear_case(inputs=inputs), ["fp32"])
    assert not result.passed
    assert {finding.code for finding in result.findings} == {"PAR002"}


def test_an_overflow_that_any_fp16_computation_has_is_named_so():
    (result,) = parity.compare(linear_case(inputs=lambda rng: rng.uniform(8, 32, low=5e4, high=6e4)), ["fp16"])
    assert not result.passed
    assert "PAR003" in [finding.code for finding in result.findings]


def test_a_candidate_that_raises_is_an_error_with_its_reason():
    def explode(module, x):
        raise RuntimeError("kernel not to be had")

    (result,) = parity.compare(linear_case(call_candidate=explode), ["fp32"])
    assert result.status == "error"
    assert not result.passed
    assert "the candidate raised RuntimeError: kernel not to be had" in result.reason


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "broken"),
        (RuntimeError("kernel not to be had"), ""),
    ],
)
def test_an_error_says_whether_it_is_the_devices(error, kind):
    def explode(module, x):
        raise error

    (result,) = parity.compare(linear_case(call_candidate=explode), ["fp32"])
    assert (result.status, result.device_error) == ("error", kind)


def test_what_the_search_for_a_mistake_makes_of_the_reference_warns_nobody(recwarn):
    class WarnsOfOthers(nn.Linear):
        def forward(self, x):
            if not isinstance(self.weight, nn.Parameter):
                warnings.warn("a weight that is no parameter", stacklevel=1)
            return super().forward(x)

    def transposed(te, **_):
        weights = {parity.transpose("weight"): "weight"}
        reference, candidate = WarnsOfOthers(32, 32, bias=False), te.Linear(32, 32, bias=False)
        return parity.Pair(reference, candidate, lambda rng: rng.normal(8, 32), weights)

    (result,) = parity.compare(parity.Case("transposed", transposed, sizes=({},)), ["bf16"])
    assert [finding.title for finding in result.findings] == ["weight-transposed"]
    assert not recwarn


def test_outputs_of_other_shapes_are_an_error_that_names_both():
    (result,) = parity.compare(linear_case(call_candidate=lambda module, x: module(x).flatten()), ["fp32"])
    assert result.status == "error"
    assert "(128,)" in result.reason
    assert "(8, 16)" in result.reason


def test_an_unknown_precision_is_a_user_error_that_lists_the_known():
    with pytest.raises(parity.UserError, match=r"fp7.*fp32, bf16"):
        parity.compare(linear_case(), ["fp7"])


def test_a_case_runs_only_at_its_own_precisions():
    case = dataclasses.replace(linear_case(), precisions=("bf16",))
    assert [result.precision for result in parity.compare(case)] == ["bf16"]


def test_modules_that_already_hold_their_weights_are_compared_as_they_are():
    te = parity.te.kernels().te
    layer, candidate = nn.Linear(32, 16), te.Linear(32, 16)
    candidate.load_state_dict(layer.state_dict(), strict=False)
    pair = parity.Pair(layer, candidate, lambda rng: rng.normal(8, 32), {"weight": "weight", "bias": "bias"})
    before = layer.weight.detach().clone()
    assert all(result.passed for result in parity.compare(pair, ["fp32", "bf16"]))
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, before)


def test_a_zero_centered_gamma_is_compared_on_the_numbers_that_te_stores():
    def factory(te, hidden, **_):
        return parity.Pair(
            reference=nn.RMSNorm(hidden, eps=1e-5),
            candidate=te.RMSNorm(hidden, zero_centered_gamma=True),
            weights={parity.shift("weight", -1.0): "weight"},
            inputs=lambda rng, batch: rng.normal(batch, hidden),
        )

    (result,) = parity.compare(as_case(factory, batch=64, hidden=256), ["bf16"])
    assert result.passed, result


@pytest.mark.parametrize("outside", [False, True])
def test_a_layer_outside_of_the_recipe_is_noted(outside):
    """Expect a note only: the layer computes without the recipe, but perhaps its user wants that."""

    def factory(te, hidden, **_):
        class Candidate(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = te.Linear(hidden, hidden, bias=False)
                self.second = te.Linear(hidden, hidden, bias=False)

            def forward(self, x):
                x = self.first(x)
                if not outside:
                    return self.second(x)
                with te.autocast(enabled=False):
                    return self.second(x)

        layers = nn.Sequential(nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False))
        weights = {"0.weight": "first.weight", "1.weight": "second.weight"}
        return parity.Pair(layers, Candidate(), lambda rng, batch, seq: rng.normal(batch, seq, hidden), weights)

    (result,) = parity.compare(as_case(factory, batch=2, seq=32, hidden=64), precisions=["fp8_current"])
    assert result.passed
    assert [note for note in result.notes if "PAR308" in note and "second" in note] == list(result.notes) * outside


# ``parity.compare`` reports wrong arguments. A call that compares nothing is wrong, since nothing in it could fail.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"pair": nn.Linear(2, 2)}, "expected a parity.Pair or .*, not Linear"),
        ({"pair": lambda te: linear()}, "expected a parity.Pair or .*, not function"),
        ({"precisions": "bf16"}, "precisions must be a list of names"),
        ({"precisions": []}, "precisions is empty"),
        ({"precisions": ["bf61"]}, "unknown precision 'bf61' in precisions; did you mean bf16\\? There are fp32"),
        ({"seeds": 3}, r"such as range\(3\), not 3"),
        ({"seeds": "3"}, r"such as range\(3\), not '3'"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [-1]}, r"from 0 to 2\*\*63 - 1, not -1"),
        ({"seeds": [0.5]}, "not 0.5"),
        ({"seeds": [2**63]}, "not 9223372036854775808"),
        ({"backend": "cuda"}, "the backend is 'cuda', but must be one of auto, gpu, cpu"),
        ({"attention": "flsh"}, "the attention backend is 'flsh'"),
        ({"determinism": "no"}, "determinism must be True or False"),
        ({"diagnose": "no"}, "diagnose must be True or False, not 'no'"),
        ({"diagnosis_seconds": -1}, "a number of seconds, or 0 for no limit, not -1"),
        ({"diagnosis_seconds": float("nan")}, "or 0 for no limit, not nan"),
        ({"diagnosis_seconds": "30"}, "or 0 for no limit, not '30'"),
        ({"diagnosis_seconds": True}, "or 0 for no limit, not True"),
        ({"calibration": "table.json"}, "calibration must be a table"),
    ],
)
def test_a_wrong_argument_is_told(arguments, complaint):
    with pytest.raises(parity.UserError, match=complaint):
        parity.compare(**{"pair": linear(), "precisions": ["fp32"], **arguments})


def test_precisions_and_seeds_may_be_generators_and_seeds_numpys():
    results = parity.compare(linear(), (name for name in ["fp32", "bf16"]), np.arange(2))
    assert [(result.precision, result.seed) for result in results] == [
        ("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1)
    ]  # fmt: skip


def test_a_pair_of_modules_that_cannot_be_copied_is_told_to_be_built_anew():
    reference = nn.Linear(2, 2)
    reference.log = open(__file__)  # noqa: SIM115
    with reference.log, pytest.raises(parity.UserError, match=r"cannot be copied.*@parity\.pair"):
        parity.compare(linear(reference=reference))


def test_a_mistake_in_a_pair_that_no_file_declares_is_told_without_a_place():
    with pytest.raises(parity.UserError, match=r"^the pair: inputs must be a function, not int"):
        parity.compare(linear(inputs=3))


def test_a_title_that_no_finding_has_cannot_be_accepted():
    case = dataclasses.replace(linear_case(), accepts=("softcaps",))
    (result,) = parity.compare(case, ["fp32"])
    assert result.status == "error"
    assert "accepts 'softcaps', no finding's title" in result.reason
