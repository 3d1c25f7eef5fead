"""Gradients: detached paths, overwritten and scaled ones, and parameters and inputs that get none."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from ports import FP32_AND_BF16, compared, in_turn, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.catalogue import PORTS
from lab.corpus.port import at_size
from lab.corpus.small import normal
from parity.search.factors import readable

# Detached parts of the residual stream: outputs are right, but gradients lack what flows back through these parts.

HIDDEN, FFN, TOKENS = 48, 96, 40
Detached = frozenset[tuple[int, str]]  # layers, and what is detached in each


class Layer(nn.Module):
    def __init__(self, linear: Any, norm: Any, detached: Detached, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.mix, self.up, self.down = linear(HIDDEN, HIDDEN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)
        self.detached, self.number = detached, number

    def forward(self, x: Tensor) -> Tensor:
        x = self.given(x, "input")
        x = self.given(x, "first stream") + self.given(self.mix(self.norm1(x)), "first branch")
        normed = self.given(self.norm2(x), "second norm")
        return self.given(x, "second stream") + self.down(self.up(normed).relu())

    def given(self, x: Tensor, name: str) -> Tensor:
        return x.detach() if (self.number, name) in self.detached else x


class Model(nn.Sequential):
    def __init__(self, linear: Any, norm: Any, detached: Detached = frozenset()) -> None:
        super().__init__(linear(HIDDEN, HIDDEN), *(Layer(linear, norm, detached, i) for i in range(2)))


def streams(precision: str, detached: Detached = frozenset(), scaled: float = 1.0) -> parity.Result:
    """Compare the model with a port that detaches these parts, or that scales the gradient of a weight."""

    def port(te: Any) -> nn.Module:
        model = Model(te.Linear, te.LayerNorm, detached)
        layer: Any = model[1]
        if scaled != 1.0:
            layer.down.weight.register_hook(lambda gradient: scaled * gradient)
        return model

    return compared(lambda: Model(nn.Linear, nn.LayerNorm), port, normal((TOKENS, HIDDEN)), precision)


@in_turn(
    ("detached", "told"),
    [
        ([(1, "first stream")], "the stream of the 1st sum in 2;"),
        ([(0, "second stream")], "the stream of the 2nd sum in 1;"),
        ([(0, "first stream"), (1, "first stream")], "the stream of each layer's 1st sum;"),
        ([(i, f"{which} stream") for i in (0, 1) for which in ("first", "second")], "the stream of all residual sums;"),
        ([(1, "input")], "stream and branch of the 1st sum in 2;"),
        ([(1, "first branch")], "the branch of the 1st sum in 2;"),
        ([(1, "second norm")], "what the branch is made from, of the 2nd sum in 2;"),
    ],
)
def test_the_place_through_which_nothing_flows_back_is_told_first(detached, told, precision):
    tells(streams(precision, frozenset(detached)), "gradient-path-missing", f"what flows back through {told}")


@FP32_AND_BF16
def test_a_port_that_detaches_nothing_passes(precision):
    assert streams(precision).passed


def test_a_gradient_that_is_scaled_is_no_path():
    tells(streams("fp32", scaled=0.5), "gradient-scale")


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter, whose input is detached."""

    def __init__(self, linear: Any, detach: bool = False) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(HIDDEN, FFN), linear(HIDDEN, 16), linear(16, FFN)
        self.base.requires_grad_(False)
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x.detach() if self.detach else x))


class Halves(nn.Module):
    """Compute two halves of a batch one after the other; the second may be detached."""

    def __init__(self, linear: Any, detach: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.detach = linear(HIDDEN, FFN), linear(FFN, HIDDEN), detach

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.down(self.up(half).relu()) for half in x.chunk(2))
        return torch.cat([first, second.detach() if self.detach else second])


class Reader(nn.Module):
    def __init__(self, linear: Any, detach: bool) -> None:
        super().__init__()
        self.up, self.down, self.detach = linear(HIDDEN, FFN), linear(FFN, HIDDEN), detach

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.down((self.up(x) * 0.5 + (first.detach() if self.detach else first) * 0.5).relu())


class Readers(nn.Module):
    """Three layers that read the result of a first one, which may be detached, as value residuals may be."""

    def __init__(self, linear: Any, detach: bool = False) -> None:
        super().__init__()
        self.first, self.layers = linear(HIDDEN, FFN), nn.ModuleList(Reader(linear, detach) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        for layer in self.layers:
            x = layer(x, first)
        return torch.cat((x, first), -1)


class Halved(nn.Module):
    def __init__(self, linear: Any, detach: bool) -> None:
        super().__init__()
        self.mix, self.detach = linear(HIDDEN, HIDDEN), detach

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.mix(x).chunk(2, -1)
        second = second.detach() if self.detach else second
        return x + torch.cat((first * second.sin(), second.cos()), -1)


class Shifted(nn.Module):
    """Two heads; the second reads all but the last tokens and may detach them, as in multi-token prediction."""

    def __init__(self, linear: Any, detach: bool = False) -> None:
        super().__init__()
        self.up, self.first, self.second, self.detach = *(linear(HIDDEN, HIDDEN) for _ in range(3)), detach

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        return torch.cat((self.first(x), self.second((x.detach() if self.detach else x)[:-8])))


class Split(nn.Sequential):
    """Layers of which one half may be detached wherever it is read, as the rotated part of keys may be."""

    def __init__(self, linear: Any, detach: bool = False) -> None:
        super().__init__(*(Halved(linear, detach) for _ in range(2)))


@in_turn(
    ("module", "told"),
    [
        (Adapted, "the 1st 'linear' of a;"),
        (Halves, "the 2nd operand of the 1st 'cat' of the module;"),
        (Readers, "the 2nd 'mul' of layers.0 and 2 more like it;"),
        (Shifted, "the 1st 'getitem' of the module;"),
        (Split, "the 2nd result of the 1st 'chunk' of 0 and 1 more like it;"),
    ],
)
def test_what_is_detached_where_values_fork_or_join_is_told(module, told, precision):
    result = twins(module, dict(detach=True), normal((64, HIDDEN)), precision)
    tells(result, "gradient-path-missing", f"what flows back through {told}")


# A module that is called several times adds up its gradients.

WIDTH = 64


class Microbatches(nn.Module):
    """One layer, called for each half of a batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(half).relu() for half in x.chunk(2)])


class Copied(Microbatches):
    """The same layer, but the second half reads a copy of the weight, which gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        copied = nn.functional.linear(second, self.layer.weight.detach(), self.layer.bias)
        return torch.cat([self.layer(first).relu(), copied.relu()])


def microbatches(port: Any, precision: str, **options: Any) -> parity.Result:
    """Compare the module with one of TE's, which overwrites its main_grad if options are given."""

    def candidate(te: Any) -> nn.Module:
        layer = te.Linear(WIDTH, WIDTH, **options)
        layer.weight.overwrite_main_grad = bool(options)
        return port(layer)

    return compared(lambda: Microbatches(nn.Linear(WIDTH, WIDTH)), candidate, normal((64, WIDTH)), precision)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_main_grad_that_each_call_overwrites_is_told_as_one(precision):
    result = microbatches(Microbatches, precision, fuse_wgrad_accumulation=True)
    tells(result, "gradient-accumulation", "overwrite_main_grad off")


def test_a_copy_of_the_layer_is_told_as_a_copy():
    tells(microbatches(Copied, "bf16"), "gradient-path-missing")


# Gradients that are right except for one factor, which rounding changes a little for each of them.


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_a_loss_scale_that_was_left_in_is_told_of_all_gradients_of_a_layer(precision):
    wrong = at_size(PORTS["gradient-left-scaled", "llama_layer"].case, "small")
    (result,) = parity.compare(wrong, [precision], seeds=[1])
    assert [finding.code for finding in result.findings] == ["PAR401"]
    assert "every gradient is 12" in result.findings[0].message


class Branches(nn.Module):
    """Two linear layers, each a branch of a residual stream; the gradient of the second may be scaled."""

    def __init__(self, linear: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.scale = linear(64, 64), linear(64, 64), scale

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y = self.second(x)
        if self.scale != 1.0:
            y.register_hook(lambda gradient: self.scale * gradient)
        return x + y


def test_gradients_of_one_layer_alone_that_are_scaled_are_told_with_the_layer():
    result = compared(
        lambda: Branches(nn.Linear),
        lambda te: Branches(partial(te.Linear, init_method=nn.init.xavier_normal_), 16.0),
        normal((4, 32, 64)),
    )
    tells_only(result, "gradient-scale", "2 of 5 wrong gradients")
    assert "16 times" in result.findings[0].message
    assert "behind second" in result.findings[0].message


def test_a_factor_near_1_of_a_single_gradient_is_no_loss_scale_and_is_written_out():
    """A subtle mistake, such as another eps, may change a bias's gradient by as much."""

    def port(te: Any) -> nn.Module:
        candidate = te.Linear(64, 64)
        candidate.bias.register_hook(lambda gradient: 1.0004 * gradient)
        return candidate

    result = compared(lambda: nn.Linear(64, 64), port, normal((4, 32, 64)), "fp32")
    tells(result, "unexplained", "multiplied by 1.0004")
    assert {finding.title for finding in result.findings} == {"unexplained", "first-divergence"}


@pytest.mark.parametrize(
    ("factor", "text"), [(128.0, "128"), (1 / 128, "1/128"), (1.0000421, "1.000042"), (0.99, "0.99"), (-1.0, "-1")]
)
def test_a_factor_is_written_so_that_it_can_be_told_from_one(factor, text):
    assert readable(factor) == text


# Parameters that a port holds but does not use, and one that the reference does not use.

WEIGHTS = {
    "norm.weight": "mlp.layer_norm_weight",
    "norm.bias": "mlp.layer_norm_bias",
    "up.weight": "mlp.fc1_weight",
    "up.bias": "mlp.fc1_bias",
    "down.weight": "mlp.fc2_weight",
    "down.bias": "mlp.fc2_bias",
    "scale": "scale",
    "adapter.weight": "adapter.weight",
    "spare.weight": "spare.weight",
}


class Scaled(nn.Module):
    """An MLP whose output is scaled channel by channel, beside an adapter; ``spare`` is not used."""

    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adapter, self.spare = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(scale_shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x) + self.scale * self.down(nn.functional.relu(self.up(self.norm(x))))


class Port(nn.Module):
    def __init__(self, te: Any, scale_shape: tuple[int, ...], leave_out: str, activation: str = "relu") -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(WIDTH, WIDTH, activation=activation, return_bias=True)
        self.adapter, self.spare = te.Linear(WIDTH, WIDTH, bias=False), te.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.empty(scale_shape))
        self.leave_out = leave_out

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.mlp(x)
        if self.leave_out != "bias":
            y = y + bias
        if self.leave_out != "scale":
            y = y * self.scale
        return y if self.leave_out == "adapter" else y + self.adapter(x)


@pytest.mark.parametrize(
    ("left_out", "shape", "precision", "title", "named"),
    [
        ("bias", (WIDTH,), "fp8_current", "bias-dropped", "fc2_bias"),
        ("scale", (WIDTH,), "fp32", "no-gradient", "scale"),
        ("scale", (1, 1, WIDTH), "bf16", "no-gradient", "scale"),
        ("adapter", (WIDTH,), "fp32", "no-gradient", "adapter.weight"),
    ],
)
def test_a_parameter_that_is_held_and_not_used_is_told(left_out, shape, precision, title, named):
    result = compared(
        lambda: Scaled(shape), lambda te: Port(te, shape, left_out), normal((4, 16, WIDTH)), precision, WEIGHTS
    )
    (tells if left_out == "bias" else tells_only)(result, title)
    assert re.findall(r"fc2_bias|scale|adapter.weight|spare.weight", result.findings[0].message) == [named]


def test_a_parameter_that_the_reference_does_not_use_is_not_told():
    port = lambda te: Port(te, (WIDTH,), "", activation="silu")  # noqa: E731
    tells_only(compared(lambda: Scaled((WIDTH,)), port, normal((4, 16, WIDTH)), "fp32", WEIGHTS), "activation")


# An input that a port never reads, because it reads another one instead.


class Both(nn.Module):
    """One layer reads the decoded tokens, the other one the memory."""

    def __init__(self, linear: Any, forgets_memory: bool = False) -> None:
        super().__init__()
        self.own, self.cross, self.forgets_memory = linear(32, 32), linear(32, 32), forgets_memory

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.own(x).relu() * self.cross(x if self.forgets_memory else memory).sigmoid()


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
def test_an_input_to_which_nothing_flows_back_is_told_first_and_what_is_read_in_its_place_after_it(precision):
    inputs = lambda rng: {"x": rng.normal(48, 32), "memory": rng.normal(48, 32)}  # noqa: E731
    result = twins(Both, dict(forgets_memory=True), inputs, precision)
    tells(result, "no-gradient", "no gradient flows back to the input memory")
    if precision == "fp32":
        _, second = result.findings
        assert second.title == "operation"
        assert second.message.endswith("not the input of the module that the 1st 'linear' of own is given")
