"""Test that calls that a port leaves to PyTorch between TE's modules are known, and that their rounding is expected."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import parity
from parity.measuring.hosts.linear import ComposedMLP
from parity.numerics.formats import Rounding
from parity.numerics.freedom import UNFUSED
from parity.numerics.plain import ADDED_BIAS, ADDED_TO_SUM, CAST, as_in, plain_calls
from parity.numerics.rounding import rounded
from te_on_cpu import tensor_cores

# The calls that a port makes itself between TE's modules are known, and their rounding is expected of the port.


WIDTH = 64


class Between(nn.Module):
    """A function, and a layer that reads its result."""

    def __init__(self, layer: nn.Module, function) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


def names_of(module: nn.Module, x: Tensor) -> set[str]:
    with plain_calls(x.dtype) as names:
        module(x)
    return names


def test_functions_of_activations_are_known_by_name():
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert names_of(Between(nn.Identity(), lambda x: torch.tanh(x + 0.25).view(-1)), x) == {"add", "tanh"}


def test_functions_in_another_dtype_and_of_no_activation_are_left_out_but_casts_to_it_are_not():
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert names_of(Between(nn.Identity(), lambda x: x.float().tanh() * torch.ones(1).exp()), x) == {CAST}


def test_what_te_calls_is_none_of_the_ports():
    te = parity.te.kernels("cpu").te
    layer = te.LayerNormMLP(WIDTH, WIDTH).to(torch.bfloat16)
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with tensor_cores.left_out():
        assert names_of(Between(layer, torch.sigmoid), x) == {"sigmoid"}


def test_lines_of_our_own_modules_that_stand_for_a_users_are_the_ports():
    te = parity.te.kernels("cpu").te
    layer = ComposedMLP(te, WIDTH, WIDTH, F.gelu).to(torch.bfloat16)
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert names_of(layer, x) == {"gelu"}


def capped_attention(cap: float, heads: int = 4, groups: int = 2, head_dim: int = 32) -> parity.Pair:
    te = parity.te.kernels("cpu").te

    class Capped(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (
                x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (query, key, value)
            )
            scores = query @ key.transpose(-1, -2) / head_dim**0.5
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            capped = (cap * torch.tanh(scores / cap)).masked_fill(~visible, float("-inf"))
            return (capped.softmax(-1) @ value).transpose(1, 2).flatten(2)

    return parity.Pair(
        Capped(),
        te.DotProductAttention(
            *(heads, head_dim, groups), qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0, softcap=cap
        ),
        weights={},
        inputs=lambda rng: tuple(rng.normal(2, 32, count, head_dim) for count in (heads, groups, groups)),
    )


def test_a_tight_softcap_of_unfused_attention_rounds_line_by_line():
    results = parity.compare(capped_attention(3.0), ["bf16", "fp16"], seeds=range(10), attention="unfused")
    assert [result.item for result in results if not result.passed] == []


# Functions that add up many terms in the port's own dtype, forward or backward.

POSITIONS, ROWS = 2048, 50
READ = torch.randint(ROWS, (POSITIONS,), generator=torch.Generator().manual_seed(0))
LOOKUPS = {
    "index": lambda table, read: table[read],
    "index_select": lambda table, read: table.index_select(0, read),
    "gather": lambda table, read: table.gather(0, read[:, None].expand(-1, WIDTH)),
    "embedding": lambda table, read: F.embedding(read, table),
}


class WithTable(nn.Module):
    """A layer with a learned table of a few rows, of which one is added to each token."""

    def __init__(self, layer: type[nn.Module], lookup) -> None:
        super().__init__()
        self.layer, self.lookup = layer(WIDTH, WIDTH), lookup
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.lookup(self.table, READ.to(x.device))


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_table_that_is_read_often_has_the_error_that_summing_its_gradient_costs(name: str) -> None:
    te = parity.te.kernels("cpu").te
    pair = parity.Pair(
        reference=WithTable(nn.Linear, LOOKUPS[name]),
        candidate=WithTable(te.Linear, LOOKUPS[name]),
        weights={each: each for each in ("layer.weight", "layer.bias", "table")},
        inputs=lambda rng: rng.normal(POSITIONS, WIDTH),
        fill=True,
    )
    (result,) = parity.compare(pair, ["bf16"])
    assert result.passed, result.findings


class Dtypes(TorchDispatchMode):
    """Records the dtype of the first argument of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func.overloadpacket.__name__] = args[0].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_function_that_a_port_calls_runs_in_the_ports_dtype_on_every_device(device: str) -> None:
    x = torch.ones(4, 3, device=device)
    with Dtypes() as dtypes:
        result = as_in(torch.bfloat16, torch.ops.aten.cumsum.default, (x, 0), {})
    assert dtypes.of["cumsum"] is torch.bfloat16
    assert result.dtype is torch.float32


def test_what_a_function_writes_in_place_is_written_to_the_models_tensor():
    x = torch.full((2, 3), 256.0)
    given = as_in(torch.bfloat16, torch.ops.aten.add_.Tensor, (x, torch.ones(2, 3)), {})
    assert given is x
    assert x.eq(256.0).all(), "257 is no number of BF16"


FUNCTIONS = {
    "shift": lambda x: x + 0.25,
    "tanh": lambda x: torch.tanh(10 * x),
    "centered": lambda x: x - x.mean(-1, keepdim=True),
    "hardswish": F.hardswish,
    "spread": lambda x: x / (x.std(-1, keepdim=True) + 0.1),
    "product": lambda x: x * torch.cumprod(1 + 0.01 * x, 1),
    "straight through": lambda x: x + (x.round() - x).detach(),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
}


def case(function, changed=None):
    def factory(te, **_):
        return parity.Pair(
            reference=Between(nn.LayerNorm(WIDTH), function),
            candidate=Between(te.LayerNorm(WIDTH), changed or function),
            inputs=lambda rng, batch: rng.normal(batch, 32, WIDTH),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    return parity.Case("between", factory, sizes=(dict(batch=2),))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_right_ports_with_lines_of_their_own_pass(function, precision):
    results = parity.compare(case(function), [precision], seeds=range(3))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("function", "changed"),
    [
        (torch.tanh, lambda x: torch.tanh(1.02 * x)),
        (lambda x: x * torch.cumprod(1 + 0.01 * x, 1), lambda x: x * torch.cumprod(1 + 0.05 * x, 1)),
        (F.hardswish, F.silu),
    ],
)
def test_wrong_lines_fail(function, changed, precision):
    (result,) = parity.compare(case(function, changed), [precision], diagnose=False)
    assert result.status == "failed"


class NormInFP32(nn.Module):
    """The norm of models in transformers, which computes in FP32 whatever the model's dtype is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(64))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def test_a_norm_that_a_port_computes_in_fp32_rounds_what_it_casts_alone():
    norm, x = NormInFP32(), torch.randn(32, 64, requires_grad=True)
    norm.weight.data, x.data = norm.weight.data.bfloat16().float(), x.data.bfloat16().float()
    freedom = dataclasses.replace(UNFUSED, plain=("mul",))
    with rounded(Rounding(torch.bfloat16), [norm.weight], freedom):
        modelled = norm(x)
    assert torch.equal(modelled, norm.bfloat16()(x.bfloat16()).float())


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_small_values_is_no_port_s_to_compute_in_fp16_because_its_lines_are(norm):
    """The cube of a root of 100 overflows FP16; TE's norms, and most that are written by hand, compute it in FP32."""
    layer, x = norm(WIDTH, eps=1e-6), (0.01 * torch.randn(4, WIDTH)).requires_grad_()
    (exact,) = torch.autograd.grad(layer(x).relu().square().sum(), x)
    with rounded(Rounding(torch.float16), layer.parameters(), dataclasses.replace(UNFUSED, plain=("relu",))) as phase:
        output = layer(x).relu().square().sum()
        phase.begin_backward()
        (gradient,) = torch.autograd.grad(output, x)
    assert ((gradient - exact).norm() / exact.norm()).item() < 0.05


def rms_norm_and_loss(x: Tensor, labels: Tensor) -> Tensor:
    """Return the FP32 loss of an FP32 norm that stores its result in the input's dtype, as in Hugging Face."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x)
    return F.cross_entropy(normed.float(), labels).view(1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_port_whose_casts_round_gradients_that_are_all_alike_passes(precision):
    """Nine in ten of a label's gradients are the same number in each row, so they all have the same rounding error."""

    class Model(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return rms_norm_and_loss(self.layer(x), labels)

    pair = parity.Pair(
        reference=Model(nn.Linear(128, 512, bias=False)),
        candidate=Model(parity.te.kernels("cpu").te.Linear(128, 512, bias=False)),
        weights={"layer.weight": "layer.weight"},
        inputs=lambda rng: (rng.normal(428, 128), rng.integers(428, high=512)),
        fill=True,
    )
    for result in parity.compare(pair, [precision], seeds=range(3)):
        assert result.passed, (result.seed, result.margin, result.findings)


# Rounding by PyTorch's own kernels is expected of a port, because no module of TE replaces them.


class Images(nn.Module):
    """A convolution and a batch norm before a linear layer; a bias before a batch norm has no gradient."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.linear = linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.avg_pool2d(F.relu(self.norm(self.convolution(x))), 4).flatten(1))


class Groups(nn.Module):
    """A group norm after a linear layer."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.linear, self.norm, self.last = linear(64, 64), nn.GroupNorm(8, 64), linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


class Mixed(nn.Module):
    """A layer that first computes with a parameter, and a mean over the tokens that count."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(64))
        self.linear = linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        y = self.linear(x * self.mix + before * (1 - self.mix))
        counted = (torch.arange(x.shape[1]) % 3 > 0).to(y.dtype)[None, :, None]
        return (y * counted).sum(1) / counted.sum(1)


class Typed(nn.Module):
    """An embedding with two rows, each of which many tokens read."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.types, self.linear = nn.Embedding(2, 64), linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.types((torch.arange(x.shape[1]) > 3).long()[None].expand(len(x), -1)))


TOKENS = (16, 48, 64)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
@pytest.mark.parametrize(
    ("module", "shape"), [(Images, (32, 3, 16, 16)), (Groups, TOKENS), (Mixed, TOKENS), (Typed, TOKENS)]
)
def test_right_ports_with_layers_that_te_has_not_pass_on_every_seed(module, shape, precision):
    def factory(te, **_):
        right = module(nn.Linear)
        return parity.Pair(
            reference=right,
            candidate=module(te.Linear),
            inputs=lambda rng: rng.normal(*shape),
            weights={name: name for name, _ in right.named_parameters()},
        )

    results = parity.compare(parity.Case("plain", factory, sizes=({},)), [precision], seeds=range(4))
    assert {result.status for result in results} == {"passed"}


# A bias that TE returns for the port to add is rounded where the port adds it, and the model expects that.


def cache_of(x: Tensor) -> Tensor:
    cache = torch.zeros(8, WIDTH, dtype=x.dtype)
    cache[:4] = x
    return cache[:4].exp()


TABLES_AND_ACTIVATIONS = {
    "an input": (torch.tanh, {"tanh"}),
    "what a layer returns": (lambda x: F.linear(x, torch.ones(2, WIDTH).to(x)).neg(), {"neg"}),
    "a table of angles": (lambda x: x * (torch.arange(WIDTH).to(x.dtype) / 8).cos(), {"mul"}),
    "a mask": (lambda x: torch.zeros(4, WIDTH, dtype=x.dtype).fill_(-1e4).triu_(1).exp(), set()),
    "rows of a cache": (cache_of, {"exp"}),
    "what only a kernel can have written": (lambda x: torch.empty(4, dtype=x.dtype).abs(), {"abs"}),
}


@pytest.mark.parametrize(("function", "names"), TABLES_AND_ACTIVATIONS.values(), ids=TABLES_AND_ACTIVATIONS)
def test_without_gradients_activations_are_what_is_not_computed_from_numbers_alone(function, names):
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad(), plain_calls(x.dtype, evaluation=True) as seen:
        function(x)
    assert seen - {CAST, "linear", "addmm", "mm"} == names


class NormByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


@pytest.mark.parametrize(
    "parts",
    [
        lambda linear: (NormByHand(), linear(WIDTH, 128), nn.SiLU(), linear(128, WIDTH)),
        lambda linear: (linear(WIDTH, 128), linear(128, WIDTH), Function(lambda x: 30 * torch.tanh(x / 30))),
    ],
    ids=["norm", "softcap"],
)
def test_a_port_in_evaluation_may_round_in_each_of_its_own_lines(parts):
    def factory(te):
        reference, candidate = (nn.Sequential(*parts(partial(linear, bias=False))) for linear in (nn.Linear, te.Linear))
        weights = {name: name for name, _ in reference.named_parameters()}
        draw = {"inputs": lambda rng: rng.normal(4, 16, WIDTH)}
        return parity.Pair(reference, candidate, weights=weights, **draw, evaluation=True)

    (result,) = parity.compare(parity.Case("evaluated", factory, sizes=({},)), ["fp16"])
    assert result.status == "passed", result.reason


@pytest.mark.parametrize("evaluation", [True, False])
def test_log_probabilities_that_are_returned_in_fp32_may_not_be_rounded_to_16_bits(evaluation):
    def log_probs(logits, ids):
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].float()

    def factory(te):
        return parity.Pair(
            nn.Linear(WIDTH, 96, bias=False),
            te.Linear(WIDTH, 96, bias=False),
            inputs=lambda rng: (rng.normal(4, 32, WIDTH), rng.integers(4, 32, high=96)),
            weights={"weight": "weight"},
            call_reference=lambda module, x, ids: log_probs(module(x).float(), ids),
            call_candidate=lambda module, x, ids: log_probs(module(x), ids),
            evaluation=evaluation,
        )

    (result,) = parity.compare(parity.Case("log_probs", factory, sizes=({},)), ["bf16"])
    assert [finding.title for finding in result.findings] == ["log-softmax-precision"]


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


SUMS = {
    "before the sum": (lambda x, product, bias: x + (product + bias), {"add", ADDED_BIAS}),
    "in place": (lambda x, product, bias: x + product.add_(bias), {"add", "add_", ADDED_BIAS}),
    "after the sum": (lambda x, product, bias: x + product + bias, {"add", ADDED_BIAS, ADDED_TO_SUM}),
}


@pytest.mark.parametrize(("residual_sum", "names"), SUMS.values(), ids=SUMS)
def test_the_model_rounds_where_the_port_adds_the_bias(residual_sum, names):
    # These products sum exactly in FP32, in any order.
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randint(-64, 65, (2, 16, WIDTH)).bfloat16() / 16
    with torch.no_grad():
        for parameter in layer.bfloat16().parameters():
            parameter.copy_(torch.randint(-64, 65, parameter.shape) / 256)
    with plain_calls(torch.bfloat16) as seen:
        right = residual_sum(x.requires_grad_(), F.linear(x, layer.weight), layer.bias)
    assert names <= seen
    layer.float()
    with rounded(
        Rounding(torch.bfloat16),
        layer.parameters(),
        dataclasses.replace(UNFUSED, plain=tuple(names), splits_of_k=1),
        plain=layer.parameters(),
    ):
        assert torch.equal(x.float() + layer(x.detach().float()), right.float())


def test_what_is_added_to_activations_and_is_no_vector_that_is_trained_is_no_bias():
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with plain_calls(torch.bfloat16) as seen:
        x + torch.ones(WIDTH, dtype=torch.bfloat16)
        x + x
        x + 0.5
    assert seen == {"add"}


class PostNormMLP(nn.Module):
    """BLOOM's second half, in which the residual connection starts at the norm's result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(80), nn.Linear(80, 112), nn.Linear(112, 80)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.down(F.gelu(self.up(y), approximate="tanh"))


def handed_out(te, width=80, **_):
    def call_candidate(module, x):
        product, bias, normed = module(x)
        return normed + product + bias

    names = {"norm": "layer_norm", "up": "fc1", "down": "fc2"}
    return parity.Pair(
        PostNormMLP(),
        te.LayerNormMLP(width, 112, return_layernorm_output=True, return_bias=True),
        inputs=lambda rng: rng.normal(3, 16, width),
        weights={f"{left}.{kind}": f"{right}_{kind}" for left, right in names.items() for kind in ("weight", "bias")},
        call_candidate=call_candidate,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_port_that_adds_the_bias_after_the_residual_connection_passes(precision):
    results = parity.compare(parity.Case("handed_out", handed_out, sizes=({},)), [precision], seeds=range(8))
    assert [result.margin for result in results if not result.passed] == []


# If a TE layer and a plain one read the same input, each gradient is rounded as its own layer's is.


class Both(nn.Module):
    """Two layers that read one input, of which a port leaves the second to PyTorch."""

    def __init__(self, linear, frozen: bool) -> None:
        super().__init__()
        self.of_te, self.plain = linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.plain.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_te(x) * self.plain(x).tanh()


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.parametrize("frozen", [True, False], ids=["a frozen plain layer", "a trained plain layer"])
def test_right_ports_pass_and_what_is_expected_of_them_is_what_they_lose(frozen, precision):
    def factory(te, **_):
        reference = Both(nn.Linear, frozen)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, Both(te.Linear, frozen), lambda rng: rng.normal(48, WIDTH), weights=names)

    for result in parity.compare(parity.Case("both", factory, sizes=({},)), [precision], seeds=range(3)):
        assert result.passed, result.findings
        by_label = {tensor.label: tensor for tensor in result.tensors}
        for name in ["of_te.weight"] if frozen else ["of_te.weight", "plain.weight"]:
            tensor = by_label[f"d {name}"]
            assert tensor.errors.relative_l2 == pytest.approx(tensor.expected.relative_l2, rel=0.1)
