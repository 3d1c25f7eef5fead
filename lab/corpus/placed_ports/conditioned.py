"""Models that read a second input: a diffusion transformer with modulated blocks, and a decoder that attends to one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.placed import (
    MLP,
    NOWHERE,
    OWN,
    At,
    build_layers,
    map_layers,
    merge_heads,
    place,
    scale_weights,
    split_heads,
)
from lab.corpus.small import Host
from parity.case.weight_map import stack

WIDTH, HEADS, HEAD_DIM, FFN = 64, 4, 16, 128

# DiT: patches of a noisy image, conditioned on a time step and a class.

BATCH, PATCHES, CHANNELS, CLASSES, FREQUENCIES, BLOCKS = 16, 8, 32, 10, 32, 3


class Mixer(nn.Module):
    """Attention of all patches to all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(each, HEAD_DIM) for each in self.qkv(x).chunk(3, dim=-1))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class DitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp = Mixer(), MLP(WIDTH, FFN)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class TimeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2 * FREQUENCIES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, steps: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(FREQUENCIES, device=steps.device) / FREQUENCIES)
        angles = steps[:, None].to(self.fc1.weight.dtype) * frequencies.to(self.fc1.weight.dtype)
        return self.fc2(F.silu(self.fc1(torch.cat((angles.cos(), angles.sin()), dim=-1))))


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.linear = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm(x), shift, scale))


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions = nn.Linear(CHANNELS, WIDTH), nn.Parameter(torch.randn(1, PATCHES, WIDTH))
        self.time, self.classes = TimeEmbedding(), nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(DitBlock() for _ in range(BLOCKS))
        self.final = FinalLayer()
        scale_weights(self, embedding=0.5)

    def forward(self, x: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(x) + self.positions
        c = self.time(steps) + self.classes(labels)
        for layer in self.layers:
            x = layer(x, c)
        return self.final(x, c)


class TEDitBlock(nn.Module):
    def __init__(
        self,
        te: Any,
        order: tuple[int, ...] = (0, 1, 2, 3, 4, 5),
        act: Any = F.silu,
        eps: float = 1e-6,
        mlp_adds_to: str = "stream",
        read_condition: Any = lambda c: c,
    ) -> None:
        super().__init__()
        self.order, self.act, self.eps, self.mlp_adds_to = order, act, eps, mlp_adds_to
        self.read_condition = read_condition
        self.modulation = te.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = te.Linear(WIDTH, 3 * WIDTH), te.Linear(WIDTH, WIDTH)
        self.core = te.DotProductAttention(
            HEADS, HEAD_DIM, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask"
        )
        self.mlp = nn.Sequential(te.Linear(WIDTH, FFN), nn.GELU(approximate="tanh"), te.Linear(FFN, WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        parts = self.modulation(self.act(self.read_condition(c)))[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (parts[number] for number in self.order)
        normed = F.layer_norm(x, (WIDTH,), eps=self.eps) * (1 + scale1) + shift1
        q, k, v = (part.contiguous() for part in self.qkv(normed).unflatten(-1, (3, HEADS, -1)).unbind(-3))
        x = x + gate1 * self.proj(self.core(q, k, v))
        normed = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale2) + shift2
        return (x if self.mlp_adds_to == "stream" else normed) + gate2 * self.mlp(normed)


class TEDit(nn.Module):
    def __init__(self, te: Any, at: At = NOWHERE, sine_first: bool = False, **options: Any) -> None:
        super().__init__()
        self.sine_first = sine_first
        self.patch, self.positions = te.Linear(CHANNELS, WIDTH), nn.Parameter(torch.zeros(1, PATCHES, WIDTH))
        self.time1, self.time2 = te.Linear(2 * FREQUENCIES, WIDTH), te.Linear(WIDTH, WIDTH)
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.layers = build_layers(BLOCKS, partial(TEDitBlock, te), at, options)
        self.modulation, self.linear = te.Linear(WIDTH, 2 * WIDTH), te.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(x) + self.positions
        c = self.embed_time(steps).to(x.dtype) + self.classes(labels)
        for layer in self.layers:
            x = layer(x, c)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, -1)
        return self.linear(F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift)

    def embed_time(self, steps: Tensor) -> Tensor:
        frequencies = 10_000.0 ** (-torch.arange(FREQUENCIES, device=steps.device) / FREQUENCIES)
        angles = torch.outer(steps.float(), frequencies)
        waves = (angles.sin(), angles.cos()) if self.sine_first else (angles.cos(), angles.sin())
        return self.time2(F.silu(self.time1(torch.cat(waves, -1).to(self.time1.weight.dtype))))


def map_dit() -> dict[Any, Any]:
    layer: dict[Any, Any] = {}
    own = {"positions": "positions", "classes.weight": "classes.weight"}
    for kind in ("weight", "bias"):
        layer |= {f"modulation.1.{kind}": f"modulation.{kind}", f"attn.qkv.{kind}": f"qkv.{kind}"}
        layer |= {f"attn.proj.{kind}": f"proj.{kind}"}
        layer |= {f"mlp.fc1.{kind}": f"mlp.0.{kind}", f"mlp.fc2.{kind}": f"mlp.2.{kind}"}
        own |= {
            f"patch.{kind}": f"patch.{kind}",
            f"time.fc1.{kind}": f"time1.{kind}",
            f"time.fc2.{kind}": f"time2.{kind}",
        }
        own |= {f"final.modulation.1.{kind}": f"modulation.{kind}", f"final.linear.{kind}": f"linear.{kind}"}
    return own | map_layers(layer, BLOCKS)


DIT = Host(
    "placed_dit",
    Dit,
    TEDit,
    lambda rng: (rng.normal(BATCH, PATCHES, CHANNELS), rng.integers(BATCH, high=50), rng.integers(BATCH, high=CLASSES)),
    weights=map_dit(),
)


# A decoder that attends to an encoder's output, with learned positions.

VOCABULARY, SEQ, MEMORY, LAYERS = 96, 16, 24, 3


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            split_heads(proj(read), HEAD_DIM)
            for proj, read in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        return self.out_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=memory is None)))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attn, self.cross, self.mlp = SelfAttention(), SelfAttention(), MLP(WIDTH, FFN)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        scale_weights(self)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


class QuickBackward(torch.autograd.Function):
    """GELU whose backward pass is that of its sigmoid approximation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(1.702 * x)
        return gradient * (sigmoid + 1.702 * x * sigmoid * (1 - sigmoid))


GELU = partial(F.gelu, approximate="tanh")


class TEDecoderLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        scale: float = HEAD_DIM**-0.5,
        cross_mask: str = "no_mask",
        act: Any = GELU,
        mlp_residual: str = "after cross",
        read_memory: Any = lambda memory: memory,
    ) -> None:
        super().__init__()
        self.act, self.mlp_residual, self.read_memory = act, mlp_residual, read_memory
        self.attn = te.MultiheadAttention(
            WIDTH, HEADS, attention_dropout=0.0, attn_mask_type="causal", input_layernorm=True, qkv_format="bshd"
        )
        self.query, self.key_value = te.LayerNormLinear(WIDTH, WIDTH), te.Linear(WIDTH, 2 * WIDTH)
        self.core = te.DotProductAttention(
            HEADS,
            HEAD_DIM,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=cross_mask,
            attention_type="cross",
            softmax_scale=scale,
        )
        self.out = te.Linear(WIDTH, WIDTH)
        self.up, self.down = te.LayerNormLinear(WIDTH, FFN), te.Linear(FFN, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        before = x + self.attn(x)
        q = self.query(before).unflatten(-1, (HEADS, -1))
        k, v = self.key_value(self.read_memory(memory)).unflatten(-1, (2, HEADS, -1)).unbind(-3)
        x = before + self.out(self.core(q, k.contiguous(), v.contiguous()))
        return (x if self.mlp_residual == "after cross" else before) + self.down(self.act(self.up(x)))


class TEDecoder(nn.Module):
    def __init__(self, te: Any, at: At = NOWHERE, scaled: bool = False, **options: Any) -> None:
        super().__init__()
        self.scaled = scaled
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = build_layers(LAYERS, partial(TEDecoderLayer, te), at, options)
        self.norm, self.head = te.LayerNorm(WIDTH), te.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = (x * WIDTH**0.5 if self.scaled else x) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


def map_decoder(value_first: tuple[int, ...] = ()) -> dict[Any, Any]:
    """Return the map; in some layers the cross attention's values take the place of its keys."""
    own = OWN | {name: name for name in ("positions.weight", "norm.bias")}
    layer: dict[Any, Any] = {}
    wrong: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        layer |= {
            f"attn.{name[0]}_proj.{kind}": f"attn.layernorm_qkv.{name}_{kind}" for name in ("query", "key", "value")
        }
        layer |= {
            f"attn.out_proj.{kind}": f"attn.proj.{kind}",
            f"norm1.{kind}": f"attn.layernorm_qkv.layer_norm_{kind}",
        }
        layer |= {f"cross.q_proj.{kind}": f"query.{kind}", f"norm2.{kind}": f"query.layer_norm_{kind}"}
        layer |= {f"cross.out_proj.{kind}": f"out.{kind}", f"norm3.{kind}": f"up.layer_norm_{kind}"}
        layer |= {f"mlp.fc1.{kind}": f"up.{kind}", f"mlp.fc2.{kind}": f"down.{kind}"}
        key, value = f"cross.k_proj.{kind}", f"cross.v_proj.{kind}"
        wrong |= {stack(value, key): f"key_value.{kind}"}
        layer |= {stack(key, value): f"key_value.{kind}"}
    wrong = {left: right for left, right in layer.items() if not right.startswith("key_value")} | wrong
    return own | map_layers(layer, LAYERS, dict.fromkeys(value_first, wrong))


DECODER = Host(
    "placed_decoder",
    Decoder,
    TEDecoder,
    lambda rng: (rng.integers(2, SEQ, high=VOCABULARY), rng.normal(2, MEMORY, WIDTH)),
    weights=map_decoder(),
)

PORTS = (
    place(DIT, "shift and scale of one MLP exchanged", ("operation", "parameters-exchanged"),
          "layers.{i}(|.modulation.1)", "chunk mul add linear", 1, order=(0, 1, 2, 4, 3, 5)),
    place(DIT, "gates of one block exchanged", ("operation", "parameters-exchanged"), "layers.{i}(|.modulation.1)",
          "chunk mul linear", 2, order=(0, 1, 5, 3, 4, 2)),
    place(DIT, "condition of blocks not activated", ("activation", "operation"), "layers.{i}.modulation.0", "silu",
          act=lambda c: c),
    place(DIT, "sines before cosines", "operation", "time(|.fc1)", "cat cos sin linear", sine_first=True),
    place(DIT, "MLP of one block added to its input", "residual-placement", "layers.{i}", "add", 0,
          mlp_adds_to="input"),
    place(DIT, "eps of one norm", "norm-eps", "layers.{i}.norm1", "layer_norm", 2, eps=1e-3),
    place(DIT, "condition of one block detached", "gradient-path-missing", "layers.{i}.modulation.[01]", "silu linear",
          1, backward=True, read_condition=Tensor.detach),
    place(DECODER, "cross attention of one layer not scaled", "softmax-scale", "layers.{i}.cross",
          "scaled_dot_product_attention", 1, scale=1.0),
    place(DECODER, "cross attention of one layer causal", "mask", "layers.{i}.cross", "scaled_dot_product_attention", 0,
          cross_mask="causal"),
    place(DECODER, "keys and values of one cross attention exchanged", ("key-value-swapped", "parameters-exchanged"),
          "layers.{i}.cross(|.k_proj|.v_proj)", "linear scaled_dot_product_attention", 2,
          weights=map_decoder((2,))),
    place(DECODER, "residual of one MLP from before the cross attention", "residual-placement", "layers.{i}", "add", 1,
          mlp_residual="before cross"),
    place(DECODER, "embeddings scaled as in the first Transformer", "factor", "(|tokens)", "embedding add",
          scaled=True),
    place(DECODER, "memory of one layer detached", "gradient-path-missing", "layers.{i}.cross.(k|v)_proj", "linear", 1,
          backward=True, read_memory=Tensor.detach),
    place(DECODER, "backward pass of another GELU", "gradient-scale", "layers.{i}.mlp", "gelu", backward=True,
          act=QuickBackward.apply),
)  # fmt: skip
