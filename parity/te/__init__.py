"""Hand out ``transformer_engine.pytorch``: on real kernels if there is a GPU, else on the CPU kernels."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from parity.cpu import versions
from parity.cpu.loading import loader
from parity.machine import devices, process
from parity.machine.process import lasting
from parity.user_error import UserError

Backend = Literal["gpu", "cpu"]
_lock = threading.RLock()  # reentrant, since importing TE may ask for it again


class BackendUnavailable(UserError, RuntimeError):
    """Raised if the backend that was asked for cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """Say where TE's kernels run.

    Attributes:
        backend: ``gpu`` for TE's compiled kernels, ``cpu`` for the emulation in ``parity.cpu``.
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
    if not devices.is_installed():
        return "TransformerEngine's compiled extension is not installed (pip install 'transformer-engine[pytorch]')"
    return None


def kernels(backend: Backend | Literal["auto"] = "auto") -> Kernels:
    """Return TE on the backend asked for; ``auto`` takes the GPU if TE's real kernels can run.

    A process runs one of the two: TE's Python is imported once, for real kernels or for the CPU's.

    Raises:
        BackendUnavailable: if the GPU is asked for and cannot be had, TE's kernels are there but do not load, or the
            other backend is loaded already.
    """
    reason = why_no_gpu()
    if backend == "gpu" and reason is not None:
        raise BackendUnavailable(f"no real TransformerEngine kernels here: {reason}")
    if backend == "cpu" or reason is not None:
        process.use_huge_pages()
        process.keep_freed()
        with on_cpu():
            return Kernels("cpu", torch.device("cpu"), _import())
    if loader.is_loaded():
        raise BackendUnavailable("this process has already loaded TransformerEngine on the CPU kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        te = _import()
        _as_if_compiled()
        return Kernels("gpu", device, te)
    except Exception as error:  # each of TE's libraries, and its checks of them, raises something else
        raise BackendUnavailable(
            f"TransformerEngine's compiled kernels are installed, but do not load: {type(error).__name__}: {error}; "
            "install a build for this PyTorch and its CUDA, or choose the backend cpu"
        ) from error


def _as_if_compiled() -> None:
    """Change what PyTorch's compiler changes for good in a process that compiles, as TE's fused functions do on a GPU.

    Else the first pair that meets one would be told to have changed it (``torch/_inductor/compile_fx.py`` and
    ``torch/_dynamo/mutation_guard.py`` of 2.11 and 2.13).
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within the context, ``import transformer_engine.pytorch`` imports TE on the CPU kernels, GPU or not.

    What was imported stays so: TE's modules compute on the CPU afterwards as well.

    Raises:
        BackendUnavailable: if this process has already imported TransformerEngine on its real kernels.
        UnsupportedTEVersion: if TransformerEngine is not installed, or too old.
    """
    if loader.is_loaded():
        yield
        return
    if "transformer_engine" in sys.modules:
        raise BackendUnavailable(
            "this process has already imported transformer_engine itself; ask parity for it before that"
        )
    versions.installed_version()
    finder = loader.CpuFinder(lambda: True)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if not loader.is_loaded():  # else TE's modules still import some of their own when they are first used
            sys.meta_path.remove(finder)


@contextmanager
def refusing_meta_tensors() -> Iterator[None]:
    """Within the context, TE's compiled functions raise if they are given a tensor on the meta device.

    They would read its address, which is 0: an illegal access, after which CUDA answers nothing. A module whose weights
    are quantized where they are made gives them such tensors. The CPU kernels compute shapes of them.

    Raises:
        TypeError: within the context.
    """
    compiled = None if loader.is_loaded() else sys.modules.get("transformer_engine_torch")
    functions = {name: one for name, one in vars(compiled).items() if inspect.isbuiltin(one)} if compiled else {}

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, torch.Tensor) and one.is_meta for one in tree_leaves((args, kwargs))):
                raise TypeError(f"TransformerEngine's compiled {name} needs memory, and a tensor on meta has none")
            return function(*args, **kwargs)

        return call

    for name, function in functions.items():
        setattr(compiled, name, refusing(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(compiled, name, function)


def serve_imports() -> None:
    """Make ``import transformer_engine.pytorch`` work without a GPU too, on the CPU kernels, from now on.

    If TE's real kernels can run, nothing changes.
    """
    if not any(isinstance(finder, loader.CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, loader.CpuFinder(lambda: why_no_gpu() is not None))


def _import() -> ModuleType:
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
