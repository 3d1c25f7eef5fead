"""The emulated GPU, and the ``torch.cuda`` that TransformerEngine sees: one device whose memory is the host's.

Work is done when a call returns, so streams and events have nothing to order. Names that are not defined here come
from the real ``torch.cuda``, where they fail as they always do without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from te_on_cpu import EmulationError
from te_on_cpu.graphs import (
    CUDAGraph,
    check_not_capturing,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)

__all__ = ["CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"]  # from te_on_cpu.graphs

CUDA_VERSION = "13.0"


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of the emulated GPU that TE asks for, in the units of ``torch.cuda.get_device_properties``."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int


ADA = DeviceProperties("emulated Ada", 8, 9, 142, 48 << 30)
HOPPER = DeviceProperties("emulated Hopper", 9, 0, 132, 80 << 30)
BLACKWELL = DeviceProperties("emulated Blackwell", 10, 0, 148, 192 << 30)
RTX_BLACKWELL = DeviceProperties("emulated RTX Blackwell", 12, 0, 170, 32 << 30)
GPUS = {"ada": ADA, "hopper": HOPPER, "blackwell": BLACKWELL, "rtx_blackwell": RTX_BLACKWELL}
GPU_VARIABLE = "PARITY_EMULATED_GPU"
CUBLASLT_VARIABLE = "PARITY_EMULATED_CUBLASLT"
DEFAULT_CUBLASLT = 130200
CUDNN_VARIABLE = "PARITY_EMULATED_CUDNN"
DEFAULT_CUDNN = 91500


class BadVariable(EmulationError, ValueError):
    """Raised if an environment variable that describes the emulated GPU has an invalid value."""


# The GPU that ``emulated`` sets in place of the environment's.
chosen_gpu: ContextVar[DeviceProperties | None] = ContextVar("chosen_gpu", default=None)


def emulated_gpu() -> DeviceProperties:
    """Return the GPU that ``emulated`` has set, or the environment's.

    Raises:
        BadVariable: if ``environment_gpu`` does.
    """
    return chosen_gpu.get() or environment_gpu()


@functools.cache
def environment_gpu() -> DeviceProperties:
    """Return the GPU that the environment variable ``PARITY_EMULATED_GPU`` names; a Hopper if it is not set.

    The variable is read only once, because TE caches what the GPU supports.

    Raises:
        BadVariable: for a name that is not in ``GPUS``.
    """
    name = os.environ.get(GPU_VARIABLE, "hopper").lower()
    if name not in GPUS:
        raise BadVariable(
            f"{GPU_VARIABLE}={name!r} is not a GPU that can be emulated; set it to one of {', '.join(GPUS)}"
        )
    return GPUS[name]


@functools.cache
def cublaslt_version() -> int:
    """Return cuBLASLt's version, 13.2 or ``PARITY_EMULATED_CUBLASLT``, as ``cublasLtGetVersion`` encodes it.

    From 13.3 on (13.4 to 13.6 on a Hopper), TE 2.19 and later multiply the experts of a ``GroupedLinear`` as one
    grouped tensor.

    Raises:
        BadVariable: if the variable does not hold such a number.
    """
    value = os.environ.get(CUBLASLT_VARIABLE, str(DEFAULT_CUBLASLT))
    if not re.fullmatch(r"1\d{5}", value):
        raise BadVariable(f"{CUBLASLT_VARIABLE}={value!r} is not a version of cuBLASLt; write 130600 for 13.6.0")
    return int(value)


@functools.cache
def cudnn_version() -> int:
    """Return cuDNN's version, 9.15.0 or ``PARITY_EMULATED_CUDNN``, as ``cudnnGetVersion`` encodes it.

    From 9.21 on, TE 2.20 offers attention in MXFP8 on a Blackwell.

    Raises:
        BadVariable: if the variable does not hold such a number.
    """
    value = os.environ.get(CUDNN_VARIABLE, str(DEFAULT_CUDNN))
    if not re.fullmatch(r"9\d{4}", value):
        raise BadVariable(f"{CUDNN_VARIABLE}={value!r} is not a version of cuDNN 9; write 92100 for 9.21.0")
    return int(value)


def check_environment() -> None:
    """Read the variables that describe the emulated GPU.

    Raises:
        BadVariable: if one of them is not valid.
    """
    environment_gpu()
    cublaslt_version()
    cudnn_version()


def has_gemm_without_transposes() -> bool:
    """Return whether FP8 GEMMs read their operands in any order (``nvte_is_non_tn_fp8_gemm_supported``, TE 2.20.2)."""
    capability = get_device_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


class Stream:
    """A stream whose work is always finished."""

    cuda_stream = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        check_not_capturing("Stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event that has always happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event's record to that of ``end_event``."""
        return 1000.0 * (end_event._recorded - self._recorded)

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        check_not_capturing("Event.synchronize")

    def query(self) -> bool:
        return True


_STREAM = Stream()


def is_available() -> bool:
    return True


def device_count() -> int:
    """Return one device per process that ``torchrun`` has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> torch.device:
    """Return the CPU, because TE uses this as a device, and compares it with index 0 only to choose who prints."""
    return torch.device("cpu")


def set_device(device: Any) -> None: ...


def get_device_properties(device: Any = None) -> DeviceProperties:
    return emulated_gpu()


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return emulated_gpu().major, emulated_gpu().minor


def get_device_name(device: Any = None) -> str:
    return emulated_gpu().name


def current_stream(device: Any = None) -> Stream:
    return _STREAM


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def device(device: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def synchronize(device: Any = None) -> None:
    check_not_capturing("torch.cuda.synchronize")


def empty_cache() -> None: ...


def _lazy_init() -> None: ...


def _lazy_call(callback: Callable[[], None]) -> None:
    callback()


class _DefaultGenerators:
    """The one device's generator, which is PyTorch's own for the CPU."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _DefaultGenerators()


def get_rng_state(device: Any = None) -> torch.Tensor:
    check_not_capturing("reading the state of the random number generator")
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    check_not_capturing("setting the state of the random number generator")
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    torch.manual_seed(seed)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])


def seed() -> None:
    torch.seed()


def initial_seed() -> int:
    return torch.initial_seed()


# Names that the CPU has under other names, or that mean nothing without a device's own memory.

ByteTensor, CharTensor, ShortTensor = torch.ByteTensor, torch.CharTensor, torch.ShortTensor
IntTensor, LongTensor, BoolTensor = torch.IntTensor, torch.LongTensor, torch.BoolTensor
HalfTensor, BFloat16Tensor = torch.HalfTensor, torch.BFloat16Tensor
FloatTensor, DoubleTensor = torch.FloatTensor, torch.DoubleTensor

amp = SimpleNamespace(
    autocast=functools.partial(torch.amp.autocast, "cpu"), GradScaler=functools.partial(torch.amp.GradScaler, "cpu")
)
nccl = SimpleNamespace(version=lambda: (2, 28, 9), is_available=lambda tensors: False)


def is_initialized() -> bool:
    return True


def init() -> None: ...


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def default_stream(device: Any = None) -> Stream:
    return _STREAM


def set_stream(stream: Stream) -> None: ...


def ipc_collect() -> None: ...


def reset_peak_memory_stats(device: Any = None) -> None: ...


def reset_max_memory_allocated(device: Any = None) -> None: ...


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None: ...


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the emulated GPU's memory as both free and total, because it is really the host's."""
    return emulated_gpu().total_memory, emulated_gpu().total_memory


# Functions that rewritten sources call in place of methods and devices, see ``loading/words.py``.


def placed(place: Any) -> Any:
    """Return the CPU for a CUDA device or its index, and anything else as it is."""
    if isinstance(place, str):
        return "cpu" if place.partition(":")[0] == "cuda" else place
    if isinstance(place, torch.device):
        return torch.device("cpu") if place.type == "cuda" else place
    return torch.device("cpu") if isinstance(place, int) and not isinstance(place, bool) else place


def pinned(x: Any, is_asked: bool = True) -> Any:
    """Return a tensor as it is, and call ``pin_memory`` of other objects."""
    return x if isinstance(x, torch.Tensor) or not is_asked else x.pin_memory()


def comm_ptr(group: Any) -> int:
    """Return a pointer for a process group's NCCL communicator, which nothing here follows."""
    return id(group)


def record_stream(x: Any, stream: Any) -> None:
    """Do nothing for a tensor, and call ``record_stream`` of other objects."""
    if not isinstance(x, torch.Tensor):
        x.record_stream(stream)


@contextlib.contextmanager
def _nvtx_range(message: str) -> Iterator[None]:
    yield


nvtx = SimpleNamespace(
    range_push=lambda message: 0,
    range_pop=lambda: 0,
    range=_nvtx_range,
)


random = sys.modules[__name__]  # torch.cuda.random's functions are in torch.cuda, too


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)


# Contexts that change the GPU that TE finds.


_CachedFunction = type(functools.cache(len))


@contextmanager
def emulated(gpu: DeviceProperties) -> Iterator[None]:
    """Make TE's modules on CPU kernels see ``gpu`` within the context, in this thread."""
    token = chosen_gpu.set(gpu)
    _forget_gpu()
    try:
        yield
    finally:
        chosen_gpu.reset(token)
        _forget_gpu()


@contextmanager
def emulated_libraries(cuda_version: str = CUDA_VERSION, cublaslt: int = DEFAULT_CUBLASLT) -> Iterator[None]:
    """Make TE's modules on CPU kernels see these versions within the context; the kernels stay the same.

    Args:
        cuda_version: as ``torch.version.cuda``.
        cublaslt: as ``cublasLtGetVersion`` encodes it.
    """
    global CUDA_VERSION, cublaslt_version
    before = CUDA_VERSION, cublaslt_version
    CUDA_VERSION, cublaslt_version = cuda_version, functools.cache(lambda: cublaslt)
    _forget_gpu()
    try:
        yield
    finally:
        CUDA_VERSION, cublaslt_version = before
        _forget_gpu()


def _forget_gpu() -> None:
    """Clear TE's caches and ``..._SUPPORT`` variables, so that it asks again what its GPU supports."""
    modules = [module for name, module in sys.modules.items() if name.startswith("transformer_engine.")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, _CachedFunction):
                value.cache_clear()
            elif name.startswith("_") and name.endswith("_SUPPORT") and isinstance(value, tuple):
                setattr(module, name, None)
