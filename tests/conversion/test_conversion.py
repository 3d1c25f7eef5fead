"""Conversion of checkpoints by a pair's map: exact both ways, loadable strictly, and refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import parity
from parity import te
from parity.case import registry
from parity.case.case import Case, Pair
from parity.case.weight_map import Shift, holds
from parity.weights.conversion.plan import ConversionError

CASES = [
    case for file in sorted((Path(__file__).parents[2] / "cases").glob("[!_]*.py")) for case in registry.load_file(file)
]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def built(case: Case, size=None) -> Pair:
    return case.build(te.kernels("cpu").te, case.sizes[0] if size is None else size)


def of_random_bits(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a state dict of random bits, which may be any number of the dtype, subnormals and NaN included."""
    info = torch.iinfo(INTEGERS[dtype])
    return {
        name: torch.randint(info.min, info.max, x.shape, dtype=INTEGERS[dtype]).view(dtype)
        for name, x in module.state_dict().items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.dtype])


def pair_of(reference: nn.Module, candidate: nn.Module, weights) -> Pair:
    return Pair(reference, candidate, weights=weights, inputs=lambda rng: rng.normal(4, 8))


def alike(module: nn.Module):
    return {name: name for name, _ in module.named_parameters()}


# Right conversions keep every bit, both ways, with TE's own modules.


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if built(case).weights], ids=lambda case: case.name)
def test_a_checkpoint_is_the_same_to_the_bit_after_te_s_layout(case, dtype):
    pair = built(case)
    original = of_random_bits(pair.reference, dtype)
    arithmetic = {left for left in pair.weights if holds(left, Shift)}
    of_te = parity.convert(case, original)
    pair.candidate.load_state_dict(of_te, strict=True)
    back = parity.convert(case, of_te, to="reference")
    again = parity.convert(case, back)
    assert list(of_te) == list(pair.candidate.state_dict())
    assert list(back) == list(original)
    assert {x.dtype for name, x in of_te.items() if name in dict(pair.candidate.named_parameters())} == {dtype}
    if not arithmetic:
        assert all(torch.equal(bits(back[name]), bits(x)) for name, x in original.items())
        assert all(torch.equal(bits(again[n]), bits(x)) for n, x in of_te.items() if x.numel())


def test_a_gain_that_te_stores_minus_1_is_off_by_the_two_roundings_that_the_docstring_tells():
    reference, candidate = nn.LayerNorm(4096, bias=False), nn.LayerNorm(4096, bias=False)
    pair = pair_of(reference, candidate, {parity.shift("weight", -1.0): "weight"})
    gain = torch.cat([torch.linspace(-3, 3, 2048), torch.logspace(-9, 1, 2048)]).bfloat16()
    stored = parity.convert(pair, {"weight": gain})["weight"]
    back = parity.convert(pair, {"weight": stored}, to="reference")["weight"]
    exact = (gain >= 0.5) & (gain <= 2.0)
    assert torch.equal(back[exact], gain[exact])

    def half_a_unit(x: torch.Tensor) -> torch.Tensor:
        return 2.0 ** (x.double().abs().clamp_min(2.0**-100).log2().floor() - 8)

    off = (back.double() - gain.double()).abs()
    assert bool((off <= half_a_unit(gain.double() - 1) + half_a_unit(back)).all())
    assert torch.equal(stored, (gain.double() - 1).bfloat16()), "rounded once"


def test_a_checkpoint_of_another_size_needs_no_memory_and_no_declaration(linear):
    with pytest.raises(ConversionError, match=r'lacks "weight" \(1048576, 1048576\)'):
        parity.convert(linear, {}, size=dict(width=1 << 20))
    original = linear_state(48)
    assert torch.equal(parity.convert(linear, original, size=dict(width=48))["weight"], original["weight"])


def test_the_size_that_fits_is_found_among_the_declared_ones(linear):
    assert parity.convert(linear, linear_state(16))["weight"].shape == (16, 16)


@pytest.fixture
def linear(stand_ins_for_pairs):
    @parity.pair("conversion_linear", sizes=[dict(width=8), dict(width=16)])
    def conversion_linear(te, width):
        return pair_of(nn.Linear(width, width), te.Linear(width, width), {"weight": "weight", "bias": "bias"})

    return conversion_linear


@pytest.fixture
def stand_ins_for_pairs():
    declared = registry.cases()
    yield
    registry.restore(declared)


def linear_state(width: int) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in nn.Linear(width, width).named_parameters()}


@pytest.mark.parametrize("copy", [True, False])
def test_memory_is_shared_only_if_that_is_asked_for(copy):
    reference, candidate = nn.Linear(4, 4), nn.Linear(4, 4)
    original = reference.state_dict()
    made = parity.convert(pair_of(reference, candidate, alike(reference)), original, copy=copy)
    assert all((made[name].data_ptr() == x.data_ptr()) is not copy for name, x in original.items())


def test_te_parameters_are_given_what_the_reference_lacks_in_the_dtype_of_most():
    reference, candidate = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    pair = pair_of(reference, candidate, {"weight": "weight", parity.constant(0.0, 4): "bias"})
    made = parity.convert(pair, {"weight": torch.ones(4, 4, dtype=torch.bfloat16)})
    assert torch.equal(made["bias"], torch.zeros(4, dtype=torch.bfloat16))
    assert list(parity.convert(pair, made, to="reference")) == ["weight"]


def test_another_dtype_is_rounded_to_once():
    reference, candidate = nn.Linear(4, 4), nn.Linear(4, 4)
    original = reference.state_dict()
    made = parity.convert(pair_of(reference, candidate, alike(reference)), original, dtype=torch.bfloat16)
    assert all(torch.equal(made[name], x.bfloat16()) for name, x in original.items())


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def tied_pair(reference_ties: bool, candidate_ties: bool) -> Pair:
    both = parity.copies("tokens.weight", "head.weight")
    return pair_of(
        Tied(reference_ties), Tied(candidate_ties), {"tokens.weight": "tokens.weight" if candidate_ties else both}
    )


@pytest.mark.parametrize("candidate_ties", [True, False])
@pytest.mark.parametrize("saved", [("tokens.weight",), ("head.weight",), ("tokens.weight", "head.weight")], ids=str)
def test_tied_parameters_may_be_saved_under_any_of_their_names_and_are_made_under_all(saved, candidate_ties):
    weight = torch.randn(8, 4)
    pair = tied_pair(True, candidate_ties)
    made = parity.convert(pair, dict.fromkeys(saved, weight))
    pair.candidate.load_state_dict(made, strict=True)
    assert torch.equal(pair.candidate.head.weight, weight)
    assert list(parity.convert(pair, made, to="reference")) == ["tokens.weight", "head.weight"]


class Buffered(nn.Module):
    def __init__(self, te_name: str = "mean", also: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer(te_name, torch.zeros(4))
        if also:
            self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 4, 2) / 4))


def test_buffers_of_one_name_are_carried_over_and_others_are_as_they_are_made(stand_ins_for_pairs):
    @parity.pair("conversion_buffered")
    def conversion_buffered(te):
        reference = Buffered()
        return pair_of(reference, Buffered(also=True), alike(reference))

    original = {**Buffered().state_dict(), "mean": torch.arange(4.0)}
    made = parity.convert(conversion_buffered, original)
    assert torch.equal(made["mean"], original["mean"])
    assert torch.equal(made["inv_freq"], Buffered(also=True).inv_freq)


def test_the_state_of_fp8_scaling_is_empty_in_a_new_checkpoint_and_left_out_on_the_way_back():
    module = te.kernels("cpu").te.Linear(16, 16)
    pair = pair_of(nn.Linear(16, 16), module, {"weight": "weight", "bias": "bias"})
    made = parity.convert(pair, linear_state(16))
    assert made["_extra_state"].numel() == 0
    made["_extra_state"] = torch.ones(3, dtype=torch.uint8)  # of a module that ran with delayed scaling
    assert list(parity.convert(pair, made, to="reference")) == ["weight", "bias"]


class Stateful(nn.Linear):
    """A linear layer whose extra state is not a tensor."""

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        raise AssertionError("nothing was converted")


def test_what_a_module_of_one_s_own_keeps_beside_tensors_is_left_out():
    pair = pair_of(Stateful(4, 4), Stateful(4, 4), {"weight": "weight", "bias": "bias"})
    assert list(parity.convert(pair, pair.reference.state_dict())) == ["weight", "bias"]


def test_te_s_quantized_parameters_are_filled_and_read_as_the_numbers_that_they_stand_for():
    from transformer_engine.common.recipe import Float8CurrentScaling

    transformer_engine = te.kernels("cpu").te
    with transformer_engine.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        module = transformer_engine.Linear(32, 32, params_dtype=torch.bfloat16)
    pair = pair_of(nn.Linear(32, 32), module, {"weight": "weight", "bias": "bias"})
    original = {name: x.bfloat16() for name, x in linear_state(32).items()}
    module.load_state_dict(parity.convert(pair, original), strict=True)
    back = parity.convert(pair, module.state_dict(), to="reference")
    assert torch.equal(back["weight"], module.weight.dequantize())
    assert back["weight"].dtype is torch.bfloat16
    assert float((back["weight"].double() - original["weight"].double()).abs().max()) > 0, "FP8 rounds"
    torch.testing.assert_close(back["weight"], original["weight"], rtol=2.0**-4, atol=2.0**-10)


PREFIXES = [
    ("model.", "model.weight", "weight"),
    ("model.layers.3.=", "model.layers.3.weight", "weight"),
    (["model.=", "=other."], "model.weight", "weight"),
]


@pytest.mark.parametrize(("prefix", "key", "name"), PREFIXES)
def test_keys_may_begin_with_a_prefix_and_have_it_again_on_the_way_back(prefix, key, name):
    reference, candidate = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    pair = pair_of(reference, candidate, {"weight": "weight"})
    made = parity.convert(pair, {key: torch.ones(4, 4)}, prefix=prefix, te_prefix="module.")
    assert list(made) == ["module.weight"]
    assert list(parity.convert(pair, made, to="reference", prefix=prefix, te_prefix="module.")) == [key]


def test_a_module_may_hold_the_model_under_a_name():
    reference, candidate = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    pair = pair_of(reference, candidate, {"0.weight": "weight", "0.bias": "bias"})
    made = parity.convert(pair, linear_state(4), prefix="=0.")
    assert list(parity.convert(pair, made, to="reference", prefix="=0.")) == ["weight", "bias"]


# Checkpoints and modules that do not fit, and the messages.


def biased() -> Pair:
    reference, candidate = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    return pair_of(reference, candidate, {"weight": "weight", parity.constant(0.0, 4): "bias"})


def plain() -> Pair:
    reference, candidate = nn.Linear(4, 4), nn.Linear(4, 4)
    return pair_of(reference, candidate, alike(reference))


def buffered() -> Pair:
    return pair_of(Buffered(), Buffered("running_mean"), alike(Buffered()))


def stacked() -> Pair:
    reference, candidate = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))) for _ in range(2))
    return pair_of(reference, candidate, alike(reference))


def untied() -> Pair:
    return tied_pair(True, False)


WEIGHT, BIAS = torch.ones(4, 4), torch.zeros(4)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([BIAS, BIAS], layout=torch.jagged)


def freed() -> torch.Tensor:
    tensor = torch.zeros(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


WRONG = {
    "missing": (plain, {"weight": WEIGHT}, {}, 'lacks "bias" (4,)'),
    "another prefix": (plain, {"m.weight": WEIGHT, "m.bias": BIAS}, {}, 'prefix="m." (--prefix "m.") meant?'),
    "a name in the module": (
        lambda: pair_of(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), {"0.weight": "weight", "0.bias": "bias"}),
        {"weight": WEIGHT, "bias": BIAS},
        {},
        'prefix="=0."',
    ),
    "unexpected": (plain, {"weight": WEIGHT, "bias": BIAS, "gain": BIAS}, {}, 'has "gain" (4,), which is no parameter'),
    "a pattern of others": (
        plain,
        {"weight": WEIGHT, "bias": BIAS, "gain": BIAS},
        dict(ignore="*.gain"),
        "leave it out by a pattern",
    ),
    "shape": (plain, {"weight": torch.ones(8, 4), "bias": BIAS}, {}, '"weight" is (8, 4) in the checkpoint'),
    "dtype": (plain, {"weight": WEIGHT.to(torch.int8), "bias": BIAS}, {}, "dequantize the checkpoint first"),
    "float8": (plain, {"weight": WEIGHT.to(torch.float8_e4m3fn), "bias": BIAS}, {}, 'and no "weight_scale_inv" or'),
    "too large": (plain, {"weight": WEIGHT * 1e6, "bias": BIAS}, dict(dtype=torch.float16), "up to 1e+06"),
    "buffer": (
        buffered,
        {**Buffered().state_dict(), "mean": BIAS + 3},
        {},
        'the buffer "mean" (4,), whose values are not',
    ),
    "a layer more": (
        stacked,
        {"0.weight": WEIGHT, "1.weight": WEIGHT, "2.weight": WEIGHT},
        {},
        "if the checkpoint has another size than the pair, give it",
    ),
    "a layer fewer": (stacked, {"0.weight": WEIGHT}, {}, "if the checkpoint has another size than the pair, give it"),
    "ties that differ": (
        untied,
        {"tokens.weight": torch.ones(8, 4), "head.weight": torch.zeros(8, 4)},
        {},
        "build the pair's module without the tie",
    ),
    "one name twice": (plain, {"weight": WEIGHT, "m.weight": WEIGHT, "bias": BIAS}, dict(prefix="m."), "has both"),
    "trained bias": (
        biased,
        {"weight": WEIGHT, "bias": BIAS + 0.5},
        dict(to="reference"),
        "up to 0.5 away, so that the reference has no place for it",
    ),
    "drifted copies": (
        untied,
        {"tokens.weight": torch.ones(8, 4), "head.weight": torch.full((8, 4), 1.25)},
        dict(to="reference"),
        "have drifted apart, by up to 0.25",
    ),
    "nested": (plain, {"model": {"weight": WEIGHT}}, {}, "under ['model']?"),
    "a number for a key": (plain, {1: WEIGHT}, {}, "state_dict[1] has no name for a key"),
    "meta": (plain, {"weight": WEIGHT.to("meta"), "bias": BIAS}, {}, "has no values"),
    "sparse": (plain, {"weight": WEIGHT.to_sparse(), "bias": BIAS}, {}, "to_dense() first"),
    "nested tensor": (plain, {"weight": jagged(), "bias": BIAS}, {}, "pad it first"),
    "lazy": (plain, {"weight": nn.UninitializedParameter(), "bias": BIAS}, {}, "has no shape yet"),
    "freed": (plain, {"weight": freed(), "bias": BIAS}, {}, "has lost its memory"),
    "no mapping": (plain, [WEIGHT], {}, "must be a mapping from names to tensors"),
    "direction": (plain, {}, dict(to="candidate"), 'must be "te" or "reference"'),
    "dtype of integers": (plain, {}, dict(dtype=torch.int8), "must be torch.float64, float32"),
    "size of modules": (plain, {}, dict(size=dict(width=4)), "modules exist"),
    "prefix": (plain, {}, dict(prefix="a=b=c"), "prefix must be a prefix of the checkpoint's keys"),
    "two prefixes alike": (plain, {}, dict(prefix=["a.", "b."]), "twice on one side"),
    "pattern": (plain, {}, dict(ignore=[3]), "ignore takes patterns"),
    "copy": (plain, {}, dict(copy="no"), "copy must be True or False"),
    "pair": (lambda: nn.Linear(4, 4), {}, {}, "expected a parity.Pair"),
}


@pytest.mark.parametrize(("pair", "state", "arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused_with_what_to_do(pair, state, arguments, message):
    with pytest.raises(parity.UserError) as raised:
        parity.convert(pair(), state, **arguments)
    assert message in str(raised.value)


ALLOWED = {
    "unexpected": (plain, {"weight": WEIGHT, "bias": BIAS, "gain": BIAS}, dict(ignore=["g*n"])),
    "buffer": (buffered, {**Buffered().state_dict(), "mean": BIAS + 3}, dict(ignore="mean")),
    "a buffer as the pair makes it": (buffered, {**Buffered().state_dict()}, {}),
    "trained bias": (biased, {"weight": WEIGHT, "bias": BIAS + 0.5}, dict(to="reference", ignore="bias")),
    "drifted copies": (
        untied,
        {"tokens.weight": torch.ones(8, 4), "head.weight": torch.zeros(8, 4)},
        dict(to="reference", ignore="head.*"),
    ),
}


@pytest.mark.parametrize(("pair", "state", "arguments"), ALLOWED.values(), ids=ALLOWED)
def test_what_a_pattern_names_is_left_out(pair, state, arguments):
    assert parity.convert(pair(), state, **arguments)


def test_similar_layers_share_a_line():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(32)))
    with pytest.raises(ConversionError, match=r'lacks "0..31.weight" \(4, 4\)'):
        parity.convert(pair_of(model, nn.Sequential(*(nn.Linear(4, 4) for _ in range(32))), alike(model)), {})
