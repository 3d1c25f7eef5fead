"""Test the draws of weights and inputs, and probing inputs, whose rows Gaussian inputs never have."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import parity
from parity.case.case import Rng
from parity.passes.draws import LARGEST, SMALLEST, Draws, probe, reweigh

# Seeded random inputs.


def test_a_seed_gives_the_same_tensors_again():
    assert torch.equal(Rng(7).normal(4, 8), Rng(7).normal(4, 8))


def test_seeds_and_purposes_give_independent_streams():
    draws = [Rng(seed, purpose).normal(1000) for seed in (0, 1) for purpose in ("inputs", "weights")]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlations.abs().max() < 0.15


def test_a_shape_may_be_one_tuple():
    assert torch.equal(Rng(7).normal((4, 8)), Rng(7).normal(4, 8))
    assert Rng(7).integers((2, 3), high=5).shape == Rng(7).uniform([2, 3]).shape == (2, 3)


def test_tensors_of_one_stream_differ():
    rng = Rng(0)
    assert not torch.equal(rng.normal(8), rng.normal(8))


def test_draws_stay_in_their_range():
    rng = Rng(0)
    assert rng.uniform(1000, low=-2, high=3).min() >= -2
    assert set(rng.integers(1000, low=1, high=4).tolist()) == {1, 2, 3}
    assert sorted(rng.permutation(16).tolist()) == list(range(16))


# Weights that are drawn, and drawn again.


def built(draws: Draws, seed: int) -> tuple[list[Tensor], Tensor]:
    """Build modules from a seed, and return the tensors that they hold and the number that is drawn next."""
    torch.manual_seed(seed)
    with draws.repeated():
        modules = nn.Linear(64, 128), nn.Embedding(100, 64), nn.Linear(128, 64)
        scale = torch.randn(8192)  # not drawn by a method of a tensor
        weight = nn.init.trunc_normal_(torch.empty(128, 64).t(), std=0.02)
    held = [parameter for module in modules for parameter in module.parameters()]
    return [x.detach() for x in (*held, scale, weight)], torch.rand(())


def test_modules_that_are_built_again_hold_the_same_to_the_bit() -> None:
    draws = Draws()
    without, following = built(Draws(), 0)
    for _ in range(2):
        held, drawn_next = built(draws, 0)
        assert all(torch.equal(x, y) for x, y in zip(held, without, strict=True))
        assert torch.equal(drawn_next, following)


def test_what_is_written_to_a_weight_does_not_come_again() -> None:
    draws = Draws()
    first, _ = built(draws, 0)
    before = [x.clone() for x in first]
    for x in first:
        x.zero_()
    again, _ = built(draws, 0)
    assert all(torch.equal(x, y) for x, y in zip(again, before, strict=True))


def test_another_seed_draws_other_numbers() -> None:
    draws = Draws()
    one, _ = built(draws, 0)
    other, _ = built(draws, 1)
    assert not any(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_generator_of_its_own_gives_what_its_own_state_does() -> None:
    with Draws().repeated():
        generators = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1)]
        one, same, other = (torch.empty(8192).normal_(generator=generator) for generator in generators)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


class Counted(TorchDispatchMode):
    """A mode that counts the draws into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn += func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        return func(*args, **kwargs or {})


def test_what_was_drawn_before_is_copied() -> None:
    draws = Draws()
    for drawn in (4, 0):  # a bias is too small to be worth a lookup, and is drawn each time
        with Counted() as counted, draws.repeated():
            torch.manual_seed(0)
            for module in (nn.Linear(64, 128), nn.Embedding(100, 64)):
                assert module.weight.requires_grad
            torch.empty(8192).uniform_(-1.0, to=1.0)
            nn.init.normal_(torch.empty(8192), 0.0, 2.0)
        assert counted.drawn == drawn + 1


def test_pytorchs_own_methods_stay_what_they_are_and_other_threads_draw_as_ever() -> None:
    before = Tensor.normal_, Tensor.uniform_
    alone = torch.empty(8192).normal_(generator=torch.Generator().manual_seed(3))
    with Draws().repeated(), ThreadPoolExecutor(1) as pool:
        assert (Tensor.normal_, Tensor.uniform_) == before
        with Counted() as counted:
            beside = pool.submit(lambda: torch.empty(8192).normal_(generator=torch.Generator().manual_seed(3)))
            assert torch.equal(beside.result(), alone)
        assert counted.drawn == 0


# Probing inputs: rows that Gaussian inputs never have.


INPUTS = Rng(0).normal(4, 32, 64)


def test_rows_have_every_magnitude_between_the_smallest_and_the_largest():
    rms = probe(INPUTS, Rng(1)).square().mean(-1).sqrt().flatten().sort().values
    assert rms[0] < 10 * SMALLEST
    assert rms[-1] > LARGEST / 2
    steps = rms.log10().diff()
    assert steps.max() < 0.5


def test_a_third_of_the_rows_is_far_from_zero_and_a_third_has_a_single_value():
    rows = probe(INPUTS, Rng(1)).flatten(0, 1)
    single = (rows != 0).sum(-1) == 1
    shifted = rows.mean(-1) > 2 * rows.std(-1)
    assert int(single.sum()) == pytest.approx(len(rows) / 3, abs=1)
    assert int(shifted.sum()) == pytest.approx(len(rows) / 3, abs=1)


def test_rows_of_padding_stay_or_become_a_single_value():
    padded = INPUTS.clone()
    padded[:, ::4] = 0.0
    rows = probe(padded, Rng(1))[:, ::4].flatten(0, 1)
    values = (rows != 0).sum(-1)
    assert set(values.tolist()) == {0, 1}


def test_the_drawn_inputs_stay_as_they_are():
    before = INPUTS.clone()
    probe(INPUTS, Rng(1))
    assert torch.equal(INPUTS, before)


@pytest.mark.parametrize(
    "kept",
    [
        torch.ones(4, 8, dtype=torch.bool),
        torch.arange(8),
        torch.ones(8),
        torch.tensor([[0.0, -math.inf]]),
        torch.ones(4, 8),
    ],
    ids=["mask", "positions", "vector", "additive mask", "constant rows"],
)
def test_what_is_no_activation_is_not_changed(kept):
    activation, other = probe((INPUTS, kept), Rng(1))
    assert not torch.equal(activation, INPUTS)
    assert other is kept


def test_the_same_seed_gives_the_same_probe():
    assert torch.equal(probe(INPUTS, Rng(1)), probe(INPUTS, Rng(1)))
    assert not torch.equal(probe(INPUTS, Rng(1)), probe(INPUTS, Rng(2)))


# Probing weights exercise what usual weights leave idle.


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.conv = nn.LayerNorm(64), nn.Linear(64, 256), nn.Conv1d(8, 16, 3)
        self.experts = nn.Parameter(0.02 * torch.randn(4, 64, 32))


def reweighed_layer(names: set[str] | None = None) -> tuple[Layer, dict[str, Tensor]]:
    """Return a layer with probing weights and, by name, the weights that it had before."""
    torch.manual_seed(0)
    layer = Layer()
    before = {name: x.detach().clone() for name, x in layer.named_parameters()}
    reweigh(layer, before if names is None else names, Rng(1))
    return layer, before


def test_each_output_of_a_linear_layer_gets_a_gain_of_its_own():
    layer, _ = reweighed_layer()
    gains = layer.linear(torch.randn(4096, 64)).std(0)
    assert 0.4 < gains.min() < 0.7
    assert 4.5 < gains.max() < 7.5
    for outputs in (layer.conv.weight.flatten(1), *layer.experts):
        assert outputs.square().mean(1).sqrt().std() > 0.1 * outputs.std()


def test_biases_and_gains_of_norms_are_as_large_as_activations():
    layer, _ = reweighed_layer()
    assert 0.25 <= layer.norm.weight.min() < 0.4 < 1.6 < layer.norm.weight.max() <= 1.75
    assert -0.75 <= layer.norm.bias.min() < -0.6 < 0.6 < layer.norm.bias.max() <= 0.75
    assert torch.isclose(layer.linear.bias.square().mean().sqrt(), torch.tensor(0.5))


def test_signs_of_drawn_weights_and_all_other_weights_stay():
    layer, before = reweighed_layer({"linear.weight", "linear.bias"})
    assert torch.equal(layer.linear.bias.sign(), before["linear.bias"].sign())
    assert not torch.equal(layer.linear.weight, before["linear.weight"])
    for name in before.keys() - {"linear.weight", "linear.bias"}:
        assert torch.equal(layer.get_parameter(name), before[name])


# Models that take ids are probed through the rows of their embedding tables.


VOCABULARY, WIDTH = 96, 64


class Model(nn.Module):
    """A small model whose embedding table holds normal deviates, far above any eps."""

    def __init__(self, norm: Any, linear: Any, eps: float, table: Any = nn.Embedding) -> None:
        super().__init__()
        self.tokens = table(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH, eps=eps) for _ in range(2))
        self.layer, self.head = linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(self.norms[1](x + self.layer(self.norms[0](x))))


class Indexed(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class OneHot(Indexed):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, len(self.weight)).to(self.weight.dtype) @ self.weight


def result(precision: str, eps: float = 1e-6, tables: tuple[Any, Any] = (nn.Embedding, nn.Embedding)) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        reference = Model(nn.RMSNorm, nn.Linear, 1e-6, tables[0])
        candidate = Model(te.RMSNorm, te.Linear, eps, tables[1])
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, lambda rng: rng.integers(2, 64, high=VOCABULARY), names)

    (one,) = parity.compare(parity.Case("model", factory, sizes=({},)), [precision])
    return one


def probed(one: parity.Result) -> list[str]:
    return [tensor.name for tensor in one.tensors if tensor.probed]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current"])
def test_a_right_port_passes_on_rows_of_every_magnitude(precision):
    one = result(precision)
    assert one.passed
    assert probed(one) == ["output"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current"])
def test_an_eps_is_told_that_a_table_of_normal_numbers_hides(precision):
    one = result(precision, eps=1e-5)
    assert not one.passed
    assert one.findings[0].title == "norm-eps"
    assert "1e-06; it computes with eps=1e-05" in one.findings[0].message


def test_a_port_that_looks_its_rows_up_otherwise_is_not_probed_and_a_note_says_so():
    one = result("bf16", tables=(nn.Embedding, Indexed))
    assert one.passed
    assert not probed(one)
    assert any("looks up other rows" in note for note in one.notes)


def test_what_no_probe_would_change_is_compared_once():
    one = result("bf16", tables=(OneHot, OneHot))
    assert one.passed
    assert not probed(one)


def test_a_reference_without_lookups_is_probed_with_a_port_that_has_one():
    class Joined(nn.Module):
        def __init__(self, table: Any, norm: Any) -> None:
            super().__init__()
            self.tokens, self.norm = table(VOCABULARY, WIDTH), norm(WIDTH)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.norm(x + self.tokens(ids))

    def factory(te: Any, **_: Any) -> parity.Pair:
        reference, candidate = Joined(OneHot, nn.LayerNorm), Joined(nn.Embedding, te.LayerNorm)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, inputs, names)

    def inputs(rng: Any) -> dict[str, Tensor]:
        return {"x": rng.normal(64, WIDTH), "ids": rng.integers(64, high=VOCABULARY)}

    (one,) = parity.compare(parity.Case("joined", factory, sizes=({},)), ["bf16"])
    assert one.passed
    assert probed(one) == ["output"]
