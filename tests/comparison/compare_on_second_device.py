"""Compare some pairs on a device that is not the CPU, and write one line of JSON for each result.

Only TransformerEngine's module stays on the CPU, because its CPU kernels stand for the kernels that a GPU would run.
Its inputs are copied from the device, and its results back to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import second_device
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from parity import api, comparison, reference, te
from parity.case import registry, weight_map
from parity.case.case import Case, Pair
from parity.case.files import folder
from parity.judge import request
from parity.numerics import blocked_attention
from parity.passes import all_passes, prepare
from parity.passes.one_pass import Pass
from parity.passes.prepare import Cache

# Built-in cases at sizes as small as their recipes allow: an operator on the wrong device fails at any size.
BUILT_IN = {
    "layernorm_mlp_swiglu": dict(batch=2, seq=16, hidden=64, ffn=96),
    "attention_padding_gqa": dict(batch=2, seq=16, head_dim=16, heads=4, groups=2),
    "multihead_attention_interleaved_qkv": dict(batch=2, seq=16, hidden=64, heads=4, groups=2),
}
PRECISIONS = ("bf16", "fp8_current")
CPU = torch.device("cpu")


def up_over_gate(te: Any, **_: int) -> Pair:
    """Return a wrong pair, so that the search for its mistake runs on the device, too."""
    return Pair(
        reference.SwiGLUMLP(64, 128),
        te.LayerNormMLP(64, 128, normalization="RMSNorm", activation="swiglu", bias=False),
        weights={
            "norm.weight": "layer_norm_weight",
            "down_proj.weight": "fc2_weight",
            weight_map.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
    )


def swapped_in_a_part(te: Any, **_: int) -> Pair:
    """Return a pair that is wrong in one of two sequences, so that mistakes are tried in parts of their places."""
    hidden, ffn = 64, 128

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = te.Linear(hidden, 2 * ffn, bias=False)
            self.fc2 = te.Linear(ffn, hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.fc1(x).chunk(2, dim=-1)
            one, other = F.silu(gate) * up, F.silu(up) * gate
            result: Tensor = self.fc2(torch.cat([one[:1], other[1:]]))
            return result

    return Pair(
        Plain(hidden, ffn),
        Port(),
        weights={weight_map.stack("gate.weight", "up.weight"): "fc1.weight", "down.weight": "fc2.weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


class Plain(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def moved(tensors: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().to(device), tensors)


def install(device: torch.device, cpu: te.Kernels) -> None:
    """Put parity's kernels on the device, and leave the computations of TE's modules on the CPU."""
    run_candidate = all_passes.run_candidate

    def run_there(
        case: Case,
        checked: Any,
        prepared: prepare.Prepared,
        precision: Any,
        seed: int,
        kernels: te.Kernels,
        change: Callable[[nn.Module], None] = lambda module: None,
        seen: Callable[[Pass], None] | None = None,
        *rest: Any,
        **how: Any,
    ) -> tuple[all_passes.Tensors, tuple[str, ...]]:
        assert kernels.device == device
        names = ("inputs", "candidate_weights", "cotangents", "probe")
        fetched = {name: moved(getattr(prepared, name), CPU) for name in names}
        there = dataclasses.replace(prepared, **fetched, cache=Cache())  # the cached pair is on the device
        tensors, unreached = run_candidate(case, checked, there, precision, seed, cpu, change, seen, *rest, **how)
        return moved(tensors, device), unreached

    comparison.run_candidate = run_there
    request.run_candidate = run_there  # the module request runs the candidate again
    te.kernels = lambda backend="auto": te.Kernels("cpu", device, cpu.te)


def main() -> None:
    cpu = te.kernels("cpu")
    install(second_device.install(), cpu)
    files = folder().glob("[!_]*.py")
    cases = [case for file in sorted(files) for case in registry.load_file(file) if case.name in BUILT_IN]
    cases = [dataclasses.replace(case, sizes=(BUILT_IN[case.name],)) for case in cases]
    cases.append(Case("swapped_in_a_part", swapped_in_a_part, sizes=(dict(batch=2, seq=32),), path=Path(__file__)))
    cases.append(Case("up_over_gate", up_over_gate, sizes=(dict(batch=2, seq=32),), path=Path(__file__)))
    for blocks in (False, True):
        blocked_attention.WRITTEN_OUT = 2**8 if blocks else 2**25
        for case in cases if not blocks else cases[:1]:
            for result in api.compare(case, PRECISIONS, determinism=True):
                codes = [finding.code for finding in result.findings]
                line = dict(case=case.name, precision=result.precision, blocks=blocks, status=result.status)
                print(json.dumps({**line, "reason": result.reason, "findings": codes, "notes": result.notes}))


if __name__ == "__main__":
    main()
