"""NVIDIA/Megatron-LM#7530 (https://github.com/NVIDIA/Megatron-LM/pull/7530)

Tensor parallel ranks have some heads each, and the attention sinks of these. The sinks were not marked as divided. So
the norm to which gradients are clipped took them for a weight that all ranks hold, and counted the first rank's alone.

parity says ``gradient-norm`` (PAR708): it lacks what the other rank has of the sinks' gradient.

Repair: mark them, as TE marks the weights of its linear layers.
"""

import torch
from torch import distributed, nn

import parity

HEADS, DIM = 4, 16


class Attention(nn.Module):
    """Projects queries; keys and values are given, ``[batch, sequence, heads, dim]``."""

    def __init__(self, project):
        super().__init__()
        self.project = project

    def forward(self, x, keys, values):
        return self.attend(self.project(x).unflatten(-1, (-1, DIM)), keys, values)


class Plain(Attention):
    def __init__(self):
        super().__init__(nn.Linear(64, HEADS * DIM, bias=False))
        self.sinks = nn.Parameter(3 + torch.randn(HEADS))

    def attend(self, queries, keys, values):
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / DIM**0.5
        sinks = self.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", shares, values).flatten(2)


class Ported(Attention):
    def __init__(self, te, ranks):
        column = dict(parallel_mode="column", tp_group=ranks.tp.group, tp_size=ranks.tp.size)
        super().__init__(te.Linear(64, HEADS * DIM, bias=False, **column))
        self.attend = te.DotProductAttention(
            HEADS, DIM, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0, softmax_type="learnable",
            tp_size=ranks.tp.size, tp_group=ranks.tp.group,
        )  # fmt: skip


def attention(te, ranks, marks_sinks):
    def norm(module):
        """Count what is divided on each rank, and what all ranks hold on the first."""
        squares = torch.zeros(())
        for name, one in module.named_parameters():
            is_divided = getattr(one, "tensor_model_parallel", False) or (marks_sinks and "softmax_offset" in name)
            if is_divided or ranks.tp.rank == 0:
                squares += one.grad.float().square().sum()
        distributed.all_reduce(squares, group=ranks.tp.group)
        return squares.sqrt()

    heads = [parity.over("tp", 2)]
    return parity.Pair(
        reference=Plain(),
        candidate=Ported(te, ranks),
        inputs=lambda rng: (rng.normal(2, 32, 64), rng.normal(2, 32, HEADS, DIM), rng.normal(2, 32, HEADS, DIM)),
        weights={"project.weight": "project.weight", "sinks": "attend.softmax_offset"},
        parallel=parity.Parallel(
            {"keys": heads, "values": heads, "output": heads},
            {"attend.softmax_offset": [parity.over("tp", 0)]},
            gradient_norm=norm,
        ),
    )


@parity.pair("sink_left_out_of_the_norm_wrong", ranks=[dict(tp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return attention(te, ranks, marks_sinks=False)


@parity.pair("sink_left_out_of_the_norm_right", ranks=[dict(tp=2)], precisions=["bf16"])
def right(te, ranks):
    return attention(te, ranks, marks_sinks=True)
