"""Run a reference with the roundings of a faithful port, in linear layers, in attention and in stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.numerics.aten import (
    ARITHMETIC,
    BIASED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    COPIES,
    COPY_IN_PLACE,
    FIRST_OPERAND,
    MATRICES,
    NORMS,
    POINTWISE,
    QUOTIENT,
    REDUCTIONS,
    RELU,
    RELU_IN_PLACE,
    SAME_PLACE,
    SLICE_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    SUM,
    SUM_IN_PLACE,
    SUMS,
    TABLES,
    Phase,
    address,
    addresses,
)
from parity.numerics.blocked_attention import Arithmetic, as_it_is
from parity.numerics.formats import AttentionFormats, AttentionPart, LayerFormats, Role, Rounding, largest
from parity.numerics.freedom import FUSED_POINTWISE, Choices, Freedom, KinkSides, jumps
from parity.numerics.golden import in_blocks_and_one_by_one
from parity.numerics.kernel_choices import (
    ATTENTION_16_BIT_SUMS,
    SPLIT_K_IN_OUTPUT_TYPE,
    as_read,
    in_stored_parts,
    lost_in_sums,
)
from parity.numerics.plain import (
    CAST,
    PLAIN_KERNELS,
    BiasesByHand,
    Casts,
    are_patches,
    as_in,
    is_backward_of,
    is_in_place,
    rows_of,
    step_by_step,
)
from parity.numerics.plain import backward as patches_backward
from parity.numerics.plain import forward as patches_forward
from parity.numerics.storing import (
    Lineage,
    LinearOperands,
    NormsSeen,
    OperandsRead,
    PastAmaxes,
    StepsRounded,
    Stored,
    Storing,
    Watch,
    is_matrix,
    written,
)
from parity.trace.calls import mapped


class Attention:
    """The attention of one pass of a reference that writes it as batched GEMMs around a softmax.

    Args:
        storing: how the pass stores tensors.
        phase: the pass's phase.
    """

    def __init__(self, storing: Storing, phase: Phase) -> None:
        self._storing, self._phase = storing, phase
        self._is_in_fp8 = storing.rounding.attention != AttentionFormats()
        # All of these are by address. The tensors are kept, so that no address is reused.
        # Probabilities, and the softmax that they come from.
        self._probabilities: dict[int, tuple[Tensor, Tensor]] = {}
        self._score_gradients: dict[int, Tensor] = {}  # by address, a softmax's gradient and multiples of it
        # By address: queries, keys and values, and the amax of those that are cast to FP8 together.
        self._qkv: dict[int, tuple[Tensor, Tensor]] = {}
        self._amax: Tensor | None = None  # of the queries and keys that were multiplied last
        self._uncast: dict[int, Tensor] = {}  # gradients of queries, keys and values that are yet to be cast to FP8
        self._scores: dict[int, Tensor] = {}  # kept until the softmax
        self._biased: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # kept as long: biased scores, scores, bias
        self._contexts: dict[int, Tensor] = {}  # attention's output by its probabilities' address
        self._output_gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by the address of the probabilities' gradient

    def arithmetic(self, alone: Callable[[], AbstractContextManager[None]]) -> Arithmetic:
        """Return the roundings of attention that runs in blocks.

        Args:
            alone: makes a context in which nothing else is rounded.
        """
        storing, freedom = self._storing, self._storing.freedom
        return Arithmetic(
            tensor=storing.in_attention,
            probabilities=self._store_probabilities,
            scores=self._store_scores if freedom.stores_scores else as_it_is,
            pointwise=storing.store if freedom.stores_pointwise else as_it_is,
            mean_from_context=not freedom.stores_scores,
            splits=freedom.splits_of_k,
            alone=alone,
        )

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the result of a call if it is a softmax along keys, or an elementwise function of one or of scores."""
        if func in SOFTMAX and _is_along_last(result, func, args):
            self._note_probabilities(result, result)
            self._scores.clear()
            self._biased.clear()
        elif func in SAME_PLACE or func is QUOTIENT:
            if addresses(args) & self._score_gradients.keys():
                self._score_gradients[address(result)] = result
            if func is QUOTIENT:
                return
            for source in addresses(args) & self._probabilities.keys():
                self._note_probabilities(result, self._probabilities[source][1])
            if addresses(args) & self._scores.keys():
                self._scores[address(result)] = result
        elif func is SLICE_BACKWARD and address(args[0]) in self._output_gradients:
            # Attention with a sink drops the sink's column after the softmax. Its gradient has a column of zeros there.
            _, output_gradient = self._output_gradients[address(args[0])]
            self._output_gradients[address(result)] = result, output_gradient

    def sum(self, add: Callable[[Tensor, Tensor], Tensor], scores: Tensor, bias: Tensor) -> Tensor:
        """Return a sum, rounded as in a port if it adds a bias with a gradient to scores, which the port has stored.

        A kernel takes one bias, so a port passes it the stored sum if a reference adds two biases one after the other.
        If kernels store scores, this is assumed only of biases that are broadcast, because a port may also add several
        ordinary terms to a product.
        """
        if address(scores) not in self._scores or not bias.requires_grad:
            return add(scores, bias)
        bias = self._storing.operand(bias, "attention")
        _, without, first = self._biased.get(address(scores), (None, None, None))
        if first is not None and without is not None and without.shape == scores.shape:
            are_stretched = scores.shape not in (first.shape, bias.shape)
            if are_stretched or not self._storing.freedom.stores_scores:
                scores, bias = without, self._storing.store(first + bias, "attention")
        result = add(scores, bias)
        if result.shape == scores.shape:
            self._scores[address(result)] = result
            self._biased[address(result)] = result, scores, bias
        return result

    def operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two operands as the GEMM reads them."""
        if not self._phase.backward:
            is_context = address(left) in self._probabilities
            self._note_qkv((right,) if is_context else (left, right), self._amax if is_context else None)
            if is_context:
                _, softmax = self._probabilities[address(left)]
                return self._store_probabilities(left, softmax), self._read_tensor(right, -2)
        return self._read_tensor(left, -1), self._read_tensor(right, -2)

    def _note_qkv(self, tensors: tuple[Tensor, ...], before: Tensor | None) -> None:
        """Note queries and keys, or values, which TE casts to FP8 by one scale: ``combine_and_quantize``.

        Values come after the product of queries and keys, whose scale they no longer change here.
        """
        if not self._is_in_fp8:
            return
        self._amax = torch.stack([largest(x) for x in tensors] + ([] if before is None else [before])).max()
        self._qkv.update((address(x), (x, self._amax)) for x in tensors)

    def _read_tensor(self, x: Tensor, dim: int) -> Tensor:
        part = self._name_part(address(x))
        return self._storing.in_attention(x, part, dim, self._qkv[address(x)][1] if part == "qkv" else None)

    def cast_gradients(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """Cast the gradients of queries, keys and values that a call reads to FP8; return what it computes of them.

        Kernels add up the heads that share keys and values before they cast. So what copies gradients of a head, or
        adds them up, reads them uncast.

        Returns:
            None for a call that is to be made as usual.
        """
        if not self._uncast:
            return None
        read = {address(x): x for x in tree_leaves(args) if isinstance(x, Tensor) and address(x) in self._uncast}
        if not read:
            return None
        if func in REDUCTIONS:
            return self._storing.in_attention(func(*args, **kwargs), "qkv_gradients")
        if func is COPY_IN_PLACE or func in COPIES:
            copy: Tensor = func(*args, **kwargs)
            self._uncast[address(copy)] = copy
            return copy
        self.cast_rest(read)
        return None

    def cast_rest(self, held: Mapping[int, Tensor] | None = None) -> None:
        """Cast these gradients to FP8, by default all that have not been cast."""
        for at in dict(self._uncast if held is None else held):
            whole = self._uncast.pop(at)
            self._storing.cast_in_place(whole, "qkv_gradients")

    def _hold_gradient(self, gradient: Tensor) -> Tensor:
        """Return a gradient of queries, keys or values as it is stored; one in FP8 is cast when it is read."""
        if self._storing.rounding.attention.qkv_gradients is None:
            return self._storing.store(gradient)
        self._uncast[address(gradient)] = gradient
        return gradient

    def _name_part(self, at: int) -> AttentionPart:
        """Return which of attention's tensors the operand at an address is."""
        if at in self._score_gradients:
            return "score_gradients"
        if at in self._probabilities:
            return "probabilities"
        return "qkv" if at in self._qkv else "context_gradients"

    def _note_probabilities(self, x: Tensor, softmax: Tensor) -> None:
        """Note probabilities, or the gradients of scores, and the softmax that they come from."""
        self._probabilities[address(x)] = x, softmax
        if self._phase.backward and self._is_in_fp8:
            self._score_gradients[address(x)] = x

    def result(self, result: Tensor, left: Tensor, right: Tensor, stored_left: Tensor) -> Tensor:
        """Return a GEMM's result as it is stored. Scores and their gradients may stay unrounded inside a kernel."""
        probabilities = {address(left), address(right)} & self._probabilities.keys()
        if probabilities:
            if self._phase.backward:
                return self._hold_gradient(result)
            result = self._storing.in_attention(result, "context")
            if address(left) in probabilities:
                self._contexts[address(left)] = result
            return result
        scores = self._store_scores(result) if self._storing.freedom.stores_scores else result
        if self._phase.backward:
            if (
                self._storing.rounding.attention.qkv_gradients is not None
                and {address(left), address(right)} & self._score_gradients.keys()
            ):
                return self._hold_gradient(scores)
            self._output_gradients[address(result)] = (result, stored_left)
        else:
            self._scores[address(scores)] = scores
        return scores

    def softmax_backward(self, gradient: Tensor, probabilities: Tensor) -> Tensor | None:
        """Return the softmax's gradient as flash attention computes it, or None if the softmax is not attention's.

        It is ``P * (dP - sum(dO * O))``, with attention's stored output O. ``sum(dO * O)`` equals ``sum(dP * P)`` apart
        from the rounding of O (Dao et al., FlashAttention, arXiv 2205.14135, appendix B.2, equation 4).
        """
        context = self._contexts.get(address(probabilities))
        _, output_gradient = self._output_gradients.get(address(gradient), (None, None))
        if context is None or output_gradient is None:
            return None
        mean = (output_gradient * context).sum(-1).reshape(*gradient.shape[:-1], 1)
        result = probabilities * (gradient - mean)
        self._note_probabilities(result, result)
        return result

    def _store_probabilities(self, probabilities: Tensor, softmax: Tensor | None = None) -> Tensor:
        """Round probabilities as the forward pass stores them, which a flash kernel does before dividing by their sum.

        ``softmax`` has one more column if there is a sink, and this column may hold the largest value of its row.
        """
        if self._storing.freedom.stores_scores or not probabilities.numel():
            return self._storing.in_attention(probabilities, "probabilities")
        largest_of_row = probabilities.amax(-1, keepdim=True)
        if softmax is not None and softmax.shape[-1] > probabilities.shape[-1]:
            with_sinks = softmax.amax(-1)
            if with_sinks.numel() == largest_of_row.numel():  # otherwise the rows differ from the softmax's
                largest_of_row = with_sinks.view_as(largest_of_row)
        largest_of_row = largest_of_row.clamp(min=torch.finfo(probabilities.dtype).tiny)
        return self._storing.in_attention(probabilities / largest_of_row, "probabilities") * largest_of_row

    def _store_scores(self, scores: Tensor) -> Tensor:
        return self._storing.store(scores * (1.0 + torch.finfo(torch.float32).eps), "attention")


def _is_along_last(result: Tensor, softmax: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a softmax, or its gradient, is along the keys of attention."""
    return args[2 if softmax is SOFTMAX_BACKWARD else 1] % result.dim() == result.dim() - 1


# The rounding model of a faithful port, which is plain PyTorch in FP32 with the roundings of a precision.
#
# The model runs the reference itself under a dispatch mode, so it knows nothing of TE and shares no arithmetic with the
# kernels that it judges (``te_on_cpu``). It rounds:
#
# * both operands of every linear layer's GEMM, forward and backward, to the precision's formats: TF32 for FP32
#   (``common/gemm/cublaslt_gemm.cu`` of TE 2.20 always chooses ``CUBLAS_COMPUTE_32F_FAST_TF32``), or the formats to
#   which a recipe of ``transformer_engine.common.recipe`` quantizes inputs, weights and output gradients;
# * the result of every GEMM, which is stored in the precision's dtype; accumulation is FP32;
# * the operands of attention's batched GEMMs, and of other products of two activations, only to the dtype: TE computes
#   attention in it under every recipe, and has no kernel for the others;
# * the sum of two activations of one shape (a residual stream, RoPE), which is stored as well;
# * the results of PyTorch's own kernels where TE has none, and a port's own casts (``parity.numerics.plain``);
# * tensors that steps of an optimizer write in place, as the port's optimizers do (``parity.numerics.freedom``).
#
# Everything between two GEMMs (norms, activations, softmax, biases) stays in FP32, as in TE's fused kernels.
#
# Each rounding belongs to one of ``parity.numerics.formats.PARTS``, and a model can be limited to some parts. Without
# any part, only the errors of FP32 arithmetic remain.


@contextmanager
def rounded(
    rounding: Rounding,
    weights: Iterable[Tensor] | None = None,
    freedom: Freedom = FUSED_POINTWISE,
    scaled_together: Iterable[Sequence[Tensor]] = (),
    plain: Iterable[Tensor] = (),
    roles: Iterable[tuple[Tensor, Role]] = (),
    changed: Iterable[tuple[Tensor, LayerFormats]] = (),
    kinks: KinkSides | None = None,
    weights_read: OperandsRead | None = None,
    choices: Choices | None = None,
    stored: Stored | None = None,
    past: PastAmaxes | None = None,
    watch: Watch | None = None,
) -> Iterator[Phase]:
    """Make FP32 PyTorch code round like a faithful kernel at the precision, within the context.

    Args:
        rounding: the precision's roundings.
        weights: the model's parameters; if None, each product of matrices counts as a linear layer's.
        freedom: the choices of the kernel that is modelled.
        scaled_together: weights that TE quantizes as one tensor, such as the gate and the up projection, which then
            share the scale of a whole tensor.
        plain: weights whose linear layers are not TE's modules, so that their GEMMs read all operands as stored.
        roles: weights and the roles of TE's modules that hold them.
        changed: weights and what their layers have in other formats than the precision, or than the role.
        kinks: records the values that decide gradients at kinks, and moves them; None for neither.
        weights_read: the operands that other passes with the same rounding read of the same weights; those of this pass
            are added.
        choices: records choices, and chooses as a port did; None for neither.
        stored: tensors that need not be rounded when they are stored; those that this pass rounds are added.
        past: the amaxes of delayed scaling in earlier steps of a training; None to scale each tensor by its own.
        watch: decides what GEMMs of linear layers read; None to round all of their operands.

    Yields:
        The phase, which must be told when the backward pass begins.
    """
    storing = Storing(as_read(rounding, freedom.kernels), freedom, stored or Stored(), past)
    read = weights_read or OperandsRead()
    mode = _RoundingMode(storing, weights, scaled_together, plain, roles, changed, kinks, read, choices, past, watch)
    with (
        sdpa_kernel(SDPBackend.MATH),
        mode.steps.watched(),
        mode,
        mode.casts if CAST in freedom.plain else nullcontext(),
        in_blocks_and_one_by_one(mode.attention),
        step_by_step(),
    ):
        yield mode.phase
        with mode.phase.suspending():
            mode.cast_rest()


class _RoundingMode(TorchDispatchMode):
    def __init__(
        self,
        storing: Storing,
        weights: Iterable[Tensor] | None,
        scaled_together: Iterable[Sequence[Tensor]],
        plain: Iterable[Tensor],
        roles: Iterable[tuple[Tensor, Role]],
        changed: Iterable[tuple[Tensor, LayerFormats]],
        kinks: KinkSides | None,
        weights_read: OperandsRead,
        choices: Choices | None,
        past: PastAmaxes | None,
        watch: Watch | None,
    ) -> None:
        super().__init__()
        held = list(weights or ())
        self.phase = Phase()
        self._storing, self._freedom, self._kinks, self._choices = storing, storing.freedom, kinks, choices
        self.steps = StepsRounded(storing, self.phase.suspending)
        self._biases = BiasesByHand(storing, storing.freedom)
        self._norms = NormsSeen()
        self._attention = Attention(storing, self.phase)
        outside_te = list(plain)
        of_layers = scaled_together, outside_te, roles, changed
        self._linear = LinearOperands(storing, self.phase, self._norms, held, *of_layers, weights_read, past, watch)
        self._lineage = None if weights is None else Lineage(held)
        self._plain_lineage = Lineage(outside_te)
        self._patches: dict[int, Tensor] = {}  # rows of linear layers, by the addresses of convolutions' inputs

    @property
    def attention(self) -> Arithmetic:
        """Return the roundings of attention that runs in blocks, whose steps this mode must not see."""
        return self._attention.arithmetic(alone=self.phase.suspending)

    def cast_rest(self) -> None:
        """Cast what is yet to be cast at the end of the pass."""
        self._attention.cast_rest()

    @property
    def casts(self) -> Casts:
        """Return the mode that rounds in the port's own casts."""
        return Casts(self._storing.store, alone=self.phase.suspending)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.phase.suspended or func.is_view:  # tensors are known by their memory, which a view shares
            return func(*args, **kwargs)
        if func is SUM and not self.phase.backward and not kwargs and _are_tensors(args):
            result = self._attention.sum(lambda *terms: self._compute_call(func, terms, kwargs), *args)
        else:
            given = (args[0].clone(), *args[1:]) if jumps(func) and is_in_place(func) else args
            result = self._compute_call(func, args, kwargs)
            if self._choices is not None and (torch.is_grad_enabled() or not self.phase.backward):
                self._choices.follow(func, given, kwargs, result)
        if self._lineage is not None and not self.phase.backward:
            self._lineage.see(func, args, result)
            self._plain_lineage.see(func, args, result)
        return result

    def _compute_call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._kinks is None:
            return self._round_call(func, args, kwargs)
        return self._beside_kinks(self._kinks, func, args, kwargs)

    def _beside_kinks(self, kinks: KinkSides, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of a call, after moving the values that decide on a side of a kink."""
        if self.phase.backward or any(_requires_grad(x) for x in args):
            args = kinks.moved(func, args)
            chosen = None if kwargs else kinks.chosen(func, args)
            if chosen is not None:
                return chosen
        argument = args[0].clone() if func is RELU_IN_PLACE else args[0] if func is RELU else None
        result = self._round_call(func, args, kwargs)
        if argument is not None:
            kinks.see(argument, result)
        return result

    def _round_call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        cast = self._attention.cast_gradients(func, args, kwargs) if self.phase.backward else None
        if cast is not None:
            return cast
        if self.steps.each_call or self._is_step_by_hand(func, args):
            return self._stored_in_place(func, args, kwargs)
        if func in FIRST_OPERAND:
            return self._compute_gemm(func, args, kwargs)
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
            in_fp32 = self._is_step_in_fp32(args)
            result = as_in(torch.float32 if in_fp32 else self._storing.rounding.storage, func, args, kwargs)
            if is_in_place(func):
                return args[0].copy_(self._storing.store(args[0]))
            if in_fp32 and self.phase.backward:  # the cube of a root may be out of FP16's range
                self._norms.see_gradient(args, result)
                return result
            self._norms.see(func, args, result)
            return mapped(result, self._storing.store)
        return self._in_between(func, args, kwargs)

    def _compute_gemm(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        position = FIRST_OPERAND[func]
        left, right = args[position], args[position + 1]
        has_weight = is_matrix(left) and not self._are_both_activations(left, right)
        is_linear = has_weight or self._linear.are_of_experts(left, right)
        operands = (self._linear.read if is_linear else self._attention.operands)(left, right)
        if func is BIASED and is_linear and self._biases.made and not kwargs:
            return self._biases.result(self._multiply_in_parts(MATRICES, (), *operands, (), {}, is_linear), args[0])
        result = self._multiply_in_parts(func, args[:position], *operands, args[position + 2 :], kwargs, is_linear)
        if is_linear:
            return self._linear.store_product(result)
        if self._has_weights(left, right):
            return self._storing.store(result)
        return self._attention.result(result, left, right, operands[0])

    def _in_between(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of a call between two GEMMs."""
        result = func(*args, **kwargs)
        if self._freedom.stores_pointwise and func in NORMS:
            result = mapped(result[0], self._storing.store), *result[1:]  # a missing gradient is None
        elif self._freedom.stores_pointwise and self._is_step_stored(func, args):
            result = self._storing.store(result)
        elif func in COPIES:
            self._storing.see_copy(args, result)
        self._norms.see(func, args, result)
        self._attention.see(func, args, result)
        return result

    def _stored_in_place(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call that may write to its arguments, and round the tensors that it writes, or else its results."""
        result = func(*args, **kwargs)
        targets = list(written(func, args, kwargs))
        for x in targets:
            stored = self._storing.store(x)
            if stored is not x:
                x.copy_(stored)
        return result if targets else mapped(result, lambda x: self._storing.store(x) if x.dim() else x)

    def _is_step_by_hand(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a reference without an optimizer writes to weights, as a port's optimizer does."""
        if not self.steps.are_calls or self._lineage is None or not is_in_place(func):
            return False
        return any(isinstance(x, Tensor) and self._lineage.is_weight(x) for x in args[:1])

    def _of_patches(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a convolution that TE computes as a linear layer, or None for any other call."""
        if func is CONVOLUTION and self._is_of_te(args[1]) and are_patches(args[1], *args[3:]):
            x, weight, bias = args[:3]
            patches = self._patches[address(x)] = rows_of(x, weight.shape[2:])
            return patches_forward(x, weight, bias, patches, self._multiply_as_linear)
        if func is CONVOLUTION_BACKWARD and self._is_of_te(args[2]) and are_patches(args[2], *args[4:10]):
            gradient, x, weight, *_, wanted = args
            return patches_backward(gradient, x, weight, self._patches[address(x)], wanted, self._multiply_as_linear)
        return None

    def _is_of_te(self, weight: Tensor) -> bool:
        """Return whether one of TE's modules holds a weight, or the parameters that it is computed from."""
        if self._lineage is None or self._plain_lineage.is_weight(weight):
            return False
        return self._lineage.is_weight(weight)

    def _multiply_as_linear(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        left, right = self._linear.read(left, right)
        result = left @ right if bias is None else torch.addmm(bias, left, right)
        return self._linear.store_product(self._as_kernels_sum(result, left, right, 1.0, is_linear=True))

    def _is_plain(self, func: Any) -> bool:
        """Return whether a port itself calls the function, or the function whose gradient it computes."""
        if not self._freedom.plain or func in SOFTMAX:
            return False
        name = func.overloadpacket.__name__
        if self.phase.backward and name in ARITHMETIC:
            return True
        if name == CAST:
            return False
        return name in self._freedom.plain or (self.phase.backward and is_backward_of(name, self._freedom.plain))

    def _is_step_in_fp32(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call is a step of a norm that the port computes in FP32: it takes no root in 16 bits."""
        return "rsqrt" not in self._freedom.plain and self._norms.is_step(args)

    def _is_step_stored(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an unfused step stores its result. No faithful port rounds the angles of RoPE."""
        if func in TABLES:
            return True
        if (func not in POINTWISE and func not in REDUCTIONS) or self._norms.is_step(args):
            return False
        if func in REDUCTIONS and not _keeps_channels(*args[:2]):
            return False  # these may be the statistics of a norm, which no faithful port rounds either
        return self.phase.backward or any(_requires_grad(x) for x in args)

    def _multiply_in_parts(
        self,
        func: Any,
        before: tuple[Any, ...],
        left: Tensor,
        right: Tensor,
        after: tuple[Any, ...],
        kwargs: Any,
        is_linear: bool,
    ) -> Tensor:
        """Return a GEMM's result, computed in the kernel's number of parts along K; ``before`` is added once."""
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
        """Return a product that was summed in FP32 as kernels compute it whose sums have fewer bits."""
        kernels = self._freedom.kernels
        if not kernels:
            return result
        if (SPLIT_K_IN_OUTPUT_TYPE if is_linear else ATTENTION_16_BIT_SUMS) in kernels:
            stored = in_stored_parts(left, right, self._storing.store)
            return result if stored is None else result.add_(stored.sub_(left @ right), alpha=alpha)
        if not is_linear or self._linear.is_plain:
            return result
        matrices = [(left, right, result)] if left.dim() == 2 else zip(left, right, result, strict=True)
        storage = self._storing.rounding.storage
        for one, other, product in matrices:
            lost = lost_in_sums(one, other, kernels, self.phase.backward, storage)
            if lost is not None:
                product.sub_(lost, alpha=alpha)
        return result

    def _has_weights(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a batched product that is not attention's reads weights, such as relative positions."""
        if self._lineage is None or self.phase.backward:
            return False
        return self._lineage.is_weight(left) or self._lineage.is_weight(right)

    def _are_both_activations(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a product of two matrices has no weight, as in attention with one head.

        Such a product is not a linear layer, and TE has no kernel for it except attention's.
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
    """Return whether a reduction sums only over tokens, unlike the sum over heads that share keys."""
    return x.dim() < 4 and dims is not None and x.dim() - 1 not in {dim % x.dim() for dim in dims}


def _are_activations(operands: tuple[Any, ...]) -> bool:
    return (
        len(operands) == 2
        and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in operands)
        and operands[0].shape == operands[1].shape
    )
