"""Draw the weights and inputs of a comparison, once for all precisions, and those that probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
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

# Draw the numbers for weights and inputs only once, although each precision starts again from the same seed.
#
# A generator's numbers depend only on its state. So numbers that it drew from the same state before can be copied,
# which takes a tenth of the time or less.


# Drawing fewer elements takes no longer than looking them up.
_FEWEST = 4096
# A tensor of more bytes is drawn again. That takes far less time than a pass through it, and keeping it would cost a
# large model the memory of its weights once more for each module that draws them.
_LARGEST = 2**24
# The operations that ``nn.init`` and inputs draw with.
_FILLING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
# Bytes that may be kept if the system does not say how many are free.
_MOST_BYTES = 2**28


class Draws:
    """Tensors that a CPU generator filled, by the generator's state before."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}  # the values, and the state after
        free = devices.free_memory()
        self._left = _MOST_BYTES if free is None else devices.share_to_keep(free)

    def repeated(self) -> AbstractContextManager[object]:
        """Fill tensors with numbers that were drawn before, within the context; draw and keep any others."""
        return _Repeating(self)

    def fill(self, draw: Callable[..., Tensor], tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Fill a tensor as ``draw(tensor, *args, **kwargs)`` does; ``draw`` is ATen's ``normal_`` or ``uniform_``."""
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
    """Return whether a fill depends only on a CPU generator and numbers, and takes long enough to be worth keeping."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() >= _FEWEST and not any(isinstance(x, Tensor) for x in arguments)


_KEPT: dict[tuple[Hashable, ...], Draws] = {}


def draws_of(subject: Hashable, *details: Hashable) -> Draws:
    """Return the draws of a subject with these details, kept until those of another subject are requested."""
    if any(kept[0] != subject for kept in _KEPT):
        _KEPT.clear()
    key = subject, *details
    if key not in _KEPT:
        _KEPT[key] = Draws()
    return _KEPT[key]


def forget_draws() -> None:
    """Drop all draws."""
    _KEPT.clear()


# Probing inputs, which expose mistakes that Gaussian inputs hide.
#
# Gaussian rows all have about the same variance, far above any eps, a mean near zero, and no outliers. A probe changes
# the rows of the drawn inputs. Their magnitudes go from 1e-5 up, so that each eps shows in some rows. A third of the
# rows is far from zero, to expose a mean that is not subtracted and statistics in low precision. Another third has a
# single large value, to expose clamps, quantization and the tails of activations.


SMALLEST, LARGEST = 1e-5, 4.0
# The mean of a shifted row, in standard deviations.
_OFFSET = 4.0


def probe(inputs: Any, rng: Rng) -> Any:
    """Return the inputs with uneven rows.

    Args:
        inputs: as a pair's ``inputs`` returns them. Only finite floating-point tensors of two or more dimensions
            change. A row that holds one number throughout, such as padding, stays as well, unless it becomes a row
            with a single value: if it were shifted far from zero, its norm would only amplify rounding errors, see
            ``parity.search.explanation``.
        rng: chooses which row is changed in which way.
    """
    return tree_map_only(Tensor, lambda x: _make_rows_uneven(x, rng) if _is_activation(x) else x, inputs)


def _is_activation(x: Tensor) -> bool:
    is_matrix = x.is_floating_point() and x.dim() > 1 and x.numel() > 0
    return is_matrix and all_finite(x) and bool(_find_varying_rows(x).any())


def _find_varying_rows(rows: Tensor) -> Tensor:
    """Return whether each row holds more than one number; all elements are finite."""
    return rows.amin(-1) != rows.amax(-1)


def _make_rows_uneven(x: Tensor, rng: Rng) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).clone()
    count, width = rows.shape
    rms = rows.square().mean().sqrt()
    constant = ~_find_varying_rows(rows)
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


# Probing weights, which exercise what usual weights leave idle.
#
# Weights that are drawn small keep activations where a cap, a clamp or the tails of an activation make no difference,
# and biases of 0 hide where they are added. Probing weights give each output of a linear layer a gain of its own, from
# half of what keeps a variance up to six times that, and biases and gains of norms that are as large as activations.


_LEAST_GAIN, _MOST_GAIN = 0.5, 6.0
_SPREAD = 0.75  # of constants, which leaves a gain of 1 positive
_BIAS = 0.5  # root mean square


def reweigh(reference: nn.Module, names: Container[str], rng: Rng) -> None:
    """Give the parameters of these names probing weights.

    Args:
        reference: the module.
        names: parameters that were drawn or are constant; their shapes say what they are.
        rng: chooses gains and the values of constants.
    """
    with torch.no_grad():
        for name, x in reference.named_parameters():
            if name not in names:
                continue
            if bool((x == x.flatten()[0]).all()):
                noise = rng.uniform(*x.shape, low=-_SPREAD, high=_SPREAD).to(x)
                x.add_(noise * x.abs().clamp_min(1.0))
                continue
            x.div_(x.square().mean().sqrt())
            if x.dim() < 2:
                x.mul_(_BIAS)
                continue
            # Experts in one tensor are [experts, inputs, outputs] or the reverse; convolutions have outputs first.
            rows, inner = (-2, max(x.shape[1:])) if x.dim() == 3 else (0, x[0].numel())
            gains = _LEAST_GAIN * (_MOST_GAIN / _LEAST_GAIN) ** rng.uniform(x.shape[rows])
            x.div_(inner**0.5).mul_(gains.to(x).view(-1, *[1] * (x.dim() - 1 if rows == 0 else 1)))


# Rows of every magnitude for modules that begin with an embedding table, whose inputs are ids.
#
# A row from a table is far above any eps. Within ``ScaledLookups`` each id's row is multiplied by a power of two that
# depends on the id, and rounded to the precision's dtype, in which small numbers have fewer digits. A port looks up the
# same ids as the reference, so both get the same rows. A port that looks up other ids is not probed.


_SMALLEST = round(math.log2(SMALLEST))
_COUNT = round(math.log2(LARGEST)) - _SMALLEST + 1
_STEP = (
    7  # prime to the count of magnitudes, so that neighbouring ids differ; id 0, often shared by all, has the smallest
)
_PRIME = 1_000_003

Lookups = Counter[tuple[int, ...]]


class ScaledLookups(TorchFunctionMode):
    """Scale the rows that are looked up in embedding tables, within the context.

    Args:
        dtype: the precision's dtype.
        in_parts: whether to count single ids instead of whole tensors of them, because the port may look them up token
            by token.

    Attributes:
        seen: how often each id, or each tensor of ids, was looked up.
    """

    def __init__(self, dtype: torch.dtype, in_parts: bool = False) -> None:
        super().__init__()
        self._dtype, self._in_parts = dtype, in_parts
        self.seen: Lookups = Counter()

    def around(self, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a call of a module, as in ``parity.Pair``, that runs within this context and resets ``seen`` first."""

        def scaled(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.clear()
            with self:
                return call(module, *args, **kwargs) if call else module(*args, **kwargs)

        return scaled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _IDS:
            ids = args[_IDS[func]] if len(args) > _IDS[func] else (kwargs or {})[_NAMES[func]]
            with torch._C.DisableTorchFunction():  # keeps these calls out of a trace of the module
                self.seen.update(
                    ((int(one),) for one in ids.flatten()) if self._in_parts else [_compute_signature(ids)]
                )
                scaled = result * _compute_row_factors(ids).to(result.dtype).unsqueeze(-1)
                rounding = scaled.detach().to(self._dtype).to(result.dtype) - scaled.detach()  # no gradient is rounded
                result.copy_(scaled + rounding)  # in place, so that the trace knows which call returned it
        return result


_IDS = {F.embedding: 0, torch.embedding: 1}
_NAMES = {F.embedding: "input", torch.embedding: "indices"}


def is_lookup(function: Any) -> bool:
    """Return whether a function is one whose results ``ScaledLookups`` scales."""
    return function in _IDS


def _compute_row_factors(ids: Tensor) -> Tensor:
    return torch.exp2(((ids * _STEP) % _COUNT + _SMALLEST).float())


def _compute_signature(ids: Tensor) -> tuple[int, ...]:
    """Return a signature of ids that depends on their order, but not on whether batch or sequence comes first."""
    return tuple(
        sorted({_compute_checksum(ids), _compute_checksum(ids.mT) if ids.dim() > 1 else _compute_checksum(ids)})
    )


def _compute_checksum(ids: Tensor) -> int:
    some = ids.flatten().long() + 1
    return int((some * torch.arange(1, len(some) + 1, device=ids.device) % _PRIME).sum())
