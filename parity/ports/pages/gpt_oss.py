"""gpt-oss: a learned score more in each head's softmax, and experts with biases, a clamp, and gate and up in turn."""

from __future__ import annotations

from parity.ports.form import Form
from parity.ports.reading import Config


def adapt(form: Form, config: Config) -> None:
    assert form.experts is not None
    form.mlp.width = ""
    form.experts.score = "softmax_of_chosen"
    form.experts.transposed = True
    form.experts.gating = "interleaved"
    form.experts.clamp = ("config.swiglu_alpha", "config.swiglu_limit")
