"""Draw the numbers of a comparison: weights and inputs, once for all precisions, and inputs that probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parity.case.case import Rng
from parity.machine import devices
from parity.numerics.errors import all_finite

# The numbers for weights and inputs are drawn once, since each precision begins again from the same seed.
#
# What a generator draws depends only on its state. So what it drew before in the same state can be copied, which takes
# a tenth of the time or less.


# Drawing fewer elements takes no longer than looking them up.
_FEWEST = 4096
# Bytes beyond which a tensor is drawn again: in far less time than a pass multiplies by it, and keeping it would cost a
# large model its weights' memory once more for each module that draws them.
_LARGEST = 2**24
# What ``nn.init`` and inputs are drawn with.
_FILLING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
# Bytes that may be kept if the system does not say how many are free.
_MOST = 2**28


class Draws:
    """Tensors that a CPU's generator filled, by its state before."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}  # the values, and the state after
        free = devices.free_memory()
        self._left = _MOST if free is None else devices.share_to_keep(free)

    def repeated(self) -> AbstractContextManager[object]:
        """Within the context, fill tensors with what was drawn before; draw and keep what was not."""
        return _Repeating(self)

    def fill(self, draw: Callable[..., Tensor], tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Fill a tensor as ``draw(tensor, *args, **kwargs)`` does, which is ATen's ``normal_`` or ``uniform_``."""
        numbers = {name: value for name, value in kwargs.items() if name != "generator"}
        if not _is_repeatable(tensor, (*args, *numbers.values())):
            return draw(tensor, *args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state().numpy().tobytes()
        details = tensor.shape, tensor.stride(), tensor.dtype, tuple(args), tuple(sorted(numbers.items()))
        key = draw, state, *details
        if key in self._made:
            values, after = self._made[key]
            generator.set_state(after)
            return tensor.copy_(values)
        drawn = draw(tensor, *args, **kwargs)
        if tensor.nbytes <= min(self._left, _LARGEST):
            self._left -= tensor.nbytes
            self._made[key] = tensor.detach().clone(), generator.get_state()
        return drawn


class _Repeating(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLING:
            return self._draws.fill(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)


def _is_repeatable(tensor: Tensor, arguments: Sequence[Any]) -> bool:
    """Return whether what fills a tensor depends only on a CPU's generator and numbers, and takes some time."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() >= _FEWEST and not any(isinstance(x, Tensor) for x in arguments)


_KEPT: dict[tuple[Hashable, ...], Draws] = {}


def draws_of(subject: Hashable, *details: Hashable) -> Draws:
    """Return the draws of a subject with these details, kept until another subject's are asked for."""
    if any(kept[0] != subject for kept in _KEPT):
        _KEPT.clear()
    key = subject, *details
    if key not in _KEPT:
        _KEPT[key] = Draws()
    return _KEPT[key]


def forget_draws() -> None:
    """Let go of all draws."""
    _KEPT.clear()


# Inputs that expose the mistakes that Gaussian inputs hide.
#
# Gaussian rows all have about the same variance, far above any eps, a mean near zero, and no outliers. A probe is the
# drawn inputs with other rows: of every magnitude from 1e-5 up, so that each eps shows in some of them; a third of them
# far from zero, to show a mean that is not subtracted, and statistics in low precision; a third with a single large
# value, to show clamps, quantization and the tails of activations.


SMALLEST, LARGEST = 1e-5, 4.0
# The mean of a shifted row, in standard deviations.
_OFFSET = 4.0


def probe(inputs: Any, rng: Rng) -> Any:
    """Return the inputs with uneven rows.

    Args:
        inputs: as a pair's ``inputs`` returns them. Floating-point tensors of two or more dimensions whose elements are
            all finite change, anything else stays. A row that holds one number throughout, such as padding, stays as
            well, unless it becomes a single value: far from zero, its norm would compute what rounding left, see
            ``parity.search.explanation``.
        rng: draws which row becomes what.
    """
    return tree_map_only(Tensor, lambda x: _uneven(x, rng) if _is_activation(x) else x, inputs)


def _is_activation(x: Tensor) -> bool:
    is_matrix = x.is_floating_point() and x.dim() > 1 and x.numel() > 0
    return is_matrix and all_finite(x) and bool(_varies(x).any())


def _varies(rows: Tensor) -> Tensor:
    """Return whether each row holds more than one number; all elements are finite."""
    return rows.amin(-1) != rows.amax(-1)


def _uneven(x: Tensor, rng: Rng) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).clone()
    count, width = rows.shape
    rms = rows.square().mean().sqrt()
    constant = ~_varies(rows)
    order = rng.permutation(count)
    shifted, single = order[1::3].to(x.device), order[2::3].to(x.device)
    constant[single] = False
    shifted = shifted[~constant[shifted]]
    rows[shifted] += _OFFSET * rms
    positions = rng.integers(len(single), high=width).to(x.device)
    rows[single] = 0.0
    rows[single, positions] = rms * width**0.5
    magnitudes = torch.logspace(math.log10(SMALLEST), math.log10(LARGEST), count)
    factors = magnitudes[rng.permutation(count)].to(x.device, x.dtype)
    rows *= factors.masked_fill(constant, 1.0)[:, None]
    return rows.reshape(x.shape)


# Rows of every magnitude for modules that begin with a table: the probing inputs for ids.
#
# A token's row is as large as it is in the table, far above any eps. Within ``ScaledLookups`` each id's row is
# multiplied by a power of two of its own, and rounded to the precision's dtype, in which small numbers have fewer
# digits. A port looks up what the reference does, so both get the same rows; a port that looks up something else is not
# probed.


_SMALLEST = round(math.log2(SMALLEST))
_COUNT = round(math.log2(LARGEST)) - _SMALLEST + 1
_STEP = (
    7  # prime to the count of magnitudes, so that neighbouring ids differ; id 0, often shared by all, has the smallest
)
_PRIME = 1_000_003

Lookups = Counter[tuple[int, ...]]


class ScaledLookups(TorchFunctionMode):
    """Within the context, the rows of tables are scaled.

    Args:
        dtype: the precision's.
        in_parts: whether ids count one by one, since the port may look them up token by token.

    Attributes:
        seen: how often which ids were looked up.
    """

    def __init__(self, dtype: torch.dtype, in_parts: bool = False) -> None:
        super().__init__()
        self._dtype, self._in_parts = dtype, in_parts
        self.seen: Lookups = Counter()

    def around(self, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a call of a module, as in ``parity.Pair``, within this context; it forgets what was seen before."""

        def scaled(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.clear()
            with self:
                return call(module, *args, **kwargs) if call else module(*args, **kwargs)

        return scaled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _IDS:
            ids = args[_IDS[func]] if len(args) > _IDS[func] else (kwargs or {})[_NAMES[func]]
            with torch._C.DisableTorchFunction():  # a trace of the module has no call of ours
                self.seen.update(((int(one),) for one in ids.flatten()) if self._in_parts else [_signature(ids)])
                scaled = result * _factors(ids).to(result.dtype).unsqueeze(-1)
                rounding = scaled.detach().to(self._dtype).to(result.dtype) - scaled.detach()  # no gradient is rounded
                result.copy_(scaled + rounding)  # in place, so that the trace knows where it comes from
        return result


_IDS = {F.embedding: 0, torch.embedding: 1}
_NAMES = {F.embedding: "input", torch.embedding: "indices"}


def is_lookup(function: Any) -> bool:
    """Return whether it is one of the functions whose rows ``ScaledLookups`` scales."""
    return function in _IDS


def _factors(ids: Tensor) -> Tensor:
    return torch.exp2(((ids * _STEP) % _COUNT + _SMALLEST).float())


def _signature(ids: Tensor) -> tuple[int, ...]:
    """Return a signature of ids that stays the same in another order only if batch and sequence are exchanged."""
    return tuple(sorted({_checksum(ids), _checksum(ids.mT) if ids.dim() > 1 else _checksum(ids)}))


def _checksum(ids: Tensor) -> int:
    some = ids.flatten().long() + 1
    return int((some * torch.arange(1, len(some) + 1, device=ids.device) % _PRIME).sum())
