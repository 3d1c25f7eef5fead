"""Attention and MLP side by side on one input, and ports that put them one after the other.

What sums the two branches may add them in any order, and both may read one norm, as in GPT-J, Phi and Cohere, or each
its own, as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.walk import CASTS, LINEAR, RESHAPES, ancestors, back, back_along, binary, users
from parity.watching.trace import Call, Edit, Trace, Value, edit

_THROUGH = CASTS | {"dropout"}
_ENDS = RESHAPES | {"dropout", "mul"}  # what may follow a branch's last linear layer, and its bias
_MOST_ANCESTORS = 400  # of a branch


@dataclass(frozen=True)
class ParallelBlock:
    """``stream + first(norm(stream)) + second(norm(stream))``, in any order.

    Attributes:
        stream: what goes around both branches.
        first: what the branch that is computed first returns.
        norm: of the stream, which the second branch reads.
        readers: the linear layers of the second branch that read the norm, where the first reads it too, or the norm is
            computed before what the first returns; else none.
        shared: whether the first reads it too.
    """

    stream: Value
    first: Value
    norm: Norm
    readers: tuple[Call, ...]
    shared: bool

    @property
    def module(self) -> str:
        """The path of the innermost module that has the norm and what the first branch returns."""
        paths = [value.site[0].split(".") for value in (self.norm.call.outputs[0], self.first)]
        return ".".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False)))

    def without_norm(self) -> tuple[Edit, ...]:
        """The second branch is to read the stream, where the first one alone has its norm."""
        if not self.shared:
            return ()
        given = (self.stream,)
        return tuple(_reading(call, self.norm.call.outputs[0], given, lambda stream: stream) for call in self.readers)

    def in_sequence(self) -> tuple[Edit, ...]:
        """The second branch is to read the sum of the stream and the first."""
        given = (self.stream, self.first, *self.norm.needs[1:])

        def normed(stream: Tensor, first: Tensor, *affine: Tensor) -> Tensor:
            return self.norm.compute(stream + first, *affine)

        if not self.readers:
            return (edit(self.norm.call, given, lambda was, *values: normed(*values).to(was.dtype)),)
        return tuple(_reading(call, self.norm.call.outputs[0], given, normed) for call in self.readers)


def parallel_block_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That blocks which the reference has side by side follow each other, or that one reads no norm."""
    mistakes: tuple[Mistake[ParallelBlock], ...] = (
        Mistake(
            "parallel-block",
            "sequential blocks",
            "let the MLP read what attention reads: parallel_attention_mlp=True; it reads attention's sum",
            ParallelBlock.in_sequence,
        ),
        Mistake(
            "norm-missing",
            "parallel blocks, of which one reads no norm",
            "give both blocks the norm that they share; the MLP, or what is computed last, reads the layer's input",
            ParallelBlock.without_norm,
        ),
    )
    yield from everywhere_and_somewhere(mistakes, parallel_blocks(trace), module, lambda block: block.module)


def parallel_blocks(trace: Trace) -> list[ParallelBlock]:
    """Every two blocks side by side, in order."""
    normed = norms(trace)
    sums = (call for call in trace.calls if _is_sum(call))
    return [block for call in sums if (block := _block(trace, call, normed)) is not None] if normed else []


def _is_sum(call: Call) -> bool:
    named = binary(call)
    return named is not None and named[0] == "add" and all(isinstance(operand, Value) for operand in named[1:])


def _block(trace: Trace, call: Call, normed: Sequence[Norm]) -> ParallelBlock | None:
    terms = list(_terms(trace, call))
    if len(terms) != 3 or len({trace.tensor(term).shape for term in terms}) > 1:
        return None
    branches = sorted((term for term in terms if ends_a_branch(trace, term)), key=lambda term: term.number)
    streams = [term for term in terms if term not in branches]
    if len(streams) != 1:
        return None
    (stream,), (first, second) = streams, branches
    source = back(trace, stream, _THROUGH)
    of_first, of_second = (ancestors(trace, branch, _MOST_ANCESTORS) for branch in (first, second))
    if first in of_second:
        return None
    for norm in normed:
        result = norm.call.outputs[0]
        if back(trace, norm.x, _THROUGH) == source and result in of_second:
            shared = result in of_first
            is_early = shared or result.number < first.number
            readers = _readers(trace, result, of_second) if is_early else ()
            return ParallelBlock(stream, first, norm, readers, shared) if readers or not is_early else None
    return None


def _terms(trace: Trace, call: Call) -> Iterator[Value]:
    """What a sum adds up, through sums that nothing else reads."""
    for operand in call.inputs[:2]:
        value = back(trace, operand, _THROUGH)
        producer = trace.producer(value)
        if producer is not None and _is_sum(producer) and len(users(trace, value, _THROUGH)) == 1:
            yield from _terms(trace, producer)
        else:
            yield value


def ends_a_branch(trace: Trace, value: Value) -> bool:
    """Whether a value is what a linear layer returns, but for its bias, its scale and its shape."""
    call = trace.producer(back_along(trace, value, _ENDS))
    while call is not None and call.outputs and _adds_parameter(trace, call):
        call = trace.producer(back_along(trace, call.inputs[0], _ENDS))
    return call is not None and call.name in LINEAR


def _adds_parameter(trace: Trace, call: Call) -> bool:
    """Whether a call adds a bias, and no other branch."""
    named = binary(call)
    return named is not None and named[0] == "add" and trace.parameter(back(trace, named[2])) is not None


def _readers(trace: Trace, result: Value, of_second: Sequence[Value]) -> tuple[Call, ...]:
    """The linear layers that read a norm for the second branch."""
    return tuple(
        call for call in trace.calls if call.name in LINEAR and call.outputs[0] in of_second and result in call.inputs
    )


def _reading(call: Call, norm: Value, given: tuple[Value, ...], normed: Callable[..., Tensor]) -> Edit:
    """The linear layer is to read what ``normed`` makes of the values in the place of the norm's result."""
    others = [value for value in call.inputs if value != norm]

    def compute(was: Tensor, *values: Tensor) -> Tensor:
        of_norm, tensors = values[: len(given)], dict(zip(others, values[len(given) :], strict=True))
        tensors[norm] = normed(*of_norm).to(was.dtype)
        args, kwargs = tree_map_only(Value, tensors.__getitem__, (call.args, call.kwargs))
        result: Tensor = call.function(*args, **kwargs)
        return result

    return edit(call, (*given, *others), compute)
