"""Hand out ``transformer_engine.pytorch``, and define what the name of a precision means.

TE runs on its real kernels if there is a GPU, else on the CPU kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

import torch

from parity.machine import devices as of_machine
from parity.machine import process
from parity.machine.process import lasting
from parity.numerics.formats import (
    Rounding,
    e4m3,
    e4m3_blocks,
    e4m3_squares,
    e5m2,
    nvfp4_blocks,
    nvfp4_squares,
    nvfp4_stochastic,
    tf32,
)
from parity.user_error import UserError
from te_on_cpu import EmulationError
from te_on_cpu.loading import loader

Backend = Literal["gpu", "cpu"]
_lock = threading.RLock()  # reentrant, since importing TE may ask for it again


class BackendUnavailable(UserError, RuntimeError):
    """Raised if the backend that was asked for cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """Say where TE's kernels run.

    Attributes:
        backend: ``gpu`` for TE's compiled kernels, ``cpu`` for the emulation in ``te_on_cpu``.
        device: the device that inputs and parameters live on.
        te: the module ``transformer_engine.pytorch``.
    """

    backend: Backend
    device: torch.device
    te: ModuleType


def why_no_gpu() -> str | None:
    """Return why TE's real kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if not of_machine.is_installed():
        return "TransformerEngine's compiled extension is not installed (pip install 'transformer-engine[pytorch]')"
    return None


def kernels(backend: Backend | Literal["auto"] = "auto") -> Kernels:
    """Return TE on the requested backend; ``auto`` takes the GPU if TE's real kernels can run.

    A process can only use one of the two, since TE's Python is imported once, for the real kernels or for the CPU's.

    Raises:
        BackendUnavailable: if the GPU is asked for but not available, TE's kernels are installed but do not load, or
            the other backend is loaded already.
    """
    reason = why_no_gpu()
    if backend == "gpu" and reason is not None:
        raise BackendUnavailable(f"no real TransformerEngine kernels here: {reason}")
    if backend == "cpu" or reason is not None:
        process.use_huge_pages()
        process.keep_freed()
        with on_cpu():
            return Kernels("cpu", torch.device("cpu"), _import_te())
    if loader.is_loaded():
        raise BackendUnavailable("this process has already loaded TransformerEngine on the CPU kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        te = _import_te()
        _as_if_compiled()
        return Kernels("gpu", device, te)
    except Exception as error:  # each of TE's libraries, and its checks of them, raises something else
        raise BackendUnavailable(
            f"TransformerEngine's compiled kernels are installed, but do not load: {type(error).__name__}: {error}; "
            "install a build for this PyTorch and its CUDA, or choose the backend cpu"
        ) from error


def _as_if_compiled() -> None:
    """Make the lasting changes to the process that PyTorch's compiler makes when TE's fused functions use it on a GPU.

    Otherwise they would be reported as the doing of the first pair that uses such a function
    (``torch/_inductor/compile_fx.py`` and ``torch/_dynamo/mutation_guard.py`` of 2.11 and 2.13).
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let ``import transformer_engine.pytorch`` in this context import TE on the CPU kernels, GPU or not.

    This outlasts the context: modules that were imported in it go on computing on the CPU.

    Raises:
        BackendUnavailable: if this process has already imported TransformerEngine on its real kernels, if it is not
            installed or too old, or if a variable that describes the emulated GPU is not valid.
    """
    try:
        with loader.on_cpu():
            yield
    except EmulationError as error:
        raise BackendUnavailable(str(error)) from None


def serve_imports() -> None:
    """Make ``import transformer_engine.pytorch`` work without a GPU too, on the CPU kernels, from now on.

    If TE's real kernels can run, nothing changes.
    """
    if not any(isinstance(finder, loader.CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, loader.CpuFinder(lambda: why_no_gpu() is not None))


def _import_te() -> ModuleType:
    name = "transformer_engine.pytorch"
    with _lock, nullcontext() if name in sys.modules else lasting():
        try:
            return importlib.import_module(name)
        except BaseException:
            loader.unload()
            raise


def version() -> str:
    """Return the version of the installed TransformerEngine, without importing it."""
    return metadata.version("transformer-engine")


# What a precision's name means: dtype, TE recipe, rounding model, and the GPU that it needs.


@dataclass(frozen=True)
class Precision:
    """A way to compute a module.

    Attributes:
        name: as users write it and reports show it.
        dtype: the dtype of parameters, inputs, gradients and stored activations.
        rounding: what a faithful kernel rounds, for the expected error.
        recipe: a class of ``transformer_engine.common.recipe``, or None if no FP8 is used.
        warmup_passes: the least number of forward and backward passes before the one that is compared, since a recipe
            that scales by earlier passes has no scales at first.
    """

    name: str
    dtype: torch.dtype
    rounding: Rounding
    recipe: str | None = None
    warmup_passes: int = 0

    def new_recipe(self) -> Any:
        """Return a new object of TE's recipe; None if there is no recipe."""
        if self.recipe is None:
            return None
        return getattr(importlib.import_module("transformer_engine.common.recipe"), self.recipe)()

    def autocast(self, kernels: Kernels, group: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return the context for the forward pass of TE's modules; it has a new recipe each time.

        Args:
            kernels: TE's kernels.
            group: the process group over which amaxes are reduced, if there is one.
        """
        recipe = self.new_recipe()
        if recipe is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = kernels.te.autocast(
            enabled=True, recipe=recipe, amax_reduction_group=group
        )
        return context


_BF16 = torch.bfloat16
_PER_TENSOR = Rounding(_BF16, inputs=e4m3, weights=e4m3, gradients=e5m2)
_BLOCKS = Rounding(_BF16, inputs=e4m3_blocks(128), weights=e4m3_squares, gradients=e4m3_blocks(128))
_MX_BLOCKS = Rounding(_BF16, inputs=e4m3_blocks(32), weights=e4m3_blocks(32), gradients=e4m3_blocks(32))
_NVFP4 = Rounding(_BF16, inputs=nvfp4_blocks, weights=nvfp4_squares, gradients=nvfp4_stochastic, rotate_wgrad=True)

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, Rounding(torch.float32, tf32, tf32, tf32)),
        Precision("bf16", _BF16, Rounding(_BF16)),
        Precision("fp16", torch.float16, Rounding(torch.float16)),
        Precision("fp8_delayed", _BF16, _PER_TENSOR, "DelayedScaling", warmup_passes=2),
        Precision("fp8_current", _BF16, _PER_TENSOR, "Float8CurrentScaling"),
        Precision("fp8_block", _BF16, _BLOCKS, "Float8BlockScaling"),
        Precision("mxfp8", _BF16, _MX_BLOCKS, "MXFP8BlockScaling"),
        Precision("nvfp4", _BF16, _NVFP4, "NVFP4BlockScaling"),
    )
}

# The function of ``transformer_engine.pytorch`` that says whether the GPU at hand runs a recipe.
_IS_AVAILABLE = {
    "DelayedScaling": "is_fp8_available",
    "Float8CurrentScaling": "is_fp8_available",
    "Float8BlockScaling": "is_fp8_block_scaling_available",
    "MXFP8BlockScaling": "is_mxfp8_available",
    "NVFP4BlockScaling": "is_nvfp4_available",
}


def why_unavailable(precision: Precision, kernels: Kernels) -> str | None:
    """Return why this machine cannot run the precision on these kernels, or None if it can.

    The CPU kernels emulate a Hopper GPU, for which TE itself gives the answer.
    """
    if precision.recipe is not None:
        available, reason = getattr(kernels.te, _IS_AVAILABLE[precision.recipe])(return_reason=True)
        return None if available else reason
    if precision.dtype is torch.bfloat16 and not kernels.te.is_bf16_available():
        return "BF16 needs a GPU of compute capability 8.0 or higher"
    return None


def why_refused(precision: Precision, kernels: Kernels) -> str | None:
    """Return why this machine cannot run the precision, and what to do to compare it anyway; None if it can."""
    reason = why_unavailable(precision, kernels)
    gpu = "blackwell" if precision.name in ("mxfp8", "nvfp4") else "hopper"
    return (
        reason and f"{reason.rstrip('.')}; with PARITY_EMULATED_GPU={gpu}, the CPU kernels compare it (--backend cpu)"
    )
