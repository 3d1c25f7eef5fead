"""Pairs over the stages of a pipeline, right ones and the same with a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lab.corpus.ranked_ports.ranks import BATCH, HIDDEN, OF_MLP, SEQ, Row, Swiglu, add_up, te_mlp
from parity.case.case import Case, Pair
from parity.case.weight_map import names, stack
from parity.ranks.layout import Parallel, Pipeline, Ranks, Stage, over

VOCABULARY, LAYERS = 96, 4


class _Whole(nn.Module):
    """An embedding, gated MLPs, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Swiglu() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[seq, batch]`` to ``[seq, batch, VOCABULARY]``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


class _Stage(nn.Module):
    """Some of the layers, with the embedding on the first stage and the head on the last."""

    def __init__(self, te: ModuleType, ranks: Ranks, layers: list[int], is_counted: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if ranks.pp.rank == 0 else None
        numbers = range(len(layers)) if is_counted else layers
        self.layers = nn.ModuleDict({str(number): te_mlp(te, ranks) for number in numbers})
        is_last = ranks.pp.rank == ranks.pp.size - 1
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False) if is_last else None
        if ranks.pp.size == 1:
            self.head.weight = self.embedding.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Map ids, or the output of the stage before."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def staged(te: ModuleType, ranks: Ranks, mistake: str = "") -> Pair:
    """Return the model, divided into as many stages as there are pipeline parallel ranks."""
    mine, count = ranks.pp.rank, LAYERS // ranks.pp.size
    place = ranks.pp.size - 1 - mine if mistake == "stages in another order" else mine
    layers = list(range(place * count, (place + 1) * count))
    if mistake == "a layer on no stage" and mine == 1:
        layers = layers[1:]
    is_counted = mistake in ("layers counted on each stage", "each stage loads the first layers")
    reference, candidate = _Whole(), _Stage(te, ranks, layers, is_counted)
    loads = mistake == "each stage loads the first layers"
    if loads:
        _load(reference, candidate, 0 if ranks.pp.size > 1 else layers[0])

    def finish(module: nn.Module) -> None:
        if ranks.pp.size > 1 and mistake != "tied gradients not summed":
            own = [one for name, one in module.named_parameters() if name in ("embedding.weight", "head.weight")]
            gradient = own[0].grad if own else torch.zeros(VOCABULARY, HIDDEN, dtype=next(module.parameters()).dtype)
            for _ in range(2 if mistake == "tied gradients summed twice" else 1):
                distributed.all_reduce(gradient, group=ranks.pp.group)
        if ranks.dp.size > 1:
            add_up(list(module.parameters()), ranks.dp.group)

    def counted(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", lambda at: str(int(at[0]) + layers[0]), name)

    weights: dict[Any, Any] = {"embedding.weight": "embedding.weight"}
    for i in range(LAYERS):
        for left, right in OF_MLP.items():
            weights[_in_layer(i, left)] = _in_layer(i, right)
    step = OWN_STEPS.get(mistake)
    pipeline = Pipeline(
        micro_batches=1 if mistake == "whole batch" else MICRO_BATCHES,
        dim=1,
        names=counted if is_counted else None,
        step=partial(step, ranks) if step else None,
    )
    return Pair(
        reference=reference,
        candidate=candidate,
        inputs=lambda rng: rng.integers(SEQ, BATCH, high=VOCABULARY),
        weights=weights,
        fill=False if loads else None,
        parallel=Parallel({"input": [over("dp", 1)], "output": [over("dp", 1)]}, finish=finish, pipeline=pipeline),
    )


def _in_layer(i: int, side: Any) -> Any:
    return f"layers.{i}.{side}" if isinstance(side, str) else stack(*(f"layers.{i}.{name}" for name in names(side)))


def _load(reference: _Whole, candidate: _Stage, first: int) -> None:
    """Load the reference's weights into a stage whose first layer is ``first``."""
    with torch.no_grad():
        for one in (candidate.embedding, candidate.head):
            if one is not None:
                one.get_parameter("weight").copy_(reference.embedding.weight)
        for i, layer in enumerate(candidate.layers.values()):
            of = reference.layers[first + i]
            layer.get_parameter("layer_norm_weight").copy_(of.get_parameter("norm.weight"))
            gate_and_up: list[Tensor] = [of.get_parameter(f"{name}.weight") for name in ("gate", "up")]
            layer.get_parameter("fc1_weight").copy_(torch.cat(gate_and_up))
            layer.get_parameter("fc2_weight").copy_(of.get_parameter("down.weight"))


# Schedules that a port brings along.

MICRO_BATCHES = 2


def _of_torch(
    ranks: Ranks, module: nn.Module, x: Tensor, *, target: Tensor, loss: Callable[..., Tensor], scaled: bool = False
) -> Tensor | None:
    """Run PyTorch's schedule, which divides gradients by the number of micro-batches if ``scaled``."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    stage = PipelineStage(module, ranks.pp.rank, ranks.pp.size, x.device, group=ranks.pp.group)
    along = TensorChunkSpec(1)
    schedule = ScheduleGPipe(
        stage,
        MICRO_BATCHES,
        loss_fn=lambda y, part: loss(y, part.transpose(0, 1)),  # it only splits targets along their first dimension
        args_chunk_spec=(along,) if ranks.pp.rank == 0 else None,
        output_merge_spec=(along,),
        scale_grads=scaled,
    )
    is_last = ranks.pp.rank == ranks.pp.size - 1
    given = (x,) if ranks.pp.rank == 0 else ()
    returned = schedule.step(*given, target=target.transpose(0, 1) if is_last else None)
    return None if returned is None else returned[0]


def _losing(
    ranks: Ranks, module: nn.Module, x: Tensor, *, target: Tensor, loss: Callable[..., Tensor]
) -> Tensor | None:
    """Run all micro-batches, but leave the last one out of the loss."""
    stage = Stage(Pipeline(MICRO_BATCHES, dim=1), ranks.pp)
    y: Tensor | None = stage.forward(None, module, x)
    if y is not None:
        some = list(zip(y.chunk(MICRO_BATCHES, 1), target.chunk(MICRO_BATCHES, 1), strict=True))
        torch.stack([loss(*one) for one in some[:-1]]).sum().backward()
    stage.backward()
    return y


OWN_STEPS: dict[str, Callable[..., Tensor | None]] = {
    "PyTorch's schedule": _of_torch,
    "PyTorch's schedule, scaled": partial(_of_torch, scaled=True),
    "a micro-batch without its loss": _losing,
}

HOSTS: dict[str, Callable[..., Pair]] = {"stages": staged}


def case_of(host: str, mistake: str = "") -> Case:
    """Return the case of a host, with or without a mistake."""
    return Case(f"{host} over ranks", partial(HOSTS[host], mistake=mistake), sizes=({},))


PP, PP_4, PP_DP = dict(pp=2), dict(pp=4), dict(dp=2, pp=2)
# PyTorch finds the shapes that stages exchange by passes over uninitialised memory, whose amaxes delayed scaling keeps.
WITHOUT_HISTORY = ("fp32", "bf16", "fp16", "fp8_current", "fp8_block")
_STAGES, _TIED, _BATCHES = ("stages",), ("tied-over-stages",), ("micro-batches",)

WRONG = (
    Row("stages", "tied gradients not summed", PP, _TIED),
    Row("stages", "tied gradients not summed", PP_4, _TIED),
    Row("stages", "tied gradients summed twice", PP, _TIED),
    Row("stages", "stages in another order", PP, _STAGES),
    Row("stages", "a layer on no stage", PP, _STAGES),
    Row("stages", "each stage loads the first layers", PP, _STAGES),
    Row("stages", "a micro-batch without its loss", PP, _BATCHES),
    Row("stages", "PyTorch's schedule, scaled", PP, _BATCHES, WITHOUT_HISTORY),
)

RIGHT = (
    Row("stages", "whole batch", PP),
    Row("stages", "", PP),
    Row("stages", "", PP_4),
    Row("stages", "", PP_DP),
    Row("stages", "layers counted on each stage", PP),
    Row("stages", "PyTorch's schedule", PP, precisions=WITHOUT_HISTORY),
)
