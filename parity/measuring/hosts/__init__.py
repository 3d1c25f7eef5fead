"""All right ports into which bugs are planted, by name."""

from __future__ import annotations

from parity.case.case import Case
from parity.measuring.hosts import attention, layer, linear

HOSTS: dict[str, Case] = {
    case.name: case for case in (*linear.LINEAR_HOSTS, *attention.HOSTS, *layer.HOSTS, *linear.TRAINING_HOSTS)
}
