"""The zoo's report: markdown tables and a plot, drawn from the verdicts alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from parity import te
from parity.report.environment import KERNELS, cpu_model, gpu_name
from parity.report.numbers import plural, short
from parity.zoo import catalogue, plot, summary
from parity.zoo.runner import Plan
from parity.zoo.signal import LEAST_SEEDS
from parity.zoo.summary import METHODS, PARITY, Count, Verdicts
from parity.zoo.trial import Trial, Verdict

_METHOD = f"""\
- **A bug** is a small change to a right port: to the TE module, its weights, its weight map or its call
  (`parity/zoo/bugs/`). Each is planted in its hosts (`parity/zoo/hosts/`) wherever it changes the result.
- **Detected**: at least one compared tensor is rejected (output, input gradients, each parameter's gradient).
  Every rule sees the same tensors; `parity/zoo/rivals.py` cites each rule's source. PyTorch has no FP8 modules, so
  under a recipe the rivals' low-precision reference is the BF16 one.
- **False alarm**: a right port is rejected. A *check* is one tensor of one right port.
- **Norm ratio**: the norm of the bug's effect over the norm of the rounding noise, the largest over tensors. The
  effect is the candidate with the bug minus the candidate without, in TE's FP32 where the bug exists there.
- **Filter ratio**: one over the root mean square, over seeds, of the noise regressed on the effect, the largest over
  tensors: the signal to noise ratio of a matched filter (`parity/zoo/signal.py`); needs {LEAST_SEEDS} seeds."""


def write(verdicts: Verdicts, plan: Plan, left_out: Mapping[str, str], path: Path) -> Path:
    """Write the report and the plot beside it.

    Args:
        verdicts: of the plan's trials.
        plan: what was to be judged.
        left_out: precisions that this machine cannot run, each with the reason.
        path: of the report.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    plot.draw(verdicts, plan.precisions).savefig(picture, dpi=100)
    path.write_text("\n\n".join(_sections(verdicts, plan, left_out, picture.name)) + "\n", encoding="utf-8")
    return path


def _sections(verdicts: Verdicts, plan: Plan, left_out: Mapping[str, str], picture: str) -> Iterator[str]:
    yield "# The bug zoo: what is detected, and by whom"
    yield _setting(verdicts, plan)
    for name, reason in left_out.items():
        yield f"- `{name}` did not run: {reason}"
    yield "## Planted bugs that are detected"
    yield _totals(verdicts, plan.precisions, clean=False)
    yield f"![Detection by method and precision, and against signal to noise]({picture})"
    yield "## Right ports that are rejected"
    yield "Ports first, then checks: a check is one tensor."
    yield _totals(verdicts, plan.precisions, clean=True)
    yield "## Detected bugs whose first finding is the planted one"
    yield _naming(verdicts, plan.precisions)
    yield "## Bug by bug"
    yield (
        "Over all sizes and seeds: parity's smallest margin, ✅ where every trial was detected, else how many; then "
        f"the rivals that detected every trial, by their first letters ({_letters()})."
    )
    yield _bugs(verdicts, plan)
    yield "## What parity missed"
    yield _misses(verdicts)
    raised = summary.errors(verdicts)
    if raised:
        yield "## Ports that raised"
        yield "\n".join(f"- {_told(trial)}: {verdict.reason}" for trial, verdict in raised)
    yield "## How it was done"
    yield _METHOD
    yield "Made by `parity zoo`."


def _setting(verdicts: Verdicts, plan: Plan) -> str:
    backend = next((verdict.backend for verdict in verdicts.values() if verdict.status != "error"), "cpu")
    device = gpu_name() if backend == "gpu" else cpu_model()
    return (
        f"{plural(len(plan.bugs), 'bug')} in {plural(len(plan.hosts), 'right port')}, at {', '.join(plan.sizes)} size, "
        f"{plural(len(plan.seeds), 'seed')}: {len(verdicts)} trials. Kernels: {KERNELS[backend]}; {device}; "
        f"TransformerEngine {te.version()}, torch {torch.__version__}."
    )


def _totals(verdicts: Verdicts, precisions: Sequence[str], clean: bool) -> str:
    rows = []
    for precision in precisions:
        judged = summary.judged(verdicts, clean, precision)
        row = [f"`{precision}`", *(_count(summary.rejections(judged, method)) for method in METHODS)]
        if clean:
            row += [_count(summary.rejected_tensors(judged, method)) for method in METHODS]
        rows.append(row)
    headers = ["precision", *METHODS, *(f"{method}, checks" for method in METHODS if clean)]
    return _table(rows, headers)


def _naming(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    counts = {name: summary.named_first(summary.judged(verdicts, False, name)) for name in precisions}
    return _table([[_count(count) for count in counts.values()]], [f"`{name}`" for name in counts])


def _bugs(verdicts: Verdicts, plan: Plan) -> str:
    trials: dict[tuple[str, str, str], list[tuple[Trial, Verdict]]] = defaultdict(list)
    for place, found in summary.by_place(verdicts).items():
        trials[place.bug, place.host, place.precision] += found
    rows = []
    for bug in plan.bugs:
        for host in bug.hosts:
            cells = [_cell(trials.get((bug.name, host, precision), [])) for precision in plan.precisions]
            if any(cells):
                rows.append([catalogue.subject(bug), f"`{bug.name}`", f"`{host}`", *cells])
    return _table(rows, ["subject", "bug", "host", *(f"`{precision}`" for precision in plan.precisions)])


def _cell(found: Sequence[tuple[Trial, Verdict]]) -> str:
    if not found:
        return ""
    detected = summary.rejections(found, PARITY)
    mark = "✅" if detected.hits == detected.total else f"❌ {detected.hits}/{detected.total}"
    rivals = "".join(method[0] for method in METHODS[1:] if summary.rejections(found, method).hits == detected.total)
    return f"{mark} {short(min(verdict.margin for _, verdict in found))} {rivals}".strip()


def _letters() -> str:
    return ", ".join(f"{method[0]} for {method}" for method in METHODS[1:])


def _misses(verdicts: Verdicts) -> str:
    rows = []
    for place, found in summary.by_place(verdicts).items():
        detected = summary.rejections(found, PARITY)
        if detected.hits == detected.total:
            continue
        strength = summary.strength(found)
        rows.append(
            [
                f"`{place.bug}`",
                f"`{place.host}`",
                place.size,
                f"`{place.precision}`",
                _count(detected),
                short(max(verdict.margin for _, verdict in found)),
                short(strength.norm_ratio),
                short(strength.filter_ratio),
                ", ".join(method for method in METHODS[1:] if summary.rejections(found, method).hits),
            ]
        )
    if not rows:
        return "Nothing."
    headers = [
        "bug",
        "host",
        "size",
        "precision",
        "detected",
        "largest margin",
        "norm ratio",
        "filter ratio",
        "seen by",
    ]
    return _table(rows, headers)


def _count(count: Count) -> str:
    return f"{count.hits} of {count.total}" if count.total else "–"


def _told(trial: Trial) -> str:
    what = f"`{trial.bug}` in `{trial.host}`" if trial.bug else f"the right `{trial.host}`"
    return f"{what}, {trial.size}, `{trial.precision}`, seed {trial.seed}"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
