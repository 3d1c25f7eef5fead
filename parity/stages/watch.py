"""Watch the values that a candidate computes in one pass, what each is made of, and the gradients that reach them.

There are three sources: PyTorch's functions outside of TE; every call of an autograd function, which shows what TE's
modules compute without knowing them; and the results of submodules, since TE calls no autograd function where no
gradients are needed. Work inside one call of TE is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from parity.trace.calls import canonical_name, changed_in_place, tensors_in
from parity.trace.whose import is_of_te

SMALLEST = 33
"""Values of fewer elements are not compared: too many others equal them by chance."""

_COMPOSED = {"TransformerLayer", "MultiheadAttention"}  # TE's modules whose parts are seen one by one


@dataclass(eq=False)
class Watched:
    """A value that the candidate computed.

    Attributes:
        order: its place among all of them.
        name: the function that returned it, ``te.`` and the class for TE's, or ``module`` and its path.
        tensor: a copy, as it was when it was returned.
        lineage: the reference's parameters that it was computed from, by the weight map.
        from_input: whether it depends on a floating-point input.
        parents: the watched values that its function was given.
        weights: the candidate's parameters that its function was given.
        is_result: whether a module, a function of TE or a linear layer returned it or was given it, so that everything
            that reads it is known to the reference as well.
        gradient: the gradient that reached it; None if none did.
        module: the path of the submodule that was running.
    """

    order: int
    name: str
    tensor: Tensor
    lineage: frozenset[str]
    from_input: bool
    parents: tuple[Watched, ...]
    weights: tuple[str, ...]
    is_result: bool = False
    gradient: Tensor | None = None
    module: str = ""

    @property
    def is_activation(self) -> bool:
        """Whether it depends on a weight or an input, unlike tables and masks."""
        return self.from_input or bool(self.lineage)

    @property
    def is_of_te(self) -> bool:
        """Whether a function of TE returned it."""
        return self.name.startswith("te.")


class Watch(TorchFunctionMode):
    """Watches the forward passes of one candidate; ``seen`` holds the values of the last one.

    Args:
        theirs: by each of the candidate's parameters, the reference's parameters that the weight map makes it of.
        keeps: whether the values of the submodule with a path are kept; others are only followed.
    """

    def __init__(self, theirs: Mapping[str, tuple[str, ...]], keeps: Callable[[str], bool] = lambda path: True) -> None:
        super().__init__()
        self._keeps = keeps
        self.seen: list[Watched] = []
        self._theirs = theirs
        self._paths: dict[int, str] = {}
        self._inside = 0  # how many calls of TE are running, one within the other
        self._running: list[str] = []  # the paths of the submodules that are running
        self._forget_pass()

    def _forget_pass(self) -> None:
        self.seen = []
        self._names: dict[int, str] = {}
        self._known: dict[int, Watched] = {}
        self._kept: set[Watched] = set()  # values whose gradients are kept
        self._lineages: dict[int, tuple[frozenset[str], bool]] = {}
        self._alive: list[Tensor] = []  # kept, so that no id is reused

    @contextmanager
    def watching(self, candidate: nn.Module) -> Iterator[None]:
        """Watch one forward pass of the candidate, and afterwards the gradients that reach its values."""
        with self.following(candidate):
            handles = (
                register_module_forward_pre_hook(self.enter_module),
                register_module_forward_hook(self.leave_module, always_call=True),
            )
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    @contextmanager
    def following(self, candidate: nn.Module) -> Iterator[None]:
        """Do the same as ``watching``, but let the caller say when a module is entered and left."""
        self._forget_pass()
        self._candidate = candidate
        self._name_parameters()
        self._alive += candidate.buffers()
        for x in candidate.buffers():
            self._lineages[id(x)] = frozenset(), False
        self._paths = {id(module): path for path, module in candidate.named_modules()}
        try:
            with _calls_of_autograd_functions(self._call_function), self:
                yield
        finally:
            self._inside = 0
            self._running.clear()

    def _name_parameters(self) -> None:
        self._names |= {id(x): name for name, x in self._candidate.named_parameters()}
        self._alive += self._candidate.parameters()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._inside:
            changed = changed_in_place(func, args, kwargs)
            name = canonical_name(func)
            self._note_call(name, (args, kwargs), result if changed is None else changed, name == "linear")
        return result

    def _call_function(self, kind: type, call: Callable[[], Any], arguments: Any) -> Any:
        self._inside += 1
        try:
            result = call()
        finally:
            self._inside -= 1
        if not self._inside:
            name = f"te.{kind.__name__}" if is_of_te(kind) else kind.__name__
            self._note_call(name, arguments, result, is_of_te(kind))
        return result

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that a module is called."""
        if id(module) in self._paths:
            path = self._paths[id(module)]
            for name, x in unwrapped_parameters(module):
                self._names[id(x)] = f"{path}.{name}"
                self._alive.append(x)
            if self._keeps(path) and not self._keeps(self._running_path):
                with torch._C.DisableTorchFunction():
                    self._note_begin(path, tensors_in(args))
            self._running.append(path)
        if self._is_opaque(module):
            self._inside += 1

    def leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        """Note that a module returned, or raised if the result is None."""
        if self._is_opaque(module):
            self._inside -= 1
        if id(module) in self._paths and not self._inside:
            # A bias that is handed out, to be added later, is no part of the other results.
            apart = {id(x) for x in tensors_in(result)}
            own = [x for x in module.parameters(recurse=False) if id(x) not in apart]
            self._note_call(f"module {self._paths[id(module)]}", (args, own), result, True)
        if id(module) in self._paths and self._running:
            self._running.pop()

    @property
    def _running_path(self) -> str:
        """The path of the submodule that is running."""
        return self._running[-1] if self._running else ""

    def _note_begin(self, path: str, given: list[Tensor]) -> None:
        """Note what a submodule is given by one whose values are not kept."""
        for x in given:
            if id(x) not in self._known and _is_compared(x):
                made = f"given to {path}", x.detach().clone(), *self._lineage_of(x)
                self._note_value(x, Watched(len(self.seen), *made, (), ()))

    def _is_opaque(self, module: nn.Module) -> bool:
        """Return whether a module's own calls are kernels': TE calls these in the open where no gradient is needed."""
        return is_of_te(type(module)) and type(module).__name__ not in _COMPOSED and not torch.is_grad_enabled()

    def _note_call(self, name: str, given: Any, returned: Any, is_result: bool) -> None:
        with torch._C.DisableTorchFunction():
            self._note_values(name, tensors_in(given), tensors_in(returned), is_result)

    def _note_values(self, name: str, given: list[Tensor], returned: list[Tensor], is_result: bool) -> None:
        if any(isinstance(x, nn.Parameter) and id(x) not in self._names for x in given):
            self._name_parameters()  # FSDP puts others in their places while a module runs
        marks = [self._lineage_of(x) for x in given]
        lineage = frozenset[str]().union(*(of for of, _ in marks))
        from_input = any(one for _, one in marks)
        weights = tuple(self._names[id(x)] for x in given if id(x) in self._names)
        parents = tuple(dict.fromkeys(self._known[id(x)] for x in given if id(x) in self._known))
        for x in given:
            if id(x) in self._known:
                self._keep_gradient(self._known[id(x)], x)
        for parent in parents if is_result else ():
            parent.is_result = True
        for x in returned:
            if id(x) in self._names or x.device.type == "meta":
                continue
            self._alive.append(x)
            if name.startswith("module ") and id(x) in self._known:
                self._known[id(x)].is_result = True
                continue
            self._lineages[id(x)] = lineage, from_input
            if _is_compared(x) and self._keeps(self._running_path):
                made = name, x.detach().clone(), lineage, from_input, parents, weights, is_result
                self._note_value(x, Watched(len(self.seen), *made, module=self._running_path))

    def _note_value(self, x: Tensor, one: Watched) -> None:
        self.seen.append(one)
        self._known[id(x)] = one
        self._keep_gradient(one, x)

    def _keep_gradient(self, one: Watched, x: Tensor) -> None:
        """Keep the gradient that reaches a value; the tensor gets no hook, which would forbid writing to some results.

        What an autograd function returns belongs to autograd's graph only after the function has returned.
        """
        if x.grad_fn is None or not torch.is_grad_enabled() or one in self._kept:
            return
        self._kept.add(one)
        place = x.output_nr

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[place]
            one.gradient = None if gradient is None else gradient.detach().clone()

        x.grad_fn.register_prehook(keep)

    def _lineage_of(self, x: Tensor) -> tuple[frozenset[str], bool]:
        """Return the reference's parameters that a tensor depends on, and whether it depends on an input."""
        if id(x) in self._names:
            name = self._names[id(x)]
            return frozenset(self._theirs.get(name, ())), False
        if id(x) not in self._lineages:  # first seen as an argument: the pass was given it
            self._alive.append(x)
            self._lineages[id(x)] = frozenset(), x.is_floating_point()
        return self._lineages[id(x)]


def unwrapped_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return what FSDP1 puts in the places of a module's parameters while it runs: parts of one vector."""
    return [(name, x) for name, x in module._parameters.items() if x is not None and type(x) is Tensor]


def _is_compared(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout is torch.strided and x.numel() >= SMALLEST


@contextmanager
def _calls_of_autograd_functions(wrapped: Callable[[type, Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Pass every call of an autograd function through ``wrapped`` within the context."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        return wrapped(kind, lambda: own.__func__(kind, *args, **kwargs), (args, kwargs))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
