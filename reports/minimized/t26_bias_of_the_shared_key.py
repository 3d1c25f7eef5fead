# bias_of_the_shared_key_wrong[bf16-1x1x2-tp2] failed. PAR701 reduction-missing: the weight gradient kv.bias is only a
# part of the sum on each of the 2 ranks of tp; all-reduce it over tp
# parity minimize made this from t26_bias_of_the_shared_key.py: 2x16x64-tp2 (83 lines, 10400 weights, margin 135)
# became 1x1x2-tp2 (73 lines, 18 weights, margin 50). 56 cases were compared.
# Run it with: parity run FILE
# kernels: emulated: TransformerEngine's own Python on parity's CPU kernels; device: CPU, as an emulated Hopper
# (compute capability 9.0); processor: AMD EPYC; platform: Linux x86_64; TransformerEngine: 2.20.2; PyTorch:
# 2.13.0+cpu; Python: 3.11.7; parity: 0.1.0 at commit 539fed5c; date: 2026-11-30T12:13Z
import torch
import torch.nn.functional as F
from torch import distributed, nn

import parity

HEADS, DIM = 2, 1
WIDTH = HEADS * DIM


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.group is not None:
            distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Attention(nn.Module):
    def __init__(self, q, kv, out, attend, group):
        super().__init__()
        self.q, self.kv, self.out, self.attend, self.group = q, kv, out, attend, group

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, DIM))
        k, v = self.kv(Copy.apply(x, self.group)).unflatten(-1, (2, 1, DIM)).unbind(2)
        return self.out(self.attend(q, k.contiguous(), v.contiguous()))


def plain(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.expand_as(q), v.expand_as(q)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def pair(te, ranks, biases):
    def finish(module):
        if ranks.tp.group is not None:
            for one in [module.kv.weight, module.kv.bias][: 2 if biases else 1]:
                distributed.all_reduce(one.grad, group=ranks.tp.group)

    size = ranks.tp.size
    tp = dict(tp_group=ranks.tp.group, tp_size=size)
    attend = te.DotProductAttention(
        HEADS // size, DIM, num_gqa_groups=1, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    names = [f"{a}.{b}" for a in ("q", "kv", "out") for b in ("weight", "bias")]
    return parity.Pair(
        reference=Attention(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * DIM), nn.Linear(WIDTH, WIDTH), plain, None),
        candidate=Attention(
            te.Linear(WIDTH, WIDTH, parallel_mode="column", **tp),
            te.Linear(WIDTH, 2 * DIM),
            te.Linear(WIDTH, WIDTH, parallel_mode="row", **tp),
            attend,
            ranks.tp.group,
        ),
        weights={name: name for name in names},
        inputs=lambda rng: rng.normal(1, 1, WIDTH),
        parallel=parity.Parallel(finish=finish),
    )


@parity.pair("bias_of_the_shared_key_wrong", ranks=[dict(tp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return pair(te, ranks, False)
