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
* what kernels of PyTorch's own return that TE has none for (``parity.rounding.plain_kernels``), and what a port's own
  casts round (``parity.rounding.casts``);
* what steps of an optimizer write in place, as the port's optimizers do (``parity.rounding.steps``).

Everything between two GEMMs (norms, activations, softmax, biases) stays in FP32, as TE's fused kernels compute it.

Each rounding belongs to one of ``parity.rounding.parts.PARTS``, and a model may be told to make those of some parts
alone. With none, what is left is FP32 arithmetic: its sums, and what lies between GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parity.cpu.kernel_choices import ATTENTION_16_BIT_SUMS, SPLIT_K_IN_OUTPUT_TYPE
from parity.golden.blocked_attention import Arithmetic
from parity.golden.grouped_products import experts_one_by_one
from parity.golden.long_sequences import attention_in_blocks
from parity.rounding.addresses import address
from parity.rounding.aten_calls import (
    ARITHMETIC,
    BIASED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    COPIES,
    FIRST_OPERAND,
    MATRICES,
    NORMS,
    POINTWISE,
    REDUCTIONS,
    RELU,
    RELU_IN_PLACE,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    SUM,
    SUM_IN_PLACE,
    SUMS,
    TABLES,
)
from parity.rounding.attention import Attention
from parity.rounding.biases_by_hand import BiasesByHand
from parity.rounding.casts import CAST, Casts
from parity.rounding.choices import Choices
from parity.rounding.freedom import FUSED_POINTWISE, Freedom
from parity.rounding.kernel_choices import as_read, in_stored_parts, lost_in_sums
from parity.rounding.kinks import Kinks
from parity.rounding.lineage import Lineage
from parity.rounding.linear_operands import LinearOperands, is_matrix
from parity.rounding.norms_seen import NormsSeen
from parity.rounding.operands_read import OperandsRead
from parity.rounding.parts import Rounding
from parity.rounding.patches import are_patches, rows_of
from parity.rounding.patches import backward as patches_backward
from parity.rounding.patches import forward as patches_forward
from parity.rounding.phase import Phase
from parity.rounding.plain_calls import is_in_place
from parity.rounding.plain_kernels import PLAIN_KERNELS, as_in
from parity.rounding.recurrent import step_by_step
from parity.rounding.steps_rounded import StepsRounded, written
from parity.rounding.stored import Stored
from parity.rounding.storing import Storing


@contextmanager
def rounded(
    rounding: Rounding,
    weights: Iterable[Tensor] | None = None,
    freedom: Freedom = FUSED_POINTWISE,
    scaled_together: Iterable[Sequence[Tensor]] = (),
    plain: Iterable[Tensor] = (),
    kinks: Kinks | None = None,
    weights_read: OperandsRead | None = None,
    choices: Choices | None = None,
    stored: Stored | None = None,
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
        choices: takes note of the largest of many numbers, and chooses as a port did; None for neither.
        stored: what need not be rounded when it is stored; what this pass rounds is added.

    Yields:
        The phase, to be told where the backward pass begins.
    """
    storing = Storing(as_read(rounding, freedom.kernels), freedom, stored or Stored())
    mode = _RoundingMode(storing, weights, scaled_together, plain, kinks, weights_read or OperandsRead(), choices)
    with (
        sdpa_kernel(SDPBackend.MATH),
        mode.steps.watched(),
        mode,
        mode.casts if CAST in freedom.plain else nullcontext(),
        attention_in_blocks(mode.attention),
        experts_one_by_one(),
        step_by_step(),
    ):
        yield mode.phase


class _RoundingMode(TorchDispatchMode):
    def __init__(
        self,
        storing: Storing,
        weights: Iterable[Tensor] | None,
        scaled_together: Iterable[Sequence[Tensor]],
        plain: Iterable[Tensor],
        kinks: Kinks | None,
        weights_read: OperandsRead,
        choices: Choices | None,
    ) -> None:
        super().__init__()
        held = list(weights or ())
        self.phase = Phase()
        self._storing, self._freedom, self._kinks, self._choices = storing, storing.freedom, kinks, choices
        self.steps = StepsRounded(storing, self._while_suspended)
        self._biases = BiasesByHand(storing, storing.freedom)
        self._norms = NormsSeen()
        self._attention = Attention(storing, self.phase)
        outside_te = list(plain)
        self._linear = LinearOperands(storing, self.phase, self._norms, held, scaled_together, outside_te, weights_read)
        self._lineage = None if weights is None else Lineage(held)
        self._plain_lineage = Lineage(outside_te)
        self._patches: dict[int, Tensor] = {}  # by the address of what convolutions read: the rows of a linear layer
        self._suspended = False

    @property
    def attention(self) -> Arithmetic:
        """What this mode rounds in attention, for attention that runs in blocks, whose parts it must not see."""
        return self._attention.arithmetic(alone=self._while_suspended)

    @property
    def casts(self) -> Casts:
        """What the port's own casts round."""
        return Casts(self._storing.store, alone=self._while_suspended)

    @contextmanager
    def _while_suspended(self) -> Iterator[None]:
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended or func.is_view:  # what is known of a tensor is known of all that lies in its memory
            return func(*args, **kwargs)
        if func is SUM and not self.phase.backward and not kwargs and _are_tensors(args):
            result = self._attention.sum(lambda *terms: self._computed(func, terms, kwargs), *args)
        else:
            result = self._computed(func, args, kwargs)
        if self._choices is not None:
            result = self._choices.follow(func, args, kwargs, result)
        if self._lineage is not None and not self.phase.backward:
            self._lineage.see(func, args, result)
            self._plain_lineage.see(func, args, result)
        return result

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._kinks is None:
            return self._rounded(func, args, kwargs)
        return self._beside_kinks(self._kinks, func, args, kwargs)

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
        if self.steps.each_call or self._is_step_by_hand(func, args):
            return self._stored_in_place(func, args, kwargs)
        if func in FIRST_OPERAND:
            return self._gemm(func, args, kwargs)
        if func is SOFTMAX_BACKWARD and not self._freedom.stores_scores:
            flash = self._attention.softmax_backward(*args[:2])
            if flash is not None:
                return flash
        if func in SUMS and _are_activations(args[:2]):
            if not self._freedom.stores_sums:
                return func(*args, **kwargs)
            in_parts = None if kwargs else self._biases.in_sum(*args[:2])
            stored = self._storing.store(func(*args, **kwargs)) if in_parts is None else in_parts
            return args[0].copy_(stored) if func is SUM_IN_PLACE else stored
        patches = self._of_patches(func, args)
        if patches is not None:
            return patches
        if "storage" in self._storing.rounding.parts and (func in PLAIN_KERNELS or self._is_plain(func)):
            if is_in_place(func):
                return self._stored_in_place(func, args, kwargs)
            in_fp32 = self._is_step_in_fp32(args)
            result = as_in(torch.float32 if in_fp32 else self._storing.rounding.storage, func, args, kwargs)
            if in_fp32 and self.phase.differentiates:  # the cube of a root may be beyond FP16
                self._norms.see_gradient(args, result)
                return result
            self._norms.see(func, args, result)
            return tree_map_only(Tensor, self._storing.store, result)
        return self._in_between(func, args, kwargs)

    def _gemm(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        position = FIRST_OPERAND[func]
        left, right = args[position], args[position + 1]
        has_weight = is_matrix(left) and not self._are_both_activations(left, right)
        is_linear = has_weight or self._linear.are_of_experts(left, right)
        operands = (self._linear.read if is_linear else self._attention.operands)(left, right)
        if func is BIASED and is_linear and self._biases.made and not kwargs:
            return self._biases.result(self._product(MATRICES, (), *operands, (), {}, is_linear), args[0])
        result = self._product(func, args[:position], *operands, args[position + 2 :], kwargs, is_linear)
        if is_linear or self._has_weights(left, right):
            return self._storing.store(result)
        return self._attention.result(result, left, right, operands[0])

    def _in_between(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What lies between two GEMMs."""
        result = func(*args, **kwargs)
        if self._freedom.stores_pointwise and func in NORMS:
            result = self._storing.store(result[0]), *result[1:]
        elif self._freedom.stores_pointwise and self._is_step_stored(func, args):
            result = self._storing.store(result)
        elif func in COPIES:
            self._storing.see_copy(args, result)
        self._norms.see(func, args, result)
        self._attention.see(func, args, result)
        return result

    def _stored_in_place(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call that rounds what it returns and what it writes to."""
        result = func(*args, **kwargs)
        targets = list(written(func, args, kwargs))
        for x in targets:
            stored = self._storing.store(x)
            if stored is not x:
                x.copy_(stored)
        return result if targets else tree_map_only(Tensor, lambda x: self._storing.store(x) if x.dim() else x, result)

    def _is_step_by_hand(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a reference without an optimizer writes to weights, as a port's optimizer does."""
        if not self.steps.are_calls or self._lineage is None or not is_in_place(func):
            return False
        return any(isinstance(x, Tensor) and self._lineage.is_weight(x) for x in args[:1])

    def _of_patches(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a convolution returns that TE computes as a linear layer; None for any other call."""
        if func is CONVOLUTION and self._is_of_te(args[1]) and are_patches(args[1], *args[3:]):
            x, weight, bias = args[:3]
            patches = self._patches[address(x)] = rows_of(x, weight.shape[2:])
            return patches_forward(x, weight, bias, patches, self._multiplied)
        if func is CONVOLUTION_BACKWARD and self._is_of_te(args[2]) and are_patches(args[2], *args[4:10]):
            gradient, x, weight, *_, wanted = args
            return patches_backward(gradient, x, weight, self._patches[address(x)], wanted, self._multiplied)
        return None

    def _is_of_te(self, weight: Tensor) -> bool:
        """Whether one of TE's modules holds a weight, or what it is computed of."""
        if self._lineage is None or self._plain_lineage.is_weight(weight):
            return False
        return self._lineage.is_weight(weight)

    def _multiplied(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        left, right = self._linear.read(left, right)
        result = left @ right if bias is None else torch.addmm(bias, left, right)
        return self._storing.store(self._as_kernels_sum(result, left, right, 1.0, is_linear=True))

    def _is_plain(self, func: Any) -> bool:
        """Whether a port calls the function by itself, or another whose gradient it gives."""
        if not self._freedom.plain or func in SOFTMAX:
            return False
        name = func.overloadpacket.__name__
        if self.phase.differentiates and name in ARITHMETIC:
            return True
        return name != CAST and name.removesuffix("_backward") in self._freedom.plain

    def _is_step_in_fp32(self, args: tuple[Any, ...]) -> bool:
        """Whether it is a step of a norm that a port computes in FP32, as most do: it has no root of the dtype's."""
        return "rsqrt" not in self._freedom.plain and self._norms.is_step(args)

    def _is_step_stored(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an unfused step stores its result; the angles of RoPE are no faithful port's to round."""
        if func in TABLES:
            return True
        if (func not in POINTWISE and func not in REDUCTIONS) or self._norms.is_step(args):
            return False
        if func in REDUCTIONS and not _keeps_channels(*args[:2]):
            return False  # statistics of a norm, likewise
        return self.phase.differentiates or any(_requires_grad(x) for x in args)

    def _product(
        self,
        func: Any,
        before: tuple[Any, ...],
        left: Tensor,
        right: Tensor,
        after: tuple[Any, ...],
        kwargs: Any,
        is_linear: bool,
    ) -> Tensor:
        """The GEMM, in as many parts along the summed dimension as the kernel takes; ``before`` is added once."""
        lefts = left.tensor_split(self._freedom.splits_of_k, -1)
        rights = right.tensor_split(self._freedom.splits_of_k, -2)
        result: Tensor = func(*before, lefts[0], rights[0], *after, **kwargs)
        add_product = Tensor.addmm_ if left.dim() == 2 else Tensor.baddbmm_
        alpha = kwargs.get("alpha", 1)
        for part, other in zip(lefts[1:], rights[1:], strict=True):
            if part.shape[-1]:
                add_product(result, part, other, alpha=alpha)
        return self._as_kernels_sum(result, left, right, alpha, is_linear)

    def _as_kernels_sum(self, result: Tensor, left: Tensor, right: Tensor, alpha: float, is_linear: bool) -> Tensor:
        """Change a product, summed in FP32, into what kernels make of it whose sums have fewer bits."""
        kernels = self._freedom.kernels
        if not kernels:
            return result
        if (SPLIT_K_IN_OUTPUT_TYPE if is_linear else ATTENTION_16_BIT_SUMS) in kernels:
            stored = in_stored_parts(left, right, self._storing.store)
            return result if stored is None else result.add_(stored.sub_(left @ right), alpha=alpha)
        if not is_linear or self._linear.is_plain:
            return result
        matrices = [(left, right, result)] if left.dim() == 2 else zip(left, right, result, strict=True)
        for one, other, product in matrices:
            lost = lost_in_sums(one, other, kernels, self.phase.backward)
            if lost is not None:
                product.sub_(lost, alpha=alpha)
        return result

    def _has_weights(self, left: Tensor, right: Tensor) -> bool:
        """Whether a batch of products has a table of weights, as of relative positions: none that attention keeps."""
        if self._lineage is None or self.phase.backward:
            return False
        return self._lineage.is_weight(left) or self._lineage.is_weight(right)

    def _are_both_activations(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product of two matrices has no weight, as similarities of embeddings and attention of one head.

        It is no linear layer: TE has no kernel for it but attention.
        """
        if self._lineage is None:
            return False
        if self.phase.backward:
            return self._lineage.is_gradient_of_product(left, right)
        return self._lineage.is_product_of_activations(left, right)


def _are_tensors(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and all(isinstance(x, Tensor) for x in args)


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _keeps_channels(x: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether tokens are summed; heads, which share keys, are not."""
    return x.dim() < 4 and dims is not None and x.dim() - 1 not in {dim % x.dim() for dim in dims}


def _are_activations(operands: tuple[Any, ...]) -> bool:
    return (
        len(operands) == 2
        and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in operands)
        and operands[0].shape == operands[1].shape
    )
