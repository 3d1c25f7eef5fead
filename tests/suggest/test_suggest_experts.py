"""``suggest_map`` for mixtures of experts: stacked weights, lists of modules and te.GroupedLinear, in any layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.suggest.suggestion import explain, python

te = parity.te.kernels("cpu").te
HIDDEN, FFN, EXPERTS = 64, 96, 3


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.15 * torch.randn(*shape))


def mixed(outputs: Tensor, scores: Tensor) -> Tensor:
    """Every expert's output, weighted by the router's softmax."""
    return torch.einsum("eth,te->th", outputs, scores.softmax(-1))


class Shared(nn.Module):
    """An expert that every token passes, with a norm of its own and names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.sg, self.su = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.sd = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        return self.sd(F.silu(self.sg(x)) * self.su(x))


class Stacked(nn.Module):
    """All experts' weights in one, ``[experts, out, in]``, or ``[experts, in, out]`` with gate and up in turn."""

    def __init__(self, layout: str, shared: bool = False) -> None:
        super().__init__()
        self.layout = layout
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        if layout == "in turn":
            self.gu, self.gu_bias = weight(EXPERTS, HIDDEN, 2 * FFN), weight(EXPERTS, 2 * FFN)
            self.dn, self.dn_bias = weight(EXPERTS, FFN, HIDDEN), weight(EXPERTS, HIDDEN)
        elif layout == "w1 and b1":
            self.w1, self.b1 = weight(EXPERTS, 2 * FFN, HIDDEN), weight(EXPERTS, 2 * FFN)
            self.w2, self.b2 = weight(EXPERTS, HIDDEN, FFN), weight(EXPERTS, HIDDEN)
        elif layout == "apart":
            self.wg, self.wu = weight(EXPERTS, FFN, HIDDEN), weight(EXPERTS, FFN, HIDDEN)
            self.wd = weight(EXPERTS, HIDDEN, FFN)
        else:
            self.gu, self.dn = weight(EXPERTS, 2 * FFN, HIDDEN), weight(EXPERTS, HIDDEN, FFN)
        self.shared = Shared() if shared else None

    def expert(self, x: Tensor, i: int) -> Tensor:
        if self.layout == "in turn":
            both = x @ self.gu[i] + self.gu_bias[i]
            return (F.silu(both[:, ::2]) * both[:, 1::2]) @ self.dn[i] + self.dn_bias[i]
        if self.layout == "w1 and b1":
            gate, up = F.linear(x, self.w1[i], self.b1[i]).chunk(2, -1)
            return F.linear(F.silu(gate) * up, self.w2[i], self.b2[i])
        if self.layout == "apart":
            return F.linear(F.silu(F.linear(x, self.wg[i])) * F.linear(x, self.wu[i]), self.wd[i])
        gate, up = F.linear(x, self.gu[i]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.dn[i])

    def forward(self, x: Tensor) -> Tensor:
        out = mixed(torch.stack([self.expert(x, i) for i in range(EXPERTS)]), self.gate(x))
        return out if self.shared is None else out + self.shared(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Listed(nn.Module):
    """Experts that are modules of a list."""

    def __init__(self, name: str, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.name = name
        setattr(self, name, nn.ModuleList(Expert() for _ in range(EXPERTS)))
        self.shared = Shared() if shared else None

    def forward(self, x: Tensor) -> Tensor:
        out = mixed(torch.stack([expert(x) for expert in getattr(self, self.name)]), self.gate(x))
        return out if self.shared is None else out + self.shared(x)


class Grouped(nn.Module):
    def __init__(self, fused: bool = True, bias: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.router = te.Linear(HIDDEN, EXPERTS, bias=False)
        widths = [2 * FFN] if fused else [FFN, FFN]
        self.first = nn.ModuleList(te.GroupedLinear(EXPERTS, HIDDEN, width, bias=bias) for width in widths)
        self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=bias)
        self.mlp = (
            te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", bias=False) if shared else None
        )

    def forward(self, x: Tensor) -> Tensor:
        split = [len(x)] * EXPERTS
        gate, up = torch.cat([fc1(x.repeat(EXPERTS, 1), split) for fc1 in self.first], -1).chunk(2, -1)
        outputs = self.fc2(F.silu(gate) * up, split).unflatten(0, (EXPERTS, -1))
        out = mixed(outputs, self.router(x))
        return out if self.mlp is None else out + self.mlp(x)


def each(name: str) -> str:
    return f"parity.experts({', '.join(f'{chr(34)}{name}{i}{chr(34)}' for i in range(EXPERTS))})"


FIRST, SECOND = each("first.0.weight"), each("fc2.weight")
SHARED = 'parity.stack("shared.sg.weight", "shared.su.weight"): "mlp.fc1_weight"'
IN_TURN = f'parity.rearrange(parity.transpose("gu"), "e (f two) d -> e (two f) d", two=2): {FIRST}'


@pytest.mark.parametrize(
    ("reference", "candidate", "entries"),
    [
        (lambda: Stacked("plain"), Grouped, [f'"gu": {FIRST}', f'"dn": {SECOND}', '"gate.weight": "router.weight"']),
        (lambda: Stacked("plain", True), lambda: Grouped(shared=True), [f'"gu": {FIRST}', f'"dn": {SECOND}', SHARED]),
        (lambda: Stacked("in turn"), lambda: Grouped(bias=True), [IN_TURN, f'parity.transpose("dn"): {SECOND}']),
        (lambda: Stacked("w1 and b1"), lambda: Grouped(bias=True), [f'"w1": {FIRST}', f'"b2": {each("fc2.bias")}']),
        (lambda: Stacked("apart"), Grouped, [f'parity.stack("wg", "wu", dim=1): {FIRST}', f'"wd": {SECOND}']),
        (lambda: Stacked("apart", True), lambda: Grouped(False, shared=True), [f'"wg": {FIRST}', SHARED]),
    ],
    ids=["stacked", "with a shared expert", "gate and up in turn", "w1 and b1", "gate and up apart", "two layers"],
)
def test_stacked_experts_go_to_the_layers_of_each_expert(reference, candidate, entries):
    assert_entries(reference(), candidate(), entries)


@pytest.mark.parametrize("name", ["experts", "ffns"])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_in_a_list_go_to_the_layers_of_each_expert_whatever_the_list_is_called(name, shared):
    entry = f'parity.stack("{name}.1.gate_proj.weight", "{name}.1.up_proj.weight"): "first.0.weight1"'
    assert_entries(Listed(name, shared), Grouped(shared=shared), [entry, *[SHARED] * shared])


def assert_entries(reference: nn.Module, candidate: nn.Module, entries: list[str]) -> None:
    suggestion = parity.suggest_map(parity.Pair(reference, candidate, lambda rng: rng.normal(32, HIDDEN)))
    assert suggestion.settled, explain(suggestion)
    written = python(suggestion.weights)
    assert [entry for entry in entries if f"    {entry},\n" not in written] == []
