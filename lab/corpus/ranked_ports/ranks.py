"""Pairs over ranks, right ones and the same with a mistake, each built by its name on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp

from parity.case.case import Case, Pair
from parity.case.weight_map import WeightMap, stack
from parity.ranks.layout import Degrees, Over, Parallel, Ranks, over, part
from parity.reference import Attention, LlamaLayer, RotaryEmbedding, rotate_halves

HIDDEN, FFN, HEADS, GROUPS = 64, 128, 4, 2
SEQ, BATCH = 32, 4
EXPERTS, TOKENS = 4, 32

# The operations of a port between ranks, with their gradients.


class _Reduce(torch.autograd.Function):
    """Reduce over ranks. The gradient, which all ranks have, is passed on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, op: Any) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x, op, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    """Join the ranks' parts along a dimension in a given order. Each rank gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int, order: Sequence[int]) -> Tensor:
        parts = [torch.empty_like(x) for _ in order]
        distributed.all_gather(parts, x.contiguous(), group=group)
        ctx.dim, ctx.mine, ctx.size = dim, list(order).index(distributed.get_rank(group)), len(order)
        return torch.cat([parts[at] for at in order], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].chunk(ctx.size, ctx.dim)[ctx.mine], None, None, None


def reduced(x: Tensor, group: Any, op: Any = ReduceOp.SUM) -> Tensor:
    """Return the sum (or another reduction) of the tensors of all ranks in the group."""
    result: Tensor = _Reduce.apply(x, group, op) if group is not None else x
    return result


def gathered(x: Tensor, group: Any, dim: int, backwards: bool = False) -> Tensor:
    """Return the tensors of all ranks in the group, joined one after the other."""
    if group is None:
        return x
    order = list(range(distributed.get_world_size(group)))
    result: Tensor = _Gather.apply(x, group, dim, order[::-1] if backwards else order)
    return result


def add_up(parameters: Sequence[Tensor], group: Any, op: Any = ReduceOp.SUM, times: int = 1) -> None:
    """Reduce gradients over a group, a number of times."""
    for parameter in parameters:
        for _ in range(times if parameter.grad is not None else 0):
            distributed.all_reduce(parameter.grad, op, group=group)


# Layers whose weights are divided over tensor parallel ranks.


def _tp(ranks: Ranks, **more: Any) -> dict[str, Any]:
    return dict(tp_group=ranks.tp.group, tp_size=ranks.tp.size, sequence_parallel=ranks.sequence_parallel, **more)


def _sequence(ranks: Ranks) -> list[Over]:
    return [over("tp", 0)] if ranks.sequence_parallel else []


def column(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a linear layer whose outputs are divided over ranks."""
    weights: dict[str, Sequence[Over]] = {}
    output = [over("tp", -1)]
    call = None
    if mistake == "input gradient not reduced":
        candidate = te.Linear(HIDDEN, FFN // ranks.tp.size)
        weights = {"weight": [over("tp", 0)], "bias": [over("tp", 0)]}
    else:
        candidate = te.Linear(HIDDEN, FFN, **_tp(ranks, parallel_mode="column"))
    if mistake in ("gathered", "gathered backwards"):
        output = []

        def call(module: nn.Module, x: Tensor) -> Tensor:
            return gathered(module(x), ranks.tp.group, -1, mistake == "gathered backwards")

    return Pair(
        reference=nn.Linear(HIDDEN, FFN),
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights={"weight": "weight", "bias": "bias"},
        call_candidate=call,
        parallel=Parallel(splits={"input": _sequence(ranks), "output": output}, weights=weights),
    )


def row(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a linear layer whose inputs are divided over ranks."""
    own = {
        "output not reduced": lambda y: y,
        "bias on every rank": lambda y: reduced(y, ranks.tp.group),
        "averaged": lambda y: reduced(y, ranks.tp.group, ReduceOp.AVG),
        "reduced twice": lambda y: reduced(y, ranks.tp.group),
    }.get(mistake)
    has_bias = mistake in ("", "bias on every rank", "bias gradient not reduced")
    if mistake in ("", "reduced twice", "bias gradient not reduced"):
        candidate, weights = te.Linear(FFN, HIDDEN, bias=has_bias, **_tp(ranks, parallel_mode="row")), {}
    else:
        candidate = te.Linear(FFN // ranks.tp.size, HIDDEN, bias=has_bias)
        weights = {"weight": [over("tp", 1)]}

    def call(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x)
        return own(y) if own else y

    def finish(module: nn.Module) -> None:
        if ranks.sequence_parallel and has_bias and mistake != "bias gradient not reduced":
            add_up([module.get_parameter("bias")], ranks.tp.group)

    return Pair(
        reference=nn.Linear(FFN, HIDDEN, bias=has_bias),
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, FFN),
        weights={"weight": "weight", "bias": "bias"} if has_bias else {"weight": "weight"},
        call_candidate=call,
        parallel=Parallel({"input": [over("tp", -1)], "output": _sequence(ranks)}, weights, finish),
    )


class Swiglu(nn.Module):
    """A gated MLP with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., HIDDEN]`` to the same shape."""
        x = self.norm(x)
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


OF_MLP = {"norm.weight": "layer_norm_weight", stack("gate.weight", "up.weight"): "fc1_weight"} | {
    "down.weight": "fc2_weight"
}
_NORM: dict[str, dict[str, Any]] = {
    "norm gradient not reduced": dict(times=0),
    "norm gradient reduced twice": dict(times=2),
    "norm gradient averaged": dict(op=ReduceOp.AVG),
}


def te_mlp(te: ModuleType, ranks: Ranks) -> nn.Module:
    """Return TE's gated MLP with its norm, whose weights are divided over tensor parallel ranks."""
    settings: dict[str, Any] = dict(normalization="RMSNorm", activation="swiglu", bias=False, set_parallel_mode=True)
    mlp: nn.Module = te.LayerNormMLP(HIDDEN, FFN, **settings, **_tp(ranks))
    return mlp


def mlp(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a gated MLP with its norm."""
    reference, candidate = Swiglu(), te_mlp(te, ranks)
    loaded = mistake in ("its own loader", "fc1 in one block", "ranks' parts exchanged", "norm of another rank")
    if loaded:
        _load(reference, candidate, ranks, mistake)

    def finish(module: nn.Module) -> None:
        if ranks.sequence_parallel:
            add_up([module.get_parameter("layer_norm_weight")], ranks.tp.group, **_NORM.get(mistake, {}))

    along = _sequence(ranks)
    return Pair(
        reference=reference,
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights=OF_MLP,
        fill=False if loaded else None,
        parallel=Parallel(
            {"input": along, "output": along},
            finish=finish,
            gradient_norm=partial(_norm_of, ranks, mistake) if "of all gradients" in mistake else None,
        ),
    )


def _norm_of(ranks: Ranks, mistake: str, module: nn.Module) -> float:
    """Return the norm of all gradients, counting weights that each rank holds once, or computed as the mistake says."""
    own, shared = torch.zeros(()), torch.zeros(())
    for name, one in module.named_parameters():
        if one.grad is not None:
            (shared if "layer_norm" in name and mistake == "norm of all gradients" else own).add_(
                one.grad.float().square().sum()
            )
    if ranks.tp.size > 1 and mistake != "norm of all gradients, on one rank alone":
        distributed.all_reduce(own, group=ranks.tp.group)
    return float((own + shared).sqrt())


def _load(reference: Swiglu, candidate: nn.Module, ranks: Ranks, mistake: str) -> None:
    """Load a rank's parts of the reference's weights, as a port's own loader does."""
    count = ranks.tp.size
    mine = count - 1 - ranks.tp.rank if mistake == "ranks' parts exchanged" else ranks.tp.rank
    gate, up = reference.gate.weight, reference.up.weight
    if mistake == "fc1 in one block":
        fc1 = torch.cat([gate, up]).chunk(count)[mine]
    else:
        fc1 = torch.cat([gate.chunk(count)[mine], up.chunk(count)[mine]])
    norm = reference.norm.weight + (0.01 * ranks.tp.rank if mistake == "norm of another rank" else 0.0)
    with torch.no_grad():
        candidate.get_parameter("layer_norm_weight").copy_(norm)
        candidate.get_parameter("fc1_weight").copy_(fc1)
        candidate.get_parameter("fc2_weight").copy_(reference.down.weight.chunk(count, 1)[mine])


def norm_column(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a norm and a linear layer whose outputs are divided over ranks."""

    def finish(module: nn.Module) -> None:
        if ranks.sequence_parallel:
            norms = ("layer_norm_weight", "layer_norm_bias")
            add_up([module.get_parameter(name) for name in norms], ranks.tp.group, **_NORM.get(mistake, {}))

    return Pair(
        reference=nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN)),
        candidate=te.LayerNormLinear(HIDDEN, FFN, **_tp(ranks, parallel_mode="column")),
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights={"0.weight": "layer_norm_weight", "0.bias": "layer_norm_bias", "1.weight": "weight", "1.bias": "bias"},
        parallel=Parallel({"input": _sequence(ranks), "output": [over("tp", -1)]}, finish=finish),
    )


def self_attention(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return grouped-query self-attention with RoPE, whose heads are divided over ranks."""
    rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
    candidate = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,
        attention_dropout=0.0,
        attn_mask_type="causal",
        qkv_format="sbhd",
        fuse_qkv_params=False,
        set_parallel_mode=True,
        **_tp(ranks),
    )
    along = _sequence(ranks)
    weights: WeightMap = {f"{x}_proj.weight": f"qkv.{name}_weight" for x, name in _QKV}
    weights = {**weights, "o_proj.weight": "proj.weight"}
    return Pair(
        reference=Attention(HIDDEN, HEADS, GROUPS),
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights=weights,
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(SEQ)),
        parallel=Parallel({"input": along, "output": along}),
    )


_NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


def layers(te: ModuleType, ranks: Ranks, mistake: str = "", te_settings: Mapping[str, Any] = _NO_DROPOUT) -> Pair:
    """Return two Llama layers, with grouped-query attention and RoPE."""
    rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
    settings: dict[str, Any] = dict(
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        self_attn_mask_type="causal",
        set_parallel_mode=True,
        **te_settings,
    )
    tes = [te.TransformerLayer(HIDDEN, FFN, HEADS, **settings, **_tp(ranks)) for _ in range(2)]
    if ranks.cp.size > 1:
        for layer in tes:
            layer.set_context_parallel_group(ranks.cp.group, list(ranks.cp.ranks), ranks.stream(), "p2p")

    def call(module: nn.Module, x: Tensor) -> Tensor:
        for layer in module.children():
            x = layer(x, rotary_pos_emb=rope(SEQ))
        return x

    def finish(module: nn.Module) -> None:
        parameters = list(module.parameters())
        norms = [one for name, one in module.named_parameters() if "layer_norm_weight" in name]
        if mistake == "one norm's gradient not reduced":
            norms = norms[:-1]
        if ranks.sequence_parallel:
            add_up(norms, ranks.tp.group, **_NORM.get(mistake, {}))
        if ranks.cp.size > 1 and mistake != "not reduced over cp":
            add_up(parameters, ranks.cp.group)
        if ranks.dp.size > 1:
            wrong = ranks.tp.group if mistake == "gradients over the wrong group" else ranks.dp.group
            add_up(parameters, wrong)

    along = [over("cp", 0, balanced=True), *_sequence(ranks), over("dp", 1)]
    return Pair(
        reference=nn.Sequential(*(LlamaLayer(HIDDEN, FFN, HEADS, GROUPS) for _ in range(2))),
        candidate=nn.ModuleList(tes),
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights={left: right for i in range(2) for left, right in _of_layer(i).items()},
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        call_candidate=call,
        parallel=Parallel({"input": along, "output": along}, finish=finish),
    )


def _of_layer(i: int) -> dict[Any, Any]:
    qkv = {f"{i}.attention.{x}_proj.weight": f"{i}.self_attention.layernorm_qkv.{name}_weight" for x, name in _QKV}
    return qkv | {
        f"{i}.attention_norm.weight": f"{i}.self_attention.layernorm_qkv.layer_norm_weight",
        f"{i}.attention.o_proj.weight": f"{i}.self_attention.proj.weight",
        f"{i}.mlp.norm.weight": f"{i}.layernorm_mlp.layer_norm_weight",
        stack(f"{i}.mlp.gate_proj.weight", f"{i}.mlp.up_proj.weight"): f"{i}.layernorm_mlp.fc1_weight",
        f"{i}.mlp.down_proj.weight": f"{i}.layernorm_mlp.fc2_weight",
    }


_QKV = (("q", "query"), ("k", "key"), ("v", "value"))

# Batches that are divided over data parallel ranks, and experts.


def batches(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a gated MLP that every rank holds completely, for its part of the batch."""
    averages = mistake in ("averages", "averaged twice")

    def finish(module: nn.Module) -> None:
        parameters = list(module.parameters())
        if mistake == "norm left out":
            parameters = [one for one in parameters if one.dim() > 1]
        op = ReduceOp.AVG if averages or mistake == "averaged" else ReduceOp.SUM
        if mistake != "not reduced":
            add_up(parameters, ranks.dp.group, op, 2 if mistake == "reduced twice" else 1)
        if mistake == "averaged twice":
            for one in parameters:
                one.grad = None if one.grad is None else one.grad / ranks.dp.size

    settings = dict(normalization="RMSNorm", activation="swiglu", bias=False)
    return Pair(
        reference=Swiglu(),
        candidate=te.LayerNormMLP(HIDDEN, FFN, **settings),
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights=OF_MLP,
        parallel=Parallel({"input": [over("dp", 1)], "output": [over("dp", 1)]}, {}, finish, averages),
    )


def fsdp(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a gated MLP whose weights FSDP2 shards over data parallel ranks."""
    candidate = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False)
    if ranks.dp.size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(candidate, mesh=init_device_mesh("cpu", (ranks.dp.size,)))
    call = (lambda module, x: module(x) / ranks.dp.size) if mistake == "divided as well" else None
    return Pair(
        reference=Swiglu(),
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights=OF_MLP,
        call_candidate=call,
        parallel=Parallel({"input": [over("dp", 1)], "output": [over("dp", 1)]}, averages=True),
    )


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, FFN, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[EXPERTS * TOKENS, HIDDEN]``, sorted by expert, to ``[EXPERTS * TOKENS, FFN]``."""
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.chunk(EXPERTS), strict=True)])


def experts(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return linear experts, some on each rank, for tokens that are sorted by expert."""
    local = EXPERTS // ranks.ep.size
    output = [over("ep", 0)]

    def call(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x, [TOKENS] * local)
        if mistake in ("gathered", "tokens in another order"):
            y = gathered(y, ranks.ep.group, 0, mistake == "tokens in another order")
        return y

    return Pair(
        reference=_Experts(),
        candidate=te.GroupedLinear(local, HIDDEN, FFN, bias=False),
        inputs=lambda rng: rng.normal(EXPERTS * TOKENS, HIDDEN),
        weights={f"experts.{i}.weight": f"weight{i}" for i in range(EXPERTS)},
        call_candidate=call,
        parallel=Parallel(
            {"input": [over("ep", 0)], "output": [] if "gathered" in mistake else output}
            | ({"output": []} if mistake == "tokens in another order" else {})
        ),
    )


# Sequences that are divided over context parallel ranks.


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally: ``[batch, seq, heads, head_dim]`` to ``[batch, seq, heads * head_dim]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def attention(te: ModuleType, ranks: Ranks, mistake: str = "p2p") -> Pair:
    """Return causal grouped-query attention. ``mistake`` may also name how ranks exchange keys and values."""
    candidate = te.DotProductAttention(
        HEADS, 16, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    way = mistake if mistake in CONTEXT_PARALLEL else "p2p"
    if ranks.cp.size > 1 and mistake != "each rank by itself":
        candidate.set_context_parallel_group(ranks.cp.group, list(ranks.cp.ranks), ranks.stream(), way)
    whole, balanced = mistake in ("gathered", "order not undone"), mistake != "not balanced"
    along = [over("cp", 1, balanced=balanced)]

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = module(q, k, v)
        if not whole or ranks.cp.size == 1:
            return y
        y = gathered(y, ranks.cp.group, 1)
        parts = y.chunk(2 * ranks.cp.size, 1)
        order = [2 * i for i in range(ranks.cp.size)] + [2 * i + 1 for i in reversed(range(ranks.cp.size))]
        return y if mistake == "order not undone" else torch.cat([parts[at] for at in order], 1)

    def inputs(rng: Any) -> tuple[Tensor, ...]:
        return tuple(rng.normal(2, 64, heads, 16) for heads in (HEADS, GROUPS, GROUPS))

    return Pair(
        reference=_Attention(),
        candidate=candidate,
        inputs=inputs,
        call_candidate=call,
        parallel=Parallel({"q": along, "k": along, "v": along, "output": [] if whole else along}),
    )


class _RotatedAttention(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate queries and keys by their positions, and attend."""
        return super().forward(self.rope(q), self.rope(k), v)


class _RotatedPart(nn.Module):
    """Rotate a rank's queries and keys by given positions, and attend with TE."""

    def __init__(self, core: nn.Module, positions: Tensor) -> None:
        super().__init__()
        self.core = core
        self.angles = positions[:, None] * RotaryEmbedding(16).inv_freq  # not a buffer, which would be rounded to BF16

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = self.angles.to(q.device)
        turned = (rotate_halves(x.float(), angles).to(x) for x in (q, k))
        y: Tensor = self.core(*turned, v)
        return y


def rotated(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return attention whose queries and keys the port rotates, on each rank for its part of the sequence."""
    plain, split, seq = attention(te, ranks), over("cp", 0, balanced=mistake != "positions in plain order"), 64
    positions = part(torch.arange(seq), [split], Degrees(cp=ranks.cp.size), {"cp": ranks.cp.rank})
    if mistake == "positions from 0":
        positions = torch.arange(len(positions))
    candidate = _RotatedPart(plain.candidate, positions)
    return dataclasses.replace(plain, reference=_RotatedAttention(), candidate=candidate, call_candidate=None)


# Dropout, drawn from generators that differ between ranks or from one that all ranks seed alike.


def dropping(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return two layers with dropout of attention probabilities and of hidden states, seeded as in Megatron."""
    seed, mine = 1234, ranks.tp.rank
    torch.manual_seed(seed + (mine if mistake == "one generator for all, seeded by rank" else 0))
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 2718 + seed + (0 if mistake == "tracker seeded alike" else mine))
    own = None if mistake in ("no tracker", "one generator for all, seeded by rank") else lambda: tracker
    pair = layers(te, ranks, te_settings=dict(hidden_dropout=0.1, attention_dropout=0.1, get_rng_state_tracker=own))
    inner = pair.call_candidate
    is_forked = ranks.sequence_parallel != (mistake == "forked the wrong way round")

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with tracker.fork() if is_forked else nullcontext():
            y: Tensor = inner(module, x)  # type: ignore[misc]
            if mistake == "dropped by hand":
                p = 0.1 if module.get_submodule("0").hidden_dropout else 0.0
                y = y * (torch.rand(y.shape, generator=torch.Generator().manual_seed(mine)) >= p).to(y)
            return y

    return dataclasses.replace(pair, call_candidate=call, parallel=dataclasses.replace(pair.parallel, dropout=True))


CONTEXT_PARALLEL = ("p2p", "all_gather", "a2a")

HOSTS: dict[str, Callable[..., Pair]] = {
    "column": column,
    "row": row,
    "mlp": mlp,
    "norm and column": norm_column,
    "self-attention": self_attention,
    "layers": layers,
    "batches": batches,
    "fsdp": fsdp,
    "experts": experts,
    "attention": attention,
    "rotated": rotated,
    "dropping": dropping,
}


def case_of(host: str, mistake: str = "") -> Case:
    """Return the case of a host, with or without a mistake."""
    return Case(f"{host} over ranks", partial(HOSTS[host], mistake=mistake), sizes=({},))


TP, SP, DP, EP = dict(tp=2), dict(tp=2, sequence_parallel=True), dict(dp=2), dict(ep=2)
TP_DP, CP = dict(tp=2, dp=2), dict(cp=2)


HALF = ("bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")  # in FP32, TE has no attention over ranks


@dataclass(frozen=True)
class Row:
    """A port over ranks.

    Attributes:
        host: its name in ``HOSTS``.
        variant: the argument of its function: a mistake, or the name of a right port.
        ranks: the ranks over which it is compared.
        titles: the titles of the findings that name its mistake; empty for a right port.
        precisions: the precisions at which TE runs it; empty for all.
    """

    host: str
    variant: str
    ranks: dict[str, Any]
    titles: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    def exists_at(self, precision: str) -> bool:
        """Return whether TE runs it at a precision."""
        return not self.precisions or precision in self.precisions


_MISSING, _TWICE, _ORDER = ("reduction-missing",), ("reduced-twice",), ("gathered-in-another-order",)
_ALIKE, _DIFFERENTLY = ("ranks-drop-alike",), ("ranks-drop-differently",)
_AVERAGED, _SHARDS = ("averaged-over-ranks",), ("shards-in-another-order", "shard-layout")

WRONG = (
    Row("column", "input gradient not reduced", TP, _MISSING),
    Row("column", "gathered backwards", TP, _ORDER),
    Row("row", "output not reduced", TP, _MISSING),
    Row("row", "bias on every rank", TP, ("bias-on-every-rank",)),
    Row("row", "averaged", TP, _AVERAGED),
    Row("row", "reduced twice", TP, _TWICE),
    Row("row", "bias gradient not reduced", SP, _MISSING),
    Row("mlp", "norm gradient not reduced", SP, _MISSING),
    Row("mlp", "norm gradient reduced twice", SP, _TWICE),
    Row("mlp", "norm gradient averaged", SP, _AVERAGED),
    Row("mlp", "fc1 in one block", TP, _SHARDS),
    Row("mlp", "ranks' parts exchanged", TP, _SHARDS),
    Row("mlp", "norm of all gradients, norms counted twice", TP, ("gradient-norm",)),
    Row("mlp", "norm of all gradients, on one rank alone", TP, ("gradient-norm",)),
    Row("mlp", "norm of another rank", TP, ("weights-not-as-mapped",)),
    Row("layers", "norm gradient not reduced", SP, _MISSING),
    Row("layers", "one norm's gradient not reduced", SP, _MISSING),
    Row("norm and column", "norm gradient not reduced", SP, _MISSING),
    Row("layers", "not reduced over cp", CP, _MISSING, HALF),
    Row("layers", "gradients over the wrong group", TP_DP, ("reduction-missing", "reduced-twice")),
    Row("batches", "not reduced", DP, _MISSING),
    Row("batches", "averaged", DP, _AVERAGED),
    Row("batches", "reduced twice", DP, _TWICE),
    Row("batches", "norm left out", DP, _MISSING),
    Row("batches", "averaged twice", DP, _AVERAGED),
    Row("attention", "order not undone", CP, _ORDER, precisions=HALF),
    Row("attention", "not balanced", CP, ("sequence-order",), precisions=HALF),
    Row("rotated", "positions from 0", CP, ("rope-position",), precisions=HALF),
    Row("rotated", "positions in plain order", CP, ("rope-position",), precisions=HALF),
    Row("attention", "each rank by itself", CP, ("nothing-exchanged",), precisions=HALF),
    Row("experts", "tokens in another order", EP, _ORDER),
    Row("dropping", "no tracker", TP, _ALIKE),
    Row("dropping", "tracker seeded alike", TP, _ALIKE),
    Row("dropping", "tracker seeded alike", SP, _ALIKE),
    Row("dropping", "forked the wrong way round", SP, _ALIKE),
    Row("dropping", "forked the wrong way round", TP, _DIFFERENTLY),
    Row("dropping", "one generator for all, seeded by rank", TP, _DIFFERENTLY),
    Row("dropping", "dropped by hand", TP, _DIFFERENTLY),
)

RIGHT = (
    Row("column", "", TP),
    Row("column", "gathered", TP),
    Row("column", "", SP),
    Row("row", "", TP),
    Row("row", "", SP),
    Row("norm and column", "", TP),
    Row("norm and column", "", SP),
    Row("mlp", "", TP),
    Row("mlp", "", SP),
    Row("mlp", "its own loader", TP),
    Row("mlp", "norm of all gradients", TP),
    Row("self-attention", "", TP),
    Row("self-attention", "", SP),
    Row("layers", "", TP),
    Row("layers", "", SP),
    Row("layers", "", DP),
    Row("layers", "", CP, precisions=HALF),
    Row("layers", "", TP_DP),
    Row("layers", "", dict(tp=2, cp=2), precisions=HALF),
    Row("batches", "", DP),
    Row("batches", "averages", DP),
    Row("fsdp", "", DP),
    *(Row("attention", way, CP, precisions=HALF) for way in CONTEXT_PARALLEL),
    Row("attention", "gathered", CP, precisions=HALF),
    Row("attention", "p2p", dict(cp=4), precisions=HALF),
    Row("rotated", "", CP, precisions=HALF),
    Row("experts", "", EP),
    Row("experts", "gathered", EP),
    Row("dropping", "", TP),
    Row("dropping", "", SP),
    Row("dropping", "", TP_DP),
)
