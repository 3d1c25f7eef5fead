"""Small layers whose parameters are named and laid out as in well-known models, and which copy nothing else of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.reference import CoreAttention, RotaryEmbedding, rotate_interleaved


class Conv1D(nn.Module):
    """GPT-2's linear layer: ``x @ weight + bias`` with a weight ``[in, out]``."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(features_in, features_out))
        self.bias = nn.Parameter(0.1 * torch.randn(features_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(hidden, 3 * hidden), "c_proj": Conv1D(hidden, hidden)})
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(hidden, ffn), "c_proj": Conv1D(ffn, hidden)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in qkv)
        x = x + self.attn["c_proj"](CoreAttention(causal=True)(query, key, value))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class FalconLayer(nn.Module):
    """Falcon's layer, with a projection fused by group: queries, key, value of each. One group per head is GPT-NeoX."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.groups, self.head_dim = groups, hidden // heads
        self.input_layernorm = nn.LayerNorm(hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.attention = nn.ModuleDict(
            {
                "query_key_value": nn.Linear(hidden, (heads + 2 * groups) * self.head_dim),
                "dense": nn.Linear(hidden, hidden),
            }
        )
        self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(hidden, ffn), "dense_4h_to_h": nn.Linear(ffn, hidden)})

    def forward(self, x: Tensor) -> Tensor:
        fused = self.attention["query_key_value"](self.input_layernorm(x))
        grouped = fused.unflatten(-1, (self.groups, -1, self.head_dim))
        query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
        x = x + self.attention["dense"](CoreAttention(causal=True)(query, key, value))
        hidden = F.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)), approximate="tanh")
        return x + self.mlp["dense_4h_to_h"](hidden)


class LlamaLayer(nn.Module):
    """Llama's layer with Hugging Face's names; ``fused`` as in Phi-3, ``meta`` with Meta's own names and rotation."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, fused: bool = False, meta: bool = False) -> None:
        super().__init__()
        self.head_dim, self.fused, self.meta = hidden // heads, fused, meta
        q, kv = heads * self.head_dim, groups * self.head_dim
        self.widths = [q, kv, kv]
        self.norms = ("attention_norm", "ffn_norm") if meta else ("input_layernorm", "post_attention_layernorm")
        names = (
            ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
            if meta
            else ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        )
        attention, mlp = ("attention", "feed_forward") if meta else ("self_attn", "mlp")
        projections: dict[str, nn.Module] = {names[3]: linear(q, hidden)}
        if fused:
            projections["qkv_proj"] = linear(hidden, q + 2 * kv)
        else:
            projections |= {name: linear(hidden, width) for name, width in zip(names[:3], self.widths, strict=True)}
        self.add_module(attention, nn.ModuleDict(projections))
        layers: dict[str, nn.Module] = (
            {"gate_up_proj": linear(hidden, 2 * ffn)}
            if fused
            else {names[4]: linear(hidden, ffn), names[5]: linear(hidden, ffn)}
        )
        self.add_module(mlp, nn.ModuleDict(layers | {names[6]: linear(ffn, hidden)}))
        for norm in self.norms:
            self.add_module(norm, nn.RMSNorm(hidden, eps=1e-5))
        self.names = names
        self.projections, self.layers = [self.get_submodule(attention)], [self.get_submodule(mlp)]
        self.rope = RotaryEmbedding(self.head_dim)

    def rotate(self, x: Tensor) -> Tensor:
        if not self.meta:
            return self.rope(x)
        positions = torch.arange(x.shape[1], dtype=self.rope.inv_freq.dtype)
        return rotate_interleaved(x, positions[:, None] * self.rope.inv_freq)

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.projections[0], self.layers[0]
        h = self.get_submodule(self.norms[0])(x)
        if self.fused:
            qkv = attention["qkv_proj"](h).split(self.widths, -1)
        else:
            qkv = [attention[name](h) for name in self.names[:3]]
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        x = x + attention[self.names[3]](CoreAttention(causal=True)(self.rotate(query), self.rotate(key), value))
        h = self.get_submodule(self.norms[1])(x)
        if self.fused:
            gate, up = mlp["gate_up_proj"](h).chunk(2, -1)
        else:
            gate, up = mlp[self.names[4]](h), mlp[self.names[5]](h)
        return x + mlp[self.names[6]](F.silu(gate) * up)


class MixtralBlock(nn.Module):
    """A mixture of experts in which every expert sees every token, weighted by the router."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.gate = linear(hidden, experts)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"w1": linear(hidden, ffn), "w2": linear(ffn, hidden), "w3": linear(hidden, ffn)})
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = [expert["w2"](F.silu(expert["w1"](x)) * expert["w3"](x)) for expert in self.experts]
        return (torch.stack(outputs, -1) * weights[..., None, :]).sum(-1)


class FusedMixtralBlock(nn.Module):
    """The same mixture with one weight ``[experts, out, in]`` for all experts."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.gate = linear(hidden, experts)
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(0.1 * torch.randn(experts, 2 * ffn, hidden)),
                "down_proj": nn.Parameter(0.1 * torch.randn(experts, hidden, ffn)),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        gate, up = torch.einsum("ti,eoi->teo", x, self.experts["gate_up_proj"]).chunk(2, -1)
        outputs = torch.einsum("teo,eho->teh", F.silu(gate) * up, self.experts["down_proj"])
        return (outputs * weights[..., None]).sum(1)


def linear(features_in: int, features_out: int) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(features_in, features_out, bias=False)
