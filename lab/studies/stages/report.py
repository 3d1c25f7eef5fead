"""Draw the report of the study ``stages``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.studies import reporting
from lab.studies.stages.study import RIGHT_GROUPS, WRONG_GROUPS, Direction, Flagged, Seen, Settings, Trial
from parity import te
from parity.report.numbers import short

Found = Mapping[Trial, Seen]
LOCATIONS = ("exactly", "partly", "beside", "not")
_MAX_REASON = 160


def location_of(seen: Seen) -> str:
    """Say whether flagged stages are where the mistake is: ``exactly``, ``partly``, ``beside`` or ``not`` flagged."""
    held = [one.holds for one in seen.flagged]
    if not held:
        return "not"
    return "exactly" if all(held) else "partly" if any(held) else "beside"


def write(found: Found, settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "stages.md", _sections(found, settings))


def _sections(found: Found, settings: Settings) -> Iterator[str]:
    right = {one: seen for one, seen in found.items() if one.group in RIGHT_GROUPS}
    failing = {one: seen for one, seen in right.items() if seen.status == "failed"}
    wrong = {one: seen for one, seen in found.items() if one.group in WRONG_GROUPS}
    yield "# Whether stages are right where ports are"
    yield (
        "A stage lies between values that both sides compute. The reference computes it again from the port's own "
        "values at its beginning, and its end is compared with the port's. No stage of a right port may be flagged, "
        "and those of a wrong port should be where its mistake is. "
        + reporting.made_on(te.kernels("cpu"))
        + " Each port has its first size. Seconds are processor time, on a machine that others use."
    )
    if right:
        yield "## Right ports"
        yield (
            "*Ends* says how many stages have an end that was matched by a weight, by agreement, by what follows, or "
            "by its name. *Ratio* and *gain* are of the stages that compute something: the error over the expected "
            "error, and the error's share along golden in standard deviations of rounding, here its size. Flagged "
            "stages are those on the pair's inputs or, if there are none, forward ones on probing inputs. Ports that "
            "fail as a whole are not counted."
        )
        yield _tabulate_right_ports(right, settings)
        yield from _list_flagged_of_right_ports({one: seen for one, seen in right.items() if one not in failing})
    if failing:
        yield "### Ports that fail as a whole"
        yield (
            "Some modules of the corpus are wrong as they are, and right with a setting. Any other port here is a "
            "false alarm of the verdict."
        )
        rows = [
            [one.group, one.port, f"`{one.precision}`", str(one.seed), short(seen.margin), str(len(seen.flagged))]
            for one, seen in failing.items()
        ]
        yield reporting.texts(rows, ["ports from", "port", "precision", "seed", "margin", "flagged stages"])
    if wrong:
        yield "## Wrong ports"
        yield (
            "*Exactly*: each flagged stage holds a call that the mistake is about. *Partly*: some do. *Beside*: none "
            "does. *Not*: no stage is flagged, neither on the pair's inputs nor on probing ones. *First*: the first "
            "flagged stage holds such a call; forward ones come before backward ones. *Hypotheses left*: "
            "the share of known mistakes that edit a call of a flagged stage, the median of the ports whose mistake is "
            "located exactly."
        )
        yield _tabulate_wrong_ports(wrong, settings)
        yield from _list_not_located(wrong)
    yield "## Cost"
    yield _tabulate_cost(found, settings)
    yield from _list_unjudged(found)


def _group_trials(found: Found, settings: Settings) -> Iterator[tuple[str, str, Found]]:
    """Yield each group and precision with its trials, if it has any."""
    for group in settings.groups:
        for precision in settings.precisions:
            some = {one: seen for one, seen in found.items() if (one.group, one.precision) == (group, precision)}
            if some:
                yield group, precision, some


def _judged_stages(found: Found) -> dict[Trial, Seen]:
    """Return the trials whose stages were judged."""
    return {one: seen for one, seen in found.items() if not seen.reason}


# Right ports.


def _tabulate_right_ports(right: Found, settings: Settings) -> str:
    rows = []
    for group, precision, some in _group_trials(right, settings):
        judged = {one: seen for one, seen in _judged_stages(some).items() if seen.status == "passed"}
        for way in ("forward", "backward"):
            flagged = [one for seen in judged.values() for one in seen.flagged if one.backward == (way == "backward")]
            ports = sum(any(one.backward == (way == "backward") for one in seen.flagged) for seen in judged.values())
            rows.append(
                [
                    group,
                    f"`{precision}`",
                    way,
                    f"{len(judged)} of {len(some)}",
                    *_describe_directions([getattr(seen, way) for seen in judged.values()]),
                    str(sum(seen.unmatched for seen in judged.values())) if way == "forward" else "",
                    f"{len(flagged)} in {ports}",
                ]
            )
    headers = [
        "ports from",
        "precision",
        "stages",
        "judged",
        "number",
        "ends: weights, agrees, next, output",
        "computing (a port)",
        "ratio: median, 99 %, most",
        "gain: 99 %, most",
        "unmatched",
        "flagged stages in ports",
    ]
    return reporting.texts(rows, headers)


def _describe_directions(several: Sequence[Direction]) -> Iterator[str]:
    """Yield the cells on the stages of several ports in one direction."""
    ends = Counter[str]()
    for one in several:
        ends.update(one.evidence)
    counts = [len(one.ratios) for one in several]
    ratios = [ratio for one in several for ratio in one.ratios]
    gains = [abs(gain) for one in several for gain in one.gains]
    yield str(sum(one.stages for one in several))
    yield ", ".join(str(ends[evidence]) for evidence in ("weights", "agrees", "next", "output"))
    yield f"{sum(counts)} ({min(counts)} to {max(counts)})" if counts else "0"
    yield ", ".join(short(_find_quantile(ratios, share), 3) for share in (0.5, 0.99, 1)) if ratios else "–"
    yield ", ".join(short(_find_quantile(gains, share)) for share in (0.99, 1)) if gains else "–"


def _find_quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _list_flagged_of_right_ports(right: Found) -> Iterator[str]:
    rows = [
        [one.group, one.port, f"`{one.precision}`", str(one.seed), seen.status, *_describe_flagged(flagged)]
        for one, seen in right.items()
        for flagged in seen.flagged
    ]
    yield "### Flagged stages"
    if rows:
        yield reporting.texts(rows, ["ports from", "port", "precision", "seed", "verdict", *_OF_FLAGGED])
    else:
        yield "There are none."


_OF_FLAGGED = ("end", "ratio", "gain", "matched by", "port's function", "calls")


def _describe_flagged(one: Flagged) -> list[str]:
    by_module: dict[str, dict[str, None]] = {}
    for call in one.calls:
        module, _, function = call.rpartition(" ")
        by_module.setdefault(module, {})[function] = None
    listed = "; ".join(f"{module}: {' '.join(functions)}" for module, functions in by_module.items())
    end = f"{one.end}, on probing inputs" if one.probed else one.end
    return [end, short(one.ratio), short(one.gain), one.evidence, one.watched, f"{len(one.calls)} calls: {listed}"]


# Wrong ports.


def _tabulate_wrong_ports(wrong: Found, settings: Settings) -> str:
    rows = []
    for group, precision, some in _group_trials(wrong, settings):
        judged = _judged_stages(some)
        located = {one: location_of(seen) for one, seen in judged.items()}
        counts = Counter(located.values())
        exact = [seen for one, seen in judged.items() if located[one] == "exactly"]
        passed = [one for one, seen in judged.items() if seen.status == "passed"]
        shares = [seen.touching / seen.hypotheses for seen in exact if seen.hypotheses]
        rows.append(
            [
                group,
                f"`{precision}`",
                f"{len(judged)} of {len(some)}",
                str(sum(seen.status == "failed" for seen in some.values())),
                f"{counts['exactly']} ({sum(len(seen.flagged) == 1 for seen in exact)} in one stage)",
                *(str(counts[location]) for location in LOCATIONS[1:]),
                str(sum(seen.flagged[0].holds for seen in judged.values() if seen.flagged)),
                f"{sum(located[one] == 'exactly' for one in passed)} of {len(passed)}",
                f"{statistics.median(shares):.0%}" if shares else "–",
            ]
        )
    headers = [
        "table",
        "precision",
        "judged",
        "fail",
        *LOCATIONS,
        "first",
        "pass, but located exactly",
        "hypotheses left",
    ]
    return reporting.texts(rows, headers)


def _list_not_located(wrong: Found) -> Iterator[str]:
    rows = [
        [location, one.port, f"`{one.precision}`", seen.status, short(seen.margin), held, *cells]
        for one, seen in _judged_stages(wrong).items()
        if (location := location_of(seen)) != "exactly"
        for held, cells in [_describe_first_beside(seen.flagged)]
    ]
    if rows:
        yield "### Not located exactly, with the first flagged stage that holds no call of the mistake"
        yield reporting.texts(rows, ["located", "port", "precision", "verdict", "margin", "hold it", *_OF_FLAGGED])


def _describe_first_beside(flagged: Sequence[Flagged]) -> tuple[str, list[str]]:
    """Return how many stages hold a call of the mistake, and the cells on the first that holds none."""
    beside = [one for one in flagged if not one.holds]
    cells = _describe_flagged(beside[0]) if beside else [""] * len(_OF_FLAGGED)
    return f"{len(flagged) - len(beside)} of {len(flagged)}", cells


# Cost, and ports whose stages could not be judged.


def _tabulate_cost(found: Found, settings: Settings) -> str:
    rows = []
    for group, precision, some in _group_trials(found, settings):
        judged = _judged_stages(some).values()
        if not judged:
            continue
        verdicts, stages = [one.verdict_seconds for one in judged], [one.stage_seconds for one in judged]
        seconds = (f"{short(statistics.median(each))}, {short(max(each))}" for each in (verdicts, stages))
        rows.append([group, f"`{precision}`", str(len(judged)), *seconds, f"{sum(stages) / sum(verdicts):.0%}"])
    headers = [
        "ports",
        "precision",
        "number",
        "verdict: median, most",
        "stages: median, most",
        "all stages over all verdicts",
    ]
    return reporting.texts(rows, headers)


def _list_unjudged(found: Found) -> Iterator[str]:
    ports: dict[tuple[str, ...], dict[str, None]] = {}
    for one, seen in found.items():
        if seen.reason:
            key = one.group, f"`{one.precision}`", seen.status, seen.reason[:_MAX_REASON]
            ports.setdefault(key, {})[one.port] = None
    if ports:
        yield "## Not judged"
        yield (
            "A verdict of *error* means that the port cannot be compared as a whole, for the reason told. Otherwise "
            "the reference cannot be computed stage by stage."
        )
        yield reporting.texts(
            [[*key, f"{len(names)}: {', '.join(names)}"] for key, names in ports.items()],
            ["group", "precision", "verdict", "reason", "ports"],
        )
