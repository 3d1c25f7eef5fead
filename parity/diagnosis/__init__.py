"""Names what is wrong with a failed comparison; the codes are explained in ``docs/findings.md``."""

from parity.diagnosis.catalogue import calls_of, subtle_hypotheses
from parity.diagnosis.codes import UNEXPLAINED
from parity.diagnosis.failure import Failure
from parity.diagnosis.findings import findings
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.search import Screened
from parity.diagnosis.verify import is_loud

__all__ = ["UNEXPLAINED", "Failure", "Hypothesis", "Screened", "calls_of", "findings", "is_loud", "subtle_hypotheses"]
