"""List ports that are known to be right, for fitting limits and counting false alarms, and draw models and sizes.

The right ports are the cases in files of pairs, the zoo's hosts, and models drawn at random. The drawn models stand for
users' models. Each is a chain of the zoo's hosts, with the same lines of plain PyTorch between them on both sides, as a
port has between TE's modules. No limit is fitted to them, so that they show how often parity rejects a right port of a
model that it has never seen.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.case import registry
from parity.case.case import Case, Pair, Rng, Size
from parity.case.weight_map import Side, under
from parity.measuring.hosts import HOSTS
from parity.te import Precision

# Models drawn at random: right ports of random blocks, with plain lines between them and often a loss at the end.


COUNT = 60
SIZE = dict(batch=2, seq=32, hidden=64, ffn=128, heads=4, groups=2)
_MOST_BLOCKS = 4

# Hosts that take and return ``[batch, seq, hidden]``: those that a recipe quantizes, and norms.
_QUANTIZED = (
    "square_linear",
    "gelu_mlp",
    "erf_gelu_mlp",
    "swiglu_mlp",
    "clamped_swiglu_mlp",
    "attention",
    "interleaved_qkv_attention",
    "stacked_qkv_attention",
    "meta_rope_attention",
    "partial_rope_attention",
    "gpt_layer",
    "parallel_layer",
    "llama_layer",
)
_NORMS = ("layernorm", "rmsnorm", "zero_centered_rmsnorm")


def _rms_in_fp32(x: Tensor, y: Tensor) -> Tensor:
    wide = y.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(y)


# The lines that may follow a block, as functions of the block's input and output.
_LINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, y: y,
    "residual": lambda x, y: x + y,
    "scaled residual": lambda x, y: x + 0.5 * y,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "larger": torch.maximum,
    "gelu": lambda x, y: F.gelu(y),
    "silu": lambda x, y: F.silu(y),
    "relu": lambda x, y: F.relu(y),
    "leaky relu": lambda x, y: F.leaky_relu(y, 0.1),
    "elu": lambda x, y: F.elu(y),
    "hardswish": lambda x, y: F.hardswish(y),
    "softplus": lambda x, y: F.softplus(y),
    "tanh": lambda x, y: torch.tanh(y),
    "clamp": lambda x, y: y.clamp(-1.0, 1.0),
    "softmax": lambda x, y: y.softmax(-1) * y.shape[-1],
    "unit vectors": lambda x, y: F.normalize(y, dim=-1) * y.shape[-1] ** 0.5,
    "rms in FP32": _rms_in_fp32,
    "next token": lambda x, y: y.roll(1, 1),
    "halves exchanged": lambda x, y: torch.cat(y.chunk(2, -1)[::-1], -1),
    "mean of tokens": lambda x, y: x + y.mean(1, keepdim=True),
}
# What the model returns, computed from the last block's line and, for a loss, a target of the same shape.
_ENDS: dict[str, Callable[[Tensor], Any]] = {
    "tokens": lambda x: x,
    "mean": lambda x: x.mean(1),
    "largest": lambda x: x.amax(1),
    "tokens and their mean": lambda x: (x, x.mean(1)),
}
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": lambda x, target: F.mse_loss(x.float(), target.float()).view(1),
    "cross-entropy": lambda x, target: F.cross_entropy(x.float().flatten(0, 1), target.argmax(-1).flatten()).view(1),
    "cosine": lambda x, target: F.cosine_similarity(x.float(), target.float(), dim=-1).mean().view(1),
}


class Chain(nn.Module):
    """Blocks, each followed by a line of plain PyTorch, and an end.

    Args:
        blocks: modules that take and return ``[batch, seq, hidden]``.
        calls: how each block is called.
        lines: names in ``_LINES``, one for each block.
        end: a name in ``_ENDS`` or ``_LOSSES``.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        calls: Sequence[Callable[[nn.Module, Tensor], Tensor]],
        lines: Sequence[str],
        end: str,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.calls, self.lines, self.end = calls, lines, end

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        """Take ``[batch, seq, hidden]``, and a target of the same shape if the end is a loss."""
        for block, call, line in zip(self.blocks, self.calls, self.lines, strict=True):
            x = _LINES[line](x, call(block, x))
        return _ENDS[self.end](x) if target is None else _LOSSES[self.end](x, target)


def _draw_model(number: int) -> Case:
    rng = random.Random(f"model {number}")
    hosts = [rng.choice(_QUANTIZED)]
    hosts += rng.choices((*_QUANTIZED, *_NORMS), k=rng.randrange(_MOST_BLOCKS))
    rng.shuffle(hosts)
    lines = rng.choices(list(_LINES), k=len(hosts))
    end = rng.choice([*_ENDS, *_LOSSES])
    return Case(
        f"model_{number:03}",
        partial(_build_pair, hosts, lines, end),
        sizes=(SIZE,),
        path=Path(inspect.getfile(_build_pair)),
    )


def _build_pair(hosts: Sequence[str], lines: Sequence[str], end: str, te: ModuleType, hidden: int, **size: int) -> Pair:
    pairs = [HOSTS[host].build(te, {**size, "hidden": hidden, "width": hidden}) for host in hosts]
    weights: dict[Side, Side] = {}
    for index, pair in enumerate(pairs):
        weights |= under(pair.weights, f"blocks.{index}.")

    def inputs(rng: Rng, batch: int, seq: int) -> Any:
        x = rng.normal(batch, seq, hidden)
        return (x, rng.normal(batch, seq, hidden)) if end in _LOSSES else x

    return Pair(
        reference=Chain(
            [pair.reference for pair in pairs], [_choose_call(pair.call_reference) for pair in pairs], lines, end
        ),
        candidate=Chain(
            [pair.candidate for pair in pairs], [_choose_call(pair.call_candidate) for pair in pairs], lines, end
        ),
        weights=weights,
        inputs=inputs,
    )


def _choose_call(call: Callable[..., Any] | None) -> Callable[[nn.Module, Tensor], Tensor]:
    return call or (lambda module, x: module(x))


MODELS = {case.name: case for case in map(_draw_model, range(COUNT))}


# Sizes drawn at random: a right port must pass at any size.


# A recipe's blocks must divide the dimensions of its GEMMs. 32 suits all but the blocks of 128, which TE pads.
QUANTIZED_MULTIPLE = 32
_WIDTHS = ("width", "out", "hidden", "ffn", "vocabulary", "in_features", "out_features")
_HEADS = (1, 2, 4, 6, 8)
_HEAD_DIMS = (16, 32, 64)
# A larger batch is kept as it is, since a host that splits its batch needs a certain size.
_LARGEST_FREE_BATCH = 8


def drawn(case: Case, precision: Precision, seed: int) -> Size:
    """Draw a size of a case for a seed: one for all recipes, and one for all other precisions, which share golden."""
    quantized = precision.recipe is not None
    return like(case.sizes[0], quantized, random.Random(f"{case.name} {seed} {quantized}"))


def like(size: Size, quantized: bool, rng: random.Random) -> dict[str, int]:
    """Return a size like another, with every dimension drawn anew.

    Args:
        size: batch, seq, heads, groups, head_dim, seq_kv, hidden and other widths, each optional; other entries are
            kept.
        quantized: whether the dimensions of GEMMs must be multiples of ``QUANTIZED_MULTIPLE``.
        rng: the source of randomness.

    Returns:
        A size whose groups divide its heads, whose hidden dimension is a multiple of its heads, and that has no fewer
        keys than queries.
    """
    multiple = QUANTIZED_MULTIPLE if quantized else 1
    found = dict(size)
    # Both are drawn even if the size has neither, so that the same seed always gives the same widths.
    batch = rng.randint(1, 4) if found.get("batch", 0) <= _LARGEST_FREE_BATCH else found["batch"]
    seq = multiple * rng.randint(1, 5) if quantized else rng.randint(2, 160)
    found |= {name: value for name, value in (("batch", batch), ("seq", seq)) if name in size}
    for width in _WIDTHS:
        if width in size:
            found[width] = multiple * rng.randint(1, 12) if quantized else 4 * rng.randint(4, 96)
    if "heads" in size:
        found["heads"] = rng.choice(_HEADS)
        head_dim = rng.choice([dim for dim in _HEAD_DIMS if dim % multiple == 0])
        if "head_dim" in size:
            found["head_dim"] = head_dim
        if "hidden" in size:
            found["hidden"] = found["heads"] * head_dim
    if "groups" in size:
        found["groups"] = rng.choice([groups for groups in _HEADS if found["heads"] % groups == 0])
    if "seq_kv" in size:
        found["seq_kv"] = found["seq"] + 16 * rng.randint(1, 4)
    return found


# Ports that are known to be right, to which limits are fitted and on which false alarms are counted.


# These names take the place of a file: one stands for the right ports into which the zoo plants its bugs, the other for
# the models drawn at random, to which no limit is fitted.
ZOO = "parity.measuring.hosts"
DRAWN_MODELS = "parity.measuring.right_ports"
_OURS = {ZOO: HOSTS, DRAWN_MODELS: MODELS}
# No limit is fitted to these, because what to expect of them is known only once the port is seen
# (``parity.comparison``). Adam's first steps divide gradients by their own magnitude, so that rounding may decide a
# whole step. Rounding may also decide which expert a token goes to.
_UNFIT = ("trained_linear", "mixture")


def cases(file: str) -> list[Case]:
    """Return the cases of a file, or the one that a pytest id names.

    Raises:
        UserError: as for ``registry.load``.
    """
    return list(_OURS[file].values()) if file in _OURS else registry.load(file)


def fitted(file: str) -> list[Case]:
    """Return the cases of a file that limits are fitted to.

    Raises:
        UserError: as for ``registry.load``.
    """
    return [case for case in cases(file) if file not in _OURS or case.name not in _UNFIT]


def case(file: str, name: str) -> Case:
    """Return a case of a file by its name.

    Raises:
        UserError: as for ``registry.load_case``.
    """
    return _OURS[file][name] if file in _OURS else registry.load_case(file.partition("::")[0], name)
