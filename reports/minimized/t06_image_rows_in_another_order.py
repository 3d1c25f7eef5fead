# image_rows_in_another_order_wrong[bf16-2x5] failed. PAR501 unexplained: no known mistake explains the error of
# output, whose relative error is 1.2 where 0.0026 is expected. The error is in positions 1 to 3 of row 0, 0 to 2 of
# row 1 of the batch (the other 4 of 10 are right). These are right: d embedding.weight; compare parts of it as pairs
# of their own, or with fewer layers: the smallest that still fails has the mistake
# parity minimize made this from t06_image_rows_in_another_order.py: 4x24 (67 lines, 14400 weights, margin 2.5e4)
# became 2x5 (58 lines, 60 weights, margin 230). 95 cases were compared.
# Run it with: parity run FILE
# kernels: emulated: TransformerEngine's own Python on parity's CPU kernels; device: CPU, as an emulated Hopper
# (compute capability 9.0); processor: AMD EPYC; platform: Linux x86_64; TransformerEngine: 2.20.2; PyTorch:
# 2.13.0+cpu; Python: 3.11.7; parity: 0.1.0 at commit e9c520e4 with changes; date: 2026-11-30T12:08Z
import torch
from torch import nn

import parity

BATCH, SEQ, IMAGE, WIDTH = 2, 5, 4, 5


def place(embeddings, rows, mask, sequence_first):
    if sequence_first:
        embeddings, mask = embeddings.transpose(0, 1).clone(), mask.transpose(0, 1)
        embeddings[mask] = rows
        return embeddings.transpose(0, 1)
    embeddings = embeddings.clone()
    embeddings[mask] = rows
    return embeddings


class Model(nn.Module):
    def __init__(self, linear, layer, sequence_first):
        super().__init__()
        self.embedding = nn.Embedding(1, WIDTH)
        self.merge = linear
        self.layer = layer
        self.sequence_first = sequence_first

    def forward(self, ids, rows, mask):
        return self.layer(place(self.embedding(ids), self.merge(rows), mask, self.sequence_first))


def inputs(rng):
    start = rng.integers(BATCH, high=SEQ - IMAGE)
    place = torch.arange(SEQ)
    mask = (place >= start[:, None]) & (place < start[:, None] + IMAGE)
    return rng.integers(BATCH, SEQ, high=1), rng.normal(BATCH * IMAGE, WIDTH), mask


def pair(te, sequence_first):
    reference = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH, bias=False))
    candidate = te.LayerNormLinear(WIDTH, WIDTH, eps=1e-5, bias=False, normalization="RMSNorm")
    return parity.Pair(
        reference=Model(nn.Linear(WIDTH, WIDTH, bias=False), reference, False),
        candidate=Model(te.Linear(WIDTH, WIDTH, bias=False), candidate, sequence_first),
        weights={
            "embedding.weight": "embedding.weight",
            "merge.weight": "merge.weight",
            "layer.0.weight": "layer.layer_norm_weight",
            "layer.1.weight": "layer.weight",
        },
        inputs=inputs,
    )


@parity.pair("image_rows_in_another_order_wrong", precisions=["bf16"])
def wrong(te):
    return pair(te, True)
