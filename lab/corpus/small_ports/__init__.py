"""Small modules and their ports, a page for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from lab.corpus.port import Port
from lab.corpus.small_ports import (
    activations,
    images,
    lookups,
    modulation,
    operations,
    rounding,
    step_order,
    tensors_read,
)

BY_SUBJECT: Mapping[str, tuple[Port, ...]] = {
    "activations": activations.PORTS,
    "images": images.PORTS,
    "lookups": lookups.PORTS,
    "modulation": modulation.PORTS,
    "operations": operations.PORTS,
    "rounding": rounding.PORTS,
    "step_order": step_order.PORTS,
    "tensors_read": tensors_read.PORTS,
}
