# partial_rope_lost_wrong[bf16-1x2x16] failed. PAR227 rope-partial: in the module, between the 1st 'linear' of qkv and
# the 1st 'linear' of out: the relative error of output falls from 0.041 to 0.002, the normal error of bf16, if you
# give TE rotary_percent=0.5; it rotates 100% of a head's channels
# parity minimize made this from t02_partial_rope_lost.py: 2x32x128 (71 lines, 65664 weights, margin 62) became 1x2x16
# (62 lines, 1040 weights, margin 6.4). 108 cases were compared.
# Run it with: parity run FILE
# kernels: emulated: TransformerEngine's own Python on parity's CPU kernels; device: CPU, as an emulated Hopper
# (compute capability 9.0); processor: AMD EPYC; platform: Linux x86_64; TransformerEngine: 2.20.2; PyTorch:
# 2.13.0+cpu; Python: 3.11.7; parity: 0.1.0 at commit e9c520e4 with changes; date: 2026-11-30T12:04Z
import torch
import torch.nn.functional as F
from torch import nn

import parity

HEADS, DIM = 2, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-5)
        self.qkv = nn.Linear(16, 3 * 16, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        n = DIM // 2
        frequency = 10000.0 ** (-torch.arange(0, n, 2, dtype=x.dtype) / n)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.cat([frequency, frequency])

        def rotate(y):
            a, b = y[..., :n], y[..., n:]
            first, second = a.chunk(2, -1)
            return torch.cat([a * angle.cos() + torch.cat([-second, first], -1) * angle.sin(), b], -1)

        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def pair(te, percent):
    rope = te.RotaryPositionEmbedding(DIM, rotary_percent=percent)
    return parity.Pair(
        reference=Attention(),
        candidate=te.MultiheadAttention(
            16,
            HEADS,
            attention_dropout=0.0,
            input_layernorm=True,
            normalization="RMSNorm",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            bias=False,
            qkv_format="bshd",
            attn_mask_type="causal",
        ),
        weights={
            "norm.weight": "layernorm_qkv.layer_norm_weight",
            "qkv.weight": "layernorm_qkv.weight",
            "out.weight": "proj.weight",
        },
        inputs=lambda rng: rng.normal(1, 2, 16),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(x.shape[1])),
    )


@parity.pair("partial_rope_lost_wrong", precisions=["bf16"])
def wrong(te):
    return pair(te, 1.0)
