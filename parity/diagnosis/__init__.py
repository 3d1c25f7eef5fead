"""Names what is wrong with a failed comparison; the codes are explained in ``docs/findings.md``."""

from parity.diagnosis.catalogue import subtle_hypotheses, trace_of
from parity.diagnosis.codes import UNEXPLAINED
from parity.diagnosis.findings import findings
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.search import Failure

__all__ = ["UNEXPLAINED", "Failure", "Hypothesis", "findings", "subtle_hypotheses", "trace_of"]
