"""gpt-oss: a learned score more in each head's softmax, and experts with biases, a clamp, and gate and up in turn."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    assert form.experts is not None
    form.experts.score = "softmax_of_chosen"
    form.experts.transposed = True
    form.experts.gating = "interleaved"
    form.experts.clamp = ("config.swiglu_alpha", "config.swiglu_limit")
