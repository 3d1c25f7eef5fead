"""Ranks hypotheses by what they leave of every failed tensor's error, where outputs tell too little.

Of a loss, one number, many a mistake makes another. Where every output is within what the precision costs, as a loss
often is in BF16, no mistake can be told by outputs at all. What a parameter's gradient would be tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from parity.diagnosis.budget import Budget, while_it_lasts
from parity.diagnosis.failure import Failure, few_outputs
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.pairs import Effects
from parity.diagnosis.screen import CHANGES, EXACT, FAITHFUL, TINY, Ranked
from parity.diagnosis.trial import tensors_under
from parity.passes import Tensors
from parity.result import Kind

_NEAR = 3.0  # tolerances by which an output may differ: a mistake may cost more rounding than the reference does
_HELPS = 0.9  # of an output's error before, ditto where that is more
_PARTIAL = 3.0  # ditto of a mistake that may explain a part alone: of one number the rest may take back what it adds
_AT_LEAST = 0.4  # of a tolerance, which is near enough where the rounding model says too little


def outputs_tell_little(failure: Failure) -> bool:
    """Whether gradients failed, and outputs are few numbers or all passed."""
    gradients = any(not one.passed and one.kind != "output" and one.finite for one in failure.results)
    return gradients and (few_outputs(failure) or all(result.passed for result in failure.outputs))


class GradientScreen:
    """Ranks hypotheses by the share of the failed tensors' errors that they leave, in their root mean square.

    An error is counted in tolerances of its tensor. Gradients are computed, in FP64, of hypotheses whose outputs may be
    the candidate's.
    """

    def __init__(self, failure: Failure) -> None:
        self._prepared = failure.prepared
        self._golden = failure.golden
        self._candidate = {key: x.double() for key, x in failure.candidate.items()}
        self._tolerances = {(one.kind, one.name): one.tolerance_relative_l2 for one in failure.results}
        self._failed = {
            (one.kind, one.name): max(FAITHFUL * one.expected.relative_l2 / one.tolerance_relative_l2, _AT_LEAST)
            for one in failure.results
            if not one.passed and one.finite
        }
        self._before = self._errors(self._golden)
        self._outputs_before = self._away(failure.prepared.golden.outputs)
        self.effects = Effects.of(self._effect(self._candidate))

    def shares(self, combinations: Iterable[tuple[Hypothesis, ...]], budget: Budget) -> Iterator[Ranked]:
        """Combinations with the share of the errors that each leaves; those with other outputs are left out.

        Of an iterator, none is taken that the budget does not last for.
        """
        for combination in while_it_lasts(combinations, budget):
            # What is made at one of several places, or with another number, may be a part of what is wrong.
            most = _PARTIAL if any(one.place or one.tuned for one in combination) else _HELPS
            tensors = tensors_under(self._prepared, combination, only_if=partial(self._are_near, most))
            if tensors is not None:
                share = _mean(self._errors(tensors)) / max(_mean(self._before), TINY)
                if math.isfinite(share) and abs(share - 1.0) > CHANGES:
                    if len(combination) == 1:
                        self.effects.note(combination[0], self._effect(tensors))
                    yield share, combination

    def is_exact(self, entry: Ranked) -> bool:
        """Whether what is left is no more than a faithful port at the precision has."""
        return entry[0] < EXACT and entry[0] * _mean(self._before) <= _mean(self._failed)

    def _are_near(self, most: float, outputs: Mapping[str, Tensor]) -> bool:
        """Whether outputs may be the candidate's: off by no more than so many times what golden's are."""
        away = self._away(outputs)
        return all(one <= max(_NEAR, most * self._outputs_before[name]) for name, one in away.items())

    def _away(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """How far outputs are from the candidate's, in tolerances; infinitely where they have other shapes."""
        found = {}
        for key in (key for key in self._golden if key[0] == "output"):
            x, size = outputs.get(key[1]), self._size(key)
            alike = x is not None and x.shape == self._golden[key].shape
            found[key[1]] = _norm(x - self._candidate[key]) / size if x is not None and alike else math.inf
        return found

    def _size(self, key: tuple[Kind, str]) -> float:
        """Of a tensor's tolerance."""
        return max(_norm(self._golden[key]), TINY) * self._tolerances[key]

    def _effect(self, tensors: Tensors) -> list[Tensor]:
        """By how much the failed tensors are off, each in units of its tolerance."""
        return [(tensors[key] - self._golden[key]) / self._size(key) for key in self._failed]

    def _errors(self, tensors: Tensors) -> dict[tuple[Kind, str], float]:
        """Of the failed tensors, in tolerances."""
        return {key: _norm(tensors[key] - self._candidate[key]) / self._size(key) for key in self._failed}


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def _mean(values: Mapping[tuple[Kind, str], float]) -> float:
    """Their root mean square."""
    return math.sqrt(sum(value**2 for value in values.values()) / max(len(values), 1))
