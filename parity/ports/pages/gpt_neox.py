"""GPT-NeoX: attention and MLP side by side, and a projection that is fused by head."""

from __future__ import annotations

from parity.ports.form import Form
from parity.ports.reading import Config


def adapt(form: Form, config: Config) -> None:
    form.placement.parallel = config.use_parallel_residual
    form.qkv_by_head = True
