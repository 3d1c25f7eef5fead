"""Expected margin of error: how far a faithful port is from FP64, by TE module, precision, width, length and depth.

TransformerEngine issue 407 asks which differences are normal. The study measures the error of each module on TE's
kernels, and predicts it with ``parity.rounding``, which knows nothing of TE. It varies the hidden size, the sequence
length and the number of modules in a row, and fits a power law in the three. To break the error down, it applies each
kind of rounding alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from lab.studies.settings import check_names, gpu_with, why_nowhere
from lab.studies.te_modules import AS_TE, MODULES, Shape, placed, pooled_relative_l2
from parity import te
from parity.case import transfer
from parity.case.case import Rng
from parity.case.validate import CheckedSize
from parity.cases import mlp
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.numerics.formats import PARTS
from parity.passes.all_passes import Tensors, model_tensors, run_candidate, tensors_of
from parity.passes.prepare import build, prepare, rounded_inputs, share_rounded_weights
from parity.te import PRECISIONS, Kernels
from parity.user_error import UserError
from te_on_cpu import tensor_cores

# Issue 407 repeated with many seeds: from which distribution are the reporter's two figures, each a single draw?
#
# The reporter compares a SwiGLU MLP with ``LayerNormMLP`` (hidden 512, ffn 1536, weights N(0, 0.023), input ``rand(2,
# 1024, 512)``) by the sum of all outputs, and ``Linear(100, 5)`` with TE's by ``torch.allclose``.


FIGURE, AFTER_REPAIR = -0.1887, -140.2
# Features and input shape of two linear layers: the reporter's, and the first of the MLP.
LINEARS = {
    "Linear(100, 5) of rand(100)": ((100, 5), (100,)),
    "Linear(512, 1536) of rand(2, 1024, 512)": ((512, 1536), (2, 1024, 512)),
}
_ISSUE_407_SIZE = CheckedSize(mlp.issue_407.sizes[0], "issue_407")


@dataclass(frozen=True)
class Drawn:
    """One draw of weights and input, in FP32.

    Attributes:
        faithful: TE's sum of all outputs minus FP64's, with gate above up in ``fc1_weight``, as TE expects.
        swapped: the same difference with up above gate.
        allclose: by name in ``LINEARS``, whether TE's layer is ``torch.allclose`` to PyTorch's FP32 layer.
    """

    faithful: float
    swapped: float
    allclose: Mapping[str, bool]


def draw(seed: int, kernels: Kernels) -> Drawn:
    """Run the reporter's modules on weights and inputs drawn with this seed."""
    pair = build(mlp.issue_407, _ISSUE_407_SIZE, seed, kernels)
    pair.reference.double()
    shared = share_rounded_weights(pair, torch.float32)
    x = rounded_inputs(pair, _ISSUE_407_SIZE, torch.float32, seed, kernels.device)
    gate, up = shared["fc1_weight"].chunk(2)
    with torch.no_grad():
        exact = pair.reference(x.double()).sum()
        off = []
        for first, second in ((gate, up), (up, gate)):
            transfer.fill(pair.candidate, shared | {"fc1_weight": torch.cat([first, second])})
            off.append((pair.candidate(x).double().sum() - exact).item())
    allclose = {name: _allclose(*sizes, seed, kernels) for name, sizes in LINEARS.items()}
    return Drawn(off[0], off[1], allclose)


def _allclose(features: tuple[int, int], shape: tuple[int, ...], seed: int, kernels: Kernels) -> bool:
    """Compare PyTorch's and TE's linear layer with the same weight, drawn as PyTorch initialises it."""
    rng, bound = Rng(seed, "linear"), features[0] ** -0.5
    x = rng.uniform(*shape).to(kernels.device)
    weight = rng.uniform(features[1], features[0], low=-bound, high=bound).to(kernels.device)
    ported = kernels.te.Linear(*features, bias=False).to(kernels.device)
    with torch.no_grad():
        transfer.fill(ported, {"weight": weight})
        return torch.allclose(F.linear(x, weight), ported(x))


def identity_of_draw(seed: int, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a draw depends on."""
    start = record.fingerprint([Rng(seed).normal(16)])
    return {"issue": 407, "seed": seed, "start": start, "kernels": kernels.backend, "te": te.version()}


# The modules at several sizes, and the parts of their error.


RECORD = "expected_error.jsonl"
KINDS = ("output", "input gradient", "weight gradient")
ISSUE_407 = "issue_407"
ISSUE_407_SHAPE = Shape(hidden=512, seq=1024)
# How a run computes: TE; TE with a Hopper's short sums; the rounding model with all its roundings, with those of one
# part only, or with none, so that only the FP32 sums round.
TE, SHORT_SUMS, MODEL, SUMS = "te", "te, short sums", "model", "sums"
ALONE = (*sorted(PARTS), SUMS)
NOTHING_LEFT = 0.5  # a relative error above which growth cannot be fitted: two unrelated values differ by only 1.4
PER_TENSOR = ("fp8_delayed", "fp8_current")


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        modules: names in ``te_modules.MODULES``.
        precisions: names in ``parity.te.PRECISIONS``.
        hidden, seq, depth: the base sizes; a sweep varies one of them.
        hiddens, seqs, depths: the values that each size takes in its sweep.
        held_out_hidden, held_out_seq, held_out_depth: sizes that the law must predict without being fitted to them.
        parts: whether to measure each kind of rounding alone as well.
        seeds: how many seeds to run at the base sizes, starting at 0; other sizes use seed 0 only.
        issue_seeds: how many draws of issue 407's weights and input to make.
    """

    modules: tuple[str, ...] = tuple(MODULES)
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    hidden: int = 256
    seq: int = 128
    depth: int = 1
    hiddens: tuple[int, ...] = (128, 256, 512, 1024)
    seqs: tuple[int, ...] = (64, 128, 256, 512, 1024)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    held_out_hidden: int = 512
    held_out_seq: int = 256
    held_out_depth: int = 4
    parts: bool = True
    seeds: int = 2
    issue_seeds: int = 200


FULL = Settings()
QUICK = Settings(
    modules=("linear", "layernorm_mlp_swiglu", "dot_product_attention", "transformer_layer_llama"),
    hidden=128,
    seq=64,
    hiddens=(128, 256),
    seqs=(64, 128),
    depths=(1, 2, 4),
    held_out_hidden=256,
    held_out_seq=128,
    held_out_depth=2,
    seeds=1,
    issue_seeds=8,
)


@dataclass(frozen=True)
class Run:
    """One module computed in one way.

    Attributes:
        module: a name in ``te_modules.MODULES``, or ``ISSUE_407``.
        shape: the module's shape.
        precision: a name in ``PRECISIONS``.
        way: ``TE``, ``SHORT_SUMS``, ``MODEL`` or one of ``ALONE``.
        seed: the seed of weights, inputs and output gradients.
    """

    module: str
    shape: Shape
    precision: str
    way: str
    seed: int


@dataclass(frozen=True)
class Measured:
    """The error of a run.

    Attributes:
        relative_l2: by kind of tensor, pooled over all tensors of the kind; kinds that the module lacks are missing.
        max_abs: the largest absolute error of an output.
        gpu: the real or emulated GPU that TE ran on; empty for the rounding model.
    """

    relative_l2: Mapping[str, float]
    max_abs: float
    gpu: str = ""


Results = Mapping[Run, Measured]


def measured(
    settings: Settings, folder: Path
) -> tuple[Results, Sequence[Drawn], Mapping[str, str | None], Settings, Kernels]:
    """Measure what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a module or precision is unknown, or a module cannot have one of the sizes.
    """
    check(settings)
    kernels = te.kernels()
    missing = {name: why_nowhere(PRECISIONS[name], kernels) for name in settings.precisions}
    missing = {name: reason for name, reason in missing.items() if reason is not None}
    able = dataclasses.replace(settings, precisions=tuple(name for name in settings.precisions if name not in missing))
    return results(able, folder, kernels), draws(able, folder, kernels), missing, able, kernels


def results(settings: Settings, folder: Path, kernels: Kernels) -> Results:
    """Run what is missing from the folder's record, and return all results."""
    campaign: Campaign[Run, Measured] = Campaign(
        folder / RECORD, Measured, functools.partial(identity, kernels=kernels), record.code_of(__name__)
    )
    return campaign.complete(runs(settings, kernels), lambda entry: measure(entry, kernels), "measuring")


def draws(settings: Settings, folder: Path, kernels: Kernels) -> list[Drawn]:
    """Make the draws of issue 407 that are missing from the folder's record, and return all draws."""
    campaign: Campaign[int, Drawn] = Campaign(
        folder / RECORD, Drawn, functools.partial(identity_of_draw, kernels=kernels), record.code_of(__name__)
    )
    seeds = range(settings.issue_seeds)
    return list(campaign.complete(seeds, lambda seed: draw(seed, kernels), "drawing issue 407").values())


def runs(settings: Settings, kernels: Kernels) -> Iterator[Run]:
    """Yield all runs. Runs that share a golden value follow each other."""
    for name in settings.modules:
        for shape in (*sweep(name, settings), held_out(name, settings)):
            is_base = shape == base(settings)
            is_taken_apart = is_base and settings.parts
            for seed in range(settings.seeds if is_base else 1):
                for precision in settings.precisions:
                    yield from (Run(name, shape, precision, way, seed) for way in (TE, MODEL))
                    if is_taken_apart:
                        yield from (Run(name, shape, precision, way, seed) for way in ALONE)
                        if precision in PER_TENSOR and kernels.backend == "cpu":
                            yield Run(name, shape, precision, SHORT_SUMS, seed)
    for seed in range(settings.seeds):
        for precision in settings.precisions:
            yield from (Run(ISSUE_407, ISSUE_407_SHAPE, precision, way, seed) for way in (TE, MODEL))


def base(settings: Settings) -> Shape:
    """Return the base shape, from which each sweep varies one size."""
    return Shape(settings.hidden, settings.seq, settings.depth)


def sweep(name: str, settings: Settings) -> list[Shape]:
    """Return a module's shapes, varying one size at a time. Depth varies only if the module is stackable."""
    middle = base(settings)
    depths = settings.depths if MODULES[name].stackable else ()
    shapes = [
        middle,
        *(dataclasses.replace(middle, hidden=hidden) for hidden in settings.hiddens),
        *(dataclasses.replace(middle, seq=seq) for seq in settings.seqs),
        *(dataclasses.replace(middle, depth=depth) for depth in depths),
    ]
    return list(dict.fromkeys(shapes))


def held_out(name: str, settings: Settings) -> Shape:
    """Return the shape that tests the law, which is not fitted to it."""
    depth = settings.held_out_depth if MODULES[name].stackable else settings.depth
    return Shape(settings.held_out_hidden, settings.held_out_seq, depth)


def measure(entry: Run, kernels: Kernels) -> Measured:
    """Compute a module in one way, and compare the result with FP64."""
    precision = PRECISIONS[entry.precision]
    case, checked = placed(entry.module, entry.shape) if entry.module != ISSUE_407 else _ISSUE_407
    prepared = prepare(case, checked, precision.dtype, entry.seed, kernels)
    golden = tensors_of(prepared.golden)
    if entry.way not in (TE, SHORT_SUMS):
        parts = PARTS if entry.way == MODEL else PARTS & {entry.way}
        rounding = dataclasses.replace(precision.rounding, parts=parts)
        return _measured(model_tensors(prepared, rounding, AS_TE), golden)

    torch.manual_seed(entry.seed)  # for stochastic rounding
    sums = tensor_cores.emulated() if entry.way == SHORT_SUMS else nullcontext()
    with gpu_with(precision, kernels) as gpu, sums:
        tensors, _ = run_candidate(case, checked, prepared, precision, entry.seed, kernels)
    return dataclasses.replace(_measured(tensors, golden), gpu=gpu)


def check(settings: Settings) -> None:
    """Check that the settings can be run.

    Raises:
        UserError: naming the field and its allowed values.
    """
    check_names("modules", settings.modules, MODULES)
    check_names("precisions", settings.precisions, PRECISIONS)
    for hidden in (settings.hidden, *settings.hiddens, settings.held_out_hidden):
        if hidden < 1 or hidden % 128:
            raise UserError(f"hiddens: {hidden} is not a multiple of 128 (the width of two heads with 64 channels)")
    for seq in (settings.seq, *settings.seqs, settings.held_out_seq):
        if seq < 1 or seq % 32:
            raise UserError(f"seqs: {seq} is not a multiple of 32, the block size of block-scaled GEMMs")
    if min(settings.depth, settings.held_out_depth, settings.seeds, *settings.depths) < 1:
        raise UserError("depths and seeds must be at least 1")
    if settings.depth != 1 and not all(MODULES[name].stackable for name in settings.modules):
        raise UserError("depth: must be 1 unless all modules can be stacked")


_ISSUE_407 = (dataclasses.replace(mlp.issue_407, probe=False), CheckedSize(mlp.issue_407.sizes[0], ISSUE_407))


def _measured(tensors: Tensors, golden: Tensors) -> Measured:
    errors = [tensors[key].double() - truth for key, truth in golden.items() if key[0] == "output"]
    return Measured(
        relative_l2=pooled_relative_l2(tensors, golden),
        max_abs=max(error.abs().max().item() for error in errors),
    )


def identity(entry: Run, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a run's result depends on."""
    named = dataclasses.asdict(entry) | {"start": record.fingerprint([Rng(entry.seed).normal(16)])}
    if entry.way in (TE, SHORT_SUMS):
        return named | {"kernels": kernels.backend, "te": _te_version()}
    return named | {"freedom": dataclasses.asdict(AS_TE)}


_te_version = functools.cache(te.version)  # reads a file
