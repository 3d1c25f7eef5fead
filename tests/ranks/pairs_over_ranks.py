"""Pairs that each rank makes anew, in a file of their own because a rank imports all that a pair's file imports."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import accumulate

import torch
from torch import nn

import parity
from lab.corpus.ranked_ports.ranks import add_up
from parity.ranks.layout import over


def linear(te, ranks, mishap=""):
    def call(module, x):
        if ranks.world.rank == 1 and ranks.world.size > 1:
            if mishap == "raises":
                raise RuntimeError("no memory left")
            if mishap == "dies":
                os._exit(3)
            if mishap == "hangs":
                time.sleep(1000)
        y = module(x)
        if mishap == "drifts":
            y = y * (1.0 + 2.0**-7 * ranks.world.rank)
        return y * 1.1 if mishap == "is wrong by itself" else y

    return parity.Pair(
        reference=nn.Linear(32, 32),
        candidate=te.Linear(32, 32),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"weight": "weight", "bias": "bias"},
        call_candidate=call,
        parallel=parity.Parallel(
            splits={"x": []} if mishap == "names no input" else {},
            weights={"weigth": [over("tp", dim=0)]} if mishap == "names no weight" else {},
        ),
    )


def dropping(te, ranks, p=0.5, is_declared=True):
    module = nn.Sequential(te.Linear(32, 32), nn.Dropout(p))
    return parity.Pair(
        reference=nn.Sequential(nn.Linear(32, 32), nn.Dropout(p)),
        candidate=module,
        inputs=lambda rng: rng.normal(16, 32),
        weights={"0.weight": "0.weight", "0.bias": "0.bias"},
        parallel=parity.Parallel(
            splits={"input": [over("dp")], "output": [over("dp")]},
            finish=lambda module: ranks and add_up(list(module.parameters()), ranks.dp.group),
            dropout=is_declared,
        ),
    )


def faked(te, ranks, folder):
    import nvdlfw_inspect.api as debug_api

    if debug_api.DEBUG_MANAGER is None:
        of_layer = {"gemms": ["fprop"], "tensors": ["activation", "weight"], "quant_format": "FP8E5M2"}
        fake = {"FakeQuant": {"enabled": True, **of_layer}}
        config = {"one": {"enabled": True, "layers": {"layer_types": ["linear"]}, "transformer_engine": fake}}
        features = os.path.join(os.path.dirname(os.path.dirname(te.__file__)), "debug", "features")
        debug_api.initialize(config, feature_dirs=[features], log_dir=folder)
    return parity.Pair(
        reference=nn.Linear(32, 32),
        candidate=te.Linear(32, 32, name="linear"),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"weight": "weight", "bias": "bias"},
        parallel=parity.Parallel(
            splits={"input": [over("dp")], "output": [over("dp")]},
            finish=lambda module: ranks and add_up(list(module.parameters()), ranks.dp.group),
        ),
    )


EXPERTS, CHOICES, TOKENS, HIDDEN = 4, 2, 16, 32


class Experts(nn.Module):
    """A router, and linear experts whose results are added by its weights; this is the rule, one expert at a time."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = route(self.router, x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True).to(x.dtype)
            y = y + expert(x) * share
        return y


def route(router, x):
    weights, chosen = router(x).float().softmax(-1).topk(CHOICES)
    return weights, chosen


class ExpertsByTe(nn.Module):
    """The same with TE's API for expert parallelism, each rank with some of the experts."""

    def __init__(self, te, ranks, mistake, alignment, capacity):
        super().__init__()
        self.ep, self.mistake, self.alignment, self.capacity = ranks.ep, mistake, alignment, capacity
        self.local = EXPERTS // ranks.ep.size
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = te.GroupedLinear(self.local, HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        if self.ep.size == 1:
            return Experts.forward(self.as_reference(), x)
        from transformer_engine.pytorch import ep

        if not ep.is_ep_bootstrapped():
            ep.ep_bootstrap(self.ep.group, EXPERTS, len(x), HIDDEN, CHOICES, self.capacity)
        weights, chosen = route(self.router, x)
        if self.mistake == "experts exchanged":
            chosen = (chosen + self.local) % EXPERTS
        if self.mistake == "tokens dropped":
            chosen = chosen.masked_fill((torch.arange(len(x)) % 4 == 0)[:, None] & (chosen == 0), -1)
        sizes = len(x), HIDDEN, self.local, self.capacity
        buffer = ep.EpBuffer(CHOICES, *sizes, alignment=self.alignment)
        tokens, shares, counts = ep.ep_dispatch(buffer, x, chosen, weights)
        rows = int(counts.sum())
        y = self.experts(tokens[:rows], counts.tolist())
        if self.mistake != "weights not applied":
            y = y * shares[:rows, None].to(y.dtype)
        y = nn.functional.pad(y, (0, 0, 0, len(tokens) - rows))
        return ep.ep_combine(buffer, y, num_local_tokens=len(x))

    def as_reference(self):
        """Return this one rank's modules as ``Experts`` has them."""
        held = nn.Module()
        held.router = self.router
        held.experts = [partial(self.apply_expert, number) for number in range(EXPERTS)]
        return held

    def apply_expert(self, number, x):
        splits = [len(x) if each == number else 0 for each in range(EXPERTS)]
        return self.experts(x, splits)


def experts_by_te(te, ranks, mistake="", alignment=0, capacity=None):
    return parity.Pair(
        reference=Experts(),
        candidate=ExpertsByTe(te, ranks, mistake, alignment, capacity),
        inputs=lambda rng: rng.normal(TOKENS * 4, HIDDEN),
        weights={
            "router.weight": "router.weight",
            **{f"experts.{i}.weight": f"experts.weight{i}" for i in range(EXPERTS)},
        },
        parallel=parity.Parallel(
            splits={"input": [over("ep")], "output": [over("ep")]},
            finish=lambda module: ranks and add_up(list(module.router.parameters()), ranks.ep.group),
        ),
    )


LENGTHS = (33, 58, 21)


class CausalDocuments(nn.Module):
    """Causal attention within each of the documents that are packed one after the other."""

    def forward(self, q, k, v):
        documents = (x.transpose(0, 1).split(LENGTHS, 1) for x in (q, k, v))
        attended = [nn.functional.scaled_dot_product_attention(*one, is_causal=True) for one in zip(*documents)]  # noqa: B905
        return torch.cat(attended, 1).transpose(0, 1).flatten(1)


def packed(te, ranks, strategy="NO_LOAD_BALANCE", balanced=False):
    """Return attention to packed documents, whose tokens ranks hold as ``balanced`` says and TE as ``strategy``."""
    module = te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0)
    if ranks.cp.size > 1:
        module.set_context_parallel_group(
            ranks.cp.group,
            list(ranks.cp.ranks),
            ranks.stream(),
            "all_gather",
            load_balancing_strategy=te.CPLoadBalancingStrategy[strategy],
        )
    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    options = dict.fromkeys(names, ends) | {"max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    along = [over("cp", 0, balanced=balanced)]
    return parity.Pair(
        reference=CausalDocuments(),
        candidate=module,
        inputs=lambda rng: tuple(rng.normal(sum(LENGTHS), 4, 16) for _ in range(3)),
        call_candidate=lambda module, q, k, v: module(q, k, v, **options),
        parallel=parity.Parallel(dict.fromkeys(("q", "k", "v", "output"), along)),
    )
