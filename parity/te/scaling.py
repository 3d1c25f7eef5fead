"""Read what delayed scaling keeps of each tensor that it quantizes: its amax history, and the scale that follows.

``fp8_meta`` of TE's modules and ``_fp8_metas`` of its operations hold them: three tensors a GEMM in the forward pass
(input, weight, output) and two in the backward pass; operations have no outputs. Source: ``pytorch/module/base.py``,
``pytorch/ops/op.py`` and ``pytorch/constants.py`` of TE 2.20.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Role = Literal["input", "weight", "output", "output gradient", "input gradient"]

_FORWARD: tuple[Role, ...] = ("input", "weight", "output")
_BACKWARD: tuple[Role, ...] = ("output gradient", "input gradient")


@dataclass(frozen=True, eq=False)
class Slot:
    """Describe one tensor of a TE module under delayed scaling.

    Attributes:
        module: the module's name.
        place: tells the tensor from the module's others.
        role: what the tensor is in its GEMM.
        weights: names of the parameters that the GEMM multiplies; empty if it has none, as in attention.
        history: TE's own, FP32: the amax of the pass under way first, then those before it, the oldest first.
        scale: TE's own, one number in FP32.
        recipe: by which the scale is computed.
        largest: the largest number of the tensor's format.
    """

    module: str
    place: tuple[str, int]
    role: Role
    weights: tuple[str, ...]
    history: Tensor
    scale: Tensor
    recipe: Any
    largest: float

    @property
    def name(self) -> str:
        """Return how messages call the tensor."""
        whose = self.weights[0] if self.weights else self.module or "the module"
        more = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return whose + more if self.role == "weight" else f"the {self.role} of {whose}{more}"


def slots(module: nn.Module) -> Iterator[Slot]:
    """Yield what delayed scaling keeps for each tensor of a module; nothing before its first pass, or without it."""
    for path, one in module.named_modules():
        metas = getattr(one, "_fp8_metas", None)  # of an operation, by direction
        found = [getattr(one, "fp8_meta", None)] if metas is None else list(metas.values())
        for meta in found:
            if isinstance(meta, Mapping):
                forward = _FORWARD if metas is None else _FORWARD[:2]
                yield from _of(path, one, meta, "scaling_fwd", forward, "max_fwd")
                yield from _of(path, one, meta, "scaling_bwd", _BACKWARD, "max_bwd")


def _of(
    path: str, module: nn.Module, meta: Mapping[str, Any], key: str, roles: tuple[Role, ...], largest: str
) -> Iterator[Slot]:
    kept = meta.get(key)
    history, scales = getattr(kept, "amax_history", None), getattr(kept, "scale", None)
    if not isinstance(history, Tensor) or not isinstance(scales, Tensor):
        return
    recipe = meta["recipe"]
    gemms = _weights(path, module)
    for place in range(len(scales)):
        gemm, role = divmod(place, len(roles))
        weights = gemms[gemm] if gemm < len(gemms) else ()
        limit = float(getattr(recipe.fp8_format.value, largest))
        yield Slot(path, (key, place), roles[role], weights, history[:, place], scales[place], recipe, limit)


def _weights(path: str, module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the weights of each of a module's GEMMs."""
    own = [name for name, one in module.named_parameters(recurse=False) if one.dim() > 1]
    together = [name for name in getattr(module, "weight_names", ()) if name in own]  # concatenated for one GEMM
    rest = [name for name in own if name not in together]
    gemms = [tuple(together)] * bool(together) + [(name,) for name in rest]
    return [tuple(f"{path}.{name}" if path else name for name in gemm) for gemm in gemms]


@dataclass(frozen=True, eq=False)
class Kept:
    """Hold what delayed scaling kept of one tensor at one time.

    Attributes:
        slot: the tensor.
        history: a copy.
        scale: a copy.
        weight: the largest magnitude of what a weight is quantized from; None if that is not known, or it is none.
    """

    slot: Slot
    history: Tensor
    scale: float
    weight: float | None


def kept(
    module: nn.Module, quantized_from: Callable[[str], Tensor | None] | None = None
) -> dict[tuple[str, tuple[str, int]], Kept]:
    """Return what delayed scaling keeps now, by module and place.

    Args:
        quantized_from: returns of what numbers a weight is quantized, by its name, None where that is not known; left
            out if magnitudes of weights are not asked for.
    """

    def largest(slot: Slot) -> float | None:
        names = slot.weights if quantized_from and slot.role == "weight" else ()
        found = [quantized_from(name) for name in names] if quantized_from else []
        known = [float(x.detach().abs().max()) for x in found if x is not None]
        return max(known) if known and len(known) == len(names) else None

    return {
        (one.module, one.place): Kept(one, one.history.detach().cpu().clone(), float(one.scale), largest(one))
        for one in slots(module)
    }
