"""TE's process-wide caches and switches, as a new process has them, for each candidate.

Where ``DotProductAttention`` is given no ALiBi slopes, it takes those of the call before if the sizes agree: what one
port forgets would come from another port's pass. ``LayerNormMLP`` chooses its kernels by how ``te.checkpoint`` ran
last. The other caches hold what follows from sizes alone; but they hand out the tensor that they hold, and whoever
writes to it changes it for all who come later. Which attention kernel TE picked is ``attention_backend``'s.
Source: the modules named here, in TE 2.14 to 2.20.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_TE = "transformer_engine.pytorch"
_ATTENTION = f"{_TE}.attention.dot_product_attention"

_CACHES = {
    f"{_ATTENTION}.utils": ("_cu_seqlens_cache",),
    f"{_ATTENTION}.softmax": ("_default_causal_mask",),
    f"{_ATTENTION}.dot_product_attention": ("_thd_policy_backend_cache", "_thd_policy_validation_cache"),
    f"{_ATTENTION}.context_parallel": (
        "_cu_seqlens_info_with_cp_cache",
        "_seq_chunk_ids_cache_for_reordering_before_attn",
        "_seq_chunk_ids_cache_for_reordering_after_attn",
        "_softmax_offset_chunk_ids_cache",
    ),
    f"{_TE}.module.base": ("_dummy_wgrads",),
}
"""By module, dicts and lists that are empty in a new process. Other modules refer to the same objects."""

_ALIBI = f"{_ATTENTION}.dot_product_attention", "_alibi_cache"
"""A dict that always has the same keys."""

_SWITCHES: dict[str, dict[str, Any]] = {
    f"{_TE}.distributed": {
        "_USE_REENTRANT_ACTIVATION_RECOMPUTE": True,
        "_IN_ACTIVATION_RECOMPUTE_REGION": False,
        "_ACTIVATION_RECOMPUTE_PHASE": False,
    }
}
"""By module, variables with their values in a new process."""


@contextmanager
def fresh() -> Iterator[None]:
    """Within the context TE's caches hold nothing of earlier passes; afterwards they hold what they did before.

    A cache that this version of TE lacks, or whose module is not imported yet, is none.
    """
    with ExitStack() as stack:
        for module, names in _CACHES.items():
            for name in names:
                stack.enter_context(_holding(_held(module, name), None))
        alibi = _held(*_ALIBI)
        # Without slopes TE computes slopes and biases anew, whatever else is said here.
        stack.enter_context(_holding(alibi, dict.fromkeys(alibi or ())))
        for module, values in _SWITCHES.items():
            stack.enter_context(_switched(module, values))
        yield


def _held(module: str, name: str) -> Any:
    """The cache, or None where there is none."""
    return getattr(sys.modules.get(module), name, None)


@contextmanager
def _holding(cache: Any, content: Any) -> Iterator[None]:
    """Within the context the dict or list holds this alone; it stays the same object."""
    if cache is None:
        yield
        return
    before = cache.copy()
    _refill(cache, content)
    try:
        yield
    finally:
        _refill(cache, before)


def _refill(cache: Any, content: Any) -> None:
    cache.clear()
    if content:
        (cache.update if isinstance(cache, dict) else cache.extend)(content)


@contextmanager
def _switched(module: str, values: dict[str, Any]) -> Iterator[None]:
    loaded = sys.modules.get(module)
    before = {name: getattr(loaded, name) for name in values if hasattr(loaded, name)}
    for name in before:
        setattr(loaded, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(loaded, name, value)
