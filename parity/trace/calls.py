"""Record a reference's calls of PyTorch's functions, and change what some of these calls return.

A reference may be anybody's code, so its modules' names tell nothing. Its calls do, by a ``TorchFunctionMode``:
``tracing`` keeps every call with its arguments and results. Hypotheses find norms, activations and rotations in this
trace, written out or not, and say what another port would have computed there; ``edited`` computes that instead.
Autograd differentiates what was edited like anything else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parity.trace.trace import Call, Edit, Site, Trace, Value

_OUTSIDE = "around the module"
# Types that calls are given besides tensors, and that hold no tensors.
_LEAVES = (int, float, str, type(None), torch.dtype)


class Misfit(RuntimeError):
    """Raised if an edit does not fit: the module does not make the calls that it made when it was traced."""


@contextmanager
def tracing(module: nn.Module) -> Iterator[Trace]:
    """Within the context, add the calls of ``module`` to the trace, which is complete afterwards."""
    recorder = _Recorder(module)
    with _counting(module, recorder.frames), recorder:
        yield recorder.trace


@contextmanager
def edited(module: nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Within the context, one forward pass of ``module`` computes what the edits say.

    Raises:
        Misfit: while the module runs, if it does not make the same calls as when it was traced.
    """
    editor = _Editor(edits)
    with _counting(module, editor.frames), editor:
        yield


class _Frames:
    """Knows in which submodule's ``forward`` the running call is made."""

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
def _counting(module: nn.Module, frames: _Frames) -> Iterator[None]:
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
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.frames = _Frames()
        self.trace = Trace()
        self._numbers: dict[int, Value] = {}
        self._written: dict[int, Call] = {}  # by a tensor's id: the call that last wrote into it through another tensor
        self._alive: list[Tensor] = []  # so that no id is given out again
        self._names = {
            **{id(buffer): (self.trace.buffers, name) for name, buffer in module.named_buffers()},
            **{id(parameter): (self.trace.parameters, name) for name, parameter in module.named_parameters()},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        changed = _changed_in_place(func, args, kwargs)
        sharing = [] if changed is None else self._keep_what_was(changed)
        result = func(*args, **kwargs)
        if not _is_recorded(result, changed):
            return result
        site = self.frames.site(canonical_name(func))
        values = {id(x): self._value(x, Value(-1, site, i, False)) for i, x in enumerate(_tensors((args, kwargs)))}
        named_args, named_kwargs = _named((args, kwargs), values)
        returned = changed if changed is not None else result
        values |= {
            id(x): self._renew(x, Value(-1, site, i, True))
            for i, x in enumerate(_tensors(returned))
            if x is changed or id(x) not in values
        }
        results = _named(returned, values)
        call = Call(site, canonical_name(func), func, named_args, named_kwargs, results)
        self.trace.add(call)
        self._note_what_changed(sharing, changed, call)
        return result

    def _value(self, tensor: Tensor, where: Value) -> Value:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        value = self._renew(tensor, where)
        if id(tensor) in self._written:
            self.trace.note_producer(value, self._written.pop(id(tensor)))
        return value

    def _renew(self, tensor: Tensor, where: Value) -> Value:
        value = Value(len(self.trace.tensors), where.site, where.position, where.returned)
        self._numbers[id(tensor)] = value
        self._alive.append(tensor)
        self.trace.tensors.append(tensor.detach())
        names, name = self._names.get(id(tensor), (None, ""))
        if names is not None:
            names[value.number] = name
        return value

    def _keep_what_was(self, changed: Tensor) -> list[int]:
        """Copy every tensor that shares memory with one that is about to change, and return their numbers."""
        address = changed.untyped_storage().data_ptr()
        sharing = [i for i, x in enumerate(self.trace.tensors) if x.untyped_storage().data_ptr() == address]
        for number in sharing:
            self.trace.tensors[number] = self.trace.tensors[number].clone()
        return sharing

    def _note_what_changed(self, sharing: Sequence[int], changed: Tensor | None, call: Call) -> None:
        """Note that tensors of which ``changed`` is a part, or that are part of it, are other values from here on."""
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
        # Most calls are of functions that no edit is about. Calls are counted by name, so these need not be.
        is_edited = name in self._names
        if not is_edited and not (self._found and _may_change(func, kwargs)):
            return func(*args, **kwargs)
        changed = _changed_in_place(func, args, kwargs)
        if changed is not None:
            self._keep_what_was(changed)
        result = func(*args, **kwargs)
        if not is_edited or not _is_recorded(result, changed):
            return result
        site = self.frames.site(name)
        needed = self._needed.get(site, ())
        self._find(needed, False, (args, kwargs))
        edits = self._edits.get(site, ())
        in_place = changed is not None and bool(edits) and isinstance(result, Tensor)
        if in_place:
            result = result.clone()  # the gradient of an edit may need it as it is
        for one in edits:
            if one.detached is not None:
                given, named = _without_gradient((args, kwargs), one.detached)
                result = func(*given, **named)
            result = one.compute(result, *(self._found_value(value) for value in one.needs))
        if in_place and changed is not None:
            result = changed.copy_(result)  # the caller goes on with the tensor that the call changes
        self._find(needed, True, result if changed is None else changed)
        return result

    def _find(self, needed: Sequence[Value], returned: bool, tree: Any) -> None:
        wanted = [value for value in needed if value.returned is returned]
        if wanted:
            tensors = _tensors(tree)
            self._found.update({value.number: tensors[value.position] for value in wanted})

    def _keep_what_was(self, changed: Tensor) -> None:
        """Copy what was found and shares memory with a tensor that is about to change, as the trace did."""
        address = changed.untyped_storage().data_ptr()
        for number, x in self._found.items():
            if x.untyped_storage().data_ptr() == address:
                self._found[number] = x.clone()

    def _found_value(self, value: Value) -> Tensor:
        if value.number not in self._found:
            raise Misfit(f"no call at {value.site} came before")
        return self._found[value.number]


def _without_gradient(arguments: Any, position: int) -> Any:
    """Return the arguments of a call, with one tensor among them detached."""
    leaves, structure = tree_flatten(arguments)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    leaves[tensors[position]] = leaves[tensors[position]].detach()
    return tree_unflatten(leaves, structure)


def _opened(function: Any) -> Any:
    """Return a function of ``torch.nn.functional`` such that its own calls are seen; else it would be
    seen as one call.
    """
    seen = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    """Compute ``F.glu``, which PyTorch sees as one call."""
    up, gate = input.chunk(2, dim)
    return up * gate.sigmoid()


_OPENED = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward), F.glu: _glu}


@functools.lru_cache(4096)
def canonical_name(function: Any) -> str:
    """Return ``mul`` for ``Tensor.mul``, ``torch.mul`` and ``Tensor.mul_``, and ``T`` for the attribute."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))
    return name.strip("_")


def _is_recorded(result: Any, changed: Tensor | None) -> bool:
    return isinstance(result, Tensor) or changed is not None or bool(_tensors(result))


def _tensors(tree: Any) -> list[Tensor]:
    """Return those among a call's arguments or results, in order."""
    found: list[Tensor] = []
    _mapped(tree, found.append)
    return found


def _named(tree: Any, values: Mapping[int, Value]) -> Any:
    """Return the tree with each tensor replaced by its value, looked up by the tensor's id."""
    return _mapped(tree, lambda tensor: values[id(tensor)])


def _mapped(tree: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Map as ``tree_map_only`` does for tensors, but in a tenth of the time for what most calls are given."""
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if isinstance(tree, _LEAVES):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(branch, of_tensor) for branch in tree)
    if type(tree) is dict:
        return {name: _mapped(branch, of_tensor) for name, branch in tree.items()}
    return tree_map_only(Tensor, of_tensor, tree)


@functools.lru_cache(4096)
def _writes(function: Any) -> bool:
    """Return whether a function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return bool(name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))


def _may_change(function: Any, kwargs: Mapping[str, Any]) -> bool:
    return _writes(function) or "out" in kwargs


def _changed_in_place(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    return args[0] if _writes(function) and args and isinstance(args[0], Tensor) else None
