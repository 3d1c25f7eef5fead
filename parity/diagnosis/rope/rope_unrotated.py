"""Layers without rotary embedding among layers that have one (NoPE), which ports rotate like the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from parity.diagnosis.attention.attention import Attention, attentions
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.mistake import Mistake, everywhere_and_somewhere
from parity.diagnosis.rope.rotation import Rotation
from parity.watching.trace import Edit, Site, Trace

_TITLE = "rope-unwanted"


@dataclass(frozen=True)
class _Plain:
    """An attention whose query and key are not rotated."""

    name: str
    attention: Attention

    def edits(self, like: Rotation) -> tuple[Edit, ...]:
        """Both are to be rotated as another layer's are."""
        turn = _turn(like)
        return self.attention.edits(arrange=(turn, turn, None, None))


def unrotated_hypotheses(trace: Trace, module: nn.Module, kinds: Sequence[Sequence[Rotation]]) -> Iterator[Hypothesis]:
    """Layers without a rotation are rotated: all, each alone, or instead of their neighbours.

    Args:
        trace: of the reference.
        module: the reference.
        kinds: its rotations, those that are alike together.
    """
    rotated = {one.attention for kind in kinds for one in kind}
    for kind in kinds:
        like = kind[0]
        plain = [
            _Plain(attention.call.site[0], attention)
            for attention in attentions(trace)
            if attention.call.site not in rotated and _fits(trace, attention, like)
        ]
        if not plain:
            continue
        mistake = Mistake[_Plain](
            _TITLE,
            "rope in layers without",
            "pass TE no rotary_pos_emb where the reference rotates nothing; query and key are rotated",
            lambda one, like=like: one.edits(like),  # type: ignore[misc]
        )
        where = f" in {', '.join(one.name for one in plain)}"
        yield from everywhere_and_somewhere([mistake], plain, module, lambda one: one.name, where=where)
        yield from _shifted(trace, module, kind, plain)


def _shifted(
    trace: Trace, module: nn.Module, kind: Sequence[Rotation], plain: Sequence[_Plain]
) -> Iterator[Hypothesis]:
    """The rotations are those of the layer before or behind, as where the layers are counted from another number."""
    of_plain = {one.attention.call.site: one for one in plain}
    of_kind = {*of_plain, *(one.attention for one in kind)}
    sites = [attention.call.site for attention in attentions(trace) if attention.call.site in of_kind]
    told: set[tuple[Site, ...]] = set()
    for by, where in ((1, "before"), (-1, "behind")):
        sources = [sites[(i - by) % len(sites)] for i in range(len(sites))]
        changed = [
            site for site, source in zip(sites, sources, strict=True) if (site in of_plain) != (source in of_plain)
        ]
        if tuple(changed) in told:
            continue
        told.add(tuple(changed))
        added = [edit for site in changed if site in of_plain for edit in of_plain[site].edits(kind[0])]
        lost = [edit for one in kind if one.attention in changed for edit in one.edits(times=0)]
        names = ", ".join(one.name for one in plain)
        yield Hypothesis(
            _TITLE,
            f"rope of the layer {where}",
            f"leave rotary_pos_emb out in {names}; each layer is rotated, or not, as the one {where} it is in the "
            f"reference",
            module,
            (*added, *lost),
        )


def _fits(trace: Trace, attention: Attention, like: Rotation) -> bool:
    """Whether query and key are as long, and their heads as wide, as what is rotated elsewhere."""
    both = zip((attention.query, attention.key), attention.to_heads[:2], strict=True)
    shape = (len(like.angles), like.head_dim)
    return all(tuple(to_heads(trace.tensor(value)).shape[-2:]) == shape for value, to_heads in both)


def _turn(like: Rotation) -> Callable[[Tensor], Tensor]:
    """A rotation of ``[..., heads, seq, head_dim]``."""
    return replace(like, axis=-2).compute
