"""Trainings over ranks, right ones and the same with a mistake between ranks and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer

from lab.corpus.ranked_ports import ranks as rows
from lab.corpus.ranked_ports.ranks import DP, SP, TP, TP_DP, Row
from parity.case.case import Case, Pair, Training
from parity.case.training import ADAM
from parity.ranks.layout import Ranks, over
from parity.result import Switch

STEPS = 3
CLIP = 0.1
WEIGHT = 0.5  # of an auxiliary loss


def trained(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a gated MLP that is trained by data parallel ranks, each with its part of the batch."""
    pair = rows.batches(te, ranks)
    counted: list[int] = []

    def finish(module: nn.Module) -> None:
        own = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        rows.add_up(list(module.parameters()), ranks.dp.group)
        if mistake == "own gradients at step 2" and len(counted) == 1 and ranks.dp.rank == 1:
            for one, x in zip(module.parameters(), own, strict=True):
                one.grad = x

    def optimizer(model: nn.Module) -> Optimizer:
        narrow = next(model.parameters()).dtype is not torch.float32
        decay = 0.0 if mistake == "other settings on rank 1" and ranks.dp.rank == 1 else ADAM["weight_decay"]
        settings = ADAM | dict(weight_decay=decay)
        made: Optimizer = te.optimizers.FusedAdam(model.parameters(), **settings, master_weights=narrow)
        made.register_step_post_hook(lambda *_: counted.append(1))
        return made

    fill = None
    if mistake == "other weights on rank 1":
        _load(pair)
        with torch.no_grad():
            pair.candidate.get_parameter("fc1_weight").mul_(1.0 + 0.01 * ranks.dp.rank)
        fill = False
    training = Training(optimizer=lambda model: AdamW(model.parameters(), **ADAM), candidate_optimizer=optimizer)
    parallel = dataclasses.replace(pair.parallel, finish=finish)
    return dataclasses.replace(pair, parallel=parallel, training=training, fill=fill)


def _load(pair: Pair) -> None:
    reference = pair.reference
    with torch.no_grad():
        gate, up = (reference.get_parameter(f"{name}.weight") for name in ("gate", "up"))
        pair.candidate.get_parameter("layer_norm_weight").copy_(reference.get_parameter("norm.weight"))
        pair.candidate.get_parameter("fc1_weight").copy_(torch.cat([gate, up]))
        pair.candidate.get_parameter("fc2_weight").copy_(reference.get_parameter("down.weight"))


def clipped(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a gated MLP whose weights are divided over tensor parallel ranks, and whose gradients are clipped."""
    pair = rows.mlp(te, ranks, mistake or "norm of all gradients")
    parallel = pair.parallel
    if mistake == "each rank by its own norm":  # as by clip_grad_norm_ on each rank
        parallel = dataclasses.replace(parallel, gradient_norm=None)
    return dataclasses.replace(pair, parallel=parallel, training=Training(clip=CLIP))


def counted_tokens(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP with a loss over only some tokens, of which data parallel ranks have different numbers."""
    pair = with_dp(rows.mlp, te, ranks) if ranks.tp.size > 1 else rows.batches(te, ranks)

    def loss(returned: Tensor, x: Tensor) -> Tensor:
        counts = x[..., 0] > 0.0
        total = counts.sum().float()
        if ranks.dp.size > 1 and mistake != "mean of means":
            group = ranks.tp.group if mistake == "tokens counted over tp" else ranks.dp.group
            distributed.all_reduce(total, group=group)
        wide = returned.double() if returned.dtype is torch.float64 else returned.float()
        square = (wide - 0.5).square().sum(-1)
        if ranks.dp.size > 1 and mistake == "mean of means":
            total = total * ranks.dp.size
        return (square * counts).sum() / total

    return dataclasses.replace(pair, training=Training(loss=loss))


def balanced(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP with an auxiliary loss, the squared means of features over all tokens.

    Like the loss that balances a router's experts, this is not a sum of losses that each rank can compute by itself.
    """
    pair = rows.batches(te, ranks)
    reduces = ranks.dp.size > 1 and mistake != "means of each rank alone"

    def loss(returned: Tensor, x: Tensor) -> Tensor:
        wide = returned.double() if returned.dtype is torch.float64 else returned.float()
        share = 1 / ranks.dp.size
        own = wide.flatten(0, -2).mean(0) * (share if reduces else 1.0)
        means = own.detach().clone()
        if reduces:
            distributed.all_reduce(means, group=ranks.dp.group)
        # The gradient flows only through a rank's own part of the means, and the losses of all ranks are added up.
        aside = means.square().sum() + 2 * (means * (own - own.detach())).sum() * (ranks.dp.size if reduces else 1)
        counts = ranks.dp.size if mistake == "counted on each rank" else 1
        return share * ((wide - 0.5).square().mean() + counts * WEIGHT * aside)

    return dataclasses.replace(pair, training=Training(loss=loss))


def fully_sharded(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP whose weights FSDP2 shards. ``mistake`` may make it reduce gradients in BF16."""
    pair = rows.fsdp(te, dataclasses.replace(ranks, dp=dataclasses.replace(ranks.dp, size=1)))
    if ranks.dp.size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        narrow = torch.bfloat16 if mistake == "gradients reduced in BF16" else None
        mesh = init_device_mesh("cpu", (ranks.dp.size,))
        fully_shard(pair.candidate, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=narrow))
    return pair


class Zero(Optimizer):
    """AdamW with sharded state: each data parallel rank steps its part of every weight in FP32, and all gather it."""

    def __init__(self, module: nn.Module, ranks: Ranks, mistake: str) -> None:
        """Take this rank's part of each parameter."""
        self.whole, self.ranks, self.mistake, self.count = list(module.parameters()), ranks, mistake, 0
        self.own = [nn.Parameter(self._part(one, ranks.dp.rank).float().clone()) for one in self.whole]
        self.inner = AdamW(self.own, **ADAM)
        super().__init__(self.own, dict(self.inner.defaults))
        self.state = self.inner.state

    def _part(self, x: Tensor, of: int) -> Tensor:
        return x.detach().flatten().chunk(self.ranks.dp.size)[of]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the module's gradients."""
        for one in self.whole:
            one.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's part, and gather all parts."""
        mine, size, group = self.ranks.dp.rank, self.ranks.dp.size, self.ranks.dp.group
        of = size - 1 - mine if self.mistake == "gradients of another part" else mine
        for whole, own in zip(self.whole, self.own, strict=True):
            own.grad = None if whole.grad is None else self._part(whole.grad, of).float()
        if self.mistake == "moments of another part" and self.count == 1 and group is not None:
            for own in self.own:  # as if each rank loaded the state that the first one saved
                distributed.broadcast(self.inner.state[own]["exp_avg"], 0, group=group)
        self.inner.step()
        self.count += 1
        for whole, own in zip(self.whole, self.own, strict=True):
            parts = [own.detach().to(whole.dtype)] * size
            if group is not None:
                parts = [torch.empty_like(parts[0]) for _ in range(size)]
                distributed.all_gather(parts, own.detach().to(whole.dtype), group=group)
            if self.mistake == "part not taken over" and self.count == 2 and mine == 1:
                parts[0] = self._part(whole, 0).clone()
            if self.mistake == "parts in another order":
                parts = parts[::-1]
            with torch.no_grad():
                whole.copy_(torch.cat(parts).view(whole.shape))


def divided_optimizer(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP with an optimizer whose state is divided over data parallel ranks."""
    training = Training(candidate_optimizer=lambda model: Zero(model, ranks, mistake))
    return dataclasses.replace(rows.batches(te, ranks), training=training)


def of_torch(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP with PyTorch's ZeroRedundancyOptimizer, which gives each rank some of the parameters."""

    def optimizer(model: nn.Module) -> Optimizer:
        if ranks.dp.group is None:
            return AdamW(model.parameters(), **ADAM)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        made: Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=AdamW, process_group=ranks.dp.group, **ADAM
        )
        return made

    return dataclasses.replace(rows.batches(te, ranks), training=Training(candidate_optimizer=optimizer))


def saved(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP that tensor parallel ranks train, save and load, each rank its own part."""

    def save(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
        own = [optimizer.state_dict()]
        if mistake == "moments of rank 0 on all ranks":
            distributed.broadcast_object_list(own, group=ranks.world.group)
        if mistake == "no moments of rank 1" and ranks.world.rank == 1:
            own[0]["state"] = {}
        torch.save((module.state_dict(), own[0]), file)

    def load(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
        states, own = torch.load(file, weights_only=False)
        if mistake == "no extra state":
            states = {name: x for name, x in states.items() if not name.endswith("_extra_state")}
        module.load_state_dict(states, strict=False)
        optimizer.load_state_dict(own)

    pair = rows.mlp(te, ranks)
    training = dataclasses.replace(pair.training, save=save, load=load)
    return dataclasses.replace(pair, training=training)


def amaxes(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the MLP whose amaxes are reduced over the group that the mistake names."""
    pair = rows.mlp(te, ranks)
    group = ranks.dp.group if mistake == "over dp alone" else None
    return dataclasses.replace(pair, parallel=dataclasses.replace(pair.parallel, amax_group=group))


def with_dp(make: Callable[..., Pair], te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return a pair over tensor parallel ranks, whose batch is also divided over data parallel ranks."""
    pair = make(te, ranks, mistake)
    along, inner = [over("dp", 1)], pair.parallel.finish

    def finish(module: nn.Module) -> None:
        if inner is not None:
            inner(module)
        if ranks.dp.size > 1:
            rows.add_up(list(module.parameters()), ranks.dp.group)

    splits = {"input": [*pair.parallel.split("input"), *along], "output": [*pair.parallel.split("output"), *along]}
    return dataclasses.replace(pair, parallel=dataclasses.replace(pair.parallel, splits=splits, finish=finish))


HOSTS: dict[str, Callable[..., Pair]] = {
    "trained": trained,
    "clipped": clipped,
    "counted tokens": counted_tokens,
    "balanced": balanced,
    "fully sharded": fully_sharded,
    "divided optimizer": divided_optimizer,
    "ZeroRedundancyOptimizer": of_torch,
    "saved": saved,
    "amaxes": partial(with_dp, amaxes),
    "trained mlp": partial(with_dp, rows.mlp),
    "trained layers": rows.layers,
}


SWITCHES: dict[str, Switch] = {"saved": "resume"}
"""Maps hosts that are not trained plainly to their switch."""


def case_of(host: str, mistake: str = "") -> Case:
    """Return the case of a host, with or without a mistake."""
    return Case(f"{host} over ranks", partial(HOSTS[host], mistake=mistake), sizes=({},))


_SHARDS, _APART, _NORM = ("optimizer-shards",), ("replicas-differ",), ("gradient-norm",)

WRONG = (
    Row("trained", "own gradients at step 2", DP, _APART),
    Row("trained", "other weights on rank 1", DP, _APART),
    Row("trained", "other settings on rank 1", DP, _APART),
    Row("clipped", "each rank by its own norm", TP, _NORM),
    Row("clipped", "norm of all gradients, norms counted twice", TP, _NORM),
    Row("clipped", "norm of all gradients, on one rank alone", TP, _NORM),
    Row("counted tokens", "mean of means", DP, ("shares-of-ranks",)),
    Row("counted tokens", "tokens counted over tp", TP_DP, ("shares-of-ranks",)),
    Row("balanced", "means of each rank alone", DP, ("shares-of-ranks",)),
    Row("balanced", "counted on each rank", DP, ("wrong-over-ranks",)),
    Row("divided optimizer", "gradients of another part", DP, _SHARDS),
    Row("divided optimizer", "moments of another part", DP, _SHARDS),
    Row("divided optimizer", "part not taken over", DP, _SHARDS),
    Row("divided optimizer", "parts in another order", DP, _SHARDS),
    Row("fully sharded", "gradients reduced in BF16", DP, ("reduced-in-16-bits",), ("fp32",)),
    Row("saved", "no extra state", TP, ("state-not-saved",), ("fp8_delayed",)),
    Row("saved", "moments of rank 0 on all ranks", TP, ("state-not-saved",)),
    Row("saved", "no moments of rank 1", TP, ("state-not-saved",)),
    Row("amaxes", "over dp alone", TP_DP, ("amax-group",), ("fp8_delayed",)),
)

RIGHT = (
    Row("trained", "", DP),
    Row("clipped", "", TP),
    Row("counted tokens", "", DP),
    Row("counted tokens", "", TP_DP),
    Row("balanced", "", DP),
    Row("divided optimizer", "", DP),
    Row("ZeroRedundancyOptimizer", "", DP, precisions=("fp32",)),
    Row("fully sharded", "", DP),
    Row("saved", "", TP),
    Row("trained mlp", "", TP),
    Row("trained mlp", "", SP),
    Row("trained mlp", "", TP_DP),
    Row("trained layers", "", TP_DP),
)
