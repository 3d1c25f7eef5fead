"""Small modules and their ports, a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from lab.corpus.port import Port
from lab.corpus.small_ports import losses, modulation, rope_scaling, rotation, rounding

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    "losses": losses.PORTS,
    "modulation": modulation.PORTS,
    "rope_scaling": rope_scaling.PORTS,
    "rotation": rotation.PORTS,
    "rounding": rounding.PORTS,
}
