"""CUDA graphs of the emulated GPU: work that is recorded once and replayed on the same memory.

A graph on a GPU holds the kernels that were launched during its capture and the addresses that they were given, but
nothing of the Python that launched them. It is the same here. Within a capture, a dispatch mode records PyTorch's
operations, and each of TE's kernels is recorded as one call. A replay makes the same calls on the same memory. It does
not see decisions of Python, numbers on the host, or tensors that replaced others after the capture.

Unlike on a GPU, captured work is also executed during the capture, because sizes may depend on it. Afterwards, memory
that existed before gets its old values back, as if nothing had been executed. Memory allocated in the capture keeps its
values, and graphs never share it, whatever their pools.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["CUDAGraph", "CaptureError", "graph", "graph_pool_handle", "is_current_stream_capturing", "recorded"]

_aten = torch.ops.aten


class CaptureError(RuntimeError):
    """Raised, as CUDA does, if a stream that is being captured would have to wait for a value."""


def _not_permitted(what: str) -> CaptureError:
    return CaptureError(
        f"operation not permitted when stream is capturing: {what}; a CUDA graph replays kernels and not the Python "
        "that launched them, so keep the value on the device (torch.where, a tensor of one element), or leave this "
        "part out of the graph"
    )


# The contents of a graph: calls, and the memory that each of them wrote.


class _Step(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class _Operation:
    """A call of one of PyTorch's operations, on aliases of the memory that its tensors had in the capture."""

    function: Any
    args: Any
    kwargs: Any
    written: tuple[Tensor, ...]

    def replay(self) -> None:
        _store(self.written, [x for x in tree_leaves(self.function(*self.args, **self.kwargs)) if _is_plain(x)])


@dataclass(frozen=True)
class _KernelCall:
    """A call of one of TE's kernels.

    Attributes:
        held: for each object among the arguments, its attributes and a copy of them from the time of the call. TE
            reconfigures a quantizer for each tensor, and a quantized tensor drops buffers that are no longer needed; a
            kernel on a GPU reads both when it is launched.
        written: the memory of arguments and results after the call.
    """

    kernel: Callable[..., Any]
    args: Any
    kwargs: Any
    held: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    written: tuple[Tensor, ...]

    def replay(self) -> None:
        now = [dict(attributes) for attributes, _ in self.held]
        try:
            for attributes, before in self.held:
                _refill(attributes, before)
            result = self.kernel(*self.args, **self.kwargs)
            _store(self.written, list(_tensors((self.args, self.kwargs, result))))
        finally:
            for (attributes, _), content in zip(self.held, now, strict=True):
                _refill(attributes, content)


def _refill(attributes: dict[str, Any], content: Mapping[str, Any]) -> None:
    attributes.clear()
    attributes.update(content)


def _store(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy the results of a call to the memory that it wrote in the capture, unless they are already there."""
    if [x.shape for x in places] != [x.shape for x in values]:
        raise RuntimeError(
            "a call in a CUDA graph returned results of other sizes than in the capture; in a graph, the sizes of "
            "results must not depend on values"
        )
    for place, value in zip(places, values, strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not _is_wrapper(type(x)) and x.device.type != "meta"


def _alias(x: Any) -> Any:
    """Return an alias of a plain tensor's memory, because TE frees some tensors by ``x.data = torch.Tensor()``."""
    return x.data if _is_plain(x) else x


def _is_wrapper(kind: type) -> bool:
    """Return whether tensors of this class wrap other tensors, as TE's quantized tensors do."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _objects(values: object, seen: set[object] | None = None) -> Iterator[object]:
    """Yield plain tensors, objects of TE's classes and the contents of these objects, each once and in order."""
    seen = set() if seen is None else seen
    for leaf in tree_leaves(values):
        key = (leaf.data_ptr(), leaf.shape, leaf.stride()) if _is_plain(leaf) else id(leaf)
        if key in seen:
            continue
        seen.add(key)
        if _is_plain(leaf):
            yield leaf
        elif (
            hasattr(leaf, "__dict__")
            and not isinstance(leaf, Enum)
            and type(leaf).__module__.startswith("transformer_engine.")
        ):
            yield leaf
            yield from _objects(vars(leaf), seen)


def _tensors(values: object) -> Iterator[Tensor]:
    return (cast(Tensor, one).data for one in _objects(values) if _is_plain(one))


# A capture. Operations make a GPU's stream wait if Python must know the size or the values of their results.

_WAITING = {
    _aten._local_scalar_dense: "Tensor.item(), float(), int() or bool() reads a value that the graph computes",
    _aten.is_nonzero: "a branch depends on a value that the graph computes",
    _aten.equal: "torch.equal reads values that the graph computes",
    _aten.nonzero: "torch.nonzero has a result whose size depends on values",
    _aten.masked_select: "torch.masked_select has a result whose size depends on values",
    _aten.bincount: "torch.bincount has a result whose size depends on values",
    **dict.fromkeys(
        (_aten._unique, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive),
        "torch.unique has a result whose size depends on values",
    ),
}
_MASKED = "an index is a mask, whose number of elements depends on values"
_REPEATED = "torch.repeat_interleave without output_size has a result whose size depends on values"
_UNFILLED = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})


# Methods that read values on the host. They call no operation if the tensor is on the host anyway, as it is here.
_READING = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu})


class _Reads(TorchFunctionMode):
    """Refuses calls that would copy values from a GPU to the host."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and not self._recorder.knows(args[0]):
            # In TE's own modules, ``cpu`` was put in place of ``cuda``.
            is_cuda = func is Tensor.cpu and _is_of_te(sys._getframe(1).f_globals.get("__name__"))
            if not is_cuda:
                raise _not_permitted(f"Tensor.{func.__name__} copies values that the graph computes to the host")
        return func(*args, **(kwargs or {}))


def _is_of_te(name: object) -> bool:
    return str(name).startswith("transformer_engine.")


class _Recorder(TorchDispatchMode):
    """Records the calls of operations and kernels.

    Attributes:
        steps: the recorded calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.is_paused = False
        self._made: dict[int, bool] = {}  # by the address of the capture's memory, whether Python may know its values
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._alive: list[Tensor] = []  # so that no address is reused
        self._random = torch.get_rng_state()
        self._reads = _Reads(self)

    def __enter__(self) -> _Recorder:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._reads.__exit__(*raised)

    def knows(self, x: Any) -> bool:
        """Return whether Python may know a tensor's values: they come from the host, or a kernel is running."""
        return self.is_paused or not _is_plain(x) or self._made.get(_address(x), False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # so that it computes with plain tensors, which are recorded here
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        read = [x.data for x in tree_leaves((args, kwargs)) if _is_plain(x)]
        if func.overloadpacket is _aten.lift_fresh:  # torch.tensor has just made it from numbers on the host
            self._made |= {_address(x): True for x in read}
            self._alive += read
        self._keep(read)
        is_known = all(self._made.get(_address(x), False) for x in read)
        if reason := _why_waiting(func, args, kwargs):
            if not is_known:
                raise _not_permitted(reason)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        made = tuple(x.data for x in tree_leaves(result) if _is_plain(x))
        self._alive += made
        addresses = {_address(x) for x in read}
        is_view = not func._schema.is_mutable and {_address(x) for x in made} <= addresses
        if (made and not is_view) or func._schema.is_mutable:  # operations that change lists of tensors have no result
            if func.overloadpacket not in _UNFILLED:
                self.steps.append(_Operation(func, tree_map(_alias, args), tree_map(_alias, kwargs), made))
            written = (x for x in made or read if _address(x) in self._made or _address(x) not in addresses)
            self._made |= {_address(x): is_known for x in written}
        return result

    def call(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one of TE's kernels, and record the call unless another kernel makes it."""
        if self.is_paused:
            return kernel(*args, **kwargs)
        self._keep(_tensors((args, kwargs)))
        held = tuple(
            (vars(one), {name: _alias(value) for name, value in vars(one).items()})
            for one in _objects((args, kwargs))
            if not _is_plain(one)
        )
        frozen = tree_map(_alias, (args, kwargs))
        self.is_paused = True
        try:
            result = kernel(*args, **kwargs)
        finally:
            self.is_paused = False
        written = tuple(_tensors((*frozen, result)))
        if written:
            self.steps.append(_KernelCall(kernel, frozen[0], frozen[1], held, written))
            self._alive += written
            self._made |= {_address(x): False for x in written if _address(x) not in self._before}
        return result

    def _keep(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        """Keep a copy of memory that existed before the capture."""
        for x in tensors:
            address = _address(x)
            if address and address not in self._made and address not in self._before:
                self._before[address] = x.untyped_storage(), x.untyped_storage().clone()

    def restore(self) -> None:
        """Restore memory that existed before the capture, and the state of the random number generator."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        torch.set_rng_state(self._random)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _why_waiting(function: Any, args: Any, kwargs: Any) -> str | None:
    packet = function.overloadpacket
    if packet is _aten.repeat_interleave:
        has_size = kwargs.get("output_size") is not None or function is _aten.repeat_interleave.self_int
        return None if has_size else _REPEATED
    if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        is_fill = packet is not _aten.index and args[2].numel() == 1  # which is done by masked_fill
        return _MASKED if masks and not is_fill else None
    return _WAITING.get(packet)


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def is_current_stream_capturing() -> bool:
    """Return whether this thread's operations are recorded; those inside one of TE's kernels are not."""
    recorder = _recorder.get()
    return recorder is not None and not recorder.is_paused


def check_not_capturing(what: str) -> None:
    """Check that no capture is in progress.

    Raises:
        CaptureError: if one is; the message says that ``what`` is not permitted.
    """
    if is_current_stream_capturing():
        raise _not_permitted(what)


@functools.cache
def recorded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of TE's kernels so that it behaves like a GPU kernel.

    A capture records its call, ``torch.compile`` does not trace into it, and autograd does not follow its operations,
    even if a backward pass calls it with autograd on.
    """

    @functools.wraps(kernel)
    @torch.no_grad()
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        return kernel(*args, **kwargs) if recorder is None else recorder.call(kernel, args, kwargs)

    return cast(Callable[..., Any], torch.compiler.disable(call))


class CUDAGraph:
    """Records and replays a graph like ``torch.cuda.CUDAGraph``.

    It has no ``register_generator_state``, so TE copies states of random number generators, which a capture refuses.
    Each replay draws new numbers from the default generator, as on a GPU.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[_Step] | None = None
        self._capture: tuple[_Recorder, Token[_Recorder | None]] | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Start to record the operations of this thread."""
        check_not_capturing("a capture begins")
        recorder = _Recorder()
        self._capture = recorder, _recorder.set(recorder)
        recorder.__enter__()

    def capture_end(self) -> None:
        """Stop recording, and restore the memory that existed before."""
        if self._capture is None:
            raise RuntimeError("capture_end of a CUDA graph whose capture has not begun")
        recorder, token = self._capture
        recorder.__exit__(None, None, None)
        _recorder.reset(token)
        recorder.restore()
        self._steps, self._capture = recorder.steps, None

    @torch.no_grad()
    def replay(self) -> None:
        """Make the recorded calls again, on the same memory."""
        check_not_capturing("a replay of another graph")
        if self._steps is None:
            raise RuntimeError("replay of a CUDA graph that was not captured, or was reset")
        for step in self._steps:
            step.replay()

    def reset(self) -> None:
        """Drop the recorded calls."""
        self._steps = None

    def pool(self) -> tuple[int, int]:
        """Return a token for the graph's memory, which is not shared here."""
        return graph_pool_handle()

    def enable_debug_mode(self) -> None: ...


class graph:  # named as in torch.cuda
    """Captures a graph within a context, like ``torch.cuda.graph``."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._graph.capture_end()
        if kind is not None:
            self._graph.reset()


def graph_pool_handle() -> tuple[int, int]:
    """Return a token for the memory of graphs."""
    return 0, 1
