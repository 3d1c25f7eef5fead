"""Test what can be wrong with a candidate besides its numbers: TE modules that do not run, and bytes that change."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import ENVIRONMENT, result
from torch import Tensor, nn

import parity
from parity import te
from parity.api import compare
from parity.case.case import Case, Rng
from parity.judge.candidate import TeModules
from parity.passes.one_pass import outputs_of
from parity.report import markdown
from parity.report.markdown import digest
from parity.report.record import Record
from parity.result import Determinism, Result, from_json, to_json
from parity.trace.digests import Trace, first_difference
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

# TransformerEngine's modules that hold weights must run, even if the candidate's numbers are right without them.


te_module = parity.te.kernels("cpu").te
TOKENS, WIDTH = 32, 64
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
BOTH = [f"{i}.{kind}" for i in range(2) for kind in ("weight", "bias")]


def tokens(rng: Rng) -> Tensor:
    return rng.normal(TOKENS, WIDTH)


def plain(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def linear(candidate: nn.Module, call: Callable[..., Any] | None = None) -> parity.Pair:
    names = [name for name, _ in candidate.named_parameters()]
    weights = {name.rpartition(".")[2]: name for name in names}
    return parity.Pair(nn.Linear(WIDTH, WIDTH), candidate, tokens, weights, call_candidate=call, fill=True)


def two(candidate: nn.Module, call: Callable[..., Any] | None = None) -> parity.Pair:
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    names = [name for name, _ in candidate.named_parameters()]
    return parity.Pair(
        reference, candidate, tokens, dict(zip(BOTH, names, strict=True)), call_candidate=call, fill=True
    )


def both(first: nn.Module | None = None, second: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or te_module.Linear(WIDTH, WIDTH), second or te_module.Linear(WIDTH, WIDTH))


class Within(nn.Module):
    """Calls a layer through a given function."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Bypasses(te_module.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Extends(te_module.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.0)


def only(pair: parity.Pair, precision: str = "fp32") -> Result:
    (result,) = parity.compare(pair, [precision])
    return result


def replaced(module: nn.Module) -> nn.Module:
    module.forward = lambda x: F.linear(x, module.weight, module.bias)  # type: ignore[method-assign]
    return module


LEFT_OUT: dict[str, tuple[Callable[[], parity.Pair], str]] = {
    "by call_candidate": (lambda: linear(te_module.Linear(WIDTH, WIDTH), plain), "the candidate itself"),
    "in one of two layers": (lambda: two(both(), lambda m, x: m[1](plain(m[0], x))), " 0 "),
    "in the other": (lambda: two(both(), lambda m, x: plain(m[1], m[0](x))), " 1 "),
    "in a module": (lambda: linear(Within(te_module.Linear(WIDTH, WIDTH), plain)), " layer "),
    "by a derived class": (lambda: two(both(Bypasses(WIDTH, WIDTH))), " 0 "),
    "by products": (lambda: linear(te_module.Linear(WIDTH, WIDTH), lambda m, x: x @ m.weight.T + m.bias), "itself"),
    "by einsum": (
        lambda: linear(te_module.Linear(WIDTH, WIDTH), lambda m, x: torch.einsum("ti,oi->to", x, m.weight) + m.bias),
        "itself",
    ),
    "in te.ops.Sequential's place": (
        lambda: two(
            te_module.ops.Sequential(te_module.ops.Linear(WIDTH, WIDTH), te_module.ops.Linear(WIDTH, WIDTH)),
            lambda m, x: m[1](plain(m[0], x)),
        ),
        " 0",
    ),
}


@every_precision
@pytest.mark.parametrize("how", LEFT_OUT)
def test_a_te_module_that_is_left_out_is_an_error_that_names_it(how, precision) -> None:
    pair, named = LEFT_OUT[how]
    result = only(pair(), precision)
    told = " ".join((result.reason, *result.notes))
    # In FP8, PyTorch's exact product may itself fail the comparison; then a note names the module.
    assert result.status in (("error",) if precision == "fp32" else ("error", "failed")), result
    assert "TransformerEngine's modules hold weights and did not run:" in told
    assert named in told
    assert "test_candidate.py:" in told


def test_each_that_is_left_out_is_named_and_those_that_run_are_not() -> None:
    layers = nn.Sequential(*(te_module.Linear(WIDTH, WIDTH) for _ in range(4)))
    reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pair = parity.Pair(
        *(reference, layers, tokens, {name: name for name, _ in layers.named_parameters()}),
        call_candidate=lambda m, x: m[3](plain(m[2], m[1](plain(m[0], x)))),
        fill=True,
    )
    result = only(pair)
    assert result.status == "error"
    assert "did not run: 0 (" in result.reason
    assert ", 2 (" in result.reason
    assert not any(f"{name} (" in result.reason for name in (1, 3))


def test_a_frozen_weight_that_pytorch_reads_is_one_too() -> None:
    pair = linear(te_module.Linear(WIDTH, WIDTH), plain)
    for module in (pair.reference, pair.candidate):
        module.requires_grad_(False)
    assert only(pair).status == "error"


def test_a_pass_without_gradients_is_watched_as_well() -> None:
    def without(call: Callable[..., Any]) -> Callable[..., Any]:
        return torch.no_grad()(call)

    pair = parity.Pair(
        *(nn.Linear(WIDTH, WIDTH), te_module.Linear(WIDTH, WIDTH), tokens, {"weight": "weight", "bias": "bias"}),
        call_reference=without(lambda module, x: module(x)),
        call_candidate=without(plain),
        fill=True,
    )
    assert "did not run" in only(pair).reason


class Tied(nn.Module):
    """Runs a layer, and multiplies its result by the same weight again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight)


class Experts(nn.Module):
    """Sends all tokens to the first expert."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class Trained(nn.Module):
    """Takes an optimizer step with a copy of its layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = copy.deepcopy(self.layer)
        optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
        with torch.enable_grad():
            layer(x.detach()).square().mean().backward()
            optimizer.step()
        return layer(x)


def same(make: Callable[[Any], nn.Module]) -> parity.Pair:
    """Return a pair of the same module around PyTorch's linear layers and around TE's."""
    reference, candidate = make(nn), make(te_module)
    names = [name for name, _ in candidate.named_parameters()]
    return parity.Pair(reference, candidate, tokens, {name: name for name in names}, fill=True)


def mlp(**options: Any) -> parity.Pair:
    reference = parity.reference.SwiGLUMLP(WIDTH, WIDTH)
    candidate = te_module.LayerNormMLP(
        *(WIDTH, WIDTH), normalization="RMSNorm", activation="swiglu", bias=False, **options
    )
    weights = {
        "norm.weight": "layer_norm_weight",
        parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
        "down_proj.weight": "fc2_weight",
    }
    return parity.Pair(reference, candidate, tokens, weights, fill=True)


def grouped() -> parity.Pair:
    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([rows @ weight.T for rows, weight in zip(x.chunk(2), self.weight, strict=True)])

    return parity.Pair(
        *(Chunks(), te_module.GroupedLinear(2, WIDTH, WIDTH, bias=False), tokens),
        {"weight": parity.experts("weight0", "weight1")},
        call_candidate=lambda module, x: module(x, [TOKENS // 2] * 2),
        fill=True,
    )


def held_elsewhere() -> parity.Pair:
    """Return a pair whose TE operations use the weights of TE's modules without being part of the candidate."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        operations = te_module.ops.Sequential(
            te_module.ops.Linear(WIDTH, WIDTH), te_module.ops.Linear(WIDTH, WIDTH)
        ).to(x.dtype)
        for operation, layer in zip(operations, module, strict=True):
            operation.weight, operation.bias = layer.weight, layer.bias
        return operations(x)

    return two(both(), call)


RIGHT: dict[str, Callable[[], parity.Pair]] = {
    "called": lambda: linear(te_module.Linear(WIDTH, WIDTH)),
    "forward": lambda: linear(te_module.Linear(WIDTH, WIDTH), lambda m, x: m.forward(x)),
    "checkpointed": lambda: linear(te_module.Linear(WIDTH, WIDTH), lambda m, x: te_module.checkpoint(m, x)),
    "extended": lambda: linear(Extends(WIDTH, WIDTH)),
    "fused operations": lambda: two(
        te_module.ops.Sequential(te_module.ops.Linear(WIDTH, WIDTH), te_module.ops.Linear(WIDTH, WIDTH))
    ),
    "functional call": lambda: linear(
        te_module.Linear(WIDTH, WIDTH), lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,))
    ),
    "tied": lambda: same(lambda kind: Tied(kind.Linear(WIDTH, WIDTH))),
    "experts without tokens": lambda: same(lambda kind: Experts(lambda: kind.Linear(WIDTH, WIDTH))),
    "trained copy": lambda: same(lambda kind: Trained(kind.Linear(WIDTH, WIDTH))),
    "operations made for the call": held_elsewhere,
    "mlp": mlp,
    "grouped": grouped,
}


@every_precision
@pytest.mark.parametrize("how", RIGHT)
def test_right_ports_pass(how, precision) -> None:
    if "operations" in how and precision == "fp8_current":
        pytest.skip("TE 2.20.2 refuses to quantize this operation's output for the next (ops/basic/basic_linear.py)")
    result = only(RIGHT[how](), precision)
    assert result.passed, (result.reason, result.findings)
    assert not any("did not run" in note for note in result.notes)


def test_te_modules_within_one_of_tes_run_with_it() -> None:
    """A layer's own call runs the modules of its attention and its MLP."""
    layer = te_module.TransformerLayer(WIDTH, 2 * WIDTH, 4, hidden_dropout=0.0, attention_dropout=0.0)
    watched = TeModules()
    watched.of(layer)
    with watched.watched():
        outputs_of(layer, None, torch.randn(8, 2, WIDTH))
    assert watched.idle() == {}
    unwatched = TeModules()
    unwatched.of(layer)
    assert {name.rpartition(".")[2] for name in unwatched.idle()} == {"layernorm_qkv", "proj", "layernorm_mlp"}


def test_a_candidate_without_te_is_a_note_as_ever() -> None:
    result = only(linear(nn.Linear(WIDTH, WIDTH)))
    assert result.passed
    assert any("no module of TransformerEngine's" in note for note in result.notes)


# Whether a candidate gives the same bytes twice, and otherwise the first place where it does not.


_count = itertools.count(1)


class _Drifts(torch.autograd.Function):
    """Adds another number each time to the forward or backward pass, as if sums ran in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: float, in_backward: float) -> Tensor:
        ctx.in_backward = in_backward
        return x + in_forward * next(_count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient + ctx.in_backward * next(_count), None, None


class Drifting(nn.Module):
    def __init__(self, in_forward: float = 0.0, in_backward: float = 0.0) -> None:
        super().__init__()
        self.by = in_forward, in_backward

    def forward(self, x: Tensor) -> Tensor:
        return _Drifts.apply(x, *self.by)  # type: ignore[no-any-return]


class Chain(nn.Sequential):
    """The candidate: two linear layers of TE with a module between them."""

    def __init__(self, te_module: ModuleType, between: nn.Module) -> None:
        super().__init__()
        self.first = te_module.Linear(32, 32, bias=False)
        self.between = between
        self.last = te_module.Linear(32, 32, bias=False)


def compared(between: nn.Module, precision: str = "fp32") -> Result:
    def build(te_module: ModuleType) -> parity.Pair:
        reference = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        return parity.Pair(
            reference=reference,
            candidate=Chain(te_module, between),
            inputs=lambda rng: rng.normal(16, 32),
            weights={"0.weight": "first.weight", "1.weight": "last.weight"},
        )

    [found] = compare(Case("chain", build, sizes=({},), probe=False), [precision], backend="cpu", determinism=True)
    return found


def determinism_of(between: nn.Module, precision: str = "fp32") -> Determinism:
    found = compared(between, precision).determinism
    assert found is not None
    return found


@pytest.fixture
def blackwell() -> Iterator[None]:
    te.kernels("cpu")
    with emulated(cuda.BLACKWELL):
        yield


def test_the_cpu_kernels_give_the_same_bytes_twice() -> None:
    assert determinism_of(nn.Identity(), "fp8_current") == Determinism()
    assert Determinism().summary == "the same bytes when it is built and run again"


def test_a_candidate_runs_once_unless_asked_for_more() -> None:
    def build(te_module: ModuleType) -> parity.Pair:
        weights = {"weight": "weight", "bias": "bias"}
        return parity.Pair(nn.Linear(16, 16), te_module.Linear(16, 16), lambda rng: rng.normal(16, 16), weights)

    [found] = compare(Case("linear", build, sizes=({},)), ["fp32"], backend="cpu")
    assert found.determinism is None


def test_a_forward_pass_that_differs_is_found_in_its_module() -> None:
    found = determinism_of(Drifting(in_forward=1e-6))
    assert {"output", "d 1.weight"} <= set(found.differing)
    assert found.first == "the forward pass of between (Drifting), in none of TransformerEngine's kernels"


def test_a_backward_pass_that_differs_is_found_in_its_module() -> None:
    found = determinism_of(Drifting(in_backward=1e-6))
    assert set(found.differing) == {"d input", "d 0.weight"}
    assert found.first == "the backward pass of between (Drifting), in none of TransformerEngine's kernels"


def test_a_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    te.kernels("cpu")
    import transformer_engine_torch as extension

    right = extension.generic_gemm

    def drifting(*args: Any, **kwargs: Any) -> Any:
        output, *others = right(*args, **kwargs)
        return [output + 1e-6 * next(_count), *others]

    monkeypatch.setattr(extension, "generic_gemm", drifting)
    found = determinism_of(nn.Identity())
    assert found.first == "the kernel generic_gemm in the forward pass of first (Linear)"


def test_the_kernels_are_as_before_after_a_trace() -> None:
    te.kernels("cpu")
    import transformer_engine_torch as extension

    before = dict(vars(extension))
    with Trace().of_kernels():
        assert vars(extension) != before
    assert vars(extension) == before


def test_random_numbers_that_a_recipe_draws_are_told_apart_from_kernels(blackwell: None) -> None:
    """NVFP4 rounds gradients stochastically, in the backward pass alone."""
    found = determinism_of(nn.Identity(), "nvfp4")
    assert found.differing == ()
    assert set(found.drawn) == {"d input", "d 0.weight", "d 1.weight"}


def test_the_callers_random_numbers_stay_what_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compared(nn.Identity())
    assert torch.equal(torch.rand(3), expected)


def test_a_pass_that_takes_other_steps_differs_there() -> None:
    traces = Trace(), Trace()
    for trace, module in zip(traces, (nn.ReLU(), nn.Tanh()), strict=True):
        trace.watch(module)
        module(torch.ones(2))
    here, there = (f"output in the forward pass of the module ({name})" for name in ("ReLU", "Tanh"))
    assert first_difference(*traces) == f"{here}, but {there} the second time"


def test_attention_that_differs_comes_with_what_te_allows() -> None:
    found = Determinism(("d input",), "the kernel fused_attn_bwd in the backward pass of core (FusedAttention)")
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in found.summary
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" not in Determinism(("d input",), "the kernel gemm").summary


def test_it_goes_into_the_record_and_back() -> None:
    repeated = result(determinism=Determinism(("output",), "the kernel k", ("d x",)))
    assert from_json(json.loads(json.dumps(to_json(repeated)))) == repeated


def test_the_report_counts_what_is_the_same_and_names_what_is_not() -> None:
    same = [result(case, determinism=Determinism()) for case in ("a", "b")]
    other = result("c", determinism=Determinism(("output",), "the kernel k"))
    text = markdown.draw(digest(Record(ENVIRONMENT, (*same, other))), "run")
    assert "- the same bytes when it is built and run again: 2 items" in text
    assert "- other bytes the second time in output; first in the kernel k: `c[bf16-2x64]`" in text
    assert "## Determinism" not in markdown.draw(digest(Record(ENVIRONMENT, (result(),))), "run")
