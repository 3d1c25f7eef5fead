"""What shows only when a module runs again: random numbers, and weights that TE cached before they changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity import te
from parity.cpu import cuda
from parity.cpu.cuda import emulated

HIDDEN = 64


class Noisy(nn.Module):
    """A linear layer, and something random beside it."""

    def __init__(self, linear: Any, what: str = "") -> None:
        super().__init__()
        self.linear, self.what = linear(HIDDEN, HIDDEN), what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "functional dropout":
            return self.linear(F.dropout(x, 0.1))
        if self.what == "unused":
            torch.rand([])
        y = self.linear(x)
        if self.what == "noise":
            return y + 0.03 * torch.randn_like(y)
        if self.what == "stochastic depth":
            return y * (torch.rand(len(y), 1, 1, device=y.device) > 0.3) / 0.7
        return y + 0.03 if self.what == "offset" else y


def result_of(reference: Any, candidate: Any, precision: str, weights: dict[str, str], **more: Any) -> parity.Result:
    def factory(te: Any, **_: int) -> parity.Pair:
        return parity.Pair(reference(), candidate(te), lambda rng, batch: rng.normal(batch, 16, HIDDEN), weights)

    case = parity.Case("reruns", factory, sizes=(dict(batch=8),), probe=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of what a candidate draws, whichever test ran before
        (result,) = parity.compare(case, [precision], **more)
    return result


def noisy(precision: str, reference: str, candidate: str, **more: Any) -> parity.Result:
    return result_of(
        lambda: Noisy(nn.Linear, reference),
        lambda te: Noisy(te.Linear, candidate),
        precision,
        {"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
        **more,
    )


def told(precision: str, candidate: str, **more: Any) -> list[str]:
    """The codes of the findings."""
    return [finding.code for finding in noisy(precision, "", candidate, **more).findings]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize("what", ["functional dropout", "noise", "stochastic depth"])
def test_a_candidate_that_draws_random_numbers_is_not_reproducible(precision: str, what: str) -> None:
    if (precision, what) == ("fp8_current", "noise"):
        pytest.skip("below what the precision costs")
    assert told(precision, what) == ["PAR253"]


def test_with_determinism_it_is_told_as_well() -> None:
    assert told("bf16", "noise", determinism=True) == ["PAR253"]


@pytest.mark.parametrize("what", ["functional dropout", "noise", "stochastic depth"])
@pytest.mark.parametrize("candidate", ["", "noise"])
def test_nothing_is_compared_with_a_reference_that_draws_random_numbers(what: str, candidate: str) -> None:
    result = noisy("fp32", what, candidate)
    assert result.status == "error"
    assert result.reason.startswith("the reference draws random numbers (PAR253 not-reproducible)")


def test_random_numbers_that_the_reference_does_not_use_are_no_matter() -> None:
    """As those of Hugging Face's layer drop, which are drawn where its probability is 0."""
    assert noisy("fp32", "unused", "").passed


def test_what_is_wrong_without_random_numbers_is_not_put_down_to_them() -> None:
    assert "PAR253" not in told("fp32", "offset")


@pytest.fixture
def blackwell() -> Iterator[None]:
    te.kernels("cpu")
    with emulated(cuda.BLACKWELL):
        yield


def test_what_is_wrong_is_not_put_down_to_gradients_that_a_recipe_rounds_stochastically(blackwell: None) -> None:
    """As NVFP4 does: with a gain that is 1 too much, gradients are several times as large, and so is their noise."""
    names = {name: name for name in ("0.weight", "1.weight", "1.bias")}
    result = result_of(
        lambda: nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)),
        lambda te: nn.Sequential(te.RMSNorm(HIDDEN, zero_centered_gamma=True), te.Linear(HIDDEN, HIDDEN)),
        "nvfp4",
        names,
    )
    assert [finding.code for finding in result.findings] == ["PAR104"]


class Updated(nn.Module):
    """A linear layer whose weight is halved before it is used; the gradient is that of the new weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return F.linear(x, weight - 0.5 * weight.detach())


class UpdatedTE(nn.Module):
    def __init__(self, te: Any, first: bool) -> None:
        super().__init__()
        self.linear, self.first = te.Linear(HIDDEN, HIDDEN, bias=False), first

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x, is_first_microbatch=True)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x, is_first_microbatch=self.first)


@pytest.mark.parametrize(("first", "codes"), [(True, []), (False, ["PAR307"])])
def test_quantized_weights_of_before_a_step_are_stale(first: bool, codes: list[str]) -> None:
    result = result_of(Updated, lambda te: UpdatedTE(te, first), "fp8_current", {"linear.weight": "linear.weight"})
    assert [finding.code for finding in result.findings] == codes


class MLP(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, 2 * HIDDEN, bias=False), linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class InvertedScaleTE(MLP):
    """Multiplies the quantized weights of these layers by ``scale``, where ``scale_inv`` is due."""

    def __init__(self, te: Any, layers: tuple[str, ...]) -> None:
        super().__init__(te.Linear)
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for name, linear in self.named_children():
            linear(y, is_first_microbatch=True)
            for workspace in linear._fp8_workspaces.values() if name in self.layers else ():
                workspace._scale_inv.reciprocal_()
            y = linear(y, is_first_microbatch=False)
            y = F.gelu(y) if name == "fc1" else y
        return y


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("layers", "told"), [(("fc1", "fc2"), "it is"), (("fc1",), '"fc1.weight" is'), (("fc2",), '"fc2.weight" is')]
)
def test_an_inverted_scale_is_told_with_the_weight_that_has_it(layers: tuple[str, ...], told: str, seed: int) -> None:
    same = {name: name for name in ("fc1.weight", "fc2.weight")}
    result = result_of(
        lambda: MLP(nn.Linear), lambda te: InvertedScaleTE(te, layers), "fp8_current", same, seeds=[seed]
    )
    assert [finding.title for finding in result.findings] == ["fp8-scale-inverted"]
    assert f"{told} multiplied by scale" in result.findings[0].message


class Behind(nn.Module):
    """A linear layer, a dropout and another, and the loss of them."""

    def __init__(self, linear: Any, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.dropout, self.last = linear(HIDDEN, HIDDEN), nn.Dropout(p), linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.dropout(torch.tanh(self.first(x)))).float(), x.float()).view(1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_dropout_is_told_by_gradients_where_a_loss_is_right_by_chance(precision: str) -> None:
    names = {name: name for name, _ in Behind(nn.Linear).named_parameters()}
    result = result_of(lambda: Behind(nn.Linear), lambda te: Behind(te.Linear, 0.01), precision, names)
    assert [finding.code for finding in result.findings] == ["PAR252"]
    assert "dropout.p=0.01" in result.findings[0].message


class WithItsOwnRecipe(nn.Module):
    """A layer that turns a recipe on by itself."""

    def __init__(self, te: Any, recipe: str) -> None:
        super().__init__()
        self.linear, self.te, self.recipe = te.Linear(HIDDEN, HIDDEN), te, recipe

    def forward(self, x: Tensor) -> Tensor:
        from transformer_engine.common import recipe

        with self.te.autocast(enabled=True, recipe=getattr(recipe, self.recipe)()):
            return self.linear(x)


def with_its_own_recipe(precision: str, recipe: str) -> parity.Result:
    return result_of(
        lambda: Noisy(nn.Linear),
        lambda te: WithItsOwnRecipe(te, recipe),
        precision,
        {"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
    )


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [("fp32", "Float8CurrentScaling"), ("bf16", "Float8BlockScaling"), ("fp16", "DelayedScaling")],
)
def test_a_recipe_that_a_port_turns_on_by_itself_is_told_with_its_line(precision, recipe):
    result = with_its_own_recipe(precision, recipe)
    assert (result.status, result.findings[0].title) == ("failed", "own-recipe")
    assert f"{recipe} at test_diagnose_reruns.py:" in result.findings[0].message


def test_a_recipe_of_its_own_that_is_the_precisions_changes_nothing():
    assert with_its_own_recipe("fp8_current", "Float8CurrentScaling").passed


def test_a_mistake_beside_a_recipe_of_its_own_is_not_taken_for_it():
    class Shifted(WithItsOwnRecipe):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1.0

    result = result_of(
        lambda: Noisy(nn.Linear),
        lambda te: Shifted(te, "Float8CurrentScaling"),
        "bf16",
        {"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
    )
    assert result.status == "failed"
    assert "own-recipe" not in {finding.title for finding in result.findings}
