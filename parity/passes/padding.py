"""Put garbage where a pair's inputs mark padding, and find what of the results must stay as it is.

An input may be a mask, a bias that hides keys, lengths, or borders of packed documents with room between them. Whether
its rows are padding, and which results count, is the reference's to say: what it computes in FP64 from garbage there
as from what was there, a port must compute alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.numerics.errors import TINY, norm_of
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors, tensors_of
from parity.passes.one_pass import named_inputs, run, with_inputs
from parity.passes.prepare import Cache, Prepared, cast, size_in_bytes
from parity.result import Kind

_GARBAGE = 30.0  # times the size of the tokens
_FP64 = 1e-12  # of a tensor's largest number: in FP64, another device changes numbers by less
_HIDES = -1e3  # a key is hidden if its score's bias is below this


@dataclass(frozen=True, eq=False)
class Padding:
    """Inputs whose padding holds garbage.

    Attributes:
        mark: the name of the input that marks it.
        inputs: the inputs, as in ``Prepared``.
        kept: for each tensor of golden, the elements that the reference computes from them as from the usual inputs.
    """

    mark: str
    inputs: Any
    kept: Mapping[tuple[Kind, str], Tensor]

    def of(self, prepared: Prepared) -> Prepared:
        """Return the pair with these inputs; its golden is still that of the usual ones."""
        return replace(prepared, inputs=self.inputs, cache=Cache())

    def is_same(self, usual: Tensors, padded: Tensors) -> bool:
        """Return whether two passes agree to the bit where they must, and are finite in the same places elsewhere."""

        def is_as(x: Tensor, y: Tensor, counts: Tensor | None) -> bool:
            same = _are_same(x, y)
            return bool((same if counts is None else torch.where(counts, same, x.isfinite() == y.isfinite())).all())

        return all(is_as(x, padded[key], self.kept.get(key)) for key, x in usual.items())

    def changes(self, usual: Tensors, padded: Tensors) -> dict[tuple[Kind, str], float]:
        """Return by how much of its norm each tensor of a pass differs from the other pass where it must not."""
        found = {}
        for key, counts in self.kept.items():
            one, other = (tensors[key].double().where(counts, 0.0) for tensors in (usual, padded))
            off = (other - one).masked_fill(_are_same(one, other), 0.0)
            found[key] = norm_of(off.nan_to_num(nan=torch.inf)) / max(norm_of(one), TINY)
        return found


def find_padding(prepared: Prepared) -> Padding | None:
    """Return the inputs with garbage in their padding; None if they have none, or the reference reads what is there."""
    return prepared.cache.get(
        "padding",
        lambda: next(_fill_padding(prepared), None),
        lambda found: 0 if found is None else size_in_bytes((found.inputs, list(found.kept.values()))),
    )


def _fill_padding(prepared: Prepared) -> Iterator[Padding]:
    given, golden = named_inputs(prepared.inputs, prepared.input_names), tensors_of(prepared.golden)
    outputs = [(key, x) for key, x in golden.items() if key[0] == "output"]
    for mark, x in given.items():
        for hidden in (*hidden_tokens(x, given.values()), *_list_gaps(x, given.values())):
            filled = {
                name: y for name, own in given.items() if name != mark and (y := _fill_rows(own, hidden)) is not None
            }
            again = _run_reference(prepared, filled) if filled else None
            if again is None:
                continue
            kept = {key: _are_alike(x, again[key]) for key, x in golden.items()}
            # Of both values of a mask, that one marks padding whose rows other rows do not depend on.
            if any(_is_kept(kept[key], ~hidden, x) for key, x in outputs):
                yield Padding(mark, with_inputs(prepared.inputs, prepared.input_names, filled), kept)


def _run_reference(prepared: Prepared, filled: Mapping[str, Tensor]) -> Tensors | None:
    """Return what the reference computes in FP64 from other inputs; None if it cannot."""
    given = cast(with_inputs(prepared.inputs, prepared.input_names, filled), torch.float64)
    prepared.reference.double()
    try:
        with in_fp64():
            at = given, prepared.input_names, lambda _: prepared.cotangents
            return tensors_of(run(prepared.reference, prepared.call, *at, differentiated=not prepared.evaluation))
    except Exception:  # the reference's code may raise anything on other values
        return None
    finally:
        prepared.reference.zero_grad(set_to_none=True)


def _is_kept(same: Tensor, kept: Tensor, output: Tensor) -> bool:
    """Return whether the rows of an output that count, or all of it if it has no rows, are the same and not all 0."""
    rows = rows_in(kept, output)
    counts = torch.ones_like(same) if rows is None else rows.expand(output.shape)
    return bool(same[counts].all()) and bool(output[counts].any())


def _fill_rows(x: Tensor, hidden: Tensor) -> Tensor | None:
    """Return an input with garbage in its hidden rows; None if it has no such rows, or marks something itself."""
    rows = rows_in(hidden, x)
    if rows is None or x.dtype is torch.bool or bool(((x == 0) | (x == 1)).all()):
        return None
    rows, rng = rows.expand(x.shape), Rng(0, "garbage")
    tokens = x[~rows]
    if x.is_floating_point():
        size = tokens.double().square().mean().sqrt().item()
        return x.where(~rows, rng.normal(*x.shape, std=_GARBAGE * size).to(x))
    if bool((x[rows] < 0).any()):  # labels that no loss counts
        return None
    return x.where(~rows, tokens[rng.integers(*x.shape, high=len(tokens)).to(x.device)])


def _are_alike(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape or not x.numel():
        return torch.zeros_like(x, dtype=torch.bool)
    return (y - x).abs() <= _FP64 * x.abs().amax()


def _are_same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | ((x != x) & (y != y))


# Which tokens an input hides.


def hidden_tokens(x: Tensor, others: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tokens that a mask, a bias of scores, or lengths may hide, ``[batch, seq]`` or ``[tokens]``.

    Args:
        x: the input that may hide some.
        others: tensors of which one may have the sequences that the lengths are of.
    """
    by_token = x.flatten(1, -2).transpose(1, 2).flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    found: list[Tensor] = []
    if x.dtype is torch.bool or (not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())):
        found = [by_token.bool().all(-1), (by_token == 0).all(-1)]
    elif x.is_floating_point() and bool(((x == 0) | (x == 1)).all()):
        found = [(by_token == 0).all(-1)]
    elif x.is_floating_point() and bool(((x == 0) | (x < _HIDES)).all()):
        found = [(by_token < _HIDES).all(-1)]
    elif x.dim() == 1 and not x.is_floating_point():
        longest = {y.shape[1] for y in others if y.dim() > 1 and len(y) == len(x)}
        found = [torch.arange(seq, device=x.device) >= x[:, None] for seq in longest if int(x.max()) <= seq]
    # Every sequence has some tokens that are not hidden, which tells whether True or False hides.
    yield from (hidden for hidden in found if hidden.any() and not hidden.all(-1).any())


def rows_in(tokens: Tensor, x: Tensor) -> Tensor | None:
    """Return ``tokens`` in the layout of a tensor's rows, also if the sequence comes first; None if it does not fit."""
    if tokens.dim() == 2 and len(tokens) == 1 and x.dim() > 2:
        tokens = tokens.expand(x.shape[0] if x.shape[1] == tokens.shape[1] else x.shape[1], -1)
    for rows in (tokens, tokens.mT) if tokens.dim() == 2 else (tokens,):
        if x.dim() >= rows.dim() and x.shape[: rows.dim()] == rows.shape:
            return rows.reshape(*rows.shape, *[1] * (x.dim() - rows.dim()))
    return None


def _list_gaps(x: Tensor, others: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tokens of packed rows, ``[tokens]``, that are in none of the documents with these borders.

    Documents follow each other, or begin where the borders of another input say.
    """
    if not _are_borders(x):
        return
    given = list(others)
    borders = [y for y in given if _are_borders(y) and len(y) == len(x)]
    for count in {len(y) for y in given if y.dim() > 0 and len(y) != len(x)}:
        token = torch.arange(count, dtype=x.dtype, device=x.device)
        for starts in borders:
            of = torch.searchsorted(starts[1:].to(x.dtype), token, right=True)
            lengths = torch.cat([x.diff(), x.new_zeros(1)])
            hidden = token - starts[of] >= lengths[of]
            if int(starts[-1]) <= count and bool((starts.diff() >= x.diff()).all()) and bool(hidden.any()):
                yield hidden


def _are_borders(x: Tensor) -> bool:
    return x.dim() == 1 and not x.is_floating_point() and len(x) > 1 and int(x[0]) == 0 and bool((x.diff() >= 0).all())
