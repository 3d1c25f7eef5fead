"""Why a comparison failed: the findings of its inputs, of the probing ones, or of the matched filters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from parity.diagnosis.budget import in_time
from parity.diagnosis.codes import UNEXPLAINED
from parity.diagnosis.failure import Failure, Rerun
from parity.diagnosis.findings import findings
from parity.diagnosis.reruns.argument_names import with_argument_names
from parity.diagnosis.search import Screened
from parity.diagnosis.verify import is_loud
from parity.execute import Pass
from parity.judging.conditioning import ill_conditioned
from parity.judging.directions import Direction
from parity.judging.directions import findings as mistakes
from parity.judging.local_filters import local_filter_findings
from parity.nominal_clock import Clock
from parity.passes import Tensors
from parity.result import PROBED, Finding, TensorResult


def explain(
    failure: Failure, unreached: Sequence[str], known: Sequence[Direction], seconds: float
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The findings of the inputs as they were drawn, or, where they show nothing wrong, of the probing ones.

    Args:
        failure: the comparison.
        unreached: names of TE parameters that the backward pass did not reach.
        known: directions of the mistakes that could be made.
        seconds: of real time after which no further pass is begun, 0 for no limit.

    Returns:
        The findings, and the notes: that the limit ended the search, if it did.
    """
    clock, rerun = failure.prepared.clock, failure.rerun
    limited = dataclasses.replace(failure, rerun=None if rerun is None else _in_time(rerun, clock))
    with clock.limited_to(seconds):
        found = in_time(lambda: _explained(limited, unreached, known))
        notes = (ended_early(seconds),) if clock.ended else ()
    return with_argument_names(found, failure), notes


def ended_early(seconds: float) -> str:
    """The note that a limit of so many seconds ended the search."""
    return (
        f"the search for the cause ended after {seconds:g} s; --parity-diagnosis=SECONDS gives it longer, as "
        "--diagnosis of parity run and diagnosis_seconds of parity.compare do"
    )


def _in_time(rerun: Rerun, clock: Clock) -> Rerun:
    """The same, which begins only if there is time."""

    def limited(change: Callable[[nn.Module], None], cotangents: Mapping[str, Tensor] | None = None) -> Tensors:
        clock.check()
        return rerun(change, cotangents)

    return limited


def _explained(failure: Failure, unreached: Sequence[str], known: Sequence[Direction]) -> tuple[Finding, ...]:
    shaky = ill_conditioned([tensor for tensor in failure.results if not tensor.passed], failure.prepared)
    if shaky is not None:
        return (shaky,)
    drawn = [tensor for tensor in failure.results if not tensor.probed]
    probed = [tensor for tensor in failure.results if tensor.probed]
    on_probe = None if all(tensor.passed for tensor in probed) else _on_probe(failure)
    if on_probe is not None and all(tensor.passed for tensor in drawn):
        return findings(on_probe)
    screened, of_drawn = Screened(), dataclasses.replace(failure, results=drawn, on_probe=on_probe)
    found = tuple(in_time(lambda: findings(of_drawn, unreached, screened)))
    by_filter = tuple(mistakes(drawn, known))
    if _is_known(found):
        # Of those that fit alike, what a filter has found is the likeliest.
        seen = {finding.title for finding in by_filter}
        return tuple(sorted(found, key=lambda finding: finding.title not in seen))
    known_by_filter = by_filter or tuple(in_time(lambda: local_filter_findings(of_drawn)))
    if known_by_filter or on_probe is None or of_drawn.prepared.clock.ended:
        return known_by_filter or found
    # What is far too large there shows in part at least what its cause is.
    among = screened.helping if is_loud(of_drawn) else None
    also = dataclasses.replace(of_drawn, on_probe=None)
    probing = findings(dataclasses.replace(on_probe, on_drawn=also, among=among))
    return probing if _is_known(probing) else found


def _is_known(found: Sequence[Finding]) -> bool:
    """Whether they are causes, which leave nothing unexplained."""
    return bool(found) and all(finding.code not in UNEXPLAINED for finding in found)


def _on_probe(failure: Failure) -> Failure:
    """The same failure as the probing inputs show it: their outputs in the place of the others."""
    prepared, rerun = failure.prepared, failure.rerun
    golden = Pass(prepared.probed, {}, {}, ())
    probed = dataclasses.replace(prepared, inputs=prepared.probe, call=prepared.probe_call, golden=golden)

    def judge(
        golden: Tensors, models: Sequence[Tensors], candidate: Tensors | None = None, leaning: Sequence[Tensors] = ()
    ) -> list[TensorResult]:
        given = None if candidate is None else _as_probed(candidate)
        ran, leaned = ([_as_probed(one) for one in of] for of in (models, leaning))
        return _as_outputs(failure.judge(_as_probed(golden), ran, given, leaned))

    return dataclasses.replace(
        failure,
        results=_as_outputs([tensor for tensor in failure.results if tensor.probed]),
        candidate=_of_probe(failure.candidate),
        prepared=probed,
        judge=judge,
        rerun=None if rerun is None else lambda change, cotangents=None: _of_probe(rerun(change, cotangents)),
    )


def _of_probe(tensors: Tensors) -> Tensors:
    """The outputs on the probing inputs as outputs."""
    return {("output", name): tensor for (kind, name), tensor in tensors.items() if kind == PROBED}


def _as_outputs(probed: Sequence[TensorResult]) -> list[TensorResult]:
    return [dataclasses.replace(tensor, kind="output") for tensor in probed]


def _as_probed(tensors: Tensors) -> Tensors:
    return {(PROBED, name): tensor for (kind, name), tensor in tensors.items() if kind == "output"}
