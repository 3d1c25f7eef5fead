"""List what Python holds for a training, and a CUDA graph keeps as it was: numbers, and the places of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from parity.passes.steps import Trainee
from parity.te.state import is_quantized
from parity.trace.whose import is_of_te


@dataclass(frozen=True)
class Value:
    """A value that a step may read, and may find changed the next time.

    Attributes:
        name: where it is, in words.
        value: as it was.
        read: returns it.
        write: puts another in its place.
    """

    name: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]

    @property
    def is_memory(self) -> bool:
        """Return whether it is a tensor."""
        return isinstance(self.value, Tensor)

    @property
    def is_changed(self) -> bool:
        """Return whether there is another number now, or a tensor in other memory."""
        now = self.read()
        if isinstance(self.value, Tensor) and isinstance(now, Tensor):
            return self.value.data_ptr() != now.data_ptr()
        return _is_followed(now) and (type(self.value) is not type(now) or bool(self.value != now))

    @property
    def was(self) -> str:
        """Say what it was at the capture."""
        return f"{self.name} lies in other memory" if self.is_memory else f"{self.name} is {self.value!r} no more"

    @property
    def again(self) -> str:
        """Say what makes the step the graph's."""
        return f"{self.name} {'lies where it lay' if self.is_memory else f'is {self.value!r}, as'} at the capture"


def values(trainee: Trainee) -> Iterator[Value]:
    """Yield what is held by the module and its parts, the optimizer's groups, and the pair's functions."""
    for what, owner in trainee.owners.items():
        if isinstance(owner, nn.Module):
            for path, module in owner.named_modules():
                own = {} if is_of_te(type(module)) else vars(module)  # TE's own come with its first call
                for held in (own, module._buffers):
                    yield from _items(held, f"{path}.".lstrip("."))
                yield from (
                    _memory(f"{path}.{key}".lstrip("."), one)
                    for key, one in module._parameters.items()
                    if one is not None and not is_quantized(one)
                )
        elif isinstance(owner, Optimizer):
            for number, group in enumerate(owner.param_groups):
                where = "the optimizer" if len(owner.param_groups) == 1 else f"the optimizer's group {number}"
                yield from _items(group, after=f" of {where}")
        elif owner is not None:
            yield from _of_function(owner, what)


def _memory(name: str, parameter: nn.Parameter) -> Value:
    def write(memory: Tensor) -> None:
        parameter.data = memory

    return Value(name, parameter.data, lambda: parameter.data, write)


def _items(held: dict[str, Any], before: str = "", after: str = "") -> Iterator[Value]:
    for key, one in list(held.items()):
        if _is_followed(one) and not key.startswith("_"):
            yield Value(f"{before}{key}{after}", one, partial(held.get, key), partial(held.__setitem__, key))


def _is_followed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, (bool, int, float, str)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def _of_function(owner: Any, what: str) -> Iterator[Value]:
    """Yield what a function has in its closure, or an object in its attributes."""
    if isinstance(owner, MethodType):
        owner = owner.__self__
    if not isinstance(owner, FunctionType):
        yield from _items(getattr(owner, "__dict__", {}), after=f" of {what}")
        return
    for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # it has none yet
            continue
        if _is_followed(content):
            yield Value(f"{name} of {what}", content, partial(getattr, cell, "cell_contents"), partial(_fill, cell))
        elif not isinstance(content, (nn.Module, Optimizer, ModuleType, type)):
            yield from _items(getattr(content, "__dict__", {}), f"{name}.", f" of {what}")


def _fill(cell: CellType, content: Any) -> None:
    cell.cell_contents = content
