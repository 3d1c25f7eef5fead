"""Linear layers alone, norms, MLPs, and linear layers in steps of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW, Optimizer

from parity import reference
from parity.case.case import Pair
from parity.case.weight_map import WeightMap, shift, stack
from parity.measuring.hosts.host import UNQUANTIZED, construct, host
from parity.reference import NormLinear

# Linear layers, with and without a norm in front.


SMALL_LINEAR = dict(batch=2, seq=32, width=64, out=96)
LARGE_LINEAR = dict(batch=2, seq=128, width=256, out=384)
LOW_RANK = (SMALL_LINEAR | dict(rank=16), LARGE_LINEAR | dict(rank=16))
ALPHA = 32.0
SQUARE = (dict(batch=2, seq=32, width=64), dict(batch=2, seq=128, width=256))


class LowRankLinear(nn.Module):
    """A linear layer with a low-rank addition that is scaled by ``ALPHA`` over its rank, as in LoRA."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = linear(width, out, bias=False)
        self.down = linear(width, rank, bias=False)
        self.up = linear(rank, out, bias=False)
        self.scale = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to ``[batch, seq, out]``."""
        return self.base(x) + self.scale * self.up(self.down(x))


@host("linear", SMALL_LINEAR, LARGE_LINEAR)
def linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, out),
        candidate=construct(te.Linear, width, out),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("square_linear", *SQUARE)
def square_linear(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, width, bias=False),
        candidate=construct(te.Linear, width, width, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("norm_linear", SMALL_LINEAR, LARGE_LINEAR)
def norm_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=NormLinear(nn.LayerNorm(width), width, out),
        candidate=construct(te.LayerNormLinear, width, out),
        weights={
            "norm.weight": "layer_norm_weight",
            "norm.bias": "layer_norm_bias",
            "linear.weight": "weight",
            "linear.bias": "bias",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("low_rank_linear", *LOW_RANK)
def low_rank_linear(te: ModuleType, width: int, out: int, rank: int, **_: Any) -> Pair:
    return Pair(
        reference=LowRankLinear(nn.Linear, width, out, rank),
        candidate=LowRankLinear(te.Linear, width, out, rank),
        weights={f"{name}.weight": f"{name}.weight" for name in ("base", "down", "up")},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


# Norms by themselves.


NORMS = (dict(batch=2, seq=32, width=128), dict(batch=2, seq=128, width=512))
# Standard deviation of embeddings in GPT-2 and Llama when training begins, which the first norm reads.
EMBEDDING_STD = 0.02


@host("layernorm", *NORMS, precisions=UNQUANTIZED)
def layernorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.LayerNorm(width),
        candidate=construct(te.LayerNorm, width),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width, mean=0.5),
    )


@host("rmsnorm", *NORMS, precisions=UNQUANTIZED)
def rmsnorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-5),
        candidate=construct(te.RMSNorm, width),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("rmsnorm_of_embeddings", *NORMS, precisions=UNQUANTIZED)
def rmsnorm_of_embeddings(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-6),
        candidate=construct(te.RMSNorm, width, eps=1e-6),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width, std=EMBEDDING_STD),
    )


@host("zero_centered_rmsnorm", *NORMS, precisions=UNQUANTIZED)
def zero_centered_rmsnorm(te: ModuleType, width: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.RMSNorm(width, eps=1e-5),
        candidate=construct(te.RMSNorm, width, zero_centered_gamma=True),
        weights={shift("weight", -1.0): "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


# A norm and an MLP, fused in one TE module, or composed of two if TE lacks the activation.


SMALL_MLP = dict(batch=2, seq=32, hidden=64, ffn=128)
LARGE_MLP = dict(batch=2, seq=128, hidden=256, ffn=512)
# Scales the first layer's weights so that activations reach the limit of a clamped SwiGLU, 7.
CLAMPING_GAIN = 10.0

PLAIN_WEIGHTS: WeightMap = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "up_proj.weight": "fc1_weight",
    "up_proj.bias": "fc1_bias",
    "down_proj.weight": "fc2_weight",
    "down_proj.bias": "fc2_bias",
}
GATED_WEIGHTS: WeightMap = {
    "norm.weight": "layer_norm_weight",
    stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
    "down_proj.weight": "fc2_weight",
}


class ErfMLP(nn.Module):
    """``down(gelu(up(layer_norm(x))))`` with PyTorch's default GELU, as in BERT."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up_proj = nn.Linear(hidden, ffn)
        self.down_proj = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same."""
        return self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class ComposedMLP(nn.Module):
    """TE's two linear layers with any activation between them."""

    def __init__(self, te: ModuleType, hidden: int, ffn: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1 = te.LayerNormLinear(hidden, ffn)
        self.fc2 = te.Linear(ffn, hidden)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same."""
        return self.fc2(self.activation(self.fc1(x)))


@host("gelu_mlp", SMALL_MLP, LARGE_MLP)
def gelu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.MLP(hidden, ffn, "gelu"),
        candidate=construct(te.LayerNormMLP, hidden, ffn),
        weights=PLAIN_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("erf_gelu_mlp", SMALL_MLP, LARGE_MLP)
def erf_gelu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=ErfMLP(hidden, ffn),
        candidate=ComposedMLP(te, hidden, ffn, F.gelu),
        weights={
            "norm.weight": "fc1.layer_norm_weight",
            "norm.bias": "fc1.layer_norm_bias",
            "up_proj.weight": "fc1.weight",
            "up_proj.bias": "fc1.bias",
            "down_proj.weight": "fc2.weight",
            "down_proj.bias": "fc2.bias",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("swiglu_mlp", SMALL_MLP, LARGE_MLP)
def swiglu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.SwiGLUMLP(hidden, ffn),
        candidate=construct(te.LayerNormMLP, hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False),
        weights=GATED_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("clamped_swiglu_mlp", SMALL_MLP, LARGE_MLP)
def clamped_swiglu_mlp(te: ModuleType, hidden: int, ffn: int, **_: Any) -> Pair:
    mlp = reference.GatedMLP(hidden, ffn, "clamped_swiglu")
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight.data.mul_(CLAMPING_GAIN)
    return Pair(
        reference=mlp,
        candidate=construct(
            te.LayerNormMLP, hidden, ffn, normalization="RMSNorm", activation="clamped_swiglu", bias=False
        ),
        weights=GATED_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


LINEAR_HOSTS = (
    linear,
    square_linear,
    norm_linear,
    low_rank_linear,
    layernorm,
    rmsnorm,
    rmsnorm_of_embeddings,
    zero_centered_rmsnorm,
    gelu_mlp,
    erf_gelu_mlp,
    swiglu_mlp,
    clamped_swiglu_mlp,
)


# Microbatches, averaged losses, and steps on master weights.


# A row is a microbatch. MXFP8 needs a multiple of 32 tokens in each.
SMALL_MICROBATCHES = dict(batch=32, seq=32, width=64, out=96)
LARGE_MICROBATCHES = dict(batch=64, seq=32, width=256, out=384)
STEP = (dict(batch=2, seq=32, width=64, out=96), dict(batch=2, seq=128, width=256, out=384))
# Each step is smaller than half the distance between most weights' BF16 neighbours, but all together are larger.
STEPS = 32
LEARNING_RATE = 5e-5
# How many tokens a loss is averaged over. A power of two, so that the factor is exact.
TOKENS = 2**16


class Microbatched(nn.Module):
    """A linear layer that reads a batch row by row and sums its weight gradient in ``main_grad``, as in Megatron.

    Attributes:
        main_grad_dtype: the dtype in which microbatches are summed.
        is_first: TE's ``is_first_microbatch`` for every microbatch: True starts a new sum, None adds to the old one.
    """

    def __init__(self, te: ModuleType, width: int, out: int) -> None:
        super().__init__()
        self.linear = te.Linear(width, out, bias=False, fuse_wgrad_accumulation=True)
        self.main_grad_dtype = torch.float32
        self.is_first: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to ``[batch, seq, out]``."""
        weight = self.linear.weight
        weight.main_grad = torch.zeros(weight.shape, dtype=self.main_grad_dtype, device=weight.device)
        weight.grad_added_to_main_grad = False
        if not hasattr(weight, "reads_main_grad"):
            weight.register_post_accumulate_grad_hook(_read_main_grad)
            weight.reads_main_grad = True
        return torch.cat([self.linear(row, is_first_microbatch=self.is_first) for row in x.split(1)])


def _read_main_grad(weight: Any) -> None:
    """Copy the gradient from ``main_grad`` to ``grad``, where TE leaves a dummy."""
    weight.grad = weight.main_grad.to(weight.dtype)


class Stepped(nn.Module):
    """A linear layer after some steps of an optimizer on FP32 master weights.

    Attributes:
        step: maps the weight, in the module's dtype, and the update to the new weight in the same dtype.
    """

    def __init__(self, te: ModuleType, width: int, out: int) -> None:
        super().__init__()
        self.linear = te.Linear(width, out, bias=False)
        self.step = stepped

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Take ``[batch, seq, width]``, and an update of the weight's shape."""
        return functional_call(self.linear, {"weight": self.step(self.linear.weight, update)}, (x,))


def stepped(weight: Tensor, update: Tensor) -> Tensor:
    """Return the weight after all steps in FP32, rounded to nearest."""
    return (weight.float() - STEPS * LEARNING_RATE * update.float()).to(weight.dtype)


@host("microbatched_linear", SMALL_MICROBATCHES, LARGE_MICROBATCHES)
def microbatched_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=Microbatched(te, width, out),
        weights={"weight": "linear.weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )


@host("averaged_linear", *STEP)
def averaged_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    """Make output gradients as small as a loss that is averaged over many tokens makes them."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x) / TOKENS

    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=te.Linear(width, out, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
        call_reference=call,
        call_candidate=call,
    )


@host("stepped_linear", *STEP)
def stepped_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    def call_reference(module: nn.Linear, x: Tensor, update: Tensor) -> Tensor:
        return F.linear(x, module.weight - STEPS * LEARNING_RATE * update)

    return Pair(
        reference=nn.Linear(width, out, bias=False),
        candidate=Stepped(te, width, out),
        weights={"weight": "linear.weight"},
        inputs=lambda rng, batch, seq: (rng.normal(batch, seq, width), rng.normal(out, width)),
        call_reference=call_reference,
    )


# A linear layer that is trained by AdamW for some steps and then applied.


SMALL_TRAINED = dict(batch=64, width=64, out=96)
LARGE_TRAINED = dict(batch=256, width=256, out=384)
ADAM_STEPS = 4
# This eps matters to gradients of this size, just as 1e-8 matters to those of a large batch's average loss.
ADAM_SETTINGS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1)


class Trained(nn.Module):
    """Train a copy of the layer, so that each pass begins with the same weights.

    Attributes:
        optimizer: returns the optimizer of the given parameters.
    """

    def __init__(self, linear: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        super().__init__()
        self.linear = linear
        self.optimizer = optimizer

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Take ``[batch, width]`` and a target ``[batch, out]``, and return the residuals before and after training."""
        linear = copy.deepcopy(self.linear)
        optimizer = self.optimizer(linear.parameters())
        for _ in range(ADAM_STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                (linear(x.detach()) - target.detach()).square().mean().backward()
            optimizer.step()
        return {"before": self.linear(x) - target, "after": linear(x) - target}


@host("trained_linear", SMALL_TRAINED, LARGE_TRAINED, precisions=UNQUANTIZED)
def trained_linear(te: ModuleType, width: int, out: int, **_: Any) -> Pair:
    """Train with FP32 master weights, as one should with 16-bit weights."""
    return Pair(
        reference=Trained(nn.Linear(width, out, bias=False), lambda weights: AdamW(weights, **ADAM_SETTINGS)),
        candidate=Trained(
            te.Linear(width, out, bias=False),
            lambda weights: te.optimizers.FusedAdam(weights, **ADAM_SETTINGS, master_weights=True),
        ),
        weights={"linear.weight": "linear.weight"},
        inputs=lambda rng, batch: (rng.normal(batch, width), rng.normal(batch, out)),
    )


TRAINING_HOSTS = (
    microbatched_linear,
    averaged_linear,
    stepped_linear,
    trained_linear,
)
