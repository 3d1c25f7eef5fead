"""``torch.distributed`` for the emulated GPUs, which uses gloo in place of NCCL because all tensors are on the CPU.

Names that are not defined here come from the real ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

_BACKEND = "gloo"


def _meant(backend: str | None) -> str | None:
    """Return gloo in place of a backend for GPUs: ``nccl``, ``cuda:nccl`` or ``cpu:gloo,cuda:nccl``."""
    return _BACKEND if backend is None or "nccl" in backend.lower() else backend


def is_nccl_available() -> bool:
    return True


def is_backend_available(backend: str) -> bool:
    return dist.is_backend_available(_meant(backend) or _BACKEND)


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Start the default group as ``torch.distributed`` does; NCCL's options and the device are ignored."""
    _drop(kwargs, "device_id", "pg_options")
    dist.init_process_group(_meant(backend), *args, **kwargs)


def new_group(
    ranks: Sequence[int] | None = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Make a group as ``torch.distributed`` does."""
    _drop(kwargs, "device_id", "pg_options")
    return dist.new_group(ranks, timeout, backend and _meant(backend), None, *args[1:], **kwargs)


def new_subgroups(*args: Any, **kwargs: Any) -> Any:
    return dist.new_subgroups(*args, **_for_cpus(kwargs))


def new_subgroups_by_enumeration(*args: Any, **kwargs: Any) -> Any:
    return dist.new_subgroups_by_enumeration(*args, **_for_cpus(kwargs))


def barrier(*args: Any, **kwargs: Any) -> Any:
    _drop(kwargs, "device_ids")
    return dist.barrier(*args, **kwargs)


def _for_cpus(options: dict[str, Any]) -> dict[str, Any]:
    _drop(options, "pg_options")
    return {**options, "backend": options.get("backend") and _meant(options["backend"])}


def _drop(arguments: dict[str, Any], *names: str) -> None:
    for name in names:
        arguments.pop(name, None)


# Sending and receiving. NCCL's work can be waited for repeatedly, and TE's context parallelism waits twice. With gloo,
# a second wait never ends.


class _Work:
    """A gloo work handle that can be waited for repeatedly."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done = False

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        if not self._done:
            self._work.wait(*args, **kwargs)
            self._done = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def isend(*args: Any, **kwargs: Any) -> Any:
    return _again(dist.isend(*args, **kwargs))


def irecv(*args: Any, **kwargs: Any) -> Any:
    return _again(dist.irecv(*args, **kwargs))


def _again(work: Any) -> Any:
    return None if work is None else _Work(work)  # ranks outside the group get no work


class P2POp(dist.P2POp):
    """One operation of a batch, which may be given as a function of this module."""

    def __new__(cls, op: Callable[..., Any], *args: Any, **kwargs: Any) -> P2POp:
        return super().__new__(cls, _REAL.get(op, op), *args, **kwargs)

    def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_REAL.get(op, op), *args, **kwargs)


_REAL: dict[Callable[..., Any], Callable[..., Any]] = {isend: dist.isend, irecv: dist.irecv}


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
    return [_again(work) for work in dist.batch_isend_irecv(p2p_op_list)]


def _coalescing_manager(
    group: Any = None, device: torch.device | None = None, async_ops: bool = False
) -> AbstractContextManager[Any]:
    """Group collectives as ``torch.distributed`` does, without the device, so that no backend is asked to join them."""
    return distributed_c10d._coalescing_manager(group, None, async_ops)


# Gathering. A thread of gloo writes the result with PyTorch's operations and autograd on, and autograd refuses to write
# to the parts of a split tensor. NCCL's kernels write to any tensor.


def _detached(name: str) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        return getattr(dist, name)(*tree_map_only(Tensor, Tensor.detach, args), **kwargs)

    return collective


all_gather = _detached("all_gather")
all_gather_into_tensor = _detached("all_gather_into_tensor")
reduce_scatter_tensor = _detached("reduce_scatter_tensor")


def __getattr__(name: str) -> Any:
    owner = dist if hasattr(dist, name) else distributed_c10d
    return getattr(owner, name)
