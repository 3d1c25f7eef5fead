"""Test what running a module again shows: random numbers, stale weights, inverted scales, recipes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, tells, tells_only
from torch import Tensor, nn

import parity
from lab.corpus.small import normal
from parity import te
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

HIDDEN = 64


def of_batches(reference: Any, candidate: Any, precision: str, **options: Any) -> parity.Result:
    """Compare both with fixed random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return compared(reference, candidate, normal((8, 16, HIDDEN)), precision, probe=False, **options)


class Noisy(nn.Module):
    """A linear layer with a source of randomness."""

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


def noisy(precision: str, reference: str, candidate: str, **options: Any) -> parity.Result:
    return of_batches(lambda: Noisy(nn.Linear, reference), lambda te: Noisy(te.Linear, candidate), precision, **options)


@pytest.mark.parametrize(
    ("precision", "what"),
    [
        ("fp32", "noise"),
        ("bf16", "functional dropout"),
        ("fp8_current", "stochastic depth"),  # the noise is smaller than the error of the precision
    ],
)
def test_a_candidate_that_draws_random_numbers_is_not_reproducible(precision, what):
    tells_only(noisy(precision, "", what), "not-reproducible")


def test_with_determinism_it_is_told_as_well():
    tells_only(noisy("bf16", "", "noise", determinism=True), "not-reproducible")


@pytest.mark.parametrize(("what", "candidate"), [("functional dropout", ""), ("stochastic depth", "noise")])
def test_nothing_is_compared_with_a_reference_that_draws_random_numbers(what, candidate):
    result = noisy("fp32", what, candidate)
    assert result.status == "error"
    assert result.reason.startswith("the reference draws random numbers (PAR253 not-reproducible)")


def test_random_numbers_that_the_reference_does_not_use_are_no_matter():
    """Hugging Face's layer drop draws random numbers even if its probability is 0."""
    assert noisy("fp32", "unused", "").passed


def test_what_is_wrong_without_random_numbers_is_not_put_down_to_them():
    result = noisy("fp32", "", "offset")
    assert result.status == "failed"
    assert "not-reproducible" not in {finding.title for finding in result.findings}


@pytest.fixture
def blackwell() -> Iterator[None]:
    te.kernels("cpu")
    with emulated(cuda.BLACKWELL):
        yield


@pytest.mark.usefixtures("blackwell")
def test_what_is_wrong_is_not_put_down_to_gradients_that_a_recipe_rounds_stochastically():
    """NVFP4 rounds that way. If the gain is 1 too large, gradients and their noise are several times as large."""
    result = of_batches(
        lambda: nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)),
        lambda te: nn.Sequential(te.RMSNorm(HIDDEN, zero_centered_gamma=True), te.Linear(HIDDEN, HIDDEN)),
        "nvfp4",
    )
    tells_only(result, "gamma-shift")


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


@pytest.mark.parametrize(("first", "title"), [(True, "passed"), (False, "weight-cache-stale")])
def test_quantized_weights_of_before_a_step_are_stale(first, title):
    tells_only(of_batches(Updated, lambda te: UpdatedTE(te, first), "fp8_current"), title)


class MLP(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(HIDDEN, 2 * HIDDEN, bias=False), linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class InvertedScaleTE(MLP):
    """Multiplies the quantized weights of these layers by ``scale`` instead of ``scale_inv``."""

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


@pytest.mark.parametrize(
    ("layers", "told"), [(("fc1", "fc2"), "it is"), (("fc1",), '"fc1.weight" is'), (("fc2",), '"fc2.weight" is')]
)
def test_an_inverted_scale_is_told_with_the_weight_that_has_it(layers, told):
    result = of_batches(lambda: MLP(nn.Linear), lambda te: InvertedScaleTE(te, layers), "fp8_current")
    tells_only(result, "fp8-scale-inverted", f"{told} multiplied by scale")


class Behind(nn.Module):
    """Two linear layers with a dropout between them, and their loss."""

    def __init__(self, linear: Any, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.dropout, self.last = linear(HIDDEN, HIDDEN), nn.Dropout(p), linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.dropout(torch.tanh(self.first(x)))).float(), x.float()).view(1)


def test_a_dropout_is_told_by_gradients_where_a_loss_is_right_by_chance():
    result = of_batches(lambda: Behind(nn.Linear), lambda te: Behind(te.Linear, 0.01), "bf16")
    tells_only(result, "dropout", "dropout.p=0.01")


class WithItsOwnRecipe(nn.Module):
    """A layer that turns a recipe on by itself."""

    def __init__(self, te: Any, recipe: str) -> None:
        super().__init__()
        self.linear, self.te, self.recipe = te.Linear(HIDDEN, HIDDEN), te, recipe

    def forward(self, x: Tensor) -> Tensor:
        from transformer_engine.common import recipe

        with self.te.autocast(enabled=True, recipe=getattr(recipe, self.recipe)()):
            return self.linear(x)


class Shifted(WithItsOwnRecipe):
    """The same layer with another mistake."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def with_its_own_recipe(precision: str, recipe: str, port: type[nn.Module] = WithItsOwnRecipe) -> parity.Result:
    return of_batches(lambda: Noisy(nn.Linear), lambda te: port(te, recipe), precision)


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [("fp32", "Float8CurrentScaling"), ("bf16", "Float8BlockScaling"), ("fp16", "DelayedScaling")],
)
def test_a_recipe_that_a_port_turns_on_by_itself_is_told_with_its_line(precision, recipe):
    tells(with_its_own_recipe(precision, recipe), "own-recipe", f"{recipe} at test_reruns.py:")


def test_a_recipe_of_its_own_that_is_the_precisions_changes_nothing():
    assert with_its_own_recipe("fp8_current", "Float8CurrentScaling").passed


def test_a_mistake_beside_a_recipe_of_its_own_is_not_taken_for_it():
    result = with_its_own_recipe("bf16", "Float8CurrentScaling", Shifted)
    assert result.status == "failed"
    assert "own-recipe" not in {finding.title for finding in result.findings}


class Layers(nn.Module):
    """Two layers whose attentions have no caches, so that their numbers do not matter."""

    def __init__(self, linear: Any, attend: Any) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
        self.attend = nn.ModuleList(attend() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, attend in zip(self.qkv, self.attend, strict=True):
            x = x + attend(*qkv(x).unflatten(-1, (3, 4, HIDDEN // 4)).unbind(2)).flatten(2)
        return x


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=0.25).transpose(1, 2)


@pytest.mark.parametrize("scale", [0.2, 0.237])
def test_a_change_that_changes_nothing_explains_nothing(scale):
    def core(te: Any) -> nn.Module:
        sizes = dict(num_attention_heads=4, kv_channels=HIDDEN // 4, qkv_format="bshd")
        return te.DotProductAttention(**sizes, attn_mask_type="no_mask", softmax_scale=scale, layer_number=1)

    result = of_batches(
        lambda: Layers(nn.Linear, Attend), lambda te: Layers(te.Linear, lambda: core(te)), "bf16", evaluation=True
    )
    assert result.status == "failed"
    assert {finding.title for finding in result.findings} == {"softmax-scale"}, result.findings
