"""Run a module of which one block at a time has its parameters in memory, and record the calls of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from parity.case.map_check import other_names
from parity.user_error import UserError

Key = tuple[str, int]  # a block's name, and the number of its call, from 0
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which are never called themselves


@dataclass(frozen=True)
class Call:
    """A call of a block.

    Attributes:
        given: its positional and its named arguments.
        returned: what it returned.
        reads: the tensor that it was given by the block before, as ``stream_of`` finds it.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    returned: Any
    reads: Tensor


def stream_of(tree: Any) -> Tensor:
    """Return the first floating-point tensor of a call's arguments or results, or else the first tensor."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    if not tensors:
        raise UserError("a block is called with no tensor, or returns none, so that it cannot be judged by itself")
    return next((x for x in tensors if x.is_floating_point()), tensors[0])


def with_stream(tree: Any, x: Tensor) -> Any:
    """Return the arguments or results with another tensor in that place."""
    stream = stream_of(tree)
    return tree_map(lambda leaf: x if leaf is stream else leaf, tree)


class Blocks:
    """A module on the meta device, and its blocks: each entry of its outermost lists, and each module beside these.

    Args:
        module: has its buffers, but no parameters in memory.
        read: returns parameters by their names.
        device: where they are computed with.

    Attributes:
        names: the names of each block's parameters, in the block and, tied ones under their first, in the module.
    """

    def __init__(self, module: nn.Module, read: Read, device: torch.device) -> None:
        self.module, self._read, self._device = module.eval(), read, device
        tied = other_names(module).tied
        self.names: dict[str, dict[str, str]] = {}
        for name, _ in module.named_parameters(remove_duplicate=False):
            path = _find_block(module, name)
            self.names.setdefault(path, {})[name.removeprefix(f"{path}.")] = tied.get(name, name)
        # A module with parameters of its own around other blocks has them in memory all the time.
        self._around = {path for path in self.names if any(_is_within(other, path) for other in self.names)}

    def run(
        self,
        call: Callable[[nn.Module], Any],
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        alone: Callable[[Sequence[Tensor]], AbstractContextManager[Any]] = lambda parameters: nullcontext(),
        store: Callable[[Tensor], Tensor] = lambda x: x,
        instead: Mapping[Key, Any] | None = None,
    ) -> tuple[dict[Key, Call], Any]:
        """Call the module, and return the calls of its blocks, in order, and what it returned.

        Args:
            call: calls it.
            dtype: the dtype in which parameters are given to it.
            stored: the dtype to which they are rounded before that; None for their own.
            alone: makes the context of a block's call, given its parameters.
            store: rounds what goes into a block and out of it.
            instead: what calls of blocks return without being made.
        """
        calls: dict[Key, Call] = {}
        beside: list[Tensor] = []  # what blocks have returned besides that

        def called(path: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            key, given = (path, sum(other == path for other, _ in calls)), (args, kwargs)
            if any(leaf is other for leaf in tree_leaves(given) for other in beside):
                raise UserError(f"{path} is given several values that another block returned; a proof follows only one")
            reads = stream_of(given).detach().clone()
            reads = store(reads) if reads.is_floating_point() else reads
            if isinstance(part, nn.Embedding) and not reads.is_floating_point() and reads.max() >= part.num_embeddings:
                raise UserError(f"{path} has {part.num_embeddings} rows, and is asked for number {reads.max().item()}")
            if key in (instead or {}):
                returned = (instead or {})[key]
            else:
                # What depends on the inputs requires a gradient, and the block may write to what it is given.
                leaf = reads.clone().requires_grad_(reads.is_floating_point() and torch.is_grad_enabled())
                with self._holding_parameters(part, path, dtype, stored) as parameters, alone(parameters):
                    args, kwargs = with_stream(given, leaf.clone())
                    returned = tree_map_only(Tensor, Tensor.detach, forward(*args, **kwargs))
                returned = with_stream(returned, store(stream_of(returned)))
            calls[key] = Call(given, returned, reads)
            beside.extend(leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor))
            return with_stream(returned, stream_of(returned).clone())  # since others may write to it

        with ExitStack() as stack:
            for path in self.names:
                part = self.module.get_submodule(path)
                if path in self._around:
                    stack.enter_context(self._holding_parameters(part, path, dtype, stored))
                else:
                    stack.callback(vars(part).pop, "forward")
                    part.forward = partial(called, path, part, part.forward)
            stack.enter_context(_RequireValues())
            return calls, call(self.module)

    def part(self, path: str, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a block by itself, with copies of its parameters, in their own dtype if none is given."""
        part = copy.deepcopy(self.module.get_submodule(path))
        for parameter in self._fill_parameters(part, path, dtype):
            parameter.data = parameter.data.clone()
        return part

    @contextmanager
    def _holding_parameters(
        self, part: nn.Module, path: str, *dtypes: torch.dtype | None
    ) -> Iterator[list[nn.Parameter]]:
        before = [(owner, key, owner._parameters[key]) for owner, key in _find_places(part, self.names[path])]
        try:
            yield self._fill_parameters(part, path, *dtypes)
        finally:
            for owner, key, parameter in before:
                owner._parameters[key] = parameter

    def _fill_parameters(
        self, part: nn.Module, path: str, dtype: torch.dtype | None, stored: torch.dtype | None = None
    ) -> list[nn.Parameter]:
        firsts = self.names[path].values()
        values, filled = self._read(list(dict.fromkeys(firsts))), dict[str, nn.Parameter]()
        for (owner, key), first in zip(_find_places(part, self.names[path]), firsts, strict=True):
            empty = owner._parameters[key]
            assert empty is not None
            if first not in filled:
                value = values[first].detach().to(self._device, stored)
                filled[first] = nn.Parameter(value.to(self._device, dtype), empty.requires_grad)
                filled[first].__dict__.update(empty.__dict__)
            owner._parameters[key] = filled[first]
        return list(filled.values())


class _RequireValues(TorchDispatchMode):
    """Refuses to compute with a parameter that is on the meta device since its block does not run.

    PyTorch computes with one such operand and one on a CPU, and returns what happens to be in memory.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, nn.Parameter) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            raise ValueError(f"{func} is given a parameter on the meta device")
        return func(*args, **(kwargs or {}))


def _find_places(part: nn.Module, names: Mapping[str, str]) -> list[tuple[nn.Module, str]]:
    split = [name.rpartition(".") for name in names]
    return [(part.get_submodule(owner), key) for owner, _, key in split]


def _find_block(module: nn.Module, parameter: str) -> str:
    """Return the block that a parameter belongs to."""
    path, part = parameter.split(".")[:-1], module
    for depth, key in enumerate(path):
        entry = part.get_submodule(key)
        if isinstance(part, (*_CONTAINERS, nn.Sequential)) and not isinstance(entry, _CONTAINERS):
            return ".".join(path[: depth + 1])
        part = entry
    return ".".join(path)


def _is_within(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
