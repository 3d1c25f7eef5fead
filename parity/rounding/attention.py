"""What a kernel of attention rounds, in a reference that writes attention out: batches of GEMMs around a softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from parity.golden.blocked_attention import Arithmetic, as_it_is
from parity.rounding.addresses import address, addresses
from parity.rounding.aten_calls import SAME_PLACE, SLICE_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD
from parity.rounding.phase import Phase
from parity.rounding.storing import Storing


class Attention:
    """The attention of one pass.

    Args:
        storing: of the pass.
        phase: of the pass.
    """

    def __init__(self, storing: Storing, phase: Phase) -> None:
        self._storing, self._phase = storing, phase
        # By address; kept so that no address is given out again.
        # What scores become, and the softmax that it comes from.
        self._probabilities: dict[int, tuple[Tensor, Tensor]] = {}
        self._scores: dict[int, Tensor] = {}  # until the softmax
        self._biased: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # ditto: what scores become, these, and their bias
        self._contexts: dict[int, Tensor] = {}  # attention's output by its probabilities' address
        self._output_gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by the address of the probabilities' gradient

    def arithmetic(self, alone: Callable[[], AbstractContextManager[None]]) -> Arithmetic:
        """What is rounded in attention that runs in blocks.

        Args:
            alone: makes a context in which nothing else is rounded.
        """
        storing, freedom = self._storing, self._storing.freedom
        return Arithmetic(
            operand=functools.partial(storing.operand, part="attention"),
            probabilities=self._store_probabilities,
            scores=self._store_scores if freedom.stores_scores else as_it_is,
            pointwise=storing.store if freedom.stores_pointwise else as_it_is,
            result=storing.store,
            mean_from_context=not freedom.stores_scores,
            splits=freedom.splits_of_k,
            alone=alone,
        )

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Whether the result is a softmax along keys, or made of one's numbers, each in its place."""
        if func in SOFTMAX and _is_along_last(result, func, args):
            self._probabilities[address(result)] = result, result
            self._scores.clear()
            self._biased.clear()
        elif func in SAME_PLACE:
            for source in addresses(args) & self._probabilities.keys():
                self._probabilities[address(result)] = result, self._probabilities[source][1]
            if addresses(args) & self._scores.keys():
                self._scores[address(result)] = result
        elif func is SLICE_BACKWARD and address(args[0]) in self._output_gradients:
            # Attention to a sink drops its column behind the softmax, so the gradient has a column of zeros there.
            _, output_gradient = self._output_gradients[address(args[0])]
            self._output_gradients[address(result)] = result, output_gradient

    def sum(self, add: Callable[[Tensor, Tensor], Tensor], scores: Tensor, bias: Tensor) -> Tensor:
        """A sum, whose second term a port has stored if it is a bias of scores: one of weights or inputs, not a mask.

        A kernel takes one bias: where a reference adds two, one after the other, it is given their stored sum. Unless
        the kernel keeps scores, this is said of terms alone that are stretched: products that are no scores may be
        the first of several terms that a port adds up, too.
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
        """The two as the GEMM reads them."""
        if not self._phase.backward and address(left) in self._probabilities:
            _, softmax = self._probabilities[address(left)]
            return self._store_probabilities(left, softmax), self._storing.operand(right, "attention")
        return self._storing.operand(left, "attention"), self._storing.operand(right, "attention")

    def result(self, result: Tensor, left: Tensor, right: Tensor, stored_left: Tensor) -> Tensor:
        """The result as it is stored, if it is: scores and their gradients may stay in a kernel."""
        probabilities = {address(left), address(right)} & self._probabilities.keys()
        if probabilities:
            result = self._storing.store(result)
            if address(left) in probabilities and not self._phase.backward:
                self._contexts[address(left)] = result
            return result
        scores = self._store_scores(result) if self._storing.freedom.stores_scores else result
        if self._phase.backward:
            self._output_gradients[address(result)] = (result, stored_left)
        else:
            self._scores[address(scores)] = scores
        return scores

    def softmax_backward(self, gradient: Tensor, probabilities: Tensor) -> Tensor | None:
        """Softmax's gradient as flash attention has it: the mean gradient of a row from attention's stored output.

        ``P * (dP - sum(dO * O))``, where ``sum(dO * O)`` equals ``sum(dP * P)`` but for the rounding of O (Dao et al.,
        FlashAttention, arXiv 2205.14135, appendix B.2, equation 4). None for a softmax that is none of attention's.
        """
        context = self._contexts.get(address(probabilities))
        _, output_gradient = self._output_gradients.get(address(gradient), (None, None))
        if context is None or output_gradient is None:
            return None
        mean = (output_gradient * context).sum(-1).reshape(*gradient.shape[:-1], 1)
        result = probabilities * (gradient - mean)
        self._probabilities[address(result)] = result, result
        return result

    def _store_probabilities(self, probabilities: Tensor, softmax: Tensor | None = None) -> Tensor:
        """As the forward pass stores them: a flash kernel before it divides them by their sum.

        ``softmax`` has more columns where a sink took part: it may be the largest of its row.
        """
        if self._storing.freedom.stores_scores or not probabilities.numel():
            return self._storing.operand(probabilities, "attention")
        largest_of_row = probabilities.amax(-1, keepdim=True)
        if softmax is not None and softmax.shape[-1] > probabilities.shape[-1]:
            with_sinks = softmax.amax(-1)
            if with_sinks.numel() == largest_of_row.numel():  # else the rows are not the softmax's
                largest_of_row = with_sinks.view_as(largest_of_row)
        largest_of_row = largest_of_row.clamp(min=torch.finfo(probabilities.dtype).tiny)
        return self._storing.store(probabilities / largest_of_row, "attention") * largest_of_row

    def _store_scores(self, scores: Tensor) -> Tensor:
        return self._storing.store(scores * (1.0 + torch.finfo(torch.float32).eps), "attention")


def _is_along_last(result: Tensor, softmax: Any, args: tuple[Any, ...]) -> bool:
    """Whether a softmax, or its gradient, is along the keys of attention."""
    return args[2 if softmax is SOFTMAX_BACKWARD else 1] % result.dim() == result.dim() - 1
