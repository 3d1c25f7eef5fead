"""Compute a reference in FP64 throughout, even where its code asks for FP32.

``module.double()`` converts parameters and buffers. But a model's author who computes a norm or a softmax "in FP32"
writes ``x.float()`` or ``dtype=torch.float32``, and means only that half precision is not enough. Taken literally, this
would round golden to FP32 there, as the rounding model and the port do. All three would share that error, so that it
could not be measured.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from parity.numerics.blocked_attention import EXACT, Arithmetic, Band, are_too_many_scores, attention
from parity.trace.calls import mapped
from parity.trace.private_functions import CHECKPOINT, exchanged

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

# Run PyTorch's scaled dot-product attention in blocks of queries if its scores would need too much memory.


def attention_in_blocks(arithmetic: Arithmetic = EXACT) -> TorchFunctionMode:
    """Return a context in which long calls of ``F.scaled_dot_product_attention`` and of ``attention`` run in blocks.

    Attention that is written in other ways stays as it is: a reference that multiplies queries and keys itself holds
    every score. So does a call with dropout, with nested tensors, or with a mask of an unknown class.

    Args:
        arithmetic: the roundings in these calls.
    """
    return _InBlocks(arithmetic)


def in_blocks(function: Any) -> Any:
    """Return a function that runs another one within ``attention_in_blocks``, or the same one if that has no effect."""
    if function is not attention and function is not F.scaled_dot_product_attention:
        return function

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with attention_in_blocks():
            return function(*args, **kwargs)

    return called


class _InBlocks(TorchFunctionMode):
    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is attention:
            return attention(*args[:-1], arithmetic=self._arithmetic)
        if func is F.scaled_dot_product_attention:
            call = SDPA.bind(*args, **kwargs)
            call.apply_defaults()
            is_served = _is_served(**call.arguments)
            if is_served and not (self._arithmetic is EXACT and _is_linear_already(**call.arguments)):
                return _scaled_dot_product(**call.arguments, arithmetic=self._arithmetic)
        return func(*args, **kwargs)


def _sdpa_signature(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    """Provide the signature of ``F.scaled_dot_product_attention``, which as a built-in function has none."""


SDPA = inspect.signature(_sdpa_signature)


def _is_served(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    **_: Any,
) -> bool:
    """Return whether a call has too many scores and can run in blocks. Invalid calls are left to PyTorch."""
    dimensions = {x.dim() for x in (query, key, value)}
    if query.is_nested or len(dimensions) > 1 or query.dim() < 2 or not are_too_many_scores(query, key):
        return False
    heads, *groups = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    shares = groups[0] == groups[1] and (groups[0] in (1, heads) or (enable_gqa and heads % groups[0] == 0))
    if attn_mask is not None and (is_causal or attn_mask.dim() > query.dim()):
        return False
    knows_mask = attn_mask is None or type(attn_mask) in (Tensor, torch.nn.Parameter) or _is_causal_bias(attn_mask)
    return knows_mask and dropout_p == 0.0 and shares and query.dtype == key.dtype == value.dtype


def _is_causal_bias(mask: Tensor | None) -> TypeGuard[CausalBias]:
    """Return whether the mask is a ``CausalBias``.

    Its module takes most of a second to import, and whoever has a ``CausalBias`` has already imported it.
    """
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(mask, bias.CausalBias)


def _is_linear_already(attn_mask: Tensor | None, **call: Any) -> bool:
    """Return whether PyTorch uses a kernel without a matrix of scores, as on the CPU in FP64, which beats blocks."""
    if _is_causal_bias(attn_mask):
        return False
    return SDPBackend(torch._fused_sdp_choice(attn_mask=attn_mask, **call)) is not SDPBackend.MATH


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    arithmetic: Arithmetic,
    **_: Any,
) -> Tensor:
    band = Band(right=0) if is_causal else Band()
    if _is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalVariant

        lower_right = attn_mask.variant is CausalVariant.LOWER_RIGHT
        band = Band(right=attn_mask.seq_len_kv - attn_mask.seq_len_q if lower_right else 0)
        attn_mask = None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if arithmetic is not EXACT:
        # Like PyTorch, the rounding model multiplies both operands by the scale's root, and keys once per head.
        root = math.sqrt(abs(scale))
        key = _repeat_keys(key, query) * root
        query, scale = query * math.copysign(root, scale), 1.0
    return attention(query, key, value, attn_mask, band, scale, 0.0, arithmetic)


def _repeat_keys(key: Tensor, query: Tensor) -> Tensor:
    """Return the keys with each group's repeated for every head of the group."""
    if query.dim() < 3 or key.shape[-3] == query.shape[-3]:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


# Compute a grouped product, which multiplies all experts' tokens by their weights in one call, expert by expert.
#
# ``torch.nn.functional.grouped_mm``, which transformers uses for mixtures by default, has no kernel for FP64, and hides
# what it rounds. A product for each expert works in FP64 and shows its operands.


# PyTorch 2.10 has the public name, and older versions the other; some have neither.
_GROUPED = tuple(
    function
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)


def in_blocks_and_one_by_one(arithmetic: Arithmetic = EXACT) -> TorchFunctionMode:
    """Return the context ``attention_in_blocks``, in which grouped products run expert by expert as well.

    These are products of tokens ``[rows, in]`` with weights ``[experts, in, out]``. Others stay as they are, such as
    batches of matrices, or a gradient that a reference computes itself.

    Args:
        arithmetic: as for ``attention_in_blocks``.
    """
    return _InBlocksAndOneByOne(arithmetic)


class _InBlocksAndOneByOne(_InBlocks):
    """A single mode for both, because each active mode adds time to every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GROUPED and _is_of_tokens(*args, **(kwargs or {})):
            return _one_by_one(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _is_of_tokens(tokens: Tensor, weights: Tensor, *, offs: Tensor | None = None, **others: Any) -> bool:
    return tokens.dim() == 2 and weights.dim() == 3 and offs is not None and all(x is None for x in others.values())


def _one_by_one(tokens: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Return the products of each expert's rows. Rows after the last expert's, undefined in PyTorch, are 0."""
    ends = [0, *offs.tolist()]
    rows = [
        tokens[first:last] @ weight for weight, (first, last) in zip(weights, itertools.pairwise(ends), strict=True)
    ]
    return torch.cat([*rows, tokens.new_zeros(len(tokens) - ends[-1], weights.shape[-1])])


# Compute a reference in FP64 throughout, even where its code asks for FP32.


@contextmanager
def in_fp64() -> Iterator[None]:
    """Make a module in FP64 compute only in FP64, and long attention in blocks, within the context."""
    with all_in_fp64(), _recomputed_alike():
        yield


def all_in_fp64() -> TorchFunctionMode:
    """Return the context ``in_fp64`` without its support for checkpointed functions."""
    return _AllInFP64()


@contextmanager
def _recomputed_alike() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` recompute in FP64 in the backward pass, within the context.

    Autograd recomputes under the modes that were active when the forward pass called PyTorch's functions, and a mode is
    not active while it handles a call.
    """
    with exchanged(CHECKPOINT, _checkpoint_in_fp64):
        yield


def _checkpoint_in_fp64(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Nested checkpoints may be recomputed in one of autograd's threads.
    return original(in_fp64()(function), *args, **kwargs)


class _InFP64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        asks_for_fp32 = func is Tensor.float or any(x is torch.float32 for x in given)
        if asks_for_fp32 and _has_dtype(torch.float64, given):
            func = Tensor.double if func is Tensor.float else func
            return func(*map(_widen_dtype, args), **{name: _widen_dtype(x) for name, x in kwargs.items()})
        result = func(*args, **kwargs)
        # This call creates an FP32 tensor, or reads one that is neither a parameter nor a buffer of the reference.
        if not _has_dtype(torch.float32, (result,)) or _has_dtype(torch.float32, given):
            return result
        return mapped(result, lambda x: x.double() if x.dtype is torch.float32 else x)


class _AllInFP64(_InFP64):
    """A single mode that does the work of two."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention or func is attention or func in _GROUPED:
            with _InFP64(), in_blocks_and_one_by_one():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def in_fp64_if_needed(function: Any, leaves: Sequence[Any], returned: Sequence[Tensor]) -> Any:
    """Return a function that runs another one within ``in_fp64``, or the same one if that has no effect.

    Args:
        function: a function of PyTorch.
        leaves: its arguments, flattened out of lists and dicts.
        returned: the tensors that it returned.
    """
    given = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    is_special = function in (F.scaled_dot_product_attention, attention, Tensor.float, Tensor.type, *_GROUPED)
    asks = is_special or any(x is torch.float32 for x in leaves) or any(x.dtype is not torch.float64 for x in given)
    if not asks and (given or not any(x.is_floating_point() for x in returned)):
        return function

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with all_in_fp64():
            return function(*args, **kwargs)

    return called


def _has_dtype(dtype: torch.dtype, values: Iterable[Any]) -> bool:
    """Return whether any tensor among the values or in lists or tuples among them has the dtype."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is dtype:
                return True
        elif isinstance(value, (list, tuple)) and _has_dtype(dtype, value):
            return True
    return False


def _widen_dtype(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


# Compute golden on the kernels' own device, or on the CPU if its FP64 is faster.
#
# A data-center GPU (compute capability 8.0, 9.0, 10.0) computes FP64 at half the rate of FP32 or better, but others
# (8.9, 12.0) at a 64th, so that a CPU with many cores can be faster. A short measurement decides, because both vary.


_WIDTH = 1024
_REPEATS = 3


@dataclass(frozen=True)
class GoldenDevice:
    """The device that a process computes golden on.

    Attributes:
        device: the device.
        reason: the device's name and the measured times, for a report.
    """

    device: torch.device
    reason: str


@cache
def golden_device(device: torch.device) -> GoldenDevice:
    """Return the faster of the kernels' device and the CPU, measured once per process.

    Args:
        device: the kernels' device.
    """
    cpu = torch.device("cpu")
    if device.type == "cpu":
        return GoldenDevice(cpu, "CPU")
    here, there = seconds_of_gemm(device), seconds_of_gemm(cpu)
    measured = f"an FP64 GEMM of width {_WIDTH} takes {1e3 * here:.2g} ms on the GPU, {1e3 * there:.2g} ms on the CPU"
    return GoldenDevice(cpu, f"CPU: {measured}") if there < here else GoldenDevice(device, f"GPU: {measured}")


def seconds_of_gemm(device: torch.device) -> float:
    """Return the shortest time of an FP64 GEMM of ``_WIDTH`` in all three dimensions, after a warm-up."""
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=torch.float64, device=device)
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the result
        times.append(time.perf_counter() - began)
    return min(times[1:])
