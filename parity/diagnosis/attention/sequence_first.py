"""Activations whose batch is taken for the sequence, by a whole port or by its layers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.diagnosis.attention.attention import attentions
from parity.diagnosis.attention.shorter_tables import ShorterTables
from parity.diagnosis.hypothesis import Hypothesis, ModuleCall
from parity.diagnosis.mistake import MOST_PLACES
from parity.watching.trace import Trace


def sequence_first_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That batch and sequence changed places: for the whole module, for the submodules that attend, or one of these."""
    yield _exchanged(module)
    yield _viewed_as_sequence_first(module)
    levels = _attending(trace)
    for paths in levels:
        yield _exchanged_in(paths, module)
    for paths in levels:
        if 1 < len(paths) <= MOST_PLACES:
            yield from (replace(_exchanged_in((path,), module), scope="one") for path in paths)


def _attending(trace: Trace) -> list[tuple[str, ...]]:
    """Submodules that have an attention each, those of one depth together: attention itself, its layer, and so on."""
    found = list(dict.fromkeys(one.call.site[0] for one in attentions(trace) if one.call.site[0]))
    deepest = max((path.count(".") + 1 for path in found), default=0)
    levels = [
        tuple(dict.fromkeys(".".join(path.split(".")[:depth]) for path in found)) for depth in range(deepest, 0, -1)
    ]
    return list(dict.fromkeys(levels))


def _exchanged_in(paths: tuple[str, ...], module: nn.Module) -> Hypothesis:
    """That these submodules get, and return, ``[batch, seq, ...]`` as if the first were the sequence."""
    which = f"{paths[0]} and {len(paths) - 1} more like it" if len(paths) > 1 else paths[0]

    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as hooks:
                for submodule in map(module.get_submodule, paths):
                    hooks.enter_context(_exchanged_around(submodule))
                hooks.enter_context(ShorterTables())
                return call(module, *args, **kwargs)

        return under

    return Hypothesis(
        "sequence-first",
        f"batch and sequence exchanged in {which}",
        'give TE\'s layers attn_input_format="bshd", and its attention qkv_format="bshd": they take the first '
        f"dimension for the sequence by default; so {which} attends within the batch",
        module,
        around=around,
    )


@contextmanager
def _exchanged_around(submodule: nn.Module) -> Iterator[None]:
    """Within the context a submodule is given, and returns, its activations with their first dimensions exchanged.

    What else it is given, masks and rotary tables, a port makes for the sequence that it takes these for: the batch's
    first is taken, and as much of it as that sequence needs.
    """
    width: list[tuple[int, int]] = []

    def is_activation(x: Tensor) -> bool:
        return x.dim() > 1 and (x.dim(), x.shape[-1]) == width[-1]

    def given(x: Tensor) -> Tensor:
        if is_activation(x):
            return x.transpose(0, 1)
        return x[:1] if x.dim() > 1 else x

    def before(one: nn.Module, args: Any, kwargs: Any) -> Any:
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        width.append((first.dim(), first.shape[-1] if first.dim() else 0))
        return tree_map_only(Tensor, given, (args, kwargs))

    def after(one: nn.Module, args: Any, result: Any) -> Any:
        exchanged = tree_map_only(
            Tensor, lambda x: x.transpose(0, 1) if x.dim() > 1 and is_activation(x) else x, result
        )
        width.pop()
        return exchanged

    hooks = submodule.register_forward_pre_hook(before, with_kwargs=True), submodule.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _exchange(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.transpose(0, 1) if x.dim() > 1 else x, tree)


def _exchanged(module: nn.Module) -> Hypothesis:
    return Hypothesis(
        "sequence-first",
        "batch and sequence exchanged",
        'give TE attn_input_format="bshd" (qkv_format="bshd"), or transpose inputs and outputs: TE takes the first '
        "dimension for the sequence by default",
        module,
        around=_first_two_exchanged,
    )


def _viewed_as_sequence_first(module: nn.Module) -> Hypothesis:
    return Hypothesis(
        "sequence-first",
        "batch and sequence viewed as each other",
        "transpose inputs and outputs where TE takes the first dimension for the sequence; they are reshaped",
        module,
        around=_first_two_viewed,
    )


def _first_two_viewed(call: ModuleCall) -> ModuleCall:
    """The same call where ``[batch, seq, ...]`` is viewed as ``[seq, batch, ...]``, and its result viewed back."""

    def viewed(x: Tensor) -> Tensor:
        return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1) if x.dim() > 2 else x

    def back(x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(x.shape) if x.dim() > 2 else x

    def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, viewed, (args, kwargs))
        return tree_map_only(Tensor, back, call(module, *args, **kwargs))

    return under


def _first_two_exchanged(call: ModuleCall) -> ModuleCall:
    """The same call on tensors whose first two dimensions are exchanged, as are those of what it returns."""

    def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ShorterTables():
            return _exchange(call(module, *_exchange(args), **_exchange(kwargs)))

    return under
