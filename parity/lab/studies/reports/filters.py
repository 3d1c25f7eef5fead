"""Draw the report of the study ``filters``: which mistakes nobody could detect at these sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from scipy import special

from parity.judge.limits import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.lab.studies.filters import Seen, Settings, Wrong
from parity.lab.studies.reports.shared import made_on, texts
from parity.lab.studies.rows.names import ROWS
from parity.te import kernels

# The least limit of a signed statistic, whose deviation is known exactly.
LIMIT = -float(special.ndtri(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN / 2))


def write(found: Mapping[Wrong, Seen], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    path = folder / "filters.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def _sections(found: Mapping[Wrong, Seen], settings: Settings) -> Iterator[str]:
    yield "# What a filter could see of the mistakes that pass"
    yield (
        "Some wrong ports of [the study of names](names.md) pass. Is that because parity does not look, or because "
        "there is nothing to see? For each of them, the mistake's change of golden (the port's own code in FP64, with "
        "the mistake and without) is the signal, and a matched filter for it the best that looks at one tensor. Its "
        f"noise is what {settings.runs} runs of the rounding model have along the change, if each rounding is drawn "
        f"anew. {made_on(kernels('cpu'))} Seed {settings.seed}."
    )
    yield (
        f"A right port may exceed a limit once in {STATISTICS_A_RUN / FALSE_ALARMS_A_RUN:,.0f} times, so a mistake "
        f"needs a ratio of {LIMIT:.2g} to be detected every other time, and of {LIMIT + 2:.2g} nearly always. *In one "
        "tensor* is the best of outputs, outputs on probing inputs and gradients. *In all* weighs each element by its "
        "own error and joins the tensors by how their errors are correlated; both are estimated from one half of the "
        "runs and tried on the other. A port that rounds most numbers just as the model does shows more than this, "
        "since what both share cancels."
    )
    for precision in settings.precisions:
        passed = {one: seen for one, seen in found.items() if one.precision == precision and seen.status == "passed"}
        judged = sum(one.precision == precision for one in found)
        yield f"## `{precision}`"
        yield f"Of {judged} wrong ports, {len(passed)} pass."
        if passed:
            yield texts(
                [_row(one, seen) for one, seen in sorted(passed.items(), key=lambda both: -both[1].joined)],
                [
                    "mistake",
                    "host",
                    "margin",
                    "best tensor",
                    "norm ratio",
                    "in one tensor",
                    "in all",
                    "is there enough",
                ],
            )


def _row(one: Wrong, seen: Seen) -> list[str]:
    enough = "yes" if seen.joined > LIMIT + 2 else "hardly" if seen.joined > LIMIT else "no"
    numbers = (f"{number:.2g}" for number in (seen.norm_ratio, seen.ratio, seen.joined))
    return [one.row, ROWS[one.row].host, f"{seen.margin:.2g}", seen.best, *numbers, enough]
