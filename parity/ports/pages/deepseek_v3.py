"""DeepSeek-V3: latent attention, and a router that chooses among the best groups of experts."""

from __future__ import annotations

from parity.ports.form import Config, Form, Latent, Norm


def adapt(form: Form, config: Config) -> None:
    form.attention.latent = Latent(low_rank_queries=config.q_lora_rank is not None)
    form.attention.norm = Norm("RMSNorm", "1e-6")
    assert form.positions is not None
    assert form.experts is not None
    form.positions.width = "config.qk_rope_head_dim"
    form.positions.interleaved = config.rope_interleave
    form.experts.score = "sigmoid"
    form.experts.correction = "e_score_correction_bias"
    form.experts.float = True
    form.experts.groups = ("config.n_group", "config.topk_group")
    form.experts.factor = "config.routed_scaling_factor"
    form.experts.tiny = "1e-20"
