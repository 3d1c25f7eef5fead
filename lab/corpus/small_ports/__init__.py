"""Small modules and their ports, a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from lab.corpus.port import Port
from lab.corpus.small_ports import blocks, experts, modulation, norm_places, norms, residuals, rounding

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    "blocks": blocks.PORTS,
    "experts": experts.PORTS,
    "modulation": modulation.PORTS,
    "norm_places": norm_places.PORTS,
    "norms": norms.PORTS,
    "residuals": residuals.PORTS,
    "rounding": rounding.PORTS,
}
