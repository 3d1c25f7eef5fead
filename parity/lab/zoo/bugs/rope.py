"""Rotary position embeddings of the wrong form, base, position or precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parity.lab.zoo.hosts.model import TEModel
from parity.lab.zoo.hosts.rope import TELongAttention
from parity.lab.zoo.planting import STORED_IN_16_BITS, Bug, Plant, both, constructed_with, edited, with_argument
from parity.numerics.formats import tf32

SELF_ATTENTION = ("attention", "llama_layer")
RIGHT_BASE, WRONG_BASE = 10_000.0, 500_000.0


def _rope(change: Callable[[Tensor], object]) -> Plant:
    """Return the port with another ``rotary_pos_emb`` ``[seq, 1, 1, head_dim]``, phases twice over."""
    return with_argument("rotary_pos_emb", change)


def _interleaved(phases: Tensor) -> Tensor:
    return phases[..., : phases.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _of_wrong_base(phases: Tensor) -> Tensor:
    """Each frequency is the base to some power: the same power of the other base."""
    frequencies = phases[1].double()
    ratio = torch.log(torch.tensor(WRONG_BASE)) / torch.log(torch.tensor(RIGHT_BASE))
    positions = torch.arange(phases.shape[0], dtype=torch.float64, device=phases.device)[:, None, None, None]
    return (positions * frequencies**ratio).to(phases.dtype)


def _of_next_position(phases: Tensor) -> Tensor:
    return phases + phases[1]


def _half(phases: Tensor) -> Tensor:
    """Return the phases of ``rotary_percent=0.5``: half of the channels, with the frequencies of that many."""
    quarter = phases[..., : phases.shape[-1] // 2 : 2]
    return torch.cat((quarter, quarter), dim=-1)


def _whole(phases: Tensor) -> Tensor:
    """Return the phases of all channels, where half of them are rotated."""
    head_dim = 2 * phases.shape[-1]
    positions = torch.arange(phases.shape[0], device=phases.device)
    half = _phases_of_base(RIGHT_BASE, positions, head_dim)
    return torch.cat((half, half), dim=-1)[:, None, None, :]


def _phases_of_base(base: float, positions: Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    return positions.float()[:, None] / base**exponents


def _long(phases: Callable[[TELongAttention, Tensor], Tensor]) -> Plant:
    def edit(module: nn.Module) -> None:
        assert isinstance(module, TELongAttention)
        module.phases = lambda positions: phases(module, positions)

    return edited(edit)


def _bf16_frequencies(module: TELongAttention, positions: Tensor) -> Tensor:
    return positions.float()[:, None] * module.frequencies(positions.device).bfloat16().float()


def _bf16_phases(module: TELongAttention, positions: Tensor) -> Tensor:
    return module.right_phases(positions).bfloat16().float()


def _tf32_product(module: TELongAttention, positions: Tensor) -> Tensor:
    return tf32(positions.float())[:, None] * tf32(module.frequencies(positions.device))


def _of_base_10000(module: TELongAttention, positions: Tensor) -> Tensor:
    return _phases_of_base(RIGHT_BASE, positions, module.head_dim)


def _make_submodule(module: nn.Module) -> None:
    assert isinstance(module, TEModel)
    module.rope = module.frequencies.func  # type: ignore[assignment]


LONG = ("long_context_attention",)
BUGS = (
    Bug(
        "rope-interleaved-for-halves",
        "RoPE rotates neighbouring channels together, as in Meta's Llama, where the reference rotates halves.",
        ("attention",),
        both(constructed_with(rotary_pos_interleaved=True), _rope(_interleaved)),
        "rope-layout",
    ),
    Bug(
        "rope-interleaved-on-the-layer-alone",
        "rotary_pos_interleaved=True for the layer, and phases as of halves.",
        ("attention",),
        constructed_with(rotary_pos_interleaved=True),
        "rope-layout",
    ),
    Bug("rope-base-wrong", "RoPE's base is 500,000 for 10,000.", SELF_ATTENTION, _rope(_of_wrong_base), "rope-base"),
    Bug(
        "rope-keys-one-position-late",
        "Keys are rotated by the position after theirs; queries are not.",
        SELF_ATTENTION,
        _rope(lambda phases: (phases, _of_next_position(phases))),
        "rope-position",
    ),
    Bug("rope-partial", "rotary_percent=0.5: half of the channels stay.", SELF_ATTENTION, _rope(_half), "rope-partial"),
    Bug(
        "rope-of-all-channels",
        "rotary_percent was never passed: all channels are rotated, where the reference rotates half of them.",
        ("partial_rope_attention",),
        _rope(_whole),
        "rope-partial",
    ),
    Bug(
        "rope-on-queries-alone",
        "Keys are not rotated.",
        SELF_ATTENTION,
        _rope(lambda phases: (phases, torch.zeros_like(phases))),
        "rope-one-side",
    ),
    Bug(
        "rope-on-keys-alone",
        "Queries are not rotated.",
        ("attention",),
        _rope(lambda phases: (torch.zeros_like(phases), phases)),
        "rope-one-side",
    ),
    Bug(
        "rope-applied-twice",
        "Queries and keys are rotated twice.",
        SELF_ATTENTION,
        _rope(lambda x: 2 * x),
        "rope-twice",
    ),
    Bug(
        "rope-missing",
        "rotary_pos_emb was never passed.",
        SELF_ATTENTION,
        _rope(lambda phases: None),
        "rope-missing",
    ),
    Bug(
        "rope-frequencies-in-bf16",
        "model.to(bfloat16) rounded inv_freq before it was multiplied by positions.",
        LONG,
        _long(_bf16_frequencies),
        "rope-precision",
    ),
    Bug(
        "rope-cast-with-the-model",
        "RoPE is a submodule, whose frequencies model.to(bfloat16) rounds (TransformerEngine issue 1245).",
        ("tied_model",),
        edited(_make_submodule),
        "rope-precision",
        precisions=STORED_IN_16_BITS,
    ),
    Bug(
        "rope-phases-in-bf16",
        "Phases are stored in BF16 (TransformerEngine issue 1245).",
        LONG,
        _long(_bf16_phases),
        "rope-precision",
    ),
    Bug(
        "rope-positions-in-tf32",
        "Positions and frequencies were multiplied in TF32, which rounds positions past 2,048 (transformers 48428).",
        LONG,
        _long(_tf32_product),
        "rope-precision",
    ),
    Bug("rope-base-of-short-context", "RoPE's base is 10,000 for 500,000.", LONG, _long(_of_base_10000), "rope-base"),
)
