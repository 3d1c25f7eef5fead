"""Let a pair that calls its candidate on whole sequences decode them, token by token with TE's cache.

One pass on whole sequences shows all that a declaration would say: which argument holds the tokens, along which
dimensions, and what TE's attention gets, so that a cache can hold its keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

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
        seen = _watch_pass(pair, checked, kernels)
    for reason in _list_obstacles(pair, *seen):
        raise NotOffered(f"not decoded, since {reason}")
    decode = partial(_decode_tokens, _choose_decoding(*seen))

    def factory(te: ModuleType, **size: Any) -> Pair:
        declared = case.factory(te, **size)
        return replace(declared, call_candidate=_route_call(declared, decode), evaluation=True)

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


def _route_call(pair: Pair, instead: Call) -> Call:
    """Return how to call the candidate as the pair does, but ``instead(call, module, ...)`` in place of one call.

    That is the call that may take a cache: the pair's ``call_candidate`` if it does, or else the candidate's own.
    """
    call, instead_of_its_own = pair.call_candidate, partial(instead, nn.Module.__call__)
    if call is None:
        return instead_of_its_own
    if _takes_cache(call):
        return partial(instead, call)
    return lambda module, *args, **kwargs: call(_StandIn(module, instead_of_its_own), *args, **kwargs)


def _name_arguments(call: Call, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, the first one first."""
    is_its_own = call is nn.Module.__call__
    names = list(inspect.signature(module.forward if is_its_own else call).parameters)[0 if is_its_own else 1 :]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given.pop(name) for name in names[:1] if name in given} | given


# Watch a pass on whole sequences.


class _Attention(NamedTuple):
    """What a call of TE's attention gets.

    Attributes:
        mask: the type of its mask.
        batch, seq: how many sequences there are, and how many tokens each has; 0 for packed ones.
        stored: the number of heads of keys and values, and the width of a key and of a value.
    """

    mask: str
    batch: int
    seq: int
    stored: tuple[int, int, int]


_Called = tuple[dict[str, Any], Any]  # the arguments of a call by name, and its result


def _watch_pass(pair: Pair, checked: CheckedSize, kernels: Kernels) -> tuple[list[_Called], list[_Attention]]:
    called, attention = list[_Called](), list[_Attention]()

    def watched(call: Call, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        returned = call(module, *args, **kwargs)
        called.append((_name_arguments(call, module, args, kwargs), returned))
        return returned

    def note(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(part.forward).bind(*args, **kwargs).arguments
        qkv_format, mask = (given.get(name) or getattr(part, name) for name in ("qkv_format", "attn_mask_type"))
        shape = next(x.shape for x in given.values() if isinstance(x, Tensor))  # of queries, or of all three in one
        batch, seq = {"bshd": shape[:2], "sbhd": shape[1::-1]}.get(qkv_format, (0, 0))
        widths = part.hidden_size_per_attention_head_k, part.hidden_size_per_attention_head_v
        attention.append(_Attention(mask, batch, seq, (part.num_gqa_groups_per_partition, *widths)))

    for part in attention_modules(pair.candidate.eval()):
        part.register_forward_pre_hook(note, with_kwargs=True)
    dtype = next((x.dtype for x in pair.candidate.parameters() if x.is_floating_point()), torch.float32)
    args, kwargs = as_arguments(cast(draw_inputs(pair, checked.size, Rng(0)), dtype, kernels.device))
    _route_call(pair, watched)(pair.candidate, *args, **kwargs)
    return called, attention


def _list_obstacles(pair: Pair, called: list[_Called], attention: list[_Attention]) -> Iterator[str]:
    """Yield why a pair cannot be decoded; a reason may hold only if there is none before it."""
    if any(given.get(_CACHE) is not None for given, _ in called):
        yield "it decodes already"
    if not any(map(_takes_cache, filter(None, (pair.call_candidate, pair.candidate.forward)))):
        yield f"neither {type(pair.candidate).__name__}.forward nor call_candidate has an argument {_CACHE}"
    if len(called) != 1:
        yield f"call_candidate calls the candidate {len(called)} times in a pass, but has to call it once"
    if not attention:
        yield "no DotProductAttention of TE's runs in it"
    for mask, batch, _, stored in attention:
        if not batch:
            yield "its attention gets packed sequences"
        if "causal" not in mask or "padding" in mask:
            yield f"its attention has the mask {mask!r}, not a causal one without padding"
        if stored != attention[0].stored:
            yield "its layers have keys and values of different shapes, but TE's cache has one shape for all layers"
    (_, batch, seq, _), (given, returned) = attention[0], called[0]
    shapes = {name: tuple(x.shape[:2]) for name, x in given.items() if isinstance(x, Tensor)}
    name = next(iter(given), "nothing")
    shape = shapes.get(name, ())
    if batch == seq or seq < 2 or shape not in ((batch, seq), (seq, batch)):
        yield f"{name} begins with the dimensions {shape}, which do not tell {batch} sequences from {seq} tokens"
    if len(others := [other for other in shapes if shapes[other] == shape]) > 1:
        yield f"it is called with more than one argument that holds something for each token: {', '.join(others)}"
    if not isinstance(returned, Tensor) or returned.shape[:2] != shape:
        yield "it does not return one tensor with something for each token"


# From what was seen to a loop over the tokens.


def _choose_decoding(called: list[_Called], attention: list[_Attention]) -> Decoding:
    (_, _, seq, (heads, head_dim, head_dim_v)), (given, _) = attention[0], called[0]
    is_sequence_first = next(iter(given.values())).shape[0] == seq
    prompt = max(seq // 2, seq - _MOST_DECODED)
    return Decoding(heads, head_dim, prompt, "sbhd" if is_sequence_first else "bshd", head_dim_v=head_dim_v)


def _decode_tokens(decoding: Decoding, call: Call, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Decode what ``call`` would compute at once, with tokens and sequences in the order that it has."""
    given = _name_arguments(call, module, args, kwargs)
    x, _ = given.pop(next(iter(given))), given.pop(_CACHE, None)
    given |= {name: MASK for name in MASK_ARGUMENTS if name in given}
    order = (1, 0) if decoding.qkv_format == "sbhd" else (0, 1)
    step = None if call is nn.Module.__call__ else call
    try:
        return replace(decoding, step=step)(module, x.movedim((0, 1), order), **given).movedim((0, 1), order)
    except Exception as error:
        if not any(one in str(error) for one in REFUSED_SHAPES):
            raise
        told = f"{x.shape[order[0]]} tokens, one for each sequence: {first_paragraph(error).split(', but')[0]}"
        raise NotOffered(f"not decoded, since a step has {told}; declare a size with a larger batch") from error
