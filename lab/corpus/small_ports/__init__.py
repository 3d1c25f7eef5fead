"""Small modules and their ports, a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from lab.corpus.port import Port
from lab.corpus.small_ports import masks, modulation, padding, rounding, scores

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    "masks": masks.PORTS,
    "modulation": modulation.PORTS,
    "padding": padding.PORTS,
    "rounding": rounding.PORTS,
    "scores": scores.PORTS,
}
