"""All hosts by name."""

from __future__ import annotations

from parity.case.case import Case
from parity.lab.zoo.hosts import (
    attention,
    core_attention,
    layer,
    linear,
    mixture,
    mlp,
    model,
    norm,
    optimizer,
    rope,
    training,
)

HOSTS: dict[str, Case] = {
    case.name: case
    for module in (linear, norm, mlp, core_attention, attention, rope, layer, mixture, model, training, optimizer)
    for case in module.HOSTS
}
