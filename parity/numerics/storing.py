"""Round the tensors of a pass: stored ones to the precision's dtype, with the noise of the pass's freedom, and operands
of linear layers' GEMMs to the precision's formats.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from parity.numerics.aten import AFFINE, ELEMENTWISE, EMBEDDING, LAYER_NORM, RECIPROCAL_ROOT, Phase, address, addresses
from parity.numerics.formats import (
    AttentionPart,
    Format,
    LayerFormats,
    OperandPart,
    Part,
    Recast,
    Role,
    Rounding,
    is_alike_both_ways,
    is_exact,
    largest,
    spacing,
)
from parity.numerics.freedom import JITTER, Freedom, Steps, stepped_by

# Remember the tensors of a pass that already hold numbers of the storage dtype, because they were rounded.


class Stored:
    """The tensors that were rounded, as long as they live and nothing is written to them.

    Views count as well, but not those that are made below autograd, as in a dispatch mode, because writes to them are
    not counted.
    """

    def __init__(self) -> None:
        # By the storage's address, which another tensor may get when this one is gone.
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> None:
        """Note that ``x`` was rounded."""
        if not _is_watched(x):
            return
        storage = x.untyped_storage()
        self._kept[storage.data_ptr()] = StorageWeakRef(storage), x._version

    def __contains__(self, x: Tensor) -> bool:
        if not _is_watched(x):
            return False
        storage, version = self._kept.get(x.untyped_storage().data_ptr(), (None, 0))
        return storage is not None and not storage.expired() and version == x._version


def _is_watched(x: Tensor) -> bool:
    """Return whether a tensor has ordinary memory, and PyTorch counts writes to it."""
    return x.layout is torch.strided and not x.is_inference()


# Store tensors, rounded to the precision's dtype, with the noise of the pass's freedom.


_FP32_JITTER = torch.finfo(torch.float32).eps
_HALF = 0.4999  # less than half, so that in FP32 the sum with a number of the dtype stays below the next one


class Storing:
    """The way in which one pass stores tensors.

    Args:
        rounding: the precision's roundings.
        freedom: the choices of the kernels that are modelled.
        stored: tensors that are stored already; those that this pass stores are added.
        past: the amaxes of earlier steps of a training.
    """

    def __init__(self, rounding: Rounding, freedom: Freedom, stored: Stored, past: PastAmaxes | None = None) -> None:
        self.rounding = rounding
        self.freedom = freedom
        self._roundoff = torch.finfo(rounding.storage).eps / 2
        self._noise: torch.Generator | None = None
        self._stored = stored
        self._past, self._casts = past, 0
        # How many attentions are behind the one whose gradients are computed, and whether some of its own are cast.
        self._behind, self._has_recast = 0, False
        # By address: a result that attention has cast, the amax that its scale comes from, and by how much it leans.
        self.cast_results: dict[int, tuple[Tensor, Tensor, float]] = {}

    def store(self, x: Tensor, part: Part = "storage") -> Tensor:
        """Return ``x`` as ``Rounding.store_part`` does, with the freedom's noise except on weights."""
        if self.freedom.jitter is not None and part != "weights" and x.is_floating_point():
            is_dithered = self.freedom.dithers
            x = (
                self._apply_dither(x)
                if is_dithered
                else self._apply_jitter(x, max(_FP32_JITTER, JITTER * self._roundoff))
            )
        rounded = self.rounding.store_part(x, part)
        if rounded is not x:
            self._stored.add(rounded)
        return rounded

    def operand(self, x: Tensor, part: Part) -> Tensor:
        """Return ``x`` as ``store`` does, or unchanged if it is stored already."""
        return x if self.is_stored(x) else self.store(x, part)

    def in_attention(self, x: Tensor, part: AttentionPart, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        """Return one of attention's tensors as its GEMMs read it, or as it is stored.

        Args:
            x: ``[..., rows, columns]``.
            part: which of attention's tensors it is.
            dim: the dimension that a GEMM sums over, -1 or -2.
            amax: what a scale of the whole tensor comes from; None for the tensor's own.
        """
        to_format = getattr(self.rounding.attention, part) if "attention" in self.rounding.parts else None
        if part in ("context", "qkv_gradients"):  # results, which a GEMM has in FP32
            if part == "qkv_gradients" and isinstance(to_format, Recast):
                to_format, self._has_recast = to_format.as_leaning(x, self._behind, self.rounding.storage), True
            stored = self.store(x if to_format is None else self._cast_tensor(x, to_format, part))
            if to_format is not None:
                self.cast_results[address(stored)] = stored, largest(x), to_format.gain
            return stored
        if part == "score_gradients" and self._has_recast:  # the attention before the one whose results were cast
            self._behind, self._has_recast = self._behind + 1, False
        if part not in ("probabilities", "score_gradients") or to_format is None:
            x = self.operand(x, "attention")
        if to_format is None:
            return x
        if getattr(to_format, "along", 0):  # blocks are those of a matrix
            rows = x.transpose(-1, dim).flatten(0, -2)
            return self._cast_tensor(rows, to_format, part).view(x.transpose(-1, dim).shape).transpose(-1, dim)
        return self._cast_tensor(x, to_format, part, amax)

    def cast_in_place(self, x: Tensor, part: AttentionPart) -> None:
        """Cast a result of attention's in its own memory."""
        cast = self.in_attention(x, part)
        _, amax, gain = self.cast_results.pop(address(cast))
        self.cast_results[address(x)] = x.copy_(cast), amax, gain

    def _cast_tensor(self, x: Tensor, to_format: Format, part: AttentionPart, amax: Tensor | None = None) -> Tensor:
        self._casts += 1
        if self._past is not None and part in self._past.in_attention:
            x, amax = self._past.scaled(-self._casts, x, amax)  # linear layers' places are positive
        return self.dithered_operand(x, to_format, -1, amax) if self.draws_operands else to_format(x, amax=amax)

    def is_stored(self, x: Tensor) -> bool:
        """Return whether storing a tensor would not change it."""
        return self.freedom.jitter is None and x in self._stored

    def see_copy(self, sources: Any, copy: Tensor) -> None:
        """Note that a copy is stored if all of its sources are."""
        if all(self.is_stored(x) for x in tree_leaves(sources) if isinstance(x, Tensor)):
            self._stored.add(copy)

    def jittered_amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude with noise, because the value that has it may change by a roundoff."""
        return self._add_relative_noise(largest(x), self._roundoff)

    @property
    def draws_operands(self) -> bool:
        """Whether this run draws how operands are rounded."""
        return self.freedom.dithers and not self.rounding.shared

    def dithered_operand(self, x: Tensor, to_format: Format, dim: int, amax: Tensor | None) -> Tensor:
        """Return an operand with a rounding error that is independent of other runs, and has twice the variance.

        Each element is multiplied by a random factor between 1/2 and 1, and the format's error of the product is scaled
        back. So the error is that of another mantissa, which does not depend on where the number itself lies between
        those of the format. A port may round a multiple of the number, for example if it scales tokens before a layer
        and not after it.

        Args:
            x: FP32, a matrix.
            to_format: the operand's format, which takes ``dim`` and ``amax``.
        """
        smaller = self._draw_uniform(x).add_(1.0).mul_(-0.5).exp2_()
        scaled = x * smaller
        error = to_format(scaled, dim, largest(x) if amax is None else amax) - scaled
        return error.mul_(math.sqrt(2.0)).div_(smaller).add_(x)

    def _apply_jitter(self, x: Tensor, step: float) -> Tensor:
        """Return numbers with noise, but those that no rounding has made as they are."""
        return torch.where(is_exact(x), x, self._add_relative_noise(x, step))

    def _add_relative_noise(self, x: Tensor, step: float) -> Tensor:
        return x * self._draw_uniform(x).mul_(step).add_(1.0)

    def _apply_dither(self, x: Tensor) -> Tensor:
        if self.rounding.storage is torch.float32:
            return self._apply_jitter(x, self._roundoff)
        wide = x if x.dtype is torch.float64 else x.float()
        step = spacing(wide, self.rounding.storage)
        return (wide / step).add_(0.5).add_(self._draw_uniform(x).mul_(_HALF)).floor_().mul_(step).to(x.dtype)

    def _draw_uniform(self, x: Tensor) -> Tensor:
        """Return random numbers between -1 and 1, in the shape of ``x``."""
        if self._noise is None:
            self._noise = torch.Generator(x.device).manual_seed(self.freedom.jitter or 0)
        return torch.rand(x.shape, generator=self._noise, device=x.device).mul_(2.0).sub_(1.0)


# Round what an optimizer's steps write in a pass of the reference, as a port's optimizer does.


# TE scales moments and master weights in FP16 to this (``dtype_to_range_map`` of ``pytorch/optimizers/fused_adam.py``).
_LARGEST_FP16 = torch.finfo(torch.float16).max / 2.0


class StepsRounded:
    """The optimizer steps of one pass.

    Args:
        storing: how the pass stores tensors.
        alone: makes a context in which the pass rounds nothing else.
    """

    def __init__(self, storing: Storing, alone: Callable[[], AbstractContextManager[None]]) -> None:
        self._storing = storing
        self._alone = alone
        self._inside = False

    @property
    def each_call(self) -> bool:
        """Return whether a step is running in which each call rounds."""
        freedom = self._storing.freedom
        return self._inside and freedom.stores_pointwise and freedom.steps is not None and freedom.steps.each_call

    @property
    def are_calls(self) -> bool:
        """Return whether writes to weights outside an optimizer count as steps, such as those of a hand-written one."""
        steps = self._storing.freedom.steps
        return steps is not None and steps.weights is self._storing.rounding.storage and not self._inside

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make the steps of optimizers round, within the context."""
        steps = self._storing.freedom.steps
        if steps is None or "storage" not in self._storing.rounding.parts:
            yield
            return
        before = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._round_gradients(optimizer))
        after = register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: self._round_weights_and_moments(optimizer, steps)
        )
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @torch.no_grad()
    def _round_gradients(self, optimizer: Optimizer) -> None:
        """Round the gradients to the dtype of the weights."""
        with self._alone():
            for gradient in (parameter.grad for parameter in stepped_by(optimizer)):
                if gradient is not None:
                    gradient.copy_(self._storing.store(gradient))
        self._inside = True

    @torch.no_grad()
    def _round_weights_and_moments(self, optimizer: Optimizer, steps: Steps) -> None:
        self._inside = False
        with self._alone():
            for parameter in stepped_by(optimizer):
                if steps.weights is self._storing.rounding.storage:
                    parameter.copy_(self._storing.store(parameter))
                elif steps.weights is not None:
                    parameter.copy_(_held_in(steps.weights, parameter))
                for name, dtype in steps.moments:
                    moment = optimizer.state[parameter].get(name)
                    if moment is not None:
                        moment.copy_(_held_in(dtype, moment))


def written(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors that a call of an ATen function writes to, without scalars like step counts."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(given.get(argument.name)):
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    yield x


def _held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return ``x`` rounded to a dtype, in its own dtype; FP16 is used with a scale."""
    scale = x.abs().amax() / _LARGEST_FP16 if dtype is torch.float16 else x.new_ones(())
    return torch.where(scale > 0, (x / scale).to(dtype).to(x.dtype) * scale, x)


# Keep the cast operands of GEMMs, so that another GEMM that reads the same tensor need not cast it again.
#
# A linear layer's input and weight are read in the forward pass and again in the backward pass, the gradient of its
# output by two GEMMs of the backward pass, and the input of the query projection by those of key and value as well.


# A function that casts a matrix for a GEMM that sums over this dimension of it.
Cast = Callable[[Tensor, int], Tensor]


class OperandsRead:
    """The cast operands of GEMMs, by the tensor that each was cast from."""

    def __init__(self) -> None:
        # The sources are kept as well, so that their addresses are not reused.
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._latest: tuple[object, ...] | None = None

    @property
    def held(self) -> int:
        """The bytes that the casts take in addition to their sources."""
        return sum(read.nbytes for base, read in self._kept.values() if read.data_ptr() != base.data_ptr())

    def read(
        self, matrix: Tensor, version: int, dim: int, cast: Cast, is_cast_along_dim: bool, will_be_read_later: bool
    ) -> Tensor:
        """Return the matrix as a GEMM reads it.

        Args:
            matrix: FP32 ``[rows, columns]``, with any strides; a transposed view is found by its base.
            version: the tensor's version, which counts writes to it, because views made below autograd have none of
                their own.
            dim: the dimension that the GEMM sums over.
            cast: the cast, which must be the same for all GEMMs that read this tensor.
            is_cast_along_dim: whether the values depend on the dimension.
            will_be_read_later: whether later GEMMs may read it, and not only the next one.
        """
        is_transposed = matrix.stride(0) < matrix.stride(1)
        base = matrix.t() if is_transposed else matrix
        base_dim = 1 - dim if is_transposed else dim
        key = (base.data_ptr(), base.shape, base.stride(), version, base_dim if is_cast_along_dim else None)
        if key not in self._kept:
            self._forget_latest()
            read = cast(matrix, dim)
            if torch.equal(read, matrix):  # such as weights that the dtype holds: saves the memory of a copy
                read = matrix
            self._kept[key] = (base, read.t() if is_transposed else read)
            self._latest = None if will_be_read_later else key
        read = self._kept[key][1]
        return read.t() if is_transposed else read

    def _forget_latest(self) -> None:
        if self._latest is not None:
            del self._kept[self._latest]
            self._latest = None


# Recognise the tensors of norms: reciprocal roots, and results before and after weight and bias are applied.


class NormsSeen:
    """The norms of a pass. Their tensors are kept, so that no address is reused."""

    def __init__(self) -> None:
        self._roots: dict[int, Tensor] = {}
        self._normalized: dict[int, Tensor] = {}

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the result of a call if it is a reciprocal root, or the result of a norm at any stage."""
        if func is RECIPROCAL_ROOT:
            self._roots[address(result)] = result
        elif func is LAYER_NORM:
            self._normalized[address(result[0])] = result[0]
        elif func in AFFINE:
            operands = addresses(args)
            by_parameter = any(isinstance(x, Tensor) and x.dim() == 1 for x in args)
            if operands & self._roots.keys() or (by_parameter and operands & self._normalized.keys()):
                self._normalized[address(result)] = result

    def see_gradient(self, args: tuple[Any, ...], result: Any) -> None:
        """Note the result of a backward step if it has one number per root, because it is a root's gradient."""
        numbers = {self._roots[place].numel() for place in addresses(args) & self._roots.keys()}
        if isinstance(result, Tensor) and result.numel() in numbers:
            self._roots[address(result)] = result

    def is_result(self, x: Tensor) -> bool:
        """Return whether a norm returned the tensor."""
        return address(x) in self._normalized

    def is_step(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call with these arguments is a step of a norm. A port with TE's norms never calls these."""
        return bool(addresses(args) & self._roots.keys())


# Keep the amaxes of delayed scaling from one training step to the next.


class PastAmaxes:
    """The amax that delayed scaling has seen of each operand, by the operand's place in a pass.

    Attributes:
        is_followed: whether scales of linear layers' operands come from earlier steps.
        in_attention: those of attention's tensors whose scales do.
        before: the amaxes of earlier steps, from which this step's scales come; larger values saturate. An operand
            without one is scaled by its own amax, as in a step that settled its scales.
        seen: the amaxes of this step.
        names: the names of weights, by the address of their memory.
        held: addresses of weights that are quantized before the step, so that GEMMs read their values unchanged.
        multiplied: the largest magnitude of the other operands that each weight is multiplied by in this step, by the
            weight's name and by whether the other operand is a gradient.
    """

    def __init__(self) -> None:
        self.is_followed = False
        self.in_attention: frozenset[str] = frozenset()
        self.names: dict[int, str] = {}
        self.held: set[int] = set()
        self.multiplied: dict[tuple[str, bool], Tensor] = {}
        self.before: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor] = {}

    def follow(self, before: dict[int, Tensor], parts: frozenset[str]) -> None:
        """Take the scales of a step from these amaxes.

        Args:
            before: what ``after_step`` returned after the step before.
            parts: ``linear`` if linear layers' operands are scaled by history, and such parts of attention.
        """
        self.before, self.is_followed, self.in_attention = before, "linear" in parts, parts - {"linear"}

    def scaled(self, place: int, stored: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a tensor clamped to the amax that its scale comes from, and this amax."""
        own = largest(stored) if amax is None else amax
        self.seen.setdefault(place, own)
        scaled_by = self.before.get(place, own)
        return torch.minimum(torch.maximum(stored, -scaled_by), scaled_by), scaled_by

    def note(self, weight: Tensor, other: Tensor, is_gradient: bool) -> None:
        """Note the largest magnitude of the other operand of a product, if the first is a named weight."""
        name = self.names.get(address(weight))
        if name is not None:
            known = self.multiplied.get((name, is_gradient))
            now = largest(other)
            self.multiplied[name, is_gradient] = now if known is None else torch.maximum(known, now)

    def after_step(self) -> dict[int, Tensor]:
        """Return the amaxes for the next step.

        TE takes the largest of a history, which is longer than any training here.
        """
        return {place: torch.maximum(amax, self.before.get(place, amax)) for place, amax in self.seen.items()}


# Give the GEMMs of linear layers their operands in the precision's formats: weights, inputs and gradients.


@dataclass(frozen=True)
class Operand:
    """An operand of a linear layer's GEMM.

    Attributes:
        weights: the address of the layer's weight; several if it cannot be told from other layers, none if it is
            unknown.
        part: which operand it is.
        matrix: FP32 ``[rows, columns]``, before any rounding.
        dim: the dimension of it that the GEMM sums over.
        to_format: the format to which it is rounded; None if it is read as it is stored.
    """

    weights: tuple[int, ...]
    part: OperandPart
    matrix: Tensor
    dim: int
    to_format: Format | None


# Returns what a GEMM reads, given the operand and the function that rounds it.
Watch = Callable[[Operand, Cast], Tensor]


class LinearOperands:
    """The linear layers of one pass.

    Args:
        storing: how the pass stores tensors.
        phase: the pass's phase.
        norms: the norms that the pass has seen.
        weights: the model's parameters.
        scaled_together, plain, roles, changed, weights_read, past, watch: as for ``rounded``.
    """

    def __init__(
        self,
        storing: Storing,
        phase: Phase,
        norms: NormsSeen,
        weights: Sequence[Tensor],
        scaled_together: Iterable[Sequence[Tensor]],
        plain: Iterable[Tensor],
        roles: Iterable[tuple[Tensor, Role]],
        changed: Iterable[tuple[Tensor, LayerFormats]],
        weights_read: OperandsRead,
        past: PastAmaxes | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._past, self._place = past, 0
        self._watch, self._layer = watch, tuple[int, ...]()
        self._storing, self._phase, self._norms = storing, phase, norms
        self._weights = {address(weight) for weight in weights}
        self._stacks = {address(weight): len(weight) for weight in weights if weight.dim() == 3 and len(weight) > 1}
        self._read_by_experts: set[int] = set()  # addresses of inputs
        self._scaled_together = {address(weight): group for group in scaled_together for weight in group}
        # Layers that round otherwise than the rest, plain ones first, by their weights' addresses.
        self._plain_rounding = Rounding(storing.rounding.storage)
        self._own = {address(weight): self._plain_rounding for weight in plain}
        if (by_role := storing.rounding.by_role) is not None:
            parts = storing.rounding.parts
            self._own = {address(one): replace(by_role(role), parts=parts) for one, role in roles} | self._own
        for weight, formats in changed:
            self._own[address(weight)] = self._own.get(address(weight), storing.rounding).changed(formats)
        # By inputs' address and a layer's output channels: the weights.
        self._readers: dict[tuple[int, int], dict[int, None]] = defaultdict(dict)
        self._inputs: dict[int, Tensor] = {}  # by address; kept, so that no address is reused
        self._read, self._weights_read = OperandsRead(), weights_read
        self.is_plain = False  # whether the operands that were read last are a plain layer's
        self._product: Format | None = None  # to which their product is cast and back

    def read(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operands as the GEMM reads them, summing over left's last dimension and right's last but one."""
        if self._own or self._watch is not None or self._storing.rounding.shared:
            self._layer = tuple(self._find_weights(left, right))
        own = next((self._own[at] for at in self._layer if at in self._own), None)
        self.is_plain = own is not None and own is self._plain_rounding
        is_wgrad = self._phase.backward and not {address(left), address(right)} & self._weights
        self._product = own.products[self._phase.backward + is_wgrad] if own is not None else None
        if self.is_plain:
            return (
                self._storing.operand(left, self._classify_operand(left)),
                self._storing.operand(right, self._classify_operand(right)),
            )
        if self._past is not None and self._past.is_followed:
            self._past.note(left, right, self._phase.backward)
            self._past.note(right, left, self._phase.backward)
        rounding = own or self._storing.rounding
        return self._read_operand(left, 1, is_wgrad, rounding), self._read_operand(right, 0, is_wgrad, rounding)

    def store_product(self, product: Tensor) -> Tensor:
        """Return the product of the operands that were read last as it is stored."""
        stored = self._storing.store(product)
        if self._product is None or "storage" not in self._storing.rounding.parts:
            return stored
        return self._storing.store(self._product(stored.reshape(-1, stored.shape[-1])).reshape(stored.shape))

    def are_of_experts(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a batched GEMM is a linear layer per expert, with weights in one tensor ``[experts, ...]``."""
        operands = {address(left), address(right)}
        if any(self._stacks.get(at) == len(left) for at in operands):
            if not self._phase.backward:
                self._read_by_experts |= operands - self._stacks.keys()
            return True
        return self._phase.backward and bool(operands & self._read_by_experts)

    def _find_weights(self, left: Tensor, right: Tensor) -> Iterable[int]:
        """Return the addresses of the weight that the operands belong to: one is it, or the product is its gradient."""
        own = {address(left), address(right)} & self._weights
        if not self._phase.backward:
            self._readers[address(left), right.shape[-1]].update(dict.fromkeys(own))
        if own or not self._phase.backward:
            return own
        # Autograd has the weight at hand, unless the inputs have no gradient. Then other layers may read them as well;
        # the gradient of this layer's result has as many channels as it.
        return _find_saved() & self._weights or self._readers.get((address(right), left.shape[-2]), {})

    def _read_operand(self, x: Tensor, dim: int, is_wgrad: bool, rounding: Rounding) -> Tensor:
        if is_matrix(x):
            return self._matrix_operand(x.reshape(x.shape[-2:]), x, dim, is_wgrad, rounding).reshape(x.shape)
        return torch.stack([self._matrix_operand(matrix, x, dim, is_wgrad, rounding) for matrix in x])

    def _matrix_operand(self, matrix: Tensor, whole: Tensor, dim: int, is_wgrad: bool, rounding: Rounding) -> Tensor:
        """Return a matrix of the whole tensor as a GEMM reads it. Each expert's matrix counts as a separate tensor."""
        part = self._classify_operand(whole)
        is_columnwise = is_wgrad or (self._phase.backward and part == "weights")
        to_format = rounding.operand_format(part, is_columnwise)
        is_rotated = getattr(to_format, "rotated", False)
        *_, gain = self._storing.cast_results.get(address(whole), (None, 1.0))
        self._place += 1
        place = self._place
        is_held = self._past is not None and address(whole) in self._past.held and is_alike_both_ways(to_format)

        def read(matrix: Tensor, dim: int) -> Tensor:
            if is_held:
                return matrix
            stored = matrix if self._storing.is_stored(whole) else self._storing.store(matrix, part)
            if to_format is None:
                return stored
            amax = None if is_rotated else self._find_amax(matrix)
            if part == "gradients" and self._has_unknown_scale():
                amax = math.sqrt(2.0) * largest(stored)  # one grid's numbers lie between those of the other
            if gain != 1.0:  # a grid of the same numbers, all of them larger
                stored = stored / gain
            if self._past is not None and self._past.is_followed and not is_rotated:
                stored, amax = self._past.scaled(place, stored, amax)
            if self._storing.draws_operands and part != "weights":
                return self._storing.dithered_operand(stored, to_format, dim, amax).mul_(gain)
            return to_format(stored, dim, amax) if gain == 1.0 else to_format(stored, dim, amax).mul_(gain)

        if self._watch is not None:
            return self._watch(Operand(self._layer, part, matrix, dim, to_format), read)
        if is_rotated or self._storing.freedom.jitter is not None or whole.is_inference():
            return read(matrix, dim)
        is_along_dim = not is_alike_both_ways(to_format) or rounding.columnwise is not None
        operands = self._weights_read if part == "weights" else self._read
        return operands.read(matrix, whole._version, dim, read, is_along_dim, part != "gradients")

    def _has_unknown_scale(self) -> bool:
        """Return whether TE scales a gradient with those of other layers, as golden, which comes to them later, cannot.

        It has one tensor for the gradients of layers whose weights it holds in one.
        """
        is_told = self._storing.rounding.shared and self._storing.freedom.stores_pointwise
        return is_told and not self._scaled_together.keys().isdisjoint(self._layer)

    def _find_amax(self, x: Tensor) -> Tensor | None:
        """Return the amax that a tensor's scale comes from, or None for that of the stored values."""
        rounding, freedom = self._storing.rounding, self._storing.freedom
        if address(x) in self._storing.cast_results:
            return self._storing.cast_results[address(x)][1]
        group = self._scaled_together.get(address(x))
        if group is not None:
            return torch.stack([largest(rounding.store_part(weight.detach(), "weights")) for weight in group]).max()
        if address(x) in self._weights:  # every port holds weights in the dtype
            return None
        if freedom.jitter is not None and not freedom.dithers and not rounding.shared:
            return self._storing.jittered_amax(x)
        return None if freedom.stores_pointwise or self._norms.is_result(x) else largest(x)

    def _classify_operand(self, x: Tensor) -> OperandPart:
        at = address(x)
        if at in self._weights:
            return "weights"
        if not self._phase.backward:
            self._inputs[at] = x
        return "inputs" if at in self._inputs else "gradients"


def _find_saved() -> set[int]:
    """Return the addresses of the operands that the backward step at hand has saved of a product."""
    node = torch._C._current_autograd_node()
    with suppress(RuntimeError):  # a checkpoint gives them out only once
        return addresses(getattr(node, f"_saved_{name}", None) for name in ("self", "mat1", "mat2"))
    return set()


def is_matrix(operand: Tensor) -> bool:
    """Return whether an operand is one matrix, or a batch of 1, which einsum makes; attention has larger batches."""
    return operand.dim() == 2 or operand.shape[0] == 1


# Tell tensors that are computed only from weights from activations.


class Lineage:
    """The origin of tensors, which tells products of activations, such as similarities, from linear layers.

    A linear layer's weight may be computed: joined from several, scaled, or a sum with the product of two small
    matrices.

    Args:
        weights: the model's parameters.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._of_weights = {address(weight): weight for weight in weights}  # kept, so that no address is reused
        # By address: tensors that were multiplied by weights, and the sizes of these weights. A module that makes a
        # training step in its forward pass also multiplies them by gradients, which gives the weights' gradients.
        self._read: dict[int, tuple[Tensor, set[frozenset[int]]]] = {}
        self._products: dict[int, set[tuple[int, int]]] = defaultdict(set)  # shapes of results, by operands' addresses

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the results of a forward call as weights if they are computed only from weights and constants.

        The sum of a matrix of weights and anything else, such as an optimizer's step, counts as weights as well.
        """
        if func is EMBEDDING or not self._of_weights:  # an embedding's rows depend on the inputs
            return
        operands = list(_find_floating_tensors(args))
        weights = [x for x in operands if address(x) in self._of_weights]
        if not weights:
            return
        results = list(_find_floating_tensors((result,)))
        is_of_them_alone = all(not x.requires_grad or address(x) in self._of_weights for x in operands)
        is_added = func in ELEMENTWISE and any(x.dim() > 1 and x.shape == results[0].shape for x in weights)
        if is_of_them_alone or is_added:
            self._of_weights.update((address(x), x) for x in results)

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is a weight, or was computed from weights."""
        return address(x) in self._of_weights

    def is_product_of_activations(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a forward product has no weight and is not a weight's gradient; if so, remember it."""
        for operand, other in ((left, right), (right, left)):
            if address(operand) in self._of_weights:
                self._read.setdefault(address(other), (other, set()))[1].add(frozenset(_get_matrix_shape(operand)))
                return False
        result = left.shape[-2], right.shape[-1]
        if any(frozenset(result) in self._read[address(x)][1] for x in (left, right) if address(x) in self._read):
            return False
        for operand in (left, right):
            self._products[address(operand)].add(result)
        return True

    def is_gradient_of_product(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a product of the backward pass is a gradient of a product of activations.

        The gradients of ``L @ R`` are ``g @ R.T`` and ``L.T @ g``, with g of the result's shape.
        """
        of_right, of_left = (self._products.get(address(x), ()) for x in (right, left))
        return _get_matrix_shape(left) in of_right or _get_matrix_shape(right) in of_left


def _get_matrix_shape(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _find_floating_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _find_floating_tensors(value)
