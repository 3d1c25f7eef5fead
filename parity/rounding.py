"""The model of what a faithful port rounds: plain PyTorch in FP32, with the roundings of a precision put in.

The model runs the reference itself under a dispatch mode, so it knows nothing of TE and shares no code with the kernels
that it judges (``parity.cpu``). What it rounds, and why:

* both operands of every linear layer's GEMM, forward and backward, to the precision's formats: TF32 for FP32
  (``common/gemm/cublaslt_gemm.cu`` of TE 2.20 always chooses ``CUBLAS_COMPUTE_32F_FAST_TF32``), and what a recipe of
  ``transformer_engine.common.recipe`` quantizes inputs, weights and output gradients to;
* the result of every GEMM, which is stored in the precision's dtype; accumulation is FP32;
* the operands of attention's batched GEMMs, and of other products of two activations, to the dtype alone: TE computes
  attention in it under every recipe, and has no kernel for the others;
* the sum of two activations of one shape (a residual stream, RoPE), which is stored as well;
* what kernels of PyTorch's own return that TE has none for (``parity.plain_kernels``).

Everything between two GEMMs (norms, activations, softmax, biases) stays in FP32, as TE's fused kernels compute it.

Each rounding belongs to one of ``parity.rounding_parts.PARTS``, and a model may be told to make those of some parts
alone. With none, what is left is FP32 arithmetic: its sums, and what lies between GEMMs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parity.aten_calls import (
    AFFINE,
    ARITHMETIC,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    FIRST_OPERAND,
    LAYER_NORM,
    NORMS,
    POINTWISE,
    RECIPROCAL_ROOT,
    REDUCTIONS,
    RELU,
    RELU_IN_PLACE,
    SAME_PLACE,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    SUM_IN_PLACE,
    SUMS,
    TABLES,
)
from parity.blocked_attention import Arithmetic, as_it_is
from parity.formats import hadamard, is_alike_both_ways, largest, spacing
from parity.freedom import FUSED_POINTWISE, JITTER, Freedom
from parity.kinks import Kinks
from parity.lineage import Lineage
from parity.long_sequences import attention_in_blocks
from parity.operands_read import OperandsRead
from parity.patches import are_patches, rows_of
from parity.patches import backward as patches_backward
from parity.patches import forward as patches_forward
from parity.plain_calls import is_in_place, is_view
from parity.plain_kernels import PLAIN_KERNELS, as_in
from parity.recurrent import step_by_step
from parity.rounding_parts import OperandPart, Part, Rounding
from parity.stored import Stored

_FP32_JITTER = torch.finfo(torch.float32).eps
_HALF = 0.4999  # a little less, so that FP32 sums of it and a number that the dtype has stay below the next


@dataclass
class Phase:
    """Whether the backward pass runs; GEMM operands that the forward pass has not seen are gradients then."""

    backward: bool = False

    def begin_backward(self) -> None:
        self.backward = True


@contextmanager
def rounded(
    rounding: Rounding,
    weights: Iterable[Tensor] | None = None,
    freedom: Freedom = FUSED_POINTWISE,
    scaled_together: Iterable[Sequence[Tensor]] = (),
    plain: Iterable[Tensor] = (),
    kinks: Kinks | None = None,
    weights_read: OperandsRead | None = None,
) -> Iterator[Phase]:
    """Within the context, FP32 PyTorch code rounds as a faithful kernel at the precision does.

    Args:
        rounding: what is rounded.
        weights: the model's parameters; where it is None, each product of matrices is taken for a linear layer's.
        freedom: the choices of the kernel that is modelled.
        scaled_together: weights that TE quantizes as one tensor, such as the gate and the up projection: a scale of the
            whole tensor is that of all of them.
        plain: weights whose linear layers are no modules of TE's: their GEMMs read all operands as they are stored.
        kinks: takes note of what decides gradients at kinks, and moves it; None for neither.
        weights_read: what other passes with the same rounding read of the same weights; what this one reads is added.

    Yields:
        The phase, to be told where the backward pass begins.
    """
    mode = _RoundingMode(rounding, weights, freedom, scaled_together, plain, kinks, weights_read or OperandsRead())
    with sdpa_kernel(SDPBackend.MATH), mode, attention_in_blocks(mode.attention), step_by_step():
        yield mode.phase


class _RoundingMode(TorchDispatchMode):
    def __init__(
        self,
        rounding: Rounding,
        weights: Iterable[Tensor] | None,
        freedom: Freedom,
        scaled_together: Iterable[Sequence[Tensor]],
        plain: Iterable[Tensor],
        kinks: Kinks | None,
        weights_read: OperandsRead,
    ) -> None:
        super().__init__()
        self._kinks = kinks
        self.rounding = rounding
        self.freedom = freedom
        self.phase = Phase()
        self._noise: torch.Generator | None = None
        self._roundoff = torch.finfo(rounding.storage).eps / 2
        known = weights is not None
        weights = list(weights or ())
        self._lineage = Lineage(weights) if known else None
        self._weights = {_address(weight) for weight in weights}
        self._stacks = {_address(weight): len(weight) for weight in weights if weight.dim() == 3 and len(weight) > 1}
        self._read_by_experts: set[int] = set()  # addresses of inputs
        self._scaled_together = {_address(weight): group for group in scaled_together for weight in group}
        self._plain = {_address(weight) for weight in plain}
        self._read_plainly: dict[int, set[int]] = defaultdict(set)  # by inputs' address: plain layers' output channels
        # By address; kept so that no address is given out again.
        self._inputs: dict[int, Tensor] = {}
        self._roots: dict[int, Tensor] = {}  # reciprocal roots of norms
        self._normalized: dict[int, Tensor] = {}  # results of norms, before and after their weight and bias
        # Of attention, and their gradients: what scores become, and the softmax that it comes from.
        self._probabilities: dict[int, tuple[Tensor, Tensor]] = {}
        self._contexts: dict[int, Tensor] = {}  # attention's output by its probabilities' address
        self._output_gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by the address of the probabilities' gradient
        self._patches: dict[int, Tensor] = {}  # by the address of what convolutions read: the rows of a linear layer
        self._operands, self._weights_read = OperandsRead(), weights_read
        self._stored = Stored()
        self._suspended = False

    @property
    def attention(self) -> Arithmetic:
        """What this mode rounds in attention, for attention that runs in blocks, whose parts it must not see."""
        stores_scores = self.freedom.stores_scores
        return Arithmetic(
            operand=functools.partial(self._operand, part="attention"),
            probabilities=self._store_probabilities,
            scores=self._store_scores if stores_scores else as_it_is,
            pointwise=self._store if self.freedom.stores_pointwise else as_it_is,
            result=self._store,
            mean_from_context=not stores_scores,
            splits=self.freedom.splits_of_k,
            alone=self._while_suspended,
        )

    @contextmanager
    def _while_suspended(self) -> Iterator[None]:
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        if self._kinks is None:
            result = self._rounded(func, args, kwargs)
        else:
            result = self._beside_kinks(self._kinks, func, args, kwargs)
        if self._lineage is not None and not self.phase.backward:
            self._lineage.see(func, args, result)
        return result

    def _beside_kinks(self, kinks: Kinks, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The call, with the values moved that decide on which side of a kink they are."""
        if self.phase.backward or any(_requires_grad(x) for x in args):
            args = kinks.moved(func, args)
            chosen = None if kwargs else kinks.chosen(func, args)
            if chosen is not None:
                return chosen
        argument = args[0].clone() if func is RELU_IN_PLACE else args[0] if func is RELU else None
        result = self._rounded(func, args, kwargs)
        if argument is not None:
            kinks.see(argument, result)
        return result

    def _rounded(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func in FIRST_OPERAND:
            return self._gemm(func, args, kwargs)
        if func is SOFTMAX_BACKWARD and not self.freedom.stores_scores:
            flash = self._flash_softmax_backward(*args[:2])
            if flash is not None:
                return flash
        if func in SUMS and _are_activations(args[:2]):
            if not self.freedom.stores_sums:
                return func(*args, **kwargs)
            stored = self._store(func(*args, **kwargs))
            return args[0].copy_(stored) if func is SUM_IN_PLACE else stored
        patches = self._of_patches(func, args)
        if patches is not None:
            return patches
        if "storage" in self.rounding.parts and (func in PLAIN_KERNELS or self._is_plain(func)):
            result = as_in(self.rounding.storage, func, args, kwargs)
            self._remember_norm(func, args, result)
            return tree_map_only(Tensor, self._store, result)
        return self._in_between(func, args, kwargs)

    def _gemm(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        position = FIRST_OPERAND[func]
        left, right = args[position], args[position + 1]
        is_matrix = _is_linear_layer(left) and not self._are_both_activations(left, right)
        is_linear = is_matrix or self._is_of_experts(left, right)
        operands = (self._linear_operands if is_linear else self._attention_operands)(left, right)
        result = self._product(func, args[:position], *operands, args[position + 2 :], kwargs)
        if is_linear:
            return self._store(result)
        return self._attention_result(result, left, right, operands[0])

    def _in_between(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What lies between two GEMMs."""
        result = func(*args, **kwargs)
        if self.freedom.stores_pointwise and func in NORMS:
            result = self._store(result[0]), *result[1:]
        elif self.freedom.stores_pointwise and self._is_step_stored(func, args):
            result = self._store(result)
        self._remember_norm(func, args, result)
        if func in SOFTMAX and _is_along_last(result, func, args):
            self._probabilities[_address(result)] = result, result
        elif func in SAME_PLACE:
            for source in _addresses(args) & self._probabilities.keys():
                self._probabilities[_address(result)] = result, self._probabilities[source][1]
        return result

    def _of_patches(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a convolution returns that TE computes as a linear layer; None for any other call."""
        if func is CONVOLUTION and self._is_of_te(args[1]) and are_patches(args[1], *args[3:]):
            x, weight, bias = args[:3]
            patches = self._patches[_address(x)] = rows_of(x, weight.shape[2:])
            return patches_forward(x, weight, bias, patches, self._multiplied)
        if func is CONVOLUTION_BACKWARD and self._is_of_te(args[2]) and are_patches(args[2], *args[4:10]):
            gradient, x, weight, *_, wanted = args
            return patches_backward(gradient, x, weight, self._patches[_address(x)], wanted, self._multiplied)
        return None

    def _multiplied(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        left, right = self._linear_operands(left, right)
        return self._store(left @ right if bias is None else torch.addmm(bias, left, right))

    def _is_plain(self, func: Any) -> bool:
        """Whether a port calls the function by itself, or another whose gradient it gives."""
        if not self.freedom.plain or func in SOFTMAX or is_view(func) or is_in_place(func):
            return False
        name = func.overloadpacket.__name__
        if self.phase.backward and name in ARITHMETIC:
            return True
        return name.removesuffix("_backward") in self.freedom.plain

    def _is_of_te(self, weight: Tensor) -> bool:
        return _address(weight) in self._weights - self._plain

    def _remember_norm(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Whether the result is a reciprocal root, is scaled by one, or is a norm's with its weight or bias applied."""
        if func is RECIPROCAL_ROOT:
            self._roots[_address(result)] = result
        elif func is LAYER_NORM:
            self._normalized[_address(result[0])] = result[0]
        elif func in AFFINE:
            operands = _addresses(args)
            by_parameter = any(isinstance(x, Tensor) and x.dim() == 1 for x in args)
            if operands & self._roots.keys() or (by_parameter and operands & self._normalized.keys()):
                self._normalized[_address(result)] = result

    def _store(self, x: Tensor, part: Part = "storage") -> Tensor:
        """As ``Rounding.store_part``, with what jitter the freedom has; weights are stored already."""
        if self.freedom.jitter is not None and part != "weights" and x.is_floating_point():
            is_dithered = self.freedom.dithers
            x = self._dithered(x) if is_dithered else self._jittered(x, max(_FP32_JITTER, JITTER * self._roundoff))
        rounded = self.rounding.store_part(x, part)
        if rounded is not x:
            self._stored.add(rounded)
        return rounded

    def _operand(self, x: Tensor, part: Part) -> Tensor:
        """As ``_store``, of what may have been stored before."""
        return x if self._is_stored(x) else self._store(x, part)

    def _is_stored(self, x: Tensor) -> bool:
        """Whether storing a tensor would not change it."""
        return self.freedom.jitter is None and x in self._stored

    def _amax(self, x: Tensor) -> Tensor | None:
        """The magnitude that a tensor's scale comes from; None for the largest that is stored."""
        group = self._scaled_together.get(_address(x))
        if group is not None:
            return torch.stack(
                [largest(self.rounding.store_part(weight.detach(), "weights")) for weight in group]
            ).max()
        if _address(x) in self._weights:  # held in the dtype by every port
            return None
        if self.freedom.jitter is not None and not self.freedom.dithers:
            return self._jittered(largest(x), self._roundoff)
        return None if self.freedom.stores_pointwise or _address(x) in self._normalized else largest(x)

    def _jittered(self, x: Tensor, step: float) -> Tensor:
        return x * (1.0 + step * self._uniform(x))

    def _dithered(self, x: Tensor) -> Tensor:
        if self.rounding.storage is torch.float32:
            return self._jittered(x, self._roundoff)
        step = spacing(x, self.rounding.storage)
        return (x / step + 0.5 + _HALF * self._uniform(x)).floor() * step

    def _uniform(self, x: Tensor) -> Tensor:
        """Between -1 and 1."""
        if self._noise is None:
            self._noise = torch.Generator(x.device).manual_seed(self.freedom.jitter or 0)
        return 2.0 * torch.rand(x.shape, generator=self._noise, device=x.device) - 1.0

    def _is_step_stored(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an unfused step stores its result; the angles of RoPE are no faithful port's to round."""
        if func in TABLES:
            return True
        if _addresses(args) & self._roots.keys():
            return False  # within a norm, which no port of TE computes step by step
        if func in REDUCTIONS and not _keeps_channels(*args[:2]):
            return False  # statistics, likewise
        return func in (*POINTWISE, *REDUCTIONS) and (self.phase.backward or any(_requires_grad(x) for x in args))

    def _product(
        self, func: Any, before: tuple[Any, ...], left: Tensor, right: Tensor, after: tuple[Any, ...], kwargs: Any
    ) -> Tensor:
        """The GEMM, in as many parts along the summed dimension as the kernel takes; ``before`` is added once."""
        lefts = left.tensor_split(self.freedom.splits_of_k, -1)
        rights = right.tensor_split(self.freedom.splits_of_k, -2)
        result: Tensor = func(*before, lefts[0], rights[0], *after, **kwargs)
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        alpha = kwargs.get("alpha", 1)
        for part, other in zip(lefts[1:], rights[1:], strict=True):
            if part.shape[-1]:
                result.add_(multiply(part, other), alpha=alpha)
        return result

    def _attention_result(self, result: Tensor, left: Tensor, right: Tensor, stored_left: Tensor) -> Tensor:
        """The result as it is stored, if it is: scores and their gradients may stay in a kernel."""
        probabilities = {_address(left), _address(right)} & self._probabilities.keys()
        if probabilities:
            result = self._store(result)
            if _address(left) in probabilities and not self.phase.backward:
                self._contexts[_address(left)] = result
            return result
        if self.phase.backward:
            self._output_gradients[_address(result)] = (result, stored_left)
        return self._store_scores(result) if self.freedom.stores_scores else result

    def _store_scores(self, scores: Tensor) -> Tensor:
        return self._store(scores * (1.0 + torch.finfo(torch.float32).eps), "attention")

    def _flash_softmax_backward(self, gradient: Tensor, probabilities: Tensor) -> Tensor | None:
        """Softmax's gradient as flash attention has it: the mean gradient of a row from attention's stored output.

        ``P * (dP - sum(dO * O))``, where ``sum(dO * O)`` equals ``sum(dP * P)`` but for the rounding of O (Dao et al.,
        FlashAttention, arXiv 2205.14135, appendix B.2, equation 4).
        """
        context = self._contexts.get(_address(probabilities))
        _, output_gradient = self._output_gradients.get(_address(gradient), (None, None))
        if context is None or output_gradient is None:
            return None
        mean = (output_gradient * context).sum(-1).reshape(*gradient.shape[:-1], 1)
        result = probabilities * (gradient - mean)
        self._probabilities[_address(result)] = result, result
        return result

    def _attention_operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        if not self.phase.backward and _address(left) in self._probabilities:
            _, softmax = self._probabilities[_address(left)]
            return self._store_probabilities(left, softmax), self._operand(right, "attention")
        return self._operand(left, "attention"), self._operand(right, "attention")

    def _store_probabilities(self, probabilities: Tensor, softmax: Tensor | None = None) -> Tensor:
        """As the forward pass stores them: a flash kernel before it divides them by their sum.

        ``softmax`` has more columns where a sink took part: it may be the largest of its row.
        """
        if self.freedom.stores_scores or not probabilities.numel():
            return self._operand(probabilities, "attention")
        largest_of_row = probabilities.amax(-1, keepdim=True)
        if softmax is not None and softmax.shape[-1] > probabilities.shape[-1]:
            with_sinks = softmax.amax(-1)
            if with_sinks.numel() == largest_of_row.numel():  # else the rows are not the softmax's
                largest_of_row = with_sinks.view_as(largest_of_row)
        largest_of_row = largest_of_row.clamp(min=torch.finfo(probabilities.dtype).tiny)
        return self._store(probabilities / largest_of_row, "attention") * largest_of_row

    def _linear_operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two as the GEMM reads them; it sums over left's last and right's last but one dimension."""
        if self._plain and self._are_plain(left, right):
            return self._operand(left, self._part(left)), self._operand(right, self._part(right))
        is_wgrad = self.phase.backward and not {_address(left), _address(right)} & self._weights
        is_rotated = is_wgrad and self.rounding.rotate_wgrad
        return self._linear_operand(left, 1, is_rotated), self._linear_operand(right, 0, is_rotated)

    def _are_both_activations(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product of two matrices has no weight, as similarities of embeddings and attention of one head.

        It is no linear layer: TE has no kernel for it but attention.
        """
        if self._lineage is None:
            return False
        if self.phase.backward:
            return self._lineage.is_gradient_of_product(left, right)
        return self._lineage.is_product_of_activations(left, right)

    def _is_of_experts(self, left: Tensor, right: Tensor) -> bool:
        """Whether a batch of GEMMs is one linear layer of each expert, whose weights are one ``[experts, ...]``."""
        operands = {_address(left), _address(right)}
        if any(self._stacks.get(address) == len(left) for address in operands):
            if not self.phase.backward:
                self._read_by_experts |= operands - self._stacks.keys()
            return True
        return self.phase.backward and bool(operands & self._read_by_experts)

    def _are_plain(self, left: Tensor, right: Tensor) -> bool:
        """Whether a plain layer multiplies the two: one is its weight, or they give its weight's gradient."""
        if {_address(left), _address(right)} & self._plain:
            if not self.phase.backward:
                self._read_plainly[_address(left)].add(right.shape[-1])
            return True
        # Other layers may read the same inputs: a gradient of as many channels is that of the plain layer's result.
        return self.phase.backward and left.shape[-2] in self._read_plainly.get(_address(right), ())

    def _linear_operand(self, x: Tensor, dim: int, is_rotated: bool) -> Tensor:
        if _is_linear_layer(x):
            return self._matrix_operand(x.reshape(x.shape[-2:]), x, dim, is_rotated).reshape(x.shape)
        return torch.stack([self._matrix_operand(matrix, x, dim, is_rotated) for matrix in x])

    def _matrix_operand(self, matrix: Tensor, whole: Tensor, dim: int, is_rotated: bool) -> Tensor:
        """A matrix of the whole tensor as a GEMM reads it; each expert's is a tensor of its own."""
        part = self._part(whole)
        to_format = self.rounding.operand_format(part)

        def read(matrix: Tensor, dim: int) -> Tensor:
            stored = matrix if self._is_stored(whole) else self._store(matrix, part)
            if is_rotated:
                stored = hadamard(stored, dim)
            if to_format is None:
                return stored
            return to_format(stored, dim, None if is_rotated else self._amax(matrix))

        if is_rotated or self.freedom.jitter is not None or whole.is_inference():
            return read(matrix, dim)
        is_along_dim = not is_alike_both_ways(to_format)
        operands = self._weights_read if part == "weights" else self._operands
        return operands.read(matrix, whole._version, dim, read, is_along_dim, part != "gradients")

    def _part(self, x: Tensor) -> OperandPart:
        address = _address(x)
        if address in self._weights:
            return "weights"
        if not self.phase.backward:
            self._inputs[address] = x
        return "inputs" if address in self._inputs else "gradients"


def _address(x: Tensor) -> int:
    """Views of one tensor share it."""
    return x.untyped_storage().data_ptr()


def _addresses(operands: tuple[Any, ...]) -> set[int]:
    return {_address(x) for x in operands if isinstance(x, Tensor)}


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _is_linear_layer(operand: Tensor) -> bool:
    """Attention multiplies in batches; a linear layer has one weight, also where einsum makes it a batch of 1."""
    return operand.dim() == 2 or operand.shape[0] == 1


def _is_along_last(result: Tensor, softmax: Any, args: tuple[Any, ...]) -> bool:
    """Whether a softmax, or its gradient, is along the keys of attention."""
    return args[2 if softmax is SOFTMAX_BACKWARD else 1] % result.dim() == result.dim() - 1


def _keeps_channels(x: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether tokens are summed; heads, which share keys, are not."""
    return x.dim() < 4 and dims is not None and x.dim() - 1 not in {dim % x.dim() for dim in dims}


def _are_activations(operands: tuple[Any, ...]) -> bool:
    return (
        len(operands) == 2
        and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in operands)
        and operands[0].shape == operands[1].shape
    )
