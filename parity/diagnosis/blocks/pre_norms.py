"""Norms after residual sums, as in the original transformer, or of branches' results, as in OLMo 2, that a port has
before its branches, as TE's layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.blocks.residuals import residuals
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.walk import LINEAR, RESHAPES, back, binary, users
from parity.watching.trace import Call, Edit, Trace, Value, edit


def pre_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That each norm after a sum comes before the sum's branch."""
    edits: list[Edit] = []
    for one in residuals(trace):
        after = next((norm for norm in norms(trace) if back(trace, norm.x) == one.call.outputs[0]), None)
        if after is not None and one.norm is None:
            edits += _norm_before(trace, one.stream, after, module)
    if edits:
        yield Hypothesis(
            "post-norm",
            "norms before the branches",
            "put each norm after the sum, as the reference does; it is before the branch, as in TE's TransformerLayer",
            module,
            tuple(edits),
        )


def branch_norm_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """That each norm of a branch's result comes before the branch, or after the sum."""
    found = list(_normed_branches(trace))
    before = [one for call, stream, norm in found for one in _norm_before(trace, stream, norm, module)]
    right = "norm each branch's result before it is added, as the reference does"
    for edits, name, repair in (
        (before, "norms of branches before them", f"{right}; each norm is before its branch, as in TE's layers"),
        (
            [_norm_of_sum(call, stream, norm) for call, stream, norm in found],
            "norms of branches after the sums",
            f"{right}; each norm is after the sum",
        ),
    ):
        if edits:
            yield Hypothesis("post-norm", name, repair, module, tuple(edits))


def _normed_branches(trace: Trace) -> Iterator[tuple[Call, Value, Norm]]:
    """Every ``stream + norm(branch)``: the sum, the stream, the norm; not where the stream's norm is added alone."""
    by_result = {norm.call.outputs[0]: norm for norm in norms(trace)}
    for call in trace.calls:
        named = binary(call)
        operands = [back(trace, operand) for operand in named[1:]] if named and named[0] == "add" else []
        for stream, branch in (operands, operands[::-1]) if operands else ():
            norm = by_result.get(branch) if isinstance(branch, Value) else None
            if norm is not None and isinstance(stream, Value) and back(trace, norm.x) != stream:
                yield call, stream, norm


def _norm_of_sum(call: Call, stream: Value, norm: Norm) -> Edit:
    def compute(was: Tensor, stream: Tensor, branch: Tensor, *affine: Tensor) -> Tensor:
        return norm.compute(stream + branch, *affine).to(was.dtype)

    return edit(call, (stream, *norm.needs), compute)


def _norm_before(trace: Trace, stream: Value, after: Norm, module: nn.Module) -> Iterator[Edit]:
    """The branch's linear layers read the norm of the stream, and the norm after it or its sum is left out."""
    # Parameters are the module's own: the norm, which shows them to a trace, comes later than the branch.
    names = [trace.parameter(value) for value in after.needs[1:]]
    if None in names:
        return
    yield edit(after.call, (after.x,), lambda was, x: x.to(was.dtype))
    width = trace.tensor(stream).shape[-1]
    for call, given in users(trace, stream, RESHAPES):  # nn.MultiheadAttention puts the sequence first
        if call.name in LINEAR and given in call.inputs and trace.tensor(given).shape[-1] == width:
            yield edit(call, call.inputs, _of_normed(call, given, after, [name for name in names if name], module))


def _of_normed(call: Call, given: Value, norm: Norm, names: list[str], module: nn.Module) -> Callable[..., Tensor]:
    def compute(was: Tensor, *inputs: Tensor) -> Tensor:
        by_number = dict(zip((value.number for value in call.inputs), inputs, strict=True))
        affine = (module.get_parameter(name) for name in names)
        by_number[given.number] = norm.compute(by_number[given.number], *affine).to(was.dtype)
        args, kwargs = tree_map_only(Value, lambda value: by_number[value.number], (call.args, call.kwargs))
        result: Tensor = call.function(*args, **kwargs)
        return result

    return compute
