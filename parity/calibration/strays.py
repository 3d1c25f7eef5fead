"""What is said of limits that differ from the packaged ones, when a table is made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parity.calibration.measure import Sample
from parity.limits import against_packaged
from parity.limits.difference import TIMES, Difference, OfPrecision
from parity.limits.law import Law
from parity.limits.table import Key, Table, packaged
from parity.report.numbers import plural, short

# How many limits and pairs are named.
_MOST = 3


def refusal(strays: Mapping[Key, Difference], samples: Sequence[Sample], laws: Mapping[Key, Law], output: Path) -> str:
    """Say why limits are not written, which pairs widen them, and what to do.

    Args:
        strays: the limits that lie far outside of the packaged ones, the widest first.
        samples: all that was measured.
        laws: what was fitted to them.
        output: where the table would be.
    """
    limits = [f"{_key(key)} {short(each.limit)} instead of {short(each.packaged)}" for key, each in strays.items()]
    pairs = [
        f"{pair} ({_key(key, tensor=tensor)} is {short(abs(value))}, where {short(packaged().limit(*key))} passes)"
        for pair, (key, tensor, value) in _farthest(strays, samples).items()
    ]
    kept = "it stays as it is" if output.exists() else "it is not written"
    return (
        f"{len(strays)} of {plural(len(laws), 'limit')} would lie far outside of the packaged ones: {_few(limits)}; "
        f"farthest off {'is' if len(pairs) == 1 else 'are'} {_few(pairs)}; a wrong port would look the same, and pass "
        "by these limits, so compare each with the packaged ones (parity run), and leave out what fails; if all are "
        f"right, and these kernels round so, say --accept-wider; {output}: {kept}"
    )


def told(strays: Sequence[Difference]) -> str:
    """Say in a table what of its limits at one precision was far outside, and accepted; the widest comes first."""
    worst = strays[0]
    return (
        f"{plural(len(strays), 'limit')} far outside of the packaged ones, up to {short(worst.ratio)} times "
        f"({worst.statistic} of {_plural(worst.kind)}: {short(worst.limit)} instead of {short(worst.packaged)})"
    )


def summary(table: Table, precisions: Sequence[str]) -> Iterator[str]:
    """A line for each of these precisions of a table: how its limits compare with the packaged ones."""
    for found in against_packaged.compared(table):
        if found.precision in precisions:
            yield f"{found.precision}: {'; '.join(_facts(found))}"


def _facts(found: OfPrecision) -> Iterator[str]:
    if found.widest is not None and found.tightest is not None:
        low, high = short(found.tightest.ratio), short(found.widest.ratio)
        yield f"{plural(found.shared, 'limit')}, {low} to {high} times the packaged ones"
    if found.wider:
        yield f"{found.wider} more than {TIMES:g} times as wide"
    if found.tighter:
        yield f"{found.tighter} less than 1/{TIMES:g} as wide: what passes by the packaged ones may fail"
    if found.unknown:
        yield f"{plural(found.unknown, 'limit')} that the packaged table has no law for, compared with nothing"
    if found.accepted:
        yield f"accepted: {found.accepted}"


def _farthest(strays: Mapping[Key, Difference], samples: Sequence[Sample]) -> dict[str, tuple[Key, str, float]]:
    """Of each pair, at whichever size, what lies farthest beyond its packaged limit; the farthest pair first."""
    beyond: dict[str, list[tuple[float, Key, str, float]]] = defaultdict(list)
    for sample in samples:
        key = sample.precision, sample.kind, sample.statistic
        if key in strays:
            ratio = abs(sample.value) / packaged().limit(*key)
            beyond[sample.case.partition(" ")[0]].append((ratio, key, sample.tensor, sample.value))
    worst = {pair: max(found, key=lambda each: each[0]) for pair, found in beyond.items()}
    ordered = sorted(worst.items(), key=lambda entry: -entry[1][0])
    return {pair: found[1:] for pair, found in ordered if found[0] > 1.0}


def _key(key: Key, tensor: str = "") -> str:
    """``norm of output in bf16``; of a certain tensor, if there is one."""
    return f"{key[2]} of {tensor or _plural(key[1])} in {key[0]}"


def _plural(kind: str) -> str:
    return f"{kind}s"


def _few(entries: Sequence[str]) -> str:
    others = len(entries) - _MOST
    return ", ".join([*entries[:_MOST], *([f"and {others} more"] if others > 0 else [])])
