"""Write a few models in plain PyTorch and with TE, and make mistakes in the latter, everywhere or in one place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.case.case import Case, Pair, Rng
from parity.case.weight_map import Side

# The settings of a model, and mistakes in the settings of its port.


@dataclass(frozen=True)
class Settings:
    """A model's numbers and choices. A mistake changes some of them.

    The first fields are those of references. No reference changes those from ``norm_variance`` on, each of which is a
    way in which ports go wrong.
    """

    norm: str = "rms"
    eps: float = 1e-5
    bias: bool = False
    base: float = 10000.0
    rotated: float = 1.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: float = 64.0
    scaled_by: float = 0.25
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    activation: str = "swiglu"
    limit: float = 7.0
    alpha: float = 1.702
    chosen: int = 2
    router_scale: float = 1.0
    residual: float = 1.0
    multiplier: float = 1.0
    logits_divided: float = 1.0
    logits_softcap: float | None = None
    smoothing: float = 0.1
    z_loss: float = 1e-2

    norm_variance: str = "over n"
    eps_inside: bool = True
    centred: bool | None = None
    gain: bool = True
    normed: bool = True
    gain_shift: float = 0.0
    query_offset: int = 0
    key_offset: int = 0
    last_position: int = 1 << 20
    direction: float = 1.0
    interleaved: bool = False
    rotates_queries: bool = True
    rotates_keys: bool = True
    rotates_values: bool = False
    rotates_twice: bool = False
    causal: bool = True
    diagonal: int = 0
    softcap_after_mask: bool = False
    sink_sign: float = 1.0
    sinks_reversed: bool = False
    groups_interleaved: bool = False
    heads_reversed: bool = False
    keys_are_values: bool = False
    has_bias: bool = True
    bias_twice: bool = False
    gate_last: bool = False
    gelu_constant: float = 0.044715
    gelu_steepness: float = 1.702
    silu_steepness: float = 1.0
    renormalised: bool = True
    weighted: str = "outputs"
    experts_shifted: bool = False
    experts_gate_last: bool = False
    expert_scale: float = 1.0
    expert_activation: str = "silu"
    branch: bool = True
    residual_from_norm: bool = False
    detached: bool = False
    normed_again: bool = False
    final_norms: int = 1
    position_offset: int = 0


@dataclass(frozen=True)
class Mistake:
    """Wrong settings in a port.

    Attributes:
        changes: the settings that differ, with their values.
        layers: the layers in which they differ; empty for all.
        at: by axis, the elements that are computed with them: ``batch``, ``position``, ``channel`` of activations,
            ``head`` of queries, ``group`` of keys and values, ``expert`` of routing weights; empty for all. A step
            whose result has none of these axes remains right.
    """

    changes: Mapping[str, Any]
    layers: tuple[int, ...] = ()
    at: Mapping[str, slice] = field(default_factory=dict)

    def in_layer(self, number: int) -> Mistake | None:
        """Return the mistake if a layer has it."""
        return self if not self.layers or number in self.layers else None


HIDDEN, FFN, HEADS, GROUPS, EXPERTS, VOCABULARY = 64, 96, 4, 2, 4, 96
HEAD_DIM = HIDDEN // HEADS
BATCH, SEQ = 2, 32
# Standard deviation of the projections to queries, keys and router logits, so that a softmax is far from flat.
SHARP = 0.2


# The references: plain PyTorch.


def _linear(inputs: int, outputs: int, bias: bool, std: float | None = None) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    if std is not None:
        nn.init.normal_(linear.weight, std=std)
    return linear


def _norm(settings: Settings) -> nn.Module:
    kind = nn.RMSNorm if settings.norm == "rms" else nn.LayerNorm
    return kind(HIDDEN, eps=settings.eps)


def frequencies(settings: Settings) -> Tensor:
    """Return RoPE's frequencies as Hugging Face computes them, with Llama 3.1's scaling if a factor is given."""
    width = int(HEAD_DIM * settings.rotated)
    inverse = 1.0 / settings.base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    if settings.factor == 1.0:
        return inverse
    wavelengths = 2 * math.pi / inverse
    smooth = (settings.original / wavelengths - settings.low) / (settings.high - settings.low)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inverse / settings.factor + smooth * inverse


class Rotation(nn.Module):
    """RoPE of the first channels of each head, in halves."""

    frequencies: Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies(settings).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, heads, head_dim]``."""
        angles = torch.arange(x.shape[1], dtype=self.frequencies.dtype, device=x.device)[:, None] * self.frequencies
        cos, sin = (torch.cat((each, each), -1)[:, None].to(x.dtype) for each in (angles.cos(), angles.sin()))
        turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, kept), -1)


class Attention(nn.Module):
    """Causal attention with grouped keys and RoPE."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.q_proj = _linear(HIDDEN, HIDDEN, settings.bias, SHARP)
        self.k_proj = _linear(HIDDEN, GROUPS * HEAD_DIM, settings.bias, SHARP)
        self.v_proj = _linear(HIDDEN, GROUPS * HEAD_DIM, settings.bias)
        self.o_proj = _linear(HIDDEN, HIDDEN, settings.bias)
        self.rotation = Rotation(settings) if settings.rotated else nn.Identity()
        if settings.sinks:
            self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        q, k, v = (proj(x).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotation(q).transpose(1, 2), self.rotation(k).transpose(1, 2)
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v.transpose(1, 2)))
        scores = q @ k.transpose(-1, -2) * self.settings.scaled_by
        if self.settings.softcap is not None:
            scores = self.settings.softcap * torch.tanh(scores / self.settings.softcap)
        place = torch.arange(x.shape[1], device=x.device)
        distance = place[:, None] - place
        hidden = distance < 0
        if self.settings.window is not None:
            hidden = hidden | (distance > self.settings.window)
        scores = scores.masked_fill(hidden, -math.inf)
        if self.settings.sinks:
            sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
            shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return self.o_proj((shares @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gated MLP, or one with GELU."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        if settings.activation in ("swiglu", "clamped_swiglu"):
            self.gate_proj = _linear(HIDDEN, FFN, settings.bias)
        self.up_proj = _linear(HIDDEN, FFN, settings.bias)
        self.down_proj = _linear(FFN, HIDDEN, settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        up = self.up_proj(x)
        match self.settings.activation:
            case "swiglu":
                inner = F.silu(self.gate_proj(x)) * up
            case "clamped_swiglu":
                limit, gate = self.settings.limit, self.gate_proj(x).clamp(max=self.settings.limit)
                inner = gate * torch.sigmoid(self.settings.alpha * gate) * (up.clamp(-limit, limit) + 1)
            case "gelu_tanh":
                inner = F.gelu(up, approximate="tanh")
            case "gelu":
                inner = F.gelu(up)
            case _:
                inner = up * torch.sigmoid(1.702 * up)
        return self.down_proj(inner)


class Experts(nn.Module):
    """A mixture in which each expert computes every token, and a token's weights are 0 for all experts not chosen."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.router = _linear(HIDDEN, EXPERTS, False, SHARP)
        self.experts = nn.ModuleList(MLP(Settings()) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        shares = self.router(x).softmax(-1)
        largest, places = shares.topk(self.settings.chosen, dim=-1)
        largest = self.settings.router_scale * largest / largest.sum(-1, keepdim=True)
        weights = torch.zeros_like(shares).scatter(-1, places, largest)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * weights[..., None, :]).sum(-1)


class Residual(nn.Module):
    """``x + residual * inner(norm(x))``."""

    def __init__(self, settings: Settings, inner: nn.Module) -> None:
        super().__init__()
        self.settings, self.norm, self.inner = settings, _norm(settings), inner

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        return x + self.settings.residual * self.inner(self.norm(x))


class Model(nn.Module):
    """Embeddings, layers, a norm and an output projection."""

    def __init__(self, settings: Settings, layers: int) -> None:
        super().__init__()
        self.settings = settings
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.tokens.weight, std=1 / settings.multiplier)
        if not settings.rotated:
            self.positions = nn.Embedding(2 * SEQ, HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleList((Residual(settings, Attention(settings)), Residual(settings, MLP(settings))))
            for _ in range(layers)
        )
        self.norm = _norm(settings)
        self.head = _linear(HIDDEN, VOCABULARY, False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, seq]`` to logits."""
        x = self.tokens(tokens) * self.settings.multiplier
        if not self.settings.rotated:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            for part in layer.children():
                x = part(x)
        logits: Tensor = self.head(self.norm(x)) / self.settings.logits_divided
        if self.settings.logits_softcap is None:
            return logits
        return self.settings.logits_softcap * torch.tanh(logits / self.settings.logits_softcap)


class Loss(nn.Module):
    """Cross entropy with label smoothing, plus a multiple of the mean squared logarithm of the softmax's sum."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.head = settings, _linear(HIDDEN, VOCABULARY, False, SHARP)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` and ``[batch, seq]`` to ``[1]``."""
        logits = self.head(x).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=self.settings.smoothing)
        return (loss + self.settings.z_loss * logits.logsumexp(-1).square().mean()).view(1)


# The ports: TE's modules, with all that TE leaves to PyTorch written in another way than above.


class Steps(nn.Module):
    """A module whose steps are computed with right settings or, at the mistake's place, with wrong ones."""

    def __init__(self, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__()
        self.settings, self.mistake = settings, mistake

    def step(self, axes: str, fields: str, compute: Callable[[Settings], Tensor]) -> Tensor:
        """Compute a step.

        Args:
            axes: the names of the result's axes.
            fields: the settings that the result depends on.
            compute: computes the result with given settings.
        """
        mistake, names = self.mistake, axes.split()
        if mistake is None or not set(mistake.changes) & set(fields.split()):
            return compute(self.settings)
        wrong = dataclasses.replace(self.settings, **mistake.changes)
        if not mistake.at:
            return compute(wrong)
        if not set(mistake.at) & set(names):
            return compute(self.settings)
        right, mistaken = compute(self.settings), compute(wrong)
        place = torch.zeros(right.shape, dtype=torch.bool, device=right.device)
        place[tuple(mistake.at.get(name, slice(None)) for name in names)] = True
        return torch.where(place, mistaken, right)


TOKENS = "batch position channel"


# Mistakes of a norm that TE's own norm cannot make.
_WRITTEN_OUT = "norm_variance eps_inside centred gain normed gain_shift"


class TENorm(Steps):
    """TE's norm, or a plain one if TE has none that makes the mistake."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__(settings, mistake)
        plain = mistake is not None and not mistake.at and set(mistake.changes) & set(_WRITTEN_OUT.split())
        norms = nn if plain else te
        self.norm = (norms.RMSNorm if settings.norm == "rms" else norms.LayerNorm)(HIDDEN, eps=settings.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        return self.step(TOKENS, f"eps {_WRITTEN_OUT}", lambda settings: self._norm(settings, x))

    def _norm(self, settings: Settings, x: Tensor) -> Tensor:
        if dataclasses.replace(self.settings, eps=settings.eps) == settings:
            self.norm.eps = settings.eps
            return self.norm(x)
        if not settings.normed:
            return x
        wide, weight = x.float(), self.norm.weight.float() + settings.gain_shift
        centred = settings.norm == "layer" if settings.centred is None else settings.centred
        wide = wide - wide.mean(-1, keepdim=True) if centred else wide
        count = HIDDEN if settings.norm_variance == "over n" else HIDDEN - 1
        variance = wide.square().sum(-1, keepdim=True) / count
        root = (variance + settings.eps).sqrt() if settings.eps_inside else variance.sqrt() + settings.eps
        normed = wide / root
        normed = normed * weight if settings.gain else normed
        if settings.norm == "layer":
            normed = normed + self.norm.bias.float()
        return normed.to(x.dtype)


class TEAttention(Steps):
    """TE's projections and attention. Softcaps and sinks are written out."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__(settings, mistake)
        self.q_proj = te.Linear(HIDDEN, HIDDEN, bias=settings.bias)
        self.k_proj = te.Linear(HIDDEN, GROUPS * HEAD_DIM, bias=settings.bias)
        self.v_proj = te.Linear(HIDDEN, GROUPS * HEAD_DIM, bias=settings.bias)
        self.o_proj = te.Linear(HIDDEN, HIDDEN, bias=settings.bias)
        self.cores = nn.ModuleDict()
        wrong = dataclasses.replace(settings, **mistake.changes) if mistake is not None else settings
        for each in (settings, wrong):
            self.cores[_core_name(each)] = te.DotProductAttention(
                HEADS,
                HEAD_DIM,
                num_gqa_groups=GROUPS,
                attention_dropout=0.0,
                qkv_format="bshd",
                attn_mask_type="causal" if each.causal else "no_mask",
                window_size=(-1 if each.window is None else each.window, 0 if each.causal else -1),
                softmax_scale=each.scaled_by,
            )
        if settings.sinks:
            self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        q, k, v = (proj(x).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.settings.rotated:
            shared = "base rotated factor low high original last_position direction interleaved rotates_twice"
            q = self.step(
                "batch position head channel",
                f"{shared} query_offset rotates_queries",
                lambda one: _turned(one, q, "q"),
            )
            k = self.step(
                "batch position group channel", f"{shared} key_offset rotates_keys", lambda one: _turned(one, k, "k")
            )
            v = self.step("batch position group channel", "rotates_values", lambda one: _turned(one, v, "v"))
        context = self.step(
            "batch position head channel",
            "scaled_by window softcap causal diagonal softcap_after_mask sink_sign sinks_reversed groups_interleaved "
            "heads_reversed keys_are_values",
            lambda one: self._context(one, q, k, v),
        )
        output = self.o_proj(context.flatten(2))
        return self.step(TOKENS, "has_bias bias_twice", lambda one: _biased(one, output, self.o_proj))

    def _context(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if settings.heads_reversed:
            q = q.flip(2)
        if settings.keys_are_values:
            k, v = v, k
        if settings.groups_interleaved:
            k, v = (each.repeat(1, 1, HEADS // GROUPS, 1) for each in (k, v))
        if self.settings.softcap is None and not self.settings.sinks and not settings.diagonal and k.shape[2] == GROUPS:
            core = self.cores[_core_name(settings)]
            return core(q, k, v).unflatten(-1, (HEADS, HEAD_DIM))
        return self._written_out(settings, q, k, v)

    def _written_out(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] == GROUPS:
            k, v = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * settings.scaled_by
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        if settings.causal:
            visible = visible.tril(settings.diagonal)
        if settings.window is not None:
            visible = visible.triu(-settings.window)
        if settings.softcap_after_mask and settings.softcap is not None:
            scores = scores.masked_fill(~visible, -1e4)
            visible = torch.ones_like(visible)
        if settings.softcap is not None:
            scores = torch.tanh(scores / settings.softcap) * settings.softcap
        scores = scores.masked_fill(~visible, -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if settings.sinks:
            sinks = settings.sink_sign * (self.sinks.flip(0) if settings.sinks_reversed else self.sinks)
            total = torch.logaddexp(total, sinks.float()[:, None, None])
        shares = (scores - total).exp()
        return torch.einsum("bhqk,bkhd->bqhd", shares.to(v.dtype), v)


def _core_name(settings: Settings) -> str:
    return f"{settings.scaled_by:g} {settings.window} {settings.causal}".replace(".", "_")


def _turned(settings: Settings, x: Tensor, which: str) -> Tensor:
    """Return queries, keys or values after RoPE, computed pair by pair in FP32."""
    rotates = {"q": settings.rotates_queries, "k": settings.rotates_keys, "v": settings.rotates_values}[which]
    if not rotates:
        return x
    offset = {"q": settings.query_offset, "k": settings.key_offset, "v": 0}[which]
    positions = (torch.arange(x.shape[1], device=x.device) + offset).clamp(max=settings.last_position)
    angles = torch.outer(positions.double(), _port_frequencies(settings).to(x.device)).float()
    angles = angles[:, None] * settings.direction * (2 if settings.rotates_twice else 1)
    width = 2 * angles.shape[-1]
    wide, kept = x[..., :width].float(), x[..., width:]
    if settings.interleaved:
        one, other = wide[..., 0::2], wide[..., 1::2]
    else:
        one, other = wide[..., : width // 2], wide[..., width // 2 :]
    turned = one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()
    both = torch.stack(turned, -1).flatten(-2) if settings.interleaved else torch.cat(turned, -1)
    return torch.cat((both.to(x.dtype), kept), -1)


def _port_frequencies(settings: Settings) -> Tensor:
    """Return RoPE's frequencies as Meta's code computes them: one by one, with ranges of wavelengths."""
    width = int(HEAD_DIM * settings.rotated)
    found = []
    for pair in range(width // 2):
        frequency = settings.base ** (-2 * pair / width)
        if settings.factor != 1.0:
            wavelength = 2 * math.pi / frequency
            if wavelength > settings.original / settings.low:
                frequency /= settings.factor
            elif wavelength >= settings.original / settings.high:
                share = (settings.original / wavelength - settings.low) / (settings.high - settings.low)
                frequency = (1 - share) * frequency / settings.factor + share * frequency
        found.append(frequency)
    return torch.tensor(found, dtype=torch.float64)


def _biased(settings: Settings, output: Tensor, linear: Any) -> Tensor:
    """Return a Linear's output, without its bias or with it twice if the settings say so."""
    if settings.bias_twice:
        return output + linear.bias.to(output.dtype)
    return output if settings.has_bias else output - linear.bias.to(output.dtype)


class TEMLP(Steps):
    """TE's projections with an activation between."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__(settings, mistake)
        self.gated = settings.activation in ("swiglu", "clamped_swiglu")
        if self.gated:
            self.gate_proj = te.Linear(HIDDEN, FFN, bias=settings.bias)
        self.up_proj = te.Linear(HIDDEN, FFN, bias=settings.bias)
        self.down_proj = te.Linear(FFN, HIDDEN, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        up = self.up_proj(x)
        up = self.step(TOKENS, "has_bias bias_twice", lambda one: _biased(one, up, self.up_proj))
        gate = self.gate_proj(x) if self.gated else None
        inner = self.step(
            TOKENS,
            "activation limit alpha gate_last gelu_constant gelu_steepness silu_steepness",
            lambda one: _activated(one, gate, up),
        )
        return self.down_proj(inner)


def _activated(settings: Settings, gate: Tensor | None, up: Tensor) -> Tensor:
    dtype, up = up.dtype, up.float()
    if gate is not None:
        gate, up = (up, gate.float()) if settings.gate_last else (gate.float(), up)
    match settings.activation, gate:
        case "swiglu", Tensor():
            result = gate * torch.sigmoid(settings.silu_steepness * gate) * up
        case "clamped_swiglu", Tensor():
            capped = gate.minimum(torch.tensor(settings.limit))
            result = capped * torch.sigmoid(settings.alpha * capped)
            result = result * (1 + up.clamp(-settings.limit, settings.limit))
        case "geglu", Tensor():
            result = F.gelu(gate, approximate="tanh") * up
        case "glu", Tensor():
            result = torch.sigmoid(gate) * up
        case "gelu_tanh", _:
            inner = math.sqrt(2 / math.pi) * (up + settings.gelu_constant * up**3)
            result = 0.5 * up * (1 + torch.tanh(inner))
        case "gelu", _:
            result = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
        case "relu", _:
            result = up.relu()
        case "silu", _:
            result = F.silu(up)
        case "squared_relu", _:
            result = up.relu().square()
        case "quick_gelu", _:
            result = up * torch.sigmoid(settings.gelu_steepness * up)
        case other:
            raise ValueError(f"there is no activation {other}")
    return result.to(dtype)


class TEExperts(Steps):
    """Experts of TE's Linears, each over all tokens."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__(settings, mistake)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(TEMLP(te, Settings(), None) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        logits = self.router(x)
        weights = self.step(
            "batch position expert", "chosen router_scale renormalised", lambda one: _routed(one, logits)
        )
        outputs = self.step(
            "batch position channel expert",
            "weighted experts_shifted experts_gate_last expert_scale expert_activation",
            lambda one: self._outputs(one, x, weights),
        )
        return outputs.sum(-1)

    def _outputs(self, settings: Settings, x: Tensor, weights: Tensor) -> Tensor:
        """Return each expert's weighted output, ``[batch, seq, hidden, experts]``."""
        found = []
        for number in range(EXPERTS):
            expert: Any = self.experts[(number + 1) % EXPERTS if settings.experts_shifted else number]
            weight = weights[..., number, None]
            gate, up = (
                proj(x * weight if settings.weighted == "inputs" else x) for proj in (expert.gate_proj, expert.up_proj)
            )
            gate, up = (up, gate) if settings.experts_gate_last else (gate, up)
            acted = F.silu(gate) if settings.expert_activation == "silu" else F.gelu(gate)
            output = expert.down_proj(acted * up) * settings.expert_scale
            powers = {"inputs": 0, "outputs": 1, "twice": 2}[settings.weighted]
            found.append(output * weight**powers)
        return torch.stack(found, -1)


def _routed(settings: Settings, logits: Tensor) -> Tensor:
    """Return each expert's weight. The softmax over the chosen experts equals that over all, renormalised."""
    best = logits.topk(settings.chosen, dim=-1).indices
    chosen = F.one_hot(best, EXPERTS).sum(-2).bool()
    if settings.renormalised:
        shares = logits.float().masked_fill(~chosen, -math.inf).softmax(-1)
    else:
        shares = logits.float().softmax(-1) * chosen
    return (settings.router_scale * shares).to(logits.dtype)


class TEResidual(Steps):
    """A norm, the module that reads it, and the residual sum."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None, inner: nn.Module) -> None:
        super().__init__(settings, mistake)
        self.norm, self.inner = TENorm(te, settings, mistake), inner

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, seq, hidden]``."""
        normed = self.norm(x)
        branch = self.inner(normed)
        return self.step(TOKENS, "residual branch residual_from_norm", lambda one: _summed(one, x, normed, branch))


def _summed(settings: Settings, x: Tensor, normed: Tensor, branch: Tensor) -> Tensor:
    if not settings.branch:
        return x
    return (normed if settings.residual_from_norm else x) + branch * settings.residual


class TEModel(Steps):
    """The model, built of the same parts."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None, layers: int) -> None:
        super().__init__(settings, mistake)
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        if not settings.rotated:
            self.positions = nn.Embedding(2 * SEQ, HIDDEN)
        self.layers = nn.ModuleList()
        for number in range(layers):
            here = mistake.in_layer(number) if mistake else None
            attention, mlp = TEAttention(te, settings, here), TEMLP(te, settings, here)
            self.layers.append(
                nn.ModuleList((TEResidual(te, settings, here, attention), TEResidual(te, settings, here, mlp)))
            )
        self.norm = TENorm(te, settings, None if mistake is None or mistake.layers else mistake)
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, seq]`` to logits."""
        x = self.step(TOKENS, "multiplier position_offset", lambda one: self._embedded(one, tokens))
        changes = {} if self.mistake is None else self.mistake.changes
        for number, layer in enumerate(self.layers):
            here = self.mistake is not None and self.mistake.in_layer(number) is not None
            x = x.detach() if here and changes.get("detached") else x
            for part in layer.children():
                x = part(x)
            x = self.norm(x) if here and changes.get("normed_again") else x
        for _ in range(changes.get("final_norms", 1)):
            x = self.norm(x)
        logits = self.head(x)
        return self.step(TOKENS, "logits_divided logits_softcap", lambda one: _capped(one, logits))

    def _embedded(self, settings: Settings, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * settings.multiplier
        if settings.rotated:
            return x
        return x + self.positions(torch.arange(tokens.shape[1], device=tokens.device) + settings.position_offset)


def _capped(settings: Settings, logits: Tensor) -> Tensor:
    logits = logits / settings.logits_divided
    if settings.logits_softcap is None:
        return logits
    return torch.tanh(logits / settings.logits_softcap) * settings.logits_softcap


class TELoss(Steps):
    """The loss, written with logarithms of the softmax."""

    def __init__(self, te: ModuleType, settings: Settings, mistake: Mistake | None) -> None:
        super().__init__(settings, mistake)
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` and ``[batch, seq]`` to ``[1]``."""
        logits = self.head(x).float()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

        def losses(settings: Settings) -> Tensor:
            log_sum = logits.logsumexp(-1)
            likely = logits.gather(-1, labels[..., None]).squeeze(-1) - log_sum
            smooth = logits.mean(-1) - log_sum
            entropy = -(1 - settings.smoothing) * likely - settings.smoothing * smooth
            return entropy + settings.z_loss * log_sum.square()

        each = self.step("batch position", "smoothing z_loss", losses)
        return each.mean().view(1)


# The hosts: the models and modules that are written twice, with their settings and numbers of layers.


HOSTS: Mapping[str, Settings] = {
    "norm_mlp": Settings(),
    "gelu_mlp": Settings(norm="layer", bias=True, activation="gelu_tanh"),
    "erf_mlp": Settings(norm="layer", bias=True, activation="gelu"),
    "quick_mlp": Settings(norm="layer", bias=True, activation="quick_gelu"),
    "clamped_mlp": Settings(activation="clamped_swiglu"),
    "attention": Settings(bias=True),
    "window_attention": Settings(window=8),
    "softcap_attention": Settings(softcap=5.0),
    "sink_attention": Settings(sinks=True),
    "partial_rope_attention": Settings(rotated=0.5),
    "scaled_rope_attention": Settings(factor=8.0),
    "experts": Settings(router_scale=2.5),
    "llama": Settings(),
    "granite": Settings(multiplier=12.0, residual=0.25, logits_divided=8.0),
    "gemma": Settings(multiplier=8.0, logits_softcap=3.0),
    "gpt": Settings(norm="layer", bias=True, activation="gelu_tanh", rotated=0.0),
    "loss": Settings(),
}
LAYERS = {"llama": 4, "granite": 2, "gemma": 2, "gpt": 2}


def port(host: str, mistake: Mistake | None, layers: int | None = None) -> Case:
    """Return a host's pair as a case, with or without a mistake in its port, and with another number of layers."""

    def factory(te: ModuleType) -> Pair:
        reference, candidate = modules(te, host, mistake, layers)
        theirs = names_in_port([name for name, _ in reference.named_parameters()], candidate)
        weights: dict[Side, Side] = {right: name for name, right in theirs.items()}
        return Pair(reference=reference, candidate=candidate, weights=weights, inputs=_inputs(host))

    return Case(host, factory, sizes=({},), path=Path(__file__))


def names_in_port(names: Sequence[str], candidate: nn.Module) -> dict[str, str]:
    """Return the reference's parameter names by the port's names. ``names`` are the reference's."""
    theirs = dict(candidate.named_parameters())
    inside = {
        name: name.replace("norm.weight", "norm.norm.weight").replace("norm.bias", "norm.norm.bias") for name in names
    }
    return {inside[name] if inside[name] in theirs else name: name for name in names}


def modules(
    te: ModuleType, host: str, mistake: Mistake | None, layers: int | None = None
) -> tuple[nn.Module, nn.Module]:
    """Return a host's reference and its port."""
    settings = HOSTS[host]
    if host in LAYERS:
        layers = layers or LAYERS[host]
        return Model(settings, layers), TEModel(te, settings, mistake, layers)
    if host == "loss":
        return Loss(settings), TELoss(te, settings, mistake)
    if host == "experts":
        return Experts(settings), TEExperts(te, settings, mistake)
    if host.endswith("attention"):
        return Attention(settings), TEAttention(te, settings, mistake)
    return Residual(settings, MLP(settings)), TEResidual(te, settings, mistake, TEMLP(te, settings, mistake))


def _inputs(host: str) -> Callable[[Rng], Any]:
    def tokens(rng: Rng) -> Tensor:
        return rng.integers(BATCH, SEQ, high=VOCABULARY)

    def activations(rng: Rng) -> Tensor:
        return rng.normal(BATCH, SEQ, HIDDEN)

    if host == "loss":
        return lambda rng: (activations(rng), tokens(rng))
    return tokens if host in LAYERS else activations
