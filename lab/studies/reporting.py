"""Provide what reports share: fits, statistics over seeds, verdicts on claims, and tables."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from scipy import stats

from lab.studies.settings import Said
from parity import te
from parity.measuring import record
from parity.report import environment
from parity.report.numbers import markdown_table, short
from parity.te import Kernels

# The law of an error's growth with sizes: a power law in each size or, for some sizes, an exponential.


Sizes = Mapping[str, float]
# An exponential must fit better than a power law by this factor, because few points can hardly tell the two apart.
_CLEARLY = 1.05


@dataclass(frozen=True)
class Law:
    """The law ``base * prod((size / reference) ** exponent) * prod(rate ** (size - reference))``.

    Attributes:
        base: the error at the reference sizes.
        reference: the reference sizes.
        exponents: the exponent of each size in which the error is a power law.
        rates: the growth factor per unit of each size in which the error is exponential.
        worst_factor: the largest factor between a measurement and the law, at least 1.
    """

    base: float
    reference: Sizes
    exponents: Mapping[str, float]
    worst_factor: float
    rates: Mapping[str, float] = field(default_factory=dict)

    def at(self, sizes: Sizes) -> float:
        """Return the error that the law predicts."""
        powers = math.prod((sizes[name] / self.reference[name]) ** each for name, each in self.exponents.items())
        return (
            self.base
            * powers
            * math.prod(rate ** (sizes[name] - self.reference[name]) for name, rate in self.rates.items())
        )


def fit(
    measured: Sequence[tuple[Sizes, float]], reference: Sizes, perhaps_exponential: Sequence[str] = ()
) -> Law | None:
    """Fit a law to measurements by least squares of logarithms, and return it.

    Args:
        measured: sizes, each with its error; errors that are 0 or not finite are left out.
        reference: the law's reference; sizes that do not vary in the measurements get neither exponent nor rate.
        perhaps_exponential: sizes in which the error may be exponential.

    Returns:
        The law, or None if no measurement is left.
    """
    usable = [(sizes, error) for sizes, error in measured if 0.0 < error < math.inf]
    if not usable:
        return None
    varying = [name for name in reference if len({sizes[name] for sizes, _ in usable}) > 1]
    doubtful = [name for name in perhaps_exponential if name in varying]
    choices = itertools.chain.from_iterable(itertools.combinations(doubtful, n) for n in range(len(doubtful) + 1))
    first, *others = (_fit(usable, reference, varying, exponential) for exponential in choices)
    best = min(others, key=lambda law: law.worst_factor, default=first)
    return best if best.worst_factor * _CLEARLY < first.worst_factor else first


def _fit(
    measured: Sequence[tuple[Sizes, float]], reference: Sizes, varying: Sequence[str], exponential: Sequence[str]
) -> Law:
    def coordinate(sizes: Sizes, name: str) -> float:
        if name in exponential:
            return sizes[name] - reference[name]
        return math.log(sizes[name] / reference[name])

    design = np.array([[1.0, *(coordinate(sizes, name) for name in varying)] for sizes, _ in measured])
    errors = np.log([error for _, error in measured])
    solution = np.linalg.lstsq(design, errors, rcond=None)[0]
    slopes = dict(zip(varying, solution[1:].tolist(), strict=True))
    return Law(
        base=math.exp(solution[0]),
        reference=dict(reference),
        exponents={name: slope for name, slope in slopes.items() if name not in exponential},
        worst_factor=math.exp(np.abs(design @ solution - errors).max()),
        rates={name: math.exp(slope) for name, slope in slopes.items() if name in exponential},
    )


# Statistics of a figure over seeds: the interval of its mean, verdicts, reliable digits, and its place among draws.


YES, NO, CANNOT_TELL = "yes", "no", "cannot tell"
_CONFIDENCE = 0.95


def interval(of_seeds: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t, which is infinite with only one seed."""
    mean, count = statistics.fmean(of_seeds), len(of_seeds)
    if count < 2:
        return -math.inf, math.inf
    reach = stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1) * statistics.stdev(of_seeds) / math.sqrt(count)
    return mean - reach, mean + reach


def between(of_seeds: Sequence[float], low: float, high: float) -> str:
    """Say whether a mean over seeds lies between two bounds. If its interval contains a bound, that cannot be told."""
    if not all(map(math.isfinite, of_seeds)):
        return NO
    lower, upper = interval(of_seeds)
    if low <= lower and upper <= high:
        return YES
    return NO if upper < low or high < lower else CANNOT_TELL


def ratios_between(of_seeds: Sequence[float], low: float, high: float) -> str:
    """Say whether the geometric mean of ratios lies between two bounds, as ``between`` does."""
    return between([_log(ratio) for ratio in of_seeds], _log(low), _log(high))


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio at each seed, infinite if the divisor is 0."""
    return [one / other if other else math.inf for one, other in zip(ones, others, strict=True)]


def ratio_interval(of_seeds: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and the two ends of its 95 % interval."""
    logarithms = [_log(ratio) for ratio in of_seeds]
    middle, (lower, upper) = statistics.fmean(logarithms), interval(logarithms)
    return math.exp(middle), math.exp(lower), math.exp(upper)


def all_of(verdicts: Sequence[str]) -> str:
    """Combine verdicts on parts of a claim: their common verdict, or partly for both yes and no, else cannot tell."""
    if {YES, NO} <= set(verdicts):
        return "partly"
    return verdicts[0] if len(set(verdicts)) == 1 else CANNOT_TELL


def digits(value: float, of_seeds: Sequence[float]) -> str:
    """Format a mean over seeds with the digits that other seeds would reproduce, at most two (three from 100 on).

    A unit of the last digit is at least the standard deviation of the difference between two such means. ``~`` means
    that not even the first digit is sure, as with only one seed.
    """
    if not math.isfinite(value) or value == 0.0:
        return short(value)
    if len(of_seeds) < 2:
        return f"~{short(value, 1)}"
    doubt = math.sqrt(2 / len(of_seeds)) * statistics.stdev(of_seeds)
    if doubt == 0.0:
        return short(value)
    sure = math.floor(math.log10(abs(value))) - math.ceil(math.log10(doubt)) + 1
    return short(value, min(sure, 2)) if sure > 0 else f"~{short(value, 1)}"


def mean_digits(of_seeds: Sequence[float]) -> str:
    """Format the mean over seeds, see ``digits``."""
    return digits(statistics.fmean(of_seeds), of_seeds)


@dataclass(frozen=True)
class Placed:
    """The place of a figure in the distribution of draws, modelled as Student's t with their mean and deviation.

    Attributes:
        below: the share of draws below the figure.
        deviations: how many standard deviations the figure lies above the mean.
        chance: the probability that one more draw is at least as far from the mean.
        as_small: the probability that one more draw is no larger in magnitude.
        density: the probability density at the figure.
    """

    below: float
    deviations: float
    chance: float
    as_small: float
    density: float


def placed(figure: float, draws: Sequence[float]) -> Placed:
    """Return the place of a figure among at least two draws."""
    count, mean = len(draws), statistics.fmean(draws)
    deviation = max(statistics.stdev(draws), 1e-300)  # if all draws are equal, no other figure is possible
    spread = deviation * (1 + 1 / count) ** 0.5
    student = stats.t(count - 1)
    away = (figure - mean) / spread
    ends = ((sign * abs(figure) - mean) / spread for sign in (-1, 1))
    below, above = (float(student.cdf(end)) for end in ends)
    return Placed(
        below=sum(each < figure for each in draws) / count,
        deviations=(figure - mean) / deviation,
        chance=2 * float(student.sf(abs(away))),
        as_small=above - below,
        density=float(student.pdf(min(abs(away), 1e100))) / spread,
    )


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


# Tables, including the table of claims that most reports have.


@dataclass(frozen=True)
class Claim:
    """A source's claim next to what a study found.

    Attributes:
        source: where the claim was made.
        claimed: the claim, with the source's figure.
        found: this study's figures.
        agrees: yes, no, or under which condition, in words.
        why: the reason for the agreement or disagreement.
    """

    source: str
    claimed: str
    found: str
    agrees: str
    why: str


def verdict(holds: Sequence[bool]) -> str:
    """Say whether a claim that was tested in several ways holds: yes, no, or partly."""
    if all(holds):
        return "yes"
    return "partly" if any(holds) else "no"


def numbers(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a markdown table with right-aligned columns."""
    return markdown_table(rows, headers, left=0)


def texts(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a markdown table with left-aligned columns."""
    return markdown_table(rows, headers, left=len(headers))


def claims(found: Iterable[Claim]) -> str:
    """Return the table of claims."""
    rows = [[claim.source, claim.claimed, claim.found, claim.agrees, claim.why] for claim in found]
    return texts(rows, ["source", "its claim", "ours", "agree", "why"])


One = TypeVar("One", bound="OfPrecision")


class OfPrecision(Protocol):
    """Anything that was judged at a precision."""

    @property
    def precision(self) -> str: ...


def rates(
    wrong: Mapping[One, Said],
    right: Mapping[One, Said],
    precisions: Sequence[str],
    outcome_of: Callable[[One, Said], str],
) -> str:
    """Return a table of how many were detected, named and rejected, with a row for each precision with wrong ones."""
    rows = []
    for name in precisions:
        of = [(one, said) for one, said in wrong.items() if one.precision == name]
        rights = [said for one, said in right.items() if one.precision == name]
        if of:
            outcomes = [outcome_of(one, said) for one, said in of]
            detected = sum(each in ("named", "detected") for each in outcomes)
            rejected = sum(said.status != "passed" for said in rights)
            seconds = [said.seconds for _, said in of] + [said.seconds for said in rights]
            most = f"{short(statistics.median(seconds))}, {short(max(seconds))}"
            rows.append((f"`{name}`", len(of), detected, outcomes.count("named"), len(rights), rejected, most))
    headers = ("precision", "wrong", "detected", "named", "right", "rejected", "seconds, median and most")
    return markdown_table(rows, headers, left=1)


def made_on(kernels: Kernels) -> str:
    """Say which device and versions TE's figures come from."""
    device = environment.gpu_name() if kernels.backend == "gpu" else "the CPU"
    return (
        f"TE's kernels here are {environment.KERNELS[kernels.backend]}. Everything ran on {device}, with "
        f"TransformerEngine {te.version()} and torch {torch.__version__}."
    )


def written(path: Path, sections: Iterable[str]) -> Path:
    """Write a study's report with these sections, and return its path.

    The last line names the commit, and how many results in the record were computed by other code.
    """
    old = record.outdated(path.with_suffix(".jsonl"), record.code_of(f"{__package__}.{path.stem}.study"))
    kept = f"{old.results} of {old.of} results were kept from runs of other code." if old else ""
    return record.write_sections(path, [*sections, *filter(None, [kept])], f"python -m lab study {path.stem}")
