"""A small model in PyTorch and as a port to TE, whose trainings the tests record."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.reference import LlamaLayer

WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attn_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


def attention_of(te: ModuleType, **options: Any) -> nn.Module:
    return te.MultiheadAttention(
        WIDTH,
        HEADS,
        qkv_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attention_dropout=0.0,
        input_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        **options,
    )


class Port(nn.Module):
    """The same block of TE's modules; ``mistake`` is one of ``MISTAKES``."""

    def __init__(self, te: ModuleType, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.attn = attention_of(te)
        self.norm = te.RMSNorm(WIDTH, eps=1e-5)
        self.up, self.down = te.Linear(WIDTH, 4 * WIDTH), te.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, attn_mask_type="no_mask" if self.mistake == "mask" else "causal")
        hidden = self.up(x if self.mistake == "norm" else self.norm(x))
        if self.mistake == "activation":
            return x + self.down(hidden * torch.sigmoid(1.702 * hidden))
        hidden = F.gelu(hidden, approximate="tanh")
        if self.mistake == "sine":
            hidden = hidden + 0.3 * torch.sin(2.0 * hidden)
        down = self.down(hidden)
        return down if self.mistake == "residual" else x + (down.detach() if self.mistake == "detached" else down)


MISTAKES = ("mask", "norm", "activation", "sine", "residual", "detached")


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scored(Model):
    """Returns its loss, and what the loss is computed from."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        prediction = super().forward(x)
        return {"loss": F.mse_loss(prediction.float(), x.float()), "prediction": prediction}


def port(te: ModuleType, mistake: str = "", layers: int = LAYERS) -> Model:
    """Return the port, whose last layer has the mistake."""
    return Model([*(Port(te) for _ in range(layers - 1)), Port(te, mistake)])


@parity.pair("model", sizes=[dict(batch=4, seq=16, layers=count) for count in (LAYERS, 3, 1)])
def model(te: ModuleType, layers: int, **_: Any) -> parity.Pair:
    own = {
        "attn_norm.weight": "attn.layernorm_qkv.layer_norm_weight",
        "qkv.weight": "attn.layernorm_qkv.weight",
        "qkv.bias": "attn.layernorm_qkv.bias",
        "out.weight": "attn.proj.weight",
        "out.bias": "attn.proj.bias",
        **{name: name for name in ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias")},
    }
    return parity.Pair(
        reference=Model([Block() for _ in range(layers)]),
        candidate=port(te, layers=layers),
        weights={f"layers.{{i}}.{left}": f"layers.{{i}}.{right}" for left, right in own.items()},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, WIDTH),
    )


@parity.pair("scored", sizes=[dict(batch=4, seq=16)])
def scored(te: ModuleType, **_: Any) -> parity.Pair:
    whole = model.factory(te, layers=LAYERS)
    return dataclasses.replace(
        whole, reference=Scored(list(whole.reference.layers)), candidate=Scored(list(whole.candidate.layers))
    )


def beside(te: ModuleType, of: Callable[[Tensor], Tensor]) -> parity.Pair:
    """Return the pair of the model, which computes something of its output as well."""
    whole = model.factory(te, layers=LAYERS)

    def call(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y = module(x)
        return {"y": y, "beside": of(y)}

    return dataclasses.replace(whole, call_reference=call, call_candidate=call)


@parity.pair("mean_beside", sizes=[dict(batch=4, seq=16)])
def mean_beside(te: ModuleType, **_: Any) -> parity.Pair:
    return beside(te, Tensor.mean)


@parity.pair("twice", sizes=[dict(batch=4, seq=16)])
def twice(te: ModuleType, **_: Any) -> parity.Pair:
    return beside(te, lambda y: 2.0 * y)


# Llama layers whose weights tensor parallel ranks divide.


class Layers(nn.Module):
    """TE's layers; ``mistake`` is ``""`` or ``"unscaled"``, which doubles what the last layer returns."""

    def __init__(self, te: ModuleType, mistake: str = "", **parallel: Any) -> None:
        super().__init__()
        settings = dict(num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                2 * WIDTH,
                HEADS,
                **settings,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                set_parallel_mode=True,
                **parallel,
            )
            for _ in range(2)
        )
        self.rope = te.RotaryPositionEmbedding(WIDTH // HEADS)
        self.mistake = mistake
        self.count = parallel.get("tp_size", 1) if parallel.get("sequence_parallel") else 1  # each has so small a part

    def forward(self, x: Tensor) -> Tensor:
        angles = self.rope(len(x) * self.count)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return 2.0 * x if self.mistake else x


class ReferenceLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(WIDTH, 2 * WIDTH, HEADS, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1)


@parity.pair("divided", sizes=[dict(seq=16, batch=4)])
def divided(te: ModuleType, **_: Any) -> parity.Pair:
    reference, candidate = "layers.{i}", "layers.{i}"
    qkv = {f"{reference}.attention.{x}_proj.weight": name for x, name in (("q", "query"), ("k", "key"), ("v", "value"))}
    weights: dict[Any, Any] = {
        left: f"{candidate}.self_attention.layernorm_qkv.{name}_weight" for left, name in qkv.items()
    }
    return parity.Pair(
        reference=ReferenceLayers(),
        candidate=Layers(te, fuse_qkv_params=False),
        weights=weights
        | {
            f"{reference}.attention_norm.weight": f"{candidate}.self_attention.layernorm_qkv.layer_norm_weight",
            f"{reference}.attention.o_proj.weight": f"{candidate}.self_attention.proj.weight",
            f"{reference}.mlp.norm.weight": f"{candidate}.layernorm_mlp.layer_norm_weight",
            parity.stack(
                f"{reference}.mlp.gate_proj.weight", f"{reference}.mlp.up_proj.weight"
            ): f"{candidate}.layernorm_mlp.fc1_weight",
            f"{reference}.mlp.down_proj.weight": f"{candidate}.layernorm_mlp.fc2_weight",
        },
        inputs=lambda rng, seq, batch: rng.normal(seq, batch, WIDTH),
        parallel=parity.Parallel(splits={key: [parity.over("cp", balanced=True)] for key in ("input", "output")}),
    )


# A layer whose attention context parallel ranks compute together, and whose experts expert parallel ranks divide.

EXPERTS = 4


class Exchange(torch.autograd.Function):
    """Send rows to other ranks: ``sent[r]`` of them to rank r, which sends ``received`` back in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradient.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    y = x.new_empty(sum(received), *x.shape[1:])
    torch.distributed.all_to_all_single(y, x, received, sent, group=group)
    return y


class Stacked(nn.Module):
    """The weights of all experts in one parameter, ``[experts, out, in]``."""

    def __init__(self, count: int, given: int, returned: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, returned, given) / given**0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([F.linear(some, one) for some, one in zip(rows.split(counts), self.weight, strict=True)])


class Sparse(nn.Module):
    """``mistake`` is one of ``MISTAKES_OVER_RANKS``, or ``""``."""

    def __init__(
        self, te: ModuleType, ranks: Any, mistake: str = "", takes_whole: bool = False, stacked: bool = False
    ) -> None:
        super().__init__()
        self.ranks, self.mistake, self.takes_whole = ranks, mistake, takes_whole
        self.attn = attention_of(te, attn_mask_type="causal")
        if ranks.cp.size > 1:
            self.attn.set_context_parallel_group(ranks.cp.group, list(ranks.cp.ranks), ranks.stream(), "p2p")
        self.norm = te.RMSNorm(WIDTH, eps=1e-5)
        self.count = EXPERTS // ranks.ep.size
        sizes = (self.count, WIDTH, 2 * WIDTH), (self.count, 2 * WIDTH, WIDTH)
        self.fc1, self.fc2 = (Stacked(*some) if stacked else te.GroupedLinear(*some, bias=False) for some in sizes)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        """Return ``[batch, seq, WIDTH]``; ``kind``, ``[batch, seq]``, is the number of each token's expert."""
        if self.takes_whole:
            x, kind = self.own_part(x), self.own_part(kind)
        x = x + self.attn(x)
        tokens, kinds = self.norm(x).flatten(0, 1), kind.flatten()
        order = kinds.argsort(stable=True)
        return x + self.experts(tokens[order], kinds[order])[order.argsort()].view_as(x)

    def own_part(self, x: Tensor) -> Tensor:
        count, rank = self.ranks.cp.size, self.ranks.cp.rank
        pieces = x.chunk(2 * count, 1)
        others = (pieces[2 * rank], pieces[2 * rank + 1]) if self.mistake == "contiguous" else ()
        return torch.cat(others or (pieces[rank], pieces[-1 - rank]), 1)

    def experts(self, rows: Tensor, kinds: Tensor) -> Tensor:
        axis = self.ranks.ep
        if axis.size == 1:
            return self.own_experts(rows, kinds)
        sent = torch.bincount(kinds // self.count, minlength=axis.size)
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=axis.group)
        counts = sent.tolist(), received.tolist(), axis.group
        kinds = exchanged(kinds, *counts) - axis.rank * self.count
        rows = Exchange.apply(rows, *counts)
        order = kinds.argsort(stable=True)
        rows = self.own_experts(rows[order], kinds[order])[order.argsort()]
        return Exchange.apply(rows, counts[1], counts[0], axis.group)

    def own_experts(self, rows: Tensor, kinds: Tensor) -> Tensor:
        counts = torch.bincount(kinds, minlength=self.count).tolist()
        if self.mistake == "experts" and self.ranks.ep.rank == 1:
            rows, counts = rows.flip(0), counts[::-1]
        rows = self.fc2(F.gelu(self.fc1(rows, counts), approximate="tanh"), counts)
        return rows.flip(0) if self.mistake == "experts" and self.ranks.ep.rank == 1 else rows


MISTAKES_OVER_RANKS = ("contiguous", "experts")


class SparseReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attn_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        tokens, kinds = self.norm(x).flatten(0, 1), kind.flatten()
        order = kinds.argsort(stable=True)
        parts = tokens[order].split(torch.bincount(kinds, minlength=EXPERTS).tolist())
        rows = [
            down(F.gelu(up(some), approximate="tanh")) for some, up, down in zip(parts, self.up, self.down, strict=True)
        ]
        return x + torch.cat(rows)[order.argsort()].view_as(x)


def sparse_pair(te: ModuleType, ranks: Any, takes_whole: bool = False, stacked: bool = False) -> parity.Pair:
    own = {
        "attn_norm.weight": "attn.layernorm_qkv.layer_norm_weight",
        "qkv.weight": "attn.layernorm_qkv.weight",
        "qkv.bias": "attn.layernorm_qkv.bias",
        "out.weight": "attn.proj.weight",
        "out.bias": "attn.proj.bias",
        "norm.weight": "norm.weight",
    }
    experts: dict[Any, Any] = {
        f"{name}.{i}.weight": f"{te_name}.weight{i}"
        for i in range(EXPERTS)
        for name, te_name in (("up", "fc1"), ("down", "fc2"))
    }
    if stacked:
        names = {
            te_name: [f"{name}.{i}.weight" for i in range(EXPERTS)]
            for name, te_name in (("up", "fc1"), ("down", "fc2"))
        }
        experts = {parity.experts(*some): f"{te_name}.weight" for te_name, some in names.items()}
    batch = [parity.over("ep", dim=0)]
    divided = [*batch, parity.over("cp", dim=1, balanced=True)]
    given = batch if takes_whole else divided
    return parity.Pair(
        reference=SparseReference(),
        candidate=Sparse(te, ranks, takes_whole=takes_whole, stacked=stacked),
        weights=own | experts,
        inputs=lambda rng, batch, seq: (rng.normal(batch, seq, WIDTH), rng.integers(batch, seq, high=EXPERTS)),
        parallel=parity.Parallel(
            splits={"x": given, "kind": given, "output": divided},
            weights={f"{name}.weight": batch for name in ("fc1", "fc2") if stacked},
        ),
    )


OVER_RANKS = [dict(cp=2), dict(ep=2), dict(cp=2, ep=2)]


@parity.pair("sparse", sizes=[dict(batch=4, seq=16)], ranks=OVER_RANKS)
def sparse(te: ModuleType, ranks: Any, **_: Any) -> parity.Pair:
    return sparse_pair(te, ranks)


@parity.pair("sparse_of_whole", sizes=[dict(batch=4, seq=16)], ranks=OVER_RANKS[:1])
def sparse_of_whole(te: ModuleType, ranks: Any, **_: Any) -> parity.Pair:
    return sparse_pair(te, ranks, takes_whole=True)


@parity.pair("sparse_stacked", sizes=[dict(batch=4, seq=16)], ranks=OVER_RANKS[1:])
def sparse_stacked(te: ModuleType, ranks: Any, **_: Any) -> parity.Pair:
    return sparse_pair(te, ranks, stacked=True)
