"""Halve and double each number that is set by hand to judge passes and trainings, and count which verdicts change.

    python scripts/judge_constants.py [-o reports/judge_constants.md] [--only statistics._LEANING ...]

The passes of a port do not depend on these numbers, so each is made once, and only the verdict is reached anew.
Verdicts are kept in ``build/judge_constants.jsonl``, so that a run that was stopped goes on; remove it after a change
of code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import special

from lab.corpus.catalogue import PLANTED, PORTS
from lab.corpus.port import at_size
from lab.studies.trainings import study as trainings
from parity import comparison, te
from parity.case.validate import check_case
from parity.judge import limits, second_look, statistics
from parity.measuring.false_alarms import upper_bound
from parity.measuring.hosts import HOSTS
from parity.measuring.record import Campaign, FourDigits, write_sections
from parity.measuring.right_ports import MODELS
from parity.report.numbers import markdown_table
from parity.te import PRECISIONS

ROOT = Path(__file__).resolve().parents[1]
REPORT, RECORD = ROOT / "reports" / "judge_constants.md", ROOT / "build" / "judge_constants.jsonl"

# The numbers: every one that a module of ``parity/judge`` binds to a name.


@dataclass(frozen=True)
class Number:
    """A number that is written in a module of ``parity/judge``.

    Attributes:
        module: the module.
        name: its name there.
        value: the number, or numbers by name.
        why: the comment that the module has on it.
    """

    module: Any
    name: str
    value: Any
    why: str


@functools.cache
def numbers() -> dict[str, Number]:
    """Return every number by which passes and trainings are judged, by module and name, such as ``limits.TIMES``."""
    found = {}
    of_trainings = (ROOT / "parity" / "trainings" / f"{name}.py" for name in ("band", "gathered", "step_verdicts"))
    for path in [*sorted((ROOT / "parity" / "judge").glob("*.py")), *of_trainings]:
        module = importlib.import_module(f"parity.{path.parent.name}.{path.stem}")
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.Assign) and any(_is_number(each) for each in ast.walk(node.value)):
                for name in (each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)):
                    number = Number(module, name, getattr(module, name), _comment(lines, node.lineno - 1))
                    if times(number.value, 1.0) is not None:
                        found[f"{path.stem}.{name}"] = number
    return found


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _comment(lines: Sequence[str], place: int) -> str:
    """Return the comment behind the line at a place or, without one, that above its group of lines."""
    behind = lines[place].partition("  # ")[2]
    if behind:
        return behind
    while lines[place].strip() and not lines[place].startswith("#"):
        place -= 1
    above = []
    while lines[place].startswith("#"):
        above.insert(0, lines[place].lstrip("# "))
        place -= 1
    return " ".join(above)


def times(value: Any, factor: float) -> Any:
    """Return a number, or each number of a mapping, times a factor; a share stays one. None for anything else."""
    if isinstance(value, dict) and value and all(isinstance(one, float) for one in value.values()):
        return {name: factor * one for name, one in value.items()}
    if isinstance(value, int) and not isinstance(value, bool):
        return max(1, round(factor * value))
    if not isinstance(value, float):
        return None
    return min(factor * value, 1.0) if 0.1 < value < 1.0 else factor * value


@contextmanager
def multiplied(key: str, factor: float) -> Iterator[None]:
    """Multiply a number within the context, wherever parity reads it."""
    number = numbers()[key]
    readers = [number.module]
    if not number.name.startswith("_"):  # others may have imported it
        readers += [module for name, module in sys.modules.items() if name.startswith("parity.")]
    with pytest.MonkeyPatch.context() as patch:
        for module in readers:
            if vars(module).get(number.name) is number.value:
                patch.setattr(module, number.name, times(number.value, factor))
        # What follows from other numbers was computed when the modules were imported.
        rate = limits.FALSE_ALARMS_A_RUN / limits.STATISTICS_A_RUN
        patch.setattr(limits.Law.limit, "__defaults__", (rate,))
        patch.setattr(statistics, "_DEVIATIONS", -float(special.ndtri(rate)))
        patch.setattr(statistics, "_CHANCE", float(special.ndtr(statistics._BY_CHANCE)))
        limits._compute_limit.cache_clear()
        yield
    limits._compute_limit.cache_clear()


# The ports: the right and the wrong ones whose margins are nearest to 1. Others do not change with a factor of 2.


SEED, STEPS = 508, 3  # a seed that no limit was fitted to; steps of a training
# The bugs of the zoo that have a margin near 1 at some precision (``reports/zoo.md``).
NEAR_BUGS = (
    "norm-weight-not-copied",
    "eps-1e-06-in-a-layer",
    "norm-statistics-in-bf16",
    "norm-rounds-before-weight",
    "gelu-tanh-for-erf",
    "quick-gelu-for-erf",
    "quick-gelu-for-gelu",
    "swiglu-alpha-wrong",
    "rope-keys-one-position-late",
    "gradient-accumulated-in-bf16",
    "product-accumulated-in-bf16",
    "master-weights-truncated",
    "master-weights-missing",
    "betas-of-another-optimizer",
    "fp8-weight-cache-stale",
    "fp8-transpose-cache-stale",
)
RIGHT_TRAININGS = ("plain", "clipping", "a schedule", "SGD", "Lion", "Adagrad")
WRONG_TRAININGS = (
    "a learning rate 2 % off",
    "beta2 of 0.999",
    "eps of 1e-4",
    "moments in BF16",
    "averages in FP32",
    "scales of gradients set to 1",
    "amax histories reset",
    "the input's amax for a weight",
)

TRAININGS = (*RIGHT_TRAININGS, *WRONG_TRAININGS)

Verdicts = dict[str, tuple[str, FourDigits]]
"""The status and the margin of each port, by its name."""


@dataclass(frozen=True)
class Judging:
    """Ports that are judged at one precision with one number multiplied.

    Attributes:
        precision: the precision's name.
        ports: names of ports: ``bug in host``, a host, a drawn model, or a training.
        number: the number's name in ``numbers``; empty for none.
        factor: what it is multiplied by.
    """

    precision: str
    ports: tuple[str, ...]
    number: str = ""
    factor: float = 1.0


def judged(asked: Judging) -> Verdicts:
    """Judge each port, with the number multiplied."""
    if not asked.number:
        return {port: _verdict(port, asked.precision) for port in asked.ports}
    with multiplied(asked.number, asked.factor):
        return {port: _verdict(port, asked.precision) for port in asked.ports}


def _verdict(port: str, precision: str) -> tuple[str, float]:
    if port in _trainings(precision):
        said = trainings.said_of(_trainings(precision)[port])
        return said.status, said.margin if math.isfinite(said.margin) else math.nan
    bug, _, host = port.rpartition(" in ")
    case = at_size(PORTS[bug, host].case if bug else HOSTS[host], "small") if host in HOSTS else MODELS[host]
    case = dataclasses.replace(case, name=port)
    kernels = te.kernels("cpu")
    (checked,) = check_case(case, kernels.te)
    at = case, checked, PRECISIONS[precision], SEED, kernels, limits.packaged()
    result = comparison.judge_at(*at).result
    return result.status, result.margin if math.isfinite(result.margin) else math.nan


@functools.cache
def _trainings(precision: str) -> dict[str, trainings.Training]:
    """Return the chosen trainings of an MLP that there are at a precision, by name."""
    asked = trainings.trainings(trainings.Settings((precision,), STEPS, seeds=1))
    return {one.name: one for one in asked if one.name in TRAININGS and (one.host, one.switch) == ("mlp", "")}


def ports_of(precision: str, models: int) -> tuple[str, ...]:
    """Return the names of the hosts, of some drawn models, and of the bugs near a limit, at a precision."""
    hosts = [name for name, host in HOSTS.items() if host.runs_at(precision)]
    bugs = [bug for ports in PLANTED.values() for bug in ports if bug.name in NEAR_BUGS and bug.occurs_at(precision)]
    wrong = [f"{bug.name} in {bug.host}" for bug in bugs]
    return (*hosts, *list(MODELS)[:models], *wrong)


def is_wrong(port: str) -> bool:
    """Return whether a port or training has a mistake."""
    return (*port.split(" in "),) in PORTS or port in WRONG_TRAININGS


def nearest(verdicts: Verdicts, right: int, wrong: int) -> tuple[str, ...]:
    """Return the right and the wrong ports that are nearest to their limits; of the wrong ones, half are detected."""

    def distance(port: str) -> float:
        return abs(math.log(max(verdicts[port][1], 1e-9)))

    ordered = sorted((port for port, (status, _) in verdicts.items() if status in ("passed", "failed")), key=distance)
    chosen = [port for port in ordered if not is_wrong(port)][:right]
    for status, count in (("failed", wrong - wrong // 2), ("passed", wrong // 2)):
        chosen += [port for port in ordered if is_wrong(port) and verdicts[port][0] == status][:count]
    return tuple(chosen)


@contextmanager
def passes_made_once() -> Iterator[None]:
    """Keep every pass within the context: golden, the model's, and the candidate's. Ports have names of their own."""
    kept: dict[Any, Any] = {}

    def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            at = function.__name__, key(*args, **named)
            if at not in kept:  # the arguments are kept as well, so that no other object gets their ids
                kept[at] = function(*args, **named), args, named
            return kept[at][0]

        return made

    def golden(case: Any, checked: Any, dtype: Any, seed: int, kernels: Any) -> Any:
        return case.name, case.outputs, dtype

    def run(prepared: Any, rounding: Any, freedom: Any, kinks: Any = None, chosen: Any = None) -> Any:
        return id(prepared.cache), prepared.wide, rounding, freedom, id(kinks), chosen is None

    def of_port(*args: Any) -> Any:
        return id(args[-1].cache)

    run_model = once(second_look.run_model, run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "prepare", once(comparison.prepare, golden))
        patch.setattr(comparison, "_run_candidate", once(comparison._run_candidate, of_port))
        patch.setattr(comparison, "observe_port", once(comparison.observe_port, of_port))
        patch.setattr(second_look, "kinks_moved", once(second_look.kinks_moved, of_port))
        patch.setattr(comparison, "run_model", run_model)
        patch.setattr(second_look, "run_model", run_model)
        yield


# The report.


BY_HAND = "set by hand, not measured"
FROM = {
    "limits.FALSE_ALARMS_A_RUN": "chosen, as the rate to aim at",
    "limits.STATISTICS_A_RUN": "estimated, as its comment says",
    "judge._VANISHING": "derived: FP64 has 1e-16, times sums of some thousand terms",
    "statistics._VANISHING": "derived, like `judge._VANISHING`",
    "statistics._UNIT": "derived: FP32's format",
    "statistics._LEANING": "measured on runs of the model; no record of them is kept",
    "statistics._MEAN_ROUNDING": "derived: the mean over mantissas, not their root mean square",
    "statistics._FP32_STEPS": "reasoned: how many steps there are; not measured",
    "second_look.STILL_HOPELESS_MARGIN": "derived from the largest of 24 and of 4 draws; the threefold is by hand",
    "step_verdicts.ARITHMETIC": "reasoned: above FP32's arithmetic (5e-5), below what a setting changes; not measured",
    "step_verdicts._ROUNDINGS": "derived: ten roundings to FP32",
    "step_verdicts._CAST": "derived: BF16's format",
}
_FITTED = "read only when limits are fitted (`parity calibrate`)"
UNREAD = {
    "directions._FP64": "directions are computed with the passes, which are kept",
    "band": "the band of a training's curves is for information; no verdict reads it",
    "candidate": "how often something is tried, and how much is told",
    "gathered": "when ranks that hang are ended",
    "pictures": "pictures and notes; no verdict reads them",
    "judge.MOST_PICTURES": "how much is kept",
    "judge._MOST_NAMED": "how much is told",
    "judge._GROSS": "read only for Python numbers that a module returns, which no port here does",
    "limits.FEWEST_TENSORS": _FITTED,
    "limits._TAIL_BEGINS": _FITTED,
    "limits.SMALLEST_RATIO": _FITTED,
    "limits._FORMAT": "the number of a file's format",
    "limits._PASSES_ALL": "read only when a table of limits is read",
    "limits.TIMES": "read only for a user's own table of limits",
    "step_verdicts._FEWEST_MOVED": "read only for buffers that a pass changes, which no port here has",
    "step_verdicts._MULTIPLE": "like `step_verdicts._FEWEST_MOVED`",
    "step_verdicts._OF_BUFFER": "like `step_verdicts._FEWEST_MOVED`",
}
"""The modules and numbers that no verdict of these ports reads, and why."""
FACTORS = (0.5, 2.0)


def why_unread(key: str) -> str:
    """Return why a number is not changed; an empty text if it is."""
    return UNREAD.get(key) or UNREAD.get(key.partition(".")[0], "")


def page(before: Mapping[str, Verdicts], after: Mapping[Judging, Verdicts], only: Sequence[str]) -> Iterator[str]:
    """Yield the sections of the report.

    Args:
        before: the verdicts with no number changed, by precision, of all ports that are judged anew.
        after: the verdicts with a number changed.
        only: the numbers that were changed.
    """
    passes = {name: {p: v for p, v in found.items() if p not in TRAININGS} for name, found in before.items()}
    steps = {name: {p: v for p, v in found.items() if p in TRAININGS} for name, found in before.items()}
    laws = limits.packaged().laws
    floored = sum(law.spread < limits.LEAST_SPREADS.get(key[2], limits._LEAST_SPREAD) for key, law in laws.items())
    (right, rejected), (wrong, detected) = (_count(passes, kind) for kind in (False, True))
    (sound, stopped), (mistaken, found) = (_count(steps, kind) for kind in (False, True))
    yield "# Numbers that are set by hand in the judge"
    yield (
        f"`parity/judge` has {len(numbers())} numbers with names, most of them set by hand. They decide verdicts "
        f"beside the limits and within them: of the {len(laws)} laws in the packaged table, {floored} are narrower "
        "than the least spread (`limits._LEAST_SPREAD`, `limits.LEAST_SPREADS`), which then sets the limit."
    )
    yield (
        "Each number was halved and doubled (a share up to 1, a count down to 1), and ports were judged anew on the "
        f"same passes, on emulated kernels, at {', '.join(f'`{name}`' for name in before)}, with seed {SEED}, which no "
        "limit was fitted to. They are those of the zoo whose margins are nearest to 1, wrong ones that pass among "
        f"them. As the numbers are, {rejected} of {right} right ports are rejected, and {detected} of {wrong} wrong "
        f"ones detected; for `steps`, which judges trainings, {stopped} of {sound} and {found} of {mistaken}."
    )
    yield (
        f"No rejection among {right} right ports bounds their rate at {upper_bound(0, right):.1%} (95 %), so the table "
        "shows which numbers matter, and no rates; [false alarms](false_alarms.md) and [planted bugs](zoo.md) are "
        "counted elsewhere. *Moved* is the number of ports with another margin: where it is 0, no port here depends on "
        "the number, and nothing is known about it. A dash: not judged yet; fewer ports: at one precision only. The "
        "script goes on where it was stopped."
    )
    rows = []
    for key in only:
        base = steps if key.startswith("step_verdicts.") else passes
        cells = [
            _change(base, {one.precision: v for one, v in after.items() if (one.number, one.factor) == (key, by)})
            for by in FACTORS
        ]
        rows.append([f"`{key}`", _value(key), FROM.get(key, BY_HAND), *cells[0], *cells[1]])
    headers = ["number", "value", "where it is from"]
    headers += [
        f"{way}: {what}" for way in ("half", "double") for what in ("right rejected", "wrong detected", "moved")
    ]
    yield markdown_table(rows, headers, left=3)
    yield "## What each is for"
    yield markdown_table([[f"`{key}`", numbers()[key].why] for key in only], ["number", "comment in the code"], left=2)
    yield "## Numbers that were not changed"
    left = [[f"`{key}`", _value(key), why_unread(key)] for key in numbers() if why_unread(key)]
    yield markdown_table(left, ["number", "value", "why not"], left=3)
    yield (
        "Not in these tables: numbers written inside functions of `steps` (1.01 for the rounding of weights, 0.1 for "
        "the elements that are told as wrong, 0.1 for how much a multiple must explain), and those of other rooms."
    )


def _value(key: str) -> str:
    value = numbers()[key].value
    return ", ".join(f"{name} {one:g}" for name, one in value.items()) if isinstance(value, dict) else f"{value:.4g}"


def _count(found: Mapping[str, Verdicts], wrong: bool) -> tuple[int, int]:
    """Return how many ports there are, right ones or wrong ones, and how many of them fail."""
    statuses = [
        status for verdicts in found.values() for port, (status, _) in verdicts.items() if is_wrong(port) == wrong
    ]
    return len(statuses), statuses.count("failed")


def _change(before: Mapping[str, Verdicts], after: Mapping[str, Verdicts]) -> tuple[str, str, str]:
    """Return the cells of one change: right ports rejected, wrong ports detected, and ports with another margin.

    Precisions that were not judged with it are left out; the cells are dashes if none was.
    """
    before = {name: found for name, found in before.items() if name in after}
    if not before:
        return "–", "–", "–"
    cells = []
    for wrong in (False, True):
        (count, was), (_, now) = _count(before, wrong), _count(after, wrong)
        cells.append(f"{now} of {count}" + (f" ({now - was:+d})" if now != was else ""))
    pairs = [(margin, after[name][port][1]) for name, found in before.items() for port, (_, margin) in found.items()]
    moved = sum(one != other and not (math.isnan(one) and math.isnan(other)) for one, other in pairs)
    errors = sum(status == "error" for found in after.values() for status, _ in found.values())
    return *cells, f"{moved}, {errors} raise" if errors else str(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=REPORT)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8_delayed"], choices=list(PRECISIONS))
    parser.add_argument("--right", type=int, default=8, help="right ports at each precision")
    parser.add_argument("--wrong", type=int, default=8, help="wrong ports at each precision")
    parser.add_argument(
        "--models", type=int, default=0, help="how many drawn models are among the ports that may be judged"
    )
    changed = [key for key in numbers() if not why_unread(key)]
    parser.add_argument("--only", nargs="+", default=changed, choices=changed, metavar="NUMBER")
    parser.add_argument("--draw", action="store_true", help="judge nothing more, and draw what the record has")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    campaign: Campaign[Judging, Verdicts] = Campaign(chosen.record, Verdicts)
    every = [Judging(name, ports_of(name, chosen.models)) for name in chosen.precisions]
    found = campaign.complete(every, judged, "looking for ports near their limits")
    near = {one.precision: nearest(verdicts, chosen.right, chosen.wrong) for one, verdicts in found.items()}
    trained = [Judging(name, tuple(_trainings(name))) for name in chosen.precisions]
    before = {one.precision: dict(verdicts) for one, verdicts in campaign.complete(trained, judged, "training").items()}
    for one, verdicts in found.items():
        before[one.precision] |= {port: verdicts[port] for port in near[one.precision]}
    changes = [(key, by) for key in chosen.only for by in FACTORS]
    of_steps = [change for change in changes if change[0].startswith("step_verdicts.")]
    asked = [Judging(one.precision, one.ports, *change) for change in of_steps for one in trained]
    after = campaign.finished(asked) if chosen.draw else campaign.complete(asked, judged, "judging trainings anew")
    asked = [Judging(name, near[name], *one) for one in changes if one not in of_steps for name in near]
    with passes_made_once():
        after |= campaign.finished(asked) if chosen.draw else campaign.complete(asked, judged, "judging anew")
    report = write_sections(chosen.out, page(before, after, chosen.only), "python scripts/judge_constants.py")
    print(f"report: {report}")


if __name__ == "__main__":
    main()
