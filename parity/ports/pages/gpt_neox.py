"""GPT-NeoX: attention and MLP side by side, each with a norm of its own."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    form.placement.parallel = config.use_parallel_residual
