"""Trainings that are wrong on purpose, each with the findings that should name it, and trainings that are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lab.corpus.trained_ports import optimizers, switched
from parity.case.case import Case, Pair, Training
from parity.case.training import ADAM, Model, load
from parity.case.weight_map import stack
from parity.reference import LlamaLayer
from parity.result import Switch
from parity.te.state import slots, state_manager

Declared = Callable[[ModuleType], Training]

# The hosts that are trained: an MLP, and a Llama layer with grouped keys.


BATCH, SEQ, WIDTH, FFN, HEADS, GROUPS = 4, 32, 64, 128, 4, 2


def plain(te: ModuleType) -> Training:
    """Return the training of a pair that declares none."""
    return Training()


def mlp(te: ModuleType, training: Declared = plain) -> Pair:
    """Return a pair of a norm with a two-layer MLP, and TE's module for both."""
    return Pair(
        reference=nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FFN), nn.GELU(approximate="tanh"), nn.Linear(FFN, WIDTH)
        ),
        candidate=te.LayerNormMLP(WIDTH, FFN),
        inputs=lambda rng: rng.normal(BATCH, SEQ, WIDTH),
        weights={
            "0.weight": "layer_norm_weight",
            "0.bias": "layer_norm_bias",
            "1.weight": "fc1_weight",
            "1.bias": "fc1_bias",
            "3.weight": "fc2_weight",
            "3.bias": "fc2_bias",
        },
        training=training(te),
    )


def llama(te: ModuleType, training: Declared = plain) -> Pair:
    """Return a pair of a Llama layer and TE's layer."""
    rope = te.RotaryPositionEmbedding(WIDTH // HEADS)
    candidate = te.TransformerLayer(
        WIDTH,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        self_attn_mask_type="causal",
    )
    return Pair(
        reference=LlamaLayer(WIDTH, FFN, HEADS, GROUPS),
        candidate=candidate,
        inputs=lambda rng: rng.normal(BATCH, SEQ, WIDTH),
        weights={
            "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
            "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
            "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
            "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
            "attention.o_proj.weight": "self_attention.proj.weight",
            "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
            stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
            "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
        },
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(x.shape[1])),
        training=training(te),
    )


def glued(te: ModuleType, training: Declared = plain) -> Pair:
    """Return a pair of the MLP and a port whose activation PyTorch may compile."""
    parts = {"0.{}": "first.layer_norm_{}", "1.{}": "first.{}", "3.{}": "second.{}"}
    return dataclasses.replace(
        mlp(te, training),
        candidate=switched.Glued(te, WIDTH, FFN),
        weights={left.format(x): right.format(x) for left, right in parts.items() for x in ("weight", "bias")},
    )


def quantized(precision: str, te: ModuleType, training: Declared = plain) -> Pair:
    """Return a pair of the MLP and TE's module with weights held quantized by the precision's recipe."""
    make = partial(te.LayerNormMLP, WIDTH, FFN, params_dtype=torch.bfloat16)
    return optimizers.quantized(precision, mlp(te, training), te, make)


HOSTS: dict[str, Callable[..., Pair]] = {"mlp": mlp, "llama": llama}
COMPILED: dict[str, Callable[..., Pair]] = {"glued": glued}
"""Hosts of the switch ``compile``: TE leaves its own modules to Python."""
QUANTIZED: dict[str, Callable[..., Pair]] = {
    f"quantized in {name}": partial(quantized, name) for name in optimizers.RECIPES
}
"""The MLPs with quantized weights, each for its own precision."""


def case_of(host: str, training: Declared = plain) -> Case:
    """Return the case of a host with a training."""
    return Case(f"trained_{host}", lambda te: (HOSTS | COMPILED | QUANTIZED)[host](te, training), sizes=({},))


# Training steps.


def step(
    model: Model, optimizer: Optimizer, x: Tensor, with_gradients: Callable[[Model], object] = lambda model: None
) -> Tensor:
    """Make a step, which is right unless ``with_gradients`` changes the gradients before the optimizer reads them."""
    optimizer.zero_grad()
    loss = model.loss(x)
    loss.backward()
    with_gradients(model)
    optimizer.step()
    return loss


def in_micro_batches(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Add the gradients of four micro-batches."""
    return _over(model, optimizer, x.chunk(4), 0.25)


def _over(model: Model, optimizer: Optimizer, parts: Any, factor: float) -> Tensor:
    optimizer.zero_grad()
    losses = [factor * model.loss(part) for part in parts]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return torch.stack([loss.detach() for loss in losses]).sum()


def summed(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Sum the losses of four micro-batches instead of averaging them."""
    return _over(model, optimizer, x.chunk(4), 1.0) / 4


def divided_twice(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Divide the losses of micro-batches by their number twice."""
    return _over(model, optimizer, x.chunk(4), 1 / 16) * 4


def mean_of_means(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Average micro-batches of 1 and 3 sequences with equal weights."""
    return _over(model, optimizer, x.split([1, BATCH - 1]), 0.5)


def last_part_lost(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Leave out the last of four micro-batches."""
    return _over(model, optimizer, x.chunk(4)[:3], 0.25) / 0.75


def zeroed_between(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Set gradients to zero before each of four micro-batches."""
    losses = []
    for part in x.chunk(4):
        optimizer.zero_grad()
        losses.append(model.loss(part) / 4)
        losses[-1].backward()
    optimizer.step()
    return torch.stack([loss.detach() for loss in losses]).sum()


def one_halved(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Make a step with half of the gradient of one matrix."""
    return step(
        model, optimizer, x, lambda model: next(grad for grad in _gradients(model) if grad.dim() == 2).mul_(0.5)
    )


def norms_zeroed(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Make a step with zero gradients for the norms and biases."""
    return step(model, optimizer, x, lambda model: [grad.zero_() for grad in _gradients(model) if grad.dim() == 1])


def _gradients(model: Model) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def not_zeroed(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Add to the gradients of earlier steps."""
    loss = model.loss(x)
    loss.backward()
    optimizer.step()
    return loss


def scaled(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Scale the loss, and forget to unscale the gradients."""
    optimizer.zero_grad()
    loss = model.loss(x)
    (128.0 * loss).backward()
    optimizer.step()
    return loss


def clipped_while_scaled(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Clip the gradients of a scaled loss, and unscale them only afterwards."""

    def clip(model: Model) -> None:
        _multiply(model, 128.0)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        _multiply(model, 1 / 128.0)

    return step(model, optimizer, x, clip)


def _multiply(model: Model, factor: float) -> None:
    for one in model.parameters():
        one.grad = None if one.grad is None else one.grad * factor


def clipped_apart(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Clip the gradient of each parameter by itself."""

    def clip(model: Model) -> None:
        for one in model.parameters():
            nn.utils.clip_grad_norm_([one], CLIP)

    return step(model, optimizer, x, clip)


CLIP = 0.1


def elements_clipped(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Clip each element of the gradients."""
    return step(model, optimizer, x, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def other_first(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Let the optimizer step before the backward pass."""
    optimizer.step()
    optimizer.zero_grad()
    loss = model.loss(x)
    loss.backward()
    return loss


def frozen(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Leave out one parameter's gradient."""

    def leave_out(model: Model) -> None:
        max(model.parameters(), key=lambda one: one.numel()).grad = None

    return step(model, optimizer, x, leave_out)


class OneBatchBehind:
    """Read each batch one step late, like a graph whose buffers are filled after its replay."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step with the previous batch."""
        read = x if self.buffer is None else self.buffer
        self.buffer = x.detach().clone()
        return step(model, optimizer, read)


class OldCopy:
    """Compute with copies of the weights that are updated one step late.

    Attributes:
        is_kept: says which parameters have such copies.
    """

    def __init__(self, is_kept: Callable[[Tensor], bool] = lambda weight: True) -> None:
        self.is_kept = is_kept
        self.old: dict[str, Tensor] = {}

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Compute with the old values, and update the new ones."""
        now = {name: one.detach().clone() for name, one in model.module.named_parameters() if self.is_kept(one)}
        self._fill(model.module, self.old or now)
        self.old = now
        return step(model, optimizer, x, lambda model: self._fill(model.module, now))

    def _fill(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, one in module.named_parameters():
                if name in weights:
                    one.copy_(weights[name])


class Cached:
    """Let TE keep its FP8 weights after the first step, as if all later steps were micro-batches of the same step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step that claims to be a later micro-batch."""
        self.steps += 1
        forward = type(model.module).forward
        model.module.forward = lambda *args, **kwargs: forward(
            model.module, *args, is_first_microbatch=self.steps == 1, **kwargs
        )
        return step(model, optimizer, x)


# Optimizers and schedules.


def adam(**settings: Any) -> Declared:
    """Return a training in which the candidate's optimizer has other settings than the reference's."""

    def training(te: ModuleType) -> Training:
        def make(model: nn.Module) -> Optimizer:
            narrow = next(model.parameters()).dtype is not torch.float32
            fused: Optimizer = te.optimizers.FusedAdam(
                model.parameters(), **{**ADAM, "master_weights": narrow, **settings}
            )
            return fused

        return Training(candidate_optimizer=make)

    return training


def sgd(**settings: Any) -> Declared:
    """Return a training by SGD in which the candidate has other settings, and FP32 master weights."""
    own: dict[str, Any] = dict(lr=0.05, momentum=0.9, weight_decay=0.01)

    def training(te: ModuleType) -> Training:
        return Training(
            optimizer=lambda model: SGD(model.parameters(), **own),
            candidate_optimizer=lambda model: te.optimizers.FusedSGD(model.parameters(), **{**own, **settings}),
        )

    return training


def only_matrices_decay(model: nn.Module) -> Optimizer:
    """Make an AdamW that does not decay norms and biases."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups: list[dict[str, Any]] = [dict(params=matrices), dict(params=others, weight_decay=0.0)]
    return AdamW(groups, **ADAM)


def no_vectors(te: ModuleType) -> Training:
    """Give the optimizer only the matrices."""

    def make(model: nn.Module) -> Optimizer:
        some = [one for one in model.parameters() if one.dim() > 1]
        narrow = some[0].dtype is not torch.float32
        fused: Optimizer = te.optimizers.FusedAdam(some, **ADAM, master_weights=narrow)
        return fused

    return Training(candidate_optimizer=make)


def warmed_up(optimizer: Optimizer) -> LambdaLR:
    """Make a schedule that warms up over four steps."""
    return LambdaLR(optimizer, lambda number: min(number + 1, 4) / 4)


def one_ahead(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Make a step with the learning rate of the next one."""
    for group in optimizer.param_groups:
        group["lr"] = min(group["lr"] + ADAM["lr"] / 4, ADAM["lr"])
    return step(model, optimizer, x)


def stepping(own: Callable[..., Tensor] | type, **options: Any) -> Declared:
    """Return a training with the port's own step, which is a function, or a class to make a new step of each time."""
    return lambda te: Training(candidate_step=own() if isinstance(own, type) else own, **options)


def only_matrices_of_both(te: ModuleType) -> Training:
    """Leave norms and biases out of weight decay on both sides, with FP32 master weights."""

    def make(model: nn.Module) -> Optimizer:
        narrow = next(model.parameters()).dtype is not torch.float32
        groups = only_matrices_decay(model).param_groups
        kept = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        fused: Optimizer = te.optimizers.FusedAdam(kept, **ADAM, master_weights=narrow)
        return fused

    return Training(only_matrices_decay, make)


def all_decay(te: ModuleType) -> Training:
    """Decay norms and biases, unlike the reference."""
    return Training(only_matrices_decay, adam()(te).candidate_optimizer)


def adam_for_adamw(te: ModuleType) -> Training:
    """Use ``torch.optim.Adam`` instead of ``AdamW``."""
    return Training(lambda model: AdamW(model.parameters(), **ADAM), lambda model: Adam(model.parameters(), **ADAM))


def old_matrices(te: ModuleType) -> Training:
    """Compute with late copies of only the weight matrices."""
    return Training(candidate_step=OldCopy(lambda weight: weight.dim() > 1))


def cached(te: ModuleType) -> Training:
    """Let TE keep its FP8 weights while the weights change quickly."""
    return Training(optimizer=lambda model: SGD(model.parameters(), lr=0.5), candidate_step=Cached())


def forwards_first(te: ModuleType) -> Training:
    """Offload four micro-batches in one context, whose forward passes all come before their backward passes."""
    return switched.looping(candidate_step=in_micro_batches)(te)


def moved_while_offloaded(te: ModuleType) -> Training:
    """Offload weights as well, and change them before they are read back."""
    return switched.hosted(switched.WithWeights, candidate_step=switched.perturbed)(te)


def frozen_rate(te: ModuleType) -> Training:
    """Capture the optimizer's step with its learning rate, which a schedule changes."""
    return Training(switched.plain_sgd, scheduler=warmed_up, graph=switched.WholeStep().capture)


def doubled(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Make a right step, and double the scale that compiled code takes for constant."""
    loss = step(model, optimizer, x)
    cast(Any, model.module).scale *= 2.0
    return loss


def too_fast(te: ModuleType) -> Training:
    """Train with a learning rate at which the loss grows by many powers of ten in each step."""
    return Training(optimizer=lambda model: SGD(model.parameters(), lr=5.0))


def unwritten(te: ModuleType) -> Training:
    """Step FP32 copies, and write only those of vectors to the parameters."""
    return optimizers.copied(lambda copy: copy.dim() < 2)(te)


def loading(load: Callable[[nn.Module, Optimizer, BinaryIO], None]) -> Declared:
    """Return a training that loads its checkpoints by this function."""
    return lambda te: Training(load=load)


# Checkpoints that lose something.


def without_fp8_scales(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Load only the module's weights."""
    states = torch.load(file, weights_only=False)
    weights = {name: x for name, x in states["model"].items() if "_extra_state" not in name}
    module.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(states["optimizer"])


def without_moments(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Load the module, and start with a new optimizer."""
    module.load_state_dict(torch.load(file, weights_only=False)["model"])


def without_weights(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Load only the optimizer."""
    optimizer.load_state_dict(torch.load(file, weights_only=False)["optimizer"])


def without_master_weights(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Recreate the FP32 master weights from the 16-bit weights."""
    load(module, optimizer, file)
    for parameter in module.parameters():
        optimizer.set_scaled_state(parameter, "master_param", parameter.detach().float())  # type: ignore[attr-defined]


def without_count(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Let the optimizer count its steps from 0 again."""
    load(module, optimizer, file)
    for group in optimizer.param_groups:
        group["step"] = torch.zeros_like(group["step"]) if isinstance(group["step"], Tensor) else 0


def without_histories(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Load everything but the amax histories, like code that only saves the scales."""
    load(module, optimizer, file)
    for slot in slots(module):
        slot.history.zero_()


def without_extra_state(te: ModuleType) -> Training:
    """Leave ``_extra_state`` out of a module's checkpoint, and load a new module's instead."""
    name = "_extra_state"

    def make(model: nn.Module) -> Optimizer:
        def left_out(module: nn.Module, states: dict[str, Any], *_: Any) -> None:
            states.pop(name)

        def as_new(module: nn.Module, states: dict[str, Any], *_: Any) -> None:
            states.setdefault(name, torch.empty(0, dtype=torch.uint8))

        model.register_state_dict_post_hook(left_out)
        model.register_load_state_dict_pre_hook(as_new)
        narrow = next(model.parameters()).dtype is not torch.float32
        fused: Optimizer = te.optimizers.FusedAdam(model.parameters(), **ADAM, master_weights=narrow)
        return fused

    return Training(reference_adamw, make)


class QuantizedByValidation:
    """Quantize the weights in a validation pass after each update, and train on with the weights cached there."""

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step with the cached weights, and a validation pass that caches the new ones."""
        forward = type(model.module).forward

        def caching(is_first: bool) -> None:
            model.module.forward = lambda *args: forward(model.module, *args, is_first_microbatch=is_first)

        caching(False)
        loss = step(model, optimizer, x)
        caching(True)
        with torch.no_grad():
            model(x)
        return loss


def quantized_by_validation(te: ModuleType) -> Training:
    """Cache FP8 weights in a validation pass."""
    return Training(candidate_step=QuantizedByValidation())


# Delayed scaling whose state is tampered with.


def scales_reset(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Set the scales of gradients to 1 after each backward pass."""

    def reset(model: Model) -> None:
        for slot in slots(model.module):
            if slot.role == "output gradient":
                slot.scale.fill_(1.0)

    return step(model, optimizer, x, reset)


def histories_reset(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Clear the amax histories before each step."""
    for slot in slots(model.module):
        slot.history.zero_()
    return step(model, optimizer, x)


def forgotten(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Reset TE's global state before each step, so that it no longer knows the module."""
    state_manager().reset()
    return step(model, optimizer, x)


def of_the_input(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Record the amax of the input as that of the weight, and scale by it."""

    def exchange(model: Model) -> None:
        own = list(slots(model.module))
        for slot, other in zip(own[1:], own, strict=False):
            if slot.role == "weight":
                slot.history[-1] = other.history[-1]
                slot.scale.copy_(slot.largest / slot.history.max())

    return step(model, optimizer, x, exchange)


# The tables.


@dataclass(frozen=True)
class Row:
    """A wrong training.

    Attributes:
        name: the row's name.
        training: makes the training.
        titles: the titles of the findings that name it.
        told: a text that the message must contain; empty for none.
        switch: how the candidate is trained.
        precisions: the precisions at which the mistake exists; empty for all.
        host: a name in ``HOSTS``, ``COMPILED`` or ``QUANTIZED``.
    """

    name: str
    training: Declared
    titles: tuple[str, ...]
    told: str = ""
    switch: Switch = ""
    precisions: tuple[str, ...] = ()
    host: str = "mlp"


NARROW = ("bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
FP8 = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8")
DELAYED = ("fp8_delayed",)
BARE = ("fp32", "bf16", "fp16")
# Without delayed scaling, which saturates when a scale doubles.
SCALED = ("fp32", "bf16", "fp16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
DIVERGING = ("fp32", "bf16", "fp16", "fp8_current", "fp8_block")
BF16 = torch.bfloat16
_OPTIMIZER, _LOST, _STALE = ("optimizer",), ("state-not-saved",), ("weight-cache-stale",)
_PARTS = ("micro-batches",)
_STALE_INPUT, _FROZEN, _DIFFERS = ("graph-stale-input",), ("graph-frozen-value",), ("graph-differs",)
_COMPILED = ("compiled-differs",)
_OUT_OF_STEP, _STALE_COPY = ("offload-out-of-step",), ("offload-stale-tensor",)
_OFFLOADED: tuple[Switch, tuple[str, ...], str] = "offload", (), "glued"
_TRANSPOSES = optimizers.with_caches, ("weight-cache-stale",), "transpose"
_RESET = optimizers.caches_reset, ("weight-cache-stale",), "_create_transpose"
_ITS_STATE = "the optimizer's state"

WRONG = (
    Row("gradients not set to zero", stepping(not_zeroed), ("gradient-not-zeroed",), "step 2"),
    Row("a sum over micro-batches", stepping(summed), ("loss-scale",), "4 times"),
    Row("micro-batches divided twice", stepping(divided_twice), ("loss-scale",), "1/4 times"),
    Row("a mean of unequal means", stepping(mean_of_means), _PARTS, "numbers 1 and 2 count 2 and 0.66"),
    Row("the last micro-batch lost", stepping(last_part_lost), _PARTS, "do not add up to those of the whole batch"),
    Row("micro-batches zeroed between", stepping(zeroed_between), _PARTS, "numbers 1, 2, 3 do not count"),
    Row("a loss scale that stays", stepping(scaled), ("loss-scale",), "128 times"),
    Row("no clipping", stepping(step, clip=CLIP), ("gradient-clipping",), "by 1 before"),
    Row("clipping while scaled", stepping(clipped_while_scaled, clip=CLIP), ("gradient-clipping", "loss-scale")),
    Row("clipping each by itself", stepping(clipped_apart, clip=CLIP), ("gradient-clipping",)),
    Row("clipping of elements", stepping(elements_clipped), ("gradient-clipping",), "each element"),
    Row("a step before backward", stepping(other_first), ("stale-gradient", "no-gradient")),
    Row("a parameter without gradient", stepping(frozen), ("gradient-scale",), "0 times for"),
    Row("the batch before", stepping(OneBatchBehind), ("stale-batch",), "step 2"),
    Row("the weights before", stepping(OldCopy), ("stale-weights",), "step 2"),
    Row("the weight matrices before", old_matrices, ("weight-cache-stale", "stale-weights")),
    Row("cached FP8 weights", cached, ("weight-cache-stale",), precisions=FP8),
    Row("a learning rate of 2e-3", adam(lr=2e-3), _OPTIMIZER, "lr=0.002,"),
    Row("a learning rate 2 % off", adam(lr=1.02e-3), _OPTIMIZER, "lr=0.00102,"),
    Row("a schedule a step ahead", stepping(one_ahead, scheduler=warmed_up), _OPTIMIZER, "the learning rate is"),
    Row("beta1 of 0.8", adam(betas=(0.8, 0.95)), _OPTIMIZER, "betas=(0.8, 0.95)"),
    Row("beta2 of 0.999", adam(betas=(0.9, 0.999)), _OPTIMIZER, "betas=(0.9, 0.999)"),
    Row("betas of 0.85 and 0.97", adam(betas=(0.85, 0.97)), _OPTIMIZER),
    Row("eps of 1e-4", adam(eps=1e-4), _OPTIMIZER, "eps=0.0001"),
    Row("no decay", adam(weight_decay=0.0), _OPTIMIZER, "weight_decay=0"),
    Row("a decay of 0.01", adam(weight_decay=0.01), _OPTIMIZER, "weight_decay=0.01"),
    Row("decay of the gradient", adam(adam_w_mode=False), _OPTIMIZER, "(Adam)"),
    Row("no correction of the bias", adam(bias_correction=False), _OPTIMIZER, "does not correct the bias"),
    Row("decay of norms and biases", all_decay, _OPTIMIZER, "weight_decay=0.1 for 0.weight"),
    Row("vectors left out", no_vectors, _OPTIMIZER, "does not step"),
    Row("Adam for AdamW", adam_for_adamw, _OPTIMIZER, "(Adam)", precisions=("fp32",)),
    Row("moments in BF16", adam(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16), _OPTIMIZER, "bfloat16"),
    Row("no master weights", adam(master_weights=False), ("master-weights", "optimizer"), precisions=NARROW),
    Row("SGD without momentum", sgd(momentum=0.0), _OPTIMIZER, "momentum=0", precisions=("fp32",)),
    Row("SGD with Nesterov's momentum", sgd(nesterov=True), _OPTIMIZER, "nesterov=True", precisions=("fp32",)),
    Row("SGD without decay", sgd(weight_decay=0.0), _OPTIMIZER, "weight_decay=0", precisions=("fp32",)),
    Row("betas of Lion", optimizers.lion(betas=(0.95, 0.98)), _OPTIMIZER, "betas=(0.95, 0.98)"),
    Row("no decay in Lion", optimizers.lion(weight_decay=0.0), _OPTIMIZER, "weight_decay=0"),
    Row("one weight's gradient halved", stepping(one_halved), ("gradient-scale",), "1/2 times for", host="llama"),
    Row("norms without gradients", stepping(norms_zeroed), ("gradient-scale",), "0 times for", host="llama"),
    Row("Muon of fused weights", optimizers.muon, _OPTIMIZER, "holds mlp.gate_proj.weight", host="llama"),
    Row("groups exchanged", optimizers.groups_exchanged, _OPTIMIZER, "weight_decay=0.1 for"),
    Row("averages in training", stepping(optimizers.Averaging), ("master-weights",), "an average of them", "", NARROW),
    Row("averages in FP32", stepping(optimizers.Averaging), _OPTIMIZER, "step 2", "", ("fp32",)),
    Row("FP8 scales not loaded", loading(without_fp8_scales), _LOST, "FP8 scales", "resume", DELAYED),
    Row("moments not loaded", loading(without_moments), _LOST, _ITS_STATE, "resume"),
    Row("weights not loaded", loading(without_weights), _LOST, switch="resume"),
    Row("master weights made again", loading(without_master_weights), _LOST, _ITS_STATE, "resume", NARROW),
    Row("steps counted from the beginning", loading(without_count), _LOST, _ITS_STATE, "resume"),
    Row("amax histories not loaded", loading(without_histories), _LOST, "amax histories", "resume", DELAYED),
    Row("no _extra_state in DCP", without_extra_state, _LOST, "FP8 scales", "resume-dcp", DELAYED),
    Row("no _extra_state in a file", without_extra_state, _LOST, "FP8 scales", "resume-safetensors", DELAYED),
    Row("moments lost in a rollback", loading(without_moments), _LOST, "exp_avg", "rollback"),
    Row("a stale cache after a rollback", quantized_by_validation, _STALE, "after each load", "rollback", FP8),
    Row("scales of gradients set to 1", stepping(scales_reset), ("scale-not-updated",), "gradient", "", DELAYED),
    Row("amax histories reset", stepping(histories_reset), ("amax-history-lost",), "fc1_weight", "", DELAYED),
    Row("a module that TE forgot", stepping(forgotten), ("amax-not-recorded",), "the input of", "", DELAYED),
    Row("the input's amax for a weight", stepping(of_the_input), ("amax-of-another-tensor",), "weight", "", DELAYED),
    Row("a graph's input not copied", switched.capturing(switched.NotCopied), _STALE_INPUT, "that of step 1", "graph"),
    Row("a loss scale frozen in a graph", switched.scaling(), _FROZEN, "scale of candidate_step", "graph", SCALED),
    Row("a scale in a new tensor", switched.scaling(scale=torch.tensor(8.0)), _FROZEN, "memory", "graph", SCALED),
    Row("a learning rate frozen in a graph", frozen_rate, _FROZEN, "lr of the optimizer", "graph", ("fp32",)),
    Row("weights moved after a capture", switched.moved_weights, _FROZEN, "memory", "graph"),
    Row("FP8 weights cached in a graph", switched.cached_weights, (*_STALE, *_FROZEN), "", "graph", FP8),
    Row("a graph's gradients let go", switched.capturing(switched.LetGo), ("graph-lost-gradient",), "step 2", "graph"),
    Row("a loss read in a capture", switched.capturing(switched.Read), ("graph-not-captured",), "item", "graph"),
    Row(
        "a graph without the recipe", switched.without_recipe, _DIFFERS, "without the precision's recipe", "graph", FP8
    ),
    Row("a graph of another batch", stepping(in_micro_batches), _DIFFERS, "broadcast", "graph"),
    Row("a warm-up that trains", switched.capturing(switched.Trains), _DIFFERS, "warm-up passes", "graph"),
    Row("a warm-up's amaxes", switched.capturing(switched.LeavesAmaxes), _DIFFERS, "the scale of", "graph", DELAYED),
    Row("a constant that is none", stepping(doubled), _COMPILED, "assume_constant_result", "compile", SCALED, "glued"),
    Row("offloading not synchronized", switched.looping(switched.never), _OUT_OF_STEP, "layer 1's", *_OFFLOADED),
    Row("offloading synchronized once", switched.looping(switched.at_the_end), _OUT_OF_STEP, "layer 1's", *_OFFLOADED),
    Row("offloading synchronized late", switched.looping(switched.too_late), _OUT_OF_STEP, "layer 1's", *_OFFLOADED),
    Row("offloading of too many layers", switched.looping(model_layers=3), _OUT_OF_STEP, "raised", *_OFFLOADED),
    Row("micro-batches that share a context", forwards_first, _OUT_OF_STEP, "another forward pass", *_OFFLOADED),
    Row("offloading in BF16", switched.hosted(switched.In16Bits), ("offload-differs",), "bfloat16", "offload"),
    Row("host buffers filled once", switched.hosted(switched.FilledOnce), _STALE_COPY, "of step 1", "offload"),
    Row(
        "weights offloaded once",
        switched.hosted(switched.WeightsOnce),
        _STALE_COPY,
        "weights of step 1",
        "offload",
        BARE,
    ),
    Row("weights changed while offloaded", moved_while_offloaded, _STALE_COPY, "fc1_weight", "offload", BARE),
    Row("a learning rate of 5", too_fast, ("training-diverges",), "diverges as well", "", DIVERGING),
    Row("transposes reset beside a graph", *_RESET, "graph", DELAYED, "quantized in fp8_delayed"),
    Row("transposes that are kept", *_TRANSPOSES, "", DELAYED, "quantized in fp8_delayed"),
    *(
        Row(f"FP8 weights not written ({name})", unwritten, ("master-weights",), "_weight", "", (name,), host)
        for name, host in zip(optimizers.RECIPES, QUANTIZED, strict=True)
        if name != "nvfp4"  # FP4's rounding is coarser than four steps
    ),
    Row("a layer's amax histories reset", stepping(histories_reset), ("amax-history-lost",), "", "", DELAYED, "llama"),
    Row("gradients of a layer not set to zero", stepping(not_zeroed), ("gradient-not-zeroed",), host="llama"),
    Row("a layer's batch before", stepping(OneBatchBehind), ("stale-batch",), host="llama"),
    Row("a layer's weights before", stepping(OldCopy), ("stale-weights",), host="llama"),
    Row("a layer's sum over micro-batches", stepping(summed), ("loss-scale",), "4 times", host="llama"),
    Row("a layer's eps of 1e-4", adam(eps=1e-4), _OPTIMIZER, "eps=0.0001", host="llama"),
)


def reference_adamw(model: nn.Module) -> Optimizer:
    """Make the optimizer that a reference has if its pair declares none."""
    return AdamW(model.parameters(), **ADAM)


class OwnMasters:
    """Step FP32 copies of the weights with torch's AdamW, as many trainers do, under a loss scale that is undone.

    Attributes:
        masters: the copies, in the order of the module's parameters.
    """

    def __init__(self) -> None:
        self.masters: list[nn.Parameter] = []

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the copies and their optimizer."""
        self.masters = [nn.Parameter(one.detach().float().clone()) for one in model.parameters()]
        return AdamW(self.masters, **ADAM)

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step."""
        for one in model.parameters():
            one.grad = None
        loss = model.loss(x)
        (8.0 * loss).backward()
        with torch.no_grad():
            for one, master in zip(model.parameters(), self.masters, strict=True):
                master.grad = None if one.grad is None else one.grad.float() / 8.0
            optimizer.step()
            for one, master in zip(model.parameters(), self.masters, strict=True):
                one.copy_(master)
        return loss


def own_masters(te: ModuleType) -> Training:
    """Return a training in which the port keeps its own FP32 copies."""
    own = OwnMasters()
    return Training(
        candidate_optimizer=own.optimizer, candidate_step=own, optimizer=lambda model: AdamW(model.parameters(), **ADAM)
    )


RIGHT: dict[str, Declared] = {
    "FP32 copies of its own": own_masters,
    "plain": plain,
    "micro-batches": stepping(in_micro_batches),
    "clipping": lambda te: Training(clip=CLIP),
    "a schedule": lambda te: Training(scheduler=warmed_up),
    "SGD": sgd(),
    "Lion": optimizers.lion(),
    "Muon": optimizers.muon,
    "Adagrad": optimizers.adagrad,
    "master weights in remainders": optimizers.remainders,
    "no decay of norms": only_matrices_of_both,
    "quantized weights": optimizers.caches_reset,
    "copies of quantized weights": optimizers.copied(),
    "copies on the host": switched.hosted(switched.Host),
    "a graph of its own": switched.capturing(switched.Passes),
    "a scale that a graph reads": switched.scaling(scale=torch.tensor(8.0), is_in_place=True),
}

OFFLOADED = ("copies on the host",)
"""The right trainings that offload by themselves."""

GRAPHED = ("a graph of its own", "a scale that a graph reads")
"""The right trainings that capture graphs by themselves."""

OF_QUANTIZED = ("quantized weights", "copies of quantized weights")
"""The right trainings of ``QUANTIZED``."""

ONLY_AT = {  # TE's SGD holds no FP32 master weights, and remainders are those of BF16
    "SGD": ("fp32",),
    "master weights in remainders": tuple(one for one in ("fp32", *NARROW) if one != "fp16"),
    "a scale that a graph reads": SCALED,
}
"""The precisions of right trainings that others do not suit."""

ONLY_ON = {"Muon": ("mlp",)}
"""The hosts of right trainings that others do not suit: a Llama layer's fused weights are one matrix to Muon."""
