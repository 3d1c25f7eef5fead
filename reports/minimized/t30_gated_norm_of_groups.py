# gated_norm_of_groups_wrong[bf16-1x1] failed. PAR208 norm-groups: the relative error of output falls from 0.21 to
# 0.0044, the normal error of bf16, if you normalise the channels of each head, or group, by themselves, as the
# reference does; the port normalises all at once
# parity minimize made this from t30_gated_norm_of_groups.py: 64x64 (46 lines, 24704 weights, margin 40) became 1x1
# (37 lines, 8 weights, margin 68). 49 cases were compared.
# Run it with: parity run FILE
# kernels: emulated: TransformerEngine's own Python on parity's CPU kernels; device: CPU, as an emulated Hopper
# (compute capability 9.0); processor: AMD EPYC; platform: Linux x86_64; TransformerEngine: 2.20.2; PyTorch:
# 2.13.0+cpu; Python: 3.11.7; parity: 0.1.0 at commit e9c520e4 with changes; date: 2026-11-30T12:13Z
import torch
import torch.nn.functional as F
from torch import nn

import parity

WIDTH, INNER = 1, 2


class Mixer(nn.Module):
    def __init__(self, into, out, groups):
        super().__init__()
        self.into, self.out, self.groups = into, out, groups
        self.gain = nn.Parameter(torch.ones(INNER))

    def forward(self, x):
        y, gate = self.into(x).chunk(2, -1)
        y = y * F.silu(gate)
        parts = y.to(torch.promote_types(y.dtype, torch.float32)).unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.out(self.gain * parts.flatten(-2).to(y.dtype))


def pair(te, groups):
    return parity.Pair(
        reference=Mixer(nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False), 2),
        candidate=Mixer(te.Linear(WIDTH, 2 * INNER, bias=False), te.Linear(INNER, WIDTH, bias=False), groups),
        weights={"into.weight": "into.weight", "out.weight": "out.weight", "gain": "gain"},
        inputs=lambda rng: rng.normal(1, WIDTH),
    )


@parity.pair("gated_norm_of_groups_wrong", precisions=["bf16"])
def wrong(te):
    return pair(te, 1)
