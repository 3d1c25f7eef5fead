"""BLOOM: its GELU is the one by tanh, which its configuration does not say."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    form.mlp.activation = "gelu_new"
    if config.apply_residual_connection_post_layernorm:
        form.unknown.append("residuals are taken after norms, which the port does not do")
