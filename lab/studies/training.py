"""Train small language models on text with FP32 master weights, in plain PyTorch and with TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parity.case import transfer
from parity.case.case import Rng
from parity.case.map_check import check_map
from parity.case.weight_map import WeightMap, stack
from parity.numerics.formats import Rounding
from parity.numerics.rounding import rounded
from parity.reference import GPTLayer, LlamaLayer, NormLinear
from parity.te import Kernels, Precision
from parity.user_error import UserError

# The text that the language models train on, byte by byte.


VOCABULARY = 256

TEXT = """\
The keeper of the lighthouse kept two logs. In the first he wrote what he saw: the wind, the height of the waves, the
ships that passed and the hour at which they passed. In the second he wrote what he had reckoned the day before, so that
each morning he could lay the two books side by side and see by how much he had been wrong.

He was never quite right. The wind that he had called fresh was strong, the ship that he had expected at noon came at
one. In the first year he tried to make the differences vanish. He measured the waves with a longer rod, he asked the
captains for their times, he wrote down three figures where he had written two. The differences grew smaller, but they
did not go away, and some mornings they were as large as ever.

In the second year he stopped asking why he was wrong and asked how wrong he ought to be. A rod that is marked in feet
cannot tell inches. A clock that loses a minute a day cannot tell seconds. He made a third book, and in it he wrote, for
each thing that he reckoned, how far from the truth an honest man with his rod and his clock would be. On most mornings
the two logs differed by less than the third book allowed, and he had his breakfast in peace.

Then came a week in which the ships were late, every one of them, by a quarter of an hour. A quarter of an hour was not
much; in his first year he would have blamed the wind. But the third book said four minutes. He climbed to the lamp and
looked at the clock, and found that the boy who wound it had set it by the sun, and not by the signal from the harbour.
He set it right, and the ships came in on time.

When he was old he told the boy, who was now the keeper, what he had learned. Do not ask that the books agree, he said,
for they never will. Do not be content that they nearly agree, for the clock may be wrong all the same. Ask first what
difference there must be, and then look at the difference there is. If it is smaller, go and have your breakfast. If it
is larger, climb the stairs.

The boy wrote that down as well. He wrote it in the first book, with the date and the weather, between a schooner bound
north with timber and a fishing boat that came home empty. Then he opened the third book, and ruled a new page, and made
a column for the things that old men say. He thought for a while about how far from the truth they would be, and left it
blank, and went up to light the lamp.

That night there was fog. The horn sounded twice a minute, and he counted the seconds between one blast and the next on
the clock that was set by the harbour. Thirty, thirty, thirty-one, thirty. The third book allowed one. Somewhere below a
bell answered, and then another, further out, and he wrote down both, and the hour, and that he could see nothing.
"""


def batches(seed: int, steps: int, batch: int, seq: int) -> list[Tensor]:
    """Draw random windows of the text.

    Returns:
        ``steps`` int64 tensors ``[batch, seq + 1]`` of bytes. Inputs are all but the last, targets all but the first.
    """
    data = torch.tensor(list(TEXT.encode("ascii")))
    starts = Rng(seed, "batches").integers(steps, batch, high=len(data) - seq)
    return list(data[starts[..., None] + torch.arange(seq + 1)])


# Small language models, each in plain PyTorch and with TransformerEngine's layers in the same places.


# The standard deviation of initial weight matrices and embeddings, as in GPT-2. Norms start at 1, biases at 0.
INITIAL_STD = 0.02
# Sizes that GEMMs sum over must be multiples of this for block scaling. The other recipes require less.
_BLOCK = 32


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its inputs.

    Attributes:
        vocabulary: number of different tokens.
        seq: tokens of a sequence.
        hidden: width of the residual stream.
        layers: number of transformer layers.
        heads: query heads.
        groups: key-value heads of a llama; a GPT has one for each query head.
        ffn: width inside the MLP.
    """

    vocabulary: int
    seq: int
    hidden: int
    layers: int
    heads: int
    groups: int
    ffn: int


def check(size: Size, batch: int, precisions: Iterable[Precision]) -> None:
    """Check that a model can have these sizes and that TE supports them.

    Args:
        size: the model's size.
        batch: sequences per step.
        precisions: the precisions that TE computes in.

    Raises:
        UserError: naming the sizes and their conditions.
    """
    if size.hidden % (2 * size.heads) or size.heads % size.groups:
        raise UserError(
            f"hidden={size.hidden}, heads={size.heads}, groups={size.groups}: groups must divide heads, and a head "
            "must have an even width, hidden / heads"
        )
    needs_blocks = any(precision.recipe is not None for precision in precisions)
    if needs_blocks and (size.hidden % _BLOCK or batch * size.seq % _BLOCK):
        raise UserError(
            f"hidden={size.hidden}, batch={batch}, seq={size.seq}: FP8 and FP4 need a hidden size and a number of "
            f"tokens, batch times seq, that are multiples of {_BLOCK}"
        )


class LanguageModel(nn.Module):
    """Embeddings, layers, and a norm with the output projection.

    Args:
        size: the model's size.
        layers: each maps ``[batch, seq, hidden]`` to the same shape.
        head: maps ``[batch, seq, hidden]`` to logits ``[batch, seq, vocabulary]``.
        learned_positions: whether positions have embeddings.
        layer_arguments: further arguments of each layer.
    """

    def __init__(
        self,
        size: Size,
        layers: Sequence[nn.Module],
        head: nn.Module,
        learned_positions: bool,
        layer_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.seq, size.hidden) if learned_positions else None
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.layer_arguments = dict(layer_arguments or {})

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, **self.layer_arguments)
        return self.head(x)


@dataclass(frozen=True)
class Architecture:
    """A model in plain PyTorch and with TE's layers, and the map of their parameters.

    Attributes:
        reference: builds the plain model of a size, on the CPU.
        candidate: builds the same model from TE's layers, on the kernels' device.
        weight_map: returns the map from reference parameters to TE parameters.
        widening: the ratio of the MLP's inner width to the hidden size in studies.
    """

    reference: Callable[[Size], LanguageModel]
    candidate: Callable[[Size, Kernels], LanguageModel]
    weight_map: Callable[[Size], WeightMap]
    widening: int


def initial_weights(architecture: Architecture, size: Size, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the plain model's weights at step 0 in FP32. They are exact in ``dtype``, so that all runs start equal."""
    rng = Rng(seed, "weights")
    drawn = {}
    for name, parameter in architecture.reference(size).named_parameters():
        is_matrix = parameter.dim() > 1
        constant = torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
        drawn[name] = (
            rng.normal(*parameter.shape, std=INITIAL_STD).to(dtype).float() if is_matrix else constant.detach()
        )
    return drawn


def load_candidate(model: LanguageModel, architecture: Architecture, size: Size, initial: Mapping[str, Tensor]) -> None:
    """Copy weights, given by the plain model's names, into TE's model.

    Raises:
        WeightMapError: if the map does not use each parameter of both models exactly once.
    """
    weight_map = architecture.weight_map(size)
    shapes = transfer.parameter_shapes(model)
    check_map(weight_map, {name: tuple(tensor.shape) for name, tensor in initial.items()}, shapes)
    load(model, transfer.to_candidate(weight_map, initial, shapes))


def load(model: LanguageModel, values: Mapping[str, Tensor]) -> None:
    """Copy weights, given by the model's own names, into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def _gpt(size: Size) -> LanguageModel:
    layers = [GPTLayer(size.hidden, size.ffn, size.heads) for _ in range(size.layers)]
    head = NormLinear(nn.LayerNorm(size.hidden), size.hidden, size.vocabulary, bias=False)
    return LanguageModel(size, layers, head, learned_positions=True)


def _gpt_on_te(size: Size, kernels: Kernels) -> LanguageModel:
    layers = [_te_layer(size, kernels) for _ in range(size.layers)]
    head = kernels.te.LayerNormLinear(size.hidden, size.vocabulary, bias=False)
    return LanguageModel(size, layers, head, learned_positions=True).to(kernels.device)


def _llama(size: Size) -> LanguageModel:
    layers = [LlamaLayer(size.hidden, size.ffn, size.heads, size.groups) for _ in range(size.layers)]
    head = NormLinear(nn.RMSNorm(size.hidden, eps=1e-5), size.hidden, size.vocabulary, bias=False)
    return LanguageModel(size, layers, head, learned_positions=False)


def _llama_on_te(size: Size, kernels: Kernels) -> LanguageModel:
    options = dict(num_gqa_groups=size.groups, normalization="RMSNorm", activation="swiglu", bias=False)
    layers = [_te_layer(size, kernels, **options) for _ in range(size.layers)]
    head = kernels.te.LayerNormLinear(size.hidden, size.vocabulary, bias=False, normalization="RMSNorm")
    # Angles are computed once, outside the model, because as part of it they would be rounded to its dtype.
    angles = kernels.te.RotaryPositionEmbedding(size.hidden // size.heads).to(kernels.device)(size.seq)
    arguments = {"rotary_pos_emb": angles}
    return LanguageModel(size, layers, head, learned_positions=False, layer_arguments=arguments).to(kernels.device)


def _te_layer(size: Size, kernels: Kernels, **options: Any) -> nn.Module:
    return kernels.te.TransformerLayer(
        size.hidden,
        size.ffn,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        **options,
    )


def _gpt_weights(size: Size) -> WeightMap:
    whole: dict[Any, Any] = {"tokens.weight": "tokens.weight", "positions.weight": "positions.weight"}
    for i in range(size.layers):
        whole |= _norm(f"layers.{i}.attention_norm", f"layers.{i}.self_attention.layernorm_qkv.layer_norm")
        whole |= _norm(f"layers.{i}.mlp.norm", f"layers.{i}.layernorm_mlp.layer_norm")
        for kind in ("weight", "bias"):
            whole |= _attention(f"layers.{i}", kind)
            whole[f"layers.{i}.mlp.up_proj.{kind}"] = f"layers.{i}.layernorm_mlp.fc1_{kind}"
            whole[f"layers.{i}.mlp.down_proj.{kind}"] = f"layers.{i}.layernorm_mlp.fc2_{kind}"
    return whole | _norm("head.norm", "head.layer_norm") | {"head.linear.weight": "head.weight"}


def _llama_weights(size: Size) -> WeightMap:
    whole: dict[Any, Any] = {"tokens.weight": "tokens.weight"}
    for i in range(size.layers):
        layer = f"layers.{i}"
        whole |= _attention(layer, "weight")
        whole |= {
            f"{layer}.attention_norm.weight": f"{layer}.self_attention.layernorm_qkv.layer_norm_weight",
            f"{layer}.mlp.norm.weight": f"{layer}.layernorm_mlp.layer_norm_weight",
            stack(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"): f"{layer}.layernorm_mlp.fc1_weight",
            f"{layer}.mlp.down_proj.weight": f"{layer}.layernorm_mlp.fc2_weight",
        }
    return whole | {"head.norm.weight": "head.layer_norm_weight", "head.linear.weight": "head.weight"}


def _norm(reference: str, candidate: str) -> dict[str, str]:
    return {f"{reference}.{kind}": f"{candidate}_{kind}" for kind in ("weight", "bias")}


def _attention(layer: str, kind: str) -> dict[str, str]:
    fused = f"{layer}.self_attention.layernorm_qkv"
    return {
        f"{layer}.attention.q_proj.{kind}": f"{fused}.query_{kind}",
        f"{layer}.attention.k_proj.{kind}": f"{fused}.key_{kind}",
        f"{layer}.attention.v_proj.{kind}": f"{fused}.value_{kind}",
        f"{layer}.attention.o_proj.{kind}": f"{layer}.self_attention.proj.{kind}",
    }


ARCHITECTURES = {
    "gpt": Architecture(_gpt, _gpt_on_te, _gpt_weights, widening=4),
    # The MLP is narrower because the gate is a third matrix.
    "llama": Architecture(_llama, _llama_on_te, _llama_weights, widening=3),
}


# Training with FP32 master weights.


# Runs a forward and a backward pass on tokens ``[batch, seq + 1]``, leaves gradients in the model, returns the loss.
Pass = Callable[[nn.Module, Tensor], float]


@dataclass(frozen=True)
class Schedule:
    """The learning rate schedule of AdamW, whose betas are 0.9 and 0.95 and whose weight decay is PyTorch's 0.01.

    Attributes:
        learning_rate: the learning rate after the warmup.
        warmup: steps over which the learning rate grows linearly.
    """

    learning_rate: float
    warmup: int


def train(
    model: nn.Module,
    schedule: Schedule,
    batches: Sequence[Tensor],
    forward_backward: Pass,
    dtype: torch.dtype,
    loss_scale: float = 1.0,
    observe: Callable[[int, Sequence[Tensor]], None] | None = None,
    masters: Sequence[Tensor] | None = None,
) -> list[float]:
    """Train for one step on each batch, and return the losses.

    The optimizer holds FP32 masters. It receives gradients rounded to ``dtype``, and after each step the model gets the
    masters rounded to ``dtype``, as in Megatron-LM and in TE's FusedAdam with ``master_weights=True``.

    Args:
        model: a model whose parameters have ``dtype``, or FP32 holding values of ``dtype``.
        batches: int64 ``[batch, seq + 1]`` each.
        loss_scale: the factor that the pass multiplies gradients by; it is divided out in FP32.
        observe: called after each step with the number of steps so far and the masters, in the order of
            ``model.parameters()``.
        masters: FP32 masters to start from, if they differ from the model's parameters.

    Returns:
        The loss on each batch before its step, in nats per token.
    """
    parameters = list(model.parameters())
    masters = [start.detach().float().clone() for start in masters or parameters]
    optimizer = torch.optim.AdamW(masters, lr=schedule.learning_rate, betas=(0.9, 0.95))
    losses = []
    for step, tokens in enumerate(batches):
        optimizer.param_groups[0]["lr"] = schedule.learning_rate * min(1.0, (step + 1) / schedule.warmup)
        model.zero_grad(set_to_none=True)
        losses.append(forward_backward(model, tokens))
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(dtype).float() / loss_scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master.to(dtype))
        if observe is not None:
            observe(step + 1, masters)
    return losses


def plain_pass(model: nn.Module, tokens: Tensor) -> float:
    """Run a pass of the plain model in its own dtype, and return the loss."""
    loss = _loss(model(tokens[:, :-1]), tokens)
    loss.backward()
    return loss.item()


def rounded_pass(rounding: Rounding, loss_scale: float = 1.0) -> Pass:
    """Return a pass that runs the plain FP32 model under a rounding model."""

    def forward_backward(model: nn.Module, tokens: Tensor) -> float:
        with rounded(rounding, model.parameters()) as phase:
            loss = _loss(model(tokens[:, :-1]), tokens)
            phase.begin_backward()
            (loss * loss_scale).backward()
        return loss.item()

    return forward_backward


def te_pass(precision: Precision, kernels: Kernels, loss_scale: float = 1.0) -> Pass:
    """Return a pass that runs TE's model under the precision's recipe."""

    def forward_backward(model: nn.Module, tokens: Tensor) -> float:
        tokens = tokens.to(kernels.device)
        with precision.autocast(kernels):
            logits = model(tokens[:, :-1])
        loss = _loss(logits, tokens)
        (loss * loss_scale).backward()
        return loss.item()

    return forward_backward


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, computed in FP32."""
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
