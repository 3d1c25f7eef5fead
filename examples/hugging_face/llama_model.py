"""Compare all of Llama, as transformers has it, with a model of TE's layers; and a checkpoint of it that was converted.

docs/hugging-face.md goes through this file. ``parity run`` compares the pair. ``python llama_model.py ORIGINAL
CONVERTED.safetensors`` compares two loaded models on real text: that of a folder as Hugging Face has it, and that of
``parity convert``, in TE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import parity

LAYER = {
    "input_layernorm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attn.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "self_attn.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "self_attn.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "self_attn.o_proj.weight": "self_attention.proj.weight",
    "post_attention_layernorm.weight": "layernorm_mlp.layer_norm_weight",
    parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}
WEIGHTS = {
    "model.embed_tokens.weight": "embedding.weight",
    **parity.under(LAYER, "model.layers.{i}.", "layers.{i}."),
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


class Llama(nn.Module):
    """The port: an embedding, TE's layers, its norm and its head."""

    def __init__(self, te: ModuleType, config: LlamaConfig, eps: float | None = None) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        eps = config.rms_norm_eps if eps is None else eps
        self.embedding = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                hidden,
                config.intermediate_size,
                heads,
                num_gqa_groups=config.num_key_value_heads,
                normalization="RMSNorm",
                layernorm_epsilon=eps,
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = te.RMSNorm(hidden, eps=eps)
        self.head = te.Linear(hidden, config.vocab_size, bias=False)
        rope = te.RotaryPositionEmbedding(hidden // heads, rotary_base=config.rope_parameters["rope_theta"])
        self.rope = [rope]  # no submodule: .to(bfloat16) would round its frequencies

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``[batch, seq, vocabulary]``."""
        x, angles = self.embedding(ids), self.rope[0](ids.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    found: Tensor = model(ids, use_cache=False).logits
    return found


def size_of(config: LlamaConfig) -> dict[str, Any]:
    """Return the arguments of the pair's function for a model of this configuration."""
    return dict(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        vocabulary=config.vocab_size,
    )


def config_of(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )


TINY = dict(layers=2, hidden=128, ffn=384, heads=4, groups=2, vocabulary=256)


@parity.pair("hugging_face_llama_model", sizes=[dict(batch=2, seq=32, **TINY)])
def llama_model(te: ModuleType, vocabulary: int, batch: int = 2, seq: int = 32, **size: int) -> parity.Pair:
    config = config_of(vocabulary=vocabulary, **size)
    return parity.Pair(
        reference=LlamaForCausalLM(config),
        candidate=Llama(te, config),
        weights=WEIGHTS,
        call_reference=logits,
        inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=vocabulary),
    )


# A checkpoint, after its conversion: the model from the one file against the model from the other.


TEXT = b"""TransformerEngine's modules compute what PyTorch's do, with fewer kernels and in fewer bits. \
Whoever moves a model to them wants to know whether what differs is rounding, or a mistake."""


def token_ids(text: bytes) -> Tensor:
    """Return the ids ``[2, seq]`` of a text to a model whose tokens are bytes; take your model's own tokenizer here."""
    ids = torch.tensor(list(text))
    return ids[: len(ids) // 2 * 2].view(2, -1)


def compare_checkpoints(
    original: Path, converted: Path, precisions: tuple[str, ...] = ("fp32", "bf16")
) -> list[parity.Result]:
    """Compare both models on a text, each with the weights that it was loaded with.

    Args:
        original: a folder as ``save_pretrained`` writes it.
        converted: the file of safetensors that ``parity convert`` made of it.
        precisions: as of ``parity.compare``.
    """
    te = parity.te.kernels().te
    reference = LlamaForCausalLM.from_pretrained(original, dtype=torch.float32, attn_implementation="sdpa")
    candidate = Llama(te, reference.config)
    candidate.load_state_dict(load_file(converted), strict=True)
    pair = parity.Pair(
        reference,
        candidate,
        weights=WEIGHTS,
        call_reference=logits,
        inputs=lambda rng: token_ids(TEXT),
    )
    return parity.compare(pair, precisions)


if __name__ == "__main__":
    for result in compare_checkpoints(Path(sys.argv[1]), Path(sys.argv[2])):
        print(result.item, result.status, f"margin {result.margin:.2f}")
