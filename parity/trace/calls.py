"""Record a reference's calls of PyTorch's functions, change the results of some, and keep golden's GEMMs."""

from __future__ import annotations

import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parity.trace.trace import Call, Edit, Site, Trace, Value

_OUTSIDE = "around the module"
# Types of arguments that hold no tensors.
_LEAVES = (int, float, str, type(None), torch.dtype)
# Calls that return no tensor and reveal nothing about a tensor's numbers.
_ABOUT_SHAPES = frozenset(
    {"shape", "size", "dim", "ndim", "len", "numel", "stride", "is_contiguous", "layout", "is_nested"}
)
_ABOUT_TYPES = frozenset({"dtype", "device", "type", "itemsize", "is_cuda", "is_floating_point", "requires_grad"})


class Misfit(RuntimeError):
    """Raised if an edit does not fit, because the module does not make the calls that it made when it was traced."""


@contextmanager
def tracing(module: nn.Module, with_graph: bool = False) -> Iterator[Trace]:
    """Trace the calls of a module within the context; the trace is complete afterwards.

    Args:
        module: the module.
        with_graph: whether tensors are kept with the graph that autograd needs, instead of being detached.
    """
    recorder = _Recorder(module, with_graph)
    with _track_frames(module, recorder.frames), recorder:
        yield recorder.trace


@contextmanager
def edited(module: nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Apply the edits to one forward pass of a module within the context.

    Raises:
        Misfit: while the module runs, if it does not make the same calls as when it was traced.
    """
    editor = _Editor(edits)
    with _track_frames(module, editor.frames), editor:
        yield


class _Frames:
    """The stack of submodules whose ``forward`` is running, which identifies the site of each call."""

    def __init__(self) -> None:
        self._invocations: Counter[str] = Counter()
        self._stack: list[tuple[str, int, Counter[str]]] = [(_OUTSIDE, 0, Counter())]

    def enter(self, name: str) -> None:
        self._stack.append((name, self._invocations[name], Counter()))
        self._invocations[name] += 1

    def leave(self) -> None:
        self._stack.pop()

    def site(self, function: str) -> Site:
        """Return the site of the next call of a function with this name."""
        module, invocation, calls = self._stack[-1]
        calls[function] += 1
        return module, invocation, function, calls[function] - 1


@contextmanager
def _track_frames(module: nn.Module, frames: _Frames) -> Iterator[None]:
    names = {id(submodule): name for name, submodule in module.named_modules()}

    def enter(submodule: nn.Module, args: Any) -> None:
        if id(submodule) in names:
            frames.enter(names[id(submodule)])

    def leave(submodule: nn.Module, args: Any, result: Any) -> None:
        if id(submodule) in names:
            frames.leave()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, with_graph: bool) -> None:
        super().__init__()
        self.frames = _Frames()
        self.trace = Trace()
        self._with_graph = with_graph
        self._numbers: dict[int, Value] = {}
        self._written: dict[int, Call] = {}  # by a tensor's id: the call that last wrote into it through another tensor
        self._alive: list[Tensor] = []  # kept, so that no id is reused
        self._names = {
            **{id(buffer): (self.trace.buffers, name) for name, buffer in module.named_buffers()},
            **{id(parameter): (self.trace.parameters, name) for name, parameter in module.named_parameters()},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        changed = changed_in_place(func, args, kwargs)
        if changed is None:
            result = func(*args, **kwargs)
            if not _is_recorded(result):
                if canonical_name(func) not in _ABOUT_SHAPES | _ABOUT_TYPES:
                    read = (self._numbers.get(id(x)) for x in tensors_in((args, kwargs)))
                    self.trace.read |= {value.number for value in read if value is not None}
                return result
        site = self.frames.site(canonical_name(func))
        values = {
            id(x): self._find_or_add_value(x, Value(-1, site, i, False))
            for i, x in enumerate(tensors_in((args, kwargs)))
        }
        named_args, named_kwargs = _replace_by_values((args, kwargs), values)
        sharing: list[int] = []
        if changed is not None:
            sharing = self._keep_what_was(changed)
            result = func(*args, **kwargs)
        returned = changed if changed is not None else result
        values |= {
            id(x): self._add_value(x, Value(-1, site, i, True))
            for i, x in enumerate(tensors_in(returned))
            if x is changed or id(x) not in values
        }
        results = _replace_by_values(returned, values)
        call = Call(site, canonical_name(func), func, named_args, named_kwargs, results)
        self.trace.add(call)
        self._note_what_changed(sharing, changed, call)
        return result

    def _find_or_add_value(self, tensor: Tensor, where: Value) -> Value:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        value = self._add_value(tensor, where)
        if id(tensor) in self._written:
            self.trace.note_producer(value, self._written.pop(id(tensor)))
        return value

    def _add_value(self, tensor: Tensor, where: Value) -> Value:
        value = Value(len(self.trace.tensors), where.site, where.position, where.returned)
        self._numbers[id(tensor)] = value
        self._alive.append(tensor)
        self.trace.tensors.append(tensor if self._with_graph else tensor.detach())
        names, name = self._names.get(id(tensor), (None, ""))
        if names is not None:
            names[value.number] = name
        return value

    def _keep_what_was(self, changed: Tensor) -> list[int]:
        """Copy the traced tensors that share memory with one that is about to change, and return their numbers."""
        address = changed.untyped_storage().data_ptr()
        sharing = [i for i, x in enumerate(self.trace.tensors) if x.untyped_storage().data_ptr() == address]
        for number in sharing:
            self.trace.tensors[number] = self.trace.tensors[number].clone()
        return sharing

    def _note_what_changed(self, sharing: Sequence[int], changed: Tensor | None, call: Call) -> None:
        """Treat tensors that overlap with ``changed`` and have changed with it as new values from now on."""
        for number in sharing:
            tensor = self._alive[number]
            if tensor is not changed and not torch.equal(tensor, self.trace.tensors[number]):
                self._numbers.pop(id(tensor), None)
                self._written[id(tensor)] = call


class _Editor(TorchFunctionMode):
    def __init__(self, edits: Sequence[Edit]) -> None:
        super().__init__()
        self.frames = _Frames()
        self._edits: dict[Site, list[Edit]] = {}
        self._needed: dict[Site, list[Value]] = {}
        self._found: dict[int, Tensor] = {}
        for one in edits:
            self._edits.setdefault(one.site, []).append(one)
            for value in one.needs:
                self._needed.setdefault(value.site, []).append(value)
        self._names = {site[2] for site in (*self._edits, *self._needed)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        name = canonical_name(func)
        changed = changed_in_place(func, args, kwargs)
        # Most functions are in no edit. Calls are counted by name, so calls of these need not be counted.
        is_edited = name in self._names
        if not is_edited:
            if self._found and changed is not None:
                self._keep_what_was(changed)
            return func(*args, **kwargs)
        if changed is None:
            result = func(*args, **kwargs)
            if not _is_recorded(result):
                return result
        site = self.frames.site(name)
        needed = self._needed.get(site, ())
        self._collect_needed_tensors(needed, False, (args, kwargs))
        edits = self._edits.get(site, ())
        if changed is not None:
            self._keep_what_was(changed)
            if edits:  # the call works on a copy, because its gradient may need what it returned before the edits
                copy = changed.clone()
                args, kwargs = mapped((args, kwargs), lambda x: copy if x is changed else x)
            result = func(*args, **kwargs)
            if edits:
                result = copy  # as the function returns it, or returns nothing
        for one in edits:
            if one.detached is not None:
                given, named = without_gradient((args, kwargs), one.detached)
                result = func(*given, **named)
            result = one.compute(result, *(self._found_value(value) for value in one.needs))
        if edits and changed is not None:
            result = changed.copy_(result)  # the caller continues with the tensor that the call changes
        self._collect_needed_tensors(needed, True, result if changed is None else changed)
        return result

    def _collect_needed_tensors(self, needed: Sequence[Value], returned: bool, tree: Any) -> None:
        wanted = [value for value in needed if value.returned is returned]
        if wanted:
            tensors = tensors_in(tree)
            self._found.update({value.number: tensors[value.position] for value in wanted})

    def _keep_what_was(self, changed: Tensor) -> None:
        """Copy the found tensors that share memory with one that is about to change, as the trace did."""
        address = changed.untyped_storage().data_ptr()
        for number, x in self._found.items():
            if x.untyped_storage().data_ptr() == address:
                self._found[number] = x.clone()

    def _found_value(self, value: Value) -> Tensor:
        if value.number not in self._found:
            raise Misfit(f"no call at {value.site} came before")
        return self._found[value.number]


def without_gradient(arguments: Any, position: int) -> Any:
    """Return the arguments of a call, with one tensor among them detached."""
    leaves, structure = tree_flatten(arguments)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    leaves[tensors[position]] = leaves[tensors[position]].detach()
    return tree_unflatten(leaves, structure)


def _expose_inner_calls(function: Any) -> Any:
    """Return a function of ``torch.nn.functional`` that shows a mode its own calls, and not only a single one."""
    seen = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)


def _compute_glu(input: Tensor, dim: int = -1) -> Tensor:
    """Compute ``F.glu`` by several calls, because a mode sees it as a single one."""
    up, gate = input.chunk(2, dim)
    return up * gate.sigmoid()


_OPENED = {F.multi_head_attention_forward: _expose_inner_calls(F.multi_head_attention_forward), F.glu: _compute_glu}


@functools.lru_cache(4096)
def canonical_name(function: Any) -> str:
    """Return one name for all forms of a function: ``mul`` for ``Tensor.mul``, ``torch.mul`` and ``Tensor.mul_``.

    The name of an attribute, such as ``T``, is returned as it is.
    """
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))
    return name.strip("_")


def _is_recorded(result: Any) -> bool:
    return isinstance(result, Tensor) or bool(tensors_in(result))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among a call's arguments or results, in order."""
    found: list[Tensor] = []
    mapped(tree, found.append)
    return found


def _replace_by_values(tree: Any, values: Mapping[int, Value]) -> Any:
    """Return the tree with each tensor replaced by its value, looked up by the tensor's id."""
    return mapped(tree, lambda tensor: values[id(tensor)])


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return what ``tree_map_only`` returns, in a tenth of the time for most calls' arguments."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, _LEAVES):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)(mapped(branch, change, kind) for branch in tree)
    if type(tree) is dict:
        return {name: mapped(branch, change, kind) for name, branch in tree.items()}
    return tree_map_only(kind, change, tree)


@functools.lru_cache(4096)
def writes(function: Any) -> bool:
    """Return whether a function writes to its first argument, as ``x.add_(y)``, ``x |= y`` and ``x.data = y`` do."""
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return canonical_name(function) == "data"
    if name.startswith("__i") and hasattr(operator, f"__{name[3:]}"):  # __ior__, but not __invert__ or __index__
        return True
    return bool(name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))


def changed_in_place(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a call writes to, or None if it writes to none."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    is_written = args and isinstance(args[0], Tensor) and (kwargs.get("inplace") or writes(function))
    return args[0] if is_written else None


def is_in_place(call: Call) -> bool:
    """Return whether a recorded call writes to one of its arguments."""
    return "out" in call.kwargs or bool(call.kwargs.get("inplace")) or writes(call.function)


# Keep golden's GEMMs, so that a pass that differs little from golden need not compute them again in FP64.


_aten = torch.ops.aten
# For each GEMM, the same GEMM without an addend.
_MULTIPLY = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.mm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}
# If an operand changes by more than this share of its norm, it is another GEMM of the same shapes.
_SAME_OPERAND = 0.05
# The share of a change's norm that FP32 loses.
_LOST = 1e-7
# This number of rows is enough to see that most changes do not scale rows.
_ROWS_LOOKED_AT = 4
# FP32 holds products to full precision if their operands' norms are in this range.
_LEAST, _MOST = 1e-15, 1e15

Shapes = tuple[torch.Size, ...]


class _Product:
    """A GEMM of the golden pass.

    Attributes:
        operands: its operands, the addend first if there is one.
        result: its result.
    """

    def __init__(self, operands: tuple[Tensor, ...], result: Tensor) -> None:
        self.operands = operands
        self.result = result
        self._versions = self._read_versions()

    def is_intact(self) -> bool:
        """Return whether nothing was written to the tensors since the GEMM."""
        return self._versions == self._read_versions()

    def _read_versions(self) -> list[int]:
        return [x._version for x in (*self.operands, self.result)]

    @cached_property
    def right(self) -> Tensor:
        """The right operand in FP32."""
        return self.operands[-1].float()

    @property
    def multiplied(self) -> Tensor:
        """The result without the addend."""
        return self.result - self.operands[0] if len(self.operands) == 3 else self.result

    @cached_property
    def norms(self) -> tuple[float, float]:
        """The norms of the left and the right operand."""
        return _compute_norm(self.operands[-2]), _compute_norm(self.operands[-1])


class Products:
    """The GEMMs of a forward pass in FP64."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, Shapes], list[_Product]] = defaultdict(list)  # in order, by function and shapes

    def recorded(self) -> AbstractContextManager[Any]:
        """Keep the GEMMs that are made within the context."""
        return _Recording(self)

    def reused(self) -> AbstractContextManager[Any]:
        """Make one forward pass in FP64 reuse these GEMMs where it can, within the context."""
        return _Reusing(self)


class _Recording(TorchDispatchMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_gemm(func, args, kwargs):
            self._products.made[func, _list_shapes(args)].append(_Product(tuple(args), result))
        return result


class _Reusing(TorchDispatchMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._left = {key: iter(made) for key, made in products.made.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_gemm(func, args, kwargs):
            product = next(self._left.get((func, _list_shapes(args)), iter(())), None)
            changed = None if product is None else _compute_from_golden(product, func, args)
            if changed is not None:
                return changed
        return func(*args, **(kwargs or {}))


def _is_gemm(func: Any, args: Any, kwargs: Any) -> bool:
    return func in _MULTIPLY and not kwargs and all(x.dtype == torch.float64 for x in args)


def _list_shapes(operands: tuple[Tensor, ...]) -> Shapes:
    return tuple(x.shape for x in operands)


def _compute_from_golden(product: _Product, func: Any, operands: tuple[Tensor, ...]) -> Tensor | None:
    """Return a GEMM computed from golden's, or None if that would be less accurate or no faster."""
    *before, right = zip(operands, product.operands, strict=True)
    if not product.is_intact() or _find_change(*right) is not None:
        return None
    *addends, left = [_find_change(x, golden) for x, golden in before]
    if any(addend is not None for addend in addends):
        return None
    if left is None:
        return product.result.clone()
    if not _is_small(left, product):
        return None
    factors = _factors_of_rows(left.values, product.operands[-2])
    if factors is not None:
        return torch.addcmul(product.result, factors, product.multiplied)
    return product.result + _MULTIPLY[func](left.values.float(), product.right)


class _Change(NamedTuple):
    """The difference between an operand and golden's, in FP64, and its norm."""

    values: Tensor
    norm: float


def _find_change(x: Tensor, golden: Tensor) -> _Change | None:
    """Return the change of an operand, or None if it has not changed."""
    if x.data_ptr() == golden.data_ptr() and x.stride() == golden.stride():
        return None
    change = x - golden
    norm = _compute_norm(change)
    return _Change(change, norm) if norm != 0.0 else None


def _is_small(left: _Change, product: _Product) -> bool:
    """Return whether the change of the left operand is small, and FP32 holds its products to full precision."""
    golden, right = product.norms
    return _LEAST <= left.norm <= _SAME_OPERAND * golden and _LEAST <= right <= _MOST


def _factors_of_rows(change: Tensor, golden: Tensor) -> Tensor | None:
    """Return the change as a factor of each row of golden's operand, ``[..., rows, 1]``, or None if it is not one."""
    for rows in (slice(_ROWS_LOOKED_AT), slice(None)):
        some, of_golden = change[..., rows, :], golden[..., rows, :]
        squares = of_golden.square().sum(-1, keepdim=True)
        factors = (some * of_golden).sum(-1, keepdim=True) / squares.clamp_(min=torch.finfo(squares.dtype).tiny)
        if _compute_norm(torch.addcmul(some, factors, of_golden, value=-1.0)) > _LOST * _compute_norm(some):
            return None
    return factors


def _compute_norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
