"""Show where the error of a pair comes from: the error that each stage adds, beside the expected one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tabulate import tabulate

from parity import shown, te
from parity.case import registry
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.cli.conversion import parse_size
from parity.comparison import observe_stages
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.passes.prepare import prepare
from parity.plugin.options import parse_backend
from parity.report.numbers import short
from parity.result import StageResult
from parity.search.located import describe_place, results_of_stages
from parity.stages.judge import Judged, is_flagged
from parity.stages.locate import Stages
from parity.te import Kernels, Precision, precision_named
from parity.trace.calls import Misfit
from parity.trace.whose import users_line
from parity.user_error import UserError

_HEADERS = ("", "stage, up to", "matched by", "error", "added", "expected", "added/expected", "along it")


def trace(target: str, size: str, seed: int, precision: str, backend: str, gradients: bool) -> bool:
    """Print the stages of one pair, and return whether each is as right as rounding allows.

    Args:
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        size: see ``parse_size``.
        seed: the seed of weights and inputs.
        precision: a key of ``PRECISIONS``.
        backend: ``auto``, ``gpu`` or ``cpu``.
        gradients: whether to print the stages of the backward pass that are right as well.

    Raises:
        UserError: if there is no such pair, size or precision, this machine cannot run it, or the pass cannot be judged
            stage by stage.
    """
    stages = _judge_pair(target, size, seed, precision_named(precision), backend)
    print(shown.text("\n".join(_list_lines(stages, gradients))))
    return not stages.flagged


def load_pair(target: str, size: str, backend: str) -> tuple[Case, CheckedSize, Kernels]:
    """Return the pair that a command names, at a size that ``parse_size`` reads, and TE's kernels.

    Raises:
        UserError: if there is no such pair, size or backend, or the pair does not fit together.
    """
    case = registry.only(target)
    kernels = te.kernels(parse_backend(backend))
    (checked,) = check_case(replace(case, sizes=(parse_size(case, size) or case.sizes[0],)), kernels.te)
    return case, checked, kernels


def _judge_pair(target: str, size: str, seed: int, precision: Precision, backend: str) -> Stages:
    case, checked, kernels = load_pair(target, size, backend)
    if reason := te.why_refused(precision, kernels):
        raise UserError(f"-p {precision.name}: {reason}")
    try:
        prepared = prepare(case, checked, precision.dtype, seed, kernels)
        request = Request(case, checked, precision, seed, kernels, packaged())
        return observe_stages(request, prepared)
    except Exception as error:  # the pair's code may raise anything
        cause = error.__cause__ if isinstance(error, Misfit) and error.__cause__ else error
        told = "; at ".join(filter(None, (shown.raised(cause), users_line(cause))))
        raise UserError(
            f"{case} cannot be judged stage by stage: {told}. `parity run` compares it as a whole"
        ) from error


def _list_lines(stages: Stages, gradients: bool) -> Iterator[str]:
    both = zip(stages.all, results_of_stages(stages), strict=True)
    rows = [_make_row(judged, one) for judged, one in both if gradients or not one.backward or one.is_off]
    yield from tabulate(rows, _HEADERS, tablefmt="plain", disable_numparse=True).splitlines()
    yield ""
    yield "error: of the value at the stage's end; added, expected: by the stage alone; along it: what is added along"
    yield "the value, in standard deviations of rounding; far from 0, one factor is off, such as an eps or a scale;"
    yield "only the pair's own inputs are traced, so what `parity run` finds on probing inputs may not show"
    for backward, name in ((False, "forward"), (True, "backward")):
        some = [one for one in stages.all if one.stage.backward == backward]
        off = sum(map(is_flagged, some))
        worst = max((one.ratio for one in some if not is_flagged(one)), default=0.0)
        ends = f"; of the others, the largest error is {short(worst)} times the expected one" if some else ""
        yield f"{name} pass: {off} of {len(some)} stages have a larger error than rounding explains{ends}"
    if place := describe_place(stages):
        yield f"the candidate departs from the reference {place}"


def _make_row(judged: Judged, one: StageResult) -> tuple[str, ...]:
    ratio = "missing" if judged.is_missing else short(judged.ratio)
    whole = short(one.whole) if math.isfinite(one.whole) else ""
    told = (whole, short(judged.error), short(one.expected), ratio, f"{one.gain:+.1f} σ")
    return ("✗" if one.is_off else "", one.end, judged.stage.evidence, *told)
