"""Explains gradients that are wrong where the outputs are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from posixpath import commonpath

import torch
from torch import Tensor, nn

from parity.diagnosis.agreement import agrees, explains
from parity.diagnosis.budget import Budget
from parity.diagnosis.codes import finding
from parity.diagnosis.detached_paths import detached_path_findings
from parity.diagnosis.failure import Failure
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.padding_rows import padding_row_findings
from parity.diagnosis.reruns.reruns import run_changed
from parity.diagnosis.scale import factor_of, readable, shared_factor
from parity.diagnosis.trial import tensors_under
from parity.passes import Tensors
from parity.prepare import Prepared
from parity.result import Finding, TensorResult
from parity.watching.trace import Trace, detached

_CLEARLY = 0.5  # of the error, below which another rounding must bring it
# From 1, that a factor of some gradients is away at least: subtle mistakes leave smaller ones, of single tensors.
_SCALED = 0.01


def gradient_findings(failure: Failure, trace: Trace, budget: Budget) -> list[Finding]:
    """What explains the gradients of a comparison whose outputs passed; empty if nothing does."""
    failed = [result for result in failure.results if not result.passed and result.finite]
    for explain in (
        _scaled,
        _one_path_missing,
        padding_row_findings,
        detached_path_findings,
        _one_microbatch,
        _rounded_sums,
    ):
        if not budget.spent() and (found := list(explain(failure, failed, trace, budget))):
            return found
    return []


def partly_scaled_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if some failed gradients are the right ones times one factor, which spoils those that come before.

    Other mistakes may look like it, so it is for what nothing else explains; outputs are right.
    """
    failed = [result for result in failure.results if not result.passed and result.finite]
    alike = [result for result in failed if factor_of(failure, result)]
    factor = shared_factor(failure, alike)
    if factor is None or len(alike) < 2 or abs(factor - 1.0) < _SCALED:
        return
    where = commonpath([result.name.replace(".", "/") for result in alike]).replace("/", ".")
    yield finding(
        "gradient-scale",
        f"{len(alike)} of {len(failed)} wrong gradients, {alike[0].label} among them, are {readable(factor)} times "
        f"what they should be, and right but for that; look for what scales the gradient behind {where or 'these'}, "
        "or of a branch. What comes before is wrong for that reason",
    )


def _scaled(failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget) -> Iterator[Finding]:
    """Every failed gradient is the right one times one factor."""
    factor = shared_factor(failure, failed)
    if factor is None:
        return
    if factor == 0.0 and len(failed) > 1 and (paths := list(detached_path_findings(failure, failed, trace, budget))):
        yield from paths
        return
    gradients = [result for result in failure.results if result.kind != "output"]
    if len(failed) < len(gradients) and abs(factor - 1.0) < _SCALED:
        return
    which = "every gradient" if len(failed) == len(gradients) else ", ".join(result.label for result in failed)
    what = (
        "0; nothing flows back there, as behind detach, no_grad or what is made a new tensor"
        if factor == 0.0
        else f"{readable(factor)} times what it should be, and right but for that; "
        "divide by it (a loss scale, a number of tokens or ranks)"
    )
    yield finding("gradient-scale", f"{which} is {what}")


def _one_path_missing(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """A parameter that is used more than once gets the gradient of some of its uses alone."""
    names = {result.name for result in failed if result.kind == "weight gradient"}
    for number, name in trace.parameters.items():
        uses = [call for call in trace.calls if number in {value.number for value in call.inputs}]
        if name not in names or len(uses) < 2:
            continue
        for call in uses:
            value = next(value for value in call.inputs if value.number == number)
            title = "embeddings-not-tied" if any(use.name == "embedding" for use in uses) else "gradient-path-missing"
            hypothesis = Hypothesis(title, title, "", failure.prepared.reference, (detached(call, value),))
            if explains(failure, tensors_under(failure.prepared, (hypothesis,))):
                lacks = f"the gradient of {name} lacks what comes through {call.name} in {call.module}"
                if len({use.site[::2] for use in uses}) == 1 and _adds_to_main_grad(failure):
                    yield finding(
                        "gradient-accumulation",
                        f"{lacks} at one of its {len(uses)} calls; without that it agrees. TE adds to main_grad "
                        "(fuse_wgrad_accumulation): keep it between calls, and overwrite_main_grad off",
                    )
                    return
                yield finding(
                    title,
                    f"{lacks}; without that it agrees. Use the same parameter there, not a copy or a detached view",
                )
                return


def _adds_to_main_grad(failure: Failure) -> bool:
    """Whether TE's modules write gradients to buffers, where a later call may overwrite an earlier one's."""
    found: list[str] = []

    def look(module: nn.Module) -> tuple[str, ...]:
        found.extend(name for name, one in module.named_modules() if getattr(one, "fuse_wgrad_accumulation", False))
        return ()

    run_changed(failure, look)
    return bool(found)


def _one_microbatch(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """Weight gradients of one part of the batch in place of all."""
    if not failed or any(result.kind != "weight gradient" for result in failed):
        return
    for parts in _divisors(failure.prepared):
        for which, part in (("last", parts - 1), ("first", 0)):
            if budget.spent():
                return
            gradients = tensors_under(failure.prepared, (), cotangents=_of_part(failure.prepared, parts, part))
            if gradients is not None and all(agrees(failure, result, gradients) for result in failed):
                labels = ", ".join(result.label for result in failed)
                yield finding(
                    "gradient-accumulation",
                    f"{labels} is the {which} of {parts} microbatches' gradient alone; add the others to it "
                    "(is_first_microbatch, fuse_wgrad_accumulation, zero_grad)",
                )
                return


def _rounded_sums(failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget) -> Iterator[Finding]:
    """Weight gradients whose sum over microbatches is rounded each time."""
    if not failed or any(result.kind != "weight gradient" for result in failed):
        return
    # A GEMM adds to main_grad in FP32; only TF32 rounds what it adds.
    precision = failure.precision if failure.precision.dtype is torch.float32 else None
    best: tuple[float, int, torch.dtype] = (_CLEARLY, 0, torch.bfloat16)
    for parts in _divisors(failure.prepared)[::-1]:
        of_parts: list[Tensors] = []
        for part in range(parts):
            if budget.spent():
                return
            cotangents = _of_part(failure.prepared, parts, part)
            ran = tensors_under(failure.prepared, (), precision, cotangents)
            of_parts += [ran] if ran is not None else []
        orders = (of_parts, of_parts[::-1])  # autograd adds up the parts of one graph from the last
        for dtype, ordered in product((torch.bfloat16, torch.float16), orders):
            left = max(_share_left(failure, result, _summed(ordered, result, dtype)) for result in failed)
            best = min(best, (left, parts, dtype), key=lambda entry: entry[0])
        if best[0] < _CLEARLY / 4:
            break
    left, parts, dtype = best
    if parts:
        labels = ", ".join(result.label for result in failed)
        yield finding(
            "gradient-accumulation",
            f"{labels} is what a sum over {parts} microbatches gives that is rounded to {str(dtype)[6:]} each time: "
            f"{left:.0%} of the error is left. Accumulate in FP32 (main_grad)",
        )


def _divisors(prepared: Prepared) -> list[int]:
    """Into how many equal parts the batch can be cut."""
    counts = {x.shape[0] if x.dim() > 1 else 1 for x in prepared.cotangents.values()}
    rows = counts.pop() if len(counts) == 1 else 1
    return [parts for parts in range(2, min(rows, 64) + 1) if rows % parts == 0]


def _of_part(prepared: Prepared, parts: int, part: int) -> dict[str, Tensor]:
    """Output gradients that are zero but for one part of the batch."""

    def masked(x: Tensor) -> Tensor:
        rows = x.shape[0] // parts
        kept = torch.zeros_like(x)
        kept[part * rows : (part + 1) * rows] = x[part * rows : (part + 1) * rows]
        return kept

    return {name: masked(x) for name, x in prepared.cotangents.items()}


def _summed(of_parts: Sequence[Tensors], result: TensorResult, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(of_parts[0][result.kind, result.name])
    for part in of_parts:
        total = (total + part[result.kind, result.name]).float().to(dtype).double()
    return total


def _share_left(failure: Failure, result: TensorResult, other: Tensor) -> float:
    candidate = failure.candidate[result.kind, result.name].double()
    before = torch.linalg.vector_norm(candidate - failure.golden[result.kind, result.name])
    return (torch.linalg.vector_norm(candidate - other) / before).item()
