"""Measure how much time and memory TransformerEngine needs on the CPU kernels, compared with plain PyTorch.

    python benchmarks/cpu_kernels.py [--only linear attention ...] [--precisions bf16 nvfp4 ...]
                                     [--out benchmarks/results/cpu_kernels.json]

Each row of the table is some work, forward and backward, done by TE at a precision and by plain PyTorch in the same
dtype. The two alternate in one process on one thread, times are processor time, and the ratio is the median over the
repeats. ``compiled`` is the ratio to plain PyTorch after ``torch.compile``, for which there is no aim. Memory is the
most that building the module and two passes add to a process; each side has a process of its own.

A process emulates only one GPU, so a precision runs on the first of ``GPUS`` that has it. If ``--out`` names an
existing file, rows that are not measured are kept from it.

FP16 runs only on request. On a CPU, PyTorch multiplies FP16 up to 60 times slower than FP32, so the ratio says nothing
about the kernels.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Measure, machine, median, parser, processor_seconds, report
from torch import Tensor, nn
from torch.nn import functional

from parity import reference, te
from parity.te import PRECISIONS, Kernels, Precision, why_unavailable
from te_on_cpu import cuda

Pass = Callable[[], object]

GPUS = ("hopper", "blackwell")
DEFAULT = [name for name in PRECISIONS if name != "fp16"]
# Aims for the ratio of the times. All other precisions are FP8.
LIMITS = {"fp32": 1.15, "bf16": 1.15, "nvfp4": 2.5}
FP8_LIMIT = 1.75
MEMORY_LIMIT = 1.1

TOKENS, HEAD_DIM = 1024, 128
EXPERTS, TOP_K, ROUTED = 64, 8, 4096
HEADERS = (
    "work", "precision", "emulated GPU", "TE (s)", "plain (s)", "ratio", "aim", "compiled", "memory", "plain (MiB)"
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One thing that TE and plain PyTorch can both compute.

    Attributes:
        te: returns TE's pass at a precision.
        plain: returns the plain pass in a dtype. Its second argument is applied to the module or function that the
            pass calls; it is ``torch.compile`` or does nothing.
        precisions: the precisions that make a difference to the work; None for all.
    """

    te: Callable[[Kernels, Precision], Pass]
    plain: Callable[[torch.dtype, Callable[[Any], Any]], Pass]
    precisions: tuple[str, ...] | None = None


def of_module(
    kind: Callable[[Kernels], nn.Module],
    plain: Callable[[], nn.Module],
    shape: Sequence[int],
    arguments: Callable[[Kernels], dict[str, Any]] = lambda _: {},
) -> Work:
    """Return the work of a TE module and its plain counterpart, on an input of one shape.

    Args:
        kind: returns TE's module in FP32.
        plain: returns the plain module.
        arguments: returns the keyword arguments with which TE's module is called besides the input.
    """

    def te_pass(kernels: Kernels, precision: Precision) -> Pass:
        module, more = kind(kernels).to(precision.dtype), arguments(kernels)

        def forward(x: Tensor) -> Tensor:
            with precision.autocast(kernels):
                return module(x, **more)

        return forward_and_backward(forward, [*module.parameters()], precision.dtype, shape)

    def plain_pass(dtype: torch.dtype, compiled: Callable[[Any], Any]) -> Pass:
        module = plain().to(dtype)
        return forward_and_backward(compiled(module), [*module.parameters()], dtype, shape)

    return Work(te_pass, plain_pass)


def forward_and_backward(
    forward: Callable[..., Tensor], parameters: Sequence[Tensor], dtype: torch.dtype, *shapes: Sequence[int]
) -> Pass:
    """Return a forward and backward pass on inputs of these shapes, which leaves no gradients behind."""
    inputs = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    gradients: list[Tensor] = []

    def work() -> None:
        y = forward(*inputs)
        if not gradients:
            gradients.append(torch.randn_like(y))
        y.backward(gradients[0])
        for tensor in (*inputs, *parameters):
            tensor.grad = None

    return work


class PlainExperts(nn.Module):
    """One linear layer for each expert, called one after the other."""

    def __init__(self, hidden: int, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows = list(rows)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in rows)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.rows)
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)])


def linear(hidden: int) -> Work:
    return of_module(
        lambda kernels: kernels.te.Linear(hidden, hidden),
        lambda: nn.Linear(hidden, hidden),
        (TOKENS, hidden),
    )


def layernorm_linear(hidden: int) -> Work:
    return of_module(
        lambda kernels: kernels.te.LayerNormLinear(hidden, hidden),
        lambda: reference.NormLinear(nn.LayerNorm(hidden), hidden, hidden),
        (TOKENS, hidden),
    )


def layernorm_mlp(hidden: int) -> Work:
    return of_module(
        lambda kernels: kernels.te.LayerNormMLP(hidden, 4 * hidden),
        lambda: reference.MLP(hidden, 4 * hidden),
        (TOKENS, hidden),
    )


def transformer_layer(hidden: int) -> Work:
    """Return the work of a layer like LLaMA's: RMSNorm, RoPE, grouped queries and SwiGLU."""
    heads, ffn = hidden // HEAD_DIM, hidden * 11 // 4
    return of_module(
        lambda kernels: kernels.te.TransformerLayer(
            hidden, ffn, heads, num_gqa_groups=heads // 4, normalization="RMSNorm", activation="swiglu", bias=False,
            hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
        ),
        lambda: reference.LlamaLayer(hidden, ffn, heads, heads // 4),
        (2, TOKENS // 2, hidden),
        lambda kernels: {"rotary_pos_emb": kernels.te.RotaryPositionEmbedding(HEAD_DIM)(TOKENS // 2)},
    )  # fmt: skip


def grouped_linear(hidden: int) -> Work:
    """Return the work of the experts' layers for ``ROUTED`` tokens that go to ``TOP_K`` experts each."""
    rows = [ROUTED * TOP_K // EXPERTS] * EXPERTS
    return of_module(
        lambda kernels: kernels.te.GroupedLinear(EXPERTS, hidden, hidden, bias=False),
        lambda: PlainExperts(hidden, rows),
        (sum(rows), hidden),
        lambda _: {"m_splits": rows},
    )


def attention(seq: int) -> Work:
    heads = 8

    def te_pass(kernels: Kernels, precision: Precision) -> Pass:
        core = kernels.te.DotProductAttention(heads, HEAD_DIM, attention_dropout=0.0, qkv_format="bshd")
        return forward_and_backward(core, [], precision.dtype, *[(1, seq, heads, HEAD_DIM)] * 3)

    def plain_pass(dtype: torch.dtype, compiled: Callable[[Any], Any]) -> Pass:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return y.transpose(1, 2).flatten(2)

        return forward_and_backward(compiled(attend), [], dtype, *[(1, seq, heads, HEAD_DIM)] * 3)

    return Work(te_pass, plain_pass, ("fp32", "bf16"))


def adam(tensors: int) -> Work:
    """Return a step of AdamW over as many weights as biases; BF16 parameters have FP32 master weights."""
    shapes = [(512, 512), (512,)] * (tensors // 2)

    def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
        made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        for parameter in made:
            parameter.grad = torch.randn_like(parameter)
        return made

    def te_pass(kernels: Kernels, precision: Precision) -> Pass:
        masters = precision.dtype != torch.float32
        optimizer = kernels.te.optimizers.FusedAdam(parameters(precision.dtype), master_weights=masters)
        return optimizer.step

    def plain_pass(dtype: torch.dtype, compiled: Callable[[Any], Any]) -> Pass:
        own = parameters(dtype)
        masters = own if dtype == torch.float32 else [nn.Parameter(each.detach().float()) for each in own]
        optimizer = torch.optim.AdamW(masters)

        def step() -> None:
            if masters is not own:
                for master, each in zip(masters, own, strict=True):
                    master.grad = each.grad.float()
            optimizer.step()
            if masters is not own:
                with torch.no_grad():
                    torch._foreach_copy_(own, masters)

        return compiled(step)

    return Work(te_pass, plain_pass, ("fp32", "bf16"))


def permutation(hidden: int) -> Work:
    """Return the permutation of tokens to their experts and back, weighted by the routing probabilities."""
    probabilities = torch.rand(ROUTED, EXPERTS, generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros(ROUTED, EXPERTS, dtype=torch.bool).scatter_(1, probabilities.topk(TOP_K).indices, True)
    probabilities = probabilities * chosen

    def te_pass(kernels: Kernels, precision: Precision) -> Pass:
        def there_and_back(x: Tensor) -> Tensor:
            rows, where = kernels.te.moe_permute(x, chosen.int(), num_out_tokens=ROUTED * TOP_K, map_type="mask")
            return kernels.te.moe_unpermute(rows, where, probabilities, x.shape, map_type="mask")

        return forward_and_backward(there_and_back, [], precision.dtype, (ROUTED, hidden))

    def plain_pass(dtype: torch.dtype, compiled: Callable[[Any], Any]) -> Pass:
        def there_and_back(x: Tensor) -> Tensor:
            experts, tokens = chosen.t().nonzero(as_tuple=True)
            rows = x.index_select(0, tokens)
            weighted = rows * probabilities[tokens, experts, None].to(dtype)
            return torch.zeros_like(x).index_add(0, tokens, weighted)

        return forward_and_backward(compiled(there_and_back), [], dtype, (ROUTED, hidden))

    return Work(te_pass, plain_pass, ("fp32", "bf16"))


WORKS: dict[str, Callable[[], Work]] = {
    f"{make.__name__} {size}": (lambda make=make, size=size: make(size))
    for make, sizes in (
        (linear, (2048, 4096)),
        (layernorm_linear, (2048, 4096)),
        (layernorm_mlp, (2048, 4096)),
        (transformer_layer, (2048, 4096)),
        (grouped_linear, (1024,)),
        (attention, (4096,)),
        (adam, (400,)),
        (permutation, (2048,)),
    )
    for size in sizes
}


def rows_on(gpu: str, name: str, precisions: Sequence[str], repeats: int, compiles: bool) -> list[list[str]]:
    """Return the rows of one work at those of the precisions that an emulated GPU has; runs in a new process."""
    torch.set_num_threads(1)
    os.environ[cuda.GPU_VARIABLE] = gpu
    kernels, work = te.kernels("cpu"), WORKS[name]()
    wanted = [PRECISIONS[each] for each in precisions if work.precisions is None or each in work.precisions]
    offered = [each for each in wanted if why_unavailable(each, kernels) is None]
    # Memory is measured before any pass, because the process would keep the memory of a pass and use it again.
    memory = {each.name: [added_memory(work, side, each) for side in ("te", "plain")] for each in offered}
    return [row(name, gpu, work, each, memory[each.name], repeats, compiles) for each in offered]


def row(
    name: str, gpu: str, work: Work, precision: Precision, memory: Sequence[int], repeats: int, compiles: bool
) -> list[str]:
    sides = [work.te(te.kernels("cpu"), precision), work.plain(precision.dtype, lambda what: what)]
    if compiles and precision.recipe is None:
        sides.append(work.plain(precision.dtype, torch.compile))
    for side in sides:  # lets the scales of delayed scaling settle, and compiles code
        for _ in range(2):
            side()
    rounds = [[processor_seconds(side) for side in sides] for _ in range(repeats)]
    ours, plain, *_ = (median(seconds) for seconds in zip(*rounds, strict=True))
    ratios = [median([each[0] / each[other] for each in rounds]) for other in range(1, len(sides))]
    compiled = f"{ratios[1]:.2f}" if len(ratios) == 2 else ""
    return [
        name, precision.name, gpu, f"{ours:.3f}", f"{plain:.3f}", f"{ratios[0]:.2f}", f"{limit(precision.name)}",
        compiled, f"{memory[0] / memory[1]:.2f}", f"{memory[1] / 2**20:.0f}",
    ]  # fmt: skip


def limit(precision: str) -> float:
    return LIMITS.get(precision, FP8_LIMIT)


def added_memory(work: Work, side: str, precision: Precision) -> int:
    """Return how many bytes building the module and two passes add to the peak memory of a forked process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def grow() -> None:
        small = of_module(lambda kernels: kernels.te.Linear(256, 256), lambda: nn.Linear(256, 256), (256, 256))
        small.te(te.kernels("cpu"), precision)()  # so that imports which TE makes in its first pass do not count
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from now on
        before = _peak()
        made = work.te(te.kernels("cpu"), precision) if side == "te" else work.plain(precision.dtype, lambda what: what)
        for _ in range(2):
            made()
        theirs.send(_peak() - before)

    process = multiprocessing.get_context("fork").Process(target=grow)
    process.start()
    theirs.close()
    grown: int = ours.recv()
    process.join()
    return grown


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measures(rows: Sequence[Sequence[str]]) -> Iterator[Measure]:
    """Yield the worst ratio of the times at each precision, and the worst ratio of memory."""
    at = {header: index for index, header in enumerate(HEADERS)}
    for precision in PRECISIONS:
        own = [each for each in rows if each[at["precision"]] == precision]
        if own:
            worst = max(own, key=lambda each: float(each[at["ratio"]]))
            kept = sum(float(each[at["ratio"]]) <= limit(precision) for each in own)
            what = (
                f"TE's time over the plain one, {precision}: the worst ({worst[0]}; {kept} of {len(own)} keep the aim)"
            )
            yield Measure(what, float(worst[at["ratio"]]), limit(precision))
    worst = max(rows, key=lambda each: float(each[at["memory"]]))
    kept = sum(float(each[at["memory"]]) <= MEMORY_LIMIT for each in rows)
    what = f"TE's memory over the plain one: the worst ({worst[0]}, {worst[1]}; {kept} of {len(rows)} keep the aim)"
    yield Measure(what, float(worst[at["memory"]]), MEMORY_LIMIT)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--only", nargs="+", default=[""], metavar="WORK", help="works whose names begin so")
    made.add_argument("--precisions", nargs="+", default=DEFAULT, choices=list(PRECISIONS), metavar="PRECISION")
    made.add_argument("--without-compiled", action="store_true", help="leave out torch.compile")
    arguments = made.parse_args()
    out = arguments.out
    held = json.loads(out.read_text(encoding="utf-8"))["rows"] if out is not None and out.exists() else []
    found = {(each[0], each[1]): each for each in held if len(each) == len(HEADERS)}
    for name in WORKS:
        if not name.startswith(tuple(arguments.only)):
            continue
        missing = list(arguments.precisions)
        for gpu in GPUS:
            for each in in_new_process(rows_on, gpu, name, missing, arguments.repeats, not arguments.without_compiled):
                print(" | ".join(each), flush=True)
                found[name, each[1]] = each
                missing.remove(each[1])
    rows = [found[name, each] for name in WORKS for each in PRECISIONS if (name, each) in found]
    report(__doc__, [*measures(rows)], HEADERS, rows, out, machine(1, "cpu"))


if __name__ == "__main__":
    main()
