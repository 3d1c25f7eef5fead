"""Names what is wrong with a failed comparison; the codes are explained in ``docs/findings.md``."""

from parity.diagnosis.catalogue import subtle_hypotheses
from parity.diagnosis.hypothesis import Hypothesis

__all__ = ["Hypothesis", "subtle_hypotheses"]
