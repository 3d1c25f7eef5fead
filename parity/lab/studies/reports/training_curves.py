"""Draw the report of the study ``training_curves``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from parity import te
from parity.lab.studies.training_curves import Outcome, Settings
from parity.report.environment import KERNELS
from parity.report.numbers import markdown_table, short
from parity.report.record import FAILED, PASSED
from parity.te import Kernels

_OTHER_GPU = """\
Another emulated GPU may run them: `PARITY_EMULATED_GPU=blackwell parity study training_curves` adds its runs to the
record and draws this report again."""

_METHOD = """\
- **Models**: a GPT (LayerNorm, GELU, learned positions, biases) and a llama (RMSNorm, RoPE, grouped-query attention,
  SwiGLU), in plain PyTorch and from `te.TransformerLayer` with `te.LayerNormLinear` as the head. The recipe covers the
  whole TE model, head included; embeddings are PyTorch's, the loss is computed in FP32. The text is
  `parity/lab/studies/training.py`, read byte by byte.
- **Weights**: AdamW holds FP32 masters. TE's parameters and gradients are BF16 and take the masters' rounding after
  each step, as in Megatron-LM. Every run starts from the same BF16-exact weights and reads the same batches.
  A recipe that scales by the past (delayed scaling) makes its warm-up passes on the first batch, without a step, before
  training.
- **Expectation**: on the same weights and batches, the plain model also trains under {draws} realisations of the
  precision's rounding model (`parity/rounding/`, dithered by `parity/lab/studies/training_curves.py`; neither
  shares code with TE or the kernels), with BF16 parameters and gradients as above. The difference of each of those
  losses from plain FP32's is a draw from what rounding does to this curve. The band is where one more draw lies at
  all steps together, but for
  {percent} % of draws: `mean ± t s sqrt(1 + 1/n)` at each step, with t from Student's distribution and the share split
  over the steps (Bonferroni). Nothing in it is tuned, and TE has no part in it.
- **Final loss**: the mean of the last {final} steps. Its expected interval is made from the same draws in the same
  way, as a single point.
- **Margin**: the largest distance from the middle of the band in half widths; up to 1 is inside.
- **What it cannot see**: a loss curve is a blunt instrument. On a small llama, exchanged keys and values leave the
  band at each precision, but an exchanged gate and up in BF16 alone; FP8's rounding hides them
  (`tests/studies/test_training_curves.py`): young weights are small, and either order trains. `parity run` compares
  tensors, and sees both."""


def write(
    outcomes: Sequence[Outcome], missing: Mapping[str, str], settings: Settings, kernels: Kernels, folder: Path
) -> Path:
    """Write ``training_curves.md`` and a plot a model into the folder; returns the report's path.

    Args:
        outcomes: of TE's runs.
        missing: precisions without one, each with the reason.
        settings: of the study.
        kernels: that TE ran on.
        folder: exists.
    """
    shown = [model for model in settings.models if any(outcome.run.model == model for outcome in outcomes)]
    for model in shown:
        of_model = [outcome for outcome in outcomes if outcome.run.model == model]
        _plot(of_model).savefig(folder / _picture(model), dpi=100)
    path = folder / "training_curves.md"
    sections = _sections(outcomes, missing, settings, kernels, shown)
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def _sections(
    outcomes: Sequence[Outcome], missing: Mapping[str, str], settings: Settings, kernels: Kernels, shown: Sequence[str]
) -> Iterator[str]:
    followed = sum(outcome.margin <= 1 and outcome.final_margin <= 1 for outcome in outcomes)
    yield "# Do TransformerEngine's models train as the plain models do?"
    yield f"**{followed} of {len(outcomes)} runs follow the plain model** within what rounding must cost."
    yield (
        f"Kernels: {KERNELS[kernels.backend]}. TransformerEngine {te.version()}, torch {torch.__version__}. "
        f"{settings.steps} steps of {settings.batch} x {settings.seq} bytes; {settings.layers} layers, hidden "
        f"{settings.hidden}, {settings.heads} heads; seed {settings.seed}."
    )
    yield _table(outcomes)
    for name, reason in missing.items():
        yield f"- `{name}` did not run: {reason}"
    if missing and kernels.backend == "cpu":
        yield _OTHER_GPU
    for model in shown:
        yield f"## {model}"
        yield (
            "Above, the losses. Below, TE's loss minus the plain FP32 model's at each step, and the band in which a "
            "faithful port's difference is expected."
        )
        yield f"![Loss curves of the {model}]({_picture(model)})"
    yield "## How it was done"
    yield _METHOD.format(
        draws=settings.draws,
        percent=f"{100 * settings.false_alarms:g}",
        final=settings.final,
    )
    yield "Made by `parity study training_curves`."


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        followed = outcome.margin <= 1 and outcome.final_margin <= 1
        (low,), (high,) = outcome.final_band.low, outcome.final_band.high
        rows.append(
            [
                PASSED if followed else FAILED,
                outcome.run.model,
                outcome.run.precision,
                outcome.gpu,
                f"{outcome.plain[-1]:.3f}",
                f"{outcome.final:+.4f}",
                f"{low:+.4f} to {high:+.4f}",
                short(outcome.final_margin),
                short(max(map(abs, outcome.differences))),
                short(outcome.margin),
            ]
        )
    headers = [
        "",
        "model",
        "precision",
        "GPU",
        "last loss, plain",
        "final loss, TE - plain",
        "expected",
        "final margin",
        "largest difference",
        "margin",
    ]
    return markdown_table(rows, headers)


def _picture(model: str) -> str:
    return f"training_curves_{model}.png"


def _plot(outcomes: Sequence[Outcome]) -> Figure:
    figure = Figure(figsize=(3.4 * len(outcomes), 5.6), layout="constrained")
    axes = figure.subplots(2, len(outcomes), squeeze=False, sharex=True, sharey="row")
    for (above, below), outcome in zip(axes.T, outcomes, strict=True):
        steps = range(1, len(outcome.plain) + 1)
        above.plot(steps, outcome.plain, label="plain PyTorch, FP32", color="black", linewidth=1)
        above.plot(steps, outcome.te, label="TE", color="tab:orange", linestyle="--")
        above.set_title(f"{outcome.run.precision}\n{outcome.gpu}", fontsize="medium")
        below.fill_between(steps, outcome.band.low, outcome.band.high, alpha=0.25, label="expected")
        below.plot(steps, outcome.differences, color="tab:orange", label="TE - plain")
        below.axhline(0, color="black", linewidth=0.5)
        below.set_xlabel("step")
    axes[0][0].set_ylabel("loss, nats a byte")
    axes[1][0].set_ylabel("difference, nats a byte")
    axes[0][0].legend(fontsize="small")
    axes[1][0].legend(fontsize="small")
    return figure
