"""DINOv2: its largest model has a gated MLP, whose width follows from a ratio."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    if config.use_swiglu_ffn:
        form.mlp.activation = "silu"
        form.mlp.width = f"(int({form.mlp.width} * 2 / 3) + 7) // 8 * 8"
