"""Measure what softmax loses without FP32, by the scale of the scores and by whether scales mix within a head.

The same rows of scores, at several scales, are arranged in two ways: ``apart``, where each head has one scale, and
``mixed``, where each head has rows of every scale. Golden is the FP64 softmax of the scores before they were stored,
and its gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.studies.settings import check_names
from parity import te
from parity.case.case import Rng
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits
from parity.numerics import errors
from parity.te import Kernels
from parity.te.attention_backend import te_variables
from parity.user_error import UserError

# Softmax of attention scores, in the precisions and with the tricks that models have used.
#
# A way stores the scores that a GEMM has summed in FP32, and computes probabilities from the stored scores. Autograd
# differentiates it. In FP16 and BF16, PyTorch rounds the result of each operation to the dtype. It adds in FP32 and
# rounds a sum once.


@dataclass(frozen=True)
class Precision:
    """The dtype of stored scores, and the divisors that a way may apply before it stores them.

    Attributes:
        dtype: the dtype of stored scores and of probabilities.
        alpha: the divisor of PB-Relax.
        layer: the divisor of layer scaling.
    """

    dtype: torch.dtype
    alpha: float = 32.0
    layer: float = 16.0


@dataclass(frozen=True)
class Way:
    """One way to compute softmax.

    Attributes:
        softmax: computes probabilities in the precision's dtype from stored scores ``[heads, rows, keys]``.
        divisor: the name of the divisor in ``Precision`` that the GEMM applies to the scores, if any.
        keeps_fp32: whether scores are never stored in the dtype.
    """

    softmax: Callable[[Tensor, Precision], Tensor]
    divisor: Literal["", "alpha", "layer"] = ""
    keeps_fp32: bool = False

    def stored(self, scores: Tensor, precision: Precision) -> Tensor:
        """Return the scores that the GEMM stores, given FP32 scores."""
        divisor = getattr(precision, self.divisor) if self.divisor else 1.0
        return (scores / divisor).to(torch.float32 if self.keeps_fp32 else precision.dtype)

    def __call__(self, scores: Tensor, precision: Precision) -> Tensor:
        """Return probabilities in the precision's dtype, given FP32 scores ``[heads, rows, keys]``."""
        return self.softmax(self.stored(scores, precision), precision)


def plain(stored: Tensor, precision: Precision) -> Tensor:
    """Compute ``exp(x) / sum(exp(x))`` with every operation in the dtype."""
    exponentials = stored.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def max_subtracted(stored: Tensor, precision: Precision) -> Tensor:
    """Compute the same as ``plain`` after subtracting each row's maximum."""
    return plain(stored - stored.detach().amax(-1, keepdim=True), precision)


def pb_relax(stored: Tensor, precision: Precision) -> Tensor:
    """Compute ``softmax((x - max(x)) alpha)`` of scores divided by alpha, with the maximum over the whole head.

    Source: M. Ding et al., "CogView", arXiv 2105.13290, section 2.4. Softmax is PyTorch's.
    """
    return torch.softmax((stored - stored.detach().amax((-2, -1), keepdim=True)) * precision.alpha, -1)


def pb_relax_by_rows(stored: Tensor, precision: Precision) -> Tensor:
    """Compute the same as ``pb_relax`` with the maximum of each row, like Hugging Face's LayoutLMv3."""
    return torch.softmax((stored - stored.detach().amax(-1, keepdim=True)) * precision.alpha, -1)


def pytorch(stored: Tensor, precision: Precision) -> Tensor:
    """Compute ``torch.softmax`` in the dtype of the scores."""
    return torch.softmax(stored, -1)


def fp32(stored: Tensor, precision: Precision) -> Tensor:
    """Compute ``torch.softmax(..., dtype=torch.float32)`` and round the result, as autocast does on a GPU."""
    return torch.softmax(stored, -1, dtype=torch.float32).to(precision.dtype)


def fp32_scaled(stored: Tensor, precision: Precision) -> Tensor:
    """Compute the same as ``fp32`` for scores divided by the layer's number, which are multiplied back in FP32.

    Source: "FP32 softmax with QKV scaling" in GLM-130B's training notes; Megatron-LM's query-key layer scaling.
    """
    return torch.softmax(stored.float() * precision.layer, -1).to(precision.dtype)


def of_te(kernels: Kernels, fused: bool) -> Way:
    """Return the softmax of TE's unfused attention, ``FusedScaleMaskSoftmax``.

    Args:
        kernels: the kernels that TE runs on; TE is already imported because they exist.
        fused: True for TE's own kernel, for FP16 and BF16; False for ``NVTE_MASKED_SOFTMAX_FUSION=0``.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import softmax

    with te_variables({"NVTE_MASKED_SOFTMAX_FUSION": str(int(fused))}):
        module = softmax.FusedScaleMaskSoftmax(_no_mask)

    def softmax_of_te(stored: Tensor, precision: Precision) -> Tensor:
        # TE's kernel requires batch times heads, and queries, to be multiples of 4. Rows are independent.
        four_heads = stored.view(1, 4, -1, stored.shape[-1])
        return module(four_heads, None, "no_mask").view_as(stored)

    return Way(softmax_of_te)


def _no_mask(scores: Tensor, mask: Tensor) -> Tensor:
    raise AssertionError("there is no mask to apply")


WAYS: dict[str, Way] = {
    "plain": Way(plain),
    "max subtracted": Way(max_subtracted),
    "PB-Relax": Way(pb_relax, divisor="alpha"),
    "PB-Relax by rows": Way(pb_relax_by_rows, divisor="alpha"),
    "torch.softmax": Way(pytorch),
    "FP32": Way(fp32),
    "FP32, layer scaling": Way(fp32_scaled, divisor="layer"),
    "FP32 scores": Way(fp32, keeps_fp32=True),
}
TE_WAYS = {"TE": True, "TE, not fused": False}


def ways(kernels: Kernels) -> dict[str, Way]:
    """Return every way by name, including TE's on the given kernels."""
    return WAYS | {name: of_te(kernels, fused) for name, fused in TE_WAYS.items()}


# Bytes that PyTorch's kernels read and write. On a GPU they determine the time of everything but matrix products.
#
# The tensors that an operation takes and returns count once each. Views move nothing. A fused operation counts as one
# operation, whatever it does inside.


@dataclass(frozen=True)
class Traffic:
    """Hold the memory traffic of a function and its backward pass.

    Attributes:
        forward: bytes that the forward pass moves.
        backward: bytes that the backward pass moves.
        saved: bytes that the forward pass keeps for the backward pass.
        operations: names of the forward pass's operations.
    """

    forward: int
    backward: int
    saved: int
    operations: tuple[str, ...]


def measure_traffic(function: Callable[[Tensor], Tensor], argument: Tensor) -> Traffic:
    """Measure the traffic of calling a function and differentiating it with respect to its argument."""
    leaf = argument.detach().clone().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != leaf.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _Counter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(leaf)
    gradient = torch.ones_like(result)
    with _Counter() as backward:
        torch.autograd.grad(result, leaf, gradient)
    return Traffic(forward.moved, backward.moved, sum(kept.values()), tuple(forward.operations))


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append(func.name().removeprefix("aten::"))
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
        return result


# All runs, read from the record or computed.


RECORD = "softmax_precision.jsonl"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = ("apart", "mixed")


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        dtypes: names in ``DTYPES``.
        layouts: names in ``LAYOUTS``.
        scales: base 10 logarithms of the scores' standard deviations.
        largest_mixed: the largest scale that occurs in heads of mixed scales.
        rows: rows of each scale, a multiple of 16.
        keys: scores of a row, a multiple of 8 above 16.
        alpha: the divisor of PB-Relax.
        layer: the divisor of layer scaling.
        seeds: how many seeds to run, starting at 0.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    layouts: tuple[str, ...] = LAYOUTS
    scales: tuple[int, ...] = (-3, -2, -1, 0, 1, 2, 3, 4, 5)
    largest_mixed: int = 4
    rows: int = 64
    keys: int = 1024
    alpha: float = 32.0
    layer: float = 16.0
    seeds: int = 25


FULL = Settings()
QUICK = Settings(scales=(-3, 0, 2, 4, 5), rows=16, keys=256, seeds=2)


@dataclass(frozen=True)
class Run:
    """Scores of one draw in one arrangement.

    Attributes:
        dtype: the dtype that scores are stored in.
        layout: how scales are arranged in heads.
        seed: the seed of the draw.
    """

    dtype: str
    layout: str
    seed: int


class Errors(NamedTuple):
    """Hold the errors of one way at one scale.

    Attributes:
        moved: the share of a row's probability that lies on the wrong keys, ``sum |p - golden| / 2``, averaged over the
            rows whose result is finite; NaN if there are none.
        alone: the same against the softmax of the stored scores, which is the error of the arithmetic without that of
            the storage. It is also NaN if stored scores are infinite.
        gradient: L2 error of the scores' gradient over the norm of its golden first term ``p g``, over finite rows.
            (The whole gradient, ``p (g - sum p g)``, vanishes where softmax picks one key.)
        spoiled: the share of rows whose result or gradient is not finite.
    """

    moved: FourDigits
    alone: FourDigits
    gradient: FourDigits
    spoiled: FourDigits


# Errors by way and base 10 logarithm of the scale.
Outcome = Mapping[str, Mapping[int, Errors]]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Outcome], Settings, Kernels]:
    """Measure what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a name is unknown, or TE's kernels do not support a size.
    """
    _check(settings)
    kernels = te.kernels()
    campaign: Campaign[Run, Outcome] = Campaign(
        folder / RECORD,
        Outcome,
        functools.partial(_identity, settings=settings, kernels=kernels),
        record.code_of(__name__),
    )
    found = campaign.complete(runs(settings), lambda each: outcome_of(each, settings, kernels), "softmax")
    return found, settings, kernels


def runs(settings: Settings) -> Iterator[Run]:
    """Yield all draws in all arrangements."""
    for dtype in settings.dtypes:
        for layout in settings.layouts:
            yield from (Run(dtype, layout, seed) for seed in range(settings.seeds))


def outcome_of(each: Run, settings: Settings, kernels: Kernels) -> Outcome:
    """Measure the errors of every way in one arrangement of one draw."""
    rng = Rng(each.seed)
    scores = _scores(rng, scales_of(each.layout, settings), settings, each.layout).to(kernels.device)
    precision = Precision(DTYPES[each.dtype], settings.alpha, settings.layer)
    gradient = rng.normal(*scores.shape).to(kernels.device, precision.dtype)
    golden = _passed(lambda x, _: x.softmax(-1), scores.double(), precision, gradient.double())
    first_term = golden.probabilities * gradient.double()
    stored = scores.to(precision.dtype).double().softmax(-1)
    dim = LAYOUTS.index(each.layout)

    def by_scale(way: Way) -> dict[int, Errors]:
        computed = _passed(way, scores, precision, gradient)
        tensors = (*vars(computed).values(), *vars(golden).values(), first_term, stored)
        return {
            scale: _measured(*(tensor.select(dim, index).double() for tensor in tensors))
            for index, scale in enumerate(scales_of(each.layout, settings))
        }

    return {name: by_scale(way) for name, way in ways(kernels).items()}


def scales_of(layout: str, settings: Settings) -> tuple[int, ...]:
    """Return the base 10 logarithms of the scales that an arrangement has."""
    return tuple(scale for scale in settings.scales if layout == "apart" or scale <= settings.largest_mixed)


def error(found: Mapping[Run, Outcome], dtype: str, layout: str, way: str, scale: int) -> Errors:
    """Return the mean of each error over all seeds, NaN if one seed's is."""
    each = of_seeds(found, dtype, layout, way, scale)
    return Errors(*map(statistics.fmean, zip(*each, strict=True)))


def of_seeds(found: Mapping[Run, Outcome], dtype: str, layout: str, way: str, scale: int) -> list[Errors]:
    """Return the errors at each seed."""
    return [outcome[way][scale] for run, outcome in found.items() if (run.dtype, run.layout) == (dtype, layout)]


def traffic(dtype: str, settings: Settings, kernels: Kernels) -> dict[str, Traffic]:
    """Measure each way's traffic from scores stored in the dtype, without TE's if its kernels are not visible."""
    precision = Precision(DTYPES[dtype], settings.alpha, settings.layer)
    scores = Rng(0).normal(4, settings.rows, settings.keys).to(kernels.device)
    measured = {name: _traffic_of(way, scores, precision) for name, way in ways(kernels).items()}
    visible = any("softmax" in operation for operation in measured["TE"].operations)
    return {name: each for name, each in measured.items() if visible or name != "TE"}


def _traffic_of(way: Way, scores: Tensor, precision: Precision) -> Traffic:
    return measure_traffic(lambda stored: way.softmax(stored, precision), way.stored(scores, precision))


def frontier(way: Way, precision: Precision, kernels: Kernels) -> float:
    """Return the largest score with a finite result in a row whose other scores are 0, to a 64th of an octave."""

    def survives(score: float) -> bool:
        scores = torch.zeros(4, 16, 32, device=kernels.device)
        scores[..., 0] = score
        return bool(way(scores, precision).isfinite().all())

    low, high = 0, 128 * 64 - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if survives(2.0 ** (middle / 64)) else (low, middle)
    return float(2.0 ** (low / 64))


def te_agrees(dtype: str, settings: Settings, kernels: Kernels) -> float:
    """Return the share of probabilities that are bitwise equal in TE's softmax and ``FP32``, over all scales."""
    precision = Precision(DTYPES[dtype])
    scores = _scores(Rng(0), scales_of("mixed", settings), settings, "mixed").to(kernels.device)
    every = ways(kernels)
    return (every["TE"](scores, precision) == every["FP32"](scores, precision)).double().mean().item()


def autocast_dtypes(device: str, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the output dtypes of ``torch.softmax`` and of the next product, for scores in ``dtype`` under autocast.

    The tensors have no storage, so PyTorch also answers for a device that this machine does not have.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: FP16 or BF16.
    """
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        with FakeTensorMode():
            scores = torch.empty(2, 2, dtype=dtype, device=device)
            probabilities = torch.softmax(scores, -1)
            return probabilities.dtype, (probabilities @ scores).dtype
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@dataclass(frozen=True)
class _Pass:
    """Probabilities and the gradient of the scores, both ``[heads, rows, keys]``."""

    probabilities: Tensor
    gradient: Tensor


def _passed(
    way: Callable[[Tensor, Precision], Tensor], scores: Tensor, precision: Precision, gradient: Tensor
) -> _Pass:
    """Return probabilities and the scores' gradient, in the dtype of ``gradient``, which the next GEMM takes."""
    leaf = scores.clone().requires_grad_()
    probabilities = way(leaf, precision)
    (of_scores,) = torch.autograd.grad(probabilities, leaf, gradient.to(probabilities.dtype))
    return _Pass(probabilities.detach(), of_scores.to(gradient.dtype))


def _scores(rng: Rng, scales: Sequence[int], settings: Settings, layout: str) -> Tensor:
    """Return the same rows in FP32 as ``[scales, rows, keys]`` if apart, ``[rows, scales, keys]`` if mixed."""
    rows = [rng.normal(settings.rows, settings.keys) * 10.0**scale for scale in scales]
    return torch.stack(rows, LAYOUTS.index(layout))


def _measured(
    probabilities: Tensor, gradient: Tensor, golden: Tensor, golden_gradient: Tensor, first_term: Tensor, stored: Tensor
) -> Errors:
    finite = probabilities.isfinite().all(-1) & gradient.isfinite().all(-1)
    error = (gradient - golden_gradient)[finite].norm().item()
    return Errors(
        moved=_moved(probabilities[finite], golden[finite]),
        alone=_moved(probabilities[finite], stored[finite]),
        gradient=errors.relative_l2(error, first_term[finite].norm().item()) if finite.any() else math.nan,
        spoiled=1 - finite.double().mean().item(),
    )


def _moved(probabilities: Tensor, golden: Tensor) -> float:
    return (probabilities - golden).abs().sum(-1).mean().item() / 2


def _identity(each: Run, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    chosen = {name: value for name, value in vars(settings).items() if name in ("rows", "keys", "alpha", "layer")}
    on = {"kernels": kernels.backend, "te": te.version(), "start": record.fingerprint([Rng(each.seed).normal(8)])}
    return dataclasses.asdict(each) | chosen | {"scales": list(scales_of(each.layout, settings))} | on


def _check(settings: Settings) -> None:
    check_names("dtypes", settings.dtypes, DTYPES)
    check_names("layouts", settings.layouts, LAYOUTS)
    if min(settings.scales) > settings.largest_mixed:
        raise UserError(f"scales: heads of mixed scales need one up to largest_mixed={settings.largest_mixed}")
    if settings.rows % 16 or settings.keys % 8 or settings.keys <= 16:
        raise UserError(
            f"rows={settings.rows}, keys={settings.keys}: TE's softmax takes a multiple of 16 rows, and a multiple of "
            "8 keys above 16"
        )
