"""Test that TE's linear attentions compute their recurrences, which are written here token by token in FP64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpu import emulated
from torch import Tensor
from torch.nn.functional import softplus

from te_on_cpu import cuda, versions
from te_on_cpu.linear_attention import GraphNotSupportedError

pytestmark = pytest.mark.skipif(versions.installed_version().release[:2] < (2, 20), reason="new in TE 2.20")

HEADS = 2
LENGTHS = (70, 150)  # neither is whole chunks
CU_SEQLENS = torch.tensor([0, 70, 220], dtype=torch.int32)
# A result passes about ten roundings to nearest in a row, each of up to one unit roundoff and of 0.58 units on average.
ROUNDOFFS = 4


@dataclass(frozen=True)
class Gated:
    """Inputs of one of TE's linear attentions, ``[tokens, heads, ...]``; ``updates`` are those of a token."""

    module: str
    q: Tensor
    k: Tensor
    v: Tensor
    gates: tuple[Tensor, ...]
    state: Tensor
    updates: int = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, *self.gates, self.state


def inputs(module: str, dtype: torch.dtype, updates: int = 1, features: tuple[int, int] = (64, 64)) -> Gated:
    generator = torch.Generator().manual_seed(0)
    tokens, (width, value) = sum(LENGTHS), features
    by_feature = module == "GatedDeltaNet2Attention"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    channels = (width,) if by_feature else ()
    expanded = (tokens, updates) if module == "GatedDeltaProductAttention" else (tokens,)
    gates = [-uniform(tokens, HEADS, *channels), uniform(*expanded, HEADS, *channels)]
    if by_feature:
        gates = [gates[0], gates[1].to(dtype), uniform(tokens, HEADS, value).to(dtype)]
    q, k, v = normal(tokens, HEADS, width), normal(*expanded, HEADS, width), normal(*expanded, HEADS, value)
    state = normal(len(LENGTHS), HEADS, value, width)
    return Gated(module, q.to(dtype), k.to(dtype), v.to(dtype), tuple(gates), state, updates)


def recurrence(given: Gated, scale: float, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Return the output and the final states in FP64, with queries and keys of length 1, and gates as they are used."""
    q, k, v, g, beta, *w, initial = (x.double() for x in given.tensors)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if given.module != "GatedDeltaProductAttention":
        k, v, beta = k[:, None], v[:, None], beta[:, None]
    outputs, finals, token = [], [], 0
    for sequence, length in enumerate(lengths):
        state = initial[sequence].mT
        for t in range(token, token + length):
            decay = g[t].exp()
            state = state * (decay[..., None] if decay.dim() == 2 else decay[..., None, None])
            for j in range(given.updates):
                erase = beta[t, j] if beta.dim() == 4 else beta[t, j, :, None]
                write = w[0][t] if w else erase
                update = write * v[t, j] - torch.einsum("hk,hkv->hv", erase * k[t, j], state)
                state = state + k[t, j, :, :, None] * update[:, None]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
        token += length
        finals.append(state.mT)
    return torch.stack(outputs).flatten(1), torch.stack(finals)


def build(te: ModuleType, given: Gated, qkv_format: str = "thd") -> torch.nn.Module:
    more = dict(num_householder=given.updates) if given.module == "GatedDeltaProductAttention" else {}
    return getattr(te, given.module)(HEADS, (given.q.shape[-1], given.v.shape[-1]), qkv_format=qkv_format, **more)


def call(te: ModuleType, given: Gated, **options: Any) -> tuple[Tensor, Tensor]:
    return build(te, given)(
        given.q,
        given.k,
        given.v,
        *given.gates,
        cu_seqlens=CU_SEQLENS,
        initial_state=given.state,
        output_final_state=True,
        **dict(use_qk_l2norm_in_kernel=True) | options,
    )


def error(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right).detach().norm() / right.detach().norm())


def leaves(given: Gated, dtype: torch.dtype | None = None) -> Gated:
    q, k, v, *gates, state = (x.to(dtype or x.dtype).requires_grad_() for x in given.tensors)
    return replace(given, q=q, k=k, v=v, gates=tuple(gates), state=state)


ON_HOPPER = [("GatedDeltaNetAttention", cuda.HOPPER, 1)]
ON_BLACKWELL = [
    ("GatedDeltaNetAttention", cuda.BLACKWELL, 1),
    ("GatedDeltaNet2Attention", cuda.BLACKWELL, 1),
    ("GatedDeltaProductAttention", cuda.BLACKWELL, 3),
]


@pytest.mark.parametrize(("module", "gpu", "updates"), ON_HOPPER + ON_BLACKWELL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_states_and_gradients_are_those_of_the_recurrence(
    module: str, gpu: cuda.DeviceProperties, updates: int, dtype: torch.dtype
) -> None:
    given = leaves(inputs(module, dtype, updates))
    exact = leaves(inputs(module, dtype, updates), torch.float64)
    with emulated(gpu) as te:
        actual = call(te, given)
        right = recurrence(exact, 64**-0.5)
        of_output, of_state = torch.randn_like(actual[0]), torch.randn_like(actual[1])
        gradients = torch.autograd.grad(actual, given.tensors, (of_output, of_state))
    golden = torch.autograd.grad(right, exact.tensors, (of_output.double(), of_state.double()))
    roundoff = torch.finfo(dtype).eps / 2
    errors = [error(one, other) for one, other in zip((*actual, *gradients), (*right, *golden), strict=True)]
    assert all(roundoff / 16 < each < ROUNDOFFS * roundoff for each in errors), errors
    assert [each.dtype for each in gradients] == [each.dtype for each in given.tensors]


@pytest.mark.parametrize("features", [(128, 64), (64, 128), (32, 48)])
def test_keys_and_values_of_other_sizes_fit(features: tuple[int, int]) -> None:
    given = inputs("GatedDeltaNetAttention", torch.bfloat16, features=features)
    for gpu in (cuda.HOPPER, cuda.BLACKWELL):
        with emulated(gpu) as te:
            output, state = call(te, given)
        right, right_state = recurrence(given, features[0] ** -0.5)
        assert error(output, right) < ROUNDOFFS * 2**-8 / 2
        assert error(state, right_state) < ROUNDOFFS * 2**-8 / 2


@pytest.mark.parametrize(("module", "gpu", "updates"), ON_HOPPER + ON_BLACKWELL)
def test_a_sequence_that_is_computed_in_two_calls_is_the_same_bit_for_bit(
    module: str, gpu: cuda.DeviceProperties, updates: int
) -> None:
    given = inputs(module, torch.bfloat16, updates)
    rows = (given.q, given.k, given.v, *given.gates)
    options = dict(output_final_state=True, qkv_format="bshd", use_qk_l2norm_in_kernel=True)
    with emulated(gpu) as te:
        attention = build(te, given)
        whole, final = attention(*(x[None] for x in rows), **options)
        first, state = attention(*(x[None, :64] for x in rows), **options)
        second, last = attention(*(x[None, 64:] for x in rows), initial_state=state, **options)
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(last, final)


@pytest.mark.parametrize(("module", "gpu", "updates"), ON_HOPPER + ON_BLACKWELL)
def test_layouts_give_the_same_bits(module: str, gpu: cuda.DeviceProperties, updates: int) -> None:
    given = inputs(module, torch.float16, updates)
    rows = [x[: 2 * LENGTHS[0]] for x in (given.q, given.k, given.v, *given.gates)]
    batch = [x.unflatten(0, (2, -1)) for x in rows]
    with emulated(gpu) as te:
        attention = build(te, given)
        norm = dict(use_qk_l2norm_in_kernel=True)
        packed = attention(*rows, cu_seqlens=torch.tensor([0, 70, 140], dtype=torch.int32), **norm)
        by_batch = attention(*batch, qkv_format="bshd", **norm)
        by_token = attention(*(x.transpose(0, 1) for x in batch), qkv_format="sbhd", **norm)
    assert torch.equal(by_batch.flatten(0, 1), packed)
    assert torch.equal(by_token.transpose(0, 1), by_batch)


def test_tokens_of_no_sequence_are_left_out() -> None:
    given = leaves(inputs("GatedDeltaNetAttention", torch.bfloat16))
    with emulated(cuda.HOPPER) as te:
        middle = torch.tensor([10, 80], dtype=torch.int32)
        norm = dict(use_qk_l2norm_in_kernel=True)
        output = build(te, given)(given.q, given.k, given.v, *given.gates, cu_seqlens=middle, **norm)
        alone = build(te, given)(*(x[None, 10:80] for x in given.tensors[:-1]), qkv_format="bshd", **norm)
    output.sum().backward()
    assert torch.equal(output[10:80], alone[0])
    assert given.v.grad is not None
    assert not given.v.grad[:10].any()
    assert not given.v.grad[80:].any()
    assert given.v.grad[10:80].any()


def test_one_update_for_each_token_is_a_gated_delta_net() -> None:
    given = inputs("GatedDeltaProductAttention", torch.bfloat16)
    one = replace(given, module="GatedDeltaNetAttention", k=given.k[:, 0], v=given.v[:, 0])
    one = replace(one, gates=(given.gates[0], given.gates[1][:, 0]))
    with emulated(cuda.BLACKWELL) as te:
        for product, net in zip(call(te, given), call(te, one), strict=True):
            assert torch.equal(product, net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decays_that_no_operand_could_hold_are_exact(dtype: torch.dtype) -> None:
    given = inputs("GatedDeltaNet2Attention", dtype)
    steep = torch.arange(64) % 3 == 0
    given = replace(given, gates=(given.gates[0] * torch.where(steep, 40.0, 1.0), *given.gates[1:]))
    with emulated(cuda.BLACKWELL) as te:
        given = leaves(given)
        actual = call(te, given)
        gradients = torch.autograd.grad(actual[0].float().sum(), given.tensors, allow_unused=True)
    right = recurrence(given, 64**-0.5)
    assert all(error(*pair) < ROUNDOFFS * torch.finfo(dtype).eps / 2 for pair in zip(actual, right, strict=True))
    assert all(each is not None and bool(each.isfinite().all()) for each in gradients)


Define = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
A_LOG, DT_BIAS = torch.tensor([0.5, -0.5]), torch.tensor([-1.0, 1.0])
TRANSFORMS: dict[str, tuple[dict[str, Any], Define]] = {
    "linear": (dict(gate_domain="linear"), lambda g, beta: (g.log(), beta)),
    "sigmoid": (dict(use_beta_sigmoid_in_kernel=True), lambda g, beta: (g, beta.sigmoid())),
    "negative": (
        dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
        lambda g, beta: (g, 2 * beta.sigmoid()),
    ),
    "safe": (dict(safe_gate=True), lambda g, beta: (-softplus(g), beta)),
    "safe_of_head": (
        dict(safe_gate=True, a_log=A_LOG, dt_bias=DT_BIAS),
        lambda g, beta: (-A_LOG.double().exp() * softplus(g + DT_BIAS), beta),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gates_are_transformed_in_the_kernel(name: str) -> None:
    options, define = TRANSFORMS[name]
    given = inputs("GatedDeltaProductAttention", torch.bfloat16, updates=2)
    if name == "linear":
        given = replace(given, gates=(given.gates[0].exp(), given.gates[1]))
    given, exact = leaves(given), leaves(given, torch.float64)
    right = recurrence(replace(exact, gates=define(*exact.gates)), 64**-0.5)
    with emulated(cuda.BLACKWELL) as te:
        actual = call(te, given, **options)
        gradients = torch.autograd.grad(actual[0].float().sum(), given.gates)
    golden = torch.autograd.grad(right[0].sum(), exact.gates)
    pairs = zip((*actual, *gradients), (*right, *golden), strict=True)
    assert all(error(*pair) < ROUNDOFFS * 2**-8 / 2 for pair in pairs)


def test_the_guard_keeps_a_token_from_enlarging_the_state() -> None:
    given = inputs("GatedDeltaNet2Attention", torch.bfloat16)
    one_token = torch.tensor([0, 1], dtype=torch.int32)
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=one_token)

    def largest_gain(te: ModuleType, beta: Tensor, is_guarded: bool) -> float:
        q, k, g, nothing = given.q[:1], given.k[:1], given.gates[0][:1] * 1e-3, torch.zeros_like(given.v[:1])
        state = torch.eye(64).expand(1, HEADS, 64, 64).contiguous()
        _, final = build(te, given)(
            q, k, nothing, g, beta, nothing, initial_state=state, beta_guard=is_guarded, **options
        )
        return float(torch.linalg.matrix_norm(final.double(), 2).max())

    uneven = (torch.arange(64) % 2).bfloat16().expand(1, HEADS, 64).contiguous()
    even = torch.full_like(uneven, 0.75)
    with emulated(cuda.BLACKWELL) as te:
        assert largest_gain(te, uneven, False) > 1.05
        assert largest_gain(te, uneven, True) < 1.01
        assert largest_gain(te, even, True) == largest_gain(te, even, False)


def test_a_recomputed_attention_has_the_same_gradients() -> None:
    results = []
    with emulated(cuda.HOPPER) as te:
        for is_recomputed in (False, True):
            given = leaves(inputs("GatedDeltaNetAttention", torch.bfloat16))
            attention = build(te, given)
            rows = given.tensors[:-1]
            options = dict(use_qk_l2norm_in_kernel=True, checkpoint_core_attention=is_recomputed)
            attention(*rows, cu_seqlens=CU_SEQLENS, **options).float().sum().backward()
            results.append([each.grad for each in rows])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_captured_attention_is_replayed_on_other_numbers() -> None:
    class Normalized(torch.nn.Module):
        def __init__(self, te: ModuleType, given: Gated) -> None:
            super().__init__()
            self.attention = build(te, given, "bshd")

        def forward(self, *rows: Tensor) -> Tensor:
            return self.attention(*rows, use_qk_l2norm_in_kernel=True)

    def rows(tokens: slice) -> list[Tensor]:
        return [x[None, tokens].detach().requires_grad_() for x in given.tensors[:-1]]

    given = inputs("GatedDeltaNetAttention", torch.bfloat16)
    with emulated(cuda.HOPPER) as te:
        captured = te.make_graphed_callables(Normalized(te, given), tuple(rows(slice(70))))
        results = []
        for attention in (captured, Normalized(te, given)):
            leaves = rows(slice(100, 170))
            output = attention(*leaves)
            results.append((output, *torch.autograd.grad(output.float().sum(), leaves)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


REFUSED: dict[str, tuple[Gated, type[Exception], str]] = {
    "fp32": (inputs("GatedDeltaNetAttention", torch.float32), TypeError, "float16 or bfloat16"),
    "wide": (
        inputs("GatedDeltaNetAttention", torch.bfloat16, features=(288, 64)),
        GraphNotSupportedError,
        "head dim K must be <= 256, got 288",
    ),
    "gdn2": (
        inputs("GatedDeltaNet2Attention", torch.bfloat16),
        GraphNotSupportedError,
        "Gdn2FrostEngine requires SM100 / SM103 / SM107",
    ),
    "gdp": (
        inputs("GatedDeltaProductAttention", torch.bfloat16),
        GraphNotSupportedError,
        "GdpFrostEngine requires SM100 / SM103 / SM107",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused(name: str) -> None:
    given, kind, message = REFUSED[name]
    with emulated(cuda.HOPPER) as te, pytest.raises(kind, match=message):
        call(te, given)
