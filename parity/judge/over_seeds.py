"""Judge what several seeds show together: an error that leans the same way at each of them, within each one's limits.

A bias does not average out as rounding does: attention in FP8 whose probabilities are rounded down makes a training
diverge (arXiv 2510.04212), and so may a factor on each gradient that a format costs (arXiv 2506.20752).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from scipy import special

from parity.judge.limits import SIGNED
from parity.mistakes.codes import repairable
from parity.result import Check, Finding, Result
from parity.shown import few_of

# Kernels that round otherwise than the model lean by up to one standard deviation of a single seed, at every seed.
_OWN_LEANING = 1.0
_MOST_TOLD = 3


def judge_together(results: Sequence[Result]) -> list[Result]:
    """Return the results of one comparison at several seeds, the last as a failure if all pass and lean alike.

    Chance moves a mean of n seeds by the square root of n less than one of them, so the limit of one seed holds for
    what is left of the mean without the leaning that every kernel is granted, times that root.
    """
    passing = [result for result in results if result.passed and not result.steps]
    if len(results) < 2 or len(passing) < len(results):
        return list(results)
    checks: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for result in results:
        for tensor in result.tensors:
            for check in tensor.checks:
                if check.statistic in SIGNED:
                    checks[tensor.label, check.where].append(check)
    found = [
        (label, where, some)
        for (label, where), some in checks.items()
        if len(some) == len(results) and _pool_seeds(some) > some[0].limit
    ]
    if not found:
        return list(results)
    *others, last = results
    reason = "each seed is within its limits, but all lean the same way"
    seeds = ",".join(str(result.seed) for result in results)
    found.sort(key=lambda one: -_pool_seeds(one[2]) / one[2][0].limit)
    finding = _finding_of([_describe_bias(label, where, some) for label, where, some in found], len(results), seeds)
    return [*others, replace(last, status="failed", reason=reason, findings=(*last.findings, finding))]


def _pool_seeds(checks: Sequence[Check]) -> float:
    """Return the mean of a signed statistic over seeds, in standard deviations of that mean."""
    return max(0.0, abs(fmean(check.value for check in checks)) - _OWN_LEANING) * math.sqrt(len(checks))


def _describe_bias(label: str, where: str, checks: Sequence[Check]) -> str:
    shares = [check.coefficient for check in checks]
    half = float(stdev(shares) / math.sqrt(len(shares)) * special.stdtrit(len(shares) - 1, 0.975))
    of = f"the change that {where} would make" if where else "the tensor itself"
    return f"the error of {label} contains {fmean(shares):+.2g} (95 % interval ± {half:.1g}) times {of}"


def _finding_of(described: Sequence[str], count: int, seeds: str) -> Finding:
    evidence = f"over {count} seeds, {few_of(described, _MOST_TOLD)}, more than kernels lean or chance explains"
    repair = f"look for a rounding that is not to nearest, or a factor; --parity-seeds={seeds} shows it again"
    return repairable("bias", evidence, repair)
