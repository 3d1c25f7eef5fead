"""Ranks hypotheses by what they leave of the error, on one row of the batch where rows are computed independently.

Forward only, and in FP32 where that is exact enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from parity.diagnosis.budget import Budget, while_it_lasts
from parity.diagnosis.failure import Failure
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.pairs import Effects
from parity.diagnosis.trial import outputs_under

FAITHFUL = 1.2
"""Times the expected error, which ends the search."""

EXACT = 0.5
"""Of the error, which a hypothesis must bring down to that."""

TINY = 1e-300
"""Stands for a norm of zero below a fraction."""

CHANGES = 1e-6
"""Of the error, by which a hypothesis that changes anything changes it."""

_FAITHFUL_AT_LEAST = 0.4  # of the tolerance: as good where the rounding model says too little
_FP32_IS_EXACT = 0.02  # of the candidate's error, which FP32's own must stay below to screen in it


Ranked = tuple[float, tuple[Hypothesis, ...]]  # the share of the error that is left, and what leaves it


class Screen:
    """Ranks hypotheses by the share of the error that they leave in the row where the candidate's is largest."""

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.prepared.golden.outputs
        self._candidate = {name: x.double() for (kind, name), x in failure.candidate.items() if kind == "output"}
        self._tolerances = {result.name: result.tolerance_relative_l2 for result in failure.outputs}
        self._rows = self._worst_row()
        self._misfits: set[tuple[Hypothesis, ...]] = set()
        self._before = {rows: self._error(self._golden, rows) for rows in (True, False)}
        self._faithful = max(
            max(FAITHFUL * result.expected.relative_l2 / result.tolerance_relative_l2, _FAITHFUL_AT_LEAST)
            for result in failure.outputs
            if result.numel
        )
        plain = outputs_under(self._prepared, (), torch.float32)
        exact = plain is not None and self._error(plain, False, self._golden) < _FP32_IS_EXACT * self._before[False]
        self._dtype = torch.float32 if exact else torch.float64
        self.effects = Effects.of(self._effect(self._candidate, cut=True))

    def shares(self, combinations: Iterable[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Combinations with the share of the error that each leaves; those that change nothing are left out.

        Of an iterator, none is taken that the budget does not last for.
        """
        for combination in while_it_lasts(combinations, budget):
            alone = self._is_alone(combination)
            outputs = outputs_under(self._prepared, combination, self._dtype, self._rows if alone else None)
            if alone and outputs is None:
                # A model may make other calls for a single row, whose mask it need not expand.
                self._misfits.add(combination)
                alone = False
                outputs = outputs_under(self._prepared, combination, self._dtype)
            if outputs is not None and self._same_shapes(outputs, alone):
                share = self._error(outputs, alone, cut=False) / self._before[alone]
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(outputs, cut=not alone))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Whether what is left is no more than a faithful port at the precision has."""
        share, combination = entry
        return share < EXACT and share * self._before[self._is_alone(combination)] <= self._faithful

    def _is_alone(self, combination: tuple[Hypothesis, ...]) -> bool:
        """Whether it is tried on one row."""
        whole = combination in self._misfits or any(one.around for one in combination)
        return self._rows is not None and not whole

    def _worst_row(self) -> slice | None:
        """The row of the batch with the largest error, if rows are computed independently; else None."""
        counts = {x.shape[0] for x in self._candidate.values() if x.dim() > 1}
        if any(not x.dim() or (x.dim() == 1 and len(x) not in counts) for x in self._candidate.values()):
            return None
        if len(counts) != 1 or counts == {1}:
            return None
        errors = [
            ((x - self._golden[name]) ** 2).reshape(len(x), -1).sum(1) / self._golden[name].square().sum()
            for name, x in self._candidate.items()
        ]
        row = int(torch.stack(errors).sum(0).argmax())
        rows = slice(row, row + 1)
        alone = outputs_under(self._prepared, (), torch.float64, rows)
        independent = alone is not None and all(
            alone[name].shape == x[rows].shape and torch.allclose(alone[name], x[rows], rtol=1e-5, atol=1e-7)
            for name, x in self._golden.items()
        )
        return rows if independent else None

    def _of_rows(self, tensors: dict[str, Tensor], alone: bool) -> dict[str, Tensor]:
        return {name: x[self._rows] for name, x in tensors.items()} if alone and self._rows else tensors

    def _same_shapes(self, outputs: dict[str, Tensor], alone: bool) -> bool:
        expected = self._of_rows(self._golden, alone)
        return all(name in outputs and outputs[name].shape == x.shape for name, x in expected.items())

    def _effect(self, outputs: dict[str, Tensor], cut: bool) -> list[Tensor]:
        """By how much outputs are off in the screened row, each in units of its tolerance.

        Args:
            outputs: of that row, or of all.
            cut: whether of all.
        """
        outputs, golden = self._of_rows(outputs, cut), self._of_rows(self._golden, True)
        return [(outputs[name] - x) / self._size(name, golden) for name, x in golden.items()]

    def _size(self, name: str, golden: dict[str, Tensor]) -> float:
        """Of an output's tolerance."""
        return max(_norm(golden[name]), TINY) * self._tolerances[name]

    def _error(
        self, outputs: dict[str, Tensor], alone: bool, truth: dict[str, Tensor] | None = None, cut: bool = True
    ) -> float:
        """The largest relative error of an output, in units of its tolerance.

        Args:
            outputs: whose error it is.
            alone: whether in the screened row alone.
            truth: what they should be; None for the candidate's.
            cut: whether ``outputs`` are of all rows, also where one row counts alone.
        """
        truth = self._of_rows(self._candidate if truth is None else truth, alone)
        golden = self._of_rows(self._golden, alone)
        outputs = self._of_rows(outputs, alone) if cut else outputs
        return max(_norm(outputs[name].double() - x) / self._size(name, golden) for name, x in truth.items())


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
