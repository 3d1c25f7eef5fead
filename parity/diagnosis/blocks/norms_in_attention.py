"""Norms of queries, keys and values that a port alone has: of some of them, of all, of each head, of all heads at once.

TE's ``qk_norm_type``, or norms of another model, with weights that say nothing, or with those of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from parity.diagnosis.attention.attention import Attention, attentions, heads_of
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.walk import ancestors
from parity.watching.trace import Edit, Trace, edit

_EPS = 1e-5  # TE's default
_EPS_OF_L2 = 1e-6  # ditto, of L2Normalization
_NEAR = 24  # of a key's ancestors, among which its norm is

Compute = Callable[[Tensor], Tensor]


def _rms_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()


def _layer_norm(x: Tensor) -> Tensor:
    return _rms_norm(x - x.mean(-1, keepdim=True))


def _l2_norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPS_OF_L2).rsqrt()


KINDS: dict[str, Compute] = {"LayerNorm": _layer_norm, "RMSNorm": _rms_norm}
"""Norms without weights, by their names in TE."""


def attention_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Each such norm, in all layers and, of queries and keys, in each."""
    found = attentions(trace)
    of_both = (_of_queries_and_keys(*named) for named in (*KINDS.items(), ("L2Normalization", _l2_norm)))
    yield from everywhere_and_somewhere(of_both, found, module, lambda one: one.call.module)
    yield from everywhere_and_somewhere((made for named in KINDS.items() for made in _of_some(*named)), found, module)
    keyed = [_Keyed(one, norm) for one in found if (norm := _of_key(trace, one)) is not None]
    yield from everywhere_and_somewhere([_values_as_keys()], keyed, module)


def _of_queries_and_keys(kind: str, norm: Compute) -> Mistake[Attention]:
    return Mistake(
        "norm-missing",
        f"{kind} of queries and keys",
        f"take queries and keys as they are, as the reference does: qk_norm_type=None; they go through a {kind}",
        lambda one: one.edits(arrange=(norm, norm, None, None)),
    )


def _of_some(kind: str, norm: Compute) -> Iterator[Mistake[Attention]]:
    """Of other ones than queries and keys, or of all heads at once, as OLMo 2's."""
    arranged: dict[str, tuple[Compute | None, ...]] = {
        f"{kind} of values": (None, None, norm, None),
        f"{kind} of queries, keys and values": (norm, norm, norm, None),
        f"{kind} of queries": (norm, None, None, None),
        f"{kind} of keys": (None, norm, None, None),
        f"{kind} of queries and keys, all heads at once": (_of_all_heads(norm), _of_all_heads(norm), None, None),
    }
    for name, arrange in arranged.items():
        yield Mistake(
            "norm-missing",
            name,
            f"take queries, keys and values as they are where the reference does; attention has a {name}",
            lambda one, arrange=arrange: one.edits(arrange=arrange),  # type: ignore[misc]
        )


def _of_all_heads(norm: Compute) -> Compute:
    """Of ``[..., heads, seq, head_dim]`` the norm of each position's channels, of all heads."""

    def computed(x: Tensor) -> Tensor:
        rows = norm(x.transpose(-3, -2).flatten(-2))
        return rows.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)

    return lambda x: computed(x) if x.dim() > 3 else norm(x)


@dataclass(frozen=True, eq=False)
class _Keyed:
    """Attention whose keys are normalised."""

    attention: Attention
    norm: Norm


def _of_key(trace: Trace, attention: Attention) -> Norm | None:
    """The norm of each head that makes the keys, before a rotation or not; None where values may have it, too."""
    *_, value = heads_of(trace, attention)
    made = set(ancestors(trace, attention.key, _NEAR)) | {attention.key}
    of_value = set(ancestors(trace, attention.value, _NEAR)) | {attention.value}
    of_heads = (one for one in norms(trace) if one.call.outputs[0] in made - of_value)
    return next((one for one in of_heads if trace.tensor(one.x).shape[-1] == value.shape[-1]), None)


def _values_as_keys() -> Mistake[_Keyed]:
    def edits(one: _Keyed) -> tuple[Edit, ...]:
        attention, count, parameters = one.attention, len(one.attention.needs), one.norm.needs[1:]

        def compute(was: Tensor, *values: Tensor) -> Tensor:
            of_values = partial(_computed, one.norm, values[count:])
            return replace(attention, arrange=(None, None, of_values, None)).compute(*values[:count]).to(was.dtype)

        return (edit(attention.call, (*attention.needs, *parameters), compute),)

    return Mistake(
        "norm-missing",
        "norm of keys for values, too",
        "take values as they are, as the reference does; they go through the norm of the keys",
        edits,
    )


def _computed(norm: Norm, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    return norm.compute(x, *parameters)
