"""TransformerEngine issue 407 drawn again: the reporter's figures are one draw each, of which distribution?

The reporter compares a SwiGLU MLP with ``LayerNormMLP`` (hidden 512, ffn 1536, weights N(0, 0.023), input ``rand(2,
1024, 512)``) by the sum of all outputs, and ``Linear(100, 5)`` with TE's by ``torch.allclose``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from parity import te
from parity.case import transfer
from parity.case.case import Rng
from parity.case.validate import CheckedSize
from parity.cases.mlp import issue_407
from parity.lab import record
from parity.passes.build import build, rounded_inputs, share_rounded_weights
from parity.te import Kernels

FIGURE, AFTER_REPAIR = -0.1887, -140.2
# Features and input of linear layers: the reporter's, and the MLP's first.
LINEARS = {
    "Linear(100, 5) of rand(100)": ((100, 5), (100,)),
    "Linear(512, 1536) of rand(2, 1024, 512)": ((512, 1536), (2, 1024, 512)),
}
_SIZE = CheckedSize(issue_407.sizes[0], "issue_407")


@dataclass(frozen=True)
class Drawn:
    """One draw of weights and input, in FP32.

    Attributes:
        faithful: TE's sum of all outputs less FP64's, with the gate over up in ``fc1_weight``, as TE wants it.
        swapped: ditto with up over the gate.
        allclose: whether TE's linear layer is ``torch.allclose`` to PyTorch's FP32 one, by ``LINEARS``.
    """

    faithful: float
    swapped: float
    allclose: Mapping[str, bool]


def draw(seed: int, kernels: Kernels) -> Drawn:
    """Run the reporter's modules on weights and inputs of this seed."""
    pair = build(issue_407, _SIZE, seed, kernels)
    pair.reference.double()
    shared = share_rounded_weights(pair, torch.float32)
    x = rounded_inputs(pair, _SIZE, torch.float32, seed, kernels.device)
    gate, up = shared["fc1_weight"].chunk(2)
    with torch.no_grad():
        exact = pair.reference(x.double()).sum()
        off = []
        for first, second in ((gate, up), (up, gate)):
            transfer.fill(pair.candidate, shared | {"fc1_weight": torch.cat([first, second])})
            off.append((pair.candidate(x).double().sum() - exact).item())
    allclose = {name: _allclose(*sizes, seed, kernels) for name, sizes in LINEARS.items()}
    return Drawn(off[0], off[1], allclose)


def _allclose(features: tuple[int, int], shape: tuple[int, ...], seed: int, kernels: Kernels) -> bool:
    """Compare two linear layers with one weight, drawn as PyTorch draws its initial ones."""
    rng, bound = Rng(seed, "linear"), features[0] ** -0.5
    x = rng.uniform(*shape).to(kernels.device)
    weight = rng.uniform(features[1], features[0], low=-bound, high=bound).to(kernels.device)
    ported = kernels.te.Linear(*features, bias=False).to(kernels.device)
    with torch.no_grad():
        transfer.fill(ported, {"weight": weight})
        return torch.allclose(F.linear(x, weight), ported(x))


def identity(seed: int, kernels: Kernels) -> dict[str, Any]:
    """Return all that a draw depends on."""
    start = record.fingerprint([Rng(seed).normal(16)])
    return {"issue": 407, "seed": seed, "start": start, "kernels": kernels.backend, "te": te.version()}
