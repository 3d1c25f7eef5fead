"""ESM-2: queries are scaled before they are rotated, so the scale that its attention passes on is 1."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    form.attention.scale = ""
