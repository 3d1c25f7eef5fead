"""Rows of the outputs that an input hides, as a padding mask hides tokens, and of which a port may make what it likes.

A reference computes something for padded tokens, too; TE's attention leaves zeros there, and what is computed of them
is other numbers. Nobody reads them, but a comparison does, and their output gradients spoil all others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.screen import TINY
from parity.diagnosis.trial import tensors_under
from parity.execute import named_inputs
from parity.passes import Tensors
from parity.result import Finding

_HIDES = -1e3  # a score's bias, below which a key is hidden
_NEARLY = 2.0  # tolerances, within which the rows that are kept are worth another run
_MOST = 0.5  # of the square of an output's error


def hidden_row_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if all agrees, gradients too, as soon as rows that an input hides are zero in both sides' outputs.

    The candidate runs again, with output gradients that are zero there, only where what is not hidden is right already.
    """
    if failure.rerun is None:
        return
    for name, kept in _kept_rows(failure):
        if all(_is_nearly_right(failure, output, rows) for output, rows in kept.items()) and _agrees(failure, kept):
            yield finding(
                "hidden-rows",
                f"the candidate agrees, gradients included, but for rows that the input {name} hides, where TE's "
                "attention computes nothing that can be compared. If nobody reads them, zero them in both outputs: "
                f"give the pair a call_reference and a call_candidate that return {_zeroed(failure, name)}",
            )
            return


def hidden_row_hints(failure: Failure) -> Iterator[Finding]:
    """Where most of an unexplained error lies in rows that an input hides: what else is wrong shows without them."""
    for name, kept in _kept_rows(failure):
        shares = [_share_outside(failure, output, rows) for output, rows in kept.items()]
        if shares and min(shares) > _MOST:
            yield finding(
                "hidden-rows",
                f"{min(shares):.0%} of the outputs' error is in rows that the input {name} hides, of which a port may "
                "make what it likes, and gradients have their share of it. Zero them in both outputs first: give the "
                f"pair a call_reference and a call_candidate that return {_zeroed(failure, name)}",
            )
            return


def _zeroed(failure: Failure, name: str) -> str:
    """What zeroes the rows, in words: the caller knows which of the mask's values hides."""
    shape = tuple(named_inputs(failure.prepared.inputs, failure.prepared.input_names)[name].shape)
    return f"output * keep[..., None], where keep is 0 for the tokens that {name} {shape} hides and 1 for others"


def _kept_rows(failure: Failure) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """By each input that hides some, the rows of each output that it does not hide, and whose error fails: bool."""
    outputs = {one.name: failure.golden["output", one.name] for one in failure.outputs}
    failed = [one.name for one in failure.outputs if not one.passed]
    for name, x in named_inputs(failure.prepared.inputs, failure.prepared.input_names).items():
        for hidden in _hidden(x, outputs):
            kept = {output: rows for output, y in outputs.items() if (rows := _rows(~hidden, y)) is not None}
            if any(output in kept for output in failed):
                yield name, kept


def _hidden(x: Tensor, outputs: dict[str, Tensor]) -> Iterator[Tensor]:
    """The tokens that a mask, a bias of scores, or lengths may hide, ``[batch, seq]`` or ``[tokens]``."""
    by_token = x.flatten(1, -2).transpose(1, 2).flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    found: list[Tensor] = []
    if x.dtype is torch.bool or (not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())):
        found = [by_token.bool().all(-1), (by_token == 0).all(-1)]
    elif x.is_floating_point() and bool(((x == 0) | (x == 1)).all()):
        found = [(by_token == 0).all(-1)]
    elif x.is_floating_point() and bool(((x == 0) | (x < _HIDES)).all()):
        found = [(by_token < _HIDES).all(-1)]
    elif x.dim() == 1 and not x.is_floating_point():
        longest = {y.shape[1] for y in outputs.values() if y.dim() > 1 and len(y) == len(x)}
        found = [torch.arange(seq, device=x.device) >= x[:, None] for seq in longest if int(x.max()) <= seq]
    # A sequence has some tokens that are not: what says which, by True or by False, is told by that.
    yield from (hidden for hidden in found if hidden.any() and not hidden.all(-1).any())


def _rows(kept: Tensor, output: Tensor) -> Tensor | None:
    """``kept`` as the output has its rows, sequence first as well; None where it has others."""
    if kept.dim() == 2 and len(kept) == 1 and output.dim() > 2:
        kept = kept.expand(output.shape[0] if output.shape[1] == kept.shape[1] else output.shape[1], -1)
    for rows in (kept, kept.mT) if kept.dim() == 2 else (kept,):
        if output.dim() > rows.dim() and output.shape[: rows.dim()] == rows.shape:
            return rows.reshape(*rows.shape, *[1] * (output.dim() - rows.dim()))
    return None


def _is_nearly_right(failure: Failure, output: str, rows: Tensor) -> bool:
    result = next(one for one in failure.outputs if one.name == output)
    error, right = _error(failure, output), failure.golden["output", output]
    return _norm(right * rows) > 0.0 and _norm(error * rows) <= _NEARLY * result.tolerance_relative_l2 * _norm(right)


def _share_outside(failure: Failure, output: str, rows: Tensor) -> float:
    error = _error(failure, output)
    return 1.0 - (_norm(error * rows) / max(_norm(error), TINY)) ** 2


def _error(failure: Failure, output: str) -> Tensor:
    return failure.candidate["output", output].double() - failure.golden["output", output]


def _agrees(failure: Failure, kept: dict[str, Tensor]) -> bool:
    """Whether every tensor passes where output gradients and outputs are zero in the other rows."""
    cotangents = {name: x * kept[name] if name in kept else x for name, x in failure.prepared.cotangents.items()}

    def zeroed(tensors: Tensors | None) -> Tensors | None:
        if tensors is None:
            return None
        return {key: x * kept[key[1]] if key[0] == "output" and key[1] in kept else x for key, x in tensors.items()}

    golden = zeroed(tensors_under(failure.prepared, (), cotangents=cotangents))
    models = [
        zeroed(tensors_under(failure.prepared, (), failure.precision, cotangents, freedom))
        for freedom in failure.freedoms
    ]
    candidate = None if failure.rerun is None else zeroed(failure.rerun(lambda module: None, cotangents))
    computed = [model for model in models if model is not None]
    if golden is None or candidate is None or not computed or _read_what_is_hidden(golden, kept):
        return False
    return all(result.passed for result in failure.judge(golden, computed, candidate))


def _read_what_is_hidden(golden: Tensors, kept: dict[str, Tensor]) -> bool:
    """Whether what is kept depends on tokens that are hidden, which are none then."""
    shapes = {rows.squeeze(-1).shape: rows for rows in kept.values()}
    gradients = [x for (kind, _), x in golden.items() if kind == "input gradient" and x.shape[:-1] in shapes]
    return any(bool((x * ~shapes[x.shape[:-1]]).any()) for x in gradients)


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
