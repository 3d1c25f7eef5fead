"""Test special cases of judging: numbers, losses, small slices, norms that round, ports that are more accurate, and an
optimizer's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from bad_input import TOKENS, linear, mlp, result_of, te
from torch import Tensor, nn

import parity
from lab.corpus.trained_ports.optimizers import Lion
from parity.judge.statistics import statistics
from parity.numerics.errors import CachedTensor
from parity.trainings.step_verdicts import Replay, deviations
from parity.trainings.steps import Update
from te_on_cpu.kernel_choices import kernel_choices

# Python numbers beside a module's tensors are judged, or reported as different.


HIDDEN = 64
PRECISIONS = ["fp32", "bf16", "fp16", "fp8_current"]


class WithNumber(nn.Module):
    """A layer that also returns a number, which a function computes from its result and its input."""

    def __init__(self, layer: nn.Module, number, returned=lambda y, number: (y, number)) -> None:
        super().__init__()
        self.layer, self.number, self.returned = layer, number, returned

    def forward(self, x: Tensor):
        y = self.layer(x)
        return self.returned(y, self.number(y, x))


@dataclass
class Output:
    hidden: Tensor
    metrics: dict[str, float]


RETURNED = {
    "a tuple": (lambda y, number: (y, number), "[1]"),
    "a dict": (lambda y, number: {"y": y, "loss": number}, "['loss']"),
    "a dataclass": (lambda y, number: Output(y, {"loss": number}), ".metrics['loss']"),
    "a list in a tuple": (lambda y, number: (y, [1.0, number]), "[1][1]"),
}


def compared(of_reference, of_candidate, precisions=PRECISIONS, returned=RETURNED["a tuple"][0]):
    def factory(te, **_):
        return parity.Pair(
            WithNumber(nn.Linear(HIDDEN, HIDDEN), of_reference, returned),
            WithNumber(te.Linear(HIDDEN, HIDDEN), of_candidate, returned),
            inputs=lambda rng: rng.normal(32, HIDDEN),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    return parity.compare(parity.Case("numbers", factory, sizes=({},)), precisions, seeds=range(2))


def loss(y: Tensor, x: Tensor) -> float:
    return y.float().square().mean().item()


RIGHT = {
    "a constant": lambda y, x: 1e-5,
    "a loss": loss,
    "a mean near zero": lambda y, x: y.float().mean().item(),
    "a mean in the precision's dtype": lambda y, x: y.mean().item(),
    "a norm": lambda y, x: float(y.float().norm()),
    "of the input": lambda y, x: x.abs().max().item(),
    "infinite": lambda y, x: float("inf"),
    "not a number": lambda y, x: float("nan"),
    "a count": lambda y, x: x.numel(),
    "a switch": lambda y, x: True,
    "a text": lambda y, x: "train",
    "nothing": lambda y, x: None,
}


@pytest.mark.parametrize("number", RIGHT.values(), ids=RIGHT)
def test_a_port_that_returns_the_same_numbers_passes_without_a_word(number):
    for result in compared(number, number):
        assert (result.status, result.notes) == ("passed", ())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (RIGHT["a constant"], lambda y, x: 1e-6),
        (lambda y, x: 3.0, lambda y, x: 4.0),
        (loss, lambda y, x: 2 * loss(y, x)),
        (loss, lambda y, x: y.float().square().sum().item()),
        (loss, lambda y, x: float("nan")),
        (lambda y, x: 0.0, lambda y, x: 1.0),
    ],
    ids=["a constant", "another constant", "twice", "a sum for a mean", "not a number", "not zero"],
)
def test_floats_that_no_rounding_explains_fail(right, wrong):
    for result in compared(right, wrong):
        assert result.status == "failed"
        (found,) = result.findings
        assert (found.code, found.title) == ("PAR274", "number")
        assert found.message.startswith("the candidate returns ")
        assert " at [1] where the reference returns " in found.message


@pytest.mark.parametrize(("returned", "place"), RETURNED.values(), ids=RETURNED)
def test_the_place_is_told(returned, place):
    result, _ = compared(lambda y, x: 3.0, lambda y, x: 4.0, ["bf16"], returned)
    assert result.findings[0].message.startswith(
        f"the candidate returns 4 at {place} where the reference returns 3, which no rounding at bf16 explains"
    )


@pytest.mark.parametrize(("right", "wrong"), [(3, 4), (True, False), (3, 3.5)])
def test_other_numbers_that_differ_are_said(right, wrong):
    for result in compared(lambda y, x: right, lambda y, x: wrong, ["bf16"]):
        assert result.passed
        (note,) = result.notes
        assert note.startswith(f"the candidate returns {wrong} at [1] where the reference returns {right}; ")


def test_a_number_that_the_port_leaves_out_is_said():
    result, _ = compared(lambda y, x: 3.0, lambda y, x: None, ["bf16"])
    assert result.passed
    assert result.notes == ("the reference returns a number at [1], but the candidate does not",)


def test_beside_tensors_that_fail_it_is_noted():
    class Wrong(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return 2 * self.layer(x), 4.0

    def factory(te, **_):
        return parity.Pair(
            WithNumber(nn.Linear(HIDDEN, HIDDEN), lambda y, x: 3.0),
            Wrong(te.Linear(HIDDEN, HIDDEN)),
            inputs=lambda rng: rng.normal(32, HIDDEN),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("numbers", factory, sizes=({},)), ["bf16"])
    assert result.status == "failed"
    assert any("returns 4 at [1]" in note for note in result.notes)


# A loss in FP32 is judged by the errors of faithful runs, not by a rounding that none of them does.


BATCH, SEQ, CLASSES = 4, 24, 48


class Model(nn.Module):
    """Logits and their loss.

    ``change`` is applied to the loss. ``scale`` multiplies what the layers read and is divided out after them, so that
    their numbers are rounded differently.
    """

    def __init__(self, linear, change=lambda loss: loss, scale=1.0, shift=1, wide=True) -> None:
        super().__init__()
        self.up, self.head = linear(HIDDEN, HIDDEN, bias=False), linear(HIDDEN, CLASSES, bias=False)
        self.change, self.scale, self.shift, self.wide = change, scale, shift, wide

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.silu(self.up(x * self.scale) / self.scale))
        wide = logits.float() if self.wide and logits.dtype is not torch.float64 else logits
        count = SEQ - 1
        loss = F.cross_entropy(wide[:, :count].flatten(0, 1), labels[:, self.shift : self.shift + count].flatten())
        return self.change(loss), logits


def compared_loss(precision, seed=0, reference=None, **port) -> parity.Result:
    def factory(te, **_):
        return parity.Pair(
            Model(nn.Linear, **(reference or {})),
            Model(te.Linear, **{**(reference or {}), **port}),
            lambda rng, batch: (rng.normal(batch, SEQ, HIDDEN), rng.integers(batch, SEQ, high=CLASSES)),
            weights={"up.weight": "up.weight", "head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=BATCH),)), [precision], seeds=[seed])
    return result


def loss_of(result: parity.Result):
    return next(tensor for tensor in result.tensors if tensor.label == "output[0]")


@pytest.mark.parametrize(("precision", "seed"), [("fp32", 0), ("bf16", 1), ("fp16", 3)])
def test_a_loss_off_by_a_third_of_a_percent_is_wrong_itself_and_among_nothing_that_is_right(precision, seed):
    result = compared_loss(precision, seed, change=lambda loss: 1.003 * loss)
    assert result.status == "failed"
    assert not loss_of(result).passed
    assert not any("These are right: output[0]" in finding.message for finding in result.findings)
    # Where gradients are precise enough, the factor is found; otherwise nothing is, as many mistakes move one number.
    titles = {finding.title for finding in result.findings}
    assert titles == {"loss-scale"} or titles <= {"unexplained", "first-divergence"}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_current"])
def test_what_is_expected_of_a_loss_in_fp32_is_not_the_rounding_of_the_precision(precision):
    result = compared_loss(precision)
    assert result.status == "passed"
    rounding = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps / 4
    assert loss_of(result).expected.relative_l2 < rounding / 2


def test_a_loss_that_is_returned_in_the_precisions_dtype_is_expected_to_be_rounded():
    result = compared_loss("bf16", reference=dict(wide=False))
    assert loss_of(result).expected.relative_l2 > 1e-3


def test_a_right_loss_whose_roundings_are_others_passes_where_the_models_error_happens_to_be_hardly_any():
    """One run's error in a single number may be a hundredth of the usual error, which drawn runs show."""
    results = [compared_loss("fp16", seed, scale=1.37) for seed in range(12)]
    passed = [loss_of(result) for result in results if result.passed]
    assert len(passed) >= 8
    assert any("output[0] (norm" in note for result in results if result.passed for note in result.notes)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("wide", [True, False])
def test_chance_is_not_told_of_a_loss_that_fails_beside_gradients_that_are_wrong(wide, precision):
    for seed in range(4):
        result = compared_loss(precision, seed, dict(wide=wide), shift=0)
        assert result.findings[0].title == "labels-shifted"
        assert not any("within what rounding" in note and "output[0] (" in note for note in result.notes)


def test_drawn_runs_leave_a_single_number_no_more_luck_than_they_show():
    """Of sixteen runs with errors of one size, none has an error six times the largest."""
    generator = torch.Generator().manual_seed(0)
    drawn = [CachedTensor(x, is_drawn=True) for x in torch.randn(16, 1, generator=generator)]
    largest = max(error.max_abs for error in drawn)
    golden = CachedTensor(torch.ones(1))

    def norm(errors) -> float:
        error = CachedTensor(torch.full((1,), 6.0 * largest))
        return next(one.value for one in statistics(error, errors, golden, 0.0) if one.name == "norm")

    assert norm(drawn) > 3.0
    two_alike = [CachedTensor(torch.full((1,), largest))] * 2  # nobody knows how lucky they are
    assert norm(two_alike) < 2.0


# Small rows, columns and heads beside large ones are judged by their own error.


class Joined(nn.Module):
    """A layer's result twice, with one copy far larger."""

    def __init__(self, layer: nn.Module, large: float, small: float, dim: int) -> None:
        super().__init__()
        self.layer, self.large, self.small, self.dim = layer, large, small, dim

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat((y * self.large, y * self.small), self.dim)


def joined(large: float, small: float, dim: int) -> parity.Case:
    def factory(te, **_):
        return parity.Pair(
            reference=Joined(nn.Linear(HIDDEN, HIDDEN), large, 1.0, dim),
            candidate=Joined(te.Linear(HIDDEN, HIDDEN), large, small, dim),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
            inputs=lambda rng, batch: rng.normal(batch, 32, HIDDEN),
        )

    return parity.Case("joined", factory, sizes=(dict(batch=4),))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "tokens", "columns"])
@pytest.mark.parametrize(
    ("precision", "large"),
    [("fp32", 1e8), ("bf16", 1e3), ("fp8_current", 1e2)],
)
def test_a_wrong_factor_in_the_small_part_fails(precision, large, dim):
    (right,) = parity.compare(joined(large, 1.0, dim), [precision])
    assert right.status == "passed"
    for wrong in (1.5, 1.1):
        (result,) = parity.compare(joined(large, wrong, dim), [precision], diagnose=False)
        assert result.status == "failed"
        output = next(tensor for tensor in result.tensors if tensor.kind == "output")
        assert any(check.statistic == "slice" and check.margin > 1 for check in output.checks)


class Scaled(nn.Module):
    """Scales single input features, so that as many columns of the first weight's gradient differ in size."""

    def __init__(self, layer: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.layer, self.factors = layer, factors

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.factors.to(x.dtype))


@pytest.mark.parametrize(("precision", "large"), [("fp32", 1e2), ("fp32", 1e4), ("bf16", 1e1)])
def test_a_wrong_factor_in_a_small_slice_of_gradients_fails(precision, large):
    factors = torch.full((HIDDEN,), large, dtype=torch.float64)
    factors[:8] = 1.0
    wrong = factors.clone()
    wrong[:8] = 1.5

    def case(used: Tensor) -> parity.Case:
        def factory(te, **_):
            return parity.Pair(
                reference=Scaled(nn.Linear(HIDDEN, HIDDEN), factors),
                candidate=Scaled(te.Linear(HIDDEN, HIDDEN), used),
                weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
                inputs=lambda rng, batch: rng.normal(batch, 32, HIDDEN),
            )

        return parity.Case("scaled", factory, sizes=(dict(batch=4),))

    (right,) = parity.compare(case(factors), [precision])
    assert right.status == "passed"
    (result,) = parity.compare(case(wrong), [precision], diagnose=False)
    failed = {tensor.label: tensor for tensor in result.tensors if not tensor.passed}
    assert {"d input", "d layer.weight"} <= set(failed)
    places = [check.where for check in failed["d layer.weight"].checks if check.statistic == "slice"]
    assert places
    assert int(places[0].removeprefix("dim 1 at ")) < 8


# A port's norms that round in 16 bits are reported, unless the reference's own lines round there as well.


NORMED = 128
half_precision = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Norm(nn.Module):
    """An RMSNorm that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NORMED))


class RoundedBeforeWeight(Norm):
    """The norm of Hugging Face's Llama, which rounds before it multiplies by the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class StatisticsInTheDtype(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class NotInHalfPrecision(RoundedBeforeWeight):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            raise RuntimeError("not implemented for half precision")
        return super().forward(x)


def result_of_norm(reference: nn.Module, port: nn.Module, precision: str) -> parity.Result:
    te = parity.te.kernels("cpu").te
    torch.manual_seed(0)
    nn.init.uniform_(reference.weight, 0.5, 1.5)
    pair = parity.Pair(
        nn.Sequential(reference, nn.Linear(NORMED, NORMED, bias=False)),
        nn.Sequential(port, te.Linear(NORMED, NORMED, bias=False)),
        weights={"0.weight": "0.weight", "1.weight": "1.weight"},
        inputs=lambda rng: rng.normal(512, NORMED),
        fill=True,
    )
    (result,) = parity.compare(pair, [precision])
    return result


@half_precision
@pytest.mark.parametrize(
    ("norm", "code"), [(RoundedBeforeWeight, "PAR204"), (StatisticsInTheDtype, "PAR203")], ids=["weight", "statistics"]
)
def test_a_rounding_that_the_port_alone_makes_is_told(precision, norm, code):
    result = result_of_norm(nn.RMSNorm(NORMED, eps=1e-5), norm(), precision)
    assert result.status == "failed"
    assert result.findings[0].code == code


@half_precision
@pytest.mark.parametrize("norm", [RoundedBeforeWeight, StatisticsInTheDtype])
def test_a_norm_that_a_port_leaves_as_the_reference_has_it_is_right(precision, norm):
    assert result_of_norm(norm(), norm(), precision).passed


def test_a_reference_that_half_precision_cannot_run_excuses_the_ports_own_lines():
    assert result_of_norm(NotInHalfPrecision(), RoundedBeforeWeight(), "bf16").passed


# A port that computes FP32 GEMMs without TF32 passes, and its result says that it is more accurate than expected.


NOTE = "more accurate than expected"


class Chain(nn.Module):
    """Two modules, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Gram(nn.Module):
    """Products of a norm's rows with each other, which no linear layer computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        return rows @ rows.transpose(-1, -2)


def pair(reference: nn.Module, candidate: nn.Module, *names: str) -> parity.Pair:
    weights = {name: name for name in names}
    return parity.Pair(reference, candidate, weights=weights, inputs=lambda rng: rng.normal(2 * TOKENS, 64), fill=True)


def norm() -> nn.Module:
    return nn.RMSNorm(64, eps=1e-5)


HEAD = ("second.weight", "second.bias")
WITH_TE_GEMMS: dict[str, Callable[[], parity.Pair]] = {
    "linear": linear,
    "mlp": lambda: mlp(lambda rng: rng.normal(2, 32, 32)),
    "linear before a layer outside TE": lambda: pair(
        Chain(nn.Linear(64, 64), nn.Linear(64, 32)), Chain(te.Linear(64, 64), nn.Linear(64, 32)),
        "first.weight", "first.bias", *HEAD,
    ),
}  # fmt: skip
WITHOUT: dict[str, Callable[[], parity.Pair]] = {
    "norm": lambda: pair(norm(), te.RMSNorm(64), "weight"),
    "norm before a layer outside TE": lambda: pair(
        Chain(norm(), nn.Linear(64, 32)), Chain(te.RMSNorm(64), nn.Linear(64, 32)), "first.weight", *HEAD
    ),
    "norm before a product of activations": lambda: pair(Gram(norm()), Gram(te.RMSNorm(64)), "norm.weight"),
}


def notes(build: Callable[[], parity.Pair], precision: str, *choices: str) -> str:
    torch.manual_seed(0)
    with kernel_choices(*choices):
        result = result_of(build(), precision)
    assert result.passed
    return " ".join(result.notes)


@pytest.mark.parametrize("name", WITH_TE_GEMMS)
def test_gemms_without_tf32_are_noted_with_the_tensors_that_show_it(name: str) -> None:
    told = notes(WITH_TE_GEMMS[name], "fp32", "fp32-exact")
    assert f"{NOTE}: less than 10% of the error that TF32 costs, as if the FP32 GEMMs ran in true FP32" in told
    assert "output" in told


@pytest.mark.parametrize("name", [*WITH_TE_GEMMS, *WITHOUT])
def test_right_ports_on_tf32_kernels_are_not(name: str) -> None:
    assert NOTE not in notes((WITH_TE_GEMMS | WITHOUT)[name], "fp32")


@pytest.mark.parametrize("name", WITHOUT)
def test_parts_without_gemms_of_te_are_as_accurate_as_expected(name: str) -> None:
    assert NOTE not in notes(WITHOUT[name], "fp32", "fp32-exact")


def test_other_precisions_have_no_tf32_to_be_without() -> None:
    assert NOTE not in notes(linear, "bf16", "fp32-exact")


# An optimizer's step is compared with the step of the reference's optimizer.


RATE = 1e-3


def update_of(before, gradient, after):
    """Return the update of one parameter."""
    return Update({"weight": before}, {"weight": gradient}, {"weight": after}, {}, {})


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(("off", "either_is_right"), [(1e-8, True), (-5e-7, True), (1e-4, False), (-1e-4, False)])
def test_a_sign_is_the_ports_where_fp32_arithmetic_decides_it(off, either_is_right, sign):
    """Lion steps by the sign of 0.9 average + 0.1 gradient, whose first element cancels to a few roundings here."""
    replay = Replay(nn.Linear(8, 1, bias=False), lambda model: Lion(model.parameters(), lr=RATE, weight_decay=0.0))
    weights, gradient = torch.ones(8).double(), torch.ones(8).double()
    weights = replay.step(update_of(weights, gradient, weights - RATE))["weight"]  # leaves an average of 0.01
    gradient[0] = -0.09 * (1.0 + off)
    made = weights - RATE
    made[0] = weights[0] - sign * RATE
    update = update_of(weights, gradient, made)
    (deviation,) = deviations(update, replay.step(update), torch.float32)
    assert deviation.is_right == (either_is_right or sign == (-1.0 if off > 0.0 else 1.0))
