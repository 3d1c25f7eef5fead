"""Judge recordings of a training, and compare two of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from parity import data_files, shown, te
from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.cli.stages import load_pair
from parity.plugin.options import parse_backend, parse_precision
from parity.ranks.layout import Degrees
from parity.recordings.differences import Bisection, Difference, bisect_dumps, bisect_passes
from parity.recordings.dumps import DumpedFile, find_files, judge_files
from parity.recordings.environment import compare_environments, describe_environment
from parity.recordings.folder import RecordedPass, StoredPass, read
from parity.recordings.joined import find_degrees, group_ranks, join_ranks
from parity.recordings.judged import JudgedPass, judge_pass, precision_of
from parity.report.failure import causes_and_figures, describe_verdict
from parity.report.numbers import plural, short
from parity.report.record import Item
from parity.search.located import describe_end, describe_place
from parity.shown import few_of
from parity.stages.judge import Judged, is_flagged
from parity.stages.locate import Stages
from parity.te import Kernels, precision_named
from parity.user_error import UserError

_MOST_TOLD = 8  # differences of outputs and gradients


def judge(
    folder: Path,
    reference: str,
    precision: str,
    size: str,
    step: int | None,
    rank: int | None,
    seconds: float,
    backend: str,
) -> bool:
    """Print the verdict on each recorded pass, and return whether all are right at the end and at each stage.

    Args:
        folder: the recording, or what another tool has dumped.
        reference: ``my_pairs.py::my_model``, or only the file if it declares one pair; empty for another tool's dump,
            which no reference can judge.
        precision: a key of ``PRECISIONS``; empty for the recorded one.
        size: the recorded model's size, as ``parse_size`` reads it.
        step, rank: the only ones to judge; None for all.
        seconds: real time for each search for a cause, 0 for no limit.
        backend: where the reference computes: ``auto``, ``gpu`` or ``cpu``.

    Raises:
        UserError: if the recording is damaged, or does not fit the pair.
    """
    precision = parse_precision(precision) if precision else ""
    if files := find_files(folder):
        asked = [one for one in files if step in (None, one.step) and rank in (None, one.rank)]
        return _judge_dump(folder, asked, precision, backend)
    passes = _select_passes(folder, step, rank)
    if not reference:
        raise UserError("name what the model should compute: --reference my_pairs.py::my_model")
    case, checked, kernels = load_pair(reference, size, backend)
    made = find_degrees(passes[0].index, case, kernels, checked.size)
    judged = [judge_pass(one, made, case, checked, kernels, precision, seconds) for one in group_ranks(passes, made)]
    for one in judged:
        print(shown.text("\n".join(_list_verdict(one))))
    wrong = sum(not one.result.passed for one in judged)
    passes_in_words = f"{len(judged)} pass{'es' * (len(judged) != 1)}"
    print(f"{len(judged) - wrong} of {passes_in_words} right, at the end and at each stage")
    return not wrong


def _select_passes(folder: Path, step: int | None, rank: int | None) -> list[StoredPass]:
    known = read(folder)
    found = [one for one in known if step in (None, one.index.step) and rank in (None, one.index.rank)]
    if not found:
        steps = ", ".join(dict.fromkeys(str(one.index.step) for one in known))
        raise UserError(f"{folder} has no such pass: it holds steps {steps} of {plural(known[0].index.ranks, 'rank')}")
    return found


def _judge_dump(folder: Path, files: Sequence[DumpedFile], precision: str, backend: str) -> bool:
    """Print what a dump of TE's ``DumpTensors`` shows of TE's linear layers, and return whether they are right."""
    if not all(one.name for one in files):
        raise UserError(
            f"{folder} was written by SGLang's dumper, which does not say what a tensor was computed from, so it "
            "cannot be judged: `parity bisect` compares two such dumps, and parity.recording records what can be judged"
        )
    judged, left = judge_files(files, te.kernels(parse_backend(backend)).device, precision)
    off = [one for one in judged if is_flagged(one)]
    lines = [f"✗ the {one.stage.watched} of {one.stage.end[0]}: {_describe_size(one)}" for one in off]
    notes = [
        *(f"note: not judged: {reason}" for reason in left),
        "note: these are TE's linear layers alone; DumpTensors writes neither arguments nor all parameters, so that no "
        "reference can compute the same",
    ]
    right = f"{len(judged) - len(off)} of {len(judged)} GEMMs and quantized tensors are as right as rounding allows"
    print(shown.text("\n".join([*lines, right, *notes])))
    return not off


def _list_verdict(one: JudgedPass) -> Iterator[str]:
    result = one.result
    yield describe_verdict(f"{one.stored.index} at {one.precision}", result)
    if not result.passed:
        yield from (f"  {line}" for line in causes_and_figures(Item((result,))))
    if one.stages is not None:
        yield from (f"  {line}" for line in _list_stages(one.stages, result.passed))
    yield from (f"  note: {note}" for note in (*one.notes, *result.notes))


def _list_stages(stages: Stages, passed: bool) -> Iterator[str]:
    right = len(stages.all) - len(stages.flagged)
    yield f"stages: {right} of {len(stages.all)} are as right as rounding allows"
    if stages.flagged and passed:
        first = stages.flagged[0]
        where = describe_place(stages) or "over several layers"
        yield f"though the pass is right at its end, it departs from the reference {where}: {_describe_size(first)}"


def _describe_size(one: Judged) -> str:
    if one.is_missing:
        return "the gradient there is missing"
    return f"the error is {short(one.error)} where {short(one.expected)} is expected"


# Two recordings.


def bisect(first: Path, second: Path, reference: str, size: str, backend: str) -> bool:
    """Print where two recordings begin to differ, and return whether that may be rounding, by the reference.

    Args:
        first, second: the recordings, or dumps of another tool, of the same step.
        reference: a pair that tells which of the two is right; empty to compare them alone.
        size: the recorded model's size, as ``parse_size`` reads it.
        backend: where the reference computes.

    Raises:
        UserError: if the recordings are damaged, are of other passes, or do not fit the pair.
    """
    dumps = find_files(first), find_files(second)
    if any(dumps):
        if not all(dumps) or reference:
            raise UserError("a dump of another tool can only be compared with another one, and without a reference")
        found, only = bisect_dumps(*dumps, te.kernels(parse_backend(backend)).device)
        print(shown.text("\n".join(_list_differences("the dumps", found))))
        if only:
            print(shown.text(f"note: only one of them has {few_of(only)}"))
        return True
    known = {path: read(path) for path in (first, second)}
    pair = load_pair(reference, size, backend) if reference else None
    made: dict[Path, Degrees] = {}
    if pair is not None:
        case, checked, kernels = pair
        made = {path: find_degrees(some[0].index, case, kernels, checked.size) for path, some in known.items()}
    layouts = {path: _describe_layout(some[0].index, made.get(path)) for path, some in known.items()}
    if layouts[first] != layouts[second]:
        if pair is None:
            raise UserError(
                f"{first} is of {layouts[first]} and {second} of {layouts[second]}: name the model's pair, which tells "
                "how to put ranks together: --reference my_pairs.py::my_model"
            )
        known = {path: _join_groups(some, made[path], pair) for path, some in known.items()}
        made = dict.fromkeys(known, Degrees())
    pairs = list(_match_passes(known[first], known[second], first, second))
    _print_environments(pairs[0][0].index.environment, pairs[0][1].index.environment, first.name, second.name)
    groups = {path: group_ranks(known[path], degrees) for path, degrees in made.items()}
    judged: dict[tuple[Path, int], JudgedPass] = {}  # each group once, however many ranks it has
    is_right = True
    for one, other in pairs:
        found = bisect_passes(one, other)
        print(shown.text("\n".join(_list_differences(one.index, found))))
        if pair is not None and not found.is_same:
            for number, (path, stored) in enumerate(((first, one), (second, other))):
                place = next(place for place, group in enumerate(groups[path]) if stored in group)
                if (path, place) not in judged:
                    judged[path, place] = judge_pass(groups[path][place], made[path], *pair)
                side = judged[path, place]
                print(shown.text("\n".join(_list_side(path.name, side, found, number))))
                is_right = is_right and side.result.passed
    return is_right


def _describe_layout(index: RecordedPass, made: Degrees | None) -> str:
    degrees = made or Degrees(tp=index.tp, cp=index.cp, sequence_parallel=index.sequence_parallel)
    return f"{plural(index.ranks, 'rank')}{f' ({degrees.label})' * (degrees.count > 1)}"


def _join_groups(
    passes: Sequence[StoredPass], made: Degrees, pair: tuple[Case, CheckedSize, Kernels]
) -> list[StoredPass]:
    """Return the passes as one process would have computed each, numbered by the batches that ranks share."""
    case, checked, kernels = pair
    found: list[StoredPass] = []
    for group in group_ranks(passes, made):
        at = precision_named(precision_of(group[0]))
        one = join_ranks(group, made, lambda: case.build(kernels.te, checked.size), kernels, at)
        found.append(replace(one, index=replace(one.index, rank=one.index.rank // made.count)))
    return found


def _match_passes(
    first: Sequence[StoredPass], second: Sequence[StoredPass], *paths: Path
) -> Iterator[tuple[StoredPass, StoredPass]]:
    by_stem = {one.index.stem: one for one in second}
    both = [(one, by_stem[one.index.stem]) for one in first if one.index.stem in by_stem]
    if not both:
        raise UserError(f"{paths[0]} and {paths[1]} have no pass in common: record the same steps on as many ranks")
    return iter(both)


def _list_differences(place: object, found: Bisection) -> Iterator[str]:
    if found.is_same:
        yield f"{place}: equal to the bit"
        return
    yield f"{place}:"
    for told, first in (("forward", found.forward), ("backward", found.backward)):
        yield f"  {told}: {'equal to the bit' if first is None else f'first differs {first}'}"
    rows = [
        (f"{'d ' * (each.kind == 'gradient of weight')}{each.name}", short(each.relative), short(each.roundings))
        for each in found.later[:_MOST_TOLD]
    ]
    if rows:
        headers = ("differs in the end", "relative", "in roundings")
        yield from (f"  {line}" for line in tabulate(rows, headers, "plain", disable_numparse=True).splitlines())
    if len(found.later) > _MOST_TOLD:
        yield f"  and {len(found.later) - _MOST_TOLD} more, by less"


def _list_side(name: str, judged: JudgedPass, found: Bisection, number: int) -> Iterator[str]:
    """Yield what the reference says of one side, the first or second, at the first difference and in the end."""
    yield f"  {name}: {judged.result.status}, margin {short(judged.result.margin)}"
    for first in (found.forward, found.backward):
        one = None if first is None or judged.stages is None else _find_stage(judged.stages, first, number)
        if first is not None and one is not None:
            told = "off" if is_flagged(one) else "as right as rounding allows"
            yield (
                f"    where they first differ{' in gradients' * (first.kind != 'value')}, it is {told}: up to the "
                f"{describe_end(one.stage)}, {_describe_size(one)}"
            )


def _find_stage(stages: Stages, first: Difference, number: int) -> Judged | None:
    """Return the stage in which a value, or its gradient, is computed: the first that ends with it or after it."""
    orders = {match.value.site: match.watched.order for match in stages.found.values()}
    backward = first.kind != "value"
    ends = [
        (orders[one.stage.end], one)
        for one in stages.all
        if one.stage.backward == backward and not one.stage.parameter and one.stage.end in orders
    ]
    # A backward pass goes from later values to earlier ones.
    place = first.places[number]
    reached = [(order, one) for order, one in ends if (order <= place if backward else order >= place)]
    sign = -1 if backward else 1
    return min(reached, key=lambda entry: sign * entry[0], default=(0, None))[1]


# Environments.


def environment(paths: Sequence[Path]) -> bool:
    """Print an environment as JSON, or in what two differ; return whether they are the same.

    Args:
        paths: none for this process, one or two recordings or files that this has printed.

    Raises:
        UserError: if there are more than two, or one is neither.
    """
    if len(paths) > 2:
        raise UserError(f"{len(paths)} environments cannot be compared: name two")
    known = [_read_environment(path) for path in paths] or [describe_environment()]
    if len(known) == 1:
        print(json.dumps(known[0], indent=2))
        return True
    return _print_environments(known[0], known[1], paths[0].name, paths[1].name)


def _print_environments(first: dict[str, str], second: dict[str, str], *names: str) -> bool:
    rows = list(compare_environments(first, second))
    if rows:
        print(shown.text(tabulate(rows, ("environment", *names), "plain", disable_numparse=True)))
    else:
        print("the environments are the same")
    return not rows


def _read_environment(path: Path) -> dict[str, str]:
    if path.is_dir():
        return read(path)[0].index.environment
    try:
        found = data_files.parsed(path.read_bytes(), dict)
    except (OSError, data_files.NotReadableError) as error:
        raise UserError(
            f"{path} is neither a recording nor an environment as `parity environment` prints it: {error}"
        ) from error
    return {str(name): str(value) for name, value in found.items()}
