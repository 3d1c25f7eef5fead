"""Say which calls of the reference a planted mistake is about, so that a flagged stage can be checked against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from lab.corpus.models import MLP, Attention, Experts, Loss, Mistake, Model, Residual, Rotation
from parity.stages.judge import Stage
from parity.trace.trace import Call, Trace


@dataclass(frozen=True)
class Place:
    """Calls of the reference that a mistake is about.

    Attributes:
        module: a regular expression that matches the names of the submodules that make the calls.
        calls: the names of the functions; empty for all.
        backward: whether the mistake changes gradients alone.
    """

    module: str
    calls: frozenset[str] = frozenset()
    backward: bool = False

    def holds(self, call: Call) -> bool:
        """Return whether a call belongs to the place."""
        return bool(re.fullmatch(self.module, call.site[0])) and (not self.calls or call.name in self.calls)


def is_held(places: Iterable[Place], stage: Stage, trace: Trace) -> bool:
    """Return whether a stage holds a call of one of these places.

    A wrong value may spoil gradients of its stage, too, but a mistake in gradients alone can spoil no value. A gradient
    may have been changed by the call whose value it is the gradient of, or by those that read this value.

    Args:
        places: where the mistake is.
        stage: the stage.
        trace: the reference's calls.
    """
    calls = [*stage.calls, *(call for call in trace.calls if stage.backward and call.site == stage.end)]
    return any(place.holds(call) for place in places if stage.backward or not place.backward for call in calls)


@dataclass(frozen=True)
class _Step:
    """A step of the models in ``lab/corpus/models.py``, whose settings a mistake changes.

    Attributes:
        settings: the names of the settings that the step depends on.
        kinds: the classes of the submodules that compute it in the reference.
        calls: the functions that compute it; empty for all that these submodules call.
        named: a regular expression that matches the names of these submodules, if others are of the same class.
        backward: whether the step changes gradients alone.
    """

    settings: str
    kinds: tuple[type[nn.Module], ...]
    calls: str = ""
    named: str = ".*"
    backward: bool = False


_NORMS = (nn.RMSNorm, nn.LayerNorm)
_STEPS = (
    _Step("eps norm_variance eps_inside centred gain normed gain_shift", _NORMS),
    _Step("final_norms", (*_NORMS, nn.Linear), named="norm|head"),  # what is missing, or what reads one norm too many
    _Step("normed_again", (*_NORMS, Residual), "rms_norm add"),  # the sum that is normed, or what reads it
    _Step("base rotated factor low high original last_position direction interleaved rotates_twice", (Rotation,)),
    _Step("query_offset key_offset rotates_queries rotates_keys", (Rotation,)),
    _Step("rotates_values", (Attention,), "unflatten transpose repeat_interleave"),
    _Step("rotates_values", (nn.Linear,), "linear", named=r"(.*\.)?v_proj"),  # the value that is changed afterwards
    _Step("scaled_by", (Attention,), "mul"),
    _Step("window causal diagonal", (Attention,), "masked_fill"),
    _Step("softcap", (Attention,), "div tanh mul"),
    _Step("softcap_after_mask", (Attention,), "div tanh mul masked_fill"),
    _Step("sink_sign sinks_reversed", (Attention,), "cat softmax"),
    _Step("groups_interleaved heads_reversed keys_are_values", (Attention,), "transpose repeat_interleave matmul"),
    _Step("has_bias bias_twice", (nn.Linear,), "linear", named=r"(.*\.)?(o_proj|up_proj)"),
    _Step("activation limit alpha gate_last gelu_constant gelu_steepness silu_steepness", (MLP,)),
    _Step("experts_gate_last expert_activation", (MLP,)),
    _Step("chosen router_scale renormalised", (Experts,), "softmax topk sum mul div zeros_like scatter"),
    _Step("weighted experts_shifted expert_scale", (Experts,), "stack mul sum"),
    _Step("residual branch residual_from_norm", (Residual,)),
    _Step("multiplier", (Model, nn.Embedding), "mul embedding"),
    _Step("position_offset", (Model, nn.Embedding), "arange add embedding"),
    _Step("logits_divided logits_softcap", (Model,), "div tanh mul"),
    _Step("smoothing z_loss", (Loss,), "cross_entropy logsumexp square mean mul add"),
    _Step("detached", (*_NORMS, Residual), named=r"layers\.\d+\.0(\.norm)?", backward=True),
)


def places_of(mistake: Mistake, reference: nn.Module) -> tuple[Place, ...]:
    """Return the places of a mistake in a reference of ``lab/corpus/models.py``.

    A mistake in some rows, heads or channels has the place of the whole step.
    """
    return tuple(_find_places(mistake, reference))


def _find_places(mistake: Mistake, reference: nn.Module) -> Iterator[Place]:
    layers = "|".join(map(str, mistake.layers))
    inside = rf"layers\.({layers})\..*" if layers else ".*"
    for step in _STEPS:
        if set(step.settings.split()) & set(mistake.changes):
            modules = [
                re.escape(name)
                for name, module in reference.named_modules()
                if isinstance(module, step.kinds) and re.fullmatch(step.named, name) and re.fullmatch(inside, name)
            ]
            yield Place("|".join(modules), frozenset(step.calls.split()), step.backward)
