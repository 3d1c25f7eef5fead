"""All calls of the table, in its order, and the choice of some."""

from __future__ import annotations

from parity.kernel_table import (
    activation_calls,
    attention_calls,
    cast_calls,
    core_attention_calls,
    gemm_calls,
    grouped_calls,
    layout_calls,
    loss_calls,
    mixture_calls,
    norm_calls,
    optimizer_calls,
    shard_calls,
)
from parity.kernel_table.call import KernelCall
from parity.user_error import UserError

CALLS: tuple[KernelCall, ...] = (
    *gemm_calls.calls(),
    *norm_calls.calls(),
    *activation_calls.calls(),
    *attention_calls.calls(),
    *core_attention_calls.calls(),
    *cast_calls.calls(),
    *shard_calls.calls(),
    *grouped_calls.calls(),
    *mixture_calls.calls(),
    *layout_calls.calls(),
    *optimizer_calls.calls(),
    *loss_calls.calls(),
)


def select(keyword: str) -> tuple[KernelCall, ...]:
    """The calls whose name contains the keyword; an empty one is in all.

    Raises:
        UserError: if it is in none.
    """
    chosen = tuple(call for call in CALLS if keyword in call.name)
    if not chosen:
        raise UserError(f"no kernel call contains {keyword!r} in its name, such as {CALLS[0].name!r}")
    return chosen
