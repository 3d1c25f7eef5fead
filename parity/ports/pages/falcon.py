"""Falcon: three layouts of fused projections, and attention and MLP side by side."""

from __future__ import annotations

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    if config.new_decoder_architecture:
        form.attention.groups = "config.num_kv_heads"
    elif config.multi_query:
        form.attention.groups, form.qkv_by_head = "1", False
    form.placement.parallel = config.new_decoder_architecture or config.parallel_attn
    if config.alibi:
        form.attention.alibi = "self.head_dim**-0.5"  # biases are added before scores are scaled
