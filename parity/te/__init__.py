"""Hand out ``transformer_engine.pytorch``, and define what the name of a precision means.

TE runs on its real kernels if there is a GPU, else on the CPU kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from parity.machine import devices as of_machine
from parity.machine import process
from parity.machine.process import lasting
from parity.numerics.formats import AttentionPart, Rounding, tf32
from parity.settings import DECLARED_PRECISIONS
from parity.te.recipes import derive_rounding, find_families, has_delayed_scales
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
        recipe: makes a new object of a class of ``transformer_engine.common.recipe``; None if nothing is quantized.
        source: ``FILE::NAME`` if a file of a user's declares it, so that another process can load it; else empty.
        replaced: roundings to use instead of the recipe's.
    """

    name: str
    dtype: torch.dtype
    recipe: Callable[[], Any] | None = None
    source: str = ""
    replaced: Rounding | None = None

    def new_recipe(self) -> Any:
        """Return a new object of TE's recipe; None if there is no recipe.

        Raises:
            UserError: if TE refuses its arguments; says TE's reason.
        """
        if self.recipe is None:
            return None
        try:
            return self.recipe()
        except Exception as error:
            where = f" ({self.source})" if self.source else ""
            told = error.errors() if hasattr(error, "errors") else ()  # TE's recipes are checked by pydantic
            reason = "; ".join(each["msg"] for each in told) or f"{type(error).__name__}: {error}"
            raise UserError(f"the recipe {self.name}{where} is refused: {reason}") from error

    @cached_property
    def rounding(self) -> Rounding:
        """What a faithful kernel rounds, for the expected error; that of a recipe follows from its quantizers."""
        if self.replaced is not None:
            return self.replaced
        if self.recipe is None:
            operands = tf32 if self.dtype is torch.float32 else None
            return Rounding(self.dtype, operands, operands, operands)
        return self._derive_from_recipe(derive_rounding, self.dtype)

    @cached_property
    def scaled_by_history(self) -> frozenset[str]:
        """What is scaled by the amaxes of earlier passes: ``linear`` layers' operands, and parts of attention."""
        delayed = {"linear"} if self.recipe is not None and self._derive_from_recipe(has_delayed_scales) else set()
        attention = self.rounding.attention
        if attention.qkv_gradients is not None:
            return frozenset(delayed | set(get_args(AttentionPart)))
        # What is cast inside the kernel always has a scale from before.
        return frozenset(delayed | ({"probabilities", "score_gradients"} if attention.probabilities else set()))

    @cached_property
    def warmup_passes(self) -> int:
        """The least number of passes before the one that is compared: 2 if scales come from earlier passes."""
        return 2 if self.scaled_by_history else 0

    @cached_property
    def families(self) -> tuple[str, ...]:
        """The built-in precisions whose formats it has, the coarsest last, by whose laws it is judged."""
        return find_families(self.rounding, "linear" in self.scaled_by_history)

    def _derive_from_recipe(self, derive: Callable[..., Any], *arguments: Any) -> Any:
        """Return what follows from the recipe's quantizers, which TE makes and so must be loaded."""
        if "transformer_engine.pytorch" not in sys.modules:
            kernels()
        recipe = self.new_recipe()
        try:
            return derive(recipe, *arguments)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

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


def _make_builtin(name: str) -> Callable[[], Any]:
    """Return a function that makes a recipe of TE's class of this name with its default arguments."""
    return lambda: getattr(importlib.import_module("transformer_engine.common.recipe"), name)()


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16),
        Precision("fp8_delayed", torch.bfloat16, _make_builtin("DelayedScaling")),
        Precision("fp8_current", torch.bfloat16, _make_builtin("Float8CurrentScaling")),
        Precision("fp8_block", torch.bfloat16, _make_builtin("Float8BlockScaling")),
        Precision("mxfp8", torch.bfloat16, _make_builtin("MXFP8BlockScaling")),
        Precision("nvfp4", torch.bfloat16, _make_builtin("NVFP4BlockScaling")),
    )
}
"""The built-in ones by name, those of ``parity.settings.PRECISION_NAMES``."""

DECLARED: dict[str, Precision] = DECLARED_PRECISIONS
"""Those that ``parity.recipe`` has declared, by name."""


def precision_named(name: str) -> Precision:
    """Return the precision of this name, built in or declared."""
    return PRECISIONS[name] if name in PRECISIONS else DECLARED[name]


# The function of ``transformer_engine.pytorch`` that says whether the GPU at hand runs a family's formats.
_IS_AVAILABLE = {
    "fp8_delayed": "is_fp8_available",
    "fp8_current": "is_fp8_available",
    "fp8_block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def why_unavailable(precision: Precision, kernels: Kernels) -> str | None:
    """Return why this machine cannot run the precision on these kernels, or None if it can.

    On the CPU kernels, TE itself gives the answer for the emulated GPU.
    """
    for family in precision.families:
        if family in _IS_AVAILABLE:
            available, reason = getattr(kernels.te, _IS_AVAILABLE[family])(return_reason=True)
            if not available:
                return str(reason)
    if precision.dtype is torch.bfloat16 and not kernels.te.is_bf16_available():
        return "BF16 needs a GPU of compute capability 8.0 or higher"
    return None


def why_refused(precision: Precision, kernels: Kernels) -> str | None:
    """Return why this machine cannot run the precision, and what to do to compare it anyway; None if it can."""
    reason = why_unavailable(precision, kernels)
    gpu = "hopper" if {"mxfp8", "nvfp4"}.isdisjoint(precision.families) else "blackwell"
    return (
        reason and f"{reason.rstrip('.')}; with PARITY_EMULATED_GPU={gpu}, the CPU kernels compare it (--backend cpu)"
    )
