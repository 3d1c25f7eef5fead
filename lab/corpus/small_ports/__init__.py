"""Small modules and their ports, a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from lab.corpus.port import Port
from lab.corpus.small_ports import modulation, optimizers, parts, rounding, weight_maps

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    "modulation": modulation.PORTS,
    "optimizers": optimizers.PORTS,
    "parts": parts.PORTS,
    "rounding": rounding.PORTS,
    "weight_maps": weight_maps.PORTS,
}
