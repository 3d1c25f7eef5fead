"""Hands out ``transformer_engine.pytorch``: on real kernels where there is a GPU, else on the CPU kernels."""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from importlib import metadata, util
from types import ModuleType
from typing import Literal

import torch

Backend = Literal["gpu", "cpu"]
_lock = threading.Lock()


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """Where TE's kernels run.

    Attributes:
        backend: ``gpu`` for TE's compiled kernels, ``cpu`` for the emulation in ``parity.cpu``.
        device: the device that inputs and parameters live on.
        te: the module ``transformer_engine.pytorch``.
    """

    backend: Backend
    device: torch.device
    te: ModuleType


def why_no_gpu() -> str | None:
    """The reason why TE's real kernels cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if util.find_spec("transformer_engine_torch") is None and not _ships_extension():
        return "TransformerEngine's compiled extension is not installed (pip install 'transformer-engine[pytorch]')"
    return None


def _ships_extension() -> bool:
    """Whether the extension lies inside the package ``transformer_engine``, as in a build from source."""
    spec = util.find_spec("transformer_engine")
    roots = spec.submodule_search_locations if spec else None
    from pathlib import Path

    return any(any(Path(root).glob("**/transformer_engine_torch*.so")) for root in roots or ())


def kernels(backend: Backend | Literal["auto"] = "auto") -> Kernels:
    """TE on the backend asked for; ``auto`` takes the GPU where TE's real kernels can run.

    A process runs one of the two: TE's Python is imported once, for real kernels or for the CPU's.

    Raises:
        BackendUnavailable: if the GPU is asked for and cannot be had, or the other backend is loaded already.
    """
    reason = why_no_gpu()
    if backend == "gpu" and reason is not None:
        raise BackendUnavailable(f"no real TransformerEngine kernels here: {reason}")
    chosen: Backend = "cpu" if backend == "cpu" or reason is not None else "gpu"
    with _lock:
        te = _load_on_cpu() if chosen == "cpu" else _load_on_gpu()
    device = torch.device("cpu") if chosen == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return Kernels(chosen, device, te)


def _load_on_gpu() -> ModuleType:
    from parity.cpu import loader

    if loader.is_loaded():
        raise BackendUnavailable("this process has already loaded TransformerEngine on the CPU kernels")
    return importlib.import_module("transformer_engine.pytorch")


def _load_on_cpu() -> ModuleType:
    from parity.cpu import extension, loader, versions

    if loader.is_loaded():
        return sys.modules["transformer_engine.pytorch"]
    if "transformer_engine" in sys.modules:
        raise BackendUnavailable(
            "this process has already imported transformer_engine itself; ask parity for it before that"
        )

    finder = loader.CpuFinder()
    sys.modules[extension.NAME] = extension.build(versions.installed_version())
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except BaseException:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in ("transformer_engine", extension.NAME)]:
            del sys.modules[name]
        raise


def version() -> str:
    """The version of the installed TransformerEngine, without importing it."""
    return metadata.version("transformer-engine")
