"""Declare a model in stages, as pipeline parallel ranks train it. Its head and its embedding share one weight.

``parity run examples/pipeline.py`` compares it in one process, in two stages, and in two stages whose weights two
tensor parallel ranks divide.
"""

import torch
from torch import distributed, nn

import parity
from parity import stack

VOCABULARY, HIDDEN, FFN, LAYERS = 96, 64, 128, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Mlp() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    """Some of the model's layers, with the numbers that they have in the whole model."""

    def __init__(self, te, ranks):
        super().__init__()
        count, is_first, is_last = LAYERS // ranks.pp.size, ranks.pp.rank == 0, ranks.pp.rank == ranks.pp.size - 1
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if is_first else None
        self.layers = nn.ModuleDict()
        for number in range(ranks.pp.rank * count, (ranks.pp.rank + 1) * count):
            self.layers[str(number)] = te.LayerNormMLP(
                HIDDEN,
                FFN,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                set_parallel_mode=True,
                tp_group=ranks.tp.group,
                tp_size=ranks.tp.size,
            )
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False) if is_last else None
        if is_first and is_last:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def add_up_tied(ranks, module):
    """Add up the gradients of the embedding and the head, which are one weight on two stages."""
    if ranks.pp.size > 1:
        tied = [one for one in (module.embedding, module.head) if one is not None]
        like = next(module.parameters())
        gradient = tied[0].weight.grad if tied else torch.zeros(VOCABULARY, HIDDEN, dtype=like.dtype)
        distributed.all_reduce(gradient, group=ranks.pp.group)


@parity.pair("model_in_stages", ranks=[dict(pp=2), dict(tp=2, pp=2)])
def model_in_stages(te, ranks):
    weights = {
        "embedding.weight": "embedding.weight",
        "layers.{i}.norm.weight": "layers.{i}.layer_norm_weight",
        stack("layers.{i}.gate.weight", "layers.{i}.up.weight"): "layers.{i}.fc1_weight",
        "layers.{i}.down.weight": "layers.{i}.fc2_weight",
    }
    return parity.Pair(
        reference=Model(),
        candidate=Stage(te, ranks),
        weights=weights,
        inputs=lambda rng: rng.integers(32, 4, high=VOCABULARY),
        parallel=parity.Parallel(
            finish=lambda module: add_up_tied(ranks, module),
            pipeline=parity.Pipeline(micro_batches=2, dim=1),
        ),
    )
