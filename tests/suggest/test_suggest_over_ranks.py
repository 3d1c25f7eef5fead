"""With ranks, ``suggest_map`` returns how each of the candidate's parameters is divided, as code for the pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import parity
from parity import over
from parity.case.case import Case
from parity.cli import reports
from parity.ranks.layout import degrees
from parity.reference import Attention, SwiGLUMLP
from parity.user_error import UserError
from parity.weights.suggest.proposal import python_over_ranks

HIDDEN, FFN, HEADS, GROUPS = 32, 64, 4, 2


def case_of(build: Callable[..., parity.Pair], *ranks: dict[str, Any]) -> Case:
    return Case("pair", build, sizes=({},), ranks=tuple(map(degrees, ranks)))


def inputs(rng):
    return rng.normal(16, 2, HIDDEN)


def over_tp(ranks):
    return dict(tp_group=ranks.tp.group, tp_size=ranks.tp.size, sequence_parallel=ranks.sequence_parallel)


# Ports, each with the division that should be found.

MLP = dict(normalization="RMSNorm", activation="swiglu", bias=False)


def mlp(te, ranks):
    candidate = te.LayerNormMLP(HIDDEN, FFN, **MLP, set_parallel_mode=True, **over_tp(ranks))
    return parity.Pair(SwiGLUMLP(HIDDEN, FFN), candidate, inputs)


class UpAndDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def by_hand(te, ranks):
    """Return a pair whose port cuts the weights itself; TE knows of no ranks."""
    local = FFN // ranks.tp.size
    candidate = nn.ModuleDict({"up": te.Linear(HIDDEN, local), "down": te.Linear(local, HIDDEN, bias=False)})
    return parity.Pair(UpAndDown(), candidate, inputs, call_candidate=lambda module, x: module["down"](module["up"](x)))


class GateAndUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN)

    def forward(self, x):
        return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)


def fused_gate_and_up(te, ranks, parallel=None):
    def call(module, x):
        gate, up = module(x).chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    return parity.Pair(
        GateAndUp(),
        te.Linear(HIDDEN, 2 * FFN, parallel_mode="column", **over_tp(ranks)),
        inputs,
        {parity.stack(f"gate_proj.{kind}", f"up_proj.{kind}"): kind for kind in ("weight", "bias")},
        call_candidate=call,
        parallel=parity.Parallel(splits={"output": [over("tp", -1)]}, weights=parallel.weights if parallel else {}),
    )


def query_key_value_stacked(te, ranks):
    rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
    candidate = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,
        attention_dropout=0.0,
        attn_mask_type="causal",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        set_parallel_mode=True,
        **over_tp(ranks),
    )
    fused = parity.stack("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return parity.Pair(
        Attention(HIDDEN, HEADS, GROUPS),
        candidate,
        inputs,
        {fused: "qkv.weight", "o_proj.weight": "proj.weight"},
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(16)),
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, FFN, bias=False) for _ in range(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def experts(te, ranks):
    local = 4 // ranks.ep.size

    def call(module, x):
        return module(x.repeat(local, 1, 1), [16 * 2] * local).unflatten(0, (local, -1)).sum(0)

    weights = {f"experts.{i}.weight": f"weight{i}" for i in range(4)}
    return parity.Pair(
        Experts(), te.GroupedLinear(local, HIDDEN, FFN, bias=False), inputs, weights, call_candidate=call
    )


def fsdp(te, ranks):
    candidate = te.LayerNormMLP(HIDDEN, FFN, **MLP)
    if ranks.dp.size > 1:
        fully_shard(candidate, mesh=init_device_mesh("cpu", (ranks.dp.size,)))
    return parity.Pair(SwiGLUMLP(HIDDEN, FFN), candidate, inputs)


TE, SHAPE = "as TE marks it", "by its shape"
TP, SP = dict(tp=2), dict(tp=2, sequence_parallel=True)
FOUND = {
    "TE marks it": (
        case_of(mlp, TP, SP),
        {
            "layer_norm_weight": ([], "whole"),
            "fc1_weight": ([over("tp", 0, blocks=2)], TE),
            "fc2_weight": ([over("tp", 1)], TE),
        },
    ),
    "shapes tell it": (
        case_of(by_hand, dict(tp=4, dp=2)),
        {
            "up.weight": ([over("tp", 0)], TE),
            "up.bias": ([over("tp", 0)], SHAPE),
            "down.weight": ([over("tp", 1)], SHAPE),
        },
    ),
    "the map tells that it holds two": (
        case_of(fused_gate_and_up, TP),
        {
            "weight": ([over("tp", 0, blocks=2)], f"{TE}; each of its 2 parts by itself"),
            "bias": ([over("tp", 0, blocks=2)], f"{TE}; each of its 2 parts by itself"),
        },
    ),
    "experts": (
        case_of(experts, dict(ep=2)),
        {f"weight{i}": ([], f"whole, on ep rank {i // 2}") for i in range(4)},
    ),
    "FSDP": (
        case_of(fsdp, dict(dp=2)),
        {name: ([], "whole, as FSDP tells it") for name in ("layer_norm_weight", "fc1_weight", "fc2_weight")},
    ),
}


@pytest.mark.parametrize(("case", "expected"), FOUND.values(), ids=FOUND)
def test_each_parameter_s_division_is_stated_with_what_says_so(case, expected):
    suggestion = parity.suggest_map(case)
    assert {one.name: (list(one.split), one.reason) for one in suggestion.divided} == expected
    assert suggestion.problems == ()


def test_a_pair_that_is_given_what_was_printed_passes():
    """Without the suggestion, the fused weight would be divided as one block, as TE marks it."""
    text = python_over_ranks(parity.suggest_map(case_of(fused_gate_and_up, TP)).divided)
    suggested = eval(f"dict({text})", {"parity": parity})["parallel"]
    for parallel, status in ((suggested, "passed"), (None, "failed")):
        case = case_of(partial(fused_gate_and_up, parallel=parallel))
        (result,) = parity.compare(case, ["bf16"], ranks=TP, diagnose=False)
        assert result.status == status


def raises(te, ranks):
    if ranks.world.size > 1:
        raise RuntimeError("no such group")
    return mlp(te, ranks)


PROBLEMS = {
    "parts of several lengths": (
        case_of(query_key_value_stacked, TP),
        "over tp2, qkv.weight holds parts of 32, 16, 16, and parity.over divides equal ones",
    ),
    "no even division": (case_of(by_hand, dict(tp=3)), "over tp3, up.weight is (21, 32) on a rank, and (64, 32)"),
    "a rank that raises": (case_of(raises, TP), "raised: RuntimeError: no such group"),
}


@pytest.mark.parametrize(("case", "told"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_not_known_of_a_division_is_told(case, told):
    suggestion = parity.suggest_map(case)
    assert told in "\n".join(suggestion.problems)
    assert not suggestion.settled


# The command.

PAIRS = """
import parity
from torch import nn

@parity.pair("column")
def column(te, ranks=parity.Ranks()):
    return parity.Pair(
        reference=nn.Linear(32, 64),
        candidate=te.Linear(32, 64, parallel_mode="column", tp_group=ranks.tp.group, tp_size=ranks.tp.size),
        inputs=lambda rng: rng.normal(16, 32),
    )
"""


def test_the_command_asks_for_ranks_of_a_pair_that_declares_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_pairs.py"
    file.write_text(PAIRS)
    assert reports.suggest(str(file), 0, 0, "cpu", True, 300, ["tp=2,sequence_parallel"])
    printed = capsys.readouterr().out
    assert '"weight": [parity.over("tp", dim=0)],  # as TE marks it\n' in printed
    assert reports.suggest(str(file), 0, 0, "cpu", True, 300)
    assert "parallel=" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--ranks is 'two', but must be like tp=2"):
        reports.suggest(str(file), 0, 0, "cpu", True, 300, ["two"])
