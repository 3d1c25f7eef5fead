"""What a TE module that the port builds calls an argument that a finding names as most of TE's modules do.

Signatures of TE 2.20.2: ``pytorch/transformer.py``, ``pytorch/attention/multi_head_attention.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence

from torch import nn

from parity.diagnosis.codes import CODES
from parity.diagnosis.failure import Failure
from parity.result import Finding

_OTHER_NAMES = {
    "attn_mask_type": "self_attn_mask_type",
    "qkv_format": "attn_input_format",
    "eps": "layernorm_epsilon",
}
_IN_ITS_PLACE = {
    "softmax_scale": "multiply the query's weight and bias by the reference's scale over its own",
}
_EPS = frozenset({CODES["norm-eps"]})  # of other findings, it may be another's eps


class _Seen(Exception):
    """Ends a run as soon as its module is built."""


def with_argument_names(found: Sequence[Finding], failure: Failure) -> tuple[Finding, ...]:
    """The findings, each with the names that the candidate's TE modules have for what it names otherwise."""
    named = [[name for name in (*_OTHER_NAMES, *_IN_ITS_PLACE) if _names(one, name)] for one in found]
    if failure.rerun is None or not any(named):
        return tuple(found)
    modules: dict[str, type] = {}

    def see(candidate: nn.Module) -> None:
        modules.update({type(module).__name__: type(module) for module in _outermost_of_te(candidate)})
        raise _Seen

    with contextlib.suppress(_Seen):
        failure.rerun(see)
    added = [[told for name in names for told in _told(name, modules)] for names in named]
    return tuple(
        dataclasses.replace(one, message="; ".join((one.message, *more)))
        for one, more in zip(found, added, strict=True)
    )


def _names(finding: Finding, argument: str) -> bool:
    if argument == "eps" and finding.code not in _EPS:
        return False
    return re.search(rf"\b{argument}\b", finding.message) is not None


def _told(argument: str, modules: dict[str, type]) -> Iterator[str]:
    """A clause for the modules that have another name for the argument, and one for those that have none."""
    taken = {name: inspect.signature(module.__init__).parameters for name, module in modules.items()}  # type: ignore[misc]
    other = _OTHER_NAMES.get(argument)
    renamed = [name for name, parameters in taken.items() if argument not in parameters and other in parameters]
    if renamed:
        yield f"it is {other} of {' and '.join(renamed)}"
    attend = [name for name, parameters in taken.items() if "num_attention_heads" in parameters]
    lacking = [name for name in attend if argument not in taken[name]]
    if argument in _IN_ITS_PLACE and lacking:
        yield f"{' and '.join(lacking)} has no {argument}: {_IN_ITS_PLACE[argument]}"


def _outermost_of_te(module: nn.Module) -> Iterator[nn.Module]:
    """TE's modules that no other of them made."""
    if type(module).__module__.startswith("transformer_engine."):
        yield module
        return
    for child in module.children():
        yield from _outermost_of_te(child)
