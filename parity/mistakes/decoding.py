"""Mistakes of ports that decode with a cache, computed in one pass over the prompt and the decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.mistakes.attention import HIDDEN, Attention, Bias, Rearrange, attentions, hidden_keys, traced_bias
from parity.mistakes.hypothesis import Hypothesis, on_tensors
from parity.mistakes.rotation import Rotation, rotations, with_positions
from parity.mistakes.usual_numbers import USUAL
from parity.trace.calls import Misfit
from parity.trace.trace import Edit, Trace

_Hides = Callable[[Tensor, Tensor], Tensor]  # maps positions of queries [q, 1] and keys [k] to which keys are hidden


def positions_of(trace: Trace) -> int | None:
    """Return how many positions the reference's attention has; None if it is not causal."""
    masks = [traced_bias(trace, one) for one in attentions(trace)]
    if not masks or len({mask.shape[-2:] for mask in masks}) > 1:
        return None
    seq: int = masks[0].shape[-1]
    future = torch.ones(seq, seq, dtype=torch.bool, device=masks[0].device).triu(1)
    is_square = masks[0].shape[-2] == seq
    return seq if is_square and all(bool(hidden_keys(mask)[..., future].all()) for mask in masks) else None


def decoding_hypotheses(trace: Trace, prompt: int) -> Iterator[Hypothesis]:
    """Yield every known mistake of a port that decodes token by token after a prompt.

    Args:
        trace: the trace of a reference whose attention is causal.
        prompt: the number of tokens in the prompt, at least 1.
    """
    found = attentions(trace)
    turned = [one for one in rotations(trace) if one.phases is not None and len(one.angles) > prompt]
    yield from _of_positions(turned, prompt)
    yield from _of_keys(found, prompt)
    yield from _of_cached_keys(found, turned, prompt)
    seq = positions_of(trace) or 0
    for slots in dict.fromkeys((seq, *USUAL.cache_lengths)):
        if slots >= seq:
            yield _of_attention(
                found,
                "cache-step",
                f"empty slots of a cache of {slots} are seen",
                "hide the slots of the cache that hold no key yet, by its length or a mask",
                prompt,
                since=prompt,
                slots=slots,
            )


def _hypothesis(title: str, described: str, repair: str, prompt: int, edits: Sequence[Edit]) -> Hypothesis:
    where = f"from position {prompt} on"
    return Hypothesis(title, f"{described} {where}", f"{repair}; {where} {described}", tuple(edits))


def _of_attention(
    found: Sequence[Attention], title: str, described: str, repair: str, prompt: int, **changes: Any
) -> Hypothesis:
    return _hypothesis(title, described, repair, prompt, [edit for one in found for edit in one.edits(**changes)])


# Wrong rotary positions of decoded tokens.


def _of_positions(turned: Sequence[Rotation], prompt: int) -> Iterator[Hypothesis]:
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "new tokens are rotated by positions that begin again at 0": lambda later: later - prompt,
        "rotary positions are one too large": lambda later: later + 1.0,
        "rotary positions are one too small": lambda later: later - 1.0,
    }
    if prompt > 1:  # else both leave all tokens unrotated, which has a plainer name
        others["each new token is rotated as the first of a sequence, by position 0"] = torch.zeros_like
        others["rotary positions stay at the last one of the prompt"] = lambda later: torch.full_like(later, prompt - 1)
    repair = (
        "rotate each new token by its place in the whole sequence (start_positions, get_seqlens_pre_step, or an offset "
        "of rotary_pos_emb)"
    )
    for described, change in others.items():
        edits = with_positions(lambda own, change=change: torch.cat((own[:prompt], change(own[prompt:]))))  # type: ignore[misc]
        made = [edit for one in turned for edit in edits(one)]
        if made:
            yield _hypothesis("rope-position", described, repair, prompt, made)


def later_in_rows(turned: Sequence[Rotation], prompts: dict[int, int], end: int) -> Hypothesis:
    """Return the mistake of counting decoded tokens from the end of the longest prompt in some rows of a batch.

    Args:
        turned: the reference's rotations.
        prompts: how many tokens the prompt of each of these rows has.
        end: how many tokens the longest prompt has.
    """

    def edits(one: Rotation) -> Iterator[Edit]:
        for made in one.edits(angles=one.angles):
            yield replace(made, compute=partial(_later, one, prompts, end), of=None)

    rows = ", ".join(map(str, prompts))
    return Hypothesis(
        "rope-position",
        f"rope positions behind {end} in rows {rows}",
        f"count positions of decoded tokens by each sequence's own length; in row{'s' * (len(prompts) > 1)} {rows} of "
        f"the batch, whose prompts are shorter, they go on from {end}, as if padding counted",
        tuple(edit for one in turned for edit in edits(one)),
    )


def _later(one: Rotation, prompts: dict[int, int], end: int, was: Tensor, x: Tensor) -> Tensor:
    if one.phases is None or x.shape[0] <= max(prompts):
        raise Misfit("its first dimension counts no rows of a batch")
    positions, frequency = one.phases
    rows = list(was)
    for row, prompt in prompts.items():
        moved = torch.cat((positions[:prompt], positions[prompt:] + (end - prompt)))
        rows[row] = replace(one, angles=moved[:, None] * frequency).compute(x[row : row + 1])[0].to(was.dtype)
    return torch.stack(rows)


# Keys that decoded tokens do not see.


def _of_keys(found: Sequence[Attention], prompt: int) -> Iterator[Hypothesis]:
    cache = "write the keys and values of each new token behind those in the cache, before attention reads it"
    length = "let attention read as many keys as the cache holds, the new token's own among them"
    corner = "align the causal mask at the bottom right for keys from a cache (causal_bottom_right)"
    overwritten = "later keys are not kept, or each overwrites the one before"
    behind = "the cache is one token behind: each new token sees itself, and not the one before it"
    hidden: dict[str, tuple[str, _Hides]] = {
        f"a token sees only the first {prompt} and itself: {overwritten}": (
            cache,
            lambda q, k: (k >= prompt) & (k < q),
        ),
        "a new token does not see its own key": (length, lambda q, k: k == q),
        "a new token does not see the one before it": (length, lambda q, k: (k == q - 1) & (q > prompt)),
        behind: (length, lambda q, k: k == q - 1),
        "the first new token overwrote the last one of the prompt": (cache, lambda q, k: k == prompt - 1),
        "new tokens do not see the prompt": (cache, lambda q, k: k < prompt),
        "each new token sees itself alone": (cache, lambda q, k: k < q),
        "the oldest key is lost": (length, lambda q, k: k == 0),
        "each new token sees the first key alone": (corner, lambda q, k: k > 0),
    }
    for described, (repair, hides) in hidden.items():
        title = "mask-corner" if repair is corner else "cache-step"
        yield _of_attention(found, title, described, repair, prompt, mask=_hiding(prompt, hides))
    shown = [edit for one in found for edit in one.masked_by(partial(_whole_prompt, prompt))]
    yield Hypothesis(
        "mask",
        f"a prompt of {prompt} without causal mask",
        f"use the causal mask in the pass over the prompt; in the port, all of its {prompt} tokens see each other",
        tuple(shown),
    )


def _hiding(prompt: int, hides: _Hides) -> Bias:
    def instead(bias: Tensor) -> Tensor:
        query, key = (torch.arange(size, device=bias.device) for size in bias.shape[-2:])
        later = query[:, None] >= prompt
        return bias.masked_fill(later & hides(query[:, None], key), HIDDEN)

    return instead


def _whole_prompt(prompt: int, bias: Tensor) -> Tensor:
    shown = bias.clone()
    shown[..., :prompt, :prompt] = 0.0
    return shown


# Keys that come out of the cache with a wrong rotation.


def _of_cached_keys(found: Sequence[Attention], turned: Sequence[Rotation], prompt: int) -> Iterator[Hypothesis]:
    of_key = {one.attention: one for one in turned if one.role == "key"}
    some = [one for one in found if one.call.site in of_key]
    others: dict[str, Callable[[Rotation], Rearrange]] = {
        "keys in the cache are not rotated": lambda one: _turn(one, -1.0),
        "keys in the cache are rotated a second time": lambda one: _turn(one, 1.0),
    }
    for described, change in others.items():
        edits = [edit for one in some for edit in one.edits(since=prompt, cached=change(of_key[one.call.site]))]
        if edits:
            repair = "keep keys in the cache as attention reads them, rotated once by their own positions"
            yield _hypothesis("cached-before-rope", described, repair, prompt, edits)


def _turn(one: Rotation, sign: float) -> Rearrange:
    """Return the rotation of ``[..., heads, seq, head_dim]``, backwards if ``sign`` is -1."""
    return replace(one, axis=-2, angles=sign * one.angles).compute


# A cache that is not emptied between sequences.


def not_reset_hypothesis(batch: int, seq: int) -> Hypothesis:
    """Return the mistake that each sequence of a batch also sees those before it, which are still in the cache."""

    def flattened(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[None] if x.dim() > 1 and tuple(x.shape[:2]) == (batch, seq) else x

    def apart(x: Tensor) -> Tensor:
        lacking = batch * seq - x.shape[1] if x.dim() > 1 else -1
        if not 0 <= lacking < seq:
            raise Misfit("it returns no number for each position")
        filled = torch.cat((x, x.new_zeros(1, lacking, *x.shape[2:])), 1)
        return filled[0].unflatten(0, (batch, seq))[:, : seq - lacking]

    return Hypothesis(
        "cache-not-reset",
        "a cache kept from sequence to sequence",
        "begin each sequence with an empty cache (InferenceParams.reset, or a new one); in the port, a sequence also "
        "sees the tokens of those before it in the batch",
        around=on_tensors(flattened, apart),
    )
