"""The zoo's report: markdown tables and a plot, drawn from the verdicts alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from parity import te
from parity.report.environment import KERNELS, cpu_model, emulated_gpu_name, gpu_name
from parity.report.numbers import plural, short
from parity.report.tables import markdown_table
from parity.zoo import catalogue, plot, summary
from parity.zoo.runner import Plan
from parity.zoo.signal import LEAST_SEEDS
from parity.zoo.summary import METHODS, PARITY, Count, Verdicts
from parity.zoo.trial import Trial, Verdict

_METHOD = f"""\
- **A bug** is a small change to a right port: to the TE module, its weights, its weight map or its call
  (`parity/zoo/bugs/`). Each is planted in its hosts (`parity/zoo/hosts/`) wherever it changes the result.
- **Told apart**: the port with the bug is rejected and the right port is not, on the same weights and inputs: a rule
  that rejects everything detects nothing. A port is rejected if one of its tensors is: an output, an input's gradient,
  a parameter's gradient. Every rule sees the same tensors; a *check* is one tensor of one right port.
- **The rivals** compare with the golden value, or with plain PyTorch in the precision's dtype (`module.to(dtype)`,
  which also rounds buffers such as RoPE's frequencies). `parity/zoo/rivals.py` cites where each rule is from. PyTorch
  has no FP8 modules, so under a recipe its BF16 stands in. TE's tolerances are applied to this suite's weights and
  gradients.
- **Norm ratio**: the norm of the bug's effect over the norm of the rounding noise, the largest over tensors. The
  effect is the candidate with the bug minus the candidate without, in FP32. A bug that FP32 cannot have, such as
  a stale FP8 scale, has what it adds to the noise, in squares.
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
    yield "## Planted bugs that are told from the right port"
    yield _told_apart(verdicts, plan.precisions)
    yield f"![Detection by method and precision, and against signal to noise]({picture})"
    yield "## Right ports that are rejected"
    yield "Ports first, then checks: a check is one tensor."
    yield _false_alarms(verdicts, plan.precisions)
    yield "## Detected bugs whose first finding is the planted one"
    yield _naming(verdicts, plan.precisions)
    yield "## Bug by bug"
    yield (
        "Over all sizes and seeds: ✅ where parity told every trial apart, else how many; its smallest margin; then "
        f"the rivals that told every trial apart, by their first letters ({_letters()})."
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
    device = gpu_name() if backend == "gpu" else f"an {emulated_gpu_name()}, on {cpu_model()}"
    sizes = ", ".join(f"{size} size with {plural(count, 'seed')}" for size, count in plan.seeds.items())
    return (
        f"{plural(len(plan.bugs), 'bug')} in {plural(len(plan.hosts), 'right port')}, at {sizes}: "
        f"{len(verdicts):,} trials. Kernels: {KERNELS[backend]}; {device}; "
        f"TransformerEngine {te.version()}, torch {torch.__version__}."
    )


def _told_apart(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    rows = []
    for precision in precisions:
        trials = [trial for trial, _ in summary.judged(verdicts, False, precision)]
        counts = [summary.told_apart(verdicts, trials, method) for method in METHODS]
        rows.append([f"`{precision}`", *map(_count, counts)])
    return markdown_table(rows, ["precision", *METHODS])


def _false_alarms(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    rows = []
    for precision in precisions:
        clean = summary.judged(verdicts, True, precision)
        ports = [summary.rejections(clean, method) for method in METHODS]
        checks = [summary.rejected_tensors(clean, method) for method in METHODS]
        rows.append([f"`{precision}`", *map(_count, ports), *map(_count, checks)])
    return markdown_table(rows, ["precision", *METHODS, *(f"{method}, checks" for method in METHODS)])


def _naming(verdicts: Verdicts, precisions: Sequence[str]) -> str:
    counts = {name: summary.named_first(summary.judged(verdicts, False, name)) for name in precisions}
    return markdown_table([[_count(count) for count in counts.values()]], [f"`{name}`" for name in counts])


def _bugs(verdicts: Verdicts, plan: Plan) -> str:
    trials: dict[tuple[str, str, str], list[tuple[Trial, Verdict]]] = defaultdict(list)
    for place, found in summary.by_place(verdicts).items():
        trials[place.bug, place.host, place.precision] += found
    rows = []
    for bug in plan.bugs:
        for host in bug.hosts:
            cells = [_cell(verdicts, trials.get((bug.name, host, name), [])) for name in plan.precisions]
            if any(cells):
                rows.append([catalogue.subject(bug), f"`{bug.name}`", f"`{host}`", *cells])
    return markdown_table(rows, ["subject", "bug", "host", *(f"`{precision}`" for precision in plan.precisions)])


def _cell(verdicts: Verdicts, found: Sequence[tuple[Trial, Verdict]]) -> str:
    if not found:
        return ""
    counts = {method: summary.told_apart(verdicts, [trial for trial, _ in found], method) for method in METHODS}
    detected = counts.pop(PARITY)
    mark = "✅" if detected.hits == detected.total else f"❌ {detected.hits}/{detected.total}"
    rivals = "".join(method[0] for method, count in counts.items() if count.hits == count.total)
    return f"{mark} {short(min(verdict.margin for _, verdict in found))} {rivals}".strip()


def _letters() -> str:
    return ", ".join(f"{method[0]} for {method}" for method in METHODS[1:])


def _misses(verdicts: Verdicts) -> str:
    rows = []
    for place, found in summary.by_place(verdicts).items():
        counts = {method: summary.told_apart(verdicts, [trial for trial, _ in found], method) for method in METHODS}
        detected = counts.pop(PARITY)
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
                ", ".join(method for method, count in counts.items() if count.hits),
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
    return markdown_table(rows, headers)


def _count(count: Count) -> str:
    return f"{count.hits} of {count.total}" if count.total else "–"


def _told(trial: Trial) -> str:
    what = f"`{trial.bug}` in `{trial.host}`" if trial.bug else f"the right `{trial.host}`"
    return f"{what}, {trial.size}, `{trial.precision}`, seed {trial.seed}"
