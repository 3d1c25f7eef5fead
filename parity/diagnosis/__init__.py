"""Names what is wrong with a failed comparison; the codes are explained in ``docs/findings.md``."""

from parity.diagnosis.budget import Budget, in_time
from parity.diagnosis.catalogue import calls_of, subtle_hypotheses, subtle_hypotheses_anywhere
from parity.diagnosis.codes import UNEXPLAINED
from parity.diagnosis.failure import Failure, Rerun
from parity.diagnosis.findings import findings
from parity.diagnosis.held_weights import held_findings
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.reruns.argument_names import with_argument_names
from parity.diagnosis.search import CHECKS_FOR_FILTERS, Screened
from parity.diagnosis.verify import is_loud, verified

__all__ = [
    "CHECKS_FOR_FILTERS",
    "UNEXPLAINED",
    "Budget",
    "Failure",
    "Hypothesis",
    "Rerun",
    "Screened",
    "calls_of",
    "findings",
    "held_findings",
    "in_time",
    "is_loud",
    "subtle_hypotheses",
    "subtle_hypotheses_anywhere",
    "verified",
    "with_argument_names",
]
