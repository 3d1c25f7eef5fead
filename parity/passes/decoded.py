"""Let a pair that calls its candidate on whole sequences decode them, token by token with TE's cache.

One pass on whole sequences shows all that a declaration would say: which argument holds the tokens, along which
dimensions, and what TE's attention gets, so that a cache can hold its keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Case, Pair, Rng, draw_inputs
from parity.case.decoding import MASK, MASK_ARGUMENTS, Decoding
from parity.case.validate import CheckedSize
from parity.passes.modes import usual_modes
from parity.passes.one_pass import as_arguments
from parity.passes.prepare import build, cast
from parity.te import Kernels
from parity.te.attention_backend import NotOffered, attention_modules
from parity.te.recipes import REFUSED_SHAPES
from parity.trace.effects import undisturbed
from parity.trace.whose import first_paragraph

_CACHE = "inference_params"
_MOST_DECODED = 16  # tokens after the prompt, which has at least half of them; each takes a pass

Call = Callable[..., Any]


@lru_cache(maxsize=8)
def decoded_case(case: Case, checked: CheckedSize, kernels: Kernels) -> Case:
    """Return the case whose candidate decodes what its pair calls it with, to be compared without gradients.

    Raises:
        NotOffered: if it cannot be decoded; the message says why.
    """
    with usual_modes(), undisturbed(0), torch.no_grad():
        pair = build(case, checked, 0, kernels)
        pair.candidate.eval()
        called, attention = _watch_pass(pair, checked, kernels)
        for reason in _list_obstacles(pair, called, attention):
            raise NotOffered(f"not decoded, since {reason}")
        decode = _make_decoder(_find_call(pair), called[0], attention[0])

    def factory(te: ModuleType, **size: Any) -> Pair:
        declared = case.factory(te, **size)
        return replace(declared, call_candidate=_through(declared, decode), evaluation=True)

    return replace(case, factory=factory, invariance=())


class _StandIn:
    """A candidate of which one call is made otherwise: what a pair's ``call_candidate`` gets in its place."""

    def __init__(self, module: nn.Module, instead: Call) -> None:
        self._module, self._instead = module, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self._module, *args, **kwargs)


def _takes_cache(call: Call) -> bool:
    return _CACHE in inspect.signature(call).parameters


def _find_call(pair: Pair) -> Call:
    """Return what takes the cache: the pair's ``call_candidate``, or else the candidate itself."""
    return pair.call_candidate if pair.call_candidate and _takes_cache(pair.call_candidate) else nn.Module.__call__


def _through(pair: Pair, instead: Call) -> Call:
    """Return how to call the candidate as the pair does, but ``instead(module, ...)`` for what takes the cache."""
    call = pair.call_candidate
    if call is None or _takes_cache(call):
        return instead
    return lambda module, *args, **kwargs: call(_StandIn(module, instead), *args, **kwargs)


# Watch a pass on whole sequences.


@dataclass(frozen=True)
class _Attention:
    """What a call of TE's attention gets: its format, its mask, and the shapes of queries, keys and values."""

    qkv_format: str
    mask: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]

    @property
    def batch_and_seq(self) -> tuple[int, ...]:
        return self.query[:2] if self.qkv_format == "bshd" else self.query[1::-1]


@dataclass(frozen=True)
class _Called:
    """A call of what takes the cache: its arguments by name, the first of which holds the tokens, and its result."""

    given: Mapping[str, Any]
    returned: Any


def _watch_pass(pair: Pair, checked: CheckedSize, kernels: Kernels) -> tuple[list[_Called], list[_Attention]]:
    call, called = _find_call(pair), list[_Called]()

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        returned = call(module, *args, **kwargs)
        called.append(_Called(_name_arguments(call, module, args, kwargs), returned))
        return returned

    dtype = next((x.dtype for x in pair.candidate.parameters() if x.is_floating_point()), torch.float32)
    args, kwargs = as_arguments(cast(draw_inputs(pair, checked.size, Rng(0)), dtype, kernels.device))
    with _attention_watched(pair.candidate) as attention:
        _through(pair, watched)(pair.candidate, *args, **kwargs)
    return called, attention


def _name_arguments(call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    is_itself = call is nn.Module.__call__
    names = list(inspect.signature(module.forward if is_itself else call).parameters)[0 if is_itself else 1 :]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given.pop(name) for name in names[:1] if name in given} | given


@contextmanager
def _attention_watched(module: nn.Module) -> Iterator[list[_Attention]]:
    seen: list[_Attention] = []

    def note(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(part.forward).bind(*args, **kwargs).arguments
        qkv_format, mask = (given.get(name) or getattr(part, name) for name in ("qkv_format", "attn_mask_type"))
        shapes = (getattr(given.get(f"{one}_layer"), "shape", ()) for one in ("query", "key", "value"))
        seen.append(_Attention(qkv_format, mask, *map(tuple, shapes)))

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in attention_modules(module)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


# From what was seen to a loop over the tokens.


def _make_decoder(call: Call, called: _Called, attention: _Attention) -> Call:
    """Return what decodes in place of the call that takes the cache."""
    batch, seq = attention.batch_and_seq
    is_sequence_first = next(iter(called.given.values())).shape[0] == seq
    decoding = Decoding(
        kv_heads=attention.key[-2],
        head_dim=attention.key[-1],
        head_dim_v=attention.value[-1],
        prompt=max(seq // 2, seq - _MOST_DECODED),
        qkv_format="sbhd" if is_sequence_first else "bshd",
        step=None if call is nn.Module.__call__ else call,
    )

    def decode(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = _name_arguments(call, module, args, kwargs)
        x, _ = given.pop(next(iter(given))), given.pop(_CACHE, None)
        given |= {name: MASK for name in MASK_ARGUMENTS if name in given}
        try:
            returned = decoding(module, x.transpose(0, 1) if is_sequence_first else x, **given)
        except Exception as error:
            if any(one in str(error) for one in REFUSED_SHAPES):
                told = f"a step has {batch} tokens, one for each sequence: {first_paragraph(error).split(', but')[0]}"
                raise NotOffered(f"not decoded, since {told}; declare a size with a larger batch") from error
            raise
        return returned.transpose(0, 1) if is_sequence_first else returned

    return decode


def _list_obstacles(pair: Pair, called: list[_Called], attention: list[_Attention]) -> Iterator[str]:
    """Yield why a pair cannot be decoded; a reason may hold only if there is none before it."""
    if any(one.given.get(_CACHE) is not None for one in called):
        yield "it decodes already"
    if not any(map(_takes_cache, filter(None, (pair.call_candidate, pair.candidate.forward)))):
        yield f"neither {type(pair.candidate).__name__}.forward nor call_candidate has an argument {_CACHE}"
    if len(called) != 1:
        yield f"call_candidate calls the candidate {len(called)} times in a pass, but has to call it once"
    if not attention:
        yield "no DotProductAttention of TE's runs in it"
    for one in attention:
        if one.qkv_format == "thd" or not (one.query and one.key and one.value):
            yield f"its attention gets packed tensors ({one.qkv_format}), whose tokens are not told apart"
        if "causal" not in one.mask or "padding" in one.mask:
            yield f"its attention has the mask {one.mask!r}, not a causal one without padding"
        if one.key[:2] != one.query[:2]:
            yield "its attention has keys of other tokens than its queries"
        if (one.key[-2:], one.value[-1]) != (attention[0].key[-2:], attention[0].value[-1]):
            yield "its layers have keys and values of different shapes, but TE's cache has one shape for all layers"
    (batch, seq), called_once = attention[0].batch_and_seq, called[0]
    name, x = next(iter(called_once.given.items()))
    shape = x.shape[:2] if isinstance(x, Tensor) else ()
    if batch == seq or seq < 2 or tuple(shape) not in ((batch, seq), (seq, batch)):
        yield (
            f"{name} should hold {batch} sequences of {seq} tokens, two or more and not as many as there are sequences"
        )
    others = [other for other, y in called_once.given.items() if isinstance(y, Tensor) and y.shape[:2] == shape]
    if len(others) > 1:
        yield f"it is called with more than one argument that holds something for each token: {', '.join(others)}"
    returned = called_once.returned
    if not isinstance(returned, Tensor) or returned.shape[:2] != shape:
        yield "it does not return one tensor with something for each token"
