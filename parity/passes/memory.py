"""Estimate how much memory a comparison needs before it runs, and release memory that is no longer used."""

from __future__ import annotations

import contextlib
import gc
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.case import Case, Rng, draw_inputs
from parity.case.validate import CheckedSize, without_memory
from parity.machine import process
from parity.numerics.errors import LARGE
from parity.passes.one_pass import as_arguments
from parity.passes.prepare import cast, forget
from parity.trace.effects import undisturbed
from parity.user_error import INTERRUPTS

# FP64 elements at the peak: for each weight (golden, its gradients, the models', the candidate's, the directions of
# mistakes), for each element that the reference saves for its backward pass, and for each element of inputs and
# outputs. They were fitted to the peak resident memory of comparisons on the CPU kernels, which was 0.55 (an MLP) to
# 1.3 times (attention) the prediction. That is good enough to tell large cases from small ones, but no guarantee that a
# case fits. A Llama layer with large weights took 33 bytes per parameter in BF16, and 37 in FP8 with current scaling
# (``benchmarks/memory.py``).
_WEIGHT_COPIES, _LARGE_WEIGHT_COPIES, _SAVED_COPIES, _INPUT_COPIES = 15, 5, 6, 11


@lru_cache(maxsize=64)
def estimate(case: Case, checked: CheckedSize, te: ModuleType) -> int | None:
    """Return about how many bytes a comparison needs at its peak, or None if the reference cannot run without values.

    The reference's forward pass runs in FP64 on the meta device, which shows the tensors that it saves without
    allocating any.
    """
    try:
        with undisturbed(), without_memory():
            return _estimate_bytes(case, checked, te)
    except INTERRUPTS:
        raise
    except BaseException:  # code that reads values may raise anything here, and still run later
        return None


def _estimate_bytes(case: Case, checked: CheckedSize, te: ModuleType) -> int:
    pair = case.build(te, checked.size)
    reference = pair.reference.double()
    inputs = cast(draw_inputs(pair, checked.size, Rng(0)), torch.float64)
    inputs = tree_map_only(Tensor, lambda x: x.requires_grad_() if x.is_floating_point() else x, inputs)
    storages: dict[int, torch.UntypedStorage] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        storages[storage._cdata] = storage
        return saved

    args, kwargs = as_arguments(inputs)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        call = pair.call_reference
        outputs = call(reference, *args, **kwargs) if call else reference(*args, **kwargs)
    for parameter in reference.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    weights = sum(_count_copies(parameter) * parameter.numel() for parameter in reference.parameters())
    passed = sum(leaf.numel() for leaf in tree_leaves([inputs, outputs]) if isinstance(leaf, Tensor))
    saved = sum(storage.nbytes() for storage in storages.values())
    return 8 * (weights + _INPUT_COPIES * passed) + _SAVED_COPIES * saved


def _count_copies(parameter: Tensor) -> int:
    """Return how many FP64 copies of a weight there are at the peak: fewer for large weights."""
    return _LARGE_WEIGHT_COPIES if parameter.nbytes > LARGE else _WEIGHT_COPIES


def release() -> None:
    """Release the memory that this process keeps only for speed, here and in PyTorch's cache."""
    forget()
    gc.collect()
    process.give_back()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a broken context, which the comparison that broke it has reported
            torch.cuda.empty_cache()
