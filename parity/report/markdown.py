"""Draws the report of a run: verdict, environment, matrix, failures, then a table a case."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from parity.limits import aim
from parity.report import failure, limits, matrix
from parity.report.digest import Digest
from parity.report.environment import Environment
from parity.report.items import Item
from parity.report.numbers import cosine, plural, ratio, seeds, short
from parity.report.tables import markdown_table
from parity.result import Determinism, Result, TensorResult

_COLUMNS = (
    *("precision", "size", "tensor", "relative L2", "expected", "tolerance", "error / expected"),
    *("max abs", "its tolerance", "max ulps", "cosine", "SQNR dB", "NaN/Inf", "margin"),
)
_TEXT_COLUMNS = 3


def draw(run: Digest, name: str) -> str:
    """The whole report as GitHub markdown.

    Args:
        run: what it shows.
        name: of the report, for its title.
    """
    items = run.items
    failed = [item for item in items if item.status in ("failed", "error")]
    skipped = [item for item in items if item.status == "skipped"]
    sections = [
        f"# Parity report: {name}",
        f"**{verdict(run)}**",
        _environment(run.environment),
        *limits.section(run.environment.limits_compared),
        "## Cases by precision",
        matrix.draw(items),
        _how_to_read(items),
        *_uncollected(run),
        *_failures(failed, run.environment.limits),
        *_skips(skipped),
        *_notes(run, items),
        *_determinism([result for item in items for result in item.results]),
        "## Every tensor",
        *_omitted(run),
        *_cases(items),
    ]
    return "\n\n".join(sections) + "\n"


def verdict(run: Digest) -> str:
    """The run in one line."""
    items, counts = run.items, run.counts
    ran = counts.total() - counts["skipped"]
    if run.failed:
        worst = _worst([item for item in items if item.status in ("failed", "error")])
        head = f"{matrix.FAILED} {run.failed} of {plural(ran, 'item')} failed{worst}"
    elif ran:
        worst = _worst([item for item in items if item.status == "passed"])
        head = f"{matrix.PASSED if run.complete else '⚠️'} {ran} of {plural(ran, 'item')} passed{worst}"
    else:
        head = "⚠️ nothing was compared"
    kernels = "real kernels" if run.environment.backend == "gpu" else "emulated kernels"
    told = limits.told(run.environment.limits, run.environment.limits_compared)
    return "; ".join([head, *_not_compared(run), kernels, *([f"limits of {told}"] if told else [])])


def _not_compared(run: Digest) -> Iterator[str]:
    """How many items, pairs and files have no numbers, for each reason."""
    if run.counts["skipped"]:
        yield f"{run.counts['skipped']} skipped"
    if run.missing:
        yield f"{plural(run.missing, 'item')} without a result: the run was cut short or a worker crashed"
    pairs = sum("::" in node_id for node_id in run.uncollected)
    counts = {"pair": pairs, "file": len(run.uncollected) - pairs}
    told = [plural(count, noun) for noun, count in counts.items() if count]
    if told:
        yield f"{' and '.join(told)} not collected"


def _worst(items: Sequence[Item]) -> str:
    """The largest margin among items that were compared."""
    compared = [item for item in items if item.worst.tensors]
    if not compared:
        return ""
    worst = max(compared, key=lambda item: item.worst.margin)
    return f", worst margin {short(worst.worst.margin)} at `{worst.name}`"


def _environment(environment: Environment) -> str:
    rows = environment.facts
    rows["kernels"] = f"**{environment.kernels}**"
    rows["seeds"] = seeds(environment.seeds)
    if environment.golden:
        rows["golden in FP64"] = environment.golden
    return markdown_table(rows.items(), ["environment", ""])


def _how_to_read(items: Sequence[Item]) -> str:
    lines = [
        "A cell holds the worst **margin** over all sizes and seeds: the largest error divided by its tolerance. "
        f"Up to 1 passes ({matrix.PASSED}), above 1 fails ({matrix.FAILED}); {matrix.ERROR} could not be compared, "
        f"{matrix.SKIPPED} was skipped, an empty cell was not asked for.",
        "",
        "- **golden**: the plain PyTorch reference in FP64, on the same rounded weights and inputs.",
        "- **expected**: the error of that reference under the precision's rounding model: what a faithful port costs.",
        f"- **tolerance**: {aim.describe()}",
        "- Errors are those of the TransformerEngine module against golden, in outputs, input gradients and weight "
        "gradients, all in the reference's layout.",
    ]
    if any(item.precision == "fp32" for item in items):
        lines.append(
            "- **fp32**: TransformerEngine computes every FP32 GEMM in TF32 (10 mantissa bits), so a faithful port has "
            "the error of TF32, far above that of true FP32."
        )
    return "\n".join(lines)


def _uncollected(run: Digest) -> Iterator[str]:
    """What the tables do not have, and why."""
    if run.uncollected:
        yield "## Not collected"
        yield "Of these nothing was compared; what is wrong with them is to be mended first."
    for each in run.uncollected.values():
        yield f"`{each.node_id}`:"
        yield _fence(each.message.splitlines())


def _failures(failed: Sequence[Item], table: str) -> Iterator[str]:
    if failed:
        yield "## Failed"
    for item in failed:
        yield f"### {matrix.verdict_of(item)} `{item.name}`"
        findings = failure.findings(item)
        if findings:
            yield "\n".join(f"- **{finding.code} {finding.title}**: {finding.message}" for finding in findings)
        yield _fence([failure.headline(item), *failure.measures(item.worst)])
        if item.worst.traceback:
            yield "<details>\n<summary>Traceback</summary>"
            yield _fence(item.worst.traceback.splitlines())
            yield "</details>"
        yield "Run it alone:"
        yield _fence([failure.reproduce(item.worst, table)])


def _skips(skipped: Sequence[Item]) -> Iterator[str]:
    if not skipped:
        return
    yield "## Skipped"
    by_reason: dict[str, list[str]] = {}
    for item in skipped:
        by_reason.setdefault(item.results[0].reason, []).append(f"`{item.name}`")
    yield "\n".join(f"- {reason}: {', '.join(names)}" for reason, names in by_reason.items())


def _notes(run: Digest, items: Sequence[Item]) -> Iterator[str]:
    """What comparisons leave unproven, each sentence once; also of items that are not shown."""
    by_note: dict[str, dict[str, None]] = {}
    for item in items:
        for note in (note for result in item.results for note in result.notes):
            by_note.setdefault(note, {})[f"`{item.name}`"] = None
    for note in run.notes:
        by_note.setdefault(note, {})
    if by_note:
        yield "## Notes"
        yield "\n".join(f"- {note} ({_named(names, run.notes[note])})" for note, names in by_note.items())


def _named(names: Collection[str], count: int) -> str:
    """The items that are shown, and how many others there are."""
    others = count - len(names)
    return ", ".join([*names, *([f"{plural(others, 'item')} not shown here"] if others else [])])


def _determinism(results: Sequence[Result]) -> Iterator[str]:
    """How many candidates gave the same bytes again, and what the others did."""
    by_summary: dict[str, dict[str, None]] = {}
    for result in results:
        if result.determinism is not None:
            by_summary.setdefault(result.determinism.summary, {})[f"`{result.item}`"] = None
    if by_summary:
        same = Determinism().summary
        yield "## Determinism"
        yield "Each candidate was built again, and ran on the same inputs and from the same random state."
        yield "\n".join(
            f"- {summary}: {plural(len(names), 'item') if summary == same else ', '.join(names)}"
            for summary, names in by_summary.items()
        )


def _omitted(run: Digest) -> Iterator[str]:
    omitted = run.counts.total() - len(run.items)
    if omitted:
        yield (
            f"Of {run.counts.total():,} items, the worst of each case and precision are shown here and above; the "
            f"record has the other {omitted:,} as well."
        )


def _cases(items: Sequence[Item]) -> Iterator[str]:
    for case in dict.fromkeys(item.case for item in items):
        of_case = [item for item in items if item.case == case and item.worst.tensors]
        if not of_case:
            continue
        worst = max(of_case, key=lambda item: item.worst.margin)
        yield "<details>"
        yield f"<summary><code>{case}</code>: worst {matrix.verdict_of(worst)} at {worst.precision}</summary>"
        yield from _expected_fp32(of_case)
        yield from _attention(of_case)
        many_seeds = any(len(item.results) > 1 for item in of_case)
        rows = [row for item in of_case for row in _rows(item, many_seeds)]
        headers = [*_COLUMNS, "worst seed"] if many_seeds else list(_COLUMNS)
        yield markdown_table(rows, headers, left=_TEXT_COLUMNS)
        yield "</details>"


def _expected_fp32(items: Sequence[Item]) -> Iterator[str]:
    """What TF32 costs a faithful port of this case; people expect true FP32 and take it for a mistake."""
    outputs = [
        (item, tensor)
        for item in items
        for tensor in item.worst.tensors
        if item.precision == "fp32" and tensor.kind == "output"
    ]
    if not outputs:
        return
    item, tensor = max(outputs, key=lambda pair: pair[1].expected.relative_l2)
    expected = tensor.expected
    yield (
        f"Expected FP32 error (TF32 in GEMMs) of `{tensor.label}` at {item.size_label}: "
        f"relative L2 {short(expected.relative_l2)}, max abs {short(expected.max_abs)}."
    )


def _attention(items: Sequence[Item]) -> Iterator[str]:
    """Which of its attention kernels TE ran, at which precision and size."""
    ran: dict[str, dict[str, None]] = {}
    for item in items:
        for backend in {result.attention: None for result in item.results if result.attention}:
            ran.setdefault(backend, {})[item.name.removeprefix(item.case).strip("[]")] = None
    if ran:
        yield "Attention: " + "; ".join(f"{backend} in {', '.join(where)}" for backend, where in ran.items()) + "."


def _rows(item: Item, many_seeds: bool) -> Iterator[list[str]]:
    """A row a tensor, each at the seed where its own margin is worst."""
    compared = [result for result in item.results if result.tensors]
    for label in dict.fromkeys(tensor.label for result in compared for tensor in result.tensors):
        at_seeds = [(result, tensor) for result in compared for tensor in result.tensors if tensor.label == label]
        result, tensor = max(at_seeds, key=lambda pair: pair[1].margin)
        yield _row(result, tensor) + ([f"{result.seed} of {len(at_seeds)}"] if many_seeds else [])


def _row(result: Result, tensor: TensorResult) -> list[str]:
    errors, expected = tensor.errors, tensor.expected
    return [
        result.precision,
        "-".join(filter(None, (result.size_label, result.forced_attention))),
        f"`{tensor.label}`",
        short(errors.relative_l2),
        short(expected.relative_l2),
        short(tensor.tolerance_relative_l2),
        ratio(errors.relative_l2, expected.relative_l2),
        short(errors.max_abs),
        short(tensor.tolerance_max_abs),
        short(errors.max_ulps),
        cosine(errors.cosine),
        short(errors.sqnr_db),
        failure.non_finite(tensor),
        f"{matrix.PASSED if tensor.passed else matrix.FAILED} {short(tensor.margin)}",
    ]


def _fence(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])
