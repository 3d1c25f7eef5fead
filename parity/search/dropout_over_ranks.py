"""Find out whether ranks drop what they should: the same of a tensor that each has, and independently of others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from parity.mistakes.codes import repairable
from parity.passes.on_rank import OnRank
from parity.ranks.layout import AXES, AxisName, Degrees
from parity.result import Finding
from parity.search.over_ranks import Whole
from parity.trace.digests import Drop


def wrong_dropout(ran: Sequence[OnRank], dropped: Sequence[Whole], made: Degrees) -> Finding | None:
    """Return what ranks drop wrongly; None if nothing.

    Whether two ranks have the same tensor is seen by its bits, so no layer needs to be known: of the hidden states
    that each rank has, all must drop the same; of its own heads, or its own part of a sequence, each must drop
    independently.

    Args:
        ran: what each rank has, with what it dropped in a pass of its own.
        dropped: the tensors of that pass.
        made: how many ranks there are.
    """
    for a, b, one, other in _beside(ran, made, "tp"):
        where = f"{one.function} in the forward pass of {one.module}"
        if one.given == other.given and one.state != other.state:
            return repairable(
                "ranks-drop-differently",
                f"ranks {a} and {b} of tp have the same tensor, but drop different elements of it, at {where}",
                "draw outside of the random number tracker, from a generator with the same seed on all ranks of tp",
            )
        if one.given != other.given and one.state == other.state:
            return repairable(
                "ranks-drop-alike",
                f"ranks {a} and {b} of tp have different parts, but drop the same elements of them, at {where}",
                "use a random number tracker whose seed depends on the rank within tp, passed to TE as "
                "get_rng_state_tracker=; with sequence parallelism, fork it around the whole layer",
            )
    for whole in dropped:  # what is dropped by hand is in no call that was recorded
        if (ranks := whole.apart()) is not None:
            return repairable(
                "ranks-drop-differently",
                f"ranks {ranks[0]} and {ranks[1]} have the same {whole.kind} {whole.name} without dropout, and "
                "different ones with it: they drop different elements of a tensor that both hold",
                "draw what both drop from a generator with the same seed on both",
            )
    return None


def remarks_on_dropout(ran: Sequence[OnRank], made: Degrees) -> Iterator[str]:
    """Yield what is no mistake, but worth knowing; arguments as above."""
    yield "numbers were compared with dropout switched off"
    for axis in (axis for axis in AXES if axis != "tp"):
        for a, b, one, other in _beside(ran, made, axis):
            if one.given != other.given and one.state == other.state:
                yield (
                    f"ranks {a} and {b} of {axis} drop the same elements of other tensors, at {one.function} in the "
                    f"forward pass of {one.module}: their generators are seeded alike, as Megatron's are by default"
                )
                break


def _beside(ran: Sequence[OnRank], made: Degrees, axis: AxisName) -> Iterator[tuple[int, int, Drop, Drop]]:
    """Yield pairs of ranks along an axis with what both drop at the same place, in the order in which it is."""
    pairs = [pair for peers in made.peers(axis) for pair in itertools.combinations(peers, 2)]
    for at in range(max((len(one.drops) for one in ran), default=0)):
        for a, b in pairs:
            if at < min(len(ran[a].drops), len(ran[b].drops)):
                one, other = ran[a].drops[at], ran[b].drops[at]
                if (one.function, one.module) == (other.function, other.module):
                    yield a, b, one, other
