"""Judge a port of the corpus, and search for the cause."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lab.corpus.catalogue import PORTS, RIGHT
from parity import te
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.measuring.record import FourDigits
from parity.te import PRECISIONS, Backend


@dataclass(frozen=True)
class Judgement:
    """One port at one precision.

    Attributes:
        row: a port's name in the corpus; empty for a right port.
        host: its host's name.
        precision: a name in ``parity.te.PRECISIONS``.
        seed: the seed of weights and inputs.
        searched: whether the cause was searched for.
        backend: the backend of TE's kernels.
    """

    row: str
    host: str
    precision: str
    seed: int
    searched: bool = True
    backend: Backend = "cpu"


@dataclass(frozen=True)
class Said:
    """Hold parity's verdict on a port.

    Attributes:
        status: ``passed``, ``failed`` or ``error``.
        margin: the largest margin.
        findings: title, message and whether it is stated as a fact, for each finding in parity's order.
        reason: the reason for an error.
        seconds: processor time of the search for the cause.
    """

    status: str
    margin: FourDigits
    findings: tuple[tuple[str, str, bool], ...]
    reason: str
    seconds: FourDigits


def said_of(one: Judgement) -> Said:
    """Judge one port, at its first size, and search for the cause, if asked, without a time limit."""
    kernels = te.kernels(one.backend)
    case = PORTS[one.row, one.host].case if one.row else RIGHT[one.host]
    checked = check_case(case, kernels.te)[0]
    judged = judge_at(case, checked, PRECISIONS[one.precision], one.seed, kernels, packaged())
    began = time.process_time()
    result = explain_at(judged, 0.0 if one.searched else None)
    seconds = time.process_time() - began
    findings = tuple((one.title, one.message, one.sure) for one in result.findings)
    return Said(result.status, result.margin, findings, result.reason, seconds)
